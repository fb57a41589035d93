"""Operations on all parameters on CuPy equal the portable definitions, and Adam updates in place."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.kernels.cupy.cuda_cases import DTYPES, normal
from tests.kernels.cupy.cuda_on_host import CASTS
from xformer import kernels, vjp
from xformer.backends import dtype_named, resolve, to_host
from xformer.kernels import registry
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy import optimizer as cupy_optimizer
from xformer.ops.adam import adam
from xformer.ops.cast import cast
from xformer.ops.squared_norm import squared_norm

SHAPES = [(3, 5), (7,), (), (0, 4), (2, 5000), (64,)]
SETTINGS = {"learning_rate": 0.01, "step": 3, "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9, "donate": True}


def compute_dtype(dtype):
    return "float64" if dtype == "float64" else "float32"


def rows_of(cuda, dtype, shapes=SHAPES, gradient=None):
    """Parameters, gradients and moments, on the device and on the host in float64."""
    dtypes = dtype, gradient or dtype, compute_dtype(dtype), compute_dtype(dtype)
    rows = [
        tuple(
            cuda.array(np.asarray(values(shape, 4 * i + k)), each)
            for k, (each, values) in enumerate(zip(dtypes, VALUES, strict=True))
        )
        for i, shape in enumerate(shapes)
    ]
    return rows, [tuple(to_host(array).astype(np.float64) for array in row) for row in rows]


def signed(shape, seed):
    return normal(*shape, seed=seed)


def positive(shape, seed):
    return np.abs(normal(*shape, seed=seed))


VALUES = [signed, signed, signed, positive]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_decay", [None, [0.1, 0.0, 0.2, 0.3, 0.1, 0.5]], ids=["adam", "adamw"])
@pytest.mark.parametrize("most", [64, 2], ids=["one launch", "several"])
def test_adam(cuda, monkeypatch, dtype, weight_decay, most):
    monkeypatch.setattr(cupy_optimizer, "_MAX_SLOTS", most)
    rows, hosts = rows_of(cuda, dtype)
    factor = None if weight_decay is None else cuda.array(np.asarray(0.375), compute_dtype(dtype))
    assert cuda.served("adam", factor, *(array for row in rows for array in row))
    updated = adam(rows, **SETTINGS, weight_decay=weight_decay, grad_scale=factor)
    monkeypatch.setattr(registry, "_KERNELS", {})
    expected = adam(
        hosts, **SETTINGS, weight_decay=weight_decay, grad_scale=None if factor is None else np.asarray(0.375)
    )
    for row, got, reference in zip(rows, updated, expected, strict=True):
        assert [got[0] is row[0], got[1] is row[2], got[2] is row[3]] == [True] * 3
        for array, correct, each in zip(
            got, reference, (dtype, compute_dtype(dtype), compute_dtype(dtype)), strict=True
        ):
            assert_close(array, np.asarray(correct), xp=cuda.xp, dtype=each)


def test_adam_updates_in_place(cuda, monkeypatch):
    rows, hosts = rows_of(cuda, "float32", [(5, 9), (4,)])
    gradients = [row[1] for row in rows]
    for step in range(1, 6):
        settings = {**SETTINGS, "step": step}
        updated = adam(rows, **settings)
        rows = [(p, gradient, m, v) for (p, m, v), gradient in zip(updated, gradients, strict=True)]
    with monkeypatch.context() as context:
        context.setattr(registry, "_KERNELS", {})
        for step in range(1, 6):
            changed = adam(hosts, **{**SETTINGS, "step": step})
            hosts = [(p, host[1], m, v) for (p, m, v), host in zip(changed, hosts, strict=True)]
    for row, host in zip(rows, hosts, strict=True):
        assert_close(row[0], host[0], xp=cuda.xp, dtype="float32")


def test_a_launch_of_adam_can_be_repeated_with_other_numbers(cuda, monkeypatch):
    """A captured graph repeats launches; learning rate and step are then scalar arrays, read on the device."""
    rows, hosts = rows_of(cuda, "float32", [(5, 9), (4,)])
    launches, launch = [], cuda_launch.launch
    monkeypatch.setattr(cuda_launch, "launch", lambda *arguments: (launches.append(arguments), launch(*arguments)))
    rate, step = (cuda.array(np.asarray(number), "float64") for number in (0.01, 3.0))
    settings = {**SETTINGS, "weight_decay": [0.5, 0.0]}
    adam(rows, **{**settings, "learning_rate": rate, "step": step})
    (arguments,) = launches
    schedule = arguments[-1]
    schedule[...] = cuda.array(np.asarray([0.02 / (1 - 0.9**4), 1 / (1 - 0.98**4), 0.02]))
    launch(*arguments)
    monkeypatch.setattr(registry, "_KERNELS", {})
    for number, learning_rate in ((3, 0.01), (4, 0.02)):
        updated = adam(hosts, **{**settings, "step": number, "learning_rate": learning_rate})
        hosts = [(p, host[1], m, v) for (p, m, v), host in zip(updated, hosts, strict=True)]
    for row, host in zip(rows, hosts, strict=True):
        assert_close(row[0], host[0], xp=cuda.xp, dtype="float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_may_be_float32(cuda, monkeypatch, dtype):
    rows, hosts = rows_of(cuda, dtype, gradient="float32")
    assert cuda.served("adam", None, *(array for row in rows for array in row))
    updated = adam(rows, **SETTINGS)
    monkeypatch.setattr(registry, "_KERNELS", {})
    for got, reference in zip(updated, adam(hosts, **SETTINGS), strict=True):
        assert_close(got[0], np.asarray(reference[0]), xp=cuda.xp, dtype=dtype)


def test_parameters_in_column_order(cuda, monkeypatch):
    rows, hosts = rows_of(cuda, "float64", [(3, 5)])
    gradient = rows[0][1]
    rows = [tuple(array if array is gradient else cuda.xp.asfortranarray(array) for array in rows[0])]
    assert cuda.served("adam", None, *rows[0])
    (got,) = adam(rows, **SETTINGS)
    monkeypatch.setattr(registry, "_KERNELS", {})
    (reference,) = adam(hosts, **SETTINGS)
    for array, correct in zip(got, reference, strict=True):
        assert_close(array, correct, xp=cuda.xp)


def test_explain_gives_the_reason(cuda):
    good = [cuda.array(np.ones((2, 3)), "float32") for _ in range(4)]
    narrow, ints, columns = cuda.array(np.ones((2, 3)), "float16"), cuda.array(np.ones((2, 3), int)), good[0][:, ::2]
    for row, reason in [
        ([ints, *good[1:]], "dtype int64 (kernels take floating dtypes)"),
        ([good[0], narrow, *good[2:]], "a gradient of dtype float16 for a float32 parameter"),
        ([narrow, narrow, narrow, good[3]], "moments of dtype float16 for a float16 parameter"),
        ([columns] * 4, "arrays are not contiguous, or differ in memory order"),
    ]:
        assert f"  not cupy.adam: {reason}" in kernels.explain("adam", None, *row)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_factor_skips_the_update(cuda, dtype):
    rows, hosts = rows_of(cuda, dtype)
    updated = adam(
        rows, **SETTINGS, weight_decay=[0.1] * len(rows), grad_scale=cuda.array(np.asarray(np.nan), "float32")
    )
    for (parameter, first, second), (before, _, *moments) in zip(updated, hosts, strict=True):
        for array, reference in zip((parameter, first, second), (before, *moments), strict=True):
            np.testing.assert_array_equal(to_host(array).astype(np.float64), reference)


# --- squared_norm ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [128, 2], ids=["one launch", "several"])
def test_squared_norm(cuda, monkeypatch, dtype, most):
    monkeypatch.setattr(cupy_optimizer, "_MAX_ARRAYS", most)
    arrays = [np.asarray(normal(*shape, seed=place)) for place, shape in enumerate([*SHAPES, (9000,)])]
    assert cuda.served("squared_norm", *(cuda.array(array, dtype) for array in arrays))
    cuda.agree(squared_norm, *arrays, dtype=dtype)
    cuda.agree(squared_norm, normal(0, 3), dtype=dtype)


def test_the_squared_norm_of_mixed_dtypes(cuda):
    cuda.agree(
        squared_norm, normal(5, 3), normal(70, seed=1), normal(4, seed=2), dtype=("bfloat16", "float32", "float16")
    )
    mixed = [cuda.array(np.ones(3), dtype) for dtype in ("float64", "float32")]
    assert "  not cupy.squared_norm: mixed dtypes: float64 and others" in kernels.explain("squared_norm", *mixed)
    ints = cuda.array(np.ones(3, int))
    assert "  not cupy.squared_norm: dtype int64 (kernels take floating dtypes)" in kernels.explain(
        "squared_norm", ints
    )


# --- cast --------------------------------------------------------------------------


@pytest.mark.parametrize("most", [112, 2], ids=["one launch", "several"])
@pytest.mark.parametrize(("before", "after"), CASTS)
def test_cast_has_the_bits_of_numpy(cuda, monkeypatch, before, after, most):
    monkeypatch.setattr(cupy_optimizer, "_MAX_PAIRS", most)
    special = np.array(
        [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-41, 1e-7, 65519.0, 65520.0, 3e38, 1 + 2**-8, 1 + 3 * 2**-8]
    )
    shaped = [np.asarray(normal(*shape, seed=place)) for place, shape in enumerate([*SHAPES, (9000,)])]
    host = resolve("numpy")
    with np.errstate(over="ignore"):
        hosts = [x.astype(dtype_named(host, before)) for x in (special, *shaped, shaped[4].T)]
        expected = [x.astype(dtype_named(host, after)) for x in hosts]
    arrays = [cuda.array(x) for x in hosts]
    assert cuda.served("cast", *arrays, dtype=after)
    for got, reference in zip(cast(*arrays, dtype=after), expected, strict=True):
        assert got.dtype == reference.dtype
        np.testing.assert_array_equal(to_host(got).astype("float64"), reference.astype("float64"))


def test_the_cotangents_of_a_cast(cuda):
    arrays = [cuda.array(normal(*shape), "float32") for shape in [(3, 5), (7,), (2, 600)]]
    outputs, pull = vjp(lambda *arrays: cast(*arrays, dtype="bfloat16")[::2], *arrays)
    g = [cuda.array(normal(*output.shape, seed=9), "bfloat16") for output in outputs]
    cotangents = pull(tuple(g))
    assert all(got.dtype == x.dtype and got.shape == x.shape for got, x in zip(cotangents, arrays, strict=True))
    for got, reference in zip(cotangents[::2], g, strict=True):
        np.testing.assert_array_equal(to_host(got), to_host(reference).astype("float32"))
    assert not to_host(cotangents[1]).any()


def test_a_cast_that_would_round_twice_is_not_supported(cuda):
    x = cuda.array(normal(3), "float64")
    assert "  not cupy.cast: float64 would be rounded" in kernels.explain("cast", x, dtype="float16")
