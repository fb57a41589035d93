"""The transforms: arguments and results, nesting, errors, and when memory is freed."""

from __future__ import annotations

import gc
import math
import operator
import threading
import tracemalloc
import weakref
from typing import Any, NamedTuple

import array_api_strict
import numpy as np
import pytest

from tests.reference import for_each, raises_line
from xformer import ops
from xformer.backends import Array, array_namespace, from_host, to_host
from xformer.errors import BackendError, ConfigError, DifferentiationError, ShapeError
from xformer.ops import Operation
from xformer.tracing import grad, jvp, remat, stop_gradient, value_and_grad, vjp
from xformer.tree import Module, flatten


class Affine(Module):
    weight: Array
    bias: Array | None
    features: int

    def __init__(self, weight: Any, bias: Any = None) -> None:
        self.weight, self.bias, self.features = weight, bias, weight.shape[1]

    def __call__(self, x: Any) -> Any:
        return ops.linear(x, self.weight, self.bias)


class Stack(Module):
    layers: tuple[Affine, ...]
    scale: Array

    def __init__(self, layers: tuple[Affine, ...], scale: Any) -> None:
        self.layers, self.scale = layers, scale

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = array_namespace(x, layer.weight).tanh(layer(x))
        return x * self.scale


class Pair(NamedTuple):
    first: Any
    second: Any


def values(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def stack(bias: bool = True) -> Stack:
    layers = tuple(Affine(values(3, 3, seed=i), values(3, seed=10 + i) if bias else None) for i in range(3))
    return Stack(layers, values(3, seed=20))


def total(x: Any) -> Any:
    return array_namespace(x).sum(x)


def loss(model: Stack, x: Any) -> Any:
    return total(model(x) ** 2)


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-12, atol=1e-12)


# --- trees -----------------------------------------------------------------------------------------------------------


