import functools
import json
import math
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest

from tests.conftest import library_or_skip
from tests.reference import KINDS, small_language_model, small_model
from xformer.autodiff import value_and_grad
from xformer.backends import array_namespace, dtype_name, to_host
from xformer.errors import BackendError, ConfigError, TrainingError
from xformer.io import load_arrays
from xformer.ops import linear, project_heads
from xformer.ops.softmax import softmax_cotangent
from xformer.random import Rng
from xformer.training import (
    Adam,
    Batch,
    RunDirectory,
    TextChunks,
    TokenPairs,
    Trainer,
    TrainingSettings,
    TranslationTask,
    Update,
    language_model_loss,
    train_step,
    translation_loss,
)
from xformer.training.data_parallel import ShardedGradient
from xformer.training.loss import weighted_loss
from xformer.training.precision import PRECISIONS, UNSCALED, GradScaler, autocast, check_precision
from xformer.tree import flatten, map_arrays

# Of one length each, since jax compiles for every shape.
PAIRS = TokenPairs(
    [[4 + (3 * row + place) % 7 for place in range(6)] for row in range(8)],
    [[4 + (5 * row + 2 * place) % 9 for place in range(5)] for row in range(8)],
)
HALVES = PRECISIONS[1:]
SPACING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}  # of the numbers from 1 to 2
TEXT = [4 + (place * place) % 7 for place in range(60)]
EVERYWHERE = [(name, dtype) for name in ("numpy", "torch", "jax") for dtype in HALVES]


def backend_name(name, dtype):
    """The namespace of a library, where it or a package that is here has the dtype."""
    if (name, dtype) == ("numpy", "bfloat16"):
        pytest.importorskip("ml_dtypes", reason="NumPy knows bfloat16 through ml_dtypes")
    return library_or_skip(name)


def rounded(model, dtype):
    """A model of float32 whose parameters are numbers of the dtype, so that they can be compared exactly."""
    return model.to("torch", dtype=dtype).to("numpy", dtype="float32")


def language_model(xp):
    return small_language_model(xp, dtype="float32", num_layers=1, dropout=0.0)


