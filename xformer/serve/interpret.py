"""Routes that show the inside of a model: attention, probabilities, lengths of vectors, and the logit lens."""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import xformer as xf
from xformer.backends import to_host
from xformer.errors import ConfigError, DataError
from xformer.generation.processors import token_alternatives, top_tokens
from xformer.models.token_ids import check_tokens
from xformer.ops.decoding import log_softmax
from xformer.pipelines import TextGenerator, TextToText
from xformer.pipelines.attention import model_inputs, token_attention
from xformer.pipelines.encoders import EncoderPipeline
from xformer.pipelines.output_text import pieces_of, tokens_of
from xformer.serve import schema
from xformer.serve.interventions import interventions, layers_name
from xformer.serve.jobs import too_long
from xformer.serve.models import ServedModel
from xformer.serve.native import MAX_COMPUTED_BYTES, output_token, shown_text
from xformer.serve.routes import route
from xformer.serve.server import Server

MAX_ATTENTION_BYTES = 16_000_000  # of a response
MAX_LENS_OPERATIONS = 4e10  # of all layers and positions
MIN_LENS_POSITIONS, MAX_LENS_POSITIONS = 8, 64
_PARTS = {"self_attention": "attention", "cross_attention": "cross-attention", "feed_forward": "feed-forward"}


@route("POST", "/attention")
async def attention(server: Server, request: schema.AttentionRequest) -> schema.AttentionMaps:
    """Return attention weights by layer and head, as base64 float32."""
    model = server.model(request.model, TextToText, TextGenerator, EncoderPipeline, task="show attention")
    known = model.pipeline.attention_kinds
    kinds: list[str] = list(known if request.kinds is None else request.kinds)
    for kind in kinds:
        if kind not in known:
            raise ConfigError(f"kinds has {kind!r}; expected any of {', '.join(known)}")
    if not model.pipeline.generates_text and request.output_ids:
        raise ConfigError("output_ids does not apply to an encoder; omit it")
    ids = model.source_ids(await server.in_thread(model.encode_request, request))
    check_attention(model, ids, request.output_ids, kinds, request.layer)
    return await model.worker.compute(_attention, model, request, kinds, ids)


def check_attention(
    model: ServedModel, ids: list[int], out: list[int], kinds: Sequence[str] = (), layer: int | None = None
) -> None:
    """Raise an error for ids out of range and for arrays that would be too large.

    Args:
        model: The model.
        ids: Ids of the source, prompt or text.
        out: Ids of the output.
        kinds: Kinds of attention to send.
        layer: Layer to send; None for all.
    """
    config = model.pipeline.model.config
    if out:
        check_tokens("output_ids", out, model.vocab_size)
    if model.pipeline.has_source:
        layers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
        shapes = {"encoder": (len(ids), len(ids)), "decoder": (len(out), len(out)), "cross": (len(out), len(ids))}
        layers["cross"] = layers["decoder"]
    else:
        (kind,), length = model.pipeline.attention_kinds, len(ids) + len(out)
        layers, shapes = {kind: config.num_layers}, {kind: (length, length)}
    name, read = ("the output", len(out)) if model.pipeline.has_source else ("the text", len(ids) + len(out))
    if model.pipeline.generates_text and model.context_length is not None and read > model.context_length:
        raise too_long(f"{name} has {read} tokens; the context of the model has {model.context_length}: shorten it")
    if layer is not None and layer >= max(layers.values()):
        raise ConfigError(f"layer is {layer}; expected 0 to {max(layers.values()) - 1}")
    sizes = {kind: 4 * config.num_heads * math.prod(shapes[kind]) for kind in layers}
    if sum(layers[kind] * size for kind, size in sizes.items()) > MAX_COMPUTED_BYTES:
        raise DataError("the text is too long to show its attention; expected a shorter one")
    sent = sum(sizes[kind] * (layers[kind] if layer is None else 1) for kind in kinds)
    if sent > MAX_ATTENTION_BYTES:
        raise DataError(f"the attention takes {sent / 1e6:.0f} MB; ask for one layer or kind, or shorten the text")


def _attention(
    model: ServedModel, request: schema.AttentionRequest, kinds: Sequence[str], ids: list[int]
) -> schema.AttentionMaps:
    pipeline, outputs = model.pipeline, request.output_ids
    layers = slice(None) if request.layer is None else slice(request.layer, request.layer + 1)
    maps = token_attention(pipeline, ids, outputs, labels=pieces_of, layers=layers).maps
    found = {kind: _attention_map(*maps[kind]) for kind in kinds if kind in maps}
    output = shown_text("", tokens_of(pipeline.target_tokenizer, outputs, [] if pipeline.has_source else ids))
    return schema.AttentionMaps(
        model.name, shown_text(request.text, tokens_of(pipeline.source_tokenizer, ids)), output, found
    )


def _attention_map(weights: Any, queries: list[str], keys: list[str]) -> schema.AttentionMap:
    data = base64.b64encode(weights.astype("<f4").tobytes()).decode("ascii")
    return schema.AttentionMap(list(weights.shape), "float32", data, queries, keys)


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
    prompt = [] if pipeline.has_source else ids
    name, module = layers_name(pipeline, "decoder"), pipeline.model
    num_layers = len(getattr(module, name))
    parts = {part: label for part, label in _PARTS.items() if pipeline.has_source or part != "cross_attention"}
    names = [f"{name}.0.residual_in", f"{name}.*.residual_out", *(f"{name}.*.{part}.output" for part in parts)]
    with contextlib.ExitStack() as blocks:
        if changes:
            blocks.enter_context(xf.intervene(module, changes))
        found = blocks.enter_context(xf.record(module, names)) if request.lens else {}
        logits = module(*model_inputs(module, ids, output))[0, ...]
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