@for_each("bias", [True, False])
def test_a_module_gets_a_gradient_of_its_own_structure(bias):
    model, x = stack(bias), values(4, 3)
    value, gradient = value_and_grad(loss)(model, x)
    assert isinstance(gradient, Stack)
    assert [name for name, _ in gradient.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert gradient.layers[0].features == 3
    close(value, loss(model, x))
    for (name, parameter), (_, slope) in zip(model.named_parameters(), gradient.named_parameters(), strict=True):
        before, parameter[...] = parameter.copy(), parameter + 1e-7
        difference = (loss(model, x) - value) / 1e-7
        parameter[...] = before
        np.testing.assert_allclose(np.sum(slope), difference, rtol=1e-4, err_msg=name)


def test_only_the_first_argument_is_differentiated():
    x, y = values(3), values(3, seed=1)
    gradient = grad(lambda a, b, *, factor: total(a * b * factor))(x, y, factor=np.float64(3.0))
    close(gradient, 3.0 * y)


def test_unused_leaves_get_zeros_of_their_shape_and_dtype():
    gradient = grad(lambda t: total(t[0]))((values(2), values(2, 3).astype(np.float32)))
    close(gradient[0], [1.0, 1.0])
    assert gradient[1].dtype == np.float32
    assert gradient[1].shape == (2, 3)
    assert not gradient[1].any()


def test_other_than_floating_arrays_are_constants_without_a_gradient():
    gradient = grad(lambda t: total(t[1] * t[0]))((values(2), np.asarray([1, 2]), np.asarray(True)))
    close(gradient[0], [1.0, 2.0])
    assert gradient[1:] == (None, None)
    _, pullback = vjp(lambda x, n: x * n, values(2), np.asarray([1, 2]))
    cotangent, none = pullback(np.ones(2))
    close(cotangent, [1.0, 2.0])
    assert none is None


def test_numbers_that_are_not_differentiated_have_the_gradient_none():
    tree = {"x": X, "n": 3, "pair": (2.0, True), "name": "x", "z": 1j}
    gradient = grad(lambda p: total(p["x"] * p["pair"][0]) * p["n"])(tree)
    assert (gradient["n"], gradient["pair"][1], gradient["name"], gradient["z"]) == (None, None, "x", None)
    close(gradient["pair"][0], 3.0 * X.sum())
    assert vjp(lambda x, n: x * n, X, 3)[1](X)[1] is None
    assert jvp(lambda x: (x, 3, 0.5), (X,), (X,))[1][1:] == (None, None)


def test_the_same_array_may_be_two_leaves():
    x = values(3)
    first, second = grad(lambda t: total(t[0] * t[0] * t[1]))((x, x))
    close(first, 2.0 * x * x)
    close(second, x * x)


def test_gradients_have_the_dtype_of_their_leaf():
    tree = (values(3).astype(np.float32), values(3))
    gradient = grad(lambda t: total(t[0] * t[1]))(tree)
    assert [g.dtype.name for g in gradient] == ["float32", "float64"]
    close(gradient[1], tree[0].astype(np.float64))


def test_a_result_that_is_itself_an_input_or_does_not_depend_on_one():
    close(grad(lambda x: x)(np.asarray(2.0)), 1.0)
    value, gradient = value_and_grad(lambda x: np.asarray(5.0))(values(3))
    assert value == 5.0
    close(gradient, np.zeros(3))


def test_has_aux_hands_anything_out_as_plain_values():
    model, x = stack(), values(4, 3)

    def with_extras(model, x):
        y = model(x)
        return total(y), {"output": y, "weights": (model.scale, 3), "mask": y > 0.0, "note": "text"}

    (value, extra), gradient = value_and_grad(with_extras, has_aux=True)(model, x)
    assert type(extra["output"]) is np.ndarray
    assert extra["weights"][0] is model.scale
    assert extra["mask"].dtype == bool
    assert extra["note"] == "text"
    close(value, np.sum(model(x)))
    close(gradient.scale, np.sum(model(x) / model.scale, axis=0))


# --- vjp -------------------------------------------------------------------------------------------------------------


def test_vjp_pulls_a_tree_of_cotangents_back_to_every_primal():
    x, y, u, v = values(2, 3), values(3), values(2, 3, seed=2), values(seed=3)
    result, pullback = vjp(lambda a, b: {"outer": a * b, "total": total(a)}, x, y)
    close(result["outer"], x * y)
    dx, dy = pullback({"outer": u, "total": v})
    close(dx, u * y + v)
    close(dy, np.sum(u * x, axis=0))


def test_numbers_are_cotangents_of_scalars():
    for cotangent in (2.0, 2, np.float32(2.0)):
        close(vjp(total, X)[1](cotangent)[0], 2.0 * np.ones(3))
    close(vjp(lambda x: {"y": x, "z": [total(x)]}, X)[1]({"y": X, "z": [1.0]})[0], X + 1.0)


class Point(NamedTuple):
    a: Any
    b: Any


def test_named_tuples_are_tuples_and_other_classes_are_named():
    assert grad(lambda p: p.a**2 * p.b)(Point(2.0, 3.0)) == (12.0, 4.0)
    assert grad(lambda p: p["q"].a * p["r"])({"q": Point(2.0, 1), "r": 3.0}) == {"q": Point(3.0, None), "r": 2.0}
    thing = object()
    for call in (lambda: grad(lambda p: 1.0)(thing), lambda: vjp(lambda p: 1.0, thing)):
        with raises_line(ShapeError, "is an object; expected a floating array|vjp got an object; expected"):
            call()


def test_a_pullback_works_once():
    _, pullback = vjp(lambda x: x * x, values(3))
    with pytest.raises(BackendError, match="arrays of numpy and array_api_strict were mixed"):
        pullback(array_api_strict.ones(3))
    with pytest.raises(ShapeError, match=r"the cotangent has shapes \[\(\)\]"):
        pullback(1.0)
    pullback(np.ones(3))
    with pytest.raises(RuntimeError, match="called before; call vjp again"):
        pullback(np.ones(3))


def test_a_cotangent_of_another_shape_is_refused_and_the_pullback_stays_usable():
    x = values(3)
    _, pullback = vjp(lambda x: x * x, x)
    with pytest.raises(
        ShapeError, match=r"the cotangent has shapes \[\(2,\)\]; expected those of the output, \[\(3,\)\]"
    ):
        pullback(np.ones(2))
    close(pullback(np.ones(3))[0], 2.0 * x)


def test_a_complex_cotangent_is_refused_and_the_pullback_stays_usable():
    x = values(3)
    _, pullback = vjp(lambda x: {"squares": x * x, "total": total(x)}, x)
    for dtype in (np.complex64, np.complex128):
        with raises_line(ShapeError, rf"has dtypes \['{np.dtype(dtype)}', 'float64'\]; expected real numbers"):
            pullback({"squares": np.ones(3, dtype), "total": np.asarray(1.0)})
    close(pullback({"squares": np.ones(3, np.float32), "total": np.asarray(2)})[0], 2.0 * x + 2.0)


def test_a_pullback_may_be_differentiated_after_it_was_made():
    x, v = values(3), values(3, seed=1)
    _, pullback = vjp(lambda x: array_namespace(x).where(x > 0.0, x * x, array_namespace(x).sin(x)), x)
    close(grad(lambda c: total(pullback(c)[0] * v))(np.ones(3)), v * np.where(x > 0, 2.0 * x, np.cos(x)))


# --- nesting ---------------------------------------------------------------------------------------------------------


def test_an_inner_derivative_does_not_see_the_outer_variable():
    # d/dx [x * d/dy (x + y)] = d/dx [x * 1] = 1; confusing the two variables gives 2.
    close(grad(lambda x: x * grad(lambda y: x + y)(np.asarray(1.0)))(np.asarray(1.0)), 1.0)
    close(grad(lambda x: x * grad(lambda y: x * y)(np.asarray(3.0)))(np.asarray(5.0)), 10.0)
    close(grad(lambda x: grad(lambda y: x * x * y * y * y)(x))(np.asarray(2.0)), 4 * 3 * 2.0**3)


def test_derivatives_of_any_order():
    def power(x):
        return x**5

    for order, expected in enumerate([32.0, 80.0, 160.0, 240.0, 240.0, 120.0, 0.0]):
        function = power
        for _ in range(order):
            function = grad(function)
        close(function(np.asarray(2.0)), expected)


def test_a_derivative_by_an_outer_array_closes_over_a_middle_one():
    def nested(x):
        def middle(y):
            return grad(lambda z: y * y * z**3)(x)  # 3 y^2 z^2 at z = x

        return grad(middle)(x)  # 6 y x^2 at y = x

    close(nested(np.asarray(1.5)), 6 * 1.5**3)
    close(grad(nested)(np.asarray(1.5)), 18 * 1.5**2)


def test_the_functions_of_an_outer_namespace_take_inner_arrays():
    def outer(x):
        xp = array_namespace(x)

        def inner(y):
            stacked = xp.stack([y * x, xp.exp(y), xp.clip(y, 0.0, 9.0), xp.where(y > 0.0, y, x), xp.pow(y, 2.0)])
            assert array_namespace(stacked).trace_level == 2
            return xp.sum(xp.concat([xp.reshape(part, (1,)) for part in xp.unstack(stacked)]))

        return grad(inner)(np.asarray(0.5)) * x

    # d/dy = x + e^y + 1 + 1 + 2y, times x; its derivative in x is 2x + e^y + 2 + 2y.
    close(grad(outer)(np.asarray(2.0)), 4.0 + math.exp(0.5) + 2.0 + 1.0)


def test_an_outer_array_mixes_with_inner_ones_in_operations():
    weight, x = values(3, 3), values(2, 3)

    def outer(w):
        def inner(x):
            y = ops.layer_norm(ops.linear(x, w), np.ones(3), None)
            y = ops.attention(y, w, x[[0, 1, 0]])
            return total(ops.cross_entropy(ops.softmax(y), np.asarray([1, 2])))

        return total(grad(inner)(x) ** 2)

    step, v = 1e-6, values(3, 3, seed=5)
    expected = (outer(weight + step * v) - outer(weight - step * v)) / (2 * step)
    np.testing.assert_allclose(np.sum(grad(outer)(weight) * v), expected, rtol=1e-7)


def test_threads_do_not_see_each_others_traces():
    x = values(50)
    start, results = threading.Barrier(4), [None] * 4

    def work(k):
        start.wait()
        for _ in range(20):
            results[k] = grad(lambda x: total(grad(lambda y: total(y**3) * k)(x) * x / 3.0))(x)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, result in enumerate(results):
        close(result, 3.0 * k * x**2)


# --- stop_gradient ---------------------------------------------------------------------------------------------------


def test_stop_gradient_makes_a_constant_at_every_level():
    x = values(3)
    close(grad(lambda x: total(x * stop_gradient(x)))(x), x)
    close(grad(lambda x: total(grad(lambda y: total(y * stop_gradient(y * x)))(x)))(x), np.zeros(3))
    assert stop_gradient(x) is x


# --- checkpoint ------------------------------------------------------------------------------------------------------


def plain(model: Stack, x: Any) -> Any:
    for layer in model.layers:
        x = array_namespace(x, layer.weight).tanh(layer(x)) * 1.5
    return total(x * model.scale)


def remembered(model: Stack, x: Any) -> Any:
    block = remat(lambda layer, x, *, factor: array_namespace(x, layer.weight).tanh(layer(x)) * factor)
    for layer in model.layers:
        x = block(layer, x, factor=1.5)
    return total(x * model.scale)


def test_checkpoint_gives_the_values_and_gradients_of_the_plain_function():
    model, x = stack(), values(4, 3)
    expected, actual = value_and_grad(plain)(model, x), value_and_grad(remembered)(model, x)
    assert actual[0] == expected[0]
    for (_, a), (_, b) in zip(actual[1].named_parameters(), expected[1].named_parameters(), strict=True):
        np.testing.assert_array_equal(a, b)
    close(remembered(model, x), plain(model, x))


def test_checkpoint_has_second_derivatives():
    model, x = stack(), values(4, 3)

    def curvature(function):
        return grad(lambda x: total(grad(lambda m: function(m, x))(model).scale ** 2))(x)

    close(curvature(remembered), curvature(plain))


def test_checkpoint_nests_and_may_differentiate_inside():
    x = values(3)
    inner = remat(lambda x: x * x * x)
    outer = remat(lambda x: inner(x) * x + grad(lambda y: total(inner(y)))(x))
    close(grad(lambda x: total(outer(x)))(x), 4 * x**3 + 6 * x)


def test_checkpoint_of_several_outputs_of_which_some_are_unused():
    x = values(3)

    def several(x, n):
        xp = array_namespace(x)
        return {"a": x * n, "order": xp.argsort(x), "b": (x * x, "note"), "c": xp.sum(x)}

    def function(x):
        outputs = remat(several)(x, np.asarray([1, 2, 3]))
        assert outputs["b"][1] == "note"
        return total(outputs["b"][0] * outputs["order"])

    close(grad(function)(x), 2.0 * x * np.argsort(x))


def test_checkpoint_computes_forward_again_and_keeps_only_inputs():
    retained: list[Any] = []
    calls: list[int] = []

    def body(x):
        calls.append(1)
        y = array_namespace(x).exp(x)
        retained.append(weakref.ref(y if type(y) is np.ndarray else y._value))
        return y * y

    gc.disable()
    try:
        _, pullback = vjp(remat(body), values(3))
        assert len(calls) == 1
        assert retained[0]() is None
        pullback(np.ones(3))
        assert len(calls) == 2
    finally:
        gc.enable()


def test_checkpoint_of_constants_and_of_plain_arrays_is_the_function():
    x = values(3)
    close(remat(lambda x: x * 2.0)(x), 2.0 * x)
    close(grad(lambda x: total(x * remat(lambda n: n * 2)(array_namespace(x).argsort(x))))(x), 2 * np.argsort(x))
    assert remat(lambda text: text + "!")("no arrays") == "no arrays!"


# --- operations ------------------------------------------------------------------------------------------------------


def test_an_operation_knows_which_inputs_need_a_cotangent():
    recorded = []

    def pull(g, residuals, needs, *, factor):
        recorded.append(needs)
        a, b = residuals
        return g * b * factor, g * a * factor, None

    def forward(a, b, mask, *, factor, save):
        return a * b * factor, (a, b) if save else None

    product = Operation("product", "a: (...) float, b: (...) float, mask?: (...) bool -> (...)", forward, pull)
    x, y = values(3), values(3, seed=1)
    close(product(x, y, None, factor=2.0), 2.0 * x * y)
    close(grad(lambda x: total(product(x, y, None, factor=2.0)))(x), 2.0 * y)
    close(grad(lambda y: total(product(x, y, None, factor=2.0)))(y), 2.0 * x)
    assert recorded == [(True, False, False), (False, True, False)]


def test_a_cotangent_of_one_element_is_that_of_all_elements():
    def pull(g, residuals, needs):
        return (3.0 * g,)

    def forward(x, *, save):
        return 3.0 * array_namespace(x).sum(x), None

    triple_sum = Operation("triple_sum", "x: (...) float -> ()", forward, pull)
    np.testing.assert_array_equal(grad(lambda x: triple_sum(x))(values(2, 3)), np.full((2, 3), 3.0), strict=True)


def test_traced_arrays_may_be_keys():
    def function(x):
        y = x * 2.0
        return total({x: y, y: x}[x])

    close(grad(function)(values(3)), np.full(3, 2.0))


# --- what raises -----------------------------------------------------------------------------------------------------


def leak(transform: Any) -> Any:
    leaked: list[Any] = []

    def function(x):
        leaked.extend([x, x * 2.0, array_namespace(x).argsort(x)])
        return total(x)

    transform(function)
    return leaked


@for_each("index", [0, 1, 2])
@for_each(
    "use",
    [
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: array_namespace(x).exp(x),
        lambda x: x[0],
        lambda x: -x,
        lambda x: x > 0,
        lambda x: list(x),
        lambda x: array_namespace(x).stack([x, x]),
        lambda x: array_namespace(x).unstack(x),
        lambda x: ops.relu(x),
        lambda x: grad(lambda y: total(y * x))(values(3)),
        lambda x: grad(lambda y: total(array_namespace(y).where(y > 0, y, x)))(values(3)),
    ],
)
def test_an_array_that_escaped_its_trace_raises(use, index):
    escaped = leak(lambda f: value_and_grad(f)(values(3)))[index]
    with pytest.raises(RuntimeError, match="after its value_and_grad/vjp/jvp/vmap call had ended"):
        use(escaped)


def test_an_array_that_escaped_vjp_raises_before_and_after_the_pullback():
    pullback = []
    escaped = leak(lambda f: pullback.append(vjp(f, values(3))[1]))[1]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="had ended"):
            escaped * 2.0
        for pull in pullback:
            pull(np.ones(()))
            pullback.clear()
            break


