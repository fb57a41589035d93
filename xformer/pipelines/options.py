"""Arguments of pipelines, declared once: the command line and the HTTP API derive their options from these fields."""

from __future__ import annotations

from xformer.config import Config, option
from xformer.generation.config import MAX_TARGET_LENGTH


class SearchOptions(Config):
    """Arguments of the pipelines that generate text, in addition to the fields of `GenerationConfig`."""

    prefix: str | None = option("Text that every output begins with.", default=None, panel="Steering")
    sequence_bias: tuple[str, ...] = option("Word or phrase to favor; repeatable.", default=())
    stop: tuple[str, ...] = option("Stop string: a text ends before the first of them; repeatable.", default=())
    context: str = option(
        "What to do with texts longer than the context of the model.", default="error", choices=("error", "slide")
    )
    seed: int = option("Seed; the same seed gives the same samples.", default=0, panel="Sampling")
    target_length: int | None = option(
        "Length of the outputs; uses 4 beams unless num_beams is given.",
        default=None,
        within=(1, MAX_TARGET_LENGTH),
        panel="Length of the output",
    )
    length_unit: str = option("Unit of --target-length.", default="tokens", choices=("tokens", "words"))
    batch_tokens: int = option(
        "Maximum tokens of a batch, with padding; more takes more memory.",
        default=4096,
        at_least=1,
        panel="Computing",
    )
