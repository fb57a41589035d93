import dataclasses
import json
import math
import signal

import numpy as np
import pytest

from tests.test_threads import blas_pools, three_blas_threads  # noqa: F401 - a fixture
from tests.training.test_time_limit import Clock
from xformer.backends.numpy import NumpyLibrary
from xformer.errors import TrainingError
from xformer.families.run_directory import RunDirectory
from xformer.io import load_arrays
from xformer.models import Transformer, TransformerConfig
from xformer.runs.config import TrainingConfig
from xformer.runs.pairs import PairsTask
from xformer.runs.recipe import Recipe
from xformer.runs.trainer import Average, Trainer, average_models
from xformer.training import Step, TokenPairs, Validation
from xformer.training.checkpoint import TrainingFiles
from xformer.training.events import Plan
from xformer.training.interrupt import until_stopped
from xformer.tree import flatten

MODEL = TransformerConfig(
    source_vocab_size=9, target_vocab_size=9, d_model=8, num_heads=2, d_ff=16, num_encoder_layers=1,
    num_decoder_layers=1, dropout=0.1, share_embeddings=True,
)  # fmt: skip
TRAIN = TokenPairs(
    [[4 + row % 5] * (1 + row % 6) for row in range(40)], [[4 + row % 5] * (1 + row % 4) for row in range(40)]
)
VALID = TokenPairs([[4, 5], [6], [7, 7, 8]], [[4], [6, 6], [7]])
TRAINING = TrainingConfig(batch_tokens=30, warmup_steps=5, validate_every=4, max_steps=10, data_parallel=2)


class Scored(PairsTask):
    """Pairs with a score that a test computes, or none."""

    bleu = None

    @property
    def metric(self):
        return "BLEU" if self.bleu else None

    def score(self, model, communicator=None, **options):
        return self.bleu(model)


def make(path, config=TRAINING, *, xp=np, dtype="float32", bleu=None, model_config=MODEL, report=None):
    model = Transformer(model_config, xp=xp, seed=config.seed, dtype=dtype)
    task = Scored(Recipe(training=config), model, TRAIN, VALID)
    task.bleu = bleu
    callbacks = [lambda event, loop: report(event)] if report else []
    return Trainer(task, RunDirectory(path), callbacks=callbacks)


def recorded(events):
    """Return a report that appends steps and validations to a list."""
    return lambda event: events.append(event) if isinstance(event, Step | Validation) else None


def states(trainer):
    """Return the state of the validator, of early stopping and of the trainer itself."""
    return {type(each).__name__: each.state_dict() for each in trainer.loop.callbacks if hasattr(each, "state_dict")}


def bits(trainer):
    return [leaf.tobytes() for leaf in flatten((trainer.model, trainer.loop.state[1:]))[0]]


def content(directory):
    """Return the bits of all models of a run, by file."""
    files = {str(path.relative_to(directory)): load_arrays(path)[0] for path in directory.rglob("*.safetensors")}
    return {file: {name: array.tobytes() for name, array in arrays.items()} for file, arrays in files.items()}


def test_a_run_reports_logs_and_saves(tmp_path):
    events = []
    trainer = make(tmp_path, report=recorded(events))
    assert trainer.run() == "10 steps"
    assert [event.step for event in events if isinstance(event, Step)] == list(range(1, 11))
    assert [event.step for event in events if isinstance(event, Validation)] == [4, 8, 10]
    logged = TrainingFiles(tmp_path).read_log()
    assert [event["step"] for event in logged if event["event"] == "step"] == [1, 10]
    assert [event["step"] for event in logged if event["event"] == "validation"] == [4, 8, 10]
    assert logged[-1]["perplexity"] == pytest.approx(math.exp(logged[-1]["loss"]))
    arrays, metadata = load_arrays(tmp_path / "last.safetensors")
    progress = json.loads(metadata["progress"])
    assert progress["step"] == 10
    assert progress["callbacks"] == {f"{name} 1": state for name, state in states(trainer).items()}
    assert arrays["source_embedding.weight"].tobytes() == trainer.model.source_embedding.weight.tobytes()


def test_steps_are_programs_where_kernels_can_be_captured(tmp_path, monkeypatch):
    """As on CuPy, batches have few shapes; validations and checkpoints leave the programs as they are."""
    config = dataclasses.replace(TRAINING, data_parallel=1, max_steps=40, keep_checkpoints=2, checkpoint_every=3)
    monkeypatch.setattr(NumpyLibrary, "builds_per_shape", True)
    plain = make(tmp_path / "plain", config)
    plain.run()
    assert plain.loop.jitted_step is None
    monkeypatch.setattr(NumpyLibrary, "graph_capture", lambda self: lambda function: function)
    captured = make(tmp_path / "captured", config)
    captured.run()
    assert captured.loop.jitted_step.num_runs > 20
    assert bits(captured) == bits(plain)


