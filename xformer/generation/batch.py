"""A batch of inputs with everything that a search needs to know about them, and what a search asks for."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import Array, Namespace, accumulation_dtype, array_namespace, device, from_host, to_host
from xformer.config import integers
from xformer.errors import ConfigError, DataError, ShapeError, describe_type
from xformer.generation import processors
from xformer.generation.config import GenerationConfig, LengthLimits, LengthRange, length_limits
from xformer.generation.prefix_cache import PrefixCache
from xformer.generation.processors import LogitsProcessor, Phrase, Processor, Rows, StoppingCriteria, SuppressTokens
from xformer.generation.results import BeamHistory, Hypothesis, UnscoredHypothesis, coverage_penalties, length_penalty
from xformer.models import LanguageModel, SpeechTransformer, Transformer
from xformer.models.token_ids import check_one_each, check_tokens, ids_of, pad
from xformer.random import Rng

_MIN_TEMPERATURE = 1e-6  # smaller ones would make logits infinite


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

    def take(self, rows: Sequence[int]) -> Sources:
        """Return some of the inputs, by their indices."""
        xp = array_namespace(self.ids)
        at = xp.from_host(list(rows), dtype="int64", device=device(self.ids))
        mask = None if self.mask is None else xp.take(self.mask, at, axis=0)
        lengths = None if self.lengths is None else [self.lengths[row] for row in rows]
        return Sources(xp.take(self.ids, at, axis=0), mask, lengths)


class NextTokens(NamedTuple):
    """The next step of a search.

    Attributes:
        rows: The rows with their next token, each of which continues its parent, a row of the step before.
        inputs: Inputs that remain; None: all.
        draft_tokens: Tokens that may follow, which the step takes, too; for a search of one row with draft tokens,
            whose logits are those after each token, (1, tokens, vocabulary).
        kept: Number of tokens of the step before that remain in the cache.
    """

    rows: Rows
    inputs: Sequence[int] | None = None
    draft_tokens: Sequence[int] = ()
    kept: int = 1


class Chosen(NamedTuple):
    """The next tokens of each row, and their log-probabilities, as NumPy arrays (rows, steps)."""

    tokens: Any
    log_probs: Any

    @classmethod
    def of(cls, pairs: Any) -> Chosen:
        """Return those of an array (steps, rows, 2) on the host."""
        return cls(pairs[..., 0].T.astype(np.int64), pairs[..., 1].T.astype(np.float64))


class SampleRequest(NamedTuple):
    """A request for one token of each row, which the search receives as `Chosen`.

    Attributes:
        logits: Logits (rows, vocabulary).
        settings: Those of `ops.decoding.choose`.
        uniforms: Random number in [0, 1) of each row; None: the most probable token is chosen.
    """

    logits: Array
    settings: dict[str, Any]
    uniforms: list[float] | None

    @property
    def key(self) -> Any:
        """Settings and dtype, equal for all requests that one call answers."""
        return tuple(self.settings.values()), self.logits.dtype


Steps = Generator[NextTokens | SampleRequest, Any, list[list[Hypothesis]]]
"""A search: it receives logits or what it asked for, and returns the hypotheses of each input, best first."""


def sampling_settings(config: GenerationConfig) -> dict[str, Any]:
    """Return the settings of `ops.decoding.choose`, none for greedy search."""
    if config.method != "sampling":
        return {}
    temperature = 1.0 if config.temperature is None else max(config.temperature, _MIN_TEMPERATURE)
    top_p = 1.0 if config.top_p is None else config.top_p
    return {"temperature": temperature, "top_k": config.top_k or 0, "top_p": top_p, "min_p": config.min_p or 0.0}


class GenerationBatch:
    """Inputs of a search, checked; the arguments are those of `generate`.

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
        beam_history: Receives the candidates of each step of beam search; None: they are not recorded.
        prefix_cache: Keys and values of prompt prefixes.
        draft_model: Proposes draft tokens; None: prompt lookup does if the config asks for it.
        num_draft_tokens: Largest number of draft tokens of a step; 0 without any.
        rows_per_input: Number of rows of an input: beams or samples.
        is_end: Whether a token ends an output, as booleans (vocabulary,) of NumPy.
        maxima: Maximum length of each input, as a NumPy array.
    """

    def __init__(
        self,
        model: Any,
        inputs: Any,
        config: GenerationConfig | None = None,
        *,
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        rng: Rng | None = None,
        prefix: Sequence[Sequence[int]] | None = None,
        sequence_bias: Sequence[Sequence[Phrase]] | None = None,
        target_lengths: Sequence[int] | None = None,
        length_fn: Callable[[Sequence[int]], int] | None = None,
        length_condition: Sequence[int] | None = None,
        special_tokens: bool = True,
        attention_mask: Any = None,
        indices: Sequence[int] | None = None,
        beam_history: BeamHistory | None = None,
        prefix_cache: PrefixCache | None = None,
        draft_model: LanguageModel | None = None,
        **overrides: Any,
    ) -> None:
        self.model, self.config = model, GenerationConfig.resolve(config, overrides)
        self.beam_history, self.prefix_cache, self.draft_model = beam_history, prefix_cache, draft_model
        config, model_config = self.config, getattr(model, "config", None)
        if model_config is None or not hasattr(model, "decode_step"):
            raise ConfigError(f"model is {describe_type(model)}; expected a Transformer or LanguageModel")
        if prefix_cache is not None and not isinstance(prefix_cache, PrefixCache):
            raise ConfigError(f"prefix_cache is {prefix_cache!r:.100}; expected a PrefixCache")
        user_processors = list(map(processors.processor_of, logits_processors))
        self.stopping_criteria = list(map(processors.criterion_of, stopping_criteria))
        if attention_mask is not None:
            inputs = _without_padding(inputs, attention_mask)
        max_length = model_config.max_positions if model_config.positions == "learned" else math.inf
        self.sources: Sources | None = None
        if isinstance(model, Transformer):
            source, source_mask = _source_ids(model, inputs)
            self.indices = _check_indices(indices, source.shape[0])
            sizes = _source_lengths(model, source, source_mask)
            targets: Any = {"target_lengths": target_lengths, "length_fn": length_fn}
            self.lengths = length_limits(config, sizes, max_length - 1, **targets)  # the start takes a position
            length_condition = target_lengths if length_condition is None else length_condition
            conditions = _length_conditions(model, length_condition, len(self.indices))
            self.prefixes = _check_prefixes(prefix, self.lengths, model, self.indices)
            self.start, eos_id, suppressed = [model_config.bos_id], model_config.eos_id, model_config.suppressed_ids
            self.sources = Sources(source, source_mask, conditions)
        else:
            options: dict[str, Any] = {"prefix": prefix, "coverage_penalty": config.coverage_penalty or None}
            options |= {"target_lengths": target_lengths, "length_condition": length_condition}
            for name in (name for name, value in options.items() if value is not None):
                raise ConfigError(f"{name} applies to encoder-decoders only; omit it for a language model")
            self.prefixes = _check_prompts(inputs, model.vocab_size, model_config.pad_id if special_tokens else None)
            if len(set(map(len, self.prefixes))) > 1 and not hasattr(model, "to_static"):
                raise ConfigError(
                    f"prompts have different lengths and {type(model).__name__} has no to_static(cache, max_length); "
                    "expected prompts of equal length"
                )
            self.indices = _check_indices(indices, len(self.prefixes))
            self.lengths = length_limits(config, list(map(len, self.prefixes)), max_length, are_prompts=True)
            self.start, eos_id = [], model_config.eos_id if special_tokens else None
            suppressed = model_config.suppressed_ids if special_tokens else frozenset()
        self.inputs: Sequence[int] = range(len(self.prefixes))
        self.end_ids = frozenset(config.stop_token_ids).union([] if eos_id is None else [eos_id])
        self.eos_id = min(self.end_ids, default=None) if eos_id is None else eos_id
        _check_vocabulary(config, suppressed, model.vocab_size)
        phrases = processors.check_sequence_bias(sequence_bias, len(self.prefixes), model.vocab_size)
        self.logits_processors = build_logits_processors(self, suppressed, phrases, user_processors)
        self.uniforms = _uniforms(config, rng, self.indices, self.lengths.ranges)
        _check_drafts(model, config, draft_model)
        uses_drafts = draft_model is not None or config.prompt_lookup_num_tokens is not None
        self.num_draft_tokens = config.draft_length if uses_drafts else 0
        self.rows_per_input = config.num_beams if config.method == "beam" else config.num_return_sequences
        self.is_end: Any = np.isin(np.arange(model.vocab_size), list(self.end_ids))
        self.maxima: Any = np.asarray([limits.maximum for limits in self.lengths.ranges])

    def of(self, index: int) -> GenerationBatch:
        """Return a batch with one of the inputs, whose rows keep its index."""
        batch = copy.copy(self)
        batch.inputs, batch.sources = [index], None if self.sources is None else self.sources.take([index])
        return batch

    @property
    def uses_prefix_cache(self) -> bool:
        """True if the only prompt, or that of all samples, enters the model in chunks that may be cached."""
        if self.prefix_cache is None:
            return False
        return self.prefix_cache.serves(self.model, list({tuple(self.prefixes[index]) for index in self.inputs}))

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a row: of its source, the prompt and the output."""
        outputs = max((self.lengths.ranges[index].maximum for index in self.inputs), default=0)
        return self.source_length + len(self.start) + outputs

    @property
    def source_length(self) -> int:
        """Length of the longest source; 0 for a language model."""
        return 0 if self.sources is None else int(self.sources.ids.shape[1])

    @cached_property
    def parameter(self) -> Array:
        """A parameter of the model, for its dtype and device."""
        return next(array for _, array in self.model.named_parameters())

    @cached_property
    def xp(self) -> Namespace:
        """Array namespace of the model."""
        return array_namespace(self.parameter).library

    def to_device(self, numbers: Any) -> Array:
        """Move ids or indices to the device of the model."""
        return self.xp.from_host(numbers, dtype=self.xp.index_dtype, device=device(self.parameter))

    def rows(self) -> Rows:
        """Return the rows of the first step, one for each input."""
        rows = Rows.first(self.prefixes, self.indices, is_normalized=self.config.method == "beam")
        return rows if len(rows.inputs) == len(self.inputs) else rows.take(self.inputs)

    def process(self, logits: Array, rows: Rows) -> Array:
        """Apply the logits processors, in float32 or wider."""
        xp = array_namespace(logits)
        logits = xp.astype(logits, accumulation_dtype(xp, logits.dtype), copy=False)
        for processor in self.logits_processors:
            logits = processor(logits, rows)
        return logits

    def draws(self, rows: Rows, count: int) -> Any:
        """Return random numbers for the next `count` tokens of all samples, (count, rows); zero if there are none."""
        numbers = np.zeros((count, len(rows.lengths)))
        for row, (index, start) in enumerate(zip(rows.inputs.tolist(), rows.lengths.tolist(), strict=True)):
            own = self.uniforms[index][row % self.rows_per_input][start : start + count] if self.uniforms else ()
            numbers[: len(own), row] = own
        return numbers

    def look_ahead(self, rows: Rows) -> tuple[Any, ...] | None:
        """Return the arguments of `DecodingSteps.look_ahead`; None if the history of a row decides about its tokens."""
        if self.stopping_criteria or self.lengths.unit_ranges is not None:
            return None
        suppressed: list[Any] = []
        for processor in self.logits_processors:
            if type(processor) is not SuppressTokens:
                return None
            if processor.selects is None:
                suppressed.append(processor.tokens)
            elif processor.selects(rows).any():  # until rows have their minimum length
                return None
        mask = np.zeros((self.model.vocab_size,), dtype=np.bool_)
        for tokens in suppressed:
            mask[tokens] = True
        count = int((self.maxima[rows.inputs] + 1 - rows.lengths).max())
        return rows.tokens[:, -1:], mask, self.draws(rows, count), sampling_settings(self.config)

    def should_stop(self, rows: Rows) -> list[bool]:
        """Return for each row whether a stopping criterion ends it."""
        if not len(rows.lengths):
            return []
        flags = [criterion(self.parameter, rows) for criterion in self.stopping_criteria]
        return [any(row) for row in zip(*flags, strict=True)]

    def length_penalty(self, index: int, num_tokens: int) -> float:
        """Return lp of an output; tokens include the prompt, and eos if it ended."""
        length = self.lengths.output_length(index, num_tokens)
        return length_penalty(length, self.config.length_penalty, self.config.length_penalty_base)

    def score_bound(self, hypothesis: UnscoredHypothesis) -> float:
        """Return the score without the coverage penalty, which is at most zero."""
        num_tokens = len(hypothesis.tokens) + int(hypothesis.has_eos)
        return hypothesis.log_probability / self.length_penalty(hypothesis.input_index, num_tokens)

    def score(self, hypotheses: Sequence[UnscoredHypothesis]) -> list[Hypothesis]:
        """Score hypotheses."""
        penalties, weight = [0.0] * len(hypotheses), self.config.coverage_penalty
        if weight and hypotheses and self.sources is not None:
            sources = self.sources.take([self.inputs.index(each.input_index) for each in hypotheses])
            # The last token predicts nothing unless eos follows.
            targets = [[*self.start, *each.tokens][: len(each.tokens) + int(each.has_eos)] for each in hypotheses]
            penalties = coverage_penalties(self.model, sources, targets, weight)
        found = []
        for each, penalty in zip(hypotheses, penalties, strict=True):
            start = len(each.tokens) - self.lengths.output_length(each.input_index, len(each.tokens))
            score = self.score_bound(each) + penalty
            found.append(Hypothesis(each.tokens[start:], each.log_probability, score, each.finished))
        return found

    def no_token_error(self, index: int, length: int) -> DataError:
        """Return the error for a row of input `index` whose next token has no finite score."""
        return DataError(
            f"input {self.indices[index] + 1} has no possible token at position {length + 1}: all logits are -inf "
            "or one is NaN; expected logits processors and suppress_tokens to leave at least one token"
        )

    def take(self, x: Array, rows: Sequence[int]) -> Array:
        """Select rows of an array."""
        return self.xp.take(x, self.to_device(rows), axis=0)


