from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import re

import numpy as np
import pytest

from tests.reference import raises_line
from xformer.config import Config, check_keys, field_names, integers, option, options_of
from xformer.errors import ConfigError, DataError


class Base(Config):
    size: int = option("Number of features.", default=3, at_least=1)
    rate: float = option("Dropout probability.", default=0.1, at_least=0, below=1)
    mode: str = option("Kind of norm.", default="a", choices=("a", "b"))
    limit: int | None = option("Most tokens.", default=None, at_least=1, panel="Limits")
    flag: bool = option("A switch.", default=False)


class Derived(Base):
    """A configuration with a docstring.

    Args:
        depth: Number of layers. The longer description of
            this field has a second line.
        width: No field.
        size: The description of the base class stays.

    Raises:
        mode: No description.
    """

    depth: int = option(at_least=1)


def test_numpy_numbers_become_those_of_python():
    config = Base(size=np.int64(20), rate=np.float32(0.5), flag=np.bool_(True), mode=np.str_("b"), limit=np.uint8(2))
    assert config == Base(size=20, rate=0.5, flag=True, mode="b", limit=2)
    assert [type(value) for value in config.to_dict().values()] == [int, float, str, int, bool]
    assert type(Base(rate=np.float64(0.5)).rate) is float
    with raises_line(ConfigError, "size is 0; expected at least 1"):
        Base(size=np.int64(0))
    with raises_line(ConfigError, "size is 2.0; expected an integer of at least 1"):
        Base(size=np.float64(2.0))
    with raises_line(ConfigError, "flag is 1; expected true or false"):
        Base(flag=np.int64(1))


def test_values_are_kept():
    config = Derived(depth=2, limit=7)
    assert config.to_dict() == {"size": 3, "rate": 0.1, "mode": "a", "limit": 7, "flag": False, "depth": 2}
    assert Derived.from_dict(config.to_dict()) == config
    assert dataclasses.replace(config, size=5).size == 5
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert len({config, copy.copy(config), Derived(depth=2)}) == 2
    assert repr(config) == "Derived(size=3, rate=0.1, mode='a', limit=7, flag=False, depth=2)"
    assert config != Base(limit=7)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'size'"):
        config.size = 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "size is 0; expected at least 1"),
        ({"size": True}, "size is True; expected an integer of at least 1"),
        ({"size": 1.5}, "size is 1.5; expected an integer of at least 1"),
        ({"rate": 1.0}, "rate is 1.0; expected a number in [0, 1)"),
        ({"rate": float("nan")}, "rate is nan; expected a number in [0, 1)"),
        ({"rate": "much"}, "rate is 'much'; expected a number in [0, 1)"),
        ({"mode": "c"}, "mode is 'c'; expected one of 'a', 'b'"),
        ({"limit": 0}, "limit is 0; expected at least 1"),
        ({"flag": 1}, "flag is 1; expected true or false"),
        ({"sizes": 1}, "unknown key 'sizes' in Base; did you mean 'size'?"),
        ({"zzz": 1}, "unknown key 'zzz' in Base; expected one of flag, limit, mode, rate, size"),
    ],
)
def test_invalid_values_are_refused(values, message):
    with raises_line(ConfigError, re.escape(message)):
        Base(**values)


def test_required_fields_and_positional_arguments():
    with raises_line(ConfigError, re.escape("Derived requires depth")):
        Derived()
    with raises_line(ConfigError, re.escape("Base takes keyword arguments only; use Base(size=...)")):
        Base(3)


def test_a_source_is_named():
    with raises_line(ConfigError, re.escape("[model] of r.toml: size is 0; expected at least 1")):
        Base.from_dict({"size": 0}, "[model] of r.toml")
    with raises_line(ConfigError, re.escape("unknown key 'siez' in [model] of r.toml; did you mean 'size'?")):
        Base.from_dict({"siez": 0}, "[model] of r.toml")
    with raises_line(ConfigError, re.escape("[model] is a list; expected a table of names and values")):
        Base.from_dict([], "[model]")
    check_keys(["size"], field_names(Base), "anything")


def test_options_can_be_listed():
    options = {name: (type_name, panel, field.metadata["help"]) for name, type_name, panel, field in options_of(Base)}
    assert options["rate"] == ("float", "", "Dropout probability.")
    assert options["limit"] == ("int", "Limits", "Most tokens.")
    assert options["flag"] == ("bool", "Limits", "A switch.")  # an option without a panel follows the one before it
    own = {name: field.metadata["help"] for name, _, _, field in options_of(Derived)}
    assert own["depth"] == "Number of layers. The longer description of this field has a second line."
    assert own["mode"] == "Kind of norm."
    assert own["size"] == options["size"][2] == "Number of features."


def test_every_option_has_help_and_every_description_an_option():
    modules = ["cli._corpus", "cli.bench", "cli.generate", "cli.transcribe", "cli.translate", "generation.config"]
    modules += ["models.config", "pipelines.options", "runs.config", "serve.config", "training.inputs"]
    for module in (*modules, "training.optimizers"):
        for config in vars(importlib.import_module(f"xformer.{module}")).values():
            if isinstance(config, type) and issubclass(config, Config) and config is not Config:
                helps = {name: field.metadata["help"] for name, _, _, field in options_of(config)}
                assert all(helps.values()), (config, helps)
                arguments = inspect.cleandoc(config.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
                assert set(re.findall(r"^    (\w+):", arguments, re.MULTILINE)) <= helps.keys(), config


def test_bytes_are_no_integers():
    with raises_line(DataError, r"prompt 1 is b'Hi'; expected a list of integers"):
        integers("prompt 1", b"Hi")