def test_an_array_that_escaped_an_error_raises():
    escaped = []

    def fails(x):
        escaped.append(x)
        raise KeyError("own error")

    with pytest.raises(KeyError, match="own error"):
        grad(fails)(values(3))
    with pytest.raises(RuntimeError, match="had ended"):
        escaped[0] * 2.0
    close(grad(lambda x: total(grad(lambda y: total(y))(x) * x))(values(3)), np.ones(3))  # no trace stayed active


def test_a_function_without_a_rule_works_on_constants():
    close(grad(lambda x: total(x * array_namespace(x).linspace(0.0, 1.0, 3)))(values(3)), [0.0, 0.5, 1.0])
    close(grad(lambda x: total(x * array_namespace(x).full((3,), 2.0)))(values(3)), [2.0, 2.0, 2.0])


@for_each(
    "compute",
    [
        lambda xp, c: c * 2.0 + c,
        lambda xp, c: xp.exp(-c),
        lambda xp, c: xp.sum(c, axis=0, keepdims=True),
        lambda xp, c: xp.concat([c, c]),
        lambda xp, c: xp.unstack(xp.stack([c, c]))[1],
        lambda xp, c: xp.clip(c, 0.0, 1.0),
        lambda xp, c: c[1:],
        lambda xp, c: ops.relu(c),
        lambda xp, c: remat(lambda c: c * 2.0)(c),
        lambda xp, c: stop_gradient(c),
    ],
)
def test_what_is_computed_from_constants_is_constant(compute):
    seen = []

    def function(x):
        xp = array_namespace(x)
        seen.append(compute(xp, xp.asarray([1.0, 2.0])))
        xp.linspace(0.0, seen[0][0], 3)  # would raise for an array that depends on x
        return total(x)

    grad(function)(values(3))
    assert seen[0]._index == -1