def build_logits_processors(
    batch: GenerationBatch,
    suppressed: frozenset[int],
    sequence_bias: Sequence[Sequence[Phrase]] | None,
    user_processors: Sequence[Processor],
) -> list[Processor]:
    """Return the logits processors of a batch, in the order in which they apply.

    What is added to logits, and tokens that the model cannot generate, change the distribution of the model: beam
    search normalizes after them.
    """
    config, lengths, ends, eos_id = batch.config, batch.lengths, batch.end_ids, batch.eos_id
    pairs, is_beam_search = zip(lengths.ranges, batch.prefixes, strict=True), config.method == "beam"
    has_minimum = lengths.unit_ranges is not None or any(limits.minimum > len(prefix) for limits, prefix in pairs)
    # If every other token is suppressed, outputs may end.
    has_others = len(ends.union(suppressed, config.suppress_tokens)) < batch.model.vocab_size
    strength, repetition = config.sequence_bias_strength, config.repetition_penalty
    penalties = config.frequency_penalty, config.presence_penalty
    found: list[tuple[Any, Processor]] = [
        (sequence_bias is not None and strength, partial(processors.favor_phrases, sequence_bias or (), strength)),
        (config.logit_bias, processors.LogitBias(config.logit_bias or {})),
        (any(penalties), partial(processors.penalize_frequency, *penalties)),
        (suppressed, SuppressTokens(suppressed)),
        (is_beam_search, processors.normalize),
        (repetition != 1.0, partial(processors.penalize_repetition, repetition, SuppressTokens(batch.start))),
        (config.suppress_tokens, SuppressTokens(config.suppress_tokens)),
        (config.begin_suppress_tokens, SuppressTokens(config.begin_suppress_tokens, processors.at_begin)),
        (has_minimum and has_others, SuppressTokens(ends, processors.below_minimum(lengths))),
        (config.no_repeat_ngram_size, partial(processors.mask_repeated, config.no_repeat_ngram_size)),
        *((True, each) for each in user_processors),
    ]
    if is_beam_search and eos_id is not None:
        found.append((len(ends) > 1, processors.StopTokens(ends - {eos_id}, eos_id)))
    found.append((is_beam_search and user_processors, processors.limit_to_zero))
    return [each for is_used, each in found if is_used]


