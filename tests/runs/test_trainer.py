import contextlib
import dataclasses
import json
import math
import os
import signal

import numpy as np
import pytest

from tests.reference import raises_line
from xformer.errors import CheckpointError, OutOfMemoryError, TrainingError
from xformer.io import load_arrays
from xformer.models import Transformer, TransformerConfig
from xformer.training import (
    Average,
    RunDirectory,
    TokenPairs,
    Trainer,
    TrainingSettings,
    TranslationTask,
    Update,
    Validation,
    average_models,
)
from xformer.training.data_parallel import ShardedGradient
from xformer.training.interrupt import until_stopped
from xformer.tree import flatten

CONFIG = TransformerConfig(
    source_vocab_size=9,
    target_vocab_size=9,
    d_model=8,
    num_heads=2,
    d_ff=16,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout=0.1,
    share_embeddings=True,
)
TRAIN = TokenPairs(
    [[4 + row % 5] * (1 + row % 6) for row in range(40)], [[4 + row % 5] * (1 + row % 4) for row in range(40)]
)
VALID = TokenPairs([[4, 5], [6], [7, 7, 8]], [[4], [6, 6], [7]])
SETTINGS = TrainingSettings(batch_tokens=30, warmup_steps=5, validate_every=4, max_updates=10, shards=2)


def make(path, settings=SETTINGS, *, xp=np, dtype="float32", bleu=None, config=CONFIG, **options):
    path.mkdir(exist_ok=True)
    model = Transformer(config, xp=xp, seed=settings.seed, dtype=dtype)
    task = TranslationTask(model, TRAIN, VALID, batch_tokens=settings.batch_tokens, score=bleu)
    return Trainer(model, task, settings, RunDirectory(path), **options)


def bits(trainer):
    return [leaf.tobytes() for leaf in flatten((trainer.model, trainer.state[1:]))[0]]


def content(directory):
    """The bits of all models of a run, by their place."""
    files = {str(path.relative_to(directory)): load_arrays(path)[0] for path in directory.rglob("*.safetensors")}
    return {file: {name: array.tobytes() for name, array in arrays.items()} for file, arrays in files.items()}


def test_a_run_reports_logs_and_saves(tmp_path):
    events = []
    trainer = make(tmp_path, report=events.append)
    assert trainer.run() == "10 updates"
    assert [event.step for event in events if isinstance(event, Update)] == list(range(1, 11))
    assert [event.step for event in events if isinstance(event, Validation)] == [4, 8, 10]
    logged = RunDirectory(tmp_path).read_log()
    assert [event["step"] for event in logged if event["event"] == "update"] == [1, 10]
    assert [event["step"] for event in logged if event["event"] == "validation"] == [4, 8, 10]
    assert logged[-1]["perplexity"] == pytest.approx(math.exp(logged[-1]["loss"]))
    arrays, metadata = load_arrays(tmp_path / "last.safetensors")
    assert json.loads(metadata["progress"]) == dataclasses.asdict(trainer.progress)
    assert arrays["source_embedding.weight"].tobytes() == trainer.model.source_embedding.weight.tobytes()


@pytest.mark.parametrize("library", ["numpy", "torch", "jax", "array_api_strict"])
def test_every_library_learns(tmp_path, library):
    pytest.importorskip(library)
    losses = []
    # Batches of one shape: jax compiles every operation for every shape.
    pairs = TokenPairs([[4 + row % 5] * 3 for row in range(8)], [[4 + row % 5] * 2 for row in range(8)])
    model = Transformer(CONFIG, xp=library, seed=0)
    settings = TrainingSettings(
        batch_tokens=1000, warmup_steps=5, max_updates=5, validate_every=5, learning_rate_factor=3
    )
    task = TranslationTask(model, pairs, pairs, batch_tokens=settings.batch_tokens)
    Trainer(model, task, settings, RunDirectory(tmp_path), report=lambda e: losses.append(e.loss)).run()
    assert losses[-1] < losses[0]
    assert Transformer.load(tmp_path / "model.safetensors", xp=np).config == CONFIG


def test_the_same_seed_gives_the_same_bits(tmp_path):
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    first.run()
    second.run()
    assert bits(first) == bits(second)
    third = make(tmp_path / "c", dataclasses.replace(SETTINGS, seed=1))
    third.run()
    assert bits(third) != bits(first)