@for_each("key", [([0, 0, 1], slice(1, None)), (slice(None, None, 2), [2, -1]), (..., None, [1, 1])])
def test_integer_arrays_and_slices_in_one_key(key):
    key = tuple(np.asarray(item) if isinstance(item, list) else item for item in key)
    expected = np.zeros((3, 4))
    np.add.at(expected, key, np.cos(values(3, 4)[key]))
    gradient = grad(lambda x: total(array_namespace(x).sin(x[key])))(values(3, 4))
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


@for_each("indices", [[[0, 2], [2, -1]], 1, [[[]]]])
def test_indices_of_take_may_have_any_number_of_axes(indices):
    indices = np.asarray(indices, dtype=np.int64)
    expected = np.zeros((3, 4))
    np.add.at(expected, (slice(None), indices), np.cos(values(3, 4)[:, indices]))
    gradient = grad(lambda x: total(array_namespace(x).sin(array_namespace(x).take(x, indices, axis=1))))(values(3, 4))
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


@for_each("use", [np.asarray, np.array, np.ones(3).dot, np.from_dlpack, np.histogram, np.ascontiguousarray])
def test_numpy_gets_no_traced_array(use):
    with pytest.raises((DifferentiationError, TypeError)):
        grad(lambda x: total(use(x)))(values(3))


