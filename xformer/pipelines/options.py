"""Arguments of pipelines, declared once: the command line and the HTTP API derive their options from these fields."""

from __future__ import annotations

from xformer.config import Config, option
from xformer.generation.config import MAX_TARGET_LENGTH


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


class SpeechOptions(Config):
    """Arguments of `Transcriber.__call__`, in addition to the fields of `GenerationConfig`.

    Args:
        language: Code of the spoken language, e.g. de; default: the one that the model detects in the first 30 seconds
            of each audio.
        task: Write the spoken language, or translate to English.
        timestamps: Return a `Transcription` with the times of segments, or of words too.
        temperature: Temperature of sampling, 0 for the most probable tokens. Repeat it, as in (0.0, 0.4, 0.8): the next
            one is used for windows with speech whose output fails a threshold.
        compression_ratio_threshold: Largest factor by which zlib shrinks the tokens of an output, as in transformers;
            repetitions have a larger one.
        logprob_threshold: Least mean log-probability of the tokens of an output.
        no_speech_threshold: Largest probability that nobody speaks. A window with a larger one, whose output fails
            logprob_threshold, has no text.
        batch_size: Windows of 30 seconds that are transcribed at a time, with timestamps one of each audio. On NumPy
            each core runs one batch.
        seed: Seed of sampling.
    """

    language: str | None = option(default=None, panel="Speech")
    task: str = option(default="transcribe", choices=("transcribe", "translate"))
    timestamps: str | None = option(default=None, choices=("segments", "words"))
    temperature: tuple[float, ...] | None = option(default=None)
    compression_ratio_threshold: float | None = option(default=1.35)
    logprob_threshold: float | None = option(default=-1.0)
    no_speech_threshold: float | None = option(default=0.6)
    batch_size: int = option(default=8, at_least=1)
    seed: int = option(default=0)