def steps(xp, precision, count, *, scale=None, loss=language_model_loss, model=None):
    """Updates on one batch: all that train_step returned."""
    model = language_model(xp) if model is None else model
    batch, optimizer = TextChunks.make(TEXT, list(range(0, 48, 6)), 6, xp=xp), Adam()
    gradient = ShardedGradient(functools.partial(weighted_loss, loss=autocast(precision, loss)), 1)
    scale, state, results = scale or GradScaler.init(precision), optimizer.init(model), []
    for number in range(count):
        how = {
            "gradient": gradient,
            "optimizer": optimizer,
            "learning_rate": 5e-3,
            "max_grad_norm": 1.0,
            "scale": scale,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # as the trainer does
            results.append(train_step(model, state, [[batch]], Rng(number), **how))
        model, state, scale = results[-1].model, results[-1].state, results[-1].scale
    return results


def leaves(tree):
    return [to_host(leaf).copy() for leaf in flatten(tree)[0]]


# --- The step ---------------------------------------------------------------------------------------------------------


@functools.cache
def curve():
    return [result.loss for result in steps(library_or_skip("numpy"), "float32", 50)]


@pytest.mark.parametrize(("name", "precision"), EVERYWHERE)
def test_the_loss_falls_as_in_float32(name, precision):
    results = steps(backend_name(name, precision), precision, 50)
    assert curve()[-1] < 0.6 * curve()[0]
    tolerance = {"bfloat16": 0.05, "float16": 0.01}[precision]
    np.testing.assert_allclose([result.loss for result in results], curve(), rtol=tolerance)
    last = results[-1]
    assert last.state.step == 50
    assert {dtype_name(leaf.dtype) for leaf in flatten((last.model, last.state[1:]))[0]} == {"float32"}


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_gradients_are_those_of_float64_but_for_rounding(name, kind, precision):
    """At parameters that both have; an activation without a kink, which rounding would take gradients across."""
    xp = backend_name(name, precision)
    library_or_skip("torch")  # rounds to both
    model = rounded(small_model(**{"activation": "gelu", "d_model": 32, "d_ff": 48, **KINDS[kind]}), precision)
    exact, wanted = value_and_grad(translation_loss)(
        model.to(dtype="float64"), Batch.make(PAIRS, list(range(8)), xp=library_or_skip("numpy"))
    )
    loss, found = value_and_grad(autocast(precision, translation_loss))(
        model.to(xp), Batch.make(PAIRS, list(range(8)), xp=xp)
    )
    assert float(loss) == pytest.approx(float(exact), rel=SPACING[precision])
    assert {dtype_name(leaf.dtype) for leaf in flatten(found)[0]} == {"float32"}
    size = math.sqrt(sum(float((leaf**2).sum()) for leaf in leaves(wanted)))
    for got, want in zip(leaves(found), leaves(wanted), strict=True):
        assert np.linalg.norm(got - want) < 4 * SPACING[precision] * size


def test_parameters_that_nothing_is_rounded_of_are_passed_on():
    assert autocast("float32", translation_loss) is translation_loss


def test_a_power_of_two_changes_no_bits():
    plain, scaled = (steps(np, "float32", 3, scale=scale)[-1] for scale in (UNSCALED, GradScaler(2.0**16)))
    assert (plain.loss, plain.gradient_norm) == (scaled.loss, scaled.gradient_norm)
    for one, other in zip(leaves(plain.model), leaves(scaled.model), strict=True):
        np.testing.assert_array_equal(one, other)


def test_scaling_keeps_small_cotangents():
    """A loss of very many tokens: each has so little a share of the mean that float16 has no number for it."""

    def small(model, batch, rng=None):
        return language_model_loss(model, batch, rng) * 1e-6

    norms = [steps(np, "float16", 1, loss=small, scale=scale)[0].gradient_norm for scale in (None, UNSCALED)]
    exact = steps(np, "float32", 1, loss=small)[0].gradient_norm
    assert norms[0] == pytest.approx(exact, rel=0.01)
    assert norms[1] < 0.5 * exact


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_overflow_skips_the_update_and_halves_the_scale(name):
    xp = library_or_skip(name)
    model = language_model(xp)
    before = leaves(model)
    results = steps(xp, "float16", 12, scale=GradScaler(2.0**22, updates=7), model=model)
    skipped = [result for result in results if not math.isfinite(result.gradient_norm)]
    assert 1 <= len(skipped) < 10
    assert results[: len(skipped)] == skipped
    assert [result.scale for result in skipped] == [GradScaler(2.0 ** (21 - number)) for number in range(len(skipped))]
    for result in skipped:
        assert math.isfinite(result.loss)
        assert result.state.step == 0
    first = results[len(skipped)]
    assert first.scale == replace(skipped[-1].scale, updates=1)
    assert results[-1].state.step == 12 - len(skipped)
    whole = steps(xp, "float32", 1)[0]
    assert first.loss == pytest.approx(whole.loss, rel=1e-3)
    assert first.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-2)
    assert any((got != old).any() for got, old in zip(leaves(first.model), before, strict=True))


def test_a_skipped_update_leaves_every_bit():
    model, state = small_model("numpy", dtype="float32"), Adam()
    state = state.init(model)
    before = leaves((model, state.first, state.second))

    def overflowing(model, shards, rngs):
        return np.float32(1.0), map_arrays(lambda leaf: leaf * np.float32(np.inf), model)

    how = {"gradient": overflowing, "optimizer": Adam(), "learning_rate": 1.0, "max_grad_norm": 1.0}
    batches = [[Batch.make(PAIRS, [0], xp=library_or_skip("numpy"))]]
    with np.errstate(invalid="ignore"):
        result = train_step(model, state, batches, Rng(0), **how, scale=GradScaler(4.0))
        assert result.scale == GradScaler(2.0)
        assert result.model is model
        assert result.state is state
        for one, other in zip(leaves((model, state.first, state.second)), before, strict=True):
            np.testing.assert_array_equal(one, other)
        for scale in (UNSCALED, GradScaler(2.0)):  # where less would not help
            with pytest.raises(TrainingError, match="gradient norm nan; lower the learning rate"):
                train_step(model, state, batches, Rng(0), **how, scale=scale)


def test_the_scale_grows_and_shrinks_in_powers_of_two():
    scale = GradScaler.init("float16")
    assert scale == GradScaler(2.0**16, 0)
    for _ in range(2000):
        assert scale.value == 2.0**16
        scale = scale.grown()
    assert scale == GradScaler(2.0**17, 0)
    assert GradScaler(2.0**24, 1999).grown().value == 2.0**24
    assert GradScaler(8.0, 1999).halved() == GradScaler(4.0)
    assert GradScaler(2.0).halved() is None
    for precision in ("float32", "bfloat16"):
        assert GradScaler.init(precision) == UNSCALED
    assert UNSCALED.halved() is None
    assert GradScaler(1.0, 1999).grown().value == 1.0


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

SETTINGS = TrainingSettings(
    batch_tokens=30, warmup_steps=5, validate_every=4, max_updates=10, shards=2, precision="float16"
)


