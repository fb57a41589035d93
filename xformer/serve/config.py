"""The limits and the access of a server."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xformer.config import Config, option
from xformer.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ServeConfig(Config):
    """Limits and access of a server.

    Args:
        host: Address to listen on; any other than that of this machine requires a token.
        port: Port; 0 chooses a free one.
        token: Token that requests must send: Authorization: Bearer TOKEN. `auto` makes a new one.
        cors_origins: Origin of pages of other sites that may use the server, such as https://example.org; repeatable.
        max_requests: Maximum number of requests at a time; further ones receive status 429.
        max_batch: Maximum number of requests that generate text at the same time.
        max_body: Maximum size of a request in bytes.
        max_audio: Maximum size of a recording in bytes.
        max_tokens: Maximum number of new tokens of an output.
        max_request_tokens: Maximum number of tokens of a request: texts, times outputs or beams, times length.
        timeout: Maximum seconds of a request.
        reproducible: Give float32 on NumPy the same bits beside any other requests, and return a hash of the logits.

    Raises:
        ConfigError: For an invalid value, and for an address that other machines can reach without a token.
    """

    host: str = option(default="127.0.0.1", panel="Access")
    port: int = option(default=8000, at_least=0, at_most=65_535)
    token: str | None = option(default=None)
    cors_origins: tuple[str, ...] = option(default=())
    max_requests: int = option(default=64, at_least=1, panel="Limits")
    max_batch: int = option(default=32, at_least=1)
    max_body: int = option(default=1_000_000, at_least=1_000)
    max_audio: int = option(default=25_000_000, at_least=1_000)
    max_tokens: int = option(default=1024, at_least=1)
    max_request_tokens: int = option(default=65_536, at_least=1)
    timeout: float = option(default=120.0, above=0.0)
    reproducible: bool = option(default=False, panel="Computing")

    def _check(self) -> None:
        if self.host not in LOOPBACK and self.token is None:
            raise ConfigError(f"host is {self.host!r}, which other machines can reach; expected a token (--token auto)")
        for origin in self.cors_origins:
            if not re.fullmatch(r"https?://[^/*\s]+", origin):
                raise ConfigError(f"cors_origins has {origin!r:.80}; expected origins such as https://example.org")
        if self.token is not None and len(self.token) < 8:
            raise ConfigError(f"token has {len(self.token)} characters; expected at least 8")


def check_ids(ids: Sequence[str]) -> None:
    """Raise ConfigError if two models have the same id."""
    for each in ids:
        if (count := ids.count(each)) > 1:
            raise ConfigError(f"{count} models have the id {each!r}; expected different ids: pass --name for each one")
