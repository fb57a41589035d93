"""What one call of decode has to do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xformer.backends import Array, Namespace, array_namespace, base_namespace, device, from_host, index_dtype
from xformer.errors import ConfigError, DataError
from xformer.generation.config import DecodingOptions
from xformer.generation.lengths import LengthRange, MeasuredLengths
from xformer.generation.topic import Tokens, TopicFocus


@dataclass
class DecodingTask:
    """A batch of sentences, each with its own settings, on its way through a search.

    model: anything with vocab_size, config and step(tokens, cache)
    begin: makes the cache, one row a sentence
    first: the tokens that every row is given before its own, e.g. bos
    prefixes: tokens that each output begins with
    ranges: how many tokens each output may have
    measured: how long, where that is wanted in another unit
    foci: what each output should favor
    end_anywhere: within its range, a hypothesis may end whatever its rank (see beam.py)
    uniforms: for sampling, each sentence's and sample's random numbers in [0, 1), one for each position
    source: ids (sentences, source length), for models that have one; lengths: what a length encoding was told
    never, eos_id: tokens that no output has, and the one that ends it; None: nothing does
    uncounted: how many tokens of a prefix are no part of the output, such as the prompt of a language model
    """

    model: Any
    options: DecodingOptions
    begin: Callable[[], Any]
    first: list[int]
    prefixes: list[list[int]]
    ranges: list[LengthRange]
    never: frozenset[int]
    eos_id: int | None
    measured: MeasuredLengths | None = None
    foci: list[TopicFocus] | None = None
    end_anywhere: bool = False
    uniforms: list[list[list[float]]] | None = None
    source: Array | None = None
    lengths: list[int] | None = None
    uncounted: list[int] | None = None

    @property
    def closed(self) -> frozenset[int]:
        """The tokens that no sentence may take before it is long enough to end."""
        return self.never if self.eos_id is None else self.never | {self.eos_id}

    @property
    def sentences(self) -> int:
        """How many there are."""
        return len(self.prefixes)

    @functools.cached_property
    def lead(self) -> int:
        """How many tokens of every prefix go into the model at once; the others are forced one by one."""
        return min(map(len, self.prefixes))

    @functools.cached_property
    def home(self) -> Array:
        """An array that lives where the model does."""
        return next(array for _, array in self.model.named_parameters())

    @functools.cached_property
    def xp(self) -> Namespace:
        """The model's array library."""
        return base_namespace(array_namespace(self.home))

    def place(self, data: Any, dtype: Any = None) -> Array:
        """Move host data to the model."""
        return from_host(self.xp, data, dtype=dtype, device=device(self.home))

    def start(self) -> tuple[Any, Array]:
        """A cache that holds what is certain, one row a sentence, and the logits of the next token."""
        cache = self.begin()
        return cache, self.step([[*self.first, *prefix[: self.lead]] for prefix in self.prefixes], cache)

    def step(self, tokens: list[list[int]], cache: Any) -> Array:
        """Append tokens (rows, n) to the cache; the logits of the next one (rows, vocabulary)."""
        return self.model.decode_step(self.place(tokens, index_dtype(self.xp)), cache)

    def may_end(self, sentence: int, tokens: Tokens) -> bool:
        """Whether an output is long enough."""
        if len(tokens) < self.ranges[sentence].minimum:
            return False
        return not self.measured or self.measured.length_of(tokens) >= self.measured.ranges[sentence].minimum

    def fits(self, sentence: int, tokens: Tokens) -> bool:
        """Whether an output may begin with these tokens, in the unit that is measured; its prefix does."""
        if not self.measured or len(tokens) <= len(self.prefixes[sentence]):
            return True
        return self.measured.length_of(tokens) <= self.measured.ranges[sentence].maximum

    def counted(self, sentence: int, tokens: int) -> int:
        """How many of so many tokens are part of the output."""
        return tokens - self.uncounted[sentence] if self.uncounted else tokens

    def take(self, x: Array, rows: Sequence[int]) -> Array:
        """Choose rows of an array."""
        return self.xp.take(x, self.place(list(rows), index_dtype(self.xp)), axis=0)


def check_prefixes(
    prefixes: Sequence[Sequence[int]] | None,
    ranges: Sequence[LengthRange],
    model: Any,
    numbers: Sequence[int],
    measured: MeasuredLengths | None = None,
) -> list[list[int]]:
    """One list of ids a sentence, which the output begins with.

    numbers: of the sentences, counted from 0; errors count them from 1.

    Raises DataError for ids that no output may hold, ConfigError for a prefix longer than the limit.
    """
    if prefixes is None:
        return [[] for _ in ranges]
    if len(prefixes) != len(ranges):
        raise DataError(f"prefix has {len(prefixes)} entries for {len(ranges)} sentences; expected one list each")
    config, size = model.config, model.vocab_size
    special = {config.pad_id: "pad_id", config.bos_id: "bos_id", config.eos_id: "eos_id"}
    for row, (prefix, limits) in enumerate(zip(prefixes, ranges, strict=True)):
        number = numbers[row] + 1
        for token in prefix:
            if not 0 <= token < size:
                raise DataError(f"prefix {number} has the token id {token}; expected 0 to {size - 1}")
            if token in special:
                raise DataError(f"prefix {number} has {special[token]} {token}; expected tokens of the output alone")
        if len(prefix) > limits.maximum:
            raise ConfigError(
                f"prefix {number} has {len(prefix)} tokens, the output at most {limits.maximum}; "
                "shorten it, or allow longer outputs"
            )
        if measured and measured.length_of(prefix) > measured.ranges[row].maximum:
            raise ConfigError(
                f"prefix {number} is {measured.length_of(prefix)} long, the output at most "
                f"{measured.ranges[row].maximum}; shorten it, or allow longer outputs"
            )
    return [[int(token) for token in prefix] for prefix in prefixes]
