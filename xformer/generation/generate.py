"""`generate` and `stream`: from model inputs to outputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, device, from_host, to_host
from xformer.config import integers, with_parameters_of
from xformer.errors import ConfigError, DataError, ShapeError, describe_type
from xformer.generation.assisted import Drafter, DraftModel, PromptLookup, assisted_search, check_draft_model
from xformer.generation.batch import GenerationBatch, Sources, check_prefixes
from xformer.generation.beams import BeamHistory, beam_search
from xformer.generation.config import (
    GenerationConfig,
    LengthLimits,
    LengthRange,
    length_ranges,
    target_ranges,
    unit_limits,
)
from xformer.generation.engine import Search, Task, run_steps, run_task
from xformer.generation.prefix_cache import PrefixCache
from xformer.generation.processors import (
    LogitsProcessor,
    Phrase,
    StoppingCriteria,
    build_logits_processors,
    check_function,
    check_sequence_bias,
)
from xformer.generation.results import CoveragePenalty, Hypothesis
from xformer.generation.sampling import extend_samples, greedy_or_sample, start_samples, uniform_streams
from xformer.models import LanguageModel, SpeechTransformer, Transformer
from xformer.models.token_ids import check_one_each, check_tokens, ids_of, pad
from xformer.random import Rng


def make_batch(
    model: Transformer | LanguageModel,
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
) -> GenerationBatch:
    """Check the arguments of `generate` and return them as a batch."""
    config = GenerationConfig.resolve(config, overrides)
    model_config = getattr(model, "config", None)
    if model_config is None or not hasattr(model, "decode_step"):
        raise ConfigError(f"model is {describe_type(model)}; expected a Transformer or LanguageModel")
    if prefix_cache is not None and not isinstance(prefix_cache, PrefixCache):
        raise ConfigError(f"prefix_cache is {prefix_cache!r:.100}; expected a PrefixCache")
    for processor in logits_processors:
        check_function(processor, "logits processor", "tokens", "lengths", "logits")
    for criterion in stopping_criteria:
        check_function(criterion, "stopping criterion", "tokens", "lengths")
    if attention_mask is not None:
        inputs = _without_padding(inputs, attention_mask)
    coverage_penalties = None
    if isinstance(model, Transformer):
        source, source_mask = _source_ids(model, inputs)
        indices = _check_indices(indices, source.shape[0])
        lengths = _source_limits(model, source, source_mask.get("source_mask"), config, target_lengths, length_fn)
        length_condition = target_lengths if length_condition is None else length_condition
        conditions = _length_conditions(model, length_condition, len(indices))
        prefixes = check_prefixes(prefix, lengths, model, indices)
        start, eos_id, suppressed = [model_config.bos_id], model_config.eos_id, model_config.suppressed_ids
        sources = Sources(source, source_mask.get("source_mask"), conditions)
        if config.coverage_penalty:
            coverage_penalties = CoveragePenalty(model, source, config.coverage_penalty, conditions, **source_mask)
    else:
        options = {"prefix": prefix, "target_lengths": target_lengths, "length_condition": length_condition}
        for name in (name for name, value in options.items() if value is not None):
            raise ConfigError(f"{name} applies to encoder-decoders only; omit it for a language model")
        if config.coverage_penalty:
            raise ConfigError("coverage_penalty applies to encoder-decoders only; omit it for a language model")
        prefixes = _check_prompts(inputs, model.vocab_size, model_config.pad_id if special_tokens else None)
        if len(set(map(len, prefixes))) > 1 and not hasattr(model, "to_static"):
            raise ConfigError(
                f"prompts have different lengths and {type(model).__name__} has no to_static(cache, max_length); "
                "expected prompts of equal length"
            )
        indices = _check_indices(indices, len(prefixes))
        lengths = _prompt_limits(model, [len(prompt) for prompt in prefixes], config)
        sources, start, eos_id = None, [], model_config.eos_id if special_tokens else None
        suppressed = model_config.suppressed_ids if special_tokens else frozenset()

    end_ids = frozenset(config.stop_token_ids).union([] if eos_id is None else [eos_id])
    eos_id = min(end_ids, default=None) if eos_id is None else eos_id
    suppress_tokens = suppressed.union(config.suppress_tokens)
    if suppress_tokens and max(suppress_tokens) >= model.vocab_size:
        raise DataError(f"suppress_tokens has token id {max(suppress_tokens)}; expected 0 to {model.vocab_size - 1}")
    if len(suppress_tokens) >= model.vocab_size:
        raise ConfigError(f"suppress_tokens excludes all {model.vocab_size} tokens; expected at least one other token")
    others = *config.begin_suppress_tokens, *config.stop_token_ids, *(config.logit_bias or ())
    if extra := [each for each in others if each >= model.vocab_size]:
        raise DataError(
            f"token id {extra[0]} is suppressed, biased or ends outputs; expected 0 to {model.vocab_size - 1}"
        )
    return GenerationBatch(
        model=model,
        config=config,
        sources=sources,
        start=start,
        prefixes=prefixes,
        lengths=lengths,
        indices=indices,
        inputs=range(len(prefixes)),
        eos_id=eos_id,
        end_ids=end_ids,
        logits_processors=build_logits_processors(
            config,
            vocab_size=model.vocab_size,
            eos_id=eos_id,
            end_ids=end_ids,
            suppressed=suppressed,
            start=start,
            lengths=lengths,
            prefixes=prefixes,
            sequence_bias=check_sequence_bias(sequence_bias, len(prefixes), model.vocab_size),
            user_processors=logits_processors,
        ),
        stopping_criteria=stopping_criteria,
        uniforms=_uniforms(config, rng, indices, lengths.ranges),
        coverage_penalties=coverage_penalties,
        beam_history=beam_history,
        prefix_cache=prefix_cache,
        new_drafter=_new_drafter(model, config, draft_model),
    )


@with_parameters_of(make_batch)
def generate(
    model: Any, inputs: Any, config: GenerationConfig | None = None, **overrides: Any
) -> list[list[Hypothesis]]:
    """Generate outputs for a batch of inputs: `generate(model, source_ids, num_beams=5, length_penalty=1.0)`.

    The result for an input does not depend on the rest of the batch (up to rounding).

    Args:
        model: Encoder-decoder or language model.
        inputs: Encoder-decoder: source ids, an array (inputs, source length) padded with pad_id on either side, or
            lists of any lengths; for a `SpeechTransformer` frames (inputs, frames, features). Language model: prompts,
            lists of ids of any lengths, at least one token each, or an array with its attention_mask.
        config: Settings. Default: greedy search.
        logits_processors: Additional processors: functions (tokens, lengths, logits) -> logits, see `LogitsProcessor`.
            They run after those of the config.
        stopping_criteria: Functions (tokens, lengths) -> one bool per row; True ends it, see `StoppingCriteria`.
        rng: Source of samples; required if the config samples. A sample depends on the rng, the index of the input and
            the position, never on other inputs.
        prefix: Encoder-decoder: ids that each output begins with, one list per input.
        sequence_bias: Phrases to favor (config.sequence_bias_strength), one list per input. A phrase is a list of
            alternative tokenizations, each a list of ids.
        target_lengths: Encoder-decoder: length of each output, eos excluded. Outputs end within
            config.length_tolerance of it, by the method fixRng of Kikuchi et al. (2016). Use at least two beams:
            greedy search and sampling may truncate at the upper bound.
        length_fn: Function of token ids that measures target_lengths in another unit, e.g. words. One token more may
            add at most one unit. Default: tokens.
        length_condition: Length that a model with a length encoding (Takase and Okazaki, 2019) is conditioned on, in
            tokens, eos excluded. Default: target_lengths.
        special_tokens: Language model: False if pad_id, bos_id and eos_id are ordinary tokens, as in a plain character
            model. Every output then has the maximum length.
        attention_mask: 1 for tokens and 0 for padding on either side, the shape of inputs, as in Hugging Face.
        indices: Index of each input in a longer list, which selects its random stream and numbers it in errors.
            Default: 0, 1, ...
        beam_history: Receives the candidates of each step of a beam search, see `BeamHistory`.
        prefix_cache: Language model: keys and values of earlier prompts, see `PrefixCache`.
        draft_model: Language model: a smaller one with the same vocabulary, which proposes
            config.num_draft_tokens tokens at a time (Leviathan et al., 2023). Outputs stay the same.
        **overrides: Fields of `GenerationConfig` that replace those of the config.

    Returns:
        For each input up to config.num_return_sequences hypotheses, best first. Truncated hypotheses (finished is
        False) are only returned if none finished.

    Raises:
        ConfigError: For invalid or contradictory settings.
        DataError: For invalid ids.
    """
    return run_task(search(make_batch(model, inputs, config, **overrides)))


@with_parameters_of(make_batch)
def stream(
    model: Any, inputs: Any, config: GenerationConfig | None = None, **options: Any
) -> Iterator[list[list[int]]]:
    """Generate token by token, by greedy search or sampling; one output per input.

    Args:
        model: Encoder-decoder or language model.
        inputs: As for `generate`.
        config: Settings. Default: greedy search.
        **options: Other arguments of `generate`, and fields of `GenerationConfig`.

    Yields:
        The new token ids of each input: usually one; none once the output has ended; several at first for a forced
        prefix. Concatenated they are the tokens that `generate` returns.

    Raises:
        ConfigError: For beam search or several outputs per input, and as `generate`.
        DataError: For invalid ids.
    """
    batch = make_batch(model, inputs, config, **options)
    if batch.config.method == "beam" or batch.config.num_return_sequences > 1:
        raise ConfigError(
            f"num_beams is {batch.config.num_beams} and num_return_sequences {batch.config.num_return_sequences}; "
            "expected 1 of each: only a single output per input can be streamed"
        )
    return _stream(batch)


def searches_of(batch: GenerationBatch, algorithm: Callable[..., Any] = greedy_or_sample) -> list[Search]:
    """Return the searches that the config selects: one, or with draft tokens one for each input.

    Args:
        batch: Inputs.
        algorithm: Greedy search or sampling.
    """
    if batch.new_drafter is not None:  # inputs accept different numbers of draft tokens
        assisted = functools.partial(assisted_search, search=algorithm)
        return [Search(batch.of(index), assisted) for index in batch.inputs]
    return [Search(batch, beam_search if batch.config.method == "beam" else algorithm)] if batch.num_inputs else []


def search(batch: GenerationBatch, algorithm: Callable[..., Any] = greedy_or_sample) -> Task[list[list[Hypothesis]]]:
    """Run the searches of a batch; arguments are those of `searches_of`."""
    searches = searches_of(batch, algorithm)
    yield searches
    return [hypotheses for each in searches for hypotheses in each.result or ()]


def _stream(batch: GenerationBatch) -> Iterator[list[list[int]]]:
    if not batch.num_inputs:
        return
    samples = start_samples(batch)
    num_yielded = batch.lengths.prompt_lengths or [0] * batch.num_inputs
    for _ in run_steps(search(batch, functools.partial(extend_samples, samples))):
        new = [sample.tokens[start:] for (sample,), start in zip(samples, num_yielded, strict=True)]
        num_yielded = [start + len(tokens) for start, tokens in zip(num_yielded, new, strict=True)]
        yield new


def _source_ids(model: Transformer, inputs: Any) -> tuple[Array, dict[str, Array]]:
    """Return checked source ids (inputs, source length), and a mask if lists of ids of ambiguous padding are padded."""
    if isinstance(model, SpeechTransformer):
        return model.source_ids(inputs), {}
    is_list = isinstance(inputs, list | tuple) and all(isinstance(row, list | tuple) for row in inputs)
    source = ids_of(model.source_ids(pad(inputs, model.config.pad_id) if is_list and inputs else inputs))
    if not is_list or model.config.source_padding_id is not None or len(set(map(len, inputs))) < 2:
        return source, {}
    is_token = pad([[1] * len(row) for row in inputs], 0)
    mask = from_host(array_namespace(source), is_token, device=device(source)) == 1
    return source, {"source_mask": mask[:, None, None, :]}


def _without_padding(inputs: Any, attention_mask: Any) -> list[list[int]]:
    """Return the rows of an array of ids without padding."""
    rows, kept = (np.asarray(to_host(x) if hasattr(x, "shape") else from_host(np, x)) for x in (inputs, attention_mask))
    if rows.ndim != 2 or rows.shape != kept.shape:
        raise ShapeError(f"attention_mask has shape {kept.shape}; expected that of ids (inputs, length), {rows.shape}")
    return [row[mask != 0].tolist() for row, mask in zip(rows, kept, strict=True)]


def _source_limits(
    model: Transformer,
    source: Array,
    source_mask: Array | None,
    config: GenerationConfig,
    target_lengths: Sequence[int] | None,
    length_fn: Callable[[Sequence[int]], int] | None,
) -> LengthLimits:
    if len(source.shape) == 3:  # frames of audio
        source_lengths = [source.shape[1]] * source.shape[0]
    else:
        special = [each for each in (model.config.pad_id, model.config.eos_id) if each is not None]
        is_token = ~np.isin(to_host(source), special)
        is_token &= True if source_mask is None else to_host(source_mask)[:, 0, 0, :]
        source_lengths = is_token.sum(axis=1).tolist()
    if target_lengths is None:
        limits = LengthLimits(length_ranges(config, source_lengths))
    else:
        ranges = target_ranges(config, target_lengths, len(source_lengths))
        limits = LengthLimits(ranges, near_targets=True)
        if length_fn is not None:
            limits = unit_limits(ranges, length_fn, source_lengths)
    return dataclasses.replace(limits, ranges=_within_positions(model, limits.ranges))


def _prompt_limits(model: LanguageModel, sizes: list[int], config: GenerationConfig) -> LengthLimits:
    ranges = [
        LengthRange(size + minimum, size + maximum)
        for size, (minimum, maximum) in zip(sizes, length_ranges(config, sizes), strict=True)
    ]
    return LengthLimits(_within_positions(model, ranges, sizes), prompt_lengths=sizes)


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


def _new_drafter(
    model: Any, config: GenerationConfig, draft_model: LanguageModel | None
) -> Callable[[], Drafter] | None:
    """Return a function that makes the drafter of an output; None without one."""
    num_lookup, num_draft = config.prompt_lookup_num_tokens, config.num_draft_tokens
    if draft_model is None and num_draft is not None:
        raise ConfigError(f"num_draft_tokens is {num_draft} and no draft_model is used; expected both, or neither")
    if draft_model is None and num_lookup is None:
        return None
    if not hasattr(model, "to_static"):
        raise ConfigError(
            f"{type(model).__name__} has no to_static(cache, max_length); expected a model that has it, or neither "
            "prompt_lookup_num_tokens nor draft_model"
        )
    if draft_model is None:
        return functools.partial(PromptLookup, config.draft_length, config.max_matching_ngram_size)
    config.check_assisted("draft_model")
    if num_lookup is not None:
        raise ConfigError("prompt_lookup_num_tokens and draft_model are both given; expected one of them")
    check_draft_model(draft_model, model)
    return functools.partial(DraftModel, draft_model, config.draft_length)


def _check_indices(indices: Sequence[int] | None, num_inputs: int) -> Sequence[int]:
    if indices is None:
        return range(num_inputs)
    check_one_each("indices", indices, num_inputs)
    return integers("indices", indices)


def _within_positions(
    model: Transformer | LanguageModel, ranges: list[LengthRange], prompt_lengths: Sequence[int] = ()
) -> list[LengthRange]:
    """Limit ranges to the learned positions; raise ConfigError if a minimum exceeds them or a prompt fills them."""
    if model.config.positions != "learned":
        return ranges
    maximum = model.config.max_positions - int(isinstance(model, Transformer))  # the start takes one
    for number, size in enumerate(prompt_lengths, start=1):
        if size >= maximum:
            raise ConfigError(
                f"prompt {number} has {size} tokens; expected at most {maximum - 1}: this model has learned positions "
                f"for {maximum}"
            )
    longest = max((limits.minimum for limits in ranges), default=0)
    if longest > maximum:
        raise ConfigError(
            f"the output needs {longest} tokens, prompt included; this model has learned positions for {maximum}: "
            "lower the minimum length or shorten the prompt"
        )
    return [LengthRange(limits.minimum, min(limits.maximum, maximum)) for limits in ranges]


def _check_prompts(inputs: Any, vocab_size: int, pad_id: int | None) -> list[list[int]]:
    """Return the ids of each prompt; arrays with padding, which need a mask, are refused."""
    shape: tuple[int, ...] = getattr(inputs, "shape", ())
    if not hasattr(inputs, "__len__") or isinstance(inputs, str):
        raise DataError(f"inputs is {inputs!r}; expected a list of prompts, each a list of token ids")
    if len(shape) == 2 and shape[0] > 1 and pad_id is not None:
        ends = to_host(inputs)[:, [0, -1]] if shape[1] else ()
        if pad_id in ends:
            raise DataError(
                f"inputs is an array with pad_id {pad_id} at the start or end of a row; expected lists of ids without "
                "padding, or the array and its attention_mask"
            )
    return [_check_prompt(prompt, number, vocab_size) for number, prompt in enumerate(inputs, start=1)]


def _check_prompt(prompt: Sequence[int], number: int, vocab_size: int) -> list[int]:
    if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
        raise DataError(f"prompt {number} is {prompt!r}; expected a list of token ids: inputs are a list of prompts")
    tokens = check_tokens(f"prompt {number}", prompt, vocab_size)
    if not tokens:
        raise DataError(f"prompt {number} is empty; expected at least one token, e.g. bos_id")
    return tokens
