import pytest

from tests.reference import raises_line
from xformer.errors import ConfigError
from xformer.runs.config import TrainingConfig
from xformer.training import SGD, Adafactor, Adam, AdamW, Muon
from xformer.training.schedules import as_schedule

PAPER_PEAK = 2.0 * 64**-0.5 * 10**-0.5
ADAM = {"beta1": 0.8, "beta2": 0.9, "epsilon": 0.1}


@pytest.mark.parametrize("name", ["inverse_square_root", "cosine", "linear", "constant"])
def test_schedules_have_the_same_peak(name):
    steps = {"schedule": name, "warmup_steps": 10, "max_steps": 20}
    rate = as_schedule(TrainingConfig(**steps, learning_rate_factor=2.0).make_schedule(64))
    assert rate(10, 20) == pytest.approx(PAPER_PEAK)
    assert rate(5, 20) == pytest.approx(PAPER_PEAK / 2)
    rate = as_schedule(TrainingConfig(**steps, learning_rate=0.3).make_schedule(None))
    assert rate(10, 20) == pytest.approx(0.3)
    last = {"inverse_square_root": 0.3 * 0.5**0.5, "cosine": 0.0, "linear": 0.0, "constant": 0.3}[name]
    assert rate(20, 20) == pytest.approx(last, abs=1e-12)


def test_falling_schedules_end_at_the_minimum():
    for name in ("cosine", "linear"):
        settings = {"schedule": name, "warmup_steps": 10, "max_steps": 20}
        rate = TrainingConfig(**settings, learning_rate=0.3, min_learning_rate=0.1).make_schedule(64)
        assert rate(20, 20) == pytest.approx(0.1)
        with pytest.raises(ConfigError, match=r"min_learning_rate is 0\.4, above the peak of 0\.3; lower it"):
            TrainingConfig(**settings, learning_rate=0.3, min_learning_rate=0.4)
        config = TrainingConfig(**settings, min_learning_rate=0.4)
        with pytest.raises(ConfigError, match=r"min_learning_rate is 0\.4, above the peak of 0\.0395; lower it"):
            config.make_schedule(64)


def test_a_schedule_without_learning_rate_requires_the_size_of_the_model():
    with raises_line(ConfigError, "learning_rate is None; the model has no d_model to compute it from"):
        TrainingConfig().make_schedule(None)


def test_impossible_settings_raise():
    for settings, message in (
        ({"schedule": "linear"}, "schedule 'linear' needs max_steps"),
        ({"min_learning_rate": 0.1}, "min_learning_rate is 0.1; schedule 'inverse_square_root' has none"),
        ({"optimizer": "sgd", "weight_decay": 0.1}, "weight_decay is 0.1; optimizer 'sgd' has none; choose 'adamw'"),
    ):
        with raises_line(ConfigError, message):
            TrainingConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ADAM, Adam(**ADAM)),
        ({**ADAM, "weight_decay": 0.0}, Adam(**ADAM)),
        ({**ADAM, "optimizer": "adamw"}, AdamW(**ADAM)),
        ({**ADAM, "optimizer": "adamw", "weight_decay": 0.3}, AdamW(**ADAM, weight_decay=0.3)),
        ({**ADAM, "optimizer": "muon", "weight_decay": 0.3}, Muon(**ADAM, weight_decay=0.3)),
        ({"optimizer": "adafactor", "weight_decay": 0.3}, Adafactor(weight_decay=0.3)),
        ({"optimizer": "sgd", "momentum": 0.7}, SGD(momentum=0.7)),
    ],
)
def test_settings_make_the_optimizer(settings, expected):
    assert TrainingConfig(**settings).make_optimizer() == expected
