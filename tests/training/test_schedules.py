import pytest

from xformer.errors import ConfigError
from xformer.training import cosine, inverse_square_root
from xformer.training.schedules import schedule


def test_inverse_square_root_is_the_paper_s():
    rate = inverse_square_root(factor=2.0, d_model=512, warmup_steps=4000)
    for step in (1, 100, 4000, 16_000):
        assert rate(step) == pytest.approx(2.0 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5))
    assert rate(4000) == pytest.approx(2.0 * 512**-0.5 * 4000**-0.5)
    assert rate(16_000) == pytest.approx(rate(4000) / 2)


def test_cosine_rises_to_the_same_peak_and_falls_to_zero():
    rate, other = cosine(0.5, 64, 100, 300), inverse_square_root(0.5, 64, 100)
    assert [rate(step) for step in (1, 50, 100)] == pytest.approx([other(step) for step in (1, 50, 100)])
    assert rate(200) == pytest.approx(rate(100) / 2)
    assert rate(300) == pytest.approx(0.0, abs=1e-12)
    assert rate(400) == pytest.approx(0.0, abs=1e-12)
    assert all(rate(step) >= rate(step + 1) for step in range(100, 300))


def test_a_cosine_that_is_all_warm_up():
    assert cosine(1.0, 64, 100, 50)(50) == pytest.approx(inverse_square_root(1.0, 64, 100)(50))


def test_schedules_by_name():
    settings = {"factor": 1.0, "d_model": 64, "warmup_steps": 10}
    assert schedule("inverse_square_root", **settings, total_steps=None)(10) == pytest.approx(64**-0.5 * 10**-0.5)
    assert schedule("cosine", **settings, total_steps=20)(20) == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ConfigError, match="needs max_updates"):
        schedule("cosine", **settings, total_steps=None)
    with pytest.raises(ConfigError, match="schedule is 'linear'; expected"):
        schedule("linear", **settings, total_steps=20)
