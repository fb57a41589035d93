"""Checks that the analyses share."""

from __future__ import annotations

from typing import Any

from xformer.errors import ConfigError, describe_type


def check_model(model: Any, *classes: type) -> None:
    """Raise ConfigError if a model has another class or no layers."""
    expected = " or ".join(each.__name__ for each in classes)
    if not isinstance(model, classes):
        raise ConfigError(f"model is {describe_type(model)}; expected {expected}")
    if not model.layers:  # type: ignore[attr-defined]
        raise ConfigError(f"the model has no layers; expected {expected} with at least one")
