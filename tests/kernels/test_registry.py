"""The seam between operations and kernels: who serves, who says why not, and what the environment may ask for."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from tests.reference import raises_line
from xformer import kernels
from xformer.backends import dtype_named, resolve
from xformer.errors import BackendError, ConfigError
from xformer.kernels import Kernel, registry
from xformer.ops import attention, dropout, relu
from xformer.ops.adam import adam


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Let a test register kernels that are gone afterwards, and check kernels that were checked before."""
    kernels.explain("relu", np.ones(3))  # loads NumPy's
    ours = {key: [kernel for kernel in found if not kernel.compiled] for key, found in registry._KERNELS.items()}
    monkeypatch.setattr(registry, "_KERNELS", ours)
    monkeypatch.setattr(registry, "_CHECKED", set())
    monkeypatch.delenv("XFORMER_KERNELS", raising=False)
    monkeypatch.delenv("XFORMER_CHECK_KERNELS", raising=False)


def small(arrays, static):
    return None if arrays[0].size <= 4 else "more than four elements"


def register(forward, *, name="test.relu", supports=small, vjp=lambda g, residuals, needs: (7.0 * g,)):
    kernels.register(Kernel(name, "relu", "numpy", supports, forward, vjp))


def seven(x, *, save):
    return np.full_like(x, 7.0), None


def test_the_kernel_registered_last_serves_what_it_supports():
    register(seven)
    np.testing.assert_array_equal(relu(np.ones(4)), np.full(4, 7.0))
    np.testing.assert_array_equal(relu(np.ones(5)), np.ones(5))


def test_explain_names_every_candidate():
    register(seven)
    assert kernels.explain("relu", np.ones(4)).splitlines() == [
        "relu on numpy: served by test.relu",
        "relu on numpy: not numpy.relu: another kernel comes first",
    ]
    assert kernels.explain("relu", np.ones(5)).splitlines() == [
        "relu on numpy: not test.relu: more than four elements",
        "relu on numpy: served by numpy.relu",
    ]


def test_explain_knows_the_operations():
    with pytest.raises(ConfigError, match=r"^unknown operation 'atention'; did you mean 'attention'\?$"):
        kernels.explain("atention", np.ones(3))
    with pytest.raises(ConfigError, match=r"^unknown operation 'fft'; known operations: .*attention, .*softmax"):
        kernels.explain("fft", np.ones(3))


def test_libraries_without_kernels_get_the_portable_definition():
    strict = pytest.importorskip("array_api_strict")
    x = strict.asarray([-1.0, 2.0])
    assert kernels.explain("relu", x) == "relu on array_api_strict: served by the portable definition"
    assert float(relu(x)[1]) == 2.0


def test_portable_switches_all_kernels_off(monkeypatch):
    register(seven)
    monkeypatch.setenv("XFORMER_KERNELS", "portable")
    np.testing.assert_array_equal(relu(np.ones(4)), np.ones(4))
    assert kernels.explain("relu", np.ones(4)).splitlines() == [
        "relu on numpy: not test.relu: XFORMER_KERNELS=portable",
        "relu on numpy: not numpy.relu: XFORMER_KERNELS=portable",
        "relu on numpy: served by the portable definition",
    ]
    monkeypatch.setenv("XFORMER_KERNELS", "auto")
    np.testing.assert_array_equal(relu(np.ones(4)), np.full(4, 7.0))


def test_uncompiled_switches_off_what_needs_a_compiler(monkeypatch):
    kernels.register(Kernel("test.relu", "relu", "numpy", small, seven, None, priority=30, kind="jit"))
    np.testing.assert_array_equal(relu(np.ones(4)), np.full(4, 7.0))
    monkeypatch.setenv("XFORMER_KERNELS", "no-jit")
    np.testing.assert_array_equal(relu(np.ones(4)), np.ones(4))
    assert kernels.explain("relu", np.ones(4)).splitlines() == [
        "relu on numpy: not test.relu: XFORMER_KERNELS=no-jit",
        "relu on numpy: served by numpy.relu",
    ]


@pytest.mark.parametrize("call", [lambda: relu(np.ones(3)), lambda: kernels.explain("relu", np.ones(3))])
def test_an_unknown_mode_is_refused(monkeypatch, call):
    monkeypatch.setenv("XFORMER_KERNELS", "fast")
    with pytest.raises(ConfigError, match=r"^XFORMER_KERNELS is 'fast'; expected 'auto', 'uncompiled' or 'portable'$"):
        call()


@pytest.mark.parametrize("wrong", [seven, lambda x, *, save: (np.full_like(x, np.nan), None)])
def test_check_raises_where_a_kernel_is_wrong(monkeypatch, wrong):
    register(wrong)
    relu(np.ones(4))
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    with pytest.raises(BackendError, match=r"^kernel test\.relu differs from the portable relu by \S+ \(relative\)"):
        relu(np.ones(4))