@pytest.mark.parametrize(("shards", "threads"), [(1, 3), (2, 1)])
def test_products_keep_to_the_number_of_threads(tmp_path, monkeypatch, shards, threads):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "3")
    held = []
    monkeypatch.setattr(
        "xformer.runs.trainer.blas_threads", lambda count: held.append(count) or contextlib.nullcontext()
    )
    make(tmp_path, dataclasses.replace(SETTINGS, shards=shards, max_updates=1)).run()
    assert held == [threads]


def test_a_run_of_more_shards_than_threads_takes_as_many_at_a_time(tmp_path, monkeypatch):
    workers = []

    def sharded(function, count, **how):
        workers.append(count)
        return ShardedGradient(function, count, **how)

    monkeypatch.setattr("xformer.runs.trainer.ShardedGradient", sharded)
    settings = dataclasses.replace(SETTINGS, shards=3, max_updates=2)
    weights = []
    for threads in ("1", "2", "4"):
        monkeypatch.setenv("XFORMER_NUM_THREADS", threads)
        trainer = make(tmp_path / threads, settings)
        trainer.run()
        weights.append(bits(trainer))
    assert workers == [1, 2, 3]
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_change_no_more_than_the_last_bits(tmp_path, shards):
    # Without dropout, whose masks are drawn by the shard.
    config = dataclasses.replace(CONFIG, dropout=0.0)
    losses = []
    for count in (2, shards):
        settings = dataclasses.replace(SETTINGS, shards=count)
        trainer = make(tmp_path / str(count), settings, config=config, dtype="float64")
        trainer.run()
        losses.append(trainer.validation_loss(trainer.model))
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


def interrupt_at(step):
    def interrupt(event):
        if isinstance(event, Update) and event.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return interrupt


EVERYTHING = {
    "accumulate": 2,
    "z_loss": 1e-3,
    "patience": 5,
    "keep_checkpoints": 3,
    "checkpoint_every": 2,
    "average": "last",
}


@pytest.mark.parametrize("stop_at", [4, 6])
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("float32", {}),
        ("float64", {}),
        ("float32", {"optimizer": "adamw", **EVERYTHING}),
        ("float32", {"optimizer": "adafactor", "learning_rate": 0.01, "schedule": "linear", **EVERYTHING}),
        ("float32", {"optimizer": "sgd", "keep_checkpoints": 2, "average": "best", "accumulate": 3}),
    ],
    ids=["adam float32", "adam float64", "adamw", "adafactor", "sgd"],
)
def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path, stop_at, dtype, changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    whole = make(tmp_path / "whole", settings, dtype=dtype)
    whole.run()
    stopped = make(tmp_path / "stopped", settings, dtype=dtype, report=interrupt_at(stop_at))
    assert stopped.run() == "stopped by SIGINT"
    assert stopped.progress.step == stop_at
    resumed = make(tmp_path / "stopped", settings, dtype=dtype)
    resumed.resume()
    assert resumed.progress.step == stop_at
    assert resumed.run() == "10 updates"
    assert bits(resumed) == bits(whole)
    assert content(tmp_path / "stopped") == content(tmp_path / "whole")
    assert dataclasses.replace(resumed.progress, minutes=0.0) == dataclasses.replace(whole.progress, minutes=0.0)
    logs = [RunDirectory(tmp_path / name).read_log() for name in ("whole", "stopped")]
    for events in logs:
        for event in events:
            for clock in ("minutes", "tokens_per_second"):
                event.pop(clock, None)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("call", [1, 3, 4], ids=["in the middle", "the last", "of the mean"])
def test_a_run_stopped_in_a_validation_makes_up_for_it(tmp_path, call):
    settings = dataclasses.replace(SETTINGS, **EVERYTHING)
    batches = []

    def score(model):
        for batch in until_stopped(range(5)):
            batches.append(batch)
            if len(batches) == 5 * call - 2:
                os.kill(os.getpid(), signal.SIGINT)
        return 0.0

    stopped = make(tmp_path / "stopped", settings, bleu=score)
    assert stopped.run() == "stopped by SIGINT"
    assert len(batches) == 5 * call - 2
    resumed = make(tmp_path / "stopped", settings, bleu=lambda model: 0.0)
    resumed.resume()
    assert resumed.done() is None
    assert resumed.run() == "10 updates"
    whole = make(tmp_path / "whole", settings, bleu=lambda model: 0.0)
    whole.run()
    assert bits(resumed) == bits(whole)
    assert content(tmp_path / "stopped") == content(tmp_path / "whole")
    assert dataclasses.replace(resumed.progress, minutes=0.0) == dataclasses.replace(whole.progress, minutes=0.0)