# --- Inputs and arguments ---------------------------------------------------------------------------------------------


def _source_ids(model: Transformer, inputs: Any) -> tuple[Array, Array | None]:
    """Return checked source ids (inputs, source length), and a mask if padding of lists could be taken for tokens."""
    if isinstance(model, SpeechTransformer):
        return model.source_ids(inputs), None
    is_list = isinstance(inputs, list | tuple) and all(isinstance(row, list | tuple) for row in inputs)
    source = ids_of(model.source_ids(pad(inputs, model.config.pad_id) if is_list and inputs else inputs))
    if not is_list or model.config.source_padding_id is not None or len(set(map(len, inputs))) < 2:
        return source, None
    is_token = pad([[1] * len(row) for row in inputs], 0)
    mask = array_namespace(source).from_host(is_token, device=device(source)) == 1
    return source, mask[:, None, None, :]


def _without_padding(inputs: Any, attention_mask: Any) -> list[list[int]]:
    """Return the rows of an array of ids without padding."""
    rows, kept = (np.asarray(to_host(x) if hasattr(x, "shape") else from_host(np, x)) for x in (inputs, attention_mask))
    if rows.ndim != 2 or rows.shape != kept.shape:
        raise ShapeError(f"attention_mask has shape {kept.shape}; expected that of ids (inputs, length), {rows.shape}")
    return [row[mask != 0].tolist() for row, mask in zip(rows, kept, strict=True)]


