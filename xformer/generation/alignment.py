"""Which tokens of the source each token of the output comes from."""

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
    """The attention of each output token over the source tokens, as NumPy arrays (output tokens, source tokens).

    source: ids (sentences, source length); outputs: ids of each, without bos and eos, such as Hypothesis.tokens.
    Columns are the tokens of the source that are not padding, in order; rows sum to one.
    layer: the decoder layer whose mean over heads is taken. The default is the last but one, which Garg et al. (2019)
    found to be nearest to how people align words.
    lengths: what a model with a length encoding was told, eos included; default the outputs' own.

    All comes from one teacher-forced pass. Raises ConfigError for a layer that the model lacks, DataError for another
    number of outputs than of sentences.
    """
    source, config = ids_of(model.source_ids(source)), model.config
    if len(outputs) != source.shape[0]:
        raise DataError(f"got {len(outputs)} outputs for {source.shape[0]} sentences; expected one each")
    depth = config.num_decoder_layers
    layer = max(0, depth - 2) if layer is None else layer
    if not 0 <= layer < depth:
        raise ConfigError(f"layer is {layer}; expected 0 to {depth - 1} for a decoder of {depth} layers")
    if not outputs:
        return []
    # The query that predicts a token is the token before it.
    inputs = [[config.bos_id, *output[:-1]] for output in outputs]
    weights = model.cross_attention_weights(source, pad(inputs, config.pad_id), lengths=lengths)[layer]
    attention = to_host(array_namespace(weights).mean(weights, axis=1))  # (sentences, target, source)
    return [
        attention[row, : len(output)][:, ids != config.pad_id]
        for row, (output, ids) in enumerate(zip(outputs, to_host(source), strict=True))
    ]
