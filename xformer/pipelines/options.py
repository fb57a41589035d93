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