def _source_lengths(model: Transformer, source: Array, source_mask: Array | None) -> list[int]:
    """Return the length of each source, eos excluded."""
    if len(source.shape) == 3:  # frames of audio
        return [source.shape[1]] * source.shape[0]
    special = [each for each in (model.config.pad_id, model.config.eos_id) if each is not None]
    is_token = ~np.isin(to_host(source), special)
    is_token &= True if source_mask is None else to_host(source_mask)[:, 0, 0, :]
    return is_token.sum(axis=1).tolist()


def _length_conditions(model: Transformer, lengths: Sequence[int] | None, num_inputs: int) -> list[int] | None:
    """Return the output lengths for a length encoding, eos included; None for a model without one."""
    if not model.config.length_encoding:
        return None
    if lengths is None:
        raise ConfigError("this model has a length encoding; expected target_lengths, one per input")
    check_one_each("length_condition", lengths, num_inputs)
    return [length + 1 for length in integers("length_condition", lengths)]


def _uniforms(
    config: GenerationConfig, rng: Rng | None, indices: Sequence[int], ranges: Sequence[LengthRange]
) -> list[list[list[float]]] | None:
    """Return the random numbers of all samples; None if nothing is sampled."""
    if config.method != "sampling":
        return None
    if not isinstance(rng, Rng):
        raise ConfigError(f"the config samples and rng is {rng!r}; expected an Rng, e.g. rng=Rng(0)")
    return uniform_streams(rng, indices, config.num_return_sequences, [limits.maximum + 1 for limits in ranges])


