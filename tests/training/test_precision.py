import math
import sys
import warnings
from dataclasses import asdict

import numpy as np
import pytest

from tests.conftest import library_or_skip
from tests.reference import KINDS, for_each, small_language_model, small_model
from xformer.backends import array_namespace, dtype_name, to_host
from xformer.errors import BackendError, ConfigError
from xformer.io import load_arrays
from xformer.ops import linear, project_heads
from xformer.ops.softmax import softmax_cotangent
from xformer.random import Rng
from xformer.tracing import value_and_grad
from xformer.training import (
    Adam,
    Batch,
    Skip,
    Step,
    TextChunks,
    TokenPairs,
    TrainingLoop,
    language_model_loss,
    train_step,
    translation_loss,
)
from xformer.training.precision import PRECISIONS, GradScaler, autocast, check_precision
from xformer.tree import flatten

# Of one length each, since jax compiles for every shape.
PAIRS = TokenPairs(
    [[4 + (3 * row + index) % 7 for index in range(6)] for row in range(8)],
    [[4 + (5 * row + 2 * index) % 9 for index in range(5)] for row in range(8)],
)
HALVES = PRECISIONS[1:]
SPACING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}  # of the numbers from 1 to 2
TEXT = [4 + (index * index) % 7 for index in range(60)]
EVERYWHERE = [(name, dtype) for name in ("numpy", "torch") for dtype in HALVES] + [("jax", "bfloat16")]


def namespace(name, dtype):
    """Return the namespace of a library if it has the dtype."""
    if (name, dtype) == ("numpy", "bfloat16"):
        pytest.importorskip("ml_dtypes", reason="NumPy knows bfloat16 through ml_dtypes")
    return library_or_skip(name)


def rounded(model, dtype):
    """Return a model of float32 whose parameters are numbers of the dtype, so that they can be compared exactly."""
    return model.to("torch", dtype=dtype).to("numpy", dtype="float32")


