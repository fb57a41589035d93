"""Finding libraries, and the facts about them that the standard leaves out."""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import for_each, raises_line
from xformer.backends import (
    BACKENDS,
    accumulation_dtype,
    array_namespace,
    check_same_device,
    dtype_name,
    from_host,
    is_floating,
    is_integer,
    resolve,
    to_host,
)
from xformer.backends import library as libraries
from xformer.errors import BackendError


@for_each("name", BACKENDS)
def test_a_library_may_be_a_module_its_twin_or_a_name(name):
    expected = library_or_skip(name)
    assert resolve(name) is expected
    assert resolve(importlib.import_module(name)) is expected
    assert resolve(expected) is expected
    assert expected.name == name
    assert array_namespace(expected.ones(3)) is expected


def test_unknown_libraries():
    for bad in ("tensorflow", "", "Numpy", "math.nothing", "not a name"):
        with raises_line(
            BackendError, f"backend {bad!r} is unknown; expected one of numpy, cupy, torch, jax, array_api"
        ):
            resolve(bad)
    for bad, near in (("pytorch", "torch"), ("np", "numpy"), ("jnp", "jax")):
        with raises_line(BackendError, f"backend {bad!r} is unknown; .*; did you mean {near!r}"):
            resolve(bad)
    for bad in (None, 3, sys, object()):
        with raises_line(
            BackendError, "xp is .*; expected one of numpy, cupy, torch, jax, array_api_strict, mlx, ndonnx, as a"
        ):
            resolve(bad)


def test_a_library_that_cannot_be_imported_says_why(monkeypatch, tmp_path):
    (tmp_path / "broken_library.py").write_text("import a_package_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with raises_line(
        BackendError,
        "'broken_library' is installed but cannot be imported: No module named 'a_package_that_is_missing'",
    ):
        resolve("broken_library")


def test_a_namespace_may_be_an_attribute_of_a_module(monkeypatch, tmp_path):
    (tmp_path / "of_namespaces.py").write_text("import types, array_api_strict\nstrict = array_api_strict")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("of_namespaces.strict") is resolve("array_api_strict")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("cupy", r"pip install \"array-transformers\[cuda\]\""),
        ("torch", r"pip install \"array-transformers\[torch\]\""),
        ("jax", r"pip install \"array-transformers\[jax\]\""),
        ("array_api_strict", "pip install array_api_strict"),
    ],
)
def test_libraries_that_are_not_installed(monkeypatch, name, how):
    def missing(module):
        raise ModuleNotFoundError(f"No module named {module!r}")

    monkeypatch.setattr(libraries, "_LIBRARIES", {})
    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with raises_line(BackendError, f"backend '{name}' is not installed; run: {how}$"):
        resolve(name)


def test_array_namespace_of_several(xp):
    ones = xp.ones(2)
    assert array_namespace(None, 1.0, ones, True, ones) is xp


def test_array_namespace_of_numpy_numbers():
    numpy = resolve("numpy")
    assert array_namespace(np.float32(1.0)) is numpy
    assert array_namespace(np.sum(np.ones(3))) is numpy  # a numpy.float64, which is a Python float as well
    torch = library_or_skip("torch")
    assert array_namespace(torch.ones(2), np.float64(2.0)) is torch


def test_array_namespace_without_arrays():
    with raises_line(BackendError, r"no array among the arguments \(float, NoneType\); expected at least one"):
        array_namespace(1.0, None)
    with raises_line(BackendError, r"got a builtins\.list; expected an array of numpy, cupy"):
        array_namespace([1.0])
    with raises_line(BackendError, r"got a builtins\.str"):
        array_namespace(np.ones(2), "x")


def test_arrays_of_two_libraries():
    torch = library_or_skip("torch")
    with raises_line(BackendError, r"arrays of numpy and torch were mixed; move one over, e\.g\. model\.to\(xp\)"):
        array_namespace(np.ones(2), torch.ones(2))


def test_dtypes_have_one_name_everywhere(xp):
    for name in ("float32", "float64", "int32", "int64", "bool"):
        dtype = xp.dtype_named(name)
        assert dtype_name(dtype) == dtype_name(xp.zeros(1, dtype=dtype).dtype) == name
        assert is_floating(dtype) == name.startswith("float")
        assert is_integer(dtype) == name.startswith("int")


def test_a_dtype_of_another_library_stands_for_its_name(xp):
    for foreign in (np.float32, np.dtype("float32"), "float32"):
        assert xp.ones(1, dtype=xp.dtype_named(foreign)).dtype == xp.ones(1, dtype=xp.float32).dtype
    torch = library_or_skip("torch")
    assert resolve("numpy").dtype_named(torch.float32) is np.float32


