"""Every compiled kernel equals the portable definition of its operation: values and all gradients, in float32."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.kernels.numpy.test_gelu import definition
from tests.kernels.numpy.test_rowwise import LABELS, LAYOUTS, assert_close, assert_same, laid_out, memory_orders, normal
from xformer import kernels, vjp
from xformer.kernels import registry
from xformer.kernels.numpy import support as numpy_support
from xformer.ops import attention, cross_entropy, dropout, gelu, layer_norm, linear, relu, rms_norm
from xformer.ops.adam import adam
from xformer.ops.project_heads import project_heads

numba = pytest.importorskip("numba")

from xformer.kernels.numba import loops as loops  # noqa: E402 - needs numba


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Have these kernels serve, whatever the environment asks for."""
    monkeypatch.setenv("XFORMER_KERNELS", "auto")


def single(*shape, seed=0):
    return normal(*shape, seed=seed).astype("float32")


def served_by_numba(operation, *arrays, **static):
    lines = kernels.explain(operation, *arrays, **static).splitlines()
    assert f"{operation} on numpy: numba.{operation}" in lines


# --- elementwise and norms ------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
class TestLayouts:
    """Kernels that take rows of features, on whatever memory they lie."""

    def test_elementwise(self, monkeypatch, layout):
        x = laid_out(layout, "float32")
        for operation in (gelu, relu):
            served_by_numba(operation.__name__, x)
            assert_same(monkeypatch, operation, x)
        keep = np.random.default_rng(3).random(x.shape) < 0.7
        served_by_numba("dropout", x, keep, keep_probability=0.7)
        assert_same(monkeypatch, lambda x: dropout(x, keep, 0.7), x)
        assert_same(monkeypatch, lambda x: dropout(x, keep.T.copy().T.astype("uint8"), 0.7), x)

    def test_norms(self, monkeypatch, layout):
        x, weight, bias = laid_out(layout, "float32"), single(14, seed=1)[::2], single(7, seed=2)
        served_by_numba("layer_norm", x, weight, bias, epsilon=1e-5)
        served_by_numba("rms_norm", x, weight, epsilon=1e-5)
        assert_same(monkeypatch, layer_norm, x, weight, bias)
        assert_same(monkeypatch, lambda x, weight: layer_norm(x, weight, None, epsilon=0.1), x, weight)
        assert_same(monkeypatch, lambda bias: layer_norm(x, weight, bias), bias)
        assert_same(monkeypatch, rms_norm, x, weight)


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_what_is_not_chosen_is_zero_whatever_stands_there(odd):
    x, keep = np.asarray([1.0, -2.0, 3.0, odd], "float32"), np.asarray([True, True, False, False])
    served_by_numba("dropout", x, keep, keep_probability=0.5)
    np.testing.assert_array_equal(dropout(x, keep, 0.5), [2.0, -4.0, 0.0, 0.0])
    np.testing.assert_array_equal(dropout(x[::-1], keep, 1.0), [odd, 3.0, 0.0, 0.0])
    output, pull = vjp(relu, np.asarray([1.0, odd, -1.0, -1.0], "float32"))
    np.testing.assert_array_equal(output, [1.0, 0.0 if odd < 0 else odd, 0.0, 0.0])
    np.testing.assert_array_equal(pull(x)[0], [1.0, -2.0 if odd > 0 else 0.0, 0.0, 0.0])


def test_gelu_has_the_digits_of_its_definition():
    x = np.linspace(-16.0, 16.0, 99_991).astype("float32")
    expected, slope = definition(x)
    output, pull = vjp(gelu, x)
    np.testing.assert_allclose(output, expected, rtol=0.0, atol=4e-7)
    np.testing.assert_allclose(pull(np.ones_like(x))[0], slope, rtol=0.0, atol=4e-7)
    tails = (x > -12.0) & (x < -0.01)
    np.testing.assert_allclose(output[tails], expected[tails], rtol=1e-5)


def test_gelu_of_infinity_and_nan():
    x = np.asarray([np.inf, -np.inf, np.nan, 0.0], dtype="float32")
    output, pull = vjp(gelu, x)
    np.testing.assert_array_equal(output, [np.inf, 0.0, np.nan, 0.0])
    np.testing.assert_allclose(pull(np.ones_like(x))[0], [1.0, 0.0, np.nan, 0.5], atol=1e-7)