def uniform_streams(rng: Rng, indices: Sequence[int], samples: int, lengths: Sequence[int]) -> list[list[list[float]]]:
    """Return uniform numbers in [0, 1) by input, sample and position.

    Args:
        rng: Source of all streams.
        indices: Index of each input; an index has the same stream in any batch and for any length.
        samples: Samples per input.
        lengths: Numbers needed for each input.
    """
    return [
        [rng.fold_in("input", index, "sample", sample).uniform((length,)).tolist() for sample in range(samples)]
        for index, length in zip(indices, lengths, strict=True)
    ]


def _check_indices(indices: Sequence[int] | None, num_inputs: int) -> Sequence[int]:
    if indices is None:
        return range(num_inputs)
    check_one_each("indices", indices, num_inputs)
    return integers("indices", indices)


def _check_prompts(inputs: Any, vocab_size: int, pad_id: int | None) -> list[list[int]]:
    """Return the ids of each prompt; arrays with padding, which need a mask, are refused."""
    shape: tuple[int, ...] = getattr(inputs, "shape", ())
    if not hasattr(inputs, "__len__") or isinstance(inputs, str):
        raise DataError(f"inputs is {inputs!r}; expected a list of prompts, each a list of token ids")
    if len(shape) == 2 and shape[0] > 1 and pad_id is not None:
        ends = to_host(inputs)[:, [0, -1]] if shape[1] else ()
        if pad_id in ends:
            received = f"inputs is an array with pad_id {pad_id} at the start or end of a row"
            raise DataError(f"{received}; expected lists of ids without padding, or the array and its attention_mask")
    return [_check_prompt(prompt, number, vocab_size) for number, prompt in enumerate(inputs, start=1)]


