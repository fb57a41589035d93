"""What functions of other libraries need: constants of one namespace, `xp.special`, absent functions, einops."""

from __future__ import annotations

import collections
import subprocess
import sys
from typing import Any

import array_api_compat
import numpy as np
import pytest

import xformer as xf
from tests.conftest import library_or_skip
from tests.reference import for_each, raises_line
from xformer.backends import array_namespace, from_host, to_host
from xformer.errors import DifferentiationError
from xformer.tracing import record as registration
from xformer.tracing.rule import RULES

scipy_special = pytest.importorskip("scipy.special")
RANDOM = np.random.default_rng(0)
X, C = RANDOM.random((3, 2)) * 0.8 + 0.1, RANDOM.random((3, 2)) + 0.3
WEIGHT = np.cos(np.arange(6.0)).reshape(3, 2)
STEP = 1e-5

# Parameters before the array in which functions of scipy.special are differentiated; most have none.
PARAMETERS: dict[str, tuple[float, ...]] = {
    "polygamma": (2,),
    "huber": (0.5,),
    **dict.fromkeys(("gammainc", "gammaincc", "chdtr", "chdtrc", "stdtr"), (1.7,)),
    **dict.fromkeys(("betainc", "betaincc", "fdtrc"), (1.7, 2.3)),
}
SPECIAL = [name.removeprefix("special.") for name in RULES if name.startswith("special.")] + ["sinc"]


def special(name: str, position: int = 0) -> Any:
    """Return f(x, constant, namespace or scipy_special) for a function that is differentiated at a position."""

    def function(x: Any, c: Any, functions: Any) -> Any:
        if name in ("xlogy", "xlog1py", "rel_entr", "kl_div", "betaln"):
            return getattr(functions, name)(*((x, c) if position == 0 else (c, x)))
        given = PARAMETERS.get(name, ())
        return getattr(functions, name)(*(0.0 * c + p if type(p) is float else p for p in given), x)

    return function


FUNCTIONS = [(name, 0) for name in SPECIAL] + [
    (name, 1) for name in ("xlogy", "xlog1py", "rel_entr", "kl_div", "betaln")
]


@for_each("name, position", FUNCTIONS)
def test_functions_of_scipy_special_have_derivatives_of_any_order(name, position):
    function = special(name, position)

    def loss(x, c):
        return np.sum(
            function(x, c, array_namespace(x).special if type(x) is not np.ndarray else scipy_special) * WEIGHT
        )

    def slope(x, c):
        return np.sum(xf.grad(loss)(x, c) * WEIGHT)

    for f in (loss, slope):
        difference = (f(X + STEP * C, C) - f(X - STEP * C, C)) / (2 * STEP)
        expected = pytest.approx(difference, rel=1e-6)
        gradient = xf.grad(f)(X, C)
        assert np.sum(gradient * C) == expected
        assert xf.jvp(lambda x, f=f: f(x, array_namespace(x).asarray(C)), (X,), (C,))[1] == expected
        np.testing.assert_allclose(xf.jit(xf.grad(f))(X, C), gradient, rtol=1e-12)
    rows = xf.vmap(lambda x, c, w: np.sum(w * function(x, c, array_namespace(x).special)))(X, C, WEIGHT)
    np.testing.assert_allclose(np.sum(rows), loss(X, C))


@for_each("name", [name for name in SPECIAL if name not in ("polygamma",)])
def test_ufuncs_of_scipy_take_traced_arrays(name):
    function = special(name)
    gradient = xf.grad(lambda x, c: np.sum(function(x, c, scipy_special)))(X, C)
    expected = xf.grad(lambda x, c: np.sum(function(x, c, array_namespace(x).special)))(X, C)
    np.testing.assert_array_equal(gradient, expected)


def test_ufuncs_of_others_and_options_are_refused_by_name():
    gamma = np.frompyfunc(lambda x: 3.0 * x, 1, 1)
    other = type("Ufunc", (), {"__name__": "gamma", "__call__": lambda self, x: gamma(x)})()
    with raises_line(DifferentiationError, "gamma of a traced array has no derivative rule"):
        xf.grad(lambda x: np.sum(x.__array_ufunc__(other, "__call__", x)))(X)
    with raises_line(DifferentiationError, "special.expit of a traced array has no argument where"):
        xf.grad(lambda x: np.sum(scipy_special.expit(x, where=X > 0.5)))(X)


