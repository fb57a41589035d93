"""The entrance: sentences and options in, hypotheses out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xformer.backends import Array, backend_of, to_host
from xformer.errors import ConfigError, DataError
from xformer.generation.beam import search_beams
from xformer.generation.config import DecodingOptions
from xformer.generation.greedy_sampling import search_stepwise
from xformer.generation.hypothesis import Hypothesis
from xformer.generation.lengths import LengthRange, MeasuredLengths, desired_ranges, length_ranges
from xformer.generation.sampling import uniform_streams
from xformer.generation.static_greedy import can_be_fixed, search_fixed
from xformer.generation.task import DecodingTask, check_prefixes
from xformer.generation.topic import Phrase, topic_foci
from xformer.models import LanguageModel, Transformer
from xformer.models.token_ids import ids_of
from xformer.random import Rng


def decode(
    model: Transformer,
    source: Any,
    options: DecodingOptions | None = None,
    *,
    rng: Rng | None = None,
    sentence_numbers: Sequence[int] | None = None,
    prefix: Sequence[Sequence[int]] | None = None,
    topics: Sequence[Sequence[Phrase]] | None = None,
    desired_lengths: Sequence[int] | None = None,
    length_of: Callable[[Sequence[int]], int] | None = None,
    told_lengths: Sequence[int] | None = None,
    never: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """Find the best outputs of a batch of sentences: of each, the n best hypotheses, best first.

    source: ids (sentences, source length), padded with pad_id on either side
    options: default greedy search
    rng: for sampling; what is drawn depends on the key, the number of the sentence and the position, never on the other
    sentences
    sentence_numbers: counted from 0 (default: the places in the batch); errors name a prefix by them, counted from 1
    prefix: ids that each output begins with, one list a sentence
    topics: phrases to favor, one list a sentence; a phrase is a list of alternative tokenizations
    desired_lengths: of each output, eos not counted: outputs end within options.length_tolerance of them, by the range
    method fixRng of Kikuchi et al. (2016). That takes a beam of at least two; greedy search and sampling may be cut at
    the upper bound
    length_of: what desired_lengths count, as a function of token ids, such as the words that they spell (default: the
    tokens); a token more is at most one more
    told_lengths: what a model with a length encoding (Takase and Okazaki, 2019) is told, in tokens without eos
    (default: desired_lengths)
    never: ids that no output has, beside pad_id and bos_id

    Hypotheses that did not end by the limit are returned only when none ended, with finished False. Fewer than num_return_sequences
    come back when the search ends with fewer. The result does not depend on the batch (up to rounding).

    Raises ConfigError for what contradicts each other, DataError for bad ids, and what the model raises.
    """
    options = DecodingOptions() if options is None else options
    source = ids_of(model.source_ids(source))
    numbers = _numbers(sentence_numbers, source.shape[0])
    measured = None
    if desired_lengths is None:
        ranges = length_ranges(options, source_lengths(model, source))
    else:
        ranges = desired_ranges(options, desired_lengths, source.shape[0])
        if length_of is not None:
            measured = MeasuredLengths(length_of, ranges)
            ranges = measured.token_ranges(source_lengths(model, source))
    ranges = _within_positions(model, ranges)
    lengths = None
    if model.config.length_encoding:
        told = desired_lengths if told_lengths is None else told_lengths
        if told is None:
            raise ConfigError("this model has a length encoding; expected desired_lengths, one for each sentence")
        lengths = [length + 1 for length in told]
    return search(
        DecodingTask(
            model=model,
            options=options,
            begin=lambda: model.prefill(source, lengths=lengths),
            first=[model.config.bos_id],
            prefixes=check_prefixes(prefix, ranges, model, numbers, measured),
            ranges=ranges,
            measured=measured,
            never=model.config.suppressed_ids | frozenset(never),
            eos_id=model.config.eos_id,
            foci=topic_foci(topics, len(ranges), model.vocab_size),
            end_anywhere=desired_lengths is not None,
            uniforms=streams(options, rng, numbers, ranges),
            source=source,
            lengths=lengths,
        )
    )


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    options: DecodingOptions | None = None,
    *,
    rng: Rng | None = None,
    prompt_numbers: Sequence[int] | None = None,
    topics: Sequence[Sequence[Phrase]] | None = None,
    special_tokens: bool = True,
) -> list[list[Hypothesis]]:
    """Continue prompts with a language model: of each, the n best continuations, best first, without the prompt.

    prompts: ids, lists of any lengths, at least one token each; begin them with bos_id where the model was trained so.
    special_tokens: False where pad_id, bos_id and eos_id are ordinary tokens, as in a plain character model; then
    every continuation has the most tokens allowed. Lengths count the continuation; in ratios and in the default limit
    the prompt is the source. n-grams and repetitions count the prompt too. Other arguments are those of `decode`.

    Raises ConfigError for what contradicts each other, DataError for bad ids.
    """
    options = DecodingOptions() if options is None else options
    given = [_check_prompt(prompt, number, model.vocab_size) for number, prompt in enumerate(prompts, start=1)]
    sizes = [len(prompt) for prompt in given]
    ranges = [
        LengthRange(size + minimum, size + maximum)
        for size, (minimum, maximum) in zip(sizes, length_ranges(options, sizes), strict=True)
    ]
    ranges = _within_positions(model, ranges)
    config = model.config
    return search(
        DecodingTask(
            model=model,
            options=options,
            begin=lambda: model.init_cache(len(given)),
            first=[],
            prefixes=given,
            ranges=ranges,
            never=config.suppressed_ids if special_tokens else frozenset(),
            eos_id=config.eos_id if special_tokens else None,
            foci=topic_foci(topics, len(ranges), model.vocab_size),
            uniforms=streams(options, rng, _numbers(prompt_numbers, len(given)), ranges),
            uncounted=sizes,
        )
    )


def search(task: DecodingTask) -> list[list[Hypothesis]]:
    """Run the search that the options ask for."""
    if not task.sentences:
        return []
    if task.options.coverage_penalty and task.source is None:
        raise ConfigError("coverage_penalty needs a source to cover; leave it out for a language model")
    if task.options.method == "beam":
        return search_beams(task)
    record = backend_of(task.xp).graph_capture()
    return search_fixed(task, record) if record and can_be_fixed(task) else search_stepwise(task)


def source_lengths(model: Transformer, source: Array) -> list[int]:
    """Tokens of each sentence, padding and eos not counted."""
    special = (model.config.pad_id, model.config.eos_id)
    return [sum(token not in special for token in row) for row in to_host(source).tolist()]


def streams(
    options: DecodingOptions, rng: Rng | None, numbers: Sequence[int], ranges: Sequence[LengthRange]
) -> list[list[list[float]]] | None:
    """The random numbers of all sentences, or None where nothing is drawn.

    Raises ConfigError for sampling without an rng.
    """
    if options.method != "sampling":
        return None
    if rng is None:
        raise ConfigError("sampling was asked for and rng is None; expected a seed, e.g. rng=Rng(0)")
    return uniform_streams(rng, numbers, options.num_return_sequences, [limits.maximum + 1 for limits in ranges])


def _numbers(given: Sequence[int] | None, sentences: int) -> Sequence[int]:
    """The number of each sentence; raises ConfigError for other than one each."""
    if given is None:
        return range(sentences)
    if len(given) != sentences:
        raise ConfigError(f"got {len(given)} sentence numbers for {sentences} sentences; expected one each")
    return given


def _within_positions(model: Transformer | LanguageModel, ranges: list[LengthRange]) -> list[LengthRange]:
    """No range goes beyond the positions that a model has learned; ConfigError where one begins beyond them."""
    if model.config.positions != "learned":
        return ranges
    most = model.config.max_positions - 1
    longest = max((limits.minimum for limits in ranges), default=0)
    if longest > most:
        raise ConfigError(
            f"{longest} tokens are wanted, a prompt included; this model has learned positions for {most}: "
            "ask for fewer, or shorten the prompt"
        )
    return [LengthRange(limits.minimum, min(limits.maximum, most)) for limits in ranges]


def _check_prompt(prompt: Sequence[int], number: int, vocab_size: int) -> list[int]:
    if not prompt:
        raise DataError(f"prompt {number} is empty; expected at least one token, e.g. bos_id")
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise DataError(f"prompt {number} has the token id {token}; expected 0 to {vocab_size - 1}")
    return [int(token) for token in prompt]