@for_each("use", [float, int, complex, operator.index])
def test_numbers_are_not_read_from_tracked_arrays(use):
    with raises_line(DifferentiationError, "would lose its gradient; use np.sin.*, create y with xp.zeros, where xp"):
        grad(lambda x: total(x * use(x[0])))(values(3))
    assert grad(lambda x: x[0] * float(stop_gradient(x)[1]))(np.asarray([1.0, 3.0])).tolist() == [3.0, 0.0]
    index = grad(lambda x: x[int(array_namespace(x).argmax(x))] * range(5)[array_namespace(x).argmin(x) + 2])
    assert index(np.asarray([1.0, 3.0])).tolist() == [0.0, 2.0]


def test_branches_may_depend_on_values():
    function = grad(lambda x: x[0] * 2.0 if x[0] > 0 else x[1] * 3.0 if x[1] else x[0])
    assert function(np.asarray([1.0, 1.0])).tolist() == [2.0, 0.0]
    assert function(np.asarray([-1.0, 1.0])).tolist() == [0.0, 3.0]
    assert function(np.asarray([-1.0, 0.0])).tolist() == [1.0, 0.0]


@for_each("write", [lambda buffer, x: buffer.__setitem__(0, x[0]), lambda buffer, x: buffer.fill(x[0])])
def test_a_plain_array_takes_no_tracked_value(write):
    buffer = np.zeros(3)
    with raises_line(DifferentiationError, r"in y\[i\] = x with a plain array y"):
        grad(lambda x: write(buffer, x) or total(buffer * x))(values(3))


