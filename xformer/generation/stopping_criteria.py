"""Stopping criteria: when a row ends, besides eos and the maximum length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xformer.errors import ConfigError
from xformer.generation.logits_processors import Histories

StoppingCriteria = Callable[[Histories], Sequence[bool]]
"""Function of the token histories of all rows that returns one bool per row: True ends the row.

It is called after each step, on the host. A row that it ends counts as finished; it has no eos. In beam search, rows
are the beams of all inputs.
"""


class StopSequences:
    """Stop after any of several token sequences, which stay part of the output.

    Args:
        sequences: Token ids of each sequence.

    Raises:
        ConfigError: For an empty sequence.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.sequences = [list(sequence) for sequence in sequences]
        if not all(self.sequences):
            raise ConfigError(f"stop sequences are {self.sequences!r}; expected at least one token each")

    def __call__(self, histories: Histories) -> list[bool]:
        """Return for each row whether it ends with one of the sequences."""
        return [any(row[-len(stop) :] == stop for stop in self.sequences) for row in histories]
