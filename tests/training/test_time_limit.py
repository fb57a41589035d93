"""A time limit fixes the number of steps, at which schedules and validations end; the clock is invented."""

from __future__ import annotations

import math
import signal
import time

import numpy as np
import pytest

from tests.reference import for_each, raises_line
from tests.training.test_fit import bits, make_batches, run, squared_error
from xformer.errors import ConfigError
from xformer.training import End, Plan, Step, Validation, early_stopping, print_every, schedules, time_limit, validate
from xformer.training.checkpoint import TrainingFiles
from xformer.training.events import format_limit

PEAK = 0.05


class Clock:
    """A clock that only losses, scores and saves move on."""

    def __init__(self, monkeypatch, *, first=30.0, step=1.0, save=0.0):
        self.now, self.steps, self.first, self.seconds = 1000.0, 0, first, step
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        save_state = TrainingFiles.save_state
        monkeypatch.setattr(
            TrainingFiles, "save_state", lambda *args, **options: (self.wait(save), save_state(*args, **options))
        )

    def wait(self, seconds, result=None):
        self.now += seconds
        return result

    def loss(self, model, batch, rng):
        if rng is not None:
            self.steps += 1
            self.now += self.first if self.steps == 1 else self.seconds
        return squared_error(model, batch, rng)


def train(clock, minutes=5.0, *, callbacks=(), rate=None, steps=3150, **options):
    events = []
    rate = schedules.cosine(PEAK, warmup_steps=100) if rate is None else rate
    limit = [] if minutes is None else [time_limit(minutes)]
    callbacks = [lambda event, loop: events.append(event), *callbacks, *limit]
    model, history = run(
        loss_fn=clock.loss, learning_rate=rate, steps=steps, callbacks=callbacks, data_parallel=1, **options
    )
    return model, history, [event for event in events if isinstance(event, Plan)]


def interrupt_at(step):
    def interrupt(event, loop):
        if isinstance(event, Step) and event.step == step:
            signal.raise_signal(signal.SIGINT)

    return interrupt


@for_each(
    "rate",
    [
        schedules.cosine(PEAK, warmup_steps=100, floor=1e-3),
        schedules.linear(PEAK, warmup_steps=7),
        schedules.cosine(PEAK, warmup_steps=1),
        lambda step, total_steps: PEAK * min(step / 40, 1.0 - step / (total_steps + 1)),
        schedules.inverse_square_root(PEAK, warmup_steps=30),
        PEAK,
    ],
)  # fmt: skip
def test_the_schedule_ends_with_the_time_and_the_number_of_steps_repeats_the_run(monkeypatch, rate):
    clock = Clock(monkeypatch, first=2.0)
    model, history, (plan,) = train(clock, rate=rate)
    assert 240 <= clock.now - 1000.0 <= 300 or plan.step == 1  # the first step alone was measured
    assert plan.step <= 25
    assert (plan.steps, plan.max_steps, plan.minutes) == (len(history), 3150, 5.0)
    again, repeated, plans = train(clock, None, rate=rate, steps=plan.steps)
    assert not plans
    assert [step.learning_rate for step in history] == [step.learning_rate for step in repeated]
    assert bits(again) == bits(model)
    if callable(rate) and plan.step < 25:
        assert history[-1].learning_rate < 0.01 * PEAK


def test_the_first_step_validations_and_saves_are_part_of_the_time(monkeypatch, tmp_path):
    clock = Clock(monkeypatch, first=60.0, save=2.0)
    scores = validate(lambda model: clock.wait(20.0, 1.0), 40)
    _, history, (plan,) = train(clock, 10.0, callbacks=[scores], run_dir=tmp_path, save_every_minutes=1.0)
    assert 8.6 * 60 <= clock.now - 1000.0 <= 10 * 60
    assert plan.step == 25
    assert len(history) == plan.steps < 340


def test_validations_during_the_first_steps_do_not_count_as_steps(monkeypatch):
    clock = Clock(monkeypatch, first=1.0)
    train(clock, 10.0, callbacks=[validate(lambda model: clock.wait(4.0, 1.0), 10)])
    assert 9 * 60 <= clock.now - 1000.0 <= 10 * 60


