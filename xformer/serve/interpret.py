"""Routes that show the inside of a model: the search, attention, probabilities, lengths of vectors, the logit lens."""

from __future__ import annotations

import base64
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import msgspec
import numpy as np

import xformer as xf
from xformer.backends import array_namespace, device, to_host
from xformer.errors import ConfigError, DataError
from xformer.generation import BeamCandidate, BeamHistory, alignments
from xformer.generation.engine import Task, run_task
from xformer.generation.processors import token_alternatives, top_tokens
from xformer.interpret import replaced
from xformer.models.token_ids import check_tokens
from xformer.ops.decoding import log_softmax
from xformer.pipelines import TextGenerator, TextToText
from xformer.pipelines.attention import model_inputs, token_attention
from xformer.pipelines.base import Pipeline
from xformer.pipelines.encoders import EncoderPipeline
from xformer.pipelines.output_text import Outputs, Token, pieces_of, tokens_of
from xformer.serve import schema
from xformer.serve.jobs import Job, too_long
from xformer.serve.models import ServedModel, Server
from xformer.serve.native import MAX_COMPUTED_BYTES, finite, text_output, write_event
from xformer.serve.routes import Chunks, route, stream

MAX_ATTENTION_BYTES = 16_000_000  # of a response
MAX_LENS_OPERATIONS = 4e10  # of all layers and positions
MIN_LENS_POSITIONS, MAX_LENS_POSITIONS = 8, 64
_STREAM_OF_SEARCH = 'Events "source", then "token" or "step" (beam search), then "result" with the whole answer.'
_PARTS = {"self_attention": "attention", "cross_attention": "cross-attention", "feed_forward": "feed-forward"}


@route("POST", "/explore", _STREAM_OF_SEARCH)
async def explore(server: Server, request: schema.ExploreRequest) -> schema.Exploration | Chunks:
    """Generate, and show alternatives, alignment and the beam."""
    model = server.model(request.model, TextToText, TextGenerator, task="generate text")
    config, start = model.resolve(request.settings(), request.target_length), time.monotonic()
    candidates: list[Any] = []  # of steps that the client has not received
    # A language model reads the beginning of its output as a part of the prompt.
    forced = [] if model.pipeline.has_source else check_tokens("prefix_ids", request.prefix_ids, model.vocab_size)

    def on_text(job: Job, index: int, text: str, tokens: list[Token]) -> None:
        for token in tokens:
            job.emit("token", {"index": index, **msgspec.to_builtins(output_token(token))})

    def finish(job: Job, ids: list[list[int]], task: Task[Outputs]) -> Task[schema.Exploration]:
        prompt = ids[0][: len(ids[0]) - len(forced)]
        source = shown_text(request.text, tokens_of(model.pipeline.source_tokenizer, model.source_ids(prompt)))
        before = tokens_of(model.pipeline.target_tokenizer, forced, prompt)
        searches = next(task)  # raises its errors before the first event
        if request.stream:
            job.emit("source", {"source": source})
            if options.get("on_text"):
                on_text(job, 0, "", before)
            candidates.append(job)
        yield searches
        (outputs,) = yield from task
        chosen = [*forced, *outputs[0].tokens]
        start_text, shown = "".join(token.text for token in before), []
        for each in outputs:
            found = msgspec.structs.asdict(text_output(each._replace(text=start_text + each.text)))
            tokens = [output_token(token) for token in (*before, *(each.logprobs or ()))]
            shown.append(schema.ExploredOutput(**found, tokens=tokens))
        method, beam = ("beam", _beam(model, history)) if history.steps else (config.method, None)
        usage, alignment = schema.usage(len(prompt), len(chosen)), _alignment(model, ids[0], chosen)
        about = model.name, model.pipeline.task, method, source, shown, alignment, beam, usage
        return schema.Exploration(*about, time.monotonic() - start)

    def on_step(index: int, step: list[BeamCandidate], best: list[int]) -> None:
        for job in candidates:
            job.emit("step", {"index": index, "candidates": _candidates(model, step)})

    history = BeamHistory(on_step)
    options: dict[str, Any] = {"beam_history": history, "logprobs": request.num_alternatives}
    if request.stream and config.method != "beam" and config.num_return_sequences == 1:
        options["on_text"] = on_text
    encode = lambda: [[*model.encode_request(request), *forced]]  # noqa: E731
    changes = interventions(model.pipeline, request.ablations)
    if changes and request.stream:
        raise DataError("stream is true with ablations; expected one of them")
    job = await server.make_job(model, request, config, encode, finish, seed=request.seed or 0, **options)
    if changes:
        try:
            return await model.worker.compute(_run_changed, model, job, changes)
        finally:
            job.cancel()  # if the client has disconnected
    model.worker.submit(job)
    return await stream(job.events(), write_event) if request.stream else await job.result()