def interrupt_at(step):
    def interrupt(event):
        if isinstance(event, Step) and event.step == step:
            signal.raise_signal(signal.SIGINT)

    return interrupt


EVERYTHING = {
    "grad_accumulation": 2, "z_loss": 1e-3, "patience": 5, "keep_checkpoints": 3, "checkpoint_every": 2,
    "average": "last",
}  # fmt: skip


@pytest.mark.parametrize(
    ("stop_at", "dtype", "changes"),
    [
        (6, "float32", {"optimizer": "adamw", **EVERYTHING}),
        (4, "float32", {"optimizer": "sgd", "keep_checkpoints": 2, "average": "best", "grad_accumulation": 3}),
    ],
    ids=["adamw", "sgd"],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, stop_at, dtype, changes):
    config = dataclasses.replace(TRAINING, **changes)
    complete = make(tmp_path / "complete", config, dtype=dtype)
    complete.run()
    stopped = make(tmp_path / "stopped", config, dtype=dtype, report=interrupt_at(stop_at))
    assert stopped.run() == "stopped by SIGINT"
    assert stopped.loop.step == stop_at
    resumed = make(tmp_path / "stopped", config, dtype=dtype)
    resumed.loop.resume()
    assert resumed.loop.step == stop_at
    assert resumed.run() == "10 steps"
    assert bits(resumed) == bits(complete)
    assert content(tmp_path / "stopped") == content(tmp_path / "complete")
    assert states(resumed) == states(complete)
    logs = [TrainingFiles(tmp_path / name).read_log() for name in ("complete", "stopped")]
    for events in logs:
        for event in events:
            for clock in ("minutes", "tokens_per_second"):
                event.pop(clock, None)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("call", [1, 4], ids=["in the middle", "of the average"])
def test_an_interrupted_validation_is_repeated_after_resuming(tmp_path, call):
    config = dataclasses.replace(TRAINING, **EVERYTHING)
    batches = []

    def score(model):
        for batch in until_stopped(range(5)):
            batches.append(batch)
            if len(batches) == 5 * call - 2:
                signal.raise_signal(signal.SIGINT)
        return 0.0

    stopped = make(tmp_path / "stopped", config, bleu=score)
    assert stopped.run() == "stopped by SIGINT"
    assert len(batches) == 5 * call - 2
    resumed = make(tmp_path / "stopped", config, bleu=lambda model: 0.0)
    resumed.loop.resume()
    assert resumed.run() == "10 steps"
    complete = make(tmp_path / "complete", config, bleu=lambda model: 0.0)
    complete.run()
    assert bits(resumed) == bits(complete)
    assert content(tmp_path / "stopped") == content(tmp_path / "complete")
    assert states(resumed) == states(complete)


def test_the_state_is_on_disk_while_a_score_is_computed(tmp_path):
    saved = []

    def score(model):
        saved.append(trainer.loop.saved_step == trainer.loop.step)
        return 0.0

    trainer = make(tmp_path, TRAINING, bleu=score)
    trainer.run()
    assert saved
    assert all(saved)


# --- Early stopping, checkpoints and their average -------------------------------------------------------------------


def scored(monkeypatch, losses):
    """Let validations compute these losses, one after the other."""
    losses = iter(losses)
    monkeypatch.setattr(Trainer, "validation_loss", lambda self, model: next(losses))


@pytest.mark.parametrize(
    ("patience", "step", "reason"),
    [(1, 8, "no better model in 1 validation"), (2, 20, "no better model in 2 validations")],
)
def test_patience_ends_a_run(tmp_path, monkeypatch, patience, step, reason):
    scored(monkeypatch, [0.9, 0.9, 0.7, 0.8, 0.8, 0.6])
    config = dataclasses.replace(TRAINING, max_steps=24, patience=patience)
    events = []
    trainer = make(tmp_path, config, report=recorded(events))
    assert trainer.run() == reason
    assert trainer.loop.step == trainer.validator.step == step
    assert isinstance(events[-1], Validation)
    assert run_again(tmp_path, config) == (reason, [])


def test_the_most_recent_checkpoints_are_kept_with_their_scores(tmp_path, monkeypatch):
    scored(monkeypatch, [0.5, 0.6, 0.7])
    config = dataclasses.replace(TRAINING, keep_checkpoints=2, checkpoint_every=3, max_steps=12)
    trainer = make(tmp_path, config)
    trainer.run()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-12.safetensors", "step-9.safetensors"]
    logged = [event for event in TrainingFiles(tmp_path).read_log() if event["event"] == "checkpoint"]
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


