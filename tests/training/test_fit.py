"""`fit` trains any module with any loss."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from tests.conftest import library_or_skip, needs_fused_products
from tests.reference import for_each, raises_line, small_language_model
from tests.test_threads import blas_pools, three_blas_threads  # noqa: F401 - a fixture
from xformer.backends import Array, array_namespace, from_host, to_host
from xformer.backends.numpy import NumpyLibrary
from xformer.errors import CheckpointError, ConfigError, DataError, OutOfMemoryError, TrainingError
from xformer.layers import lora
from xformer.layers.basic import Dropout
from xformer.models import LanguageModel
from xformer.ops import cross_entropy
from xformer.training import (
    SGD,
    Adam,
    AdamW,
    Checkpoint,
    End,
    Skip,
    Start,
    Step,
    early_stopping,
    fit,
    load_parameters,
    print_every,
    schedules,
    time_limit,
    validate,
)
from xformer.training.checkpoint import TrainingFiles
from xformer.training.fit import TrainingLoop
from xformer.tree import Module, flatten, freeze, with_fields

TARGET = np.asarray([1.0, -2.0, 3.0])
TOKENS = np.random.default_rng(0).integers(3, 9, (2, 6))


class Regression(Module):
    """A module of the user, without configuration or `save`."""

    weight: Array

    def __init__(self, xp=np, dtype="float64"):
        self.weight = from_host(xp, np.zeros(3), dtype=dtype)

    def __call__(self, x, rng=None):
        if rng is not None:
            x = Dropout(0.1)(x, rng)
        return x @ self.weight


def make_batches(count=4, xp=np, dtype="float64"):
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(8, 3)) for _ in range(count)]
    return [(from_host(xp, x, dtype=dtype), from_host(xp, x @ TARGET, dtype=dtype)) for x in inputs]


def squared_error(model, batch, rng):
    """A mean, so that batches count 1 each."""
    x, y = batch
    error = model(x, rng) - y
    return array_namespace(error).mean(error * error)


def run(batches=None, *, model=None, loss_fn=squared_error, steps=6, **options):
    options = {"optimizer": Adam(), "learning_rate": 0.05, "steps": steps, **options}
    return fit(model or Regression(), loss_fn, batches or make_batches(), **options)


def bits(tree):
    return [to_host(leaf).tobytes() for leaf in flatten(tree)[0]]


def losses(history):
    return [step.loss for step in history]


@for_each("name", ["numpy", "torch", "jax"])
def test_a_module_learns_from_its_own_loss(name):
    xp = library_or_skip(name)
    model, history = run(make_batches(xp=xp), model=Regression(xp), steps=60, learning_rate=0.3)
    assert [step.step for step in history] == list(range(1, 61))
    first, last = (float(squared_error(each, make_batches(xp=xp)[0], None)) for each in (Regression(xp), model))
    assert last < 0.2 * first
    assert type(model) is Regression


def test_the_model_that_was_passed_is_not_changed():
    model = Regression()
    run(model=model)
    assert model.weight.tolist() == [0.0, 0.0, 0.0]


def test_a_callback_may_keep_the_model():
    kept = []

    def keep(event, loop):
        if isinstance(event, Step):
            kept.append((loop.model, loop.model.weight.copy()))

    model, _ = run(callbacks=[keep])
    assert len(kept) == 6
    for best, weight in kept:
        np.testing.assert_array_equal(best.weight, weight)
    assert bits(model) == bits(kept[-1][0])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let the arrays of NumPy be out of reach of the host, so that reading a loss waits."""
    monkeypatch.setattr(NumpyLibrary, "is_host_accessible", lambda self, array: False)


def logged_run(diary, run_dir, steps=6, fails_at=None, **options):
    """Train on a function of the batches; the diary has the batches that are made and the events."""

    def batches(start):
        for number in itertools.count(start):
            diary.append(f"batch {number}")
            if number == fails_at:
                raise DataError("the end of the file")
            yield make_batches()[number % 4]

    def write(event, loop):
        if isinstance(event, Step):
            diary.append(f"step {event.step}")
            loop.save()

    return run(batches, steps=steps, run_dir=run_dir, callbacks=[write], **options)


