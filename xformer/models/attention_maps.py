"""Attention weights of all layers of a model, for inspection."""

from __future__ import annotations

from typing import Any

from xformer.backends import Array
from xformer.errors import ConfigError
from xformer.layers import record_attention
from xformer.models.base import BaseModel
from xformer.models.encoder import Encoder
from xformer.models.language_model import LanguageModel
from xformer.models.transformer import Transformer


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
    if isinstance(model, Transformer):
        parts = {
            "encoder": [layer.self_attention for layer in model.encoder],
            "decoder": [layer.self_attention for layer in model.decoder],
            "cross": [layer.cross_attention for layer in model.decoder],
        }
    elif isinstance(model, LanguageModel | Encoder):
        name = "decoder" if isinstance(model, LanguageModel) else "encoder"
        parts = {name: [layer.self_attention for layer in model.layers]}
    else:
        raise ConfigError(f"model is a {type(model).__name__}; expected a Transformer, LanguageModel or Encoder")
    with record_attention() as recorded:
        model(*inputs, **options)
    weights: dict[int, list[Array]] = {}
    for layer, array in recorded:  # several times if layers share their parameters
        weights.setdefault(id(layer), []).append(array)
    return {name: [x for layer in layers for x in weights.get(id(layer), [])] for name, layers in parts.items()}