@pytest.mark.parametrize(("average", "better"), [("last", True), ("best", False)])
def test_the_average_becomes_the_model_if_it_is_better(tmp_path, monkeypatch, average, better):
    scored(monkeypatch, [0.5, 0.7, 0.6, 0.4 if better else 0.55])
    config = dataclasses.replace(TRAINING, keep_checkpoints=2, average=average, max_steps=12)
    events = []
    trainer = make(tmp_path, config, report=recorded(events))
    assert trainer.run() == "12 steps"
    steps = {"last": [8, 12], "best": [4, 12]}[average]
    paths = [tmp_path / "checkpoints" / f"step-{step}.safetensors" for step in steps]
    average_bits = bits_of(average_models(paths, like=trainer.model))
    assert bits_of(Transformer.load(tmp_path / "averaged.safetensors", xp=np)) == average_bits
    assert (best_of(tmp_path) == average_bits) == better
    assert type(events[-1]) is Average
    assert (events[-1].step, events[-1].steps, events[-1].best) == (12, steps, better)
    logged = TrainingFiles(tmp_path).read_log()[-1]
    assert (logged["event"], logged["steps"], logged["best"]) == ("average", steps, better)
    assert trainer.progress.averaged_score == (-0.4 if better else None)
    assert trainer.validator.best == [-0.5]
    assert run_again(tmp_path, config) == ("12 steps", [])


def make_again(path, config, **options):
    trainer = make(path, config, **options)
    trainer.loop.resume()
    return trainer


def run_again(path, config):
    """Resume a run; return the reason why it ended, and its steps and validations."""
    events = []
    return make_again(path, config, report=recorded(events)).run(), events


def test_a_run_that_continues_discards_the_average(tmp_path, monkeypatch):
    """It then ends as one that was never interrupted."""
    scored(monkeypatch, [0.5, 0.7, 0.4, 0.6, 0.55])
    config = dataclasses.replace(TRAINING, keep_checkpoints=2, average="last", max_steps=8)
    make(tmp_path / "a", config).run()
    longer = dataclasses.replace(config, max_steps=12)
    make_again(tmp_path / "a", longer).run()
    scored(monkeypatch, [0.5, 0.7, 0.6, 0.55])
    complete = make(tmp_path / "b", longer)
    complete.run()
    files = [content(tmp_path / name) for name in "ab"]
    assert files[0] == files[1]


def test_a_removed_model_is_restored_or_written_again(tmp_path, monkeypatch):
    scored(monkeypatch, [0.5, 0.7, 0.6, 0.4, 0.9])
    config = dataclasses.replace(TRAINING, keep_checkpoints=2, average="last", max_steps=12)
    make(tmp_path, config).run()  # ends with an average; the best model is backed up
    backup = bits_of(Transformer.load(tmp_path / "checkpoints" / "best.safetensors", xp=np))
    (tmp_path / "model.safetensors").unlink()
    again = make_again(tmp_path, config)
    assert best_of(tmp_path) == backup
    assert (again.validator.best, again.progress.averaged_score) == ([-0.5], None)
    (tmp_path / "model.safetensors").unlink()
    again = make_again(tmp_path, dataclasses.replace(config, average="none"))
    assert again.run() == "12 steps"
    assert best_of(tmp_path) == bits_of(again.model)
    assert again.validator.best == [-0.9]


def test_an_average_that_was_interrupted_is_computed_after_resuming(tmp_path, monkeypatch):
    config = dataclasses.replace(TRAINING, keep_checkpoints=3, average="last", max_steps=12)
    monkeypatch.setattr(Trainer, "_average", lambda self: None)
    make(tmp_path, config).run()
    monkeypatch.undo()
    paths = [tmp_path / "checkpoints" / f"step-{step}.safetensors" for step in (4, 8, 12)]
    paths[1].unlink()  # an average leaves out models that are gone
    reason, events = run_again(tmp_path, config)
    assert (reason, [event.steps for event in events]) == ("12 steps", [[4, 12]])
    average = bits_of(average_models([paths[0], paths[2]], like=make(tmp_path).model))
    assert bits_of(Transformer.load(tmp_path / "averaged.safetensors", xp=np)) == average
    assert run_again(tmp_path, config) == ("12 steps", [])


def test_minutes_end_a_run_and_count_over_resumed_runs(tmp_path):
    config = dataclasses.replace(TRAINING, max_steps=None, max_minutes=0.01)
    trainer = make(tmp_path, config)
    trainer.run()
    assert trainer.loop.minutes > 0
    assert run_again(tmp_path, config) == ("the time limit (0.6 s)", [])