def test_on_a_gpu_the_next_batch_is_made_while_a_step_is_computed(tmp_path, as_on_a_gpu, monkeypatch):
    diary, expected = [], []
    model, history = logged_run(diary, tmp_path / "whole", steps=3)
    assert diary == ["batch 0", "batch 1", "step 1", "batch 2", "step 2", "step 3"]
    logged_run([], tmp_path / "parts", steps=2)
    assert bits(logged_run(diary, tmp_path / "parts", steps=3)[0]) == bits(model)
    assert diary[-2:] == ["batch 2", "step 3"]
    monkeypatch.undo()
    other, other_history = logged_run(expected, tmp_path / "cpu", steps=3)
    assert expected == ["batch 0", "step 1", "batch 1", "step 2", "batch 2", "step 3"]
    assert bits(model) == bits(other)
    assert losses(history) == losses(other_history)


def test_on_a_gpu_an_error_of_a_batch_is_raised_after_the_step_before(tmp_path, as_on_a_gpu):
    diary = []
    with pytest.raises(DataError, match="the end of the file"):
        logged_run(diary, tmp_path, fails_at=2)
    assert diary[-2:] == ["batch 2", "step 2"]
    assert len(logged_run([], tmp_path)[1]) == 4


def test_products_of_batches_that_are_not_split_have_all_threads(monkeypatch, three_blas_threads):  # noqa: F811
    monkeypatch.setenv("XFORMER_NUM_THREADS", "2")
    held = []

    def loss(model, batch, rng):
        held.extend(blas_pools())
        return squared_error(model, batch, rng)

    fit(Regression(), loss, make_batches(), optimizer=Adam(), learning_rate=0.1, data_parallel=2)
    assert set(held) == {2}


# --- Batches ----------------------------------------------------------------------------------------------------------


def test_an_iterable_is_iterated_again():
    _, history = run(make_batches(4), steps=10)
    assert [step.epoch for step in history] == [0] * 4 + [1] * 4 + [2] * 2


def test_an_iterator_ends_training():
    events = []
    _, history = run(iter(make_batches(4)), callbacks=[lambda event, loop: events.append(event)], steps=10)
    assert len(history) == 4
    assert events[-1] == End(4, "the batches are exhausted")


def test_a_function_gets_the_number_of_the_first_batch():
    numbers = []

    def batches(start):
        numbers.append(start)
        return iter(make_batches(20)[start:])

    _, by_function = run(batches)
    _, by_list = run(make_batches(20))
    assert numbers == [0]
    assert losses(by_function) == losses(by_list)


@pytest.mark.parametrize(("grad_accumulation", "steps"), [(1, 3), (2, 2)])
def test_without_steps_the_batches_are_used_once(tmp_path, grad_accumulation, steps):
    used, batches = [], make_batches(3)

    def loss(model, batch, rng):
        used.append(batch)
        return squared_error(model, batch, rng)

    for _ in range(2):  # a second call finds nothing left to do
        fit(Regression(), loss, batches, optimizer=Adam(), learning_rate=0.1, data_parallel=1, run_dir=tmp_path,
            grad_accumulation=grad_accumulation)  # fmt: skip
    assert list(map(id, used)) == list(map(id, batches))
    assert load_parameters(Regression(), tmp_path / "model.safetensors").weight.any()
    _, history = run(batches, steps=None, grad_accumulation=grad_accumulation)
    assert len(history) == steps


@for_each("batches", [lambda start: iter(make_batches()[start:]), iter(make_batches())])
def test_batches_without_a_length_need_steps(batches):
    with raises_line(ConfigError, r"^steps is None, and batches is a \w+ without a length; pass the number of steps,"):
        run(batches, steps=None)
    _, history = run(batches, steps=math.inf)
    assert len(history) == 4


