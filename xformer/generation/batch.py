"""A batch of inputs with everything that a search needs to know about them, and what a search asks for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xformer.backends import (
    Array,
    Namespace,
    accumulation_dtype,
    array_namespace,
    base_namespace,
    device,
    from_host,
    index_dtype,
    to_host,
)
from xformer.errors import DataError, ShapeError
from xformer.generation.config import GenerationConfig, LengthLimits
from xformer.generation.prefix_cache import PrefixCache
from xformer.generation.processors import LogitsProcessor, Rows, StoppingCriteria, name_of, takes_rows
from xformer.generation.results import Hypothesis, UnscoredHypothesis, length_penalty
from xformer.generation.steps import DecodingSteps
from xformer.layers.kv_cache import with_size
from xformer.models.token_ids import check_one_each, check_tokens
from xformer.tracing.activations import is_observing

if TYPE_CHECKING:
    from xformer.generation.assisted import Drafter
    from xformer.generation.beams import BeamHistory

_MAX_PADDING = 32  # of a prompt, or a quarter of the longest one: another pass through the model takes about as long


class Sources(NamedTuple):
    """Inputs of an encoder-decoder.

    Attributes:
        ids: Source ids (inputs, source length), or frames (inputs, frames, features).
        mask: Boolean (inputs, 1, 1, source length), True = a token; None: other ids than pad_id.
        lengths: Output lengths for a length encoding, eos included; None without one.
    """

    ids: Array
    mask: Array | None
    lengths: list[int] | None

    def of(self, index: int) -> Sources:
        """Return one of the inputs."""
        rows = slice(index, index + 1)
        mask = None if self.mask is None else self.mask[rows, ...]
        return Sources(self.ids[rows, ...], mask, None if self.lengths is None else self.lengths[rows])


class Move(NamedTuple):
    """The next step of a search.

    Attributes:
        tokens: Next token of each row.
        parents: Row of the step before that each row continues; None: the same rows.
        inputs: Inputs that remain; None: all.
        draft_tokens: Tokens that may follow, which the step takes, too; for a search of one row with a drafter, whose
            logits are those after each token, (1, tokens, vocabulary).
        kept: Number of tokens of the step before that remain in the cache.
    """

    tokens: list[int]
    parents: Sequence[int] | None = None
    inputs: Sequence[int] | None = None
    draft_tokens: Sequence[int] = ()
    kept: int = 1


class Choice(NamedTuple):
    """A request for one token of each row; the search receives the tokens and their log-probabilities, two lists.

    Attributes:
        logits: Logits (rows, vocabulary).
        config: Settings of sampling.
        uniforms: Random number in [0, 1) of each row; None: the most probable token is chosen.
    """

    logits: Array
    config: GenerationConfig
    uniforms: list[float] | None

    @property
    def key(self) -> Any:
        """Settings and dtype that choices made together share."""
        config = self.config
        sampling = (config.temperature, config.top_k, config.top_p, config.min_p)
        return self.uniforms is not None and sampling, self.logits.dtype


@dataclass(frozen=True)
class GenerationBatch:
    """Inputs of a search.

    Attributes:
        model: Object with `vocab_size`, `config` and `decode_step(tokens, cache)`.
        config: Settings of the search.
        sources: Encoded inputs of an encoder-decoder, or None; see `Sources`.
        start: Tokens that every row begins with, e.g. bos.
        prefixes: Tokens that each output (of a language model: prompt and output) begins with.
        lengths: Length limits of each output.
        indices: Index of each input in a longer list; errors count from 1.
        inputs: Inputs of the search among those above, of which `sources` has no others.
        eos_id: Token that ends a beam; None: outputs end at their maximum length.
        end_ids: All tokens that end an output. In beam search eos_id stands for all of them.
        logits_processors: Applied in this order at each step.
        stopping_criteria: Checked after each step.
        uniforms: Uniform random numbers in [0, 1) by input, sample and position; None: nothing is sampled.
        coverage_penalties: Returns the coverage penalty of hypotheses (results.py); None: not part of the score.
        beam_history: Receives the candidates of each step of beam search; None: they are not recorded.
        prefix_cache: Keys and values of the beginnings of earlier prompts.
        new_drafter: Makes the `Drafter` of an output; None: no draft tokens.
    """

    model: Any
    config: GenerationConfig
    sources: Sources | None
    start: list[int]
    prefixes: list[list[int]]
    lengths: LengthLimits
    indices: Sequence[int]
    inputs: Sequence[int]
    eos_id: int | None
    end_ids: frozenset[int]
    logits_processors: Sequence[LogitsProcessor] = ()
    stopping_criteria: Sequence[StoppingCriteria] = ()
    uniforms: list[list[list[float]]] | None = None
    coverage_penalties: Callable[[Sequence[Any]], list[float]] | None = None
    beam_history: BeamHistory | None = None
    prefix_cache: PrefixCache | None = None
    new_drafter: Callable[[], Drafter] | None = None

    def of(self, index: int) -> GenerationBatch:
        """Return a batch with one of the inputs, whose rows keep its index."""
        sources = None if self.sources is None else self.sources.of(index)
        return dataclasses.replace(self, inputs=[index], sources=sources)

    @property
    def uses_prefix_cache(self) -> bool:
        """True if the only prompt, or that of all samples, enters the model in chunks that may be cached."""
        prompts = {tuple(self.prefixes[index]) for index in self.inputs}
        return self.prefix_cache is not None and self.prefix_cache.serves(self.model, [*prompts])

    @property
    def num_draft_tokens(self) -> int:
        """Largest number of draft tokens of a step."""
        return 0 if self.new_drafter is None else self.config.draft_length

    @property
    def rows_per_input(self) -> int:
        """Number of rows of an input: beams or samples."""
        if self.config.method == "beam":
            return self.config.num_beams
        return 1 if self.uniforms is None else self.config.num_return_sequences

    @property
    def num_inputs(self) -> int:
        """Number of inputs."""
        return len(self.inputs)

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a row: of its source, the prompt and the output."""
        outputs = max((self.lengths.ranges[index].maximum for index in self.inputs), default=0)
        return self.source_length + len(self.start) + outputs

    @property
    def source_length(self) -> int:
        """Length of the longest source; 0 for a language model."""
        return 0 if self.sources is None else int(self.sources.ids.shape[1])

    @functools.cached_property
    def parameter(self) -> Array:
        """A parameter of the model, for its dtype and device."""
        return next(array for _, array in self.model.named_parameters())

    @functools.cached_property
    def xp(self) -> Namespace:
        """Array namespace of the model."""
        return base_namespace(array_namespace(self.parameter))

    def to_device(self, data: Any, dtype: Any = None) -> Array:
        """Move host data to the device of the model."""
        return from_host(self.xp, data, dtype=dtype, device=device(self.parameter))

    def rows(self, count: int) -> Rows:
        """Return the rows of the first step, `count` for each input."""
        rows = Rows.first(self.prefixes, self.indices, is_normalized=self.config.method == "beam")
        return rows if count == 1 and len(rows.inputs) == self.num_inputs else rows.take(np.repeat(self.inputs, count))

    def process(self, logits: Array, rows: Rows) -> Array:
        """Apply the logits processors, in float32 or wider."""
        xp = array_namespace(logits)
        logits = xp.astype(logits, accumulation_dtype(xp, logits.dtype), copy=False)
        arrays = self._arrays(rows) if self.logits_processors else ()
        for processor, has_rows in self._hooks[0]:
            shape, logits = logits.shape, processor(*arrays, logits, **({"rows": rows} if has_rows else {}))
            if getattr(logits, "shape", None) != shape:
                returned = f"shape {tuple(logits.shape)}" if hasattr(logits, "shape") else repr(logits)
                raise ShapeError(
                    f"logits processor {name_of(processor)} returned {returned}; expected logits {tuple(shape)}"
                )
        return logits

    def should_stop(self, rows: Rows) -> list[bool]:
        """Return for each row whether a stopping criterion ends it."""
        num_rows, stops = len(rows.lengths), [False] * len(rows.lengths)
        if not self.stopping_criteria or not num_rows:
            return stops
        arrays = self._arrays(rows)
        for criterion, has_rows in self._hooks[1]:
            flags = criterion(*arrays, **({"rows": rows} if has_rows else {}))
            found = to_host(flags).tolist() if hasattr(flags, "shape") else flags
            if not isinstance(found, list) or len(found) != num_rows or any(isinstance(x, list) for x in found):
                name = name_of(criterion)
                raise ShapeError(
                    f"stopping criterion {name} returned {flags!r}; expected one bool per row ({num_rows})"
                )
            stops = [stop or bool(flag) for stop, flag in zip(stops, found, strict=True)]
        return stops

    @functools.cached_property
    def _hooks(self) -> list[list[tuple[Any, bool]]]:
        """Processors and stopping criteria, and whether they have a parameter `rows`."""
        return [
            [(each, takes_rows(each)) for each in hooks] for hooks in (self.logits_processors, self.stopping_criteria)
        ]

    def _arrays(self, rows: Rows) -> tuple[Array, Array]:
        dtype = index_dtype(self.xp)
        return self.to_device(rows.tokens, dtype), self.to_device(rows.lengths, dtype)

    def score_bound(self, hypothesis: UnscoredHypothesis) -> float:
        """Return the score without the coverage penalty, which is at most zero."""
        length = self.lengths.output_length(hypothesis.input_index, len(hypothesis.tokens)) + int(hypothesis.has_eos)
        config = self.config
        return hypothesis.log_probability / length_penalty(length, config.length_penalty, config.length_penalty_base)

    def score(self, hypotheses: Sequence[UnscoredHypothesis]) -> list[Hypothesis]:
        """Score hypotheses."""
        penalties = [0.0] * len(hypotheses)
        if self.coverage_penalties is not None and hypotheses:
            penalties = self.coverage_penalties(hypotheses)
        return [
            Hypothesis(
                each.tokens[len(each.tokens) - self.lengths.output_length(each.input_index, len(each.tokens)) :],
                each.log_probability,
                self.score_bound(each) + penalty,
                each.finished,
            )
            for each, penalty in zip(hypotheses, penalties, strict=True)
        ]

    def no_token_error(self, index: int, length: int) -> DataError:
        """Return the error for a row of input `index` whose next token has no finite score."""
        return DataError(
            f"input {self.indices[index] + 1} has no possible token at position {length + 1}: all logits are -inf "
            "or one is NaN; expected logits processors and suppress_tokens to leave at least one token"
        )

    def take(self, x: Array, rows: Sequence[int]) -> Array:
        """Select rows of an array."""
        return self.xp.take(x, self.to_device(list(rows), index_dtype(self.xp)), axis=0)