def _check_prompt(prompt: Sequence[int], number: int, vocab_size: int) -> list[int]:
    if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
        raise DataError(f"prompt {number} is {prompt!r}; expected a list of token ids: inputs are a list of prompts")
    tokens = check_tokens(f"prompt {number}", prompt, vocab_size)
    if not tokens:
        raise DataError(f"prompt {number} is empty; expected at least one token, e.g. bos_id")
    return tokens


def _check_prefixes(
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


def _check_vocabulary(config: GenerationConfig, suppressed: frozenset[int], vocab_size: int) -> None:
    """Raise DataError for ids outside the vocabulary, and ConfigError if no token is left."""
    suppressed = suppressed.union(config.suppress_tokens)
    if suppressed and max(suppressed) >= vocab_size:
        raise DataError(f"suppress_tokens has token id {max(suppressed)}; expected 0 to {vocab_size - 1}")
    if len(suppressed) >= vocab_size:
        raise ConfigError(f"suppress_tokens excludes all {vocab_size} tokens; expected at least one other token")
    others = *config.begin_suppress_tokens, *config.stop_token_ids, *(config.logit_bias or ())
    if extra := [each for each in others if each >= vocab_size]:
        raise DataError(f"token id {extra[0]} is suppressed, biased or ends outputs; expected 0 to {vocab_size - 1}")


def _check_drafts(model: Any, config: GenerationConfig, draft_model: Any) -> None:
    """Raise ConfigError for draft tokens that the model or the search cannot take."""
    num_lookup, num_draft = config.prompt_lookup_num_tokens, config.num_draft_tokens
    if draft_model is None and num_draft is not None:
        raise ConfigError(f"num_draft_tokens is {num_draft} and no draft_model is used; expected both, or neither")
    if (draft_model is not None or num_lookup is not None) and not hasattr(model, "to_static"):
        expected = "a model that has it, or neither prompt_lookup_num_tokens nor draft_model"
        raise ConfigError(f"{type(model).__name__} has no to_static(cache, max_length); expected {expected}")
    if draft_model is not None:
        config.check_assisted("draft_model")
        if num_lookup is not None:
            raise ConfigError("prompt_lookup_num_tokens and draft_model are both given; expected one of them")
        check_draft_model(draft_model, model)


def check_draft_model(draft_model: Any, model: Any) -> None:
    """Raise ConfigError unless both are language models with vocabularies of the same size."""
    if not isinstance(model, LanguageModel) or not isinstance(draft_model, LanguageModel):
        received = f"the model is {describe_type(model)} and draft_model {describe_type(draft_model)}"
        raise ConfigError(f"{received}; expected language models")
    if draft_model.vocab_size != model.vocab_size:
        received = f"draft_model has {draft_model.vocab_size} tokens and the model {model.vocab_size}"
        raise ConfigError(f"{received}; expected the same vocabulary")
