from __future__ import annotations

import dataclasses
import io
import shutil
import sys

import pytest
from rich.console import Console

from xformer.cli._io import program
from xformer.runs import progress
from xformer.runs.config import TrainingConfig
from xformer.runs.console import make_console
from xformer.runs.progress import TrainingProgress
from xformer.runs.trainer import Average
from xformer.training import Plan, Start, Step, Validation


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An xformer program below the working directory, as in a virtual environment."""
    monkeypatch.delenv("NOX_CURRENT_SESSION", raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ".nox" / "demo" / "bin" / "xformer"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    monkeypatch.setattr(sys, "argv", [str(path)])
    return path


def test_the_program_is_called_as_a_user_can_call_it(installed, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: str(installed))
    assert program() == "xformer"
    monkeypatch.setenv("NOX_CURRENT_SESSION", "demo")  # whose programs are not on the path of the user
    assert program() == ".nox/demo/bin/xformer"
    monkeypatch.delenv("NOX_CURRENT_SESSION")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert program() == ".nox/demo/bin/xformer"
    monkeypatch.setattr(sys, "argv", ["/somewhere/xformer/__main__.py"])
    assert program().endswith(" -m xformer")


def test_text_is_printed_as_it_is(capsys):
    make_console().print("[red]17[/red] " + "x" * 300)
    make_console(stderr=True).print("aside")
    printed = capsys.readouterr()
    assert printed.out == "[red]17[/red] " + "x" * 300 + "\n"
    assert printed.err == "aside\n"


# --- Progress of training ---


def make_step(step, *, loss=2.0, minutes=0.5, speed=1000.0):
    others = {"grad_norm": 1.0, "learning_rate": 1e-3, "num_tokens": 100, "minutes": minutes}
    return Step(step=step, epoch=0, loss=loss, tokens_per_second=speed, **others)


VALIDATION = Validation(
    step=500, epoch=2, loss=1.5, perplexity=4.4817, score=21.5, metric="BLEU", best=True, minutes=61.5
)


class Clock:
    """A clock that is advanced by hand."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def print_events(settings, events, *, terminal=False, first_step=0, clock=None, seconds=0.0):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=160, highlight=False)
    with TrainingProgress(console, settings) as show:
        for event in [Start(first_step), *events]:
            if clock is not None and not isinstance(event, Start):
                clock.now += seconds
            show(event)
    return stream.getvalue()


def test_without_a_terminal_there_is_a_line_every_ten_seconds(monkeypatch):
    clock = Clock(monkeypatch)
    events = [make_step(step) for step in range(1, 11)]
    lines = print_events(TrainingConfig(max_steps=20), events, clock=clock, seconds=3.0).splitlines()
    assert lines == [
        "step 4  loss 2.000  1,000 target tokens/s  0:48 left",
        "step 8  loss 2.000  1,000 target tokens/s  0:36 left",
    ]


def test_a_validation_is_a_line():
    average = Average(**dataclasses.asdict(VALIDATION), steps=[400, 450, 500])
    numbers = "validation after step 500  epoch 3  1:01:30  loss 1.5000  perplexity 4.48  BLEU 21.50  (best so far)\n"
    for event, line in (
        (VALIDATION, numbers),
        (average, f"average of 3 checkpoints: {numbers}"),
        (
            Validation(7, 0, 1.5, 4.4817, None, None, False, 0.1),
            "validation after step 7  epoch 1  0:06  loss 1.5000  perplexity 4.48\n",
        ),
    ):
        assert print_events(TrainingConfig(), [event]) == line


def test_the_first_limit_decides_the_time_left(monkeypatch):
    clock, events = Clock(monkeypatch), [make_step(step) for step in range(1, 11)]
    for limits, left in (
        ({"max_steps": 100, "max_minutes": 10.0}, "1:30 left"),  # 9 steps in 9 seconds: 90 to go
        ({"max_steps": 10_000, "max_minutes": 1.0}, "0:30 left"),
        ({}, "tokens/s\n"),
    ):
        assert left in print_events(TrainingConfig(**limits), events, clock=clock, seconds=1.0)


def test_a_plan_is_announced():
    for plan, line in (
        (Plan(25, 1250, 3150, 25.0), "1,250 steps fit into 25 minutes; the recipe is made for 3,150; "),
        (Plan(25, 400, 400, 1.5), "400 steps fit into 1.5 minutes; "),
        (Plan(25, 1250, None, 25.0), "1,250 steps fit into 25 minutes; "),
    ):
        repeats = f"without a limit, --max-steps {plan.steps} repeats the run\n"
        assert print_events(TrainingConfig(), [plan]) == line + repeats


def test_numbers_are_smoothed(monkeypatch):
    clock = Clock(monkeypatch)
    events = [make_step(1, loss=4.0, speed=500.0), make_step(2, loss=2.0, speed=1500.0)]
    line = print_events(TrainingConfig(), events, clock=clock, seconds=9.0)
    assert "loss 3.000  1,000 target tokens/s" in line


def test_a_terminal_gets_a_bar_with_the_last_validation():
    settings = TrainingConfig(max_steps=1000)
    text = print_events(settings, [make_step(1), VALIDATION, make_step(501)], terminal=True)
    assert "━" in text
    assert "validation after step 500" in text
    assert "step 501" in text
    assert "valid: perplexity 4.48, BLEU 21.50" in text


def test_a_huge_loss_is_printed_in_short():
    event = dataclasses.replace(VALIDATION, loss=7e21, perplexity=1e304)
    assert "loss 7e+21  perplexity 1e+304  BLEU 21.50" in progress.describe_validation(event)
    assert "loss 1.5000  perplexity 4.48  BLEU" in progress.describe_validation(VALIDATION)