# --- cross_entropy ------------------------------------------------------------------


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["usual", "would overflow"])
def test_cross_entropy(monkeypatch, labels, label_smoothing, z_loss, scale):
    logits, ids = np.float32(scale) * single(2, 4, 37), np.asarray(LABELS[labels])
    settings = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    served_by_numba("cross_entropy", logits, ids, pad_id=0, **settings)
    assert_same(monkeypatch, functools.partial(cross_entropy, labels=ids, **settings), logits)
    outside = np.where(ids == 0, -100, ids)  # a pad_id that is no token
    assert_same(monkeypatch, lambda x: cross_entropy(x, outside, pad_id=-100, **settings), logits)


def test_cross_entropy_of_other_memory_and_of_nothing(monkeypatch):
    labels = np.random.default_rng(4).integers(0, 7, 70)
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels.astype("uint8")), single(7, 70).T)
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels[:0].reshape(0, 5)), single(0, 5, 7))


def test_cross_entropy_leaves_padding_out_and_takes_forbidden_tokens():
    logits = single(3, 5)
    logits[0], logits[1, 2] = np.nan, -np.inf
    losses, pull = vjp(lambda x: cross_entropy(x, np.asarray([0, 1, 4])), logits)
    (gradient,) = pull(np.ones(3, "float32"))
    assert losses[0] == 0.0
    assert not gradient[0].any()
    assert gradient[1, 2] == 0.0
    assert np.isfinite(losses).all()
    assert np.isfinite(gradient).all()


# --- adam ------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("which", range(4))
def test_adam_stays_equal_for_twenty_steps(monkeypatch, weight_decay, which):
    start = list(memory_orders("float32"))[which]
    settings = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-9, "weight_decay": [weight_decay]}
    ends = []
    for mode in ("auto", "portable"):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        arrays = [start.copy("K"), np.zeros_like(start), np.zeros_like(start)]
        if mode == "auto":
            served_by_numba("adam", None, arrays[0], start, *arrays[1:])
        for step in range(1, 21):
            gradient = np.sin(step * start)
            gradient.flags.writeable = False
            factor = np.asarray(0.625, "float32") if weight_decay else None
            (arrays,) = adam([(arrays[0], gradient, *arrays[1:])], step=step, **settings, factor=factor)
        ends.append(arrays)
    for got, wanted in zip(*ends, strict=True):
        assert_close(got, wanted)


# --- who serves ------------------------------------------------------------------

FOUR = np.ones((1, 1, 2, 3), "float32")
UNALIGNED = np.zeros(13, "uint8")[1:].view("float32")
LEFT = {
    "float64": ("layer_norm", (np.ones((2, 3)), np.ones(3), None), "dtype float64 (compiled for float32)"),
    "another byte order": ("relu", (np.ones(3, ">f4"),), "dtype >f4 (compiled for float32)"),
    "unaligned": ("gelu", (UNALIGNED,), "an array is not aligned in memory"),
    "integers": ("relu", (np.arange(3),), "dtype int64 (compiled for float32)"),
    "a broadcast weight": ("layer_norm", (FOUR, FOUR[0, 0, 0, :1], None), "weight or bias is broadcast"),
    "a broadcast bias": ("layer_norm", (FOUR, FOUR[0, 0, 0], FOUR[0, 0, 0, :1]), "weight or bias is broadcast"),
    "adam of several shapes": ("adam", (None, FOUR, FOUR, FOUR[:, :, :1], FOUR), "the arrays are of several shapes"),
    "broadcast dropout of attention": (
        "attention",
        (FOUR, FOUR, FOUR, None, None, np.ones((1, 1, 2, 1), dtype=bool)),
        "keep is broadcast",
    ),
    "broadcast dropout": ("dropout", (FOUR, FOUR[0] > 0), "keep is broadcast"),
    "adam apart": ("adam", (None, *(FOUR[..., ::2],) * 4), "arrays are not contiguous"),
    "attention apart": ("attention", (FOUR[0],) * 3 + (None,) * 3, "not (batch, heads, length, features)"),
}


@pytest.mark.parametrize("case", LEFT)
def test_explain_says_why_not(case):
    operation, arrays, reason = LEFT[case]
    (line,) = (line for line in kernels.explain(operation, *arrays).splitlines() if "numba." in line)
    assert line.startswith(f"  not numba.{operation}: ")
    assert reason in line


