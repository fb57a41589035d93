import dataclasses
import json
import math
import os
import signal

import numpy as np
import pytest

from xformer.errors import CheckpointError, TrainingError
from xformer.models import Transformer, TransformerConfig
from xformer.storage import load_arrays
from xformer.training import RunDirectory, TokenPairs, Trainer, TrainingSettings, Update, Validation
from xformer.tree import flatten

CONFIG = TransformerConfig(
    9,
    9,
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


def make(path, settings=SETTINGS, *, xp=np, dtype="float32", **options):
    path.mkdir(exist_ok=True)
    model = Transformer(CONFIG, xp=xp, seed=settings.seed, dtype=dtype)
    return Trainer(model, TRAIN, VALID, settings, RunDirectory(path), **options)


def bits(trainer):
    trees = (trainer.model, trainer.state.first, trainer.state.second)
    return [leaf.tobytes() for tree in trees for leaf in flatten(tree)[0]]


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
    trainer = Trainer(model, pairs, pairs, settings, RunDirectory(tmp_path), report=lambda e: losses.append(e.loss))
    trainer.run()
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


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_change_no_more_than_the_last_bits(tmp_path, shards):
    # Without dropout, whose masks are drawn by the shard.
    config = dataclasses.replace(CONFIG, dropout=0.0)
    losses = []
    for count in (2, shards):
        model = Transformer(config, xp=np, seed=0, dtype="float64")
        (tmp_path / str(count)).mkdir()
        run = RunDirectory(tmp_path / str(count))
        trainer = Trainer(model, TRAIN, VALID, dataclasses.replace(SETTINGS, shards=count), run)
        trainer.run()
        losses.append(trainer.validation_loss())
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


@pytest.mark.parametrize("stop_at", [4, 6])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path, stop_at, dtype):
    whole = make(tmp_path / "whole", dtype=dtype)
    whole.run()

    def interrupt(event):
        if isinstance(event, Update) and event.step == stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = make(tmp_path / "stopped", dtype=dtype, report=interrupt)
    assert stopped.run() == "stopped by SIGINT"
    assert stopped.progress.step == stop_at
    resumed = make(tmp_path / "stopped", dtype=dtype)
    resumed.resume()
    assert resumed.progress.step == stop_at
    assert resumed.run() == "10 updates"
    assert bits(resumed) == bits(whole)
    logs = [RunDirectory(tmp_path / name).read_log() for name in ("whole", "stopped")]
    assert [(e["event"], e["step"], e["loss"]) for e in logs[0]] == [
        (e["event"], e["step"], e["loss"]) for e in logs[1]
    ]


def test_a_run_that_is_stopped_early_leaves_a_model(tmp_path):
    stopped = make(tmp_path, report=lambda event: os.kill(os.getpid(), signal.SIGTERM))
    assert stopped.run() == "stopped by SIGTERM"
    assert stopped.progress.step == 1
    assert Transformer.load(tmp_path / "model.safetensors", xp=np).config == CONFIG


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
    ("select_by", "scores", "best"),
    [
        ("bleu", [1.0, 3.0, 2.0], 8),
        ("bleu", [3.0, 1.0, 2.0], 4),
        ("loss", [3.0, 1.0, 2.0], 10),
        ("bleu", [0.0, 0.0, 0.0], 10),  # no n-gram is right yet: the loss decides
    ],
)
def test_the_best_model_is_kept(tmp_path, monkeypatch, select_by, scores, best):
    losses = iter([0.9, 0.8, 0.7])
    monkeypatch.setattr(Trainer, "validation_loss", lambda self: next(losses))
    settings = dataclasses.replace(SETTINGS, select_by=select_by)
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
    assert trainer.validation_loss() == pytest.approx(total / 7, rel=1e-10)


# --- When it goes wrong -----------------------------------------------------------------------------------------------


def rates(monkeypatch, first_bad):
    """Make the learning rate monstrous from an update on."""
    monkeypatch.setattr(
        "xformer.training.trainer.schedule", lambda *name, **settings: lambda step: 1e-3 if step < first_bad else 1e36
    )


def test_a_loss_that_is_not_finite_names_the_update_and_keeps_the_last_state(tmp_path, monkeypatch):
    rates(monkeypatch, 6)
    with pytest.raises(TrainingError, match=r"update 7: the loss is .*; the state of update 4 is kept"):
        make(tmp_path).run()
    assert json.loads(load_arrays(tmp_path / "last.safetensors")[1]["progress"])["step"] == 4


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