def test_no_batches_are_refused():
    with raises_line(DataError, "batches is empty; expected at least one batch"):
        fit(Regression(), squared_error, [], optimizer=Adam(), learning_rate=0.1)
    with raises_line(DataError, r"the batches of step 1 have \[0\] tokens; expected at least 1"):
        run(num_tokens=lambda batch: 0)


def test_accumulated_batches_are_one_large_batch():
    batches = make_batches(4)
    halves = [tuple(part[rows] for part in batch) for batch in batches for rows in (slice(0, 3), slice(3, 8))]

    def summed(model, batch, rng):
        error = model(batch[0]) - batch[1]
        return error @ error

    options = {"optimizer": SGD(), "learning_rate": 0.01, "steps": 4, "num_tokens": lambda batch: len(batch[1])}
    large, history = fit(Regression(), summed, batches, **options)
    small, parts = fit(Regression(), summed, halves, **options, grad_accumulation=2)
    np.testing.assert_allclose(large.weight, small.weight, rtol=1e-9)
    assert [step.num_tokens for step in history] == [step.num_tokens for step in parts] == [8] * 4


# --- Callbacks --------------------------------------------------------------------------------------------------------


def test_callbacks_get_every_event_and_may_stop_training(tmp_path):
    events = []

    def stop(event, loop):
        events.append(event)
        return isinstance(event, Step) and event.step == 3

    run(callbacks=[stop], run_dir=tmp_path / "run")
    assert [type(event) for event in events] == [Start, Step, Step, Step, End, Checkpoint]
    assert events[-2] == End(3, "stopped by stop", is_interrupted=False)
    run(callbacks=[lambda event, loop: "it is enough"], steps=100)


def test_an_early_end_is_reported(caplog):
    run(iter(make_batches()), steps=6)
    assert caplog.messages == ["training ended after step 4 of 6: the batches are exhausted"]


def test_arguments_of_a_wrong_type_are_refused():
    for options, message in [
        ({"model": Regression}, "model is the class Regression; expected an instance of a Module"),
        ({"optimizer": Adam}, "optimizer is the class Adam; expected an optimizer of xformer, e.g. xf.AdamW"),
        ({"learning_rate": None}, "learning_rate is None; expected a number or a schedule"),
        ({"callbacks": print}, "callbacks is not a list of functions"),
        ({"num_tokens": 32}, "num_tokens is 32; expected a function of the batch"),
    ]:
        with raises_line(ConfigError, message):
            run(**options)


def test_the_perplexity_of_a_large_loss_is_finite():
    events = []
    callbacks = [validate([(x, y + 1e3) for x, y in make_batches(1)], 2), lambda event, loop: events.append(event)]
    run(callbacks=callbacks, steps=2)
    (validation,) = (event for event in events if type(event).__name__ == "Validation")
    assert validation.loss > 1e5
    assert validation.perplexity == math.exp(700.0)


def test_validation_and_early_stopping():
    scores = iter([1.0, 2.0, 1.5, 1.7, 9.0])
    events = []
    callbacks = [validate(lambda model: next(scores), 2, metric="accuracy"), early_stopping(2)]
    _, history = run(callbacks=[*callbacks, lambda event, loop: events.append(event)], steps=100)
    validations = [event for event in events if type(event).__name__ == "Validation"]
    assert [(event.step, event.score, event.best) for event in validations] == [
        (2, 1.0, True),
        (4, 2.0, True),
        (6, 1.5, False),
        (8, 1.7, False),
    ]
    assert (len(history), events[-1].reason) == (8, "no better model in 2 validations")


def test_early_stopping_counts_the_validations_of_other_callbacks(caplog):
    scores = iter([1.0, 2.0, 1.5, 1.7, 9.0])
    validator = validate(lambda model: next(scores), 2)
    _, history = run(callbacks=[lambda event, loop: validator(event, loop), early_stopping(2)], steps=100)
    assert (len(history), caplog.messages) == (8, [])
    run(callbacks=[lambda event, loop: None, early_stopping(2)])
    assert caplog.messages == ["early_stopping got no validation; expected validate(data, every) in callbacks, too"]


