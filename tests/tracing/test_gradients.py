"""Every derivative rule and operation, first and second order, against central differences in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.tracing.cases import ROWS
from tests.tracing.gradcheck import check
from xformer import ops
from xformer.backends import array_namespace, extra, resolve
from xformer.tracing import grad, vjp
from xformer.tracing.rule import DECOMPOSITIONS, NOT_DIFFERENTIABLE, RULES, SEQUENCE_RULES

array_api_strict = pytest.importorskip("array_api_strict", reason="it says which functions there are")

# Functions that make arrays from numbers: with a tracked number they raise, like every function that is not known.
FROM_NUMBERS = {"arange", "full", "linspace"}
WITHOUT_ARRAYS = {"get_array_api_strict_flags", "reset_array_api_strict_flags", "set_array_api_strict_flags"}


@pytest.mark.parametrize("name", sorted({row.name for row in ROWS}))
def test_derivatives_match_differences(name: str):
    for row in ROWS:
        if row.name == name:
            check(row.function, row.inputs, note=str(row))


WITHOUT_DERIVATIVE = {
    "adafactor",
    "adam",
    "muon",
    "sgd",
    "BlockWeight",
    "PackedBlocks",
    "PackedWeight",
    "QuantizedWeight",
    "top_k",
    "Kernel",
    "Operation",
    "explain",
    "logsumexp",
    "register",
}
KNOWN = {*RULES, *SEQUENCE_RULES, *DECOMPOSITIONS, *extra.NAMES, *ops.__all__, "unstack"} - WITHOUT_DERIVATIVE
KNOWN = {name for name in KNOWN if "." not in name}  # see test_extensions.py for those


def test_every_rule_and_operation_has_a_row():
    assert KNOWN - {row.name for row in ROWS} == set()


def test_every_row_tests_something():
    assert {row.name for row in ROWS} - KNOWN == set()


def test_every_function_of_the_standard_is_differentiable_or_known_to_be_constant():
    functions = {name for name in array_api_strict.__all__ if not name.startswith("_")}
    functions = {name for name in functions if callable(getattr(array_api_strict, name))}
    types = {name for name in functions if isinstance(getattr(array_api_strict, name), type)}
    covered = {*RULES, *SEQUENCE_RULES, *DECOMPOSITIONS, "unstack", *NOT_DIFFERENTIABLE}
    assert functions - types - covered == FROM_NUMBERS | WITHOUT_ARRAYS


def test_no_function_is_both_differentiable_and_constant():
    assert NOT_DIFFERENTIABLE & {*RULES, *SEQUENCE_RULES, *DECOMPOSITIONS, "unstack"} == set()


# --- where there is no derivative: what convention says ---------------------------------------------------------------


def gradient(function: Any, x: Any) -> Any:
    return grad(lambda x: array_namespace(x).sum(function(array_namespace(x), x)))(np.asarray(x))


def test_maxima_share_evenly_on_ties():
    np.testing.assert_array_equal(gradient(lambda xp, x: xp.max(x), [1.0, 3.0, 3.0, 3.0]), [0.0, 1 / 3, 1 / 3, 1 / 3])
    np.testing.assert_array_equal(
        gradient(lambda xp, x: xp.min(x, axis=0), [[1.0, 2.0], [1.0, 3.0]]), [[0.5, 1.0], [0.5, 0.0]]
    )
    np.testing.assert_array_equal(gradient(lambda xp, x: xp.maximum(x, x[::-1]), [1.0, 2.0, 3.0]), [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(gradient(lambda xp, x: xp.maximum(x, 2.0), [1.0, 2.0, 3.0]), [0.0, 0.5, 1.0])
    np.testing.assert_array_equal(gradient(lambda xp, x: xp.minimum(2.0, x), [1.0, 2.0, 3.0]), [1.0, 0.5, 0.0])


def test_steps_have_derivative_zero():
    for name in ("ceil", "floor", "round", "trunc", "sign"):
        np.testing.assert_array_equal(gradient(lambda xp, x, f=name: getattr(xp, f)(x) + x, [0.3, -1.7]), [1.0, 1.0])
    np.testing.assert_array_equal(gradient(lambda xp, x: x // 0.4 + x, [0.3, -1.7]), [1.0, 1.0])


def test_abs_and_relu_have_derivative_zero_at_zero():
    np.testing.assert_array_equal(gradient(lambda xp, x: abs(x), [0.0, -2.0]), [0.0, -1.0])
    np.testing.assert_array_equal(gradient(lambda xp, x: ops.relu(x), [0.0, -2.0, 2.0]), [0.0, 0.0, 1.0])


def test_powers_of_zero():
    np.testing.assert_array_equal(gradient(lambda xp, x: x**1 + x**2 + x**0, [0.0]), [1.0])
    np.testing.assert_array_equal(gradient(lambda xp, x: xp.pow(0.0, x), [2.0]), [0.0])
    np.testing.assert_array_equal(gradient(lambda xp, x: xp.asarray([0.0, -2.0]) ** x, [2.0, 2.0]), [0.0, 0.0])


def test_a_nan_in_the_branch_not_taken_stays_there():
    x = [0.0, 4.0]
    actual = gradient(lambda xp, x: xp.where(x > 0.0, xp.sqrt(xp.where(x > 0.0, x, 1.0)), 0.0), x)
    np.testing.assert_array_equal(actual, [0.0, 0.25])


def test_a_list_of_positions_accumulates():
    np.testing.assert_array_equal(gradient(lambda xp, x: x[[0, 0, -1]], [1.0, 2.0, 3.0]), [2.0, 0.0, 1.0])


# --- dtypes -----------------------------------------------------------------------------------------------------------


def test_casts_pass_gradients_in_the_dtype_of_each_side():
    seen = []

    def function(x):
        xp = array_namespace(x)
        narrow = xp.astype(x, xp.float32)
        seen.append(narrow.dtype)
        return xp.sum(xp.astype(narrow * narrow, xp.float64) * x)

    x = np.asarray([1.0, 1.5])
    result = grad(function)(x)
    assert seen == [np.float32]
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, 3.0 * x**2, rtol=1e-6)


@pytest.mark.parametrize("name", ["cumulative_sum", "cumulative_prod", "prod", "var"])
def test_float32_stays_float32(name):
    x = np.asarray([1.5, -0.5, 0.3, 2.0], dtype=np.float32)
    result, pull = vjp(lambda x: getattr(array_namespace(x), name)(x), x)
    assert result.dtype == pull(np.ones_like(result))[0].dtype == np.float32
    np.testing.assert_allclose(result, getattr(resolve("numpy"), name)(x), rtol=1e-6)


def test_a_cast_to_integers_or_booleans_is_a_constant():
    x = np.asarray([1.7, 0.0])
    np.testing.assert_array_equal(gradient(lambda xp, x: x * xp.astype(x, xp.int64), x), [1.0, 0.0])
    np.testing.assert_array_equal(gradient(lambda xp, x: x * xp.astype(x, xp.bool), x), [1.0, 0.0])
    np.testing.assert_array_equal(gradient(lambda xp, x: x * xp.sum(x, dtype=xp.int64), x), [1.0, 1.0])


def test_float32_and_integers_mix_with_tracked_float64():
    x, ids = np.asarray([1.0, 2.0]), np.asarray([3, 4])
    actual = gradient(lambda xp, x: x * ids + xp.astype(x, xp.float32) * xp.asarray([2.0, 2.0], dtype=xp.float32), x)
    np.testing.assert_array_equal(actual, [5.0, 6.0])


# --- numbers at the edges ---------------------------------------------------------------------------------------------


def test_rows_that_may_attend_nowhere_have_zero_outputs_and_gradients():
    generator = np.random.default_rng(0)
    query, key, value = (generator.standard_normal((1, 1, 2, 3)) for _ in range(3))
    mask = np.asarray([[False, False], [True, True]])
    assert np.all(ops.attention(query, key, value, mask)[0, 0, 0] == 0.0)

    def loss(arrays):
        return array_namespace(*arrays).sum(ops.attention(*arrays, mask) ** 2)

    dquery, dkey, dvalue = grad(loss)((query, key, value))
    assert np.all(dquery[0, 0, 0] == 0.0)
    assert np.all(dquery[0, 0, 1] != 0.0)
    assert np.all(np.isfinite(dkey))
    assert np.all(np.isfinite(dvalue))


def test_softmax_of_huge_and_infinite_scores():
    x = np.asarray([[1e300, 0.0, -math.inf], [-1e300, -1e300, -math.inf]])
    np.testing.assert_array_equal(ops.softmax(x), [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    actual = grad(lambda x: ops.softmax(x)[1, 0])(x)
    np.testing.assert_array_equal(actual, [[0.0, 0.0, 0.0], [0.25, -0.25, 0.0]])


def test_padding_has_no_loss_and_no_gradient():
    logits, labels = np.random.default_rng(0).standard_normal((3, 4)), np.asarray([2, 0, 1])
    loss = ops.cross_entropy(logits, labels, pad_id=0, label_smoothing=0.1)
    slope = grad(lambda x: array_namespace(x).sum(ops.cross_entropy(x, labels, pad_id=0, label_smoothing=0.1)))(logits)
    assert loss[1] == 0.0
    assert np.all(slope[1] == 0.0)
    assert np.all(slope[[0, 2]] != 0.0)
    np.testing.assert_allclose(np.sum(slope, axis=-1), 0.0, atol=1e-15)