X = np.asarray([1.0, 2.0, 4.0])
LISTS = {
    "asarray": (lambda xp, x: xp.asarray([x[0], x[1] * 2.0]), [1.0, 2.0, 0.0]),
    "tuple": (lambda xp, x: xp.asarray((x[0], 3.0)), [1.0, 0.0, 0.0]),
    "nested": (lambda xp, x: xp.asarray([[x[0], 1], [2.0, x[2]]]), [1.0, 0.0, 1.0]),
    "sum": (lambda xp, x: xp.sum([x[0], x[1]]), [1.0, 1.0, 0.0]),
    "max": (lambda xp, x: xp.max([x[0], x[2]]), [0.0, 0.0, 1.0]),
    "square": (lambda xp, x: xp.square([x[0], x[2]]), [2.0, 0.0, 8.0]),
    "where": (lambda xp, x: xp.where(x > 1.5, [x[0], x[0], x[1]], x), [2.0, 1.0, 0.0]),
    "reshape": (lambda xp, x: xp.reshape([x[0], x[1]], (2, 1)), [1.0, 1.0, 0.0]),
    "broadcast_to": (lambda xp, x: xp.broadcast_to([x[0]], (4,)), [4.0, 0.0, 0.0]),
    "operator": (lambda xp, x: x * [x[1], 2.0, 3.0], [2.0, 3.0, 3.0]),
    "reflected": (lambda xp, x: [x[1], 2.0, 3.0] - x, [-1.0, 0.0, -1.0]),
    "concat": (lambda xp, x: xp.concat([[x[0], 5.0], x]), [2.0, 1.0, 1.0]),
    "stack": (lambda xp, x: xp.stack([x[0], 5.0, x[1]]), [1.0, 1.0, 0.0]),
    "sort": (lambda xp, x: xp.sort([x[2], x[0]])[0], [1.0, 0.0, 0.0]),
    "index": (lambda xp, x: x[[xp.argmax(x), 0, 0]], [2.0, 0.0, 1.0]),
    "value": (lambda xp, x: write(xp.asarray(x, copy=True), slice(0, 2), [x[2], 7.0]), [0.0, 0.0, 2.0]),
}


def write(x: Any, key: Any, value: Any) -> Any:
    x[key] = value
    return x


@for_each("function, expected", LISTS.values())
def test_lists_of_traced_arrays(function, expected):
    assert grad(lambda x: total(function(array_namespace(x), x)))(X).tolist() == expected

    def slope(x):
        return total(grad(lambda x: total(function(array_namespace(x), x) ** 2))(x))

    step = 1e-6 * np.eye(3)
    differences = [(slope(X + row) - slope(X - row)) / 2e-6 for row in step]
    np.testing.assert_allclose(grad(slope)(X), differences, rtol=1e-6, atol=1e-6)


def test_only_the_last_of_values_written_to_one_element_has_a_gradient():
    def function(x):
        y = array_namespace(x).asarray(x, copy=True)
        y[[0, 0, 1]] = x * x
        return total(y)

    assert grad(function)(X).tolist() == [0.0, 4.0, 9.0]
    torch = pytest.importorskip("torch")
    assert grad(function)(torch.ones(3, device="meta")).device.type == "meta"


def test_writes_that_cannot_be_followed_raise():
    buffer = np.zeros(3)
    for function in (
        lambda x: write(array_namespace(x).asarray(buffer), 0, x[0]),
        lambda x: (lambda y: write(stop_gradient(y), 0, 0.0) * y)(x * 1.0),
        lambda x: write(array_namespace(x).broadcast_to(x, (2, 3)), 0, 0.0),
    ):
        for transform in (grad, lambda f: grad(lambda x: total(grad(f)(x)))):
            with raises_line(DifferentiationError, r"write into a copy: xp.asarray\(x, copy=True\)"):
                transform(lambda x, function=function: total(function(x)))(X)
    assert not buffer.any()


