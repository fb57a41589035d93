"""A launcher that runs the CUDA sources on the CPU, on NumPy arrays, in place of `xformer.kernels.cupy.launch`."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xformer.kernels.cupy import launch as cuda_launch
from xformer.ops.activations import ACTIVATIONS

HEADER = Path(__file__).with_name("cuda_on_host.h")
COMPILER = None if sys.platform == "win32" else shutil.which("g++")

# Template arguments of the kernels: dtypes of arrays and of parameters, and numbers of vectors.
SAME = [("float32",), ("float64",), ("float16",), ("bfloat16",)]
WIDE = [("float32",), ("float64",)]
PAIRS = [*(dtypes * 2 for dtypes in SAME), ("float16", "float32"), ("bfloat16", "float32")]
CASTS = [(*x, *y) for x in SAME for y in SAME if x != ("float64",) or y in WIDE]
OF_ACTIVATIONS = [(*dtypes, function) for dtypes in SAME for function in ACTIVATIONS]
INSTANCES: dict[str, dict[str, list[tuple[str, ...]]]] = {
    "norms": dict.fromkeys(("normalize", "normalize_vjp"), PAIRS),
    "columns": {
        "column_sums": [*PAIRS, ("float32", "float16"), ("float32", "bfloat16")],
        "scale_rows": [
            *((q, *x * 2) for q in ("int8", "bfloat16") for x in SAME),
            *((*x, "float64" if x == ("float64",) else "float32", *x) for x in SAME),
        ],
    },
    "elementwise": {
        **dict.fromkeys(("add", "dropout"), SAME),
        **dict.fromkeys(("activation", "activation_vjp", "gated", "gated_vjp"), OF_ACTIVATIONS),
    },
    "rotate": {"rotate": SAME},
    "softmax": {
        "softmax": [(*dtypes, vectors) for dtypes in SAME for vectors in ("1", "2")],
        **dict.fromkeys(("softmax_vjp", "cross_entropy", "logsumexp"), SAME),
    },
    "topk": {
        "top_k": [(*x, size) for x in SAME for size in ("256", "2048" if x == ("float64",) else "4096")],
        "choose": [(*x, y) for x in SAME for y in ("float32", "float64")],
    },
    "embedding": dict.fromkeys(("gather", "scatter_segments", "scatter_join"), SAME),
    "experts": {
        **dict.fromkeys(("route", "fill_tiles", "collect"), SAME),
        "sum_tiles": [*(dtypes * 2 for dtypes in WIDE), ("float32", "float16"), ("float32", "bfloat16")],
    },
    "products": {"matmul": PAIRS},
    "quantized": {
        "few_rows": [
            (*x, q, rows, columns)
            for x in SAME
            if x != ("float64",)
            for q in ("int8", "bfloat16")
            for rows, columns in (("1", "1"), ("4", "2"), ("8", "2"), ("16", "2"))
        ],
    },
    "random": {"dropout_mask": [("bool",)]},
    "masking": {name: [("float16",), ("bfloat16",)] for name in ("inputs", "clear_rows", "clear_beyond")},
    "attention": {
        "attention": [(*dtypes, size) for dtypes in SAME if dtypes != ("float64",) for size in ("32", "64", "128")],
        "attention_vjp": [
            (*dtypes, size, of_keys)
            for dtypes in SAME
            if dtypes != ("float64",)
            for size in ("32", "64", "128")
            for of_keys in ("0", "1")
        ],
        "attend": [(dtype, queries) for dtype in ("float32", "float16", "bfloat16") for queries in ("1", "4")],
    },
    "optimizer": {"adam": PAIRS, "squares": SAME, "total": WIDE, "cast": CASTS},
}


def instances(file: str) -> Iterator[str]:
    """Yield the C++ names of all instances of the templates of a source."""
    for function, combinations in INSTANCES[file].items():
        yield from (cuda_launch.instance(function, dtypes) for dtypes in combinations)


class Launcher:
    """Compiles a source with all of its `INSTANCES` at the first launch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launched: list[str] = []
        self.backwards = False
        self._libraries: dict[str, Any] = {}
        self._lock = threading.Lock()  # threads and shared memory are static variables

    def launch(self, kernel: str, dtypes: tuple[str, ...], blocks: int, threads: int, *arguments: Any) -> None:
        """Run a kernel."""
        file, _, function = kernel.partition(".")
        name = cuda_launch.instance(function, dtypes)
        names = list(instances(file))
        assert name in names, f"{name} is not among INSTANCES"
        assert blocks >= 0
        assert threads % 32 == 0
        assert threads <= 1024
        if not blocks:
            return
        self.launched.append(f"{file}.{name}")
        values = [_value(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*(_address_of(value) for value in values))
        with self._lock:
            if file not in self._libraries:
                self._libraries[file] = self._compile(file)
            library = self._libraries[file]
            error = library.launch(names.index(name), blocks, threads, self.backwards, addresses)
        assert not error, f"{name}: not all threads reach a barrier"

    def _compile(self, file: str) -> Any:
        built = self.folder / f"{file}.so"
        if not built.exists():
            self._build(file).replace(built)  # at once, as processes of pytest-xdist share the folder
        library = ctypes.CDLL(str(built))
        library.launch.argtypes = [
            ctypes.c_int,
            ctypes.c_longlong,
            ctypes.c_longlong,
            ctypes.c_bool,
            ctypes.POINTER(ctypes.c_void_p),
        ]
        return library

    def _build(self, file: str) -> Path:
        code = self.folder / f"{file}.{os.getpid()}.cpp"
        calls = "\n".join(
            f"        case {place}: return on_host::run(&{name}, blocks, threads, backwards, arguments);"
            for place, name in enumerate(instances(file))
        )
        code.write_text(
            f'#include "{HEADER}"\n{cuda_launch.source(file)}\n'
            'extern "C" int launch(int place, long long blocks, long long threads, bool backwards, void** arguments)\n'
            f"{{\n    switch (place) {{\n{calls}\n    }}\n    return 2;\n}}\n",
            encoding="utf-8",
        )
        built = code.with_suffix(".so")
        options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off"]
        subprocess.run([str(COMPILER), *options, "-o", str(built), str(code)], check=True)
        return built


def _value(argument: Any) -> Any:
    """Convert an argument as CuPy does."""
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, np.ndarray) and argument.dtype.names:
        return argument  # a table, by value
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    if type(argument) is float:
        return ctypes.c_double(argument)
    assert type(argument) is int, f"an argument is a {type(argument).__name__}"
    return ctypes.c_longlong(argument)


def _address_of(value: Any) -> int:
    return value.ctypes.data if isinstance(value, np.ndarray) else ctypes.addressof(value)