@pytest.mark.parametrize("as_directory", [True, False])
def test_the_best_model_is_returned_also_after_resuming(tmp_path, as_directory):
    seen = {}

    def callbacks(*more):
        def score(model):
            seen.setdefault(len(seen), bits(model))
            return -abs(len(seen) - 2)  # the second validation is best

        return [*more, validate(score, 2)]

    options = {"run_dir": tmp_path / "run"} if as_directory else {}
    model, history = run(callbacks=callbacks(), keep_best=True, steps=8, **options)
    assert (len(history), bits(model)) == (8, seen[1])
    last, _ = run(callbacks=[validate(make_batches(1), 2)], steps=8)
    assert bits(last) == seen[3]  # the default without early stopping
    if as_directory:
        more, history = run(callbacks=callbacks(), keep_best=True, steps=10, **options)
        assert (len(history), bits(more)) == (2, seen[1])
        assert bits(load_parameters(more, tmp_path / "run")) == seen[1]
        with raises_line(CheckpointError, "has keep_best=True; pass keep_best=True, as before"):
            run(callbacks=callbacks(), keep_best=False, steps=12, **options)


@pytest.mark.parametrize("jit", [True, False])
def test_early_stopping_restores_the_best_model(jit):
    for keep_best, index in ((True, 1), (False, 3)):
        scores, seen = iter([1.0, 2.0, 1.5, 1.7]), []
        callbacks = [validate(lambda model: seen.append(bits(model)) or next(scores), 2), early_stopping(2)]  # noqa: B023
        model, _ = run(callbacks=callbacks, steps=100, keep_best=keep_best, jit=jit)
        assert bits(model) == seen[index]


def test_the_best_model_by_loss_and_without_a_validation():
    batches = make_batches(1)
    callbacks = [validate(batches, 1)]
    model, _ = run(callbacks=callbacks, keep_best=True, steps=6, learning_rate=-0.01)  # it gets worse
    first, _ = run(callbacks=[], steps=1, learning_rate=-0.01)
    assert bits(model) == bits(first)
    for callbacks, message in (
        ([], "keep_best needs validations; expected validate"),
        ([validate(batches, 1), validate(batches, 2)], "keep_best got 2 callbacks validate"),
    ):
        with raises_line(ConfigError, message):
            run(callbacks=callbacks, keep_best=True)
    stopped, _ = run(callbacks=[kill_at(1), validate(batches, 2)], keep_best=True, steps=6, learning_rate=-0.01)
    assert bits(stopped) == bits(first)


class Samples:
    """A batch with an attribute `split` that is no method."""

    def __init__(self):
        self.split = "train"


class Lines(Samples):
    """A batch with a method `split` for something else."""

    def split(self):
        return [self]


class Parts:
    """A batch whose shards are not as they should be."""

    def split(self, count):
        return [self] * (count + 1)


@for_each("batch", ["two words", b"bytes", bytearray(b"b"), Samples(), Lines()])
def test_a_batch_may_have_another_split(batch):
    seen = []

    def loss_fn(model, batch, rng):
        seen.append(batch)
        return array_namespace(model.weight).sum(model.weight * model.weight)

    fit(Regression(), loss_fn, [batch] * 2, optimizer=Adam(), learning_rate=0.1, data_parallel=2)
    assert seen == [batch] * 2


def test_shards_of_another_number_are_refused():
    with raises_line(DataError, r"a Parts.split\(2\) returned \[.*; expected a list of 1 to 2 batches"):
        run([Parts()], data_parallel=2)


def test_data_of_a_validation_may_not_be_one_batch():
    with raises_line(ConfigError, r"data is a dict; expected an iterable of batches: pass \[batch\] for one"):
        validate({"x": TARGET}, 2)
    with raises_line(ConfigError, "data is a list_iterator, which ends with the first validation; expected a list"):
        validate(iter([TARGET]), 2)
    with raises_line(DataError, "the validation data has no batches; expected at least one"):
        run(callbacks=[validate([], 2)])