def test_methods_of_ufuncs_on_constants_of_other_libraries(xp):
    def loss(x: Any, c: Any) -> Any:
        table = np.add.outer(c, c)
        assert table.shape == (3, 3)
        return array_namespace(x).sum(x * x) * float(table[0, 1])

    c = np.asarray([1.0, 2.0, 4.0])
    np.testing.assert_allclose(to_host(xf.grad(loss)(from_host(xp, X), from_host(xp, c))), 6.0 * X)


def test_functions_of_scipy_special_on_every_library(xp):
    for name, position in FUNCTIONS:
        function = special(name, position)

        def loss(x, c, function=function):
            return array_namespace(x).sum(function(x, c, array_namespace(x).special))

        gradient = xf.grad(loss)(from_host(xp, X), from_host(xp, C))
        np.testing.assert_allclose(to_host(gradient), xf.grad(loss)(X, C), rtol=1e-6, err_msg=name)


def test_arguments_without_a_derivative_have_the_namespace_of_the_others(xp):
    x, c = from_host(xp, X), from_host(xp, C)

    def function(x: Any, c: Any, *, options: Any) -> Any:
        ns = array_api_compat.array_namespace(x, c, options["d"][0])  # which refuses arrays of different namespaces
        return ns.sum(x * x * c * options["d"][0])

    options = {"d": [c], "name": "x"}
    expected = to_host(2 * x * c * c)
    gradients = [
        xf.grad(function)(x, c, options=options),
        xf.value_and_grad(function)(x, c, options=options)[1],
        xf.grad(lambda c, x: function(x, c, options=options | {"d": [array_namespace(x).asarray(c)]}), 1)(c, x),
        xf.jacobian(function)(x, c, options=options),
        xf.jit(lambda x, c: xf.grad(function)(x, c, options={"d": [c]}))(x, c),
        xf.grad(lambda x, c: function(x, c, options={"d": [c]}))(x, c=c),
    ]
    for gradient in gradients:
        np.testing.assert_allclose(to_host(gradient), expected)
    hessian = to_host(xf.hessian(function)(x, c, options=options))
    np.testing.assert_allclose(np.reshape(hessian, (6, 6)), np.diag((2 * C * C).ravel()))
    rows = xf.vmap(xf.grad(lambda x, c: function(x, c, options={"d": [c]})))(x, c)
    np.testing.assert_allclose(to_host(rows), expected)


def test_constants_have_the_methods_and_values_of_their_arrays(xp):
    x, c = from_host(xp, X), from_host(xp, np.arange(6).reshape(3, 2))

    def function(x: Any, c: Any, log: Any, name: str) -> Any:
        assert np.asarray(c).tolist() == (c + 0).tolist() == [[0, 1], [2, 3], [4, 5]]
        assert int(c[1, 0]) == 2
        log.append(name)
        return array_namespace(x).sum(x * x) * float(c[2, 1])

    if hasattr(c, "tolist"):
        log: list[str] = []
        np.testing.assert_allclose(to_host(xf.grad(function)(x, c, log, "a")), 10.0 * X)
        assert log == ["a"]


def test_arguments_that_no_trace_takes_stay_as_they_are():
    table = collections.defaultdict(list, {"a": np.ones(3)})
    log: list[str] = []

    def function(x: Any, masked: Any, table: Any, log: Any, name: Any) -> Any:
        assert type(masked) is np.ma.MaskedArray
        assert table["b"] == []
        log.append(name)
        return np.sum(x * table["a"]) * masked.count()

    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    assert xf.grad(function)(np.ones(3), masked, table, log, "c").tolist() == [1.0, 1.0, 1.0]
    assert log == ["c"]


def test_writes_into_an_argument_without_a_derivative_are_seen_by_the_caller():
    c = np.zeros(3)

    def function(x: Any, c: Any) -> Any:
        c[0] = 2.0
        return np.sum(x * c)

    assert xf.grad(function)(np.ones(3), c).tolist() == c.tolist() == [2.0, 0.0, 0.0]


def assign(x: Any) -> None:
    x[0] = 5.0


WRITES: dict[str, Any] = {
    "numpy asarray": lambda d: assign(np.asarray(d)),
    "numpy base": lambda d: assign(d[:2].base),
    "numpy byteswap": lambda d: d.byteswap(True),
    "numpy data": lambda d: assign(d.data),
    "numpy DLPack": lambda d: assign(np.from_dlpack(d)),
    "numpy fill_diagonal": lambda d: np.fill_diagonal(d.view().reshape(3, 1), 8.0),
    "numpy flat": lambda d: assign(d.flat),
    "numpy sort": lambda d: d[::-1].sort(),
    "torch add_": lambda d: d.add_(1),
    "torch detach": lambda d: assign(d.detach()),
    "torch fill_": lambda d: d[1:].fill_(4.0),
    "torch flatten": lambda d: assign(library_or_skip("torch").module.flatten(d)),
    "torch numpy": lambda d: assign(d.numpy()),
    "torch relu_": lambda d: library_or_skip("torch").module.relu_(d.neg_()),
}


