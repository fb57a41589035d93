"""Settings read from environment variables."""

from __future__ import annotations

import functools
import os

from xformer.errors import ConfigError


@functools.cache  # every operation reads some, and os.environ takes a microsecond
def env_value(name: str, default: str = "") -> str:
    """Return an environment variable, as it was at the first call."""
    return os.environ.get(name, default).strip()


def env_flag(name: str, default: bool = False) -> bool:
    """Return an environment variable that is 0 or 1 as a bool; raise ConfigError for another value."""
    value = env_value(name)
    if value not in ("", "0", "1"):
        env_value.cache_clear()  # so that a corrected value is read
        raise ConfigError(f"{name} is {value!r}; expected 0 or 1")
    return value == "1" if value else default
