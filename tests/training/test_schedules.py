import math
from pathlib import Path

import numpy as np
import pytest

from tests.reference import raises_line
from xformer.errors import ConfigError
from xformer.training.schedules import constant, cosine, inverse_square_root, linear


def test_inverse_square_root_is_the_paper_s():
    rate = inverse_square_root(2.0 * 512**-0.5 * 4000**-0.5, warmup_steps=4000)
    for step in (1, 100, 4000, 16_000):
        assert rate(step) == pytest.approx(2.0 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5))
    assert rate(4000) == pytest.approx(2.0 * 512**-0.5 * 4000**-0.5)
    assert rate(16_000) == pytest.approx(rate(4000) / 2)


def test_inverse_square_root_reproduces_the_figures_of_the_reference():
    with np.load(Path(__file__).parents[1] / "golden" / "slides.npz") as golden:
        steps, expected, warmup = golden["schedule_steps"], golden["schedule_lr"], int(golden["warmup_steps"])
    rate = inverse_square_root(warmup**-0.5, warmup_steps=warmup)
    np.testing.assert_allclose([rate(int(step)) for step in steps], expected, rtol=1e-12)


def test_cosine_rises_to_the_peak_and_falls_to_the_floor():
    rate = cosine(0.5, warmup_steps=100, total_steps=300)
    assert [rate(step) for step in (1, 50, 100)] == pytest.approx([0.005, 0.25, 0.5])
    assert rate(200) == pytest.approx(0.25)
    assert rate(300) == pytest.approx(0.0, abs=1e-12)
    assert rate(400) == pytest.approx(0.0, abs=1e-12)
    assert all(rate(step) >= rate(step + 1) for step in range(100, 300))
    above = cosine(0.5, warmup_steps=100, total_steps=300, floor=0.1)
    assert [above(step) for step in (50, 100, 200, 300, 400)] == pytest.approx([0.25, 0.5, 0.3, 0.1, 0.1])


def test_linear_falls_in_a_straight_line():
    steps = {"warmup_steps": 100, "total_steps": 300}
    rate, above = linear(0.5, **steps), linear(0.5, **steps, floor=0.1)
    assert [rate(step) for step in (50, 100, 150, 200, 300, 400)] == pytest.approx([0.25, 0.5, 0.375, 0.25, 0.0, 0.0])
    assert [above(step) for step in (50, 100, 200, 300, 400)] == pytest.approx([0.25, 0.5, 0.3, 0.1, 0.1])


def test_constant_stays_at_exactly_the_peak():
    rate = constant(0.3, warmup_steps=7)
    assert rate(1) == pytest.approx(0.3 / 7)
    assert {rate(step) for step in (7, 8, 9, 10_000)} == {0.3}


@pytest.mark.parametrize("shape", [cosine, linear])
def test_a_run_that_is_all_warm_up(shape):
    assert shape(1.0, warmup_steps=100, total_steps=50)(50) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: inverse_square_root(0.1, warmup_steps=0), "warmup_steps is 0; expected an integer of at least 1"),
        (lambda: constant(0.1, warmup_steps=-1), "warmup_steps is -1; expected an integer of at least 0"),
        (lambda: cosine(0.1, total_steps="10"), "total_steps is '10'; expected an integer of at least 1"),
        (lambda: linear("0.1", total_steps=10), "peak is '0.1'; expected a finite number"),
        (lambda: cosine(0.1, total_steps=10, floor=math.nan), "floor is nan; expected a finite number"),
    ],
)
def test_invalid_arguments(call, message):
    with raises_line(ConfigError, f"^{message}$"):
        call()


def test_step_0_is_defined():
    assert inverse_square_root(0.1, warmup_steps=4)(0) == cosine(0.1, warmup_steps=4, total_steps=9)(0) == 0.0
    assert linear(0.1, total_steps=10)(0) == pytest.approx(0.1)
