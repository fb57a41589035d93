"""Error helpers: install hints agree with pyproject.toml, and out-of-memory errors of all libraries are recognized."""

from __future__ import annotations

import errno
import tomllib
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.reference import for_each, raises_line
from xformer import errors, hints
from xformer.errors import ConfigError, OutOfMemoryError, how_to_install, is_out_of_memory, out_of_memory

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@for_each("package, extra", errors._EXTRAS.items())
def test_install_hints_name_an_extra_that_has_the_package(package, extra):
    name = {"PIL": "pillow"}.get(package, package.replace("_", "-"))
    assert any(name in requirement for requirement in EXTRAS[extra])
    assert how_to_install(package) == f'run: pip install "array-transformers[{extra}]"'


X = np.ones((2, 3, 8), "float32")


@for_each(
    "call, message",
    [
        (lambda: xf.fit(None, None, [], epochs=3), "fit got an unknown argument 'epochs'; pass steps, the number of"),
        (lambda: xf.fit(None, None, [], lr=3), "fit got an unknown argument 'lr'; did you mean 'learning_rate'?"),
        (lambda: xf.AdamW(lr=3), "unknown key 'lr' in AdamW; pass the learning rate to fit or train_step"),
        (lambda: xf.MultiHeadAttention(8, 2, init=0)(X, is_causal=True), "MultiHeadAttention got an unknown argument"),
        (
            lambda: xf.MultiHeadAttention(8, 2, init=0)(X, key_padding_mask=X),
            "MultiHeadAttention .*=masks.from_blocked",
        ),
        (lambda: xf.MultiHeadAttention(8, 2, batch_first=True), "MultiHeadAttention .* arrays are always"),
        (lambda: xf.LayerNorm(8, eps=1e-6), "LayerNorm got an unknown argument 'eps'; did you mean 'epsilon'?"),
        (lambda: xf.ops.softmax(X, dim=-1), "softmax got an unknown argument 'dim'; the softmax is over the last axis"),
        (lambda: xf.ops.cross_entropy(X, X, ignore_index=0), "cross_entropy got .*; did you mean 'pad_id'?"),
        (lambda: xf.ops.attention(X, X, X, is_causal=True), "attention got .*; did you mean 'causal'?"),
        (lambda: xf.LanguageModelConfig(hidden_size=8), "unknown key 'hidden_size' .*; did you mean 'd_model'?"),
        (lambda: xf.LanguageModel(vocabulary=8), "LanguageModel got an unknown argument 'vocabulary'; expected one of"),
    ],
)
def test_arguments_of_other_libraries_are_refused_with_a_hint(call, message):
    with raises_line(ConfigError, f"^{message.rstrip('?')}"):
        call()


def test_type_errors_of_the_body_are_not_changed():
    @errors.check_arguments()
    def function(x):
        return int(x=x)

    with pytest.raises(TypeError, match="keyword"):
        function(x=3)


class OutOfMemoryErrorOfALibrary(RuntimeError):
    pass


OutOfMemoryErrorOfALibrary.__name__ = "OutOfMemoryError"  # as torch and cupy call theirs


@for_each(
    "error, memory",
    [
        (MemoryError(), "memory"),
        (OutOfMemoryErrorOfALibrary("CUDA out of memory"), "GPU memory"),
        (RuntimeError("cublasGemmEx returned CUBLAS_STATUS_ALLOC_FAILED"), "GPU memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4 bytes."), "memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you"), "memory"),
        (RuntimeError("can't start new thread"), "memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
    ],
)
def test_out_of_memory_errors_of_all_libraries_are_recognized(error, memory):
    assert is_out_of_memory(error)
    with (
        pytest.raises(OutOfMemoryError, match=rf"^step 3 ran out of {memory}; lower batch_tokens$") as raised,
        out_of_memory("step 3", "lower batch_tokens"),
    ):
        raise error
    assert raised.value.__cause__ is error


def test_a_real_allocation_failure_is_translated():
    with pytest.raises(OutOfMemoryError), out_of_memory("it", "use less"):
        np.empty(2**58, dtype="uint8")


@for_each("error", [ValueError("memory"), RuntimeError("no"), OSError(errno.ENOSPC, "full")])
def test_other_errors_pass_through(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as raised, out_of_memory("it", "use less"):
        raise error
    assert raised.value is error


def test_a_former_name_of_a_package_names_the_new_one():
    with pytest.raises(AttributeError, match=r"'xformer.backends' has no attribute 'index_dtype'; use xp.index_dtype$"):
        _ = xf.backends.index_dtype
    with pytest.raises(ImportError, match="StaticKVCache"):
        exec("from xformer.layers import StaticKVCache")
    assert not hasattr(xf.layers, "Unknown")


def test_a_name_has_one_hint_in_a_table():
    lines = Path(hints.__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(": ", 1) for line in lines if line and line[0] not in "#["]
    assert all(len(pair) == 2 for pair in pairs)
    assert sum(len(names.split()) for names, _ in pairs) == sum(map(len, hints._TABLES.values()))
