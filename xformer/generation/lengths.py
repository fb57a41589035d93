"""Length limits of outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from xformer.errors import ConfigError
from xformer.generation.config import GenerationConfig
from xformer.models.token_ids import check_one_each

MAX_TARGET_LENGTH = 100_000
# Token limit per unit of length_fn. The limit in units ends outputs; this one only stops a unit that never ends.
_TOKENS_PER_UNIT = 12
_ROUNDING = 1e-9  # 1.1 * 10 is 11.000000000000002; it should count as 11


class LengthRange(NamedTuple):
    """Minimum and maximum length, eos excluded."""

    minimum: int
    maximum: int


@dataclass(frozen=True)
class LengthLimits:
    """Length limits of the outputs of a batch.

    Attributes:
        ranges: Range of each output in tokens, prompt included.
        prompt_lengths: Tokens of each prompt, which are not part of the output; None without prompts.
        length_fn: Function of token ids that returns a length in another unit, e.g. words; None: only tokens count.
        unit_ranges: Range of each output in units of length_fn.
        near_targets: The ranges surround target lengths, so a beam may end anywhere inside (see beam_search.py).
    """

    ranges: list[LengthRange]
    prompt_lengths: list[int] | None = None
    length_fn: Callable[[Sequence[int]], int] | None = None
    unit_ranges: list[LengthRange] | None = None
    near_targets: bool = False

    def may_end(self, index: int, tokens: Sequence[int]) -> bool:
        """Return whether output `index` has reached its minimum length."""
        if len(tokens) < self.ranges[index].minimum:
            return False
        return self.unit_ranges is None or self._units(tokens) >= self.unit_ranges[index].minimum

    def exceeds_units(self, index: int, tokens: Sequence[int]) -> bool:
        """Return whether output `index` is longer than its limit in units of length_fn."""
        return self.unit_ranges is not None and self._units(tokens) > self.unit_ranges[index].maximum

    def output_length(self, index: int, num_tokens: int) -> int:
        """Return the length without the prompt."""
        return num_tokens - self.prompt_lengths[index] if self.prompt_lengths else num_tokens

    def check_prefix(self, index: int, prefix: Sequence[int], number: int) -> None:
        """Raise ConfigError for a prefix that exceeds the limits of output `index`, naming it by `number`."""
        for length, ranges in ((len(prefix), self.ranges), (self._units(prefix), self.unit_ranges)):
            if ranges is not None and length > ranges[index].maximum:
                raise ConfigError(
                    f"prefix {number} has length {length}; expected at most {ranges[index].maximum}, the maximum "
                    "length of the output"
                )

    def _units(self, tokens: Sequence[int]) -> int:
        return len(tokens) if self.length_fn is None else self.length_fn(tokens)


def default_max_length(source_length: int) -> int:
    """Return the default maximum length of an output, in tokens: twice the source plus 20."""
    return 2 * source_length + 20


def length_ranges(config: GenerationConfig, source_lengths: Sequence[int]) -> list[LengthRange]:
    """Return the configured range of each output, for inputs of these lengths (tokens, eos excluded)."""
    ranges = []
    for length in source_lengths:
        minimum = max(config.min_new_tokens, math.ceil(config.min_length_ratio * length - _ROUNDING))
        limits = [] if config.max_new_tokens is None else [config.max_new_tokens]
        if config.max_length_ratio is not None:
            limits.append(math.floor(config.max_length_ratio * length + _ROUNDING))
        maximum = max(1, min(limits, default=max(minimum, default_max_length(length))))
        ranges.append(LengthRange(min(minimum, maximum), maximum))
    return ranges


def target_ranges(config: GenerationConfig, target_lengths: Sequence[Any], num_inputs: int) -> list[LengthRange]:
    """Return ranges around target lengths, for the method fixRng of Kikuchi et al. (2016, section 3.2).

    Below the range eos is masked; above it hypotheses are truncated. A range extends config.length_tolerance to either
    side, in whole units, and always contains the target itself.

    Raises:
        DataError: For a wrong number of lengths.
        ConfigError: For an invalid length, and for a config that limits lengths as well.
    """
    check_one_each("target_lengths", target_lengths, num_inputs)
    default = GenerationConfig()
    for name in ("min_new_tokens", "max_new_tokens", "min_length_ratio", "max_length_ratio"):
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(f"both a target length and {name} are set; expected one or the other: omit {name}")
    ranges = []
    for number, length in enumerate(target_lengths, start=1):
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MAX_TARGET_LENGTH:
            raise ConfigError(f"target length {number} is {length!r}; expected 1 to {MAX_TARGET_LENGTH}")
        slack = config.length_tolerance * length
        minimum, maximum = math.ceil(length - slack - _ROUNDING), math.floor(length + slack + _ROUNDING)
        ranges.append(LengthRange(max(1, minimum), maximum))
    return ranges


def unit_limits(
    unit_ranges: list[LengthRange], length_fn: Callable[[Sequence[int]], int], source_lengths: Sequence[int]
) -> LengthLimits:
    """Return limits in units of length_fn, with token limits that leave enough tokens for them."""
    ranges = [
        LengthRange(units.minimum, max(default_max_length(length), _TOKENS_PER_UNIT * units.maximum))
        for units, length in zip(unit_ranges, source_lengths, strict=True)
    ]
    return LengthLimits(ranges, length_fn=length_fn, unit_ranges=unit_ranges, near_targets=True)
