"""`generate` and `stream`: from model inputs to outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xformer.config import contradiction, with_parameters_of
from xformer.generation.batch import GenerationBatch
from xformer.generation.beams import beam_search
from xformer.generation.config import GenerationConfig
from xformer.generation.engine import Search, Task, run_steps, run_task
from xformer.generation.processors import Rows
from xformer.generation.results import Hypothesis
from xformer.generation.sampling import assisted_search, greedy_or_sample


@with_parameters_of(GenerationBatch)
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
    return run_task(search(GenerationBatch(model, inputs, config, **overrides)))


@with_parameters_of(GenerationBatch)
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
    batch = GenerationBatch(model, inputs, config, **options)
    if batch.config.method == "beam" or batch.config.num_return_sequences > 1:
        expected = "1 of each: only a single output per input can be streamed"
        raise contradiction(batch.config, "num_beams num_return_sequences", expected)
    return _stream(batch)


def searches_of(batch: GenerationBatch) -> list[Search]:
    """Return the searches that the config selects: one, or with draft tokens one for each input."""
    if batch.num_draft_tokens:  # inputs accept different numbers of draft tokens
        return [Search(batch.of(index), assisted_search) for index in batch.inputs]
    algorithm = beam_search if batch.config.method == "beam" else greedy_or_sample
    return [Search(batch, algorithm)] if batch.inputs else []


def search(batch: GenerationBatch) -> Task[list[list[Hypothesis]]]:
    """Run the searches of a batch."""
    searches = searches_of(batch)
    yield searches
    return [hypotheses for each in searches for hypotheses in each.result() or ()]


def _stream(batch: GenerationBatch) -> Iterator[list[list[int]]]:
    """Yield the tokens of each step, which a stopping criterion sees."""
    starts = batch.lengths.prompt_lengths or [0] * len(batch.inputs)
    new = [prefix[start:] for prefix, start in zip(batch.prefixes, starts, strict=True)]

    def observe(like: Any, rows: Rows) -> list[bool]:
        for index, token in zip(rows.inputs.tolist(), rows.tokens[:, -1].tolist(), strict=True):
            new[index].append(token)
        return [False] * len(rows.inputs)

    batch.stopping_criteria.append(observe)
    for _ in run_steps(search(batch)) if batch.inputs else ():
        yield new[:]
        new[:] = [[] for _ in new]
