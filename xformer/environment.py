"""Settings read from environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable

from xformer.errors import ConfigError

# Every operation reads some, and os.environ takes a microsecond. A dict, since torch.compile traces functools.cache.
_VALUES: dict[str, str | None] = {}
_ON_CLEAR: list[Callable[[], None]] = []


def env_value(name: str, default: str = "") -> str:
    """Return an environment variable, as it was at the first call."""
    if name not in _VALUES:
        _VALUES[name] = os.environ.get(name)
    value = _VALUES[name]
    return (default if value is None else value).strip()


def clear_cache() -> None:
    """Read the variables again at the next call."""
    _VALUES.clear()
    for call in _ON_CLEAR:
        call()


def on_clear(call: Callable[[], None]) -> None:
    """Call a function whenever variables are read again, to forget what was derived from them."""
    _ON_CLEAR.append(call)


def env_flag(name: str, default: bool = False) -> bool:
    """Return an environment variable that is 0 or 1 as a bool; raise ConfigError for another value."""
    value = env_value(name)
    if value not in ("", "0", "1"):
        _VALUES.pop(name, None)  # so that a corrected value is read
        raise ConfigError(f"{name} is {value!r}; expected 0 or 1")
    return value == "1" if value else default
