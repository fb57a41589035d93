"""Adam on CuPy equals the portable definition, and updates in place."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.ops._cupy.cuda_cases import DTYPES, normal
from tests.ops.replace_kernels import replace_kernels
from tests.reference import for_each, raises_line
from xformer import ops
from xformer.backends import to_host
from xformer.errors import ShapeError
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy import optimizer
from xformer.ops.optimizers import Settings, adam

SHAPES = [(3, 5), (7,), (), (0, 4), (2, 5000), (64,)]
SETTINGS = {"learning_rate": 0.01, "step": 3, "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9, "donate": True}


def options(number=1):
    """The options of the operation for a number of parameters."""
    return {"settings": Settings(0.1, 0.9, 0.9, 1.0, 1e-9, 0.1), "weight_decay": (0.0,) * number, "donate": True}


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
    monkeypatch.setitem(optimizer.MAX_ITEMS, 4, most)
    rows, hosts = rows_of(cuda, dtype)
    factor = None if weight_decay is None else cuda.array(np.asarray(0.375), compute_dtype(dtype))
    assert cuda.served("adam", factor, *(array for row in rows for array in row), **options(len(rows)))
    updated = adam(rows, **SETTINGS, weight_decay=weight_decay, grad_scale=factor)
    replace_kernels(monkeypatch, "numpy", {})
    expected = adam(
        hosts, **SETTINGS, weight_decay=weight_decay, grad_scale=None if factor is None else np.asarray(0.375)
    )
    for row, got, reference in zip(rows, updated, expected, strict=True):
        assert [got[0] is row[0], got[1] is row[2], got[2] is row[3]] == [True] * 3
        for array, correct, each in zip(
            got, reference, (dtype, compute_dtype(dtype), compute_dtype(dtype)), strict=True
        ):
            assert_close(array, np.asarray(correct), xp=cuda.xp, dtype=each)


def test_a_launch_of_adam_can_be_repeated_with_other_numbers(cuda, monkeypatch):
    """A captured graph repeats launches; learning rate and step are then scalar arrays, read on the device."""
    rows, hosts = rows_of(cuda, "float32", [(5, 9), (4,)])
    launches, launch = [], cuda_launch.launch
    monkeypatch.setattr(cuda_launch, "launch", lambda *arguments: (launches.append(arguments), launch(*arguments)))
    rate, step = (cuda.array(np.asarray(number), "float64") for number in (0.01, 3.0))
    settings = {**SETTINGS, "weight_decay": [0.5, 0.0]}
    adam(rows, **{**settings, "learning_rate": rate, "step": step})
    arguments = launches[-1]  # the comparison at the first use has launches, too
    schedule = arguments[-1]
    schedule[...] = cuda.array(np.asarray([0.02 / (1 - 0.9**4), 1 / (1 - 0.98**4), 0.02]))
    launch(*arguments)
    replace_kernels(monkeypatch, "numpy", {})
    for number, learning_rate in ((3, 0.01), (4, 0.02)):
        updated = adam(hosts, **{**settings, "step": number, "learning_rate": learning_rate})
        hosts = [(p, host[1], m, v) for (p, m, v), host in zip(updated, hosts, strict=True)]
    for row, host in zip(rows, hosts, strict=True):
        assert_close(row[0], host[0], xp=cuda.xp, dtype="float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_may_be_float32(cuda, monkeypatch, dtype):
    rows, hosts = rows_of(cuda, dtype, gradient="float32")
    assert cuda.served("adam", None, *(array for row in rows for array in row), **options(len(rows)))
    updated = adam(rows, **SETTINGS)
    replace_kernels(monkeypatch, "numpy", {})
    for got, reference in zip(updated, adam(hosts, **SETTINGS), strict=True):
        assert_close(got[0], np.asarray(reference[0]), xp=cuda.xp, dtype=dtype)


def test_parameters_in_column_order(cuda, monkeypatch):
    rows, hosts = rows_of(cuda, "float64", [(3, 5)])
    gradient = rows[0][1]
    rows = [tuple(array if array is gradient else cuda.xp.asfortranarray(array) for array in rows[0])]
    assert cuda.served("adam", None, *rows[0], **options())
    (got,) = adam(rows, **SETTINGS)
    replace_kernels(monkeypatch, "numpy", {})
    (reference,) = adam(hosts, **SETTINGS)
    for array, correct in zip(got, reference, strict=True):
        assert_close(array, correct, xp=cuda.xp)


def test_explain_gives_the_reason(cuda):
    good = [cuda.array(np.ones((2, 3)), "float32") for _ in range(4)]
    narrow, ints, columns = cuda.array(np.ones((2, 3)), "float16"), cuda.array(np.ones((2, 3), int)), good[0][:, ::2]
    for row, reason in [
        ([good[0], narrow, *good[2:]], "a gradient of dtype float16 for a float32 parameter"),
        ([narrow, narrow, narrow, good[3]], "moments of dtype float16 for a float16 parameter"),
        ([columns] * 4, "arrays are not contiguous, or differ in memory order"),
    ]:
        assert f"  not cupy.adam: {reason}" in ops.explain("adam", None, *row, **options())
    with raises_line(ShapeError, r"adam got parameter\[0\] of dtype int64; expected a floating dtype"):
        ops.explain("adam", None, ints, *good[1:], **options())


@for_each("dtype", DTYPES)
def test_a_nan_factor_skips_the_update(cuda, dtype):
    rows, hosts = rows_of(cuda, dtype)
    updated = adam(
        rows, **SETTINGS, weight_decay=[0.1] * len(rows), grad_scale=cuda.array(np.asarray(np.nan), "float32")
    )
    for (parameter, first, second), (before, _, *moments) in zip(updated, hosts, strict=True):
        for array, reference in zip((parameter, first, second), (before, *moments), strict=True):
            np.testing.assert_array_equal(to_host(array).astype(np.float64), reference)
