"""How long an output may be, sentence by sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xformer.errors import ConfigError
from xformer.generation.config import DecodingOptions

# Room for the tokens of one unit. The search ends by the units; this ends words that never end.
_TOKENS_A_UNIT = 12
MOST = 100_000  # of a desired length
_ROUNDING = 1e-9  # 1.1 * 10 is 11.000000000000002, which is meant to be 11


class LengthRange(NamedTuple):
    """The shortest and the longest an output may be: in tokens, eos not counted, unless a task measures otherwise."""

    minimum: int
    maximum: int


class MeasuredLengths(NamedTuple):
    """Lengths in another unit than tokens, such as words.

    length_of: how many units some tokens hold: at most as many as there are tokens. ranges: how many each output may
    have
    """

    length_of: Callable[[Sequence[int]], int]
    ranges: list[LengthRange]

    def token_ranges(self, source_lengths: Sequence[int]) -> list[LengthRange]:
        """Ranges in tokens that leave room for these."""
        return [
            LengthRange(limits.minimum, max(default_limit(length), _TOKENS_A_UNIT * limits.maximum))
            for limits, length in zip(self.ranges, source_lengths, strict=True)
        ]


def default_limit(source_length: int) -> int:
    """The most tokens of an output when nobody says: room for any sensible one, and an end for a senseless one."""
    return 2 * source_length + 20


def length_ranges(options: DecodingOptions, source_lengths: Sequence[int]) -> list[LengthRange]:
    """The ranges that the options set for sources of these lengths (tokens, eos not counted)."""
    ranges = []
    for length in source_lengths:
        minimum = max(options.min_length, math.ceil(options.min_length_ratio * length - _ROUNDING))
        limits = [] if options.max_length is None else [options.max_length]
        if options.max_length_ratio is not None:
            limits.append(math.floor(options.max_length_ratio * length + _ROUNDING))
        maximum = max(1, min(limits, default=max(minimum, default_limit(length))))
        ranges.append(LengthRange(min(minimum, maximum), maximum))
    return ranges


def desired_ranges(options: DecodingOptions, desired: Sequence[int], sentences: int) -> list[LengthRange]:
    """The ranges around desired lengths, by the method fixRng of Kikuchi et al. (2016, section 3.2).

    Below the range the end is forbidden, above it hypotheses are given up. The range reaches length_tolerance either
    way, to whole units (tokens, or what else is measured), and always holds the desired length itself.

    Raises ConfigError for a length below 1, for another number of lengths than of sentences, and next to limits.
    """
    if len(desired) != sentences:
        raise ConfigError(f"desired_lengths has {len(desired)} lengths for {sentences} sentences; expected one each")
    set_limits = [
        name
        for name in ("min_length", "max_length", "min_length_ratio", "max_length_ratio")
        if getattr(options, name) != getattr(DecodingOptions, name)
    ]
    if set_limits:
        raise ConfigError(
            f"a desired length and {set_limits[0]} are both given; expected one or the other: leave out {set_limits[0]}"
        )
    ranges = []
    for number, length in enumerate(desired, start=1):
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MOST:
            raise ConfigError(f"desired length of sentence {number} is {length!r}; expected 1 to {MOST}")
        slack = options.length_tolerance * length
        ranges.append(
            LengthRange(max(1, math.ceil(length - slack - _ROUNDING)), math.floor(length + slack + _ROUNDING))
        )
    return ranges