# Functions, their arguments, and the error of their derivatives.
RULE, SCALAR = "has no derivative rule; define one with", "expected a floating scalar"
MISSING = "traced arrays have no "
REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (lambda x: total(array_namespace(x).full((2,), x[0])), X, NotImplementedError, f"full {RULE}"),
    (lambda x: total(array_namespace(x).linspace(0.0, x[0], 3)), X, NotImplementedError, f"linspace {RULE}"),
    (lambda x: total(array_namespace(x).arange(x[0])), X, NotImplementedError, f"arange {RULE}"),
    (lambda x: total(array_namespace(x).repeat(x, np.asarray([1, 2, 3]))), X, NotImplementedError, "array of counts"),
    (lambda x: total(array_namespace(x).astype(x, np.complex128)), X, ShapeError, f"returned complex128 .*{SCALAR}"),
    (lambda x: array_namespace(x).take(x, [x[0], x[1]]), X, DifferentiationError, "take got a traced array as an argu"),
    (
        lambda x: array_namespace(x).scatter_add(x, np.asarray([0]), updates=[x[0]]),
        X, DifferentiationError, "scatter_add got a traced array by keyword",
    ),
    (lambda x: total(remat(lambda y: y * x)(x * 2.0)), X, RuntimeError, "closes over a traced array; pass it to f"),
    (lambda x: x, X, ShapeError, rf"returned float64 of shape \(3,\); {SCALAR}"),
    (lambda x: array_namespace(x).argmax(x), X, ShapeError, rf"returned int64 of shape \(\); {SCALAR}"),
    (lambda x: 1.0, X, ShapeError, f"returned a float; {SCALAR} array"),
    (lambda x: None, X, ShapeError, f"returned None; {SCALAR} array"),
    *((lambda x: x, x, ShapeError, "argument 0 is an? [a-zN]*; expected a floating array, a float, a list of floats")
      for x in (1, True, "x", {"a": 1}, (), [], [[1.0], [1.0, 2.0]])),
    (lambda x: x, None, ShapeError, "argument 0 is None; expected a floating array"),
    (lambda x: x, [1, 2], ShapeError, "there are only arrays of int64 to .*: 1.0 for 1"),
    (lambda x: x, {"a": np.asarray(3), "b": np.asarray(True)}, ShapeError, "there are only arrays of bool, int64 to"),
    (lambda x: x.tolist(), X, AttributeError, f"^{MISSING}method 'tolist'; use list"),
    (lambda x: x.shepe, X, AttributeError, f"^{MISSING}attribute 'shepe'"),
    (lambda x: x.backward(), X, AttributeError, rf"^{MISSING}method 'backward'; use xformer\.value_and_grad\("),
]  # fmt: skip


@for_each("function, x, kind, message", REFUSED)
def test_what_has_no_derivative_is_refused(function, x, kind, message):
    with pytest.raises(kind, match=message) as caught:
        grad(function)(x)
    assert "\n" not in str(caught.value)


def test_vjp_needs_floating_arrays():
    with raises_line(ShapeError, "vjp got a dict; expected a floating array"):
        vjp(lambda x: x, {"a": 1})


def test_numbers_are_differentiated_as_arrays():
    assert grad(lambda x: x**2)(3.0) == 6.0
    np.testing.assert_array_equal(grad(lambda x: np.sum(x * x))([1.0, 2]), [2.0, 4.0])
    gradient = grad(lambda x, y: x["a"] * x["b"] * y, (0, 1))({"a": 2.0, "b": 3.0}, 5.0)
    assert gradient == ({"a": 15.0, "b": 10.0}, 6.0)
    assert vjp(lambda x: x * x, 3.0)[1](np.asarray(1.0)) == (6.0,)


def test_numbers_beside_arrays_are_differentiated_as_arrays_like_them(xp):
    def product(tree):
        weight, (scale, count, ids) = tree
        assert (count, ids) == (2, [1, 2])
        return array_namespace(weight).sum(weight) * scale["b"] * scale["c"][0] * count

    tree = (from_host(xp, values(3)), ({"b": 0.5, "c": [2.0, 1]}, 2, [1, 2]))
    weight, (scale, *_) = grad(product)(tree)
    size = float(to_host(tree[0]).sum())
    np.testing.assert_allclose(to_host(weight), [2.0, 2.0, 2.0])
    np.testing.assert_allclose(to_host(scale["b"]), 4.0 * size, rtol=1e-6)
    np.testing.assert_allclose(to_host(scale["c"]), [size, 0.0], rtol=1e-6)


WRONG = "positional arguments; pass the arguments"


