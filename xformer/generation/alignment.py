"""Alignment of output tokens with source tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xformer.backends import array_namespace, to_host
from xformer.errors import ConfigError, DataError
from xformer.models import Transformer
from xformer.models.token_ids import ids_of, pad


def alignments(
    model: Transformer,
    source: Any,
    outputs: Sequence[Sequence[int]],
    *,
    layer: int | None = None,
    lengths: Sequence[int] | None = None,
) -> list[Any]:
    """Return the attention of each output token over the source tokens, from one teacher-forced pass.

    Args:
        model: Encoder-decoder.
        source: Source ids (inputs, source length), padded with pad_id.
        outputs: Output ids of each input without bos and eos, such as `Hypothesis.tokens`.
        layer: Decoder layer whose attention is averaged over heads. Default: the last but one, whose attention is
            closest to word alignments (Garg et al., 2019).
        lengths: Output lengths for a model with a length encoding, eos included. Default: lengths of the outputs.

    Returns:
        One NumPy array (output tokens, source tokens) per input; padding is left out, rows sum to one.

    Raises:
        ConfigError: For a layer that the model does not have.
        DataError: If the number of outputs differs from the number of inputs.
    """
    source, config = ids_of(model.source_ids(source)), model.config
    if len(outputs) != source.shape[0]:
        raise DataError(f"got {len(outputs)} outputs for {source.shape[0]} inputs; expected one each")
    depth = config.num_decoder_layers
    layer = max(0, depth - 2) if layer is None else layer
    if not 0 <= layer < depth:
        raise ConfigError(f"layer is {layer}; expected 0 to {depth - 1} for a decoder of {depth} layers")
    if not outputs:
        return []
    # A token is predicted by the query of the token before it.
    inputs = [[config.bos_id, *output[:-1]] for output in outputs]
    weights = model.cross_attention_weights(source, pad(inputs, config.pad_id), lengths=lengths)[layer]
    attention = to_host(array_namespace(weights).mean(weights, axis=1))  # (sentences, target, source)
    return [
        attention[row, : len(output)][:, [token != config.source_padding_id for token in ids]]
        for row, (output, ids) in enumerate(zip(outputs, to_host(source).tolist(), strict=True))
    ]
