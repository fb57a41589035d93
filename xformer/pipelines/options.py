"""Arguments of pipelines, declared once: the command line and the HTTP API derive their options from these fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xformer.config import Config, option
from xformer.generation import BeamHistory, LogitsProcessor, StoppingCriteria
from xformer.generation.config import MAX_TARGET_LENGTH
from xformer.tokenizers.base import Messages


class SearchOptions(Config):
    """Arguments of the pipelines that generate text, in addition to the fields of `GenerationConfig`.

    Args:
        prefix: Text that every output begins with.
        sequence_bias: Word or phrase to favor; repeatable.
        stop: Stop string: a text ends before the first of them; repeatable.
        context: What to do with texts longer than the context of the model.
        seed: Seed; the same seed gives the same samples.
        target_length: Length of the outputs; uses 4 beams unless num_beams is given.
        length_unit: Unit of --target-length.
        batch_tokens: Maximum tokens of a batch, with padding; more takes more memory.
    """

    prefix: str | None = option(default=None, panel="Steering")
    sequence_bias: tuple[str, ...] = option(default=())
    stop: tuple[str, ...] = option(default=())
    context: str = option(default="error", choices=("error", "slide"))
    seed: int = option(default=0, panel="Sampling")
    target_length: int | None = option(default=None, within=(1, MAX_TARGET_LENGTH), panel="Length of the output")
    length_unit: str = option(default="tokens", choices=("tokens", "words"))
    batch_tokens: int = option(default=4096, at_least=1, panel="Computing")


class SearchArguments(Config):
    """Arguments of all pipelines that generate text, in addition to the fields of `GenerationConfig`.

    Args:
        sequence_bias: Words and phrases to favor: a list for all texts, or a list for each.
        stop: Stop strings: a text ends before the first of them.
        logprobs: Return the log-probabilities of tokens and of as many alternatives to each; default: none.
        logits_processors: Additional processors, see `generation.generate`.
        stopping_criteria: Additional stopping criteria, see `generation.generate`.
        beam_history: Receives the candidates of each step of a beam search, see `generation.BeamHistory`.
        first_index: Index of the first text if the texts are part of a longer list; samples depend on it.
        on_text: Function of the index of a text, the new part of its output, and its tokens if they are recorded; the
            parts of the best output are passed once they are complete. Requires one output for each text.
    """

    sequence_bias: Sequence[str] | Sequence[Sequence[str]] | None = option(default=None)
    stop: str | Sequence[str] | None = option(default=None)
    logprobs: int | None = option(default=None, at_least=0)
    logits_processors: Sequence[LogitsProcessor] = option(default=())
    stopping_criteria: Sequence[StoppingCriteria] = option(default=())
    beam_history: BeamHistory | None = option(default=None)
    first_index: int = option(default=0)
    on_text: Callable[[int, str, list[Any]], None] | None = option(default=None)


class SourceArguments(SearchArguments):
    """Arguments of `TextToText.tasks`, in addition to the fields of `GenerationConfig`.

    Args:
        prefix: Text that outputs begin with: one for all, or one each, as a text or as token ids.
        target_length: Length of outputs: one for all, or one each. Outputs keep to it within length_tolerance, or as
            close as the model can; greedy search becomes a beam search with 4 beams.
        length_unit: Unit of target_length.
        align: Also return alignments.
        max_source_length: Maximum tokens of a source; default 1024 in calls.
    """

    prefix: str | Sequence[str] | Sequence[Sequence[int]] | None = option(default=None)
    target_length: int | Sequence[int] | None = option(default=None)
    length_unit: str = option(default="tokens", choices=("tokens", "words"))
    align: bool = option(default=False)
    max_source_length: int | None = option(default=None, at_least=1)


class PromptArguments(SearchArguments):
    """Arguments of `TextGenerator.tasks`, in addition to the fields of `GenerationConfig`.

    Args:
        tools: Functions that a chat may call, in the format of OpenAI; see `parse_tool_calls`.
        context: Treatment of texts that are longer than the context of the model. With "error", a prompt that does not
            fit together with max_new_tokens is refused, and default_max_length is lowered to what fits. With "slide",
            the first half is dropped when the context is full; not for beam search.
        batch_tokens: Maximum tokens of a batch; default 4096 in calls, which on NumPy run one batch on each core.
    """

    tools: Messages | None = option(default=None)
    context: str = option(default="error", choices=("error", "slide"))
    batch_tokens: int | None = option(default=None, at_least=1)


class SpeechOptions(Config):
    """Arguments of `Transcriber.__call__`, in addition to the fields of `GenerationConfig`.

    Args:
        language: Code of the spoken language, e.g. de; default: the one that the model detects in the first 30 seconds
            of each audio.
        task: Write the spoken language, or translate to English.
        timestamps: Times of segments, or of words too; default: none in texts, those of segments in other formats.
        temperature: Temperature of sampling, 0 for the most probable tokens; repeatable: the next one is used for
            windows with speech whose output repeats itself or is improbable. Default: that of the model's settings.
        compression_ratio_threshold: Largest factor by which zlib shrinks the tokens of an output, as in transformers;
            repetitions have a larger one. None for any.
        logprob_threshold: Least mean log-probability of the tokens of an output; None for any.
        no_speech_threshold: Largest probability that nobody speaks. A window with a larger one, whose output fails
            logprob_threshold, has no text. None for any.
        batch_size: Windows of 30 seconds that are transcribed at a time, with timestamps one of each audio. On NumPy
            each core runs one batch.
    """

    language: str | None = option(default=None, panel="Speech")
    task: str = option(default="transcribe", choices=("transcribe", "translate"))
    timestamps: str | None = option(default=None, choices=("segments", "words"))
    temperature: tuple[float, ...] | None = option(default=None)
    compression_ratio_threshold: float | None = option(default=1.35)
    logprob_threshold: float | None = option(default=-1.0)
    no_speech_threshold: float | None = option(default=0.6)
    batch_size: int = option(default=8, at_least=1)
