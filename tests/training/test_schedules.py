from pathlib import Path

import numpy as np
import pytest

from xformer.errors import ConfigError
from xformer.training.schedules import constant, cosine, inverse_square_root, linear, schedule


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


PAPER_S_PEAK = 2.0 * 64**-0.5 * 10**-0.5


@pytest.mark.parametrize("name", ["inverse_square_root", "cosine", "linear", "constant"])
def test_schedules_by_name_have_the_same_peak(name):
    ours = schedule(name, factor=2.0, d_model=64, warmup_steps=10, total_steps=20)
    assert ours(10) == pytest.approx(PAPER_S_PEAK)
    assert ours(5) == pytest.approx(PAPER_S_PEAK / 2)
    given = schedule(name, factor=2.0, d_model=64, warmup_steps=10, total_steps=20, learning_rate=0.3)
    assert given(10) == pytest.approx(0.3)
    late = {"inverse_square_root": 0.3 * 0.5**0.5, "cosine": 0.0, "linear": 0.0, "constant": 0.3}[name]
    assert given(20) == pytest.approx(late, abs=1e-12)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_schedules_that_fall(name):
    settings = {"warmup_steps": 10, "learning_rate": 0.3}
    assert schedule(name, **settings, total_steps=20, min_learning_rate=0.1)(20) == pytest.approx(0.1)
    with pytest.raises(ConfigError, match=f"schedule '{name}' needs max_updates"):
        schedule(name, **settings, total_steps=None)
    with pytest.raises(ConfigError, match=r"min_learning_rate is 0\.4, above the peak of 0\.3; lower it"):
        schedule(name, **settings, total_steps=20, min_learning_rate=0.4)


def test_schedules_that_are_not_there():
    with pytest.raises(ConfigError, match="schedule is 'step'; expected one of 'inverse_square_root', 'cosine', "):
        schedule("step", warmup_steps=10, total_steps=20)
    for name in ("inverse_square_root", "constant"):
        with pytest.raises(ConfigError, match=f"min_learning_rate is 0.1; schedule '{name}' has none"):
            schedule(name, warmup_steps=1, total_steps=20, min_learning_rate=0.1)


def test_without_a_peak_the_size_of_the_model_is_needed():
    with pytest.raises(ConfigError, match="learning_rate is None; the model has no d_model to compute it from"):
        schedule("constant", warmup_steps=1, total_steps=None)