def test_validation_is_the_mean_loss_without_dropout():
    events, batches = [], make_batches()
    model, _ = run(callbacks=[validate(batches, 4), lambda event, loop: events.append(event)])
    losses = [event.loss for event in events if type(event).__name__ == "Validation"]
    assert len(losses) == 2  # after step 4 and at the end
    assert losses[-1] == pytest.approx(np.mean([squared_error(model, batch, None) for batch in batches]))


def test_lines_are_printed(capsys):
    run(callbacks=[print_every(3, unit="samples"), validate(make_batches(), 6)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["step 3", "step 6"]
    assert lines[0].endswith(" samples/s")


def test_minutes_end_training():
    _, history = run(callbacks=[time_limit(1e-9)], steps=math.inf)
    assert history == []


@for_each("make", [print_every, early_stopping, lambda every: validate([], every)])
def test_invalid_intervals_are_refused(make):
    with raises_line(ConfigError, "is 0; expected an integer of at least 1"):
        make(0)


# --- Directories and resuming -----------------------------------------------------------------------------------------


def kill_at(step):
    def kill(event, loop):
        if isinstance(event, Step) and event.step == step:
            signal.raise_signal(signal.SIGTERM)

    return kill


@pytest.mark.parametrize("as_function", [True, False], ids=["function", "list"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, as_function):
    def options(name, *callbacks):
        batches = make_batches(5)
        source = (lambda start: (batches[index % 5] for index in range(start, 99))) if as_function else batches
        callbacks = [*callbacks, validate(batches, 4), early_stopping(50)]
        schedule = schedules.cosine(0.1, warmup_steps=2, total_steps=9)
        return {
            "batches": source, "run_dir": tmp_path / name, "callbacks": callbacks, "steps": 9,
            "optimizer": AdamW(), "learning_rate": schedule, "grad_accumulation": 2, "seed": 3,
        }  # fmt: skip

    complete, history = run(**options("complete"))
    _, first = run(**options("parts", kill_at(4)))
    resumed, second = run(**options("parts"))
    assert (len(first), len(second)) == (4, 5)
    assert losses(first + second) == losses(history)
    assert bits(resumed) == bits(complete)
    logs = [TrainingFiles(tmp_path / name).read_log() for name in ("complete", "parts")]
    for log in logs:
        for event in log:
            for clock in ("minutes", "tokens_per_second"):
                event.pop(clock, None)
    assert logs[0]
    assert logs[0] == logs[1]
    saved = [load_parameters(Regression(), tmp_path / name / "model.safetensors") for name in ("complete", "parts")]
    assert bits(saved[0]) == bits(saved[1]) == bits(complete)


def test_a_finished_run_makes_no_more_steps(tmp_path):
    model, _ = run(run_dir=tmp_path)
    again, history = run(run_dir=tmp_path)
    assert (history, bits(again)) == ([], bits(model))
    _, more = run(run_dir=tmp_path, steps=8)
    assert [step.step for step in more] == [7, 8]


@needs_fused_products
def test_a_run_is_resumed_in_its_mode(tmp_path, mode):
    run(run_dir=tmp_path, reproducible=True)
    mode(False)
    with raises_line(CheckpointError, r"has reproducible=True; call use_reproducible_algorithms\(True\)"):
        run(run_dir=tmp_path, steps=8)
    run(run_dir=tmp_path, steps=8, reproducible=True)


@needs_fused_products
def test_mixed_precision_is_not_reproducible(mode):
    with raises_line(ConfigError, "reproducible results need float32 on NumPy or CuPy; received bfloat16"):
        run(model=Regression().to(dtype="float32"), precision="bfloat16", reproducible=True)


def test_the_log_has_the_first_step_and_every_tenth(tmp_path):
    run(run_dir=tmp_path, steps=21)
    assert [event["step"] for event in TrainingFiles(tmp_path).read_log()] == [1, 10, 20]


def test_the_directory_is_created_before_the_first_update(tmp_path):
    (tmp_path / "file").write_text("")
    calls = []

    def loss(model, batch, rng):
        calls.append(batch)
        return squared_error(model, batch, rng)

    with raises_line(CheckpointError, "cannot write to .*file.run: "):
        fit(Regression(), loss, make_batches(), optimizer=Adam(), learning_rate=0.1, run_dir=tmp_path / "file" / "run")
    assert calls == []
    run(run_dir=tmp_path / "new" / "run")
    assert (tmp_path / "new" / "run" / "last.safetensors").exists()


def test_a_state_of_another_model_or_version_is_refused(tmp_path):
    run(run_dir=tmp_path)
    with raises_line(CheckpointError, "is not the training state of this run"):
        run(run_dir=tmp_path, optimizer=SGD())
    files, model = TrainingFiles(tmp_path), Regression()
    files.save_state(model, Adam().init(model), "Adam", {"step": 3})
    with raises_line(CheckpointError, "was written by another version of xformer"):
        run(run_dir=tmp_path)


def test_the_state_is_saved_by_the_clock(tmp_path):
    saved = []

    def look(event, loop):
        if isinstance(event, Checkpoint):
            saved.append(event.step)

    run(run_dir=tmp_path, callbacks=[look], save_every_minutes=1e-9)
    assert saved == [0, 1, 2, 3, 4, 5, 6]


# --- What a directory can hold ----------------------------------------------------------------------------------------


class Masked(Regression):
    """A model with constants."""

    mask: Array
    activation: Any
    names: Any

    def __init__(self, mask=np.inf, activation="relu", names=frozenset()):
        super().__init__()
        self.mask, self.activation, self.names = np.asarray(mask), activation, names


class Scaled(Masked):
    """Another class with the same arrays."""


class Counting(Adam):
    """An optimizer whose state is no named tuple."""

    def init(self, model):
        return {"step": 0, "mean": model}


class Collecting:
    """A callback with a state."""

    def __init__(self, state):
        self.state = state

    def __call__(self, event, loop):
        """Do nothing."""

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": Masked(1j)}, "mask has dtype complex128, which no file can hold; expected one of float64, "),
        ({"model": Masked(np.asarray(["a"]))}, "mask has dtype str32, which no file can hold"),
        ({"model": with_fields(Regression(), weight=TARGET * np.inf)}, "weight is not finite, and run_dir keeps"),
        ({"optimizer": Counting()}, "the optimizer's state, a dict, cannot be saved in run_dir"),
        ({"callbacks": [Collecting({"seen": {1, 2}})]}, r"state_dict\(\) of the callback Collecting 1 cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_the_first_step(tmp_path, options, message):
    options, calls = {"model": Regression(), "optimizer": Adam(), **options}, []
    with raises_line(ConfigError, f"^{message}"):
        fit(loss_fn=lambda *args: calls.append(1), batches=make_batches(), learning_rate=0.1, run_dir=tmp_path,
            **options)  # fmt: skip
    assert not calls


def test_numbers_of_libraries_and_infinite_constants_are_saved(tmp_path):
    callback = Collecting({"best": np.float32(0.5), "seen": np.arange(2)})
    options = {"callbacks": [callback], "run_dir": tmp_path, "num_tokens": lambda batch: np.prod(batch[0].shape)}
    run(model=freeze(Masked(), "mask"), steps=2, **options)
    callback.state = None
    _, history = run(model=freeze(Masked(), "mask"), steps=4, **options)
    assert callback.state == {"best": 0.5, "seen": [0, 1]}
    assert [step.step for step in history] == [3, 4]


class Late(Collecting):
    """A callback whose state exists only after a step."""

    def __init__(self):
        pass

    def __call__(self, event, loop):
        if isinstance(event, Step):
            self.state = {"step": event.step}


def test_the_state_of_a_callback_may_begin_with_the_first_step(tmp_path):
    run(steps=2, callbacks=[Late()], run_dir=tmp_path)
    run(steps=2, callbacks=[late := Late()], run_dir=tmp_path)
    assert late.state == {"step": 2}


@pytest.mark.parametrize("quantize", [False, True])
def test_adapters_are_saved(tmp_path, quantize):
    def base():
        model = small_language_model(dtype="float32")
        return model.quantize() if quantize else model

    def train(**options):
        return fit(lora(base(), 2), loss_fn, [TOKENS], optimizer=AdamW(), learning_rate=0.1, **options)[0]

    def loss_fn(model, tokens, rng):
        losses = cross_entropy(model(tokens[:, :-1], rng=rng), tokens[:, 1:])
        return array_namespace(losses).mean(losses)

    expected = train(steps=4)
    train(steps=2, run_dir=tmp_path)
    assert bits(train(steps=4, run_dir=tmp_path)) == bits(expected)
    assert bits(load_parameters(lora(base(), 2, seed=1), tmp_path)) == bits(expected)
    with raises_line(CheckpointError, "without the configuration of an xformer model; .*load_parameters"):
        LanguageModel.load(tmp_path / "model.safetensors")


def scaling(factor):
    return lambda x: [y * factor for y in x]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (Masked(0), Masked(0, "gelu"), "a model with activation 'relu'; expected 'gelu', as in this one"),
        (Masked(0, abs), Masked(0, math.exp), "activation abs; expected exp"),
        (Masked(0, lambda x: np.tanh(x)), Masked(0, lambda x: np.sin(x)), "activation <lambda> np tanh "),
        (Masked(0, lambda x: x * 2), Masked(0, lambda x: x * 300), "activation <lambda> "),
        (Masked(0, lambda x: -x), Masked(0, lambda x: x + 1), "activation <lambda> "),
        (Masked(0, scaling(2)), Masked(0, scaling(3)), "activation scaling.<locals>.<lambda> "),
        (Masked(0, functools.partial(pow, 2)), Masked(0, functools.partial(pow, 3)), "activation functools.partial"),
        (Masked(0, Dropout(0.1)), Masked(0, Dropout(0.2)), "activation.rate 0.1; expected 0.2"),
        (Masked(0, np.float32(1.0)), Masked(0, np.float32(2.0)), "activation 1.0; expected 2.0"),
        (Masked(0), Scaled(0), "class Masked; expected Scaled"),
        (small_language_model(), small_language_model(num_heads=1), "config.num_heads 2; expected 1"),
        (small_language_model(), small_language_model(activation="gelu"), "config.activation 'relu'; expected 'gelu'"),
        (lora(small_language_model(), 2), lora(small_language_model(), 2, alpha=4), "scaling 1.0; expected 2.0"),
    ],
)
def test_the_state_of_a_model_with_other_settings_is_refused(tmp_path, before, after, message):
    def loss_fn(model, batch, rng):
        return sum(array_namespace(array).sum(array * array) for _, array in model.named_trainable_parameters())

    options = {"optimizer": SGD(momentum=0.0), "learning_rate": 0.1, "run_dir": tmp_path}
    fit(before, loss_fn, [None], steps=1, **options)
    with raises_line(CheckpointError, re.escape(message)):
        fit(after, loss_fn, [None], steps=2, **options)
    fit(before, loss_fn, [None], steps=2, **options)


def test_the_settings_of_a_model_are_the_same_in_every_process():
    code = "from tests.training.test_fit import *; from xformer.training.checkpoint import settings_of; "
    code += "print(settings_of(Masked(0, len, frozenset('abcdefgh'))), settings_of(Masked(0, scaling(2))))"
    texts = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
                       capture_output=True, text=True).stdout for seed in "12"
    ]  # fmt: skip
    assert texts[0] == texts[1]
    assert "'activation': 'len'" in texts[0]


