"""The route that describes the layers of a model: probabilities, lengths of vectors, and the logit lens."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import xformer as xf
from xformer.backends import to_host
from xformer.errors import ConfigError, DataError
from xformer.generation.processors import token_alternatives, top_tokens
from xformer.ops.decoding import log_softmax
from xformer.pipelines import TextGenerator, TextToText
from xformer.pipelines.output_text import pieces_of, tokens_of
from xformer.serve import schema
from xformer.serve.interventions import interventions, layers_name
from xformer.serve.models import ServedModel
from xformer.serve.native import check_attention, output_token
from xformer.serve.routes import route

if TYPE_CHECKING:
    from xformer.serve.app import Server
else:
    Server = Any

MAX_LENS_OPERATIONS = 4e10  # of all layers and positions
MIN_LENS_POSITIONS, MAX_LENS_POSITIONS = 8, 64
_PARTS = {"self_attention": "attention", "cross_attention": "cross-attention", "feed_forward": "feed-forward"}


@route("POST", "/layers")
async def layers(server: Server, request: schema.LayersRequest) -> schema.Layers:
    """Return the probabilities of an output, also with parts of the model switched off, and a view of each layer."""
    model = server.model(request.model, TextToText, TextGenerator, task="generate text")
    if not request.output_ids:
        raise DataError("output_ids is empty; expected the tokens of an output")
    ids = model.source_ids(await server.in_thread(model.encode_request, request))
    check_attention(model, ids, request.output_ids)
    if request.lens and getattr(model.pipeline.model, "copy_head", None) is not None:
        raise ConfigError("lens does not apply to a model that copies from its source; omit it")
    changes = interventions(model.pipeline, request.ablations, request.attention_rows)
    return await model.worker.compute(_layers, model, request, ids, changes)


def _layers(
    model: ServedModel, request: schema.LayersRequest, ids: list[int], changes: dict[str, Any]
) -> schema.Layers:
    pipeline, output = model.pipeline, request.output_ids
    tokenizer = pipeline.target_tokenizer
    if pipeline.has_source:
        inputs, prompt = [[ids], [[pipeline.model.config.bos_id, *output[:-1]]]], []
    else:
        inputs, prompt = [[[*ids, *output]]], ids
    name, module = layers_name(pipeline, "decoder"), pipeline.model
    num_layers = len(getattr(module, name))
    parts = {part: label for part, label in _PARTS.items() if pipeline.has_source or part != "cross_attention"}
    names = [f"{name}.0.residual_in", f"{name}.*.residual_out", *(f"{name}.*.{part}.output" for part in parts)]
    with contextlib.ExitStack() as blocks:
        if changes:
            blocks.enter_context(xf.intervene(module, changes))
        found = blocks.enter_context(xf.record(module, names)) if request.lens else {}
        logits = module(*inputs)[0, ...]
    start = max(0, len(prompt) - 1)  # the position that predicts the first token of the output
    steps = token_alternatives(logits[start : start + len(output), :], output, request.num_alternatives)
    shown = [output_token(each) for each in tokens_of(tokenizer, output, prompt, steps)]
    operations = 2 * (1 + num_layers) * model.vocab_size * module.config.d_model  # of a position
    num_positions = min(MAX_LENS_POSITIONS, max(MIN_LENS_POSITIONS, int(MAX_LENS_OPERATIONS / operations)))
    first = max(0, logits.shape[0] - num_positions)
    shown_layers = range(-1, num_layers) if request.lens else ()
    return schema.Layers(
        model.name, shown, first, [_layer(pipeline, each, found, parts, first) for each in shown_layers]
    )


def _layer(pipeline: Any, index: int, found: Mapping[str, Any], parts: Mapping[str, str], first: int) -> schema.Layer:
    """Describe the results of a layer, or of the embedding (index -1), from a position on."""
    name, model, tokenizer = layers_name(pipeline, "decoder"), pipeline.model, pipeline.target_tokenizer
    state = found[f"{name}.0.residual_in" if index < 0 else f"{name}.{index}.residual_out"][:, first:, :]
    logits = model.readout(state)[0, ...]
    top = top_tokens(log_softmax(logits), 1, None)
    ids = top.tokens[:, 0].tolist()
    texts = tokenizer.decode_batch([[each] for each in ids])
    values = zip(ids, pieces_of(tokenizer, ids), texts, top.log_probs[:, 0].tolist(), strict=True)
    found_parts = {label: found.get(f"{name}.{index}.{part}.output") for part, label in parts.items()}
    return schema.Layer(
        "embedding" if index < 0 else f"layer {index + 1}",
        _norms(state),
        {label: _norms(x[:, first:, :]) for label, x in found_parts.items() if x is not None},
        [schema.ProbableToken(*each, math.exp(each[-1])) for each in values],
    )


def _norms(x: Any) -> list[float]:
    """Return the lengths of the vectors (1, positions, features)."""
    return np.linalg.norm(np.asarray(to_host(x)[0], np.float64), axis=-1).round(4).tolist()
