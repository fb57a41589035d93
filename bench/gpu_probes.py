"""Questions that only a GPU can answer: `python bench/gpu.py probe DIR` runs each of them in a process of its own.

`python bench/gpu_probes.py NAME` runs one and prints its answers as a line of JSON.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from workloads import decoding, training

from xformer import Rng, vjp
from xformer.benchmarks import parts
from xformer.benchmarks.computation import Backend
from xformer.ops import (
    adam,
    cast,
    cross_entropy,
    dropout,
    embedding,
    explain,
    gelu,
    layer_norm,
    linear,
    relu,
    rms_norm,
    softmax,
    squared_norm,
)
from xformer.ops import attention as attend

BYTES_PER_SECOND = 4.3e12  # memory bandwidth of an H200, measured by copying
MODEL = {"length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": 32_000, "dtype": "bfloat16"}
PACKAGES = "cupy-cuda13x", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "torch", "transformers", "numpy"
_REPEATS = 10  # launches between two events
Answers = dict[str, Any]


def main(name: str) -> None:
    """Run a probe and print its answers."""
    print(json.dumps(PROBES[name]()))


def libraries() -> Answers:
    """Report the versions, and which library serves a linear map and attention; these are the first work of CuPy."""
    cupy, backend = importlib.import_module("cupy"), Backend("cupy", "bfloat16")
    with warnings.catch_warnings(record=True) as caught:
        linear_by = explain(lambda: linear(normal(backend, 256, 64), normal(backend, 64, 64), normal(backend, 64)))
        query, key, value = (normal(backend, 8, 8, 512, 128) for _ in range(3))
        attention_by = explain(lambda: value_and_pullback(functools.partial(attend, causal=True), query, key, value))
        backend.wait(None)
    runtime, properties = cupy.cuda.runtime, cupy.cuda.runtime.getDeviceProperties(0)
    frontend, reason = importlib.import_module("xformer.kernels.cupy.cudnn_plans").frontend()
    messages = sorted({str(warning.message) for warning in caught})
    if reason is None and "attention on cupy: cudnn.attention" not in attention_by:
        reason = attention_by
    reason = reason or next((message for message in messages if "cuDNN" in message), None)
    return {
        "device": f"{properties['name'].decode()}, {properties['multiProcessorCount']} multiprocessors, "
        f"{runtime.memGetInfo()[1] / 1e9:.0f} GB",
        "CUDA": f"driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}",
        "cuBLAS": cublas(),
        "cuDNN": None if frontend is None else f"{frontend.backend_version()}, frontend {frontend.__version__}",
        "packages": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
        "linear": linear_by,
        "attention": attention_by,
        "warnings": messages,
        "cuDNN does not serve": reason,
    }


def cublas() -> str:
    """Return the version of cuBLAS and the class that calls it: CuPy's binding cannot be captured in a CUDA graph."""
    binding, handle = importlib.import_module("xformer.kernels.cupy.cublas").binding_and_handle()
    version = importlib.import_module("cupy_backends.cuda.libs.cublas").getVersion(handle)
    return f"{version}, called by {getattr(binding, '__name__', type(binding).__name__)}"