def test_a_numba_that_cannot_be_imported_leaves_the_other_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformer.kernels.numba.loops", None)
    numpy_support._import.cache_clear()
    try:
        assert "not numba.relu: numba cannot be imported: " in kernels.explain("relu", FOUR)
        np.testing.assert_array_equal(relu(FOUR), FOUR)
    finally:
        numpy_support._import.cache_clear()


PROGRAM = """
import sys
import numpy as np
from xformer.kernels import explain
from xformer.ops import relu
relu(np.ones(3, "float32"))
assert ": numpy.relu" in explain("relu", np.ones(3, "float32"))
assert "numba" not in sys.modules
"""


def test_without_compiled_kernels_numba_is_not_even_imported(monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", "no-jit")
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_the_checks_of_the_registry_pass(monkeypatch):
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    monkeypatch.setattr(registry, "_CHECKED", set())
    x, labels, query = single(6, 8), np.arange(6), single(2, 2, 5, 4)
    for call in (gelu, relu, lambda x: dropout(x, x > 0, 0.5), lambda x: layer_norm(x, x[0], x[1])):
        call(x)
    rms_norm(x, x[0])
    cross_entropy(x, labels, label_smoothing=0.1)
    attention(query, query, query)
    adam([(x, x, x.copy(), x * x)], learning_rate=0.1, step=1, beta1=0.9, beta2=0.98, epsilon=1e-9)
    linear(single(96, 8), x.T)
    project_heads(np.ones((3, 32, 8), "float32"), (np.ones((8, 8), "float32"), None, 2))
    names = (
        "gelu",
        "relu",
        "dropout",
        "layer_norm",
        "rms_norm",
        "cross_entropy",
        "attention",
        "adam",
        "linear",
        "project_heads",
    )
    assert {f"numba.{name}" for name in names} == registry._CHECKED


# --- loops ------------------------------------------------------------------


def test_the_exponential():
    x = np.concatenate([np.linspace(-87.2, 88.0, 200_001), [0.0, -0.0]]).astype("float32")
    exact = np.exp(x.astype("float64"))
    exp = numba.vectorize(["float32(float32)"])(loops.exp.py_func)
    np.testing.assert_allclose(exp(x), exact, rtol=2.4e-7)
    odd = np.asarray([-np.inf, -1e30, -88.0, np.nan], "float32")
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(exp(odd), [0.0, 0.0, 0.0, np.nan])


def scaled(x, scale, y):
    for i in range(x.size):
        y[i] = x[i] * scale


def test_a_loop_is_compiled_once_by_however_many_threads(monkeypatch):
    loop = loops.loop(loops.given(1), numba.float32, loops.made(1))(scaled)
    made, make = [], loops._Loop._make
    monkeypatch.setattr(loop, "_make", lambda cache: made.append(cache) or make(loop, cache=False))
    x, results = single(9), np.zeros((4, 9), "float32")
    threads = [threading.Thread(target=loop, args=(x, 2.0, y)) for y in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [True]
    np.testing.assert_array_equal(results, np.tile(2.0 * x, (4, 1)))


def test_a_loop_works_where_nothing_can_be_kept(monkeypatch, caplog):
    caplog.set_level("INFO", logger="xformer")
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    loop = loops.loop(loops.given(1), numba.float32, loops.made(1))(scaled)
    x, y = single(9), np.zeros(9, "float32")
    loop(x, 3.0, y)
    np.testing.assert_array_equal(y, np.float32(3.0) * x)
    assert caplog.messages[-1].endswith(" s; there is no folder to keep it in")


def test_without_compilation_other_kernels_serve():
    program = """
from xformer.kernels import explain
import numpy as np
assert "not numba.relu: numba is switched off by NUMBA_DISABLE_JIT" in explain("relu", np.ones(3, "float32"))
"""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "XFORMER_KERNELS": "auto"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


LOGGING = """
import logging, sys
import numpy as np
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from xformer.ops import relu
relu(np.ones(3, "float32"))
"""


def test_compiling_is_said_once(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "XFORMER_KERNELS": "auto"}
    said = [
        subprocess.run([sys.executable, "-c", LOGGING], env=environment, check=True, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert re.fullmatch(r"compiled relu for this processor in [0-9.]+ s, once and for all\n", said[0].stdout)
    assert said[1].stdout == ""