def steps(xp, precision, count=1, *, loss_scale=None, loss_fn=language_model_loss):
    """Return the results of `count` steps on one batch."""
    model = small_language_model(xp, dtype="float32", num_layers=1, dropout=0.0)
    batch, optimizer = TextChunks.make(TEXT, list(range(0, 48, 6)), 6, xp=xp), Adam()
    state, results = optimizer.init(model), []
    for number in range(count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # as `fit` does
            result = train_step(
                model,
                state,
                [batch],
                Rng(number),
                loss_fn=autocast(precision, loss_fn),
                optimizer=optimizer,
                learning_rate=5e-3,
                max_grad_norm=1.0,
                loss_scale=GradScaler.init(precision).scale if loss_scale is None else loss_scale,
            )
        model, state = result.model, result.state
        results.append(result)
    return results


def leaves(tree):
    return [to_host(leaf).copy() for leaf in flatten(tree)[0]]


# --- The step ---------------------------------------------------------------------------------------------------------


@for_each("name, precision", EVERYWHERE)
def test_a_step_is_that_of_float32_up_to_rounding(name, precision):
    (result,) = steps(namespace(name, precision), precision)
    (expected,) = steps(library_or_skip("numpy"), "float32")
    tolerance = {"bfloat16": 0.05, "float16": 0.01}[precision]
    assert float(result.loss) == pytest.approx(float(expected.loss), rel=tolerance)
    assert float(result.grad_norm) == pytest.approx(float(expected.grad_norm), rel=tolerance)
    assert {dtype_name(leaf.dtype) for leaf in flatten((result.model, result.state[1:]))[0]} == {"float32"}


@for_each("precision", HALVES)
def test_the_loss_falls(precision):
    results = steps(library_or_skip("torch"), precision, 20)
    assert float(results[-1].loss) < 0.8 * float(results[0].loss)
    assert results[-1].state.step == 20


@for_each("precision", HALVES)
@for_each("kind", KINDS)
@for_each("name", ["torch", "numpy"])
def test_gradients_equal_those_of_float64_up_to_rounding(name, kind, precision):
    """At parameters that both have; an activation without a kink, which rounding would take gradients across."""
    xp = namespace(name, precision)
    library_or_skip("torch")  # rounds to both
    model = rounded(small_model(**{"activation": "gelu", "d_model": 32, "d_ff": 48, **KINDS[kind]}), precision)
    exact, wanted = value_and_grad(translation_loss)(
        model.to(dtype="float64"), Batch.make(PAIRS, list(range(8)), xp=library_or_skip("numpy"))
    )
    loss, actual = value_and_grad(autocast(precision, translation_loss))(
        model.to(xp), Batch.make(PAIRS, list(range(8)), xp=xp)
    )
    assert float(loss) == pytest.approx(float(exact), rel=SPACING[precision])
    assert {dtype_name(leaf.dtype) for leaf in flatten(actual)[0]} == {"float32"}
    size = math.sqrt(sum(float((leaf**2).sum()) for leaf in leaves(wanted)))
    for got, want in zip(leaves(actual), leaves(wanted), strict=True):
        assert np.linalg.norm(got - want) < 4 * SPACING[precision] * size


def test_a_power_of_two_changes_no_bits():
    plain, scaled = (steps(np, "float32", 3, loss_scale=scale)[-1] for scale in (1.0, 2.0**16))
    assert (float(plain.loss), float(plain.grad_norm)) == (float(scaled.loss), float(scaled.grad_norm))
    for one, other in zip(leaves(plain.model), leaves(scaled.model), strict=True):
        np.testing.assert_array_equal(one, other)


def test_scaling_keeps_small_cotangents():
    """The loss of very many tokens: the share of each in the mean is too small for float16."""

    def small(model, batch, rng=None):
        return language_model_loss(model, batch, rng) * 1e-6

    norms = [float(steps(np, "float16", loss_fn=small, loss_scale=scale)[0].grad_norm) for scale in (2.0**16, 1.0)]
    exact = float(steps(np, "float32", loss_fn=small)[0].grad_norm)
    assert norms[0] == pytest.approx(exact, rel=0.01)
    assert norms[1] < 0.5 * exact


def test_the_scale_grows_and_shrinks_in_powers_of_two():
    scaler = GradScaler.init("float16")
    assert scaler == GradScaler(2.0**16, 0)
    for _ in range(2000):
        assert scaler.scale == 2.0**16
        scaler = scaler.growth()
    assert scaler == GradScaler(2.0**17, 0)
    assert GradScaler(2.0**24, 1999).growth().scale == 2.0**24
    assert GradScaler(8.0, 1999).backoff() == GradScaler(4.0)
    assert GradScaler(2.0).backoff() is None
    for precision in ("float32", "bfloat16"):
        assert GradScaler.init(precision) == GradScaler()
    assert GradScaler().backoff() is None
    assert GradScaler(1.0, 1999).growth().scale == 1.0


def test_cotangents_of_many_rows_are_summed_in_float32():
    """In float16, adding ones one by one stops at 2048."""
    xp = library_or_skip("numpy")
    rows, ones, one = (xp.ones(shape, dtype=xp.float16) for shape in ((3000, 1), (1, 2), (2,)))

    def total(parameters, x):
        weight, bias, alone = parameters
        (heads,) = project_heads(xp.reshape(x, (1, 3000, 1)), (weight, bias, 1))
        parts = linear(x, weight, bias), heads, x + alone
        return sum(array_namespace(part).sum(array_namespace(part).astype(part, xp.float32)) for part in parts)

    _, bias, alone = value_and_grad(total)((ones, one, one), rows)[1]
    np.testing.assert_array_equal(bias, [6000.0, 6000.0])
    np.testing.assert_array_equal(alone, [3000.0, 3000.0])
    # Probabilities that lie in memory one row after the other, each with the cotangent 64.
    g, y = (xp.full((4000, 2), value, dtype=xp.float16).T for value in (64.0, 1 / 4096))
    np.testing.assert_allclose(softmax_cotangent(g, y), 64 / 4096 * (1 - 4000 / 4096), rtol=0.01)


# --- The run ----------------------------------------------------------------------------------------------------------


def loop(path, xp, precision, steps, callbacks=()):
    model = small_model(xp, dtype="float32", dropout=0.1)
    batches = [Batch.make(PAIRS, [2 * row, 2 * row + 1], xp=xp) for row in range(4)]
    return TrainingLoop(
        model, translation_loss, batches, optimizer=Adam(), learning_rate=1e-3, steps=steps, precision=precision,
        run_dir=path, data_parallel=2, callbacks=callbacks,
    )  # fmt: skip


def test_a_resumed_run_in_float16_has_the_bits_of_an_uninterrupted_one(tmp_path, monkeypatch):
    """The scale starts far too large and grows soon: steps are skipped before and after the interruption."""
    monkeypatch.setattr("xformer.training.precision._INITIAL_SCALE", 2.0**20)
    monkeypatch.setattr("xformer.training.precision._GROWTH_INTERVAL", 2)
    xp, events = library_or_skip("numpy"), []
    (tmp_path / "complete").mkdir()
    (tmp_path / "parts").mkdir()
    complete = loop(tmp_path / "complete", xp, "float16", 10, [lambda event, loop: events.append(event)])
    complete.run()
    first = loop(tmp_path / "parts", xp, "float16", 6)
    first.run()
    resumed = loop(tmp_path / "parts", xp, "float16", 10)
    resumed.resume()
    assert resumed._scaler == first._scaler
    assert resumed.state.step == first.state.step < first.step == 6
    resumed.run()
    assert [leaf.tobytes() for leaf in leaves((resumed.model, resumed.state[1:]))] == [
        leaf.tobytes() for leaf in leaves((complete.model, complete.state[1:]))
    ]
    assert resumed._scaler == complete._scaler
    skipped = [event.step for event in events if isinstance(event, Skip)]
    assert skipped[0] == 1
    assert max(skipped) > 6
    assert complete.state.step == 10 - len(skipped)
    made = [event for event in events if isinstance(event, Step)]
    assert sorted([event.step for event in made] + skipped) == list(range(1, 11))
    assert all(math.isfinite(event.loss) and event.loss_scale < 2.0**20 for event in made)
    arrays, metadata = load_arrays(tmp_path / "complete" / "last.safetensors")
    assert {array.dtype for array in arrays.values()} == {np.dtype("float32")}
    assert f'"grad_scaler": {{"scale": {asdict(complete._scaler)["scale"]}' in metadata["progress"]


# --- Errors -----------------------------------------------------------------------------------------------------------


@for_each("precision", HALVES)
def test_mixed_precision_requires_float32_parameters(precision):
    with pytest.raises(ConfigError, match=r"has parameters of dtype float64; .* make the model with dtype='float32'"):
        check_precision(precision, small_model("numpy", dtype="float64"))
    check_precision("float32", small_model("numpy", dtype="float64"))


def test_a_library_without_the_precision_is_refused(monkeypatch):
    strict = library_or_skip("array_api_strict")
    with pytest.raises(BackendError, match="precision is 'float16', but array_api_strict cannot compute in it"):
        check_precision("float16", small_model(strict, dtype="float32"))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(BackendError, match=r"precision is 'bfloat16', .* run: pip install ml_dtypes"):
        check_precision("bfloat16", small_model("numpy", dtype="float32"))