def version(package: str) -> str:
    """Return the version of an installed package."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "not installed"


def normal(backend: Backend, *shape: int) -> Any:
    """Return random numbers, of which large arrays repeat the first million."""
    size = math.prod(shape)
    sample = backend.array(np.random.default_rng(size).standard_normal(min(size, 2**20), dtype="float32"))
    return backend.xp.reshape(backend.xp.tile(sample, (-(-size // len(sample)),))[:size], shape)


def value_and_pullback(function: Callable[..., Any], *arrays: Any) -> Any:
    """Run a function and its derivative."""
    output, pullback = vjp(function, *arrays)
    return pullback(output)


def nan() -> Answers:
    """Report whether NaN survives a linear map with ReLU, which cuBLASLt documents as max(x, 0)."""
    return {dtype: keeps_nan(Backend("cupy", dtype)) for dtype in ("float32", "float16", "bfloat16")}


def keeps_nan(backend: Backend) -> str:
    """Return whether rows with NaN, and no others, have NaN after a linear map with ReLU."""
    x, xp = normal(backend, 256, 64), backend.xp
    x[7, 3] = math.nan
    y = linear(x, normal(backend, 64, 128), normal(backend, 128), activation="relu")
    rows = xp.any(xp.isnan(xp.astype(y, xp.float32)), axis=-1)
    return "kept" if bool(rows[7]) and int(xp.count_nonzero(rows)) == 1 else f"lost: {y[7, :4]}"


def ceilings() -> Answers:
    """Measure what the GPU reaches: a copy, and a matrix product with a bias."""
    backend = Backend("cupy", "bfloat16")
    x, size = normal(backend, 2**31), 8192
    y = backend.xp.empty_like(x)
    copy = event_seconds(lambda: backend.xp.copyto(y, x))
    a, b, bias = normal(backend, size, size), normal(backend, size, size), normal(backend, size)
    product = event_seconds(lambda: linear(a, b, bias))
    return {
        "copy": f"{2 * x.nbytes / copy / 1e12:.2f} TB/s",
        "linear map, bfloat16, 8192": f"{2 * size**3 / product / 1e12:.0f} TFLOP/s",
    }


def event_seconds(run: Callable[[], Any]) -> float:
    """Return the time on the GPU of one call, from several calls between two events."""
    cuda = importlib.import_module("cupy").cuda
    run()
    start, stop = cuda.Event(), cuda.Event()
    start.record()
    for _ in range(_REPEATS):
        run()
    stop.record()
    stop.synchronize()
    return float(cuda.get_elapsed_time(start, stop)) / 1e3 / _REPEATS


def bandwidth() -> Answers:
    """Measure every CUDA kernel of the package: bytes moved / time, and its share of the memory bandwidth."""
    launcher = importlib.import_module("xformer.kernels.cupy.launch")
    launch, seconds, moved = launcher.launch, dict[str, float](), dict[str, int]()

    def measured(kernel: str, dtypes: tuple[str, ...], blocks: int, threads: int, *arguments: Any) -> None:
        first = next((array for array in arguments if hasattr(array, "nbytes")), np.zeros(0))
        name = f"{kernel} {'x'.join(map(str, first.shape))} {dtypes[0]}"
        seconds[name] = event_seconds(lambda: launch(kernel, dtypes, blocks, threads, *arguments))
        moved[name] = bytes_moved(kernel, dtypes, arguments)

    launcher.launch = measured
    failures = {}
    for name, run in operations(Backend("cupy", "bfloat16")):
        try:
            run()
        except Exception as error:  # noqa: BLE001 - the other kernels are still measured
            failures[name] = f"failed: {error}"
    rates = {name: moved[name] / seconds[name] for name in seconds if moved[name] > 1e8}  # others stay in the cache
    return failures | {
        name: f"{1e6 * seconds[name]:.0f} us, {rate / 1e12:.2f} TB/s, {rate / BYTES_PER_SECOND:.0%}"
        for name, rate in rates.items()
    }


def bytes_moved(kernel: str, dtypes: tuple[str, ...], arguments: tuple[Any, ...]) -> int:
    """Return the bytes that a kernel must move, which are those of its arrays except for the kernels named here."""
    arrays = [array for array in arguments if hasattr(array, "nbytes")]
    table = next((array for array in arrays if array.dtype.names), None)
    if table is not None:  # the sizes of the arrays, whose addresses are passed by value
        size = {"float32": 4, "float64": 8}
        widths = [size.get(name, 2) for name in dtypes]
        per_element = {"adam": 7 * widths[0], "cast": sum(widths)}.get(kernel.split(".")[1], widths[0])
        return int(table["sizes"].sum()) * per_element
    total = sum(array.nbytes for array in arrays)
    if kernel == "embedding.gather":  # reads only the rows that it writes
        total += arrays[2].nbytes - arrays[0].nbytes
    elif kernel == "embedding.scatter_join":  # writes few rows
        total -= arrays[3].nbytes
    return int(total)


def operations(backend: Backend, rows: int = 131_072) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield operations that launch all kernels, forward and backward, on arrays larger than the caches."""
    of, floats = functools.partial(normal, backend), Backend(backend.name, "float32")
    both = functools.partial(functools.partial, value_and_pullback)
    for n in (512, 1024, 4096):
        x, weight, bias = of(1024 * rows // n, n), of(n), of(n)
        yield f"layer_norm {n}", both(layer_norm, x, weight, bias)
        yield f"rms_norm {n}", both(rms_norm, x, weight)
    for n in (32, 128, 512, 2048):
        yield f"softmax {n}", both(softmax, of(1024 * rows // n, n))
    labels = backend.array(np.random.default_rng(0).integers(1, 16_000, (rows // 4,)))
    yield (
        "cross_entropy",
        both(lambda logits: cross_entropy(logits, labels, label_smoothing=0.1), of(rows // 4, 16_000)),
    )
    x, y = of(rows, 1024), of(rows, 1024)
    yield "add", lambda: backend.xp.add(x, y)
    for activation in (relu, gelu):
        yield activation.__name__, both(activation, x)
    mask, probability = Rng(0).bernoulli(0.9, x.shape, backend.xp)
    yield "dropout mask", lambda: Rng(0).bernoulli(0.9, x.shape, backend.xp)
    yield "dropout", both(lambda x: dropout(x, mask, probability), x)
    ids = backend.array(np.random.default_rng(0).integers(0, 32_000, (rows,)))
    yield "embedding", both(lambda table: embedding(table, ids), of(32_000, 1024))
    yield "linear", both(linear, x, of(1024, 1024), of(1024))
    parameters = [[normal(floats, rows // 4, 1024) for _ in range(4)] for _ in range(4)]
    settings = {"learning_rate": 1e-3, "step": 1, "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9, "donate": True}
    yield "adam", lambda: adam([(p, g, m, m * m) for p, g, m, _ in parameters], **settings)
    matrices = [slot[0] for slot in parameters]
    yield "squared_norm", both(squared_norm, *matrices)
    yield "cast", lambda: cast(*matrices, dtype=backend.dtype)


def overhead() -> Answers:
    """Measure the microseconds of the host for small operations, which it enqueues without waiting."""
    backend, torch = Backend("cupy", "bfloat16"), importlib.import_module("torch")
    xp, x, weight, bias = backend.xp, normal(backend, 128, 128), normal(backend, 128, 128), normal(backend, 128)
    query = normal(backend, 8, 8, 256, 64)  # enough scores for cuDNN
    a, q = torch.randn(128, 128, device="cuda").bfloat16(), torch.randn(8, 8, 256, 64, device="cuda").bfloat16()
    functional = torch.nn.functional
    calls: dict[str, Callable[[], Any]] = {
        "empty": lambda: xp.empty((128, 128), dtype=x.dtype),
        "add (CuPy)": lambda: x + x,
        "layer_norm": lambda: layer_norm(x, bias, bias),
        "softmax": lambda: softmax(x),
        "linear without bias": lambda: linear(x, weight),
        "linear": lambda: linear(x, weight, bias),
        "attention": lambda: attend(query, query, query, causal=True),
        "torch: add": lambda: a + a,
        "torch: layer_norm": lambda: functional.layer_norm(a, (128,), a[0], a[0]),
        "torch: linear": lambda: functional.linear(a, a, a[0]),
        "torch: attention": lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True),
    }
    with torch.inference_mode():
        return {name: f"{1e6 * host_seconds(call, backend.wait):.1f} us" for name, call in calls.items()}


def host_seconds(call: Callable[[], Any], wait: Any, repeats: int = 1000) -> float:
    """Return the time of the host for one call, without the wait for the GPU."""
    for _ in range(20):
        call()
    wait(None)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    seconds = time.perf_counter() - start
    wait(None)
    return seconds / repeats


def capture() -> Answers:
    """Report whether CUDA graphs can be captured, whether a launch computes the same, and how long it takes."""
    backend = Backend("cupy", "bfloat16")
    xp, capture_graph = backend.xp, backend.xp.graph_capture()
    x, weight, bias = normal(backend, 32, 512), normal(backend, 512, 512), normal(backend, 512)
    out = xp.zeros_like(x)

    def step(copy: Any = None) -> None:
        y = x
        for _ in range(20):
            y = layer_norm(linear(y, weight, bias), bias, bias)
        out[...] = y

    step()
    expected = xp.astype(out, xp.float32)
    with warnings.catch_warnings(record=True) as caught:
        launch = capture_graph(step)
        for _ in range(4):
            out[...] = 0.0
            launch()
    equal = bool(xp.all(xp.astype(out, xp.float32) == expected))
    return {
        "step of 40 operations": "; ".join(str(warning.message) for warning in caught) or "captured",
        "a launch computes the same": equal,
        "step, one by one": f"{1e6 * event_seconds(step):.0f} us",
        "step, launched": f"{1e6 * event_seconds(launch):.0f} us",
    }


def decode() -> Answers:
    """Report whether greedy search runs its steps as CUDA graphs, its time, and the growth of memory over 20 calls."""
    computation = decoding.build({**MODEL, "batch": 1, "beam": 1, "dtype": "float32", "backend": "cupy"})
    info = importlib.import_module("cupy").cuda.runtime.memGetInfo
    with warnings.catch_warnings(record=True) as caught:
        computation.step(0)
        computation.step(0)
        free, start = info()[0], time.perf_counter()
        for _ in range(20):
            computation.step(0)
    return {
        "warnings": sorted({str(warning.message) for warning in caught}),
        f"{decoding.NUM_TOKENS} tokens": f"{1e3 * (time.perf_counter() - start) / 20:.1f} ms",
        "memory of 20 calls": f"{(free - info()[0]) / 1e6:.0f} MB",
    }


def training_memory(tokens: int = 65_536) -> Answers:
    """Measure the memory of a training step."""
    computation = training.build({**train_settings(tokens), "backend": "cupy"})
    seconds, (free, total) = [], importlib.import_module("cupy").cuda.runtime.memGetInfo()
    for index in range(3):
        start = time.perf_counter()
        computation.wait(computation.step(index))
        seconds.append(time.perf_counter() - start)
    used = total - importlib.import_module("cupy").cuda.runtime.memGetInfo()[0]
    return {
        f"xformer, {tokens} tokens": f"{used / 1e9:.1f} of {total / 1e9:.0f} GB, {1e3 * min(seconds):.0f} ms",
        "free before the first step": f"{free / 1e9:.1f} GB",
    }


def torch_training_memory(tokens: int = 65_536) -> Answers:
    """Measure the memory of the same step by torch, eager."""
    torch, baseline = importlib.import_module("torch"), importlib.import_module("baselines.torch_training")
    computation = baseline.build({**train_settings(tokens), "device": "cuda"})
    computation.wait(computation.step(0))
    return {f"torch, {tokens} tokens": f"{torch.cuda.max_memory_reserved() / 1e9:.1f} GB"}


def train_settings(tokens: int) -> dict[str, Any]:
    """Return the settings of a training step on this number of tokens."""
    return training.workload({**MODEL, "batch": tokens // MODEL["length"]}).settings


def training_kernels(tokens: int = 32_768) -> Answers:
    """List the kernels of a training step with their share of the time on the GPU."""
    computation = training.build({**train_settings(tokens), "backend": "cupy"})
    times = kernel_times(lambda index: computation.wait(computation.step(index)), 3)
    total = sum(milliseconds for milliseconds, _ in times.values())
    shares = {"all": f"{total:.1f} ms, {sum(count for _, count in times.values()):.0f} launches"}
    for name, (milliseconds, count) in [*times.items()][:25]:
        shares[name] = f"{milliseconds:.2f} ms, {milliseconds / total:.0%}, {count:.0f} launches"
    return shares


def attention_kernels() -> Answers:
    """Name the kernels that run attention, ours and those of torch, with their times."""
    os.environ["XFORMER_DETERMINISTIC"] = "0"  # as in torch
    answers = {}
    for head_dim in (128, 64):
        sizes = {"batch": 4, "heads": 2048 // head_dim, "length": 4096, "head_dim": head_dim, "dtype": "bfloat16"}
        settings = {**sizes, "causal": True, "padded": False, "backward": True, "part": "attention"}
        others = importlib.import_module("baselines.torch_attention")
        for label, computation in (
            ("xformer", parts.build({**settings, "backend": "cupy"})),
            ("torch", others.build_attention({**settings, "device": "cuda"})),
        ):
            times = kernel_times(lambda index, run=computation: run.wait(run.step(index)), 5)
            for name, (milliseconds, count) in [*times.items()][:6]:
                answers[f"{label} {head_dim}: {name}"] = f"{milliseconds:.3f} ms, {count:.0f} launches"
    return answers


def kernel_times(step: Callable[[int], Any], steps: int) -> dict[str, tuple[float, float]]:
    """Return the milliseconds and launches of each kernel in a step, longest first, from torch's profiler."""
    profiler = importlib.import_module("torch.profiler")
    for index in range(3):
        step(index)
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        for index in range(steps):
            step(index)
    times: dict[str, tuple[float, float]] = {}
    for event in profile.events():
        if event.device_type.name == "CUDA":
            milliseconds, count = times.get(event.name[:100], (0.0, 0.0))
            times[event.name[:100]] = milliseconds + event.time_range.elapsed_us() / 1e3 / steps, count + 1 / steps
    return dict(sorted(times.items(), key=lambda item: -item[1][0]))


PROBES = {
    probe.__name__: probe
    for probe in (
        libraries,
        nan,
        ceilings,
        bandwidth,
        capture,
        overhead,
        decode,
        attention_kernels,
        training_memory,
        torch_training_memory,
        training_kernels,
    )
}

if __name__ == "__main__":
    main(sys.argv[1])
