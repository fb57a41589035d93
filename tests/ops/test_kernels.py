"""Kernels: selection, explanations, the environment variables, and the check of kernels."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from tests.ops.replace_kernels import kernels_by_operation, replace_kernels
from tests.reference import raises_line
from xformer import ops, value_and_grad
from xformer.backends import resolve
from xformer.errors import BackendError, ConfigError, ShapeError
from xformer.kernels import numpy as flash
from xformer.ops import Kernel, attention, checks, dropout, gelu, operation, relu, softmax
from xformer.ops.operation import OPERATIONS
from xformer.ops.optimizers import adam
from xformer.threads import parallel_map

FLOATS = ("float32", "float64")


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch):
    """Undo registrations after the test, hide the kernels of the native library, and forget earlier checks."""
    kernels = {n: [k for k in group if not k.disabled_by] for n, group in kernels_by_operation("numpy").items()}
    for name in ("relu", "gelu", "dropout"):
        kernels[name] = [OPERATIONS[name].definition._replace(name=f"base.{name}", backend="numpy", dtypes=FLOATS)]
    replace_kernels(monkeypatch, "numpy", kernels)
    monkeypatch.setattr(checks, "_CHECKED", set())
    monkeypatch.delenv("XFORMER_KERNELS", raising=False)
    monkeypatch.delenv("XFORMER_CHECK_KERNELS", raising=False)


def small(x, *, save):
    return None if x.size <= 4 else "more than four elements"


def register(forward, *, name="test.relu", vjp=lambda g, residuals, needs: (7.0 * g,), disabled_by=""):
    ops.register(Kernel(name, "relu", "numpy", forward, vjp, why_not=small, disabled_by=disabled_by))


def seven(x, *, save):
    return np.full_like(x, 7.0), None


# --- selection --------------------------------------------------------------------------------------------------------


def test_the_kernel_registered_last_that_supports_the_call_runs():
    register(lambda x, *, save: (x, None), name="test.earlier")
    register(seven)
    np.testing.assert_array_equal(relu(np.ones(4)), np.full(4, 7.0))
    np.testing.assert_array_equal(relu(np.ones(5)), np.ones(5))


def test_a_kernel_of_an_unknown_operation_is_refused():
    with raises_line(ConfigError, r"^unknown operation 'rellu'; did you mean 'relu'\?$"):
        ops.register(Kernel("test.relu", "rellu", "numpy", seven, None))


def test_portable_disables_all_kernels(monkeypatch):
    register(seven)
    monkeypatch.setenv("XFORMER_KERNELS", "portable")
    np.testing.assert_array_equal(relu(np.ones(4)), np.ones(4))
    assert ops.explain("relu", np.ones(4)).splitlines() == [
        "relu on numpy: portable definition",
        "  not test.relu: XFORMER_KERNELS=portable",
        "  not base.relu: XFORMER_KERNELS=portable",
    ]
    monkeypatch.setenv("XFORMER_KERNELS", "auto")
    np.testing.assert_array_equal(relu(np.ones(4)), np.full(4, 7.0))


@pytest.mark.parametrize(("disabled_by", "other"), [("no-native", "no-cudnn"), ("no-cudnn", "no-native")])
def test_a_class_of_kernels_can_be_disabled(monkeypatch, disabled_by, other):
    register(seven, disabled_by=disabled_by)
    for mode, disabled in (("auto", False), (other, False), (disabled_by, True), ("no-native,no-cudnn", True)):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        np.testing.assert_array_equal(relu(np.ones(4)), np.full(4, 1.0 if disabled else 7.0))
        assert (f"not test.relu: XFORMER_KERNELS={mode}" in ops.explain("relu", np.ones(4))) == disabled


@pytest.mark.parametrize("mode", ["fast", "no-native,fast", "auto,no-native", ","])
@pytest.mark.parametrize("call", [lambda: relu(np.ones(3)), lambda: ops.explain("relu", np.ones(3))])
def test_an_unknown_mode_is_refused(monkeypatch, call, mode):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    with raises_line(
        ConfigError, f"^XFORMER_KERNELS is '{mode}'; expected 'auto', 'portable', 'no-native', 'no-cudnn' or"
    ):
        call()


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_names_every_kernel_of_the_operation():
    register(seven)
    assert ops.explain("relu", np.ones(4)).splitlines() == [
        "relu on numpy: test.relu",
        "  not base.relu: test.relu comes first",
    ]
    assert ops.explain("relu", np.ones(5)).splitlines() == [
        "relu on numpy: base.relu",
        "  not test.relu: more than four elements",
    ]


def test_explain_lists_the_operations_of_a_call_once():
    register(seven)

    def call():
        return relu(np.ones(3)), softmax(np.ones((2, 3))), relu(np.ones(2)), relu(np.ones(5))

    assert ops.explain(call).splitlines() == [
        "relu on numpy: test.relu (2 calls)",
        "  not base.relu: test.relu comes first",
        "softmax on numpy: portable definition",
        "relu on numpy: base.relu",
        "  not test.relu: more than four elements",
    ]
    assert operation.SELECTIONS.items() is None


def test_explain_follows_derivatives_threads_and_half_precision():
    line = "relu on numpy: base.relu (4 calls)"
    x = np.ones((4, 3))
    assert ops.explain(lambda: parallel_map(relu, x)).splitlines() == [line]
    slope = value_and_grad(lambda x: np.sum(x) if isinstance(x, np.ndarray) else (relu(x) * 1.0)[0])
    assert ops.explain(lambda: slope(x[0])).splitlines() == ["relu on numpy: base.relu"]
    lines = ops.explain(lambda: gelu(x.astype("float16"))).splitlines()
    assert lines[0] == "gelu on numpy: in float32, rounded to float16"
    assert lines[-1] == "gelu on numpy: base.gelu"
    assert "\n".join(lines) == ops.explain("gelu", x.astype("float16"))


def test_explain_refuses_unknown_operations():
    with raises_line(ConfigError, r"^unknown operation 'atention'; did you mean 'attention'\?$"):
        ops.explain("atention", np.ones(3))
    with raises_line(ConfigError, r"^unknown operation 'fft'; expected one of .*attention, .*softmax"):
        ops.explain("fft", np.ones(3))


@pytest.mark.parametrize("count", [1, 7])
def test_explain_refuses_another_number_of_arrays(count):
    x = np.ones((1, 1, 4, 4), "float32")
    expected = "attention got . arrays; expected query, key, value, mask, bias, dropout_mask"
    with raises_line(ShapeError, f"^{expected}$"):
        ops.explain("attention", *[x] * count, causal=True)


def test_explain_refuses_unknown_options():
    x = np.ones((2, 4), "float32")
    with raises_line(ConfigError, r"^explain\('layer_norm'\) got the options epsilon, other; expected epsilon$"):
        ops.explain("layer_norm", x, x[0], x[0], epsilon=1e-5, other=1)
    with raises_line(ConfigError, r"got the options temprature; expected temperature, top_k, top_p, min_p$"):
        ops.explain("choose", x, x[:, 0], temprature=0.5)


def test_libraries_without_kernels_run_the_portable_definition():
    strict = pytest.importorskip("array_api_strict")
    x = strict.asarray([-1.0, 2.0])
    assert ops.explain("relu", x) == "relu on array_api_strict: portable definition"
    assert float(relu(x)[1]) == 2.0


# --- check ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [seven, lambda x, *, save: (np.full_like(x, np.nan), None)])
def test_the_check_raises_for_a_wrong_output(monkeypatch, wrong):
    register(wrong)
    relu(np.ones(4))
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    with pytest.raises(BackendError, match=r"^kernel test\.relu differs from the portable relu by \S+ \(relative\)"):
        relu(np.ones(4))


def test_a_kernel_of_infinite_tolerance_is_not_checked(monkeypatch):
    ops.register(Kernel("test.relu", "relu", "numpy", seven, None, tolerance=np.inf))
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    np.testing.assert_array_equal(relu(np.ones(2)), [7.0, 7.0])


def rounded_relu(calls):
    """Return forward and VJP of a relu with rounding errors; `calls` gets `save` of every call."""

    def forward(x, *, save):
        calls.append(save)
        return np.maximum(x, 0.0) * (1.0 + 1e-6), x > 0

    return forward, lambda g, positive, needs: (g * positive * (1.0 + 1e-6),)


def test_the_check_accepts_rounding_and_runs_once(monkeypatch):
    calls = []
    forward, vjp = rounded_relu(calls)
    register(forward, vjp=vjp)
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    relu(np.ones(4))
    relu(np.ones(4))
    assert calls == [False, True, False, False]  # the check of output and derivative, then the two calls


@pytest.mark.parametrize(
    "wrong",
    [
        lambda g, positive, needs: (1.001 * g * positive,),
        lambda g, positive, needs: (np.nan * g,),
        lambda g, positive, needs: (None,),
    ],
)
def test_the_check_raises_for_a_wrong_derivative(monkeypatch, wrong):
    register(rounded_relu([])[0], vjp=wrong)
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    with pytest.raises(BackendError, match=r"^kernel test\.relu differs from the derivative of the portable relu by"):
        relu(np.asarray([1.0, -1.0, 2.0, 0.0]))


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 4e-3), ("bfloat16", 3e-2), ("float32", 1e-4)])
def test_the_tolerance_of_the_check_depends_on_the_dtype(monkeypatch, dtype, rounding):
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    x = np.asarray([1.0, 3.0], "float32").astype(resolve("numpy").dtype_named(dtype))
    for size, raises in [(0.5, False), (2.0, True)]:
        checks._CHECKED.clear()
        register(lambda x, *, save, size=size: (x + np.asarray(size * rounding * 3.0).astype(x.dtype), None), vjp=None)
        with pytest.raises(BackendError, match="differs") if raises else contextlib.nullcontext():
            relu(x)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_the_check_accepts_expected_infinities_and_nan(monkeypatch, special):
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    dropout(np.asarray([1.0, special, special]), np.asarray([True, True, False]), 0.5)
    checks._CHECKED.clear()
    correct = OPERATIONS["dropout"].kernels["numpy"][0]
    product = correct._replace(name="test.dropout", forward=lambda x, mask, **static: (x * mask, mask))
    ops.register(product)
    with pytest.raises(BackendError, match=r"^kernel test\.dropout differs from the portable dropout by nan"):
        dropout(np.asarray([1.0, 2.0, np.nan]), np.asarray([True, True, False]), 1.0)


def test_the_check_needs_derivatives_of_floating_arrays_only(monkeypatch):
    correct = OPERATIONS["dropout"].kernels["numpy"][0]
    needed = []

    def vjp(g, residuals, needs, **static):
        needed.append(needs)
        return correct.vjp(g, residuals, needs, **static)

    ops.register(correct._replace(name="test.dropout", vjp=vjp))
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    dropout(np.ones((2, 3)), np.eye(2, 3) > 0, 0.5)
    assert needed == [(True, False)]


def test_the_check_accepts_rounding_where_a_cotangent_is_zero(monkeypatch):
    """With a single key all weights are one and the scores have derivative zero, up to rounding."""
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    monkeypatch.setattr(flash, "_MIN_SCORES", 0)
    rng = np.random.default_rng(0)
    for length in (1, 2, 5, 8):
        checks._CHECKED.clear()
        query, key, value = (rng.normal(size=(2, 2, n, 8)).astype("float32") for n in (length, 1, 1))
        attention(query, key, value)
        assert {"numpy.flash_attention"} == checks._CHECKED


def test_the_check_compares_every_output_and_copies_the_arguments(monkeypatch):
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    settings = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9, "donate": True}
    arrays = [np.ones((2, 3)), np.ones((2, 3)), np.zeros((2, 3)), np.zeros((2, 3))]
    ((parameter, exp_avg, _),) = adam([arrays], step=1, **settings)  # the kernel works in place: once, not twice
    np.testing.assert_allclose(parameter, 0.9)
    np.testing.assert_allclose(exp_avg, 0.1)

    (correct,) = OPERATIONS["adam"].kernels["numpy"]

    def wrong(*arrays, **static):
        (p, m, v), residuals = correct.forward(*arrays, **static)
        return (p, m, 2.0 * v), residuals

    ops.register(correct._replace(name="test.adam", forward=wrong))
    with pytest.raises(BackendError, match=r"^kernel test\.adam differs"):
        adam([arrays], step=2, **settings)
