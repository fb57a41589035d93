"""Sums of the native library have one order: rows have the same bits alone, among others, padded and step by step."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import xformer as xf
from tests.reference import for_each
from xformer import native
from xformer.errors import ConfigError

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native library was not compiled")
ROWS = (1, 2, 3, 5, 8, 9, 12, 13, 20)


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def product(x, w, *more, operation="matmul", columns=None):
    out = np.empty((len(x), w.shape[1] if columns is None else columns), np.float32)
    native.call(operation, (x, w, out, *more))
    return out


@for_each("dtype", ("float32", "int8", "bfloat16"))
@for_each("depth", (1, 7, 16, 31, 300, 513))
@for_each("columns", (1, 5, 16, 33, 100))
def test_rows_and_layouts_do_not_change_products(dtype, depth, columns):
    x, w, bias, scales = normal(40, depth), normal(columns, depth), normal(columns), None
    if dtype != "float32":
        scales = normal(columns)
        w = (w * 40).clip(-127, 127).astype(np.int8) if dtype == "int8" else (w.view(np.uint32) >> 16).astype(np.uint16)
    expected = product(x, w.T, bias, scales)
    for layout in (w.T, np.ascontiguousarray(w.T)):
        for rows in (*ROWS, 40):
            assert np.array_equal(product(x[:rows].copy(), layout, bias, scales), expected[:rows])


def test_many_rows_do_not_change_products(reproducible):
    x, w = normal(200, 700), normal(700, 500)  # so many that the BLAS library would compute them
    expected = product(x, w)
    for layout in (w, np.asfortranarray(w)):
        for rows in (*ROWS, 200):
            assert np.array_equal(product(x[:rows].copy(), layout), expected[:rows])


@for_each("block, values", ((18, 32), (20, 32), (22, 32), (24, 32), (34, 32), (144, 256), (176, 256), (210, 256)))
def test_rows_do_not_change_products_with_blocks(block, values, reproducible):
    for count, columns in ((1, 3), (3, 16), (9, 33)):
        blocks = np.random.default_rng(0).integers(0, 60, (columns, count, block)).astype(np.uint8)
        x = normal(300, count * values)
        expected = product(x, blocks, operation="matmul_blocks", columns=columns)
        for rows in ROWS:
            one = product(x[7 : 7 + rows].copy(), blocks, operation="matmul_blocks", columns=columns)
            assert np.array_equal(one, expected[7 : 7 + rows])


def attention(query, key, value, mask=None, *, causal=False, statistics=False):
    out = np.empty((*query.shape[:3], value.shape[3]), np.float32)
    saved = np.empty((2, *query.shape[:3]), np.float32) if statistics else None
    native.call("attention", (query, key, value, mask, None, None, out, saved), causal, n0=0.37, n1=1.0)
    return out


@for_each("features", (4, 20, 64))
@for_each("length", (1, 3, 17, 64, 65, 130, 300))
@for_each("causal", (False, True))
def test_padding_and_steps_do_not_change_attention(features, length, causal):
    query, key, value = (normal(2, 3, length, features) * scale for scale in (1, 2, 3))
    expected = attention(query, key, value, causal=causal)
    assert np.array_equal(attention(query, key, value, causal=causal, statistics=True), expected)
    for left, right in ((0, 5), (3, 0), (70, 9)):
        size = left + length + right
        mask = np.zeros((2, 1, size, size), bool)
        mask[..., left : left + length] = True
        mask &= np.tri(size, dtype=bool) | (not causal)
        padded = [np.pad(x, ((0, 0), (0, 0), (left, right), (0, 0)), constant_values=7) for x in (query, key, value)]
        masks = [mask] if causal else [mask, mask[:, :, :1, :]]
        for each in masks:
            assert np.array_equal(attention(*padded, each)[:, :, left : left + length], expected)
    for end in {1, length // 2, length - 1, length} - {0} if causal else ():
        for count in (1, 5, 8, 9):
            new = slice(max(0, end - count), end)
            step = attention(query[:, :, new].copy(), key[:, :, :end], value[:, :, :end], causal=True)
            assert np.array_equal(step, expected[:, :, new])


def test_products_of_the_namespace_have_the_order_of_layers(reproducible):
    x, w = normal(3, 200, 700), normal(700, 500)  # so many that the BLAS library would compute them
    xp = xf.array_namespace(x)
    parts = [xp.matmul(x[i, j : j + 7], w) for i in range(3) for j in range(0, 200, 7)]
    expected = np.concatenate(parts).reshape(3, 200, 500)
    jitted = xf.jit(lambda x, w: x @ w)
    results = [xp.matmul(x, w), xf.ops.linear(x.reshape(600, 700), w).reshape(3, 200, 500), jitted(x, w), jitted(x, w)]
    assert all(np.array_equal(result, expected) for result in results)
    assert np.array_equal(xp.matmul(x[0, 0], w), expected[0, 0])
    assert np.array_equal(xp.matmul(x, w[:, 3]), expected[..., 3])
    assert xp.matmul(x[0, 0], w[:, 3]) == expected[0, 0, 3]
    assert np.array_equal(xp.vecdot(x[0, 0], w.T), expected[0, 0])
    assert np.array_equal(xp.vecdot(x[..., None], w[:, 3:4], axis=-2)[..., 0], expected[..., 3])
    for function in (xp.linalg.matmul, lambda x, w: xf.array_namespace(x).tensordot(x, w, axes=1)):
        assert np.array_equal(function(x, w), expected)
    for call in (jitted, lambda *arrays: xf.vjp(function, *arrays)[0], xf.jit(function)):
        assert np.array_equal(call(x, w), expected)
    xf.use_reproducible_algorithms(False)
    assert np.array_equal(jitted(x, w), x @ w)


def test_arrays_of_any_kind_are_multiplied_in_the_same_order(reproducible, tmp_path):
    x, w = normal(200, 700), normal(700, 500)
    mapped = np.memmap(tmp_path / "w", np.float32, "w+", shape=w.shape)
    mapped[...] = w
    fields = np.zeros(w.shape, [("byte", "i1"), ("w", "f4")])
    fields["w"] = half = w.astype(np.float16)
    xp, seven = xf.array_namespace(x), x.reshape(1, 1, 2, 1, 1, 100, 700)
    expected = xp.matmul(x, w), xp.matmul(x, half.astype(np.float32))
    for each in (mapped, w.astype(">f4")):
        assert np.array_equal(xp.matmul(x, each), expected[0])
    for each in (half, fields["w"]):
        assert np.array_equal(xp.matmul(x, each), expected[1])
    assert np.array_equal(xp.matmul(seven, w).reshape(200, 500), expected[0])
    assert np.array_equal(xp.matmul(seven, w.reshape(1, 1, 1, 1, 1, 700, 500)).reshape(200, 500), expected[0])

    for function in (xf.ops.linear, lambda *arrays: xf.vjp(xf.ops.linear, *arrays)[0], xf.jit(xf.ops.linear)):
        assert np.array_equal(function(x, mapped), expected[0])


def test_the_blas_library_sums_in_another_order(reproducible):
    """So the tests above would notice that it is used."""
    xf.use_reproducible_algorithms(False)
    x, w = normal(600, 700), normal(700, 500)
    # With AVX-512, products do not use it; those that NumPy computes do.
    multiply = np.matmul if native.level() == "avx512" else product
    others = {str(multiply(x[:rows].copy(), w)[0].tobytes()) for rows in (1, 600)}
    assert len(others) == 2 or "openblas" not in str(np.show_config(mode="dicts")).lower()


@for_each(
    "environment, reason",
    [
        ({"XFORMER_NATIVE": "off"}, "need the native library with AVX2, AVX-512 or NEON, but XFORMER_NATIVE=off"),
        ({"XFORMER_NATIVE": "baseline"}, "need the native library with AVX2, AVX-512 or NEON, but it "),
        ({"XFORMER_KERNELS": "no-cudnn,no-native"}, "XFORMER_KERNELS is no-native"),
        ({"XFORMER_KERNELS": "portable"}, "XFORMER_KERNELS is portable"),
        ({"XFORMER_REPRODUCIBLE": "yes"}, "XFORMER_REPRODUCIBLE is 'yes'; expected 0 or 1"),
        ({"XFORMER_REPRODUCIBLE": "", "XFORMER_BLAS": "0"}, "results (XFORMER_BLAS=0) need"),
    ],
)
def test_the_mode_is_refused_in_one_line(environment, reason, monkeypatch):
    monkeypatch.setenv("XFORMER_REPRODUCIBLE", "1")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    program = "import numpy as np, xformer as xf; xf.ops.gelu(np.ones(3, np.float32))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert reason in done.stderr.splitlines()[-1]


def test_a_program_that_only_takes_the_namespace_has_the_products_of_the_mode():
    program = "import numpy as np, xformer as xf; print(xf.array_namespace(np.ones(3)).matmul.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "xformer.native\n"


def test_kernels_that_are_switched_off_refuse_the_mode(mode, monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", "portable")
    with pytest.raises(ConfigError, match="XFORMER_KERNELS is portable"):
        mode(True)
    assert not native.is_reproducible()


def test_the_library_follows_the_environment(mode, monkeypatch):
    x, blocks = normal(20, 96), np.random.default_rng(0).integers(0, 60, (3, 3, 34)).astype(np.uint8)

    def is_reproducible():
        one = product(x[:1].copy(), blocks, operation="matmul_blocks", columns=3)
        return np.array_equal(product(x, blocks, operation="matmul_blocks", columns=3)[:1], one)

    for value in ("1", "0", "1"):
        monkeypatch.setenv("XFORMER_REPRODUCIBLE", value)
        assert (native.is_reproducible(), is_reproducible()) == (value == "1",) * 2


def test_the_mode_is_true_or_false():
    with pytest.raises(ConfigError, match="mode is 'yes'; expected True or False"):
        xf.use_reproducible_algorithms("yes")