@for_each("name", WRITES)
def test_writes_into_the_memory_of_constants_are_seen_later_and_change_no_earlier_derivative(name):
    xp = library_or_skip(name.split()[0])
    x, c = from_host(xp, np.arange(1.0, 4.0)), from_host(xp, np.arange(2.0, 5.0))

    def function(x: Any, c: Any) -> Any:
        d = c * 2
        view = d[1:]
        before = [x * d, x[1:] * view]
        WRITES[name](d)
        return array_namespace(x).concat([*before, x * d, x[1:] * view])

    expected = function(x, c)
    vectors = [
        xf.jvp(lambda x: function(x, array_namespace(x).asarray(c)), (x,), (x,))[1],
        xf.vmap(lambda x: function(x, array_namespace(x).asarray(c)))(xp.stack([x, x]))[1, :],
        xf.remat(function)(x, c),
    ]
    for vector in vectors:
        np.testing.assert_array_equal(to_host(vector), to_host(expected))

    def loss(x: Any, c: Any) -> Any:
        return array_namespace(x).sum(function(x, c) ** 2) / 2

    gradient = xf.grad(loss)(x, c)
    assert float(xp.sum(gradient * x)) == pytest.approx(float(xp.sum(expected**2)))
    hessian = xf.hessian(loss)(x, c)
    np.testing.assert_allclose(to_host(hessian @ x), to_host(gradient))


@for_each("transform", [xf.grad, lambda f: xf.vmap(f, (0, None)), xf.remat, lambda f: xf.grad(xf.remat(f))])
def test_reading_an_argument_is_no_write(transform):
    def function(x: Any, i: Any) -> Any:
        assert i.nbytes == 8 * i.size
        assert np.asarray(i).tolist() == i.tolist()
        return array_namespace(x).sum(x)

    index = np.arange(2)
    index.flags.writeable = False
    transform(function)(np.ones((2, 3)), index)
    xf.vjp(function, np.ones(3), index)
    xf.jvp(function, (np.ones(3), index), (np.ones(3), index))
    xf.grad(lambda given: function(*given))((np.ones(3), index))


def test_lists_and_dicts_that_the_function_changes_change_for_the_caller(xp):
    x = c = from_host(xp, np.ones(3))
    history, statistics = [c], {"c": c, "log": [c, 0], "gone": c}

    def function(x: Any, history: Any, statistics: Any) -> Any:
        y = array_namespace(x).sum(x * history[0] * statistics["c"])
        history.append(y)
        statistics["last"] = statistics["c"]
        statistics["log"][1] += 1
        statistics.pop("gone", None)
        return y

    for _ in range(3):
        xf.grad(function)(x, history, statistics)
    xf.jacobian(function)(x, history, statistics=statistics)
    xf.hessian(function)(x, history, statistics)
    assert [float(y) for y in history[1:]] == [3.0] * 5
    assert statistics.keys() == {"c", "log", "last"}
    assert statistics["log"][1] == 5
    assert all(y is c for y in (history[0], statistics["c"], statistics["last"], statistics["log"][0]))
    with pytest.raises(RuntimeError, match="stop"):
        xf.grad(lambda x, h: h.append(1) or (_ for _ in ()).throw(RuntimeError("stop")))(x, history)
    assert history[-1] == 1


def test_errors_name_a_caller_without_a_module():
    names: dict[str, Any] = {"np": np}
    exec("def function(x): return np.asarray(x)", names)
    with raises_line(DifferentiationError, "in function of <string>"):
        xf.grad(names["function"])(X)


