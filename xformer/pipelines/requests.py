"""What is asked of a model along with the texts: how to decode, and how long, about what and beginning how."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Self

from xformer.config import check_keys
from xformer.errors import ConfigError, DataError
from xformer.generation import DecodingOptions
from xformer.generation.lengths import MOST

LENGTH_UNITS = ("tokens", "words")
BEAM_FOR_LENGTHS = 4


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """The wishes for a list of texts; those that may differ from text to text are one value or a list of as many.

    decoding: how to search (DecodingOptions)
    prefix: what the output begins with
    topics: words and phrases to favor: a list for all texts, or a list of lists
    desired_length: of the output, in length_unit "tokens" or "words"; outputs keep to it within
    decoding.length_tolerance, or as near as the model can; greedy search becomes a beam of 4 for it
    align: also say which source token each output token attends to most (Output.alignment)
    seed: of sampling; the same seed draws the same outputs, however texts are batched
    batch_tokens: most source tokens at once, padding included; on NumPy each core works on one batch
    max_source_length: most tokens of a source

    Raises ConfigError for values that cannot be.
    """

    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    prefix: str | Sequence[str] | None = None
    topics: Sequence[str] | Sequence[Sequence[str]] | None = None
    desired_length: int | Sequence[int] | None = None
    length_unit: str = "tokens"
    align: bool = False
    seed: int = 0
    batch_tokens: int = 4096
    max_source_length: int = 1024

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "max_source_length"):
            if not _is_count(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected a whole number of at least 1")
        if self.length_unit not in LENGTH_UNITS:
            raise ConfigError(f"length_unit is {self.length_unit!r}; expected 'tokens' or 'words'")
        if isinstance(self.topics, str):
            raise ConfigError(f"topics is the text {self.topics!r}; expected a list of words or phrases")
        lengths = [] if self.desired_length is None else self.desired_length
        for length in lengths if isinstance(lengths, Sequence) else [lengths]:
            if not _is_count(length):
                raise ConfigError(
                    f"desired_length is {length!r}; expected a whole number of at least 1, in {self.length_unit}"
                )
            if length > MOST:
                raise ConfigError(f"desired_length is {length}; expected at most {MOST}")
        if self.desired_length is None:
            self._check_unused()
        if lengths and self.decoding.method == "greedy":
            # Greedy search meets a length by chance; a beam has hypotheses of many lengths to choose from.
            object.__setattr__(self, "decoding", dataclasses.replace(self.decoding, num_beams=BEAM_FOR_LENGTHS))

    def _check_unused(self) -> None:
        """Raise ConfigError for settings that say how to keep to a length where none is given."""
        usual = DecodingOptions.length_tolerance
        for name, value, default in (
            ("length_unit", self.length_unit, "tokens"),
            ("length_tolerance", self.decoding.length_tolerance, usual),
        ):
            if value != default:
                raise ConfigError(f"{name} is {value!r} and there is no desired_length; give one, or leave out {name}")

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Make a request of its own fields and those of DecodingOptions, mixed; raises ConfigError for an unknown one,
        suggesting the nearest."""
        own = {f.name for f in dataclasses.fields(cls)} - {"decoding"}
        decoding = {f.name for f in dataclasses.fields(DecodingOptions)}
        for name in settings:
            check_keys([name], own | decoding, "the request")
        options = DecodingOptions(**{name: value for name, value in settings.items() if name in decoding})
        return cls(decoding=options, **{name: value for name, value in settings.items() if name in own})

    def prefixes(self, count: int) -> list[str] | None:
        """One prefix a text, or None."""
        if self.prefix is None:
            return None
        return _one_each("prefix", [self.prefix] * count if isinstance(self.prefix, str) else self.prefix, count)

    def topics_of_each(self, count: int) -> list[list[str]] | None:
        """The phrases of each text, or None."""
        if not self.topics:
            return None
        if all(isinstance(topic, str) for topic in self.topics):
            return [[str(topic) for topic in self.topics]] * count
        return _one_each("topics", [list(topics) for topics in self.topics], count)

    def lengths(self, count: int) -> list[int] | None:
        """The desired length of each text, or None."""
        if self.desired_length is None:
            return None
        given = self.desired_length if isinstance(self.desired_length, Sequence) else [self.desired_length] * count
        return [int(length) for length in _one_each("desired_length", given, count)]


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _one_each(name: str, values: Sequence[Any], count: int) -> list[Any]:
    if len(values) != count:
        raise DataError(f"{name} has {len(values)} entries for {count} texts; expected one for each, or one for all")
    return list(values)