def _run_changed(model: ServedModel, job: Job, changes: dict[str, Any]) -> Any:
    """Run a job while the model is changed, which other jobs must not notice."""
    with xf.intervene(model.pipeline.model, changes):
        return run_task(job.task)


def shown_text(text: str | None, tokens: Sequence[Token]) -> schema.ShownText:
    """Return a text with its tokens."""
    return schema.ShownText(text or "", [schema.ShownToken(each.id, each.piece, each.text) for each in tokens])


def output_token(token: Token) -> schema.OutputToken:
    """Return a token of an output with its probability and alternatives."""
    fields = [_probable(each) for each in [token, *token.alternatives]]
    return schema.OutputToken(*fields[0], alternatives=[schema.ProbableToken(*each) for each in fields[1:]])


def _probable(token: Token) -> tuple[int, str, str, float, float]:
    value = finite(token.log_probability)
    return token.id, token.piece, token.text, value, math.exp(min(value, 0.0))


def _alignment(model: ServedModel, ids: list[int], tokens: list[int]) -> list[list[float]] | None:
    if not model.pipeline.has_source or not tokens:
        return None
    (weights,) = alignments(model.pipeline.model, [model.source_ids(ids)], [tokens])
    return np.round(np.asarray(weights, np.float64), 5).tolist()


def _candidates(model: ServedModel, candidates: Sequence[BeamCandidate]) -> list[schema.BeamToken]:
    tokenizer = model.pipeline.target_tokenizer
    pieces = pieces_of(tokenizer, [each.token for each in candidates])
    texts = tokenizer.decode_batch([[each.token] for each in candidates])
    found = []
    values: list[Any]
    for each, piece, text in zip(candidates, pieces, texts, strict=True):
        text = f" {text}" if piece.startswith("▁") and text and not text.startswith(" ") else text
        token, *values = each._replace(log_probability=finite(each.log_probability), score=finite(each.score))
        found.append(schema.BeamToken(token, piece, text, *values))
    return found


def _beam(model: ServedModel, history: BeamHistory) -> schema.BeamTree:
    groups = 1 + max((each.group for step in history.steps[0] for each in step), default=0)
    return schema.BeamTree(groups, [_candidates(model, step) for step in history.steps[0]])


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
        name, read, decoder = "the output", len(out), config.num_decoder_layers
        layers = {"encoder": config.num_encoder_layers, "decoder": decoder, "cross": decoder}
        shapes = {"encoder": (len(ids), len(ids)), "decoder": (read, read), "cross": (read, len(ids))}
    else:
        name, read, (kind,) = "the text", len(ids) + len(out), model.pipeline.attention_kinds
        layers, shapes = {kind: config.num_layers}, {kind: (read, read)}
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
    source = shown_text(request.text, tokens_of(pipeline.source_tokenizer, ids))
    return schema.AttentionMaps(model.name, source, output, found)


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


def _layers(model: ServedModel, request: schema.LayersRequest, ids: list[int], edits: dict[str, Any]) -> schema.Layers:
    pipeline, output = model.pipeline, request.output_ids
    tokenizer = pipeline.target_tokenizer
    prompt = [] if pipeline.has_source else ids
    name, module = layers_name(pipeline, "decoder"), pipeline.model
    num_layers = len(getattr(module, name))
    parts = {part: label for part, label in _PARTS.items() if pipeline.has_source or part != "cross_attention"}
    names = [f"{name}.0.residual_in", f"{name}.*.residual_out", *(f"{name}.*.{part}.output" for part in parts)]
    with contextlib.ExitStack() as blocks:
        if edits:
            blocks.enter_context(xf.intervene(module, edits))
        found = blocks.enter_context(xf.record(module, names)) if request.lens else {}
        logits = module(*model_inputs(module, ids, output))[0, ...]
    start = max(0, len(prompt) - 1)  # the position that predicts the first token of the output
    steps = token_alternatives(logits[start : start + len(output), :], output, request.num_alternatives)
    shown = [output_token(each) for each in tokens_of(tokenizer, output, prompt, steps)]
    operations = 2 * (1 + num_layers) * model.vocab_size * module.config.d_model  # of a position
    num_positions = min(MAX_LENS_POSITIONS, max(MIN_LENS_POSITIONS, int(MAX_LENS_OPERATIONS / operations)))
    first = max(0, logits.shape[0] - num_positions)
    shown_layers = range(-1, num_layers) if request.lens else ()
    return schema.Layers(model.name, shown, first, [_layer(pipeline, i, found, parts, first) for i in shown_layers])


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
    norms = {label: _norms(x[:, first:, :]) for label, x in found_parts.items() if x is not None}
    tokens = [schema.ProbableToken(*each, math.exp(each[-1])) for each in values]
    return schema.Layer("embedding" if index < 0 else f"layer {index + 1}", _norms(state), norms, tokens)