@for_each("argnums, count, message", [
    *((argnums, count, WRONG) for argnums, count in ((1, 1), ((0, 2), 2), (0, 0))),
    *((argnums, 2, f"{WRONG} to differentiate by position") for argnums in (None, "x", (None,))),
    *((argnums, 2, r"expected a position; call grad\(f\)\(x\) for the value at x")
      for argnums in (1.0, [1.0, 2.0], np.ones(3))),
    # The gradient of the first one would be zero.
    *((argnums, 2, "names an argument twice; expected each position once")
      for argnums in ((0, 0), (1, 0, 1), [0, -2], (1, -1))),
])  # fmt: skip
def test_wrong_positions_are_refused(argnums, count, message):
    with raises_line(ConfigError, message):
        grad(lambda x, y: total(x * y), argnums)(*[values(3)] * count)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def watch(function: Any) -> tuple[list[Any], Any]:
    """Run a function of x and `residual`, which makes exp(x) and notes whether it is alive."""
    alive: list[Any] = []

    def residual(x):
        y = array_namespace(x).exp(x)
        alive.append(weakref.ref(y._value))
        return y

    return alive, function(residual)


def is_dead(alive: list[Any]) -> bool:
    assert alive
    return all(reference() is None for reference in alive)


@pytest.mark.usefixtures("no_collector")
def test_memory_is_free_when_value_and_grad_returns():
    alive, _ = watch(lambda residual: value_and_grad(lambda x: total(residual(x) * x))(values(3)))
    assert is_dead(alive)


@pytest.mark.usefixtures("no_collector")
def test_memory_is_free_after_an_error_even_when_an_array_escaped():
    escaped = []

    def fails(residual):
        def function(x):
            escaped.append(residual(x) * 2.0)
            raise KeyError("own error")

        with pytest.raises(KeyError):
            grad(function)(values(3))

    alive, _ = watch(fails)
    assert is_dead(alive)
    assert escaped


@pytest.mark.usefixtures("no_collector")
def test_memory_is_freed_during_the_backward_pass():
    seen = []

    def pull(g, residuals, needs):
        seen.append(is_dead(alive))
        return (g,)

    alive: list[Any] = []
    early = Operation("early", "x: (...) float -> (...)", lambda x, save: (x * 1.0, None), pull)

    def function(x):
        y = array_namespace(x).exp(early(x))
        alive.append(weakref.ref(y._value))
        return total(y * 2.0)

    grad(function)(values(3))
    assert seen == [True]


@pytest.mark.usefixtures("no_collector")
def test_memory_is_free_when_a_pullback_is_used_or_dropped():
    alive, (_, pullback) = watch(lambda residual: vjp(lambda x: residual(x) * x, values(3)))
    assert not is_dead(alive)
    pullback(np.ones(3))
    assert is_dead(alive)
    alive, (_, pullback) = watch(lambda residual: vjp(lambda x: residual(x) * x, values(3)))
    del pullback
    assert is_dead(alive)


def test_gradients_are_reported_once_each_when_they_are_complete():
    model, x, reported = stack(), values(4, 3), {}

    def loss(tree: Any) -> Any:
        model, _ = tree
        return array_namespace(x, model.scale).sum(model(x) * model.scale)

    tree = model, values(2)  # the second is not used
    _, grads = value_and_grad(loss, on_gradient=lambda number, each: reported.setdefault(number, []).append(each))(tree)
    order = list(reported)
    assert order.index(4) < order.index(2) < order.index(0)  # from the last layer to the first
    assert all(len(each) == 1 for each in reported.values())
    for number, gradient in enumerate(flatten(grads)[0]):
        assert reported[number][0] is gradient or not gradient.any()


def test_the_argument_to_differentiate_is_chosen_by_position():
    x, y = values(3), values(4)[:3]

    def function(x, y, *, factor=1.0):
        return total(x * x * y) * factor

    np.testing.assert_allclose(grad(function, argnums=1)(x, y, factor=2.0), 2.0 * x * x)
    first, second = grad(function, argnums=(0, 1))(x, y)
    np.testing.assert_allclose(first, 2.0 * x * y)
    np.testing.assert_allclose(second, x * x)
    gradient, auxiliary = grad(lambda x: (total(x * x), "auxiliary"), has_aux=True)(x)
    np.testing.assert_allclose(gradient, 2.0 * x)
    assert auxiliary == "auxiliary"


def test_gradients_add_up_in_place_but_not_in_arrays_of_others():
    seed, x = np.ones((2, 3)), np.arange(6.0).reshape(2, 3)
    (value, _), pull = vjp(lambda x: (x + x, np.transpose(np.transpose(x)) + np.exp(0.0 * x)), x)
    assert np.array_equal(pull((seed, seed))[0], np.full((2, 3), 3.0))
    assert np.array_equal(seed, np.ones((2, 3)))
    assert np.array_equal(value, 2.0 * x)
    table, column = np.ones((1000, 1000)), np.ones((1000, 1))
    tracemalloc.start()
    try:
        grad(lambda table: sum(np.sum(np.matmul(table, column)) for _ in range(4)))(table)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * table.nbytes  # the sum and one of its terms
    finally:
        tracemalloc.stop()
