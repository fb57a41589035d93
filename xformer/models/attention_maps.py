"""Attention weights of all layers of a model, for inspection."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from xformer.backends import Array
from xformer.errors import ConfigError, describe_type
from xformer.models.base import BaseModel
from xformer.models.encoder import Encoder
from xformer.models.language_model import LanguageModel
from xformer.models.transformer import Transformer
from xformer.tracing.activations import record


def attention_maps(model: BaseModel, *inputs: Any, **options: Any) -> dict[str, list[Array]]:
    """Call a model and return the attention weights of all its layers.

    Args:
        model: Encoder-decoder, language model or encoder.
        *inputs: Arguments of the model: ids (batch, length), for an encoder-decoder those of source and target.
        **options: Further arguments of the model.

    Returns:
        Weights by part: "encoder" and "decoder" (self-attention) and "cross". Each is a list with one array
        (batch, heads, queries, keys) per layer. A language model has "decoder" only, an encoder "encoder" only.

    Raises:
        ConfigError: For a model of another class.

    Examples:
        >>> from xformer.models import LanguageModelConfig
        >>> config = LanguageModelConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=16, num_layers=3)
        >>> maps = attention_maps(LanguageModel(config), [[5, 4, 7]])
        >>> print(*(weights.shape for weights in maps["decoder"]))
        (1, 2, 3, 3) (1, 2, 3, 3) (1, 2, 3, 3)
    """
    parts = {"encoder": "encoder.*.self_*", "decoder": "decoder.*.self_*", "cross": "decoder.*.cross_*"}
    if not isinstance(model, Transformer):
        if not isinstance(model, LanguageModel | Encoder):
            raise ConfigError(f"model is {describe_type(model)}; expected a Transformer, LanguageModel or Encoder")
        parts = {"decoder" if isinstance(model, LanguageModel) else "encoder": "layers.*.self_*"}
    with record(model, "*attention.weights") as recorded:
        model(*inputs, **options)
    return {part: [x for name, x in recorded.items() if fnmatchcase(name, pattern)] for part, pattern in parts.items()}