def trainer(path, settings=SETTINGS, xp="numpy", **options):
    path.mkdir(exist_ok=True)
    model = small_model(xp, dtype="float32", dropout=0.1)
    task = TranslationTask(model, PAIRS, PAIRS, batch_tokens=settings.batch_tokens)
    return Trainer(model, task, settings, RunDirectory(path), **options)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path, name, monkeypatch):
    """Begun with a scale that is far too large, and soon large again: updates are skipped before and after."""
    monkeypatch.setattr("xformer.training.precision._FIRST_SCALE", 2.0**20)
    monkeypatch.setattr("xformer.training.precision._UPDATES_TO_GROW", 2)
    settings = replace(SETTINGS, shards=2 if name == "numpy" else 1)
    events = []
    whole = trainer(tmp_path / "whole", settings, name, report=events.append)
    whole.run()
    first = trainer(tmp_path / "parts", replace(settings, max_updates=6), name)
    first.run()
    resumed = trainer(tmp_path / "parts", settings, name)
    resumed.resume()
    assert resumed.progress.loss_scale == first.progress.loss_scale
    assert resumed.state.step == first.state.step < first.progress.step == 6
    resumed.run()
    assert [leaf.tobytes() for leaf in leaves((resumed.model, resumed.state[1:]))] == [
        leaf.tobytes() for leaf in leaves((whole.model, whole.state[1:]))
    ]
    assert resumed.progress.loss_scale == whole.progress.loss_scale
    logged = RunDirectory(tmp_path / "whole").read_log()
    skipped = [event["step"] for event in logged if event["event"] == "skipped"]
    assert skipped[0] == 1
    assert max(skipped) > 6
    assert whole.state.step == 10 - len(skipped)
    updates = [event for event in events if isinstance(event, Update)]
    assert sorted([event.step for event in updates] + skipped) == list(range(1, 11))
    assert all(math.isfinite(event.loss) and event.loss_scale < 2.0**20 for event in updates)
    arrays, metadata = load_arrays(tmp_path / "whole" / "last.safetensors")
    assert {array.dtype for array in arrays.values()} == {np.dtype("float32")}
    scale = whole.progress.loss_scale
    assert json.loads(metadata["progress"])["loss_scale"] == {"value": scale.value, "updates": scale.updates}


def test_a_run_in_bfloat16_needs_no_scale(tmp_path):
    pytest.importorskip("torch")
    run = trainer(tmp_path, replace(SETTINGS, precision="bfloat16", max_updates=2, shards=1), "torch")
    run.run()
    assert run.progress.loss_scale.value == 1.0
    assert run.state.step == 2


def test_a_state_without_a_scale_is_of_a_run_without_one(tmp_path):
    run = trainer(tmp_path, replace(SETTINGS, precision="float32"))
    run.directory.save_state(run.model, run.state._replace(step=3), {"step": 3})
    run.resume()
    assert run.progress.loss_scale == UNSCALED
    assert run.state.step == 3


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float64", "half", "bf16", "int8"])
def test_there_are_three_precisions(precision):
    with pytest.raises(
        ConfigError, match=f"precision is '{precision}'; expected one of 'float32', 'bfloat16', 'float16'"
    ):
        TrainingSettings(precision=precision)


@pytest.mark.parametrize("precision", HALVES)
def test_float64_and_mixed_precision_exclude_each_other(precision):
    with pytest.raises(ConfigError, match=f"precision is '{precision}' and dtype 'float64'; .*; leave one of the two"):
        TrainingSettings(precision=precision, dtype="float64")
    assert TrainingSettings(dtype="float64").precision == "float32"
    with pytest.raises(ConfigError, match=r"has parameters of float64; .* make the model with dtype='float32'"):
        check_precision(precision, small_model("numpy", dtype="float64"))
    check_precision("float32", small_model("numpy", dtype="float64"))


def test_what_a_library_lacks_is_said(tmp_path, monkeypatch):
    strict = library_or_skip("array_api_strict")
    with pytest.raises(BackendError, match="precision is 'float16', in which array_api_strict cannot compute here"):
        check_precision("float16", small_model(strict, dtype="float32"))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(BackendError, match=r"precision is 'bfloat16', .* run: pip install ml_dtypes"):
        trainer(tmp_path, replace(SETTINGS, precision="bfloat16"))


@pytest.mark.parametrize(("name", "precision"), EVERYWHERE)
def test_what_a_library_has_is_let_through(name, precision):
    check_precision(precision, small_model(backend_name(name, precision), dtype="float32"))