def nearly(calls):
    """A relu, and its VJP, that are wrong by rounding, and that note when they are called."""

    def forward(x, *, save):
        calls.append(save)
        return np.maximum(x, 0.0) * (1.0 + 1e-6), x > 0

    return forward, lambda g, positive, needs: (g * positive * (1.0 + 1e-6),)


def test_check_accepts_rounding_and_looks_once(monkeypatch):
    calls = []
    forward, vjp = nearly(calls)
    register(forward, vjp=vjp)
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    relu(np.ones(4))
    relu(np.ones(4))
    assert calls == [False, True, False, False]  # output and derivative are checked, then two calls are served


@pytest.mark.parametrize(
    "wrong",
    [
        lambda g, positive, needs: (1.001 * g * positive,),
        lambda g, positive, needs: (np.nan * g,),
        lambda g, positive, needs: (None,),
    ],
)
def test_check_raises_where_a_derivative_is_wrong(monkeypatch, wrong):
    register(nearly([])[0], vjp=wrong)
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    with pytest.raises(BackendError, match=r"^kernel test\.relu differs from the derivative of the portable relu by"):
        relu(np.asarray([1.0, -1.0, 2.0, 0.0]))


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 4e-3), ("bfloat16", 3e-2), ("float32", 1e-4)])
def test_check_knows_how_coarse_a_dtype_is(monkeypatch, dtype, rounding):
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    x = np.asarray([1.0, 3.0], "float32").astype(dtype_named(resolve("numpy"), dtype))
    for size, refused in [(0.5, False), (2.0, True)]:
        registry._CHECKED.clear()
        register(lambda x, *, save, size=size: (x + np.asarray(size * rounding * 3.0).astype(x.dtype), None), vjp=None)
        with pytest.raises(BackendError, match="differs") if refused else contextlib.nullcontext():
            relu(x)


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_check_accepts_infinity_and_nan_where_they_belong(monkeypatch, odd):
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    dropout(np.asarray([1.0, odd, odd]), np.asarray([True, True, False]), 0.5)
    registry._CHECKED.clear()
    right = registry._KERNELS["dropout", "numpy"][0]
    spread = right._replace(name="test.dropout", forward=lambda x, keep, **static: (x * keep, keep))
    kernels.register(spread)
    with pytest.raises(BackendError, match=r"^kernel test\.dropout differs from the portable dropout by nan"):
        dropout(np.asarray([1.0, 2.0, np.nan]), np.asarray([True, True, False]), 1.0)


def test_check_asks_for_the_derivative_of_floating_arrays_alone(monkeypatch):
    right = registry._KERNELS["dropout", "numpy"][0]
    asked = []

    def vjp(g, residuals, needs, **static):
        asked.append(needs)
        return right.vjp(g, residuals, needs, **static)

    kernels.register(right._replace(name="test.dropout", vjp=vjp))
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    dropout(np.ones((2, 3)), np.eye(2, 3) > 0, 0.5)
    assert asked == [(True, False)]


def test_check_takes_rounding_for_zero(monkeypatch):
    """With a single key the weights are ones, and the scores have no derivative: each way leaves its own rounding."""
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    rng = np.random.default_rng(0)
    for length in range(1, 9):
        registry._CHECKED.clear()
        query, key, value = (rng.normal(size=(2, 2, n, 8)).astype("float32") for n in (length, 1, 1))
        attention(query, key, value)


def test_check_looks_at_every_output_and_leaves_arguments_alone(monkeypatch):
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    settings = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9}
    arrays = [np.ones((2, 3)), np.ones((2, 3)), np.zeros((2, 3)), np.zeros((2, 3))]
    ((parameter, first, _),) = adam([arrays], step=1, **settings)  # the kernel works in place: once, not twice
    np.testing.assert_allclose(parameter, 0.9)
    np.testing.assert_allclose(first, 0.1)

    (right,) = registry._KERNELS["adam", "numpy"]

    def wrong(*given, **static):
        (p, m, v), residuals = right.forward(*given, **static)
        return (p, m, 2.0 * v), residuals

    kernels.register(right._replace(name="test.adam", forward=wrong))
    with pytest.raises(BackendError, match=r"^kernel test\.adam differs"):
        adam([arrays], step=2, **settings)


@pytest.mark.parametrize("arrays", [1, 3, 7])
def test_questions_with_other_arguments_are_refused(arrays):
    x = np.ones((1, 1, 4, 4), "float32")
    expected = "expected query, key, value, mask, bias, keep, causal, scale, keep_probability, with None for"
    with raises_line(ConfigError, rf"attention was asked about with {arrays} arrays and causal; {expected}"):
        kernels.explain("attention", *[x] * arrays, causal=True)


@pytest.mark.parametrize("settings", [{}, {"epsilon": 1e-5}, {"epsilon": 1e-5, "other": 1}])
def test_kernels_are_not_asked_about_half_a_call(settings):
    x = np.ones((2, 4), "float32")
    with raises_line(ConfigError, "^layer_norm was asked about with .*; expected x, weight, bias, epsilon, with None"):
        kernels.explain("layer_norm", *[x] * (3 if "other" in settings else 1), **settings)