def prefill(batches: Sequence[GenerationBatch]) -> tuple[DecodingSteps, Array]:
    """Enter the prefixes of batches, one row per input; return further steps and the next logits.

    Prompts of similar lengths enter a language model together, so that little padding is computed, and equal prompts
    once, such as those of the samples of a text.
    """
    first = batches[0]
    rows = [(*batch.start, *batch.prefixes[index]) for batch in batches for index in batch.inputs]
    sources = [batch.sources for batch in batches if batch.sources is not None]
    if sources or is_observing():  # which sees each row
        return _prefill(batches, rows, sources)
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(rows))}
    steps, logits = _prefill(batches, list(places), sources)
    if len(places) < len(rows):
        parents = [places[row] for row in rows]
        steps.reorder(parents)
        logits = first.take(logits, parents)
    return steps, logits


def _prefill(
    batches: Sequence[GenerationBatch], rows: Sequence[tuple[int, ...]], sources: Sequence[Sources]
) -> tuple[DecodingSteps, Array]:
    """Enter rows of tokens; see `prefill`."""
    first = batches[0]
    maximum = max(batch.lengths.ranges[index].maximum for batch in batches for index in batch.inputs)
    groups: list[list[int]] = []
    for row in sorted(range(len(rows)), key=lambda row: -len(rows[row])):
        longest = len(rows[groups[-1][0]]) if groups else 0
        if groups and (sources or longest - len(rows[row]) <= max(_MAX_PADDING, longest // 4)):
            groups[-1].append(row)
        else:
            groups.append([row])
    groups = [sorted(group) for group in groups]

    def enter(group: Sequence[int]) -> tuple[DecodingSteps, Array]:
        prompts = [rows[row] for row in group]
        lengths = list(map(len, prompts))
        tokens = first.to_device([[*row, *[0] * (max(lengths) - len(row))] for row in prompts], index_dtype(first.xp))
        cache = _encode(first.model, sources) if sources else first.model.init_cache(len(group))
        lengths_of_sources = [int(each.ids.shape[1]) for each in sources for _ in range(each.ids.shape[0])]
        longest = len(first.start) + maximum + first.num_draft_tokens
        steps = DecodingSteps(first.model, cache, longest, lengths_of_sources)
        if len(rows) == 1 and first.prefix_cache is not None and first.uses_prefix_cache:
            end = first.prefix_cache.prefill(
                first.model, prompts[0], cache, lambda data: first.to_device(data, index_dtype(first.xp))
            )
            tokens = tokens[:, end:]
        return steps, steps.prefill(tokens, lengths)

    (steps, logits), *others = [enter(group) for group in groups]
    if others:
        place = {row: index for index, row in enumerate(row for group in groups for row in group)}
        steps.reorder([place[row] if place[row] < len(groups[0]) else 0 for row in range(len(rows))])
        for group, (other, _) in zip(groups[1:], others, strict=True):
            steps.put(group, [], other)
        logits = first.xp.concat([logits, *(each for _, each in others)], axis=0)
        logits = first.take(logits, [place[row] for row in range(len(rows))])
    return steps, logits


def _encode(model: Any, sources: Sequence[Sources]) -> Any:
    """Return the cache of an encoder-decoder; the shorter sources are padded."""
    (ids, mask, lengths), *others = sources
    if others:
        xp, size, pad_id = array_namespace(ids), max(each.ids.shape[1] for each in sources), model.config.pad_id
        if model.config.source_padding_id is None:  # otherwise the model finds the padding itself
            mask = xp.concat([with_size(_mask_of(each), size, 3) for each in sources], axis=0)
        ids = xp.concat([with_size(each.ids, size, 1, fill=pad_id or 0) for each in sources], axis=0)
        lengths = None if lengths is None else [length for each in sources for length in each.lengths or ()]
    return model.prefill(ids, lengths=lengths, **({} if mask is None else {"source_mask": mask}))


def _mask_of(source: Sources) -> Array:
    xp, (rows, length) = array_namespace(source.ids), source.ids.shape[:2]
    return (
        xp.ones((rows, 1, 1, length), dtype=xp.bool, device=device(source.ids)) if source.mask is None else source.mask
    )


def check_prefixes(
    prefixes: Sequence[Sequence[int]] | None, lengths: LengthLimits, model: Any, indices: Sequence[int]
) -> list[list[int]]:
    """Return one prefix per input; errors number them by `indices`, from 1.

    Raises:
        DataError: For ids that no output may contain and a wrong number of prefixes.
        ConfigError: For a prefix that is longer than its output may be.
    """
    if prefixes is None:
        return [[] for _ in lengths.ranges]
    check_one_each("prefix", prefixes, len(lengths.ranges))
    config = model.config
    special = {config.pad_id: "pad_id", config.bos_id: "bos_id", config.eos_id: "eos_id"}
    special = special if config.suppress_special else {}  # public checkpoints begin outputs with special tokens
    checked = []
    for index, prefix in enumerate(prefixes):
        number = indices[index] + 1
        checked.append(check_tokens(f"prefix {number}", prefix, model.vocab_size))
        for token in checked[-1]:
            if token in special:
                raise DataError(f"prefix {number} has {special[token]} {token}; expected ordinary tokens only")
        lengths.check_prefix(index, checked[-1], number)
    return checked