def test_validations_checkpoints_and_the_average_follow_the_steps_that_fit(tmp_path, monkeypatch):
    """The clock moves on by 1 s in each step, by 5 s in each validation, and by 0.5 s in each save."""
    clock = Clock(monkeypatch, first=20.0, save=0.5)
    loss = PairsTask.loss

    def timed(task, model, batch, rng, **options):
        if rng is not None:
            clock.steps += 1
            clock.wait(20.0 if clock.steps == 1 else 1.0)
        return loss(task, model, batch, rng, **options)

    def score(model):
        return clock.wait(5.0, float(model.source_embedding.weight[5, 5]))

    monkeypatch.setattr(PairsTask, "loss", timed)
    config = dataclasses.replace(
        TRAINING, data_parallel=1, schedule="cosine", warmup_steps=30, max_steps=500, max_minutes=3.0,
        validate_every=20, keep_checkpoints=3, checkpoint_every=7, average="last",
    )  # fmt: skip
    events = []
    trainer = make(tmp_path / "timed", config, bleu=score, report=events.append)
    assert trainer.run() == "the time limit (3 min)"
    (plan,) = [event for event in events if isinstance(event, Plan)]
    validations = [event.step for event in events if isinstance(event, Validation)]
    assert validations == [*range(20, plan.steps, 20), plan.steps, plan.steps]  # the last one is that of the average
    assert 150 < clock.now - 1000.0 <= 180
    assert TrainingFiles(tmp_path / "timed").read_log()[-1]["step"] == plan.steps
    same = dataclasses.replace(config, max_steps=plan.steps, max_minutes=None)
    make(tmp_path / "same", same, bleu=score).run()
    assert content(tmp_path / "timed") == content(tmp_path / "same")
    clock.steps = 0  # the first step is as slow as before
    for report in (interrupt_at(40), None):
        trainer = make(tmp_path / "resumed", config, bleu=score, report=report)
        trainer.run()
    assert content(tmp_path / "resumed") == content(tmp_path / "timed")


@pytest.mark.parametrize(
    ("metric_for_best", "scores", "best"),
    [
        ("score", [1.0, 3.0, 2.0], 8),
        ("loss", [3.0, 1.0, 2.0], 10),
        ("score", [0.0, 0.0, 0.0], 10),  # the loss decides between equal scores
    ],
)
def test_the_best_model_is_kept(tmp_path, monkeypatch, metric_for_best, scores, best):
    scored(monkeypatch, [0.9, 0.8, 0.7])
    config = dataclasses.replace(TRAINING, metric_for_best=metric_for_best)
    scores, weights = iter(scores), {}

    def bleu(model):
        weights[trainer.loop.step] = model.source_embedding.weight.tobytes()
        return next(scores)

    trainer = make(tmp_path, config, bleu=bleu)
    trainer.run()
    assert trainer.loop.best_step == best
    model = Transformer.load(tmp_path / "model.safetensors", xp=np)
    assert model.source_embedding.weight.tobytes() == weights[best]


def test_the_validation_loss_is_a_mean_over_tokens(tmp_path):
    trainer = make(tmp_path, dtype="float64")
    total = 0.0
    for source, target in zip(VALID.source, VALID.target, strict=True):
        logits = trainer.model([[*source, 2]], [[1, *target]])[0]
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        total -= sum(log[label] for log, label in zip(logs, [*target, 2], strict=True))
    assert trainer.validation_loss(trainer.model) == pytest.approx(total / 7, rel=1e-10)


# --- Errors ---------------------------------------------------------------------------------------------------------


def learning_rates(monkeypatch, first_bad):
    """Make the learning rate far too large from a step on."""
    monkeypatch.setattr(
        TrainingConfig, "make_schedule", lambda config, d_model: lambda step: 1e-3 if step < first_bad else 1e36
    )


def test_a_model_with_nan_does_not_replace_the_state_at_a_validation(tmp_path, monkeypatch):
    learning_rates(monkeypatch, 8)  # step 8 itself is fine, and is validated
    with pytest.raises(TrainingError, match=r"validation loss after step 8 is .* \(the state of step 4 is kept\)"):
        make(tmp_path).run()
    assert json.loads(load_arrays(tmp_path / "last.safetensors")[1]["progress"])["step"] == 4


def test_a_model_with_nan_does_not_replace_the_state_at_an_interrupt(tmp_path):
    def set_nan(event):
        if isinstance(event, Step) and event.step == 6:
            trainer.loop._model.source_embedding.weight[0, 0] = math.nan
            signal.raise_signal(signal.SIGINT)

    trainer = make(tmp_path, report=set_nan)
    with pytest.raises(TrainingError, match=r"source_embedding\.weight is not finite after step 6"):
        trainer.run()
    assert json.loads(load_arrays(tmp_path / "last.safetensors")[1]["progress"])["step"] == 4