def _norms(x: Any) -> list[float]:
    """Return the lengths of the vectors (1, positions, features)."""
    return np.linalg.norm(np.asarray(to_host(x)[0], np.float64), axis=-1).round(4).tolist()


# --- Changes of a model -----------------------------------------------------------------------------------------------


def interventions(
    pipeline: Pipeline, ablations: Sequence[schema.Ablation], rows: Sequence[schema.AttentionRow] = ()
) -> dict[str, Callable[[Any], Any]]:
    """Return the argument of `xformer.intervene` for the changes of a request.

    Args:
        pipeline: Pipeline of the model.
        ablations: Parts that add nothing.
        rows: Rows of attention weights, which are normalized.

    Raises:
        ConfigError: For a part that the model does not have.
        DataError: For invalid weights.
    """
    changes: dict[str, list[Callable[[Any], Any]]] = {}
    for ablation in ablations:
        name, number = _module(pipeline, ablation), ablation.head
        change = _zeros if number is None else replaced(number, _zeros)
        changes.setdefault(f"{name}.{'output' if number is None else 'heads'}", []).append(change)
    for row in rows:
        changes.setdefault(f"{_module(pipeline, row)}.weights", []).append(_with_row(row))
    return {name: partial(reduce, lambda x, change: change(x), each) for name, each in changes.items()}


def layers_name(pipeline: Pipeline, kind: str) -> str:
    """Return the name of the layers with a kind of attention: an attribute of the model."""
    return ("encoder" if kind == "encoder" else "decoder") if pipeline.has_source else "layers"


def _module(pipeline: Pipeline, part: schema.Ablation | schema.AttentionRow) -> str:
    """Return the name of the module that a part of the model is."""
    kinds = pipeline.attention_kinds
    if part.kind not in kinds:
        raise ConfigError(f"kind is {part.kind!r}; expected any of {', '.join(kinds)}")
    layers = layers_name(pipeline, part.kind)
    for name, size in (("layer", len(getattr(pipeline.model, layers))), ("head", pipeline.model.config.num_heads)):
        if (value := getattr(part, name)) is not None and value >= size:
            raise ConfigError(f"{name} is {value}; expected 0 to {size - 1}")
    if isinstance(part, schema.Ablation) and part.part == "feed_forward":
        if part.head is not None or part.kind == "cross":
            raise ConfigError("a feed_forward part has no head, and kind 'encoder' or 'decoder'")
        return f"{layers}.{part.layer}.feed_forward"
    return f"{layers}.{part.layer}.{'cross' if part.kind == 'cross' else 'self'}_attention"


def _zeros(x: Any) -> Any:
    return array_namespace(x).zeros_like(x)


def _with_row(row: schema.AttentionRow) -> Callable[[Any], Any]:
    weights = np.asarray(row.weights, np.float64)
    if not np.isfinite(total := weights.sum()) or total <= 0:
        raise DataError(f"weights sum to {total:g}; expected a positive number")

    def change(x: Any) -> Any:
        num_queries, num_keys = x.shape[2:]
        if row.query >= num_queries:
            raise DataError(f"query is {row.query}; expected 0 to {num_queries - 1}")
        if len(weights) != num_keys:
            raise DataError(f"weights has {len(weights)} numbers; expected {num_keys}, one for each key")
        if row.kind == "decoder" and weights[row.query + 1 :].any():
            raise DataError(f"weights has some after key {row.query}; expected 0 for tokens after the query")
        xp, mask = array_namespace(x), np.zeros((1, x.shape[1], num_queries, 1), bool)
        mask[:, slice(None) if row.head is None else row.head, row.query] = True
        new = xp.from_host(weights / total, dtype=x.dtype, device=device(x))
        return xp.where(xp.from_host(mask, device=device(x)), new, x)

    return change