def test_at_most_the_steps_of_fit_are_made(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    _, history, (plan,) = train(clock, 50.0, steps=200, callbacks=[print_every(1000)])
    assert len(history) == plan.steps == plan.max_steps == 200
    assert capsys.readouterr().out == "200 steps fit into 50 minutes; steps=200 repeats the run\n"
    _, history, (plan,) = train(clock, 50.0, steps=math.inf)
    assert plan.max_steps is None
    assert 2700 < len(history) == plan.steps <= 3000


def test_a_warm_up_that_is_too_long_ends_at_half_of_the_steps(monkeypatch):
    clock = Clock(monkeypatch, first=1.0)
    rate = schedules.cosine(PEAK, warmup_steps=1000)
    model, history, (plan,) = train(clock, 2.0, rate=rate)
    rates = [step.learning_rate for step in history]
    assert abs(np.argmax(rates) + 1 - plan.steps / 2) <= 1
    assert rates[:25] == [PEAK * step / 1000 for step in range(1, 26)]
    assert rates[-1] < 0.01 * max(rates)
    assert bits(train(clock, None, rate=rate, steps=plan.steps)[0]) == bits(model)


@pytest.mark.parametrize("step", [3, 20, 24, 25, 26, 120, 200])
def test_a_resumed_run_has_the_bits_of_the_number_that_was_fixed(monkeypatch, tmp_path, step):
    clock = Clock(monkeypatch, first=1.0)
    stateful = [validate(make_batches(), 30), early_stopping(50)]
    train(clock, callbacks=[*stateful, interrupt_at(step)], run_dir=tmp_path)
    stateful = [validate(make_batches(), 30), early_stopping(50)]
    model, history, plans = train(clock, callbacks=stateful, run_dir=tmp_path)
    assert len(plans) == (step <= 25)  # the signal of step 25 comes before the plan
    assert 270 < history[-1].step <= 300
    assert bits(train(clock, None, steps=history[-1].step)[0]) == bits(model)
    assert TrainingFiles(tmp_path).read_log()[-1]["step"] <= history[-1].step


def test_a_machine_that_slows_down_ends_the_run_at_the_limit_and_resuming_finishes_it(monkeypatch, tmp_path, caplog):
    clock = Clock(monkeypatch)

    def slow_down(event, loop):
        if isinstance(event, Step) and event.step == 100:
            clock.seconds = 2.0

    events = []
    train(clock, callbacks=[slow_down, lambda event, loop: events.append(event)], run_dir=tmp_path)
    assert 300 <= clock.now - 1000.0 <= 302
    plan = next(event for event in events if isinstance(event, Plan))
    assert [event.reason for event in events if isinstance(event, End)] == ["the time limit (5 min)"]
    (message,) = caplog.messages
    assert f"is made in time, not step {plan.steps} as planned; the machine has become slower; resume with" in message
    assert train(clock, run_dir=tmp_path)[1] == []
    model, history, plans = train(clock, 9.0, run_dir=tmp_path)
    assert (history[-1].step, plans) == (plan.steps, [])
    assert bits(train(clock, None, steps=plan.steps)[0]) == bits(model)


@pytest.mark.parametrize(
    "limits", [{"minutes": 6.0}, {"minutes": 4.0}, {"steps": 4000}, {"steps": 200}, {"steps": math.inf}]
)
def test_other_limits_do_not_change_a_schedule_that_falls(monkeypatch, tmp_path, limits):
    clock = Clock(monkeypatch)
    train(clock, callbacks=[interrupt_at(150)], run_dir=tmp_path)
    message = r"the learning rate falls after step 150, too early to plan . minutes; expected max_minutes and max_steps"
    with raises_line(ConfigError, message + r" \[5.0, 3150\]$"):
        train(clock, run_dir=tmp_path, **limits)


def test_a_schedule_without_an_end_may_get_more_time(monkeypatch, tmp_path):
    clock, rate = Clock(monkeypatch, first=1.0), schedules.inverse_square_root(PEAK, warmup_steps=30)
    _, history, _ = train(clock, rate=rate, run_dir=tmp_path)
    model, later, (plan,) = train(clock, 8.0, rate=rate, run_dir=tmp_path)
    assert later[0].step == history[-1].step + 1
    assert 450 < later[-1].step == plan.steps <= 480
    assert bits(train(clock, None, rate=rate, steps=plan.steps)[0]) == bits(model)


def test_a_limit_that_comes_later_keeps_the_steps_of_the_schedule(monkeypatch, tmp_path):
    clock = Clock(monkeypatch, first=1.0)
    model, _, _ = train(clock, None, steps=400)
    train(clock, None, steps=400, callbacks=[interrupt_at(150)], run_dir=tmp_path)
    assert train(clock, 3.0, steps=400, run_dir=tmp_path)[1][-1].step < 200
    assert bits(train(clock, 9.0, steps=400, run_dir=tmp_path)[0]) == bits(model)


@pytest.mark.parametrize("minutes", [0, -1, math.nan, math.inf, "5", True, None])
def test_wrong_limits(minutes):
    with raises_line(ConfigError, f"^minutes is {minutes!r}; expected a number above 0$"):
        time_limit(minutes)


def test_what_cannot_be_planned_is_refused(monkeypatch):
    clock = Clock(monkeypatch)
    message = "the learning rate falls after step 0, too early to plan 5 minutes; expected a warm-up"
    for rate in (schedules.linear(PEAK), lambda step, total_steps: PEAK * (1 - step / total_steps)):
        with raises_line(ConfigError, f"^{message}$"):
            train(clock, rate=rate)
    message = "learning_rate follows steps, which is inf; pass steps, total_steps or a time_limit"
    with raises_line(ConfigError, f"^{message}$"):
        train(clock, None, steps=math.inf)


def test_schedules_by_fraction_follow_the_number_of_steps():
    explicit = schedules.cosine(PEAK, warmup_steps=3, total_steps=12, floor=0.01)
    rates = [
        [step.learning_rate for step in run(learning_rate=rate, steps=steps)[1]]
        for rate, steps in (
            (explicit, 12),
            (schedules.cosine(PEAK, warmup_steps=3, floor=0.01), 12),
            (schedules.cosine(PEAK, warmup_steps=3, floor=0.01), None),  # one pass
            (lambda step, total_steps=5: total_steps / 100, 3),  # a default is for other callers
        )
    ]
    assert rates[0] == rates[1]
    assert len(rates[2]) == 4
    assert rates[2][-1] == pytest.approx(0.01)
    assert rates[3] == [0.03] * 3


def test_callbacks_begin_again_with_each_run(monkeypatch):
    losses = [0.5, 0.1, 0.9]  # of validations, so that the first run has the best one
    scores = validate(lambda model: losses.pop() if losses else 0.05, 40)
    callbacks, found = [scores, early_stopping(3), time_limit(5.0)], []
    for first, step in ((1.0, 1.0), (30.0, 5.0)):
        clock, events = Clock(monkeypatch, first=first, step=step), []
        train(clock, None, callbacks=[lambda event, loop, events=events: events.append(event), *callbacks])
        found.append(events)
    plans = [event for events in found for event in events if isinstance(event, Plan)]
    assert [event.step for event in plans] == [25, 8]
    assert 40 < plans[1].steps <= 54
    assert [next(event.best for event in events if isinstance(event, Validation)) for events in found] == [True, True]


@for_each("minutes, text", [(50.0, "50 minutes"), (1.5, "1.5 minutes"), (1 / 60, "1 seconds"), (1 / 7, "8.6 seconds")])
def test_limits_have_few_digits(minutes, text):
    assert format_limit(minutes) == text


def test_a_validation_is_tried_once_without_an_event(monkeypatch):
    clock, calls, events = Clock(monkeypatch), [], []
    scores = validate(lambda model: calls.append(len(events)) or 1.0, 100)
    train(clock, callbacks=[scores, lambda event, loop: events.append(event)])
    found = [event.step for event in events if isinstance(event, Validation)]
    assert len(calls) == len(found) + 1