def test_dtypes_that_are_not_there():
    with raises_line(BackendError, "numpy has no dtype 'float31'; expected e.g. 'float32' or 'float64'"):
        resolve("numpy").dtype_named("float31")
    with raises_line(BackendError, "dtype is bool; parameters need a floating dtype"):
        resolve("numpy").default_float("bool")


def test_half_precision_is_summed_in_single():
    torch = library_or_skip("torch")
    names = {
        name: dtype_name(accumulation_dtype(torch, getattr(torch, name))) for name in ("bfloat16", "float16", "float64")
    }
    assert names == {"bfloat16": "float32", "float16": "float32", "float64": "float64"}


@for_each("dtype", ["float32", "float64", "int32", "bool"])
def test_from_the_host_and_back(xp, dtype):
    host = np.asarray([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    for data in (host, host.T.copy().T, host[:, ::2], np.asarray(3).astype(dtype)):
        there = from_host(xp, data)
        assert array_namespace(there) is xp
        back = to_host(there)
        assert back.dtype == data.dtype
        np.testing.assert_array_equal(back, data)
    frozen = host.copy()
    frozen.flags.writeable = False
    assert_close(from_host(xp, frozen), host, xp=xp)
    assert dtype_name(from_host(xp, host, dtype="float32").dtype) == "float32"


def test_arrays_on_two_devices():
    strict = library_or_skip("array_api_strict")
    here, there = strict.ones(2), strict.ones(2, device=strict.Device("device1"))
    check_same_device((here, here))
    with raises_line(BackendError, "arrays on different devices were mixed: .*; move one over with model.to"):
        check_same_device((here, there))


def test_what_can_be_read_without_waiting(xp):
    assert array_namespace(xp.ones(2)).is_host_accessible(xp.ones(2)) == (xp.name != "cupy")


def test_jax_as_it_is_without_64_bits():
    """In a process of its own, since the other tests switch 64 bits on."""
    library_or_skip("jax")
    script = """
import warnings
warnings.simplefilter("error")
import jax.numpy as jnp, numpy as np
from tests.reference import SMALL, SOURCE
from xformer import Transformer, TransformerConfig
from xformer.errors import BackendError
model = Transformer(TransformerConfig(**{**SMALL, "num_encoder_layers": 0, "num_decoder_layers": 0}), xp=jnp)
print(*(model.source_ids(ids).dtype for ids in (SOURCE, SOURCE.astype("uint8"), jnp.asarray(SOURCE.astype("int16")))))
for make in (lambda: Transformer(model.config, xp=jnp, dtype="float64"),
             lambda: Transformer(model.config, xp=np, dtype="float64").to(jnp)):
    try:
        print(make().source_embedding.weight.dtype)
    except BackendError as error:
        print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert result.stderr == ""
    first, *errors = result.stdout.splitlines()
    assert first == "int32 int32 int32"
    assert errors == ["jax disables float64 by default; call jax.config.update('jax_enable_x64', True) first"] * 2


def test_index_dtype(xp):
    assert dtype_name(xp.index_dtype) == "int64"


def test_threads_get_the_same_library_once_it_is_ready():
    program = """
import sys, threading
import torch
import xformer as xf
sys.setswitchinterval(1e-5)
models, errors = [], []
config = xf.LanguageModelConfig(vocab_size=9, d_model=8, num_heads=2, d_ff=8, num_layers=1)
def build():
    try:
        models.append(xf.LanguageModel(config, xp="torch", seed=0))
    except Exception as error:
        errors.append(error)
threads = [threading.Thread(target=build) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert not errors and len(models) == 4, errors
"""
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_library_is_pickled_by_its_name():
    for xp in (array_namespace(np.zeros(2)), resolve("array_api_strict")):
        assert pickle.loads(pickle.dumps(xp)) is xp
        assert copy.deepcopy(xp) is xp


def test_namespaces_that_are_made_for_each_call_are_not_kept():
    class Made(types.SimpleNamespace):
        __hash__ = None

    functions = {name: getattr(np, name) for name in dir(np) if not name.startswith("_")}
    before = len(libraries.LIBRARIES)
    for _ in range(3):
        libraries.complete(Made(**functions, __name__="made", __array_namespace_info__=np.__array_namespace_info__))
    gc.collect()
    assert len(libraries.LIBRARIES) == before
