"""Settings read from environment variables."""

from __future__ import annotations

import functools
import os

from xformer.errors import ConfigError


@functools.cache  # operations ask, and os.environ takes a microsecond
def env_value(name: str, default: str = "") -> str:
    """A setting of the environment, as it was when it was first needed."""
    return os.environ.get(name, default).strip()


def env_flag(name: str, default: bool = False) -> bool:
    """A setting of the environment that is 1 or 0; raises ConfigError for anything else."""
    said = env_value(name)
    if said not in ("", "0", "1"):
        env_value.cache_clear()  # once it is mended, it is read again
        raise ConfigError(f"{name} is {said!r}; expected 0 or 1")
    return said == "1" if said else default