@for_each("library, names", [
    ("numpy", ["kron", "linalg.eig", "nanmedian", "bincount"]),
    ("torch", ["kron", "linalg.eig", "relu", "conv1d"]),
    ("jax", ["kron", "linalg.eig", "polyfit"]),
])  # fmt: skip
def test_functions_beside_the_standard_without_a_rule_are_absent(library, names):
    xp = library_or_skip(library)

    def function(x: Any) -> Any:
        ns = array_namespace(x)
        for name in names:
            extension, _, short = name.rpartition(".")
            assert not hasattr(getattr(ns, extension) if extension else ns, short), name
        assert hasattr(ns, "linspace")
        assert hasattr(ns.linalg, "inv")
        with raises_line(DifferentiationError, "special.zeta has no derivative rule; define one with"):
            ns.special.zeta(x, x)
        return ns.sum(x)

    x = from_host(xp, X[0, 0])
    for transformed in (xf.grad(function), xf.grad(xf.grad(lambda x: function(x) ** 3))):
        transformed(x)


def test_errors_of_functions_beside_the_standard_name_them():
    for message, function in {
        "kron has no derivative rule; define one with": lambda xp, x: xp.kron(x, x),
        r"linalg.eig has no derivative rule; define one with": lambda xp, x: xp.linalg.eig(x),
    }.items():
        with pytest.raises(DifferentiationError, match=message) as caught:
            xf.grad(lambda x, function=function: function(array_namespace(x), x))(X)
        assert isinstance(caught.value, AttributeError)


EINOPS: dict[str, Any] = {
    "rearrange": lambda einops, x, c: einops.rearrange(x, "a (b c) -> b a c", b=2),
    "mean": lambda einops, x, c: einops.reduce(x, "a b -> a", "mean"),
    "max": lambda einops, x, c: einops.reduce(x, "(a k) b -> a b", "max", k=3),
    "repeat": lambda einops, x, c: einops.repeat(x, "a b -> a b k", k=2),
    "einsum": lambda einops, x, c: einops.einsum(x, c, "a b, a c -> b c"),
    "pack": lambda einops, x, c: einops.pack([x, c], "* b")[0],
    "list": lambda einops, x, c: einops.rearrange([x, c], "l a b -> b (l a)"),
    "contract": lambda einops, x, c: pytest.importorskip("opt_einsum").contract("ab,cb,cd->ad", c, x, x),
    "contract all": lambda einops, x, c: pytest.importorskip("opt_einsum").contract("ab,ab->", x, c),
}


@for_each("name", EINOPS)
def test_einops_and_opt_einsum_take_traced_arrays(name):
    einops = pytest.importorskip("einops")

    def function(x: Any, c: Any) -> Any:
        y = EINOPS[name](einops, x, c)
        xp = array_namespace(y)
        return xp.sum(y * y * xp.reshape(xp.arange(1.0, y.size + 1.0, dtype=y.dtype), tuple(y.shape)))

    gradient = xf.grad(function)(X, C)
    difference = (function(X + STEP * C, C) - function(X - STEP * C, C)) / (2 * STEP)
    assert np.sum(gradient * C) == pytest.approx(difference)
    np.testing.assert_allclose(xf.jit(function)(X, C), function(X, C))
    assert xf.vmap(function, in_axes=(0, None))(np.stack([X, C]), C)[0] == pytest.approx(function(X, C))
    for library in ("torch", "jax"):
        xp = library_or_skip(library)
        np.testing.assert_allclose(to_host(xf.grad(function)(from_host(xp, X), from_host(xp, C))), gradient)


@for_each("package, name", [("einops._backends", "AbstractBackend"), ("opt_einsum.backends.dispatch", "_cached_funcs")])
def test_packages_without_the_private_names_do_not_stop_a_derivative(package, name, monkeypatch):
    monkeypatch.delattr(pytest.importorskip(package), name)
    registration.register.cache_clear()
    assert xf.grad(np.sum)(X).tolist() == np.ones((3, 2)).tolist()
    monkeypatch.undo()
    registration.register.cache_clear()


def test_einops_can_be_imported_inside_the_function():
    pytest.importorskip("einops")
    code = """
import sys, numpy as np, xformer as xf
def f(x):
    import einops
    return einops.reduce(x, "a b -> ", "sum")
assert "einops" not in sys.modules
print(xf.grad(f)(np.ones((2, 1))).tolist(), xf.jit(f)(np.ones((2, 1))))
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.split() == ["[[1.0],", "[1.0]]", "2.0"]


def test_functions_that_torch_has_need_no_scipy(monkeypatch):
    torch = library_or_skip("torch").module
    monkeypatch.setitem(sys.modules, "scipy", None)
    gradient = xf.grad(lambda x: array_namespace(x).sum(array_namespace(x).special.erf(x)))(torch.zeros(2))
    np.testing.assert_allclose(gradient.numpy(), 2 / np.pi**0.5, rtol=1e-6)