def test_accumulated_batches_make_the_run_of_large_ones(tmp_path):
    """Each update of one is the two batches of the other."""
    config = dataclasses.replace(CONFIG, dropout=0.0)
    losses, ends = [], []
    for name, accumulate in (("small", 2), ("large", 1)):
        settings = dataclasses.replace(SETTINGS, accumulate=accumulate, max_updates=3, shards=1)
        trainer = make(tmp_path / name, settings, config=config, dtype="float64", report=losses.append)
        if name == "large":
            trainer.task = Pairwise(trainer.task)
        trainer.run()
        ends.append(trainer)
    tokens = [event.tokens for event in losses if isinstance(event, Update)]
    assert tokens[:3] == tokens[3:]
    for one, other in zip(*(flatten(trainer.model)[0] for trainer in ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.0, atol=1e-9)  # Adam divides small differences by small roots
    for one, other in zip(*(flatten(trainer.state.first)[0] for trainer in ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.0, atol=1e-10)


class Pairwise:
    """A task whose batches are two of another task's at once, as two shards."""

    def __init__(self, task):
        self.loss, self.score, self.task = task.loss, task.score, task

    def validation_batches(self):
        return self.task.validation_batches()

    def batches(self, rng, *, skip, shards):
        single = self.task.batches(rng, skip=2 * skip, shards=1)
        while True:
            (_, first), (epoch, second) = next(single), next(single)
            yield epoch, [*first, *second]


# --- Early stopping, checkpoints and their mean -----------------------------------------------------------------------


def scored(monkeypatch, losses):
    """Let validations find these losses, one after the other."""
    left = iter(losses)
    monkeypatch.setattr(Trainer, "validation_loss", lambda self, model: next(left))


@pytest.mark.parametrize(
    ("patience", "step", "reason"),
    [
        (1, 8, "no better model in 1 validation"),
        (2, 20, "no better model in 2 validations"),
        (3, 24, "24 updates"),
    ],
)
def test_patience_ends_a_run(tmp_path, monkeypatch, patience, step, reason):
    scored(monkeypatch, [0.9, 0.9, 0.7, 0.8, 0.8, 0.6])
    settings = dataclasses.replace(SETTINGS, max_updates=24, patience=patience)
    events = []
    trainer = make(tmp_path, settings, report=events.append)
    assert trainer.run() == reason
    assert trainer.progress.step == trainer.progress.validated_step == step
    assert isinstance(events[-1], Validation)
    again = make(tmp_path, settings)
    again.resume()
    assert again.done() == reason


def test_the_most_recent_checkpoints_are_kept_with_their_scores(tmp_path, monkeypatch):
    scored(monkeypatch, [0.5, 0.6, 0.7])
    settings = dataclasses.replace(SETTINGS, keep_checkpoints=2, checkpoint_every=3, max_updates=12)
    trainer = make(tmp_path, settings)
    trainer.run()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-12.safetensors", "step-9.safetensors"]
    logged = [event for event in RunDirectory(tmp_path).read_log() if event["event"] == "checkpoint"]
    assert [(event["step"], event["score"], event["kept"]) for event in logged] == [
        (3, None, [3]),
        (6, None, [3, 6]),
        (9, None, [6, 9]),
        (12, -0.7, [9, 12]),
    ]
    last = Transformer.load(tmp_path / "checkpoints" / "step-12.safetensors", xp=np)
    assert bits_of(last) == bits_of(trainer.model)
    assert not (tmp_path / "averaged.safetensors").exists()


def bits_of(model):
    return [leaf.tobytes() for leaf in flatten(model)[0]]


def best_of(path):
    return bits_of(Transformer.load(path / "model.safetensors", xp=np))


@pytest.mark.parametrize("average", ["last", "best"])
@pytest.mark.parametrize("better", [True, False])
def test_the_mean_becomes_the_model_if_it_is_better(tmp_path, monkeypatch, average, better):
    scored(monkeypatch, [0.5, 0.7, 0.6, 0.4 if better else 0.55])
    settings = dataclasses.replace(SETTINGS, keep_checkpoints=2, average=average, max_updates=12)
    events = []
    trainer = make(tmp_path, settings, report=events.append)
    assert trainer.run() == "12 updates"
    steps = {"last": [8, 12], "best": [4, 12]}[average]
    paths = [tmp_path / "checkpoints" / f"step-{step}.safetensors" for step in steps]
    mean = bits_of(average_models(paths, like=trainer.model))
    assert bits_of(Transformer.load(tmp_path / "averaged.safetensors", xp=np)) == mean
    assert (best_of(tmp_path) == mean) == better
    assert type(events[-1]) is Average
    assert (events[-1].step, events[-1].updates, events[-1].best) == (12, steps, better)
    logged = RunDirectory(tmp_path).read_log()[-1]
    assert (logged["event"], logged["updates"], logged["best"]) == ("average", steps, better)
    assert trainer.progress.averaged_score == (-0.4 if better else None)
    assert trainer.progress.best_score == -0.5
    assert make_again(tmp_path, settings).done() == "12 updates"


def make_again(path, settings, **options):
    trainer = make(path, settings, **options)
    trainer.resume()
    return trainer


@pytest.mark.parametrize("last_mean", [0.45, 0.55], ids=["better", "worse"])
def test_a_run_that_goes_on_forgets_the_mean(tmp_path, monkeypatch, last_mean):
    """So that it ends as one that was never interrupted."""
    scored(monkeypatch, [0.5, 0.7, 0.4, 0.6, last_mean])
    settings = dataclasses.replace(SETTINGS, keep_checkpoints=2, average="last", max_updates=8)
    make(tmp_path / "a", settings).run()
    longer = dataclasses.replace(settings, max_updates=12)
    assert make_again(tmp_path / "a", longer).done() is None
    make_again(tmp_path / "a", longer).run()
    scored(monkeypatch, [0.5, 0.7, 0.6, last_mean])
    whole = make(tmp_path / "b", longer)
    whole.run()
    files = [content(tmp_path / name) for name in "ab"]
    assert files[0] == files[1]
    mean = bits_of(Transformer.load(tmp_path / "b" / "averaged.safetensors", xp=np))
    assert (best_of(tmp_path / "a") == mean) == (last_mean < 0.5)


def test_a_removed_model_is_the_best_again_where_there_is_one(tmp_path, monkeypatch):
    scored(monkeypatch, [0.5, 0.7, 0.6, 0.4, 0.9, 0.45])
    settings = dataclasses.replace(SETTINGS, keep_checkpoints=2, average="last", max_updates=12, patience=9)
    make(tmp_path, settings).run()  # which ends with a mean, the best one put aside
    aside = bits_of(Transformer.load(tmp_path / "checkpoints" / "best.safetensors", xp=np))
    (tmp_path / "model.safetensors").unlink()
    again = make_again(tmp_path, settings)
    assert best_of(tmp_path) == aside
    assert (again.progress.best_score, again.progress.stale_validations, again.done()) == (-0.5, 2, None)
    (tmp_path / "model.safetensors").unlink()
    again = make_again(tmp_path, dataclasses.replace(settings, average="none"))
    assert (again.progress.best_score, again.progress.stale_validations, again.done()) == (None, 0, None)
    assert again.run() == "12 updates"
    assert best_of(tmp_path) == bits_of(again.model)
    assert again.progress.best_score == -0.9


def test_a_mean_that_was_not_finished_is_made_up_for(tmp_path, monkeypatch):
    settings = dataclasses.replace(SETTINGS, keep_checkpoints=2, average="last")
    monkeypatch.setattr(Trainer, "_average", lambda self, began: None)
    make(tmp_path, settings).run()
    assert not (tmp_path / "averaged.safetensors").exists()
    monkeypatch.undo()
    again = make_again(tmp_path, settings)
    assert again.done() is None
    assert again.run() == "10 updates"
    assert (tmp_path / "averaged.safetensors").exists()
    assert again.done() == "10 updates"


def test_the_mean_does_without_checkpoints_that_are_gone(tmp_path, monkeypatch):
    settings = dataclasses.replace(SETTINGS, keep_checkpoints=3, average="last", max_updates=12)
    monkeypatch.setattr(Trainer, "_average", lambda self, began: None)
    make(tmp_path, settings).run()
    monkeypatch.undo()
    paths = [tmp_path / "checkpoints" / f"step-{step}.safetensors" for step in (4, 8, 12)]
    whole = paths[0].read_bytes()
    paths[0].write_bytes(whole[:-1])
    with raises_line(CheckpointError, "step-4.safetensors .*, or remove it; then the run goes on without it"):
        make_again(tmp_path, settings)
    paths[0].write_bytes(whole)
    paths[1].unlink()
    again = make_again(tmp_path, settings)
    assert (again.lost, again.run()) == ([8], "12 updates")
    mean = bits_of(average_models([paths[0], paths[2]], like=again.model))
    assert bits_of(Transformer.load(tmp_path / "averaged.safetensors", xp=np)) == mean
    lost, average = RunDirectory(tmp_path).read_log()[-2:]
    assert (lost, average["updates"]) == ({"event": "lost", "step": 12, "checkpoints": [8]}, [4, 12])
    assert make_again(tmp_path, settings).lost == []  # the state knows of it


def test_without_any_checkpoint_there_is_no_mean(tmp_path, monkeypatch):
    settings = dataclasses.replace(SETTINGS, keep_checkpoints=2, average="last")
    monkeypatch.setattr(Trainer, "_average", lambda self, began: None)
    make(tmp_path, settings).run()
    monkeypatch.undo()
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    again = make_again(tmp_path, settings)
    assert (again.lost, again.done()) == ([4, 8], "10 updates")


def test_a_mean_that_is_not_finite_is_not_the_model(tmp_path, monkeypatch):
    scored(monkeypatch, [0.5, 0.7, 0.6, math.nan])
    trainer = make(tmp_path, dataclasses.replace(SETTINGS, keep_checkpoints=2, average="last", max_updates=12))
    trainer.run()
    assert trainer.progress.averaged_score is None
    assert best_of(tmp_path) != bits_of(Transformer.load(tmp_path / "averaged.safetensors", xp=np))


def test_a_state_of_an_earlier_version_is_read(tmp_path):
    """It knew of neither patience nor checkpoints."""
    trainer = make(tmp_path)
    trainer.directory.save_state(trainer.model, trainer.state, {"step": 3, "epoch": 1, "tokens": 7, "minutes": 0.5})
    again = make_again(tmp_path, SETTINGS)
    assert (again.progress.step, again.progress.checkpoints, again.progress.stale_validations) == (3, [], 0)


def test_a_run_that_is_stopped_early_leaves_a_model(tmp_path):
    stopped = make(tmp_path, report=lambda event: os.kill(os.getpid(), signal.SIGTERM))
    assert stopped.run() == "stopped by SIGTERM"
    assert stopped.progress.step == 1
    assert Transformer.load(tmp_path / "model.safetensors", xp=np).config == CONFIG


def test_a_long_way_between_validations_is_saved_by_the_clock(tmp_path):
    saved = []
    settings = dataclasses.replace(SETTINGS, validate_every=100, save_every_minutes=1e-9)
    trainer = make(tmp_path, settings, report=lambda event: saved.append((tmp_path / "last.safetensors").exists()))
    trainer.run()
    assert all(saved[1:])
    plain = make(tmp_path / "plain", dataclasses.replace(settings, save_every_minutes=5.0))
    plain.run()
    assert bits(trainer) == bits(plain)


def test_minutes_end_a_run_and_count_over_sittings(tmp_path):
    settings = dataclasses.replace(SETTINGS, max_updates=None, max_minutes=0.01)
    trainer = make(tmp_path, settings)
    assert trainer.finished() is None
    trainer.run()
    assert trainer.progress.minutes > 0
    again = make(tmp_path, settings)
    again.resume()
    assert again.finished() == "0.01 minutes"


def test_a_finished_run_is_not_validated_twice(tmp_path):
    make(tmp_path).run()
    events = []
    again = make(tmp_path, report=events.append)
    again.resume()
    assert again.run() == "10 updates"
    assert events == []


def test_training_may_end_when_it_is_good_enough(tmp_path):
    trainer = make(tmp_path, enough=lambda validation: validation.step == 8)
    assert trainer.run() == "the goal is reached"
    assert trainer.progress.step == 8


@pytest.mark.parametrize(
    ("metric_for_best", "scores", "best"),
    [
        ("score", [1.0, 3.0, 2.0], 8),
        ("score", [3.0, 1.0, 2.0], 4),
        ("loss", [3.0, 1.0, 2.0], 10),
        ("score", [0.0, 0.0, 0.0], 10),  # no n-gram is right yet: the loss decides
    ],
)
def test_the_best_model_is_kept(tmp_path, monkeypatch, metric_for_best, scores, best):
    scored(monkeypatch, [0.9, 0.8, 0.7])
    settings = dataclasses.replace(SETTINGS, metric_for_best=metric_for_best)
    left, found = iter(scores), {}

    def bleu(model):
        found[trainer.progress.step] = model.source_embedding.weight.tobytes()
        return next(left)

    trainer = make(tmp_path, settings, bleu=bleu)
    trainer.run()
    assert trainer.progress.best_step == best
    model = Transformer.load(tmp_path / "model.safetensors", xp=np)
    assert model.source_embedding.weight.tobytes() == found[best]


def test_the_validation_loss_is_a_mean_over_tokens(tmp_path):
    trainer = make(tmp_path, dtype="float64")
    total = 0.0
    for source, target in zip(VALID.source, VALID.target, strict=True):
        logits = trainer.model([[*source, 2]], [[1, *target]])[0]
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        total -= sum(log[label] for log, label in zip(logs, [*target, 2], strict=True))
    assert trainer.validation_loss(trainer.model) == pytest.approx(total / 7, rel=1e-10)


# --- When it goes wrong -----------------------------------------------------------------------------------------------


def rates(monkeypatch, first_bad):
    """Make the learning rate monstrous from an update on."""
    monkeypatch.setattr(
        "xformer.runs.trainer.schedule", lambda *name, **settings: lambda step: 1e-3 if step < first_bad else 1e36
    )


def test_a_loss_that_is_not_finite_names_the_update_and_keeps_the_last_state(tmp_path, monkeypatch):
    rates(monkeypatch, 6)
    with pytest.raises(TrainingError, match=r"update 7: the loss is .*; the state of update 4 is kept"):
        make(tmp_path).run()
    assert json.loads(load_arrays(tmp_path / "last.safetensors")[1]["progress"])["step"] == 4


def test_running_out_of_memory_names_the_update_and_what_to_lower(tmp_path, monkeypatch):
    trainer, update = make(tmp_path), Trainer._update

    def too_large(self, *arguments):
        if self.progress.step == 5:
            np.empty(2**58, dtype="uint8")
        update(self, *arguments)

    monkeypatch.setattr(Trainer, "_update", too_large)
    expected = (
        r"update 6 ran out of memory: 256.0 PiB was asked for, and .* is free on this machine; parameters, "
        r"gradients and the optimizer's state alone take [\d.]+ [MK]iB of [\d.]+ GiB: lower batch_tokens "
        r"\(it is \d+\) and raise accumulate, or set rematerialize = true in \[model\]; the state of update 4 is kept"
    )
    with raises_line(OutOfMemoryError, expected):
        trainer.run()
    assert json.loads(load_arrays(tmp_path / "last.safetensors")[1]["progress"])["step"] == 4


def test_running_out_of_memory_before_the_first_update_is_no_matter_of_batches(tmp_path, monkeypatch):
    def too_large(*_):
        np.empty(2**58, dtype="uint8")

    monkeypatch.setattr("xformer.training.optimizers.Adam.initial", too_large)
    with raises_line(
        OutOfMemoryError, r"the optimizer's state ran out of memory: .*; take a smaller model, or optimizer"
    ):
        make(tmp_path)


def test_without_a_state_the_error_does_not_promise_one(tmp_path, monkeypatch):
    rates(monkeypatch, 2)
    with pytest.raises(TrainingError, match=r"update 3: the loss is .*; no state had been saved yet"):
        make(tmp_path).run()
    assert list(tmp_path.iterdir()) == [tmp_path / "log.jsonl"]


def test_a_ruined_model_does_not_replace_the_state_at_a_validation(tmp_path, monkeypatch):
    rates(monkeypatch, 8)  # update 8 itself is fine, and is validated
    with pytest.raises(TrainingError, match=r"validation loss after update 8 is .*; the state of update 4 is kept"):
        make(tmp_path).run()
    assert json.loads(load_arrays(tmp_path / "last.safetensors")[1]["progress"])["step"] == 4


def test_a_ruined_model_does_not_replace_the_state_at_an_interrupt(tmp_path):
    def ruin(event):
        if isinstance(event, Update) and event.step == 6:
            trainer.model.source_embedding.weight[0, 0] = math.nan
            os.kill(os.getpid(), signal.SIGINT)

    trainer = make(tmp_path, report=ruin)
    with pytest.raises(TrainingError, match=r"after update 6, source_embedding.weight is no longer finite"):
        trainer.run()
    assert json.loads(load_arrays(tmp_path / "last.safetensors")[1]["progress"])["step"] == 4


def test_a_state_of_another_version_is_refused(tmp_path):
    trainer = make(tmp_path)
    trainer.directory.save_state(trainer.model, trainer.state, {"step": 3, "sittings": 2})
    with pytest.raises(CheckpointError, match="is not a state of this version"):
        make(tmp_path).resume()