# --- Errors -----------------------------------------------------------------------------------------------------------


def save_at(step):
    def save(event, loop):
        if isinstance(event, Step) and event.step == step:
            loop.save()

    return save


def test_a_loss_that_is_not_finite_names_the_step_and_keeps_the_last_state(tmp_path):
    def learning_rate(step):
        return 0.01 if step < 4 else 1e200

    with raises_line(TrainingError, r"^step 5: the loss is .*; lower the learning rate or use a longer warm-up$"):
        run(learning_rate=learning_rate)
    with raises_line(TrainingError, r"^step 5: .* \(no state was saved\)$"):
        run(learning_rate=learning_rate, run_dir=tmp_path / "a")
    with raises_line(TrainingError, r"^step 5: .* \(the state of step 2 is kept\)$"):
        run(learning_rate=learning_rate, run_dir=tmp_path / "b", callbacks=[save_at(2)])
    with raises_line(TrainingError, "weight is not finite after step 4"):
        run(learning_rate=lambda step: 0.01 if step < 4 else 1e308, steps=4, run_dir=tmp_path / "c", optimizer=SGD())


def test_running_out_of_memory_names_the_step():
    def loss(model, batch, rng):
        return np.empty(2**58, dtype="uint8")

    with raises_line(OutOfMemoryError, "^step 1 ran out of memory; use smaller batches or a smaller model$"):
        fit(Regression(), loss, make_batches(), optimizer=Adam(), learning_rate=0.1)


@for_each(
    "options, message",
    [
        ({"steps": 0}, "steps is 0; expected an integer of at least 1"),
        ({"steps": 1.5}, "steps is 1.5; expected an integer of at least 1"),
        ({"batches": 3}, "batches is 3; expected an iterable, or a function of the number of a batch"),
        ({"batches": "text"}, "batches is a str; expected an iterable of batches: pass \\[batch\\] for one"),
        ({"batches": bytearray(b"text")}, "batches is a bytearray; expected an iterable of batches"),
        ({"batches": {"x": TARGET, "y": TARGET}}, "batches is a dict; expected an iterable of batches"),
        ({"callbacks": [early_stopping(2), print_every(2)]}, "early_stopping needs validations; expected validate"),
        ({"grad_accumulation": 1.5}, "grad_accumulation is 1.5; expected an integer of at least 1"),
        ({"data_parallel": -1}, "data_parallel is -1; expected at least 0"),
        ({"precision": "float8"}, "precision is 'float8'; expected one of 'float32', 'bfloat16', 'float16'"),
        ({"learning_rate": lambda step: None}, "learning_rate is None at step 1; expected a finite number"),
        ({"run_dir": 3}, "run_dir is 3; expected the path of a directory"),
        ({"save_every_minutes": "5"}, "save_every_minutes is '5'; expected a number of at least 0"),
        ({"learning_rate": math.nan}, "learning_rate is nan at step 1; expected a finite number"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; expected a number above 0"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1'; expected a number above 0"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with raises_line(ConfigError, f"^{message}"):
        run(**options)


def test_an_overflow_in_float16_skips_the_step_and_halves_the_scale():
    xp, events = library_or_skip("torch"), []
    batches = [(x, y * 20.0) for x, y in make_batches(xp=xp, dtype="float16")]

    def loss(model, batch, rng):
        error = model(batch[0]) - batch[1]
        wide = array_namespace(error).astype(error, xp.float32)
        return array_namespace(wide).mean(wide * wide)

    model, history = fit(
        Regression(xp, "float32"), loss, batches, optimizer=Adam(), learning_rate=1e-4, steps=24, precision="float16",
        callbacks=[lambda event, loop: events.append(event)],
    )  # fmt: skip
    skipped = [event for event in events if isinstance(event, Skip)]
    assert [event.loss_scale for event in skipped] == [2.0 ** (16 - index) for index in range(len(skipped))]
    assert 1 <= len(skipped) < 12
    assert len(history) == 24 - len(skipped)
    assert history[-1].loss_scale == skipped[-1].loss_scale / 2
    assert np.isfinite(to_host(model.weight)).all()


def test_a_loop_keeps_no_copy_of_a_model_that_nobody_else_has():
    model, alive = Regression(), []
    first = weakref.ref(model.weight)

    def loss(model, batch, rng):
        alive.append(first() is not None)
        return array_namespace(model.weight).sum((model.weight - TARGET) ** 2)

    loop = TrainingLoop(model, loss, [np.ones(2)], optimizer=SGD(), learning_rate=0.1, steps=2, jit=False)
    del model
    loop.run()
    assert alive == [False, False]
