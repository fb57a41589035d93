"""Routes of xformer: translation, classification, and what the page shows."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.responses import PlainTextResponse, Response

import xformer
from xformer.errors import DataError
from xformer.generation.engine import Task
from xformer.io import read_log
from xformer.pipelines import Classifier, Embedder, Output, Reranker, Summarizer, Translator
from xformer.pipelines.output_text import Token
from xformer.serve import schema
from xformer.serve.jobs import Event, Job, JobError
from xformer.serve.models import ServedModel, Server
from xformer.serve.routes import Chunks, event_bytes, route, stream

MAX_COMPUTED_BYTES = 512_000_000  # of all layers
_MAX_POINTS = 2000  # of a training curve
_LOWEST = -1e9  # JSON has no infinity
_STREAM = 'Events "token" with {"text": ...}, then "result" with the whole answer.'


def finite(value: float | None) -> float:
    """Return a log-probability that JSON can hold."""
    return max(value or 0.0, _LOWEST)


def texts_of(name: str, value: str | Sequence[str], limit: int = schema.MAX_TEXTS) -> list[str]:
    """Return a text or a list of texts as a list; raise DataError for an empty or a long one."""
    texts = [value] if isinstance(value, str) else list(value)
    if not 1 <= len(texts) <= limit:
        raise DataError(f"{name} has {len(texts)} texts; expected 1 to {limit}")
    return texts


# --- Information ------------------------------------------------------------------------------------------------------


@route("GET", "/health")
async def health(server: Server) -> schema.Health:
    """Return the state of the server."""
    workers = [model.worker for model in server.models.values()]
    running, waiting = sum(each.num_running for each in workers), sum(each.num_waiting for each in workers)
    return schema.Health("draining" if server.is_draining else "ok", xformer.__version__, running, waiting)


@route("GET", "/version")
async def version(server: Server) -> schema.Json:
    """Return the version of the server."""
    return {"version": xformer.__version__}


@route("GET", "/metrics")
async def metrics(server: Server) -> Response:
    """Return counters and histograms in the text format of Prometheus."""
    measured = []
    for name, model in server.models.items():
        measured.append(("xformer_requests_running", name, model.worker.num_running))
        measured.append(("xformer_requests_waiting", name, model.worker.num_waiting))
        reused = getattr(getattr(model.pipeline, "prefix_cache", None), "num_reused", 0)
        measured.append(("xformer_prompt_tokens_cached_total", name, reused))
    return PlainTextResponse(server.metrics.text(measured), media_type="text/plain; version=0.0.4")


@route("GET", "/runs")
async def list_runs(server: Server) -> schema.Runs:
    """List the models that have a training log."""
    return schema.Runs([name for name, model in server.models.items() if model.log is not None])


@route("GET", "/runs/{model}")
async def show_run(server: Server, model: str) -> schema.Curves:
    """Return the training curves of a model."""
    served = server.models.get(model)  # the name of a model, never of a file
    if served is None or served.log is None:
        raise JobError(f"model {model[:80]!r} has no training log", 404)
    log = read_log(served.log)
    steps = [event for event in log if event.get("event") == "step"]
    steps = steps[:: max(1, math.ceil(len(steps) / _MAX_POINTS))]
    columns = ("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens_per_second", "minutes")
    fields = ("step", "epoch", "loss", "perplexity", "score", "metric", "best", "minutes")
    validations = [event for event in log if event.get("event") == "validation"]
    metric = next((event["metric"] for event in validations if event.get("metric")), None)
    curves = {column: [event.get(column) for event in steps] for column in columns}
    points = [{name: event.get(name) for name in fields} for event in validations]
    return schema.Curves(model, metric, served.label_smoothing, curves, points)


# --- Translation, summarization and classification --------------------------------------------------------------------


@route("POST", "/translate", _STREAM)
async def translate(server: Server, request: schema.TranslateRequest) -> schema.Outputs | Chunks:
    """Translate texts."""
    return await _transform(server, request, server.model(request.model, Translator, task="translate"))


@route("POST", "/summarize", _STREAM)
async def summarize(server: Server, request: schema.TranslateRequest) -> schema.Outputs | Chunks:
    """Summarize texts."""
    return await _transform(server, request, server.model(request.model, Summarizer, task="summarize"))


async def _transform(server: Server, request: schema.TranslateRequest, model: ServedModel) -> schema.Outputs | Chunks:
    texts, config = texts_of("text", request.text), model.resolve(request.settings(), request.target_length)
    if request.stream and (len(texts) > 1 or config.num_return_sequences > 1):
        raise DataError("stream is true for several texts or outputs; expected one of each")

    def finish(job: Job, ids: list[list[int]], task: Task[list[list[Output]]]) -> Task[schema.Outputs]:
        found = yield from task
        count = sum(len(output.tokens) for outputs in found for output in outputs)
        # A blank text has an empty output.
        rows = [[text_output(each) for each in outputs] or [schema.TextOutput("", 0.0, 0.0, True)] for outputs in found]
        return schema.Outputs(model.name, rows, schema.usage(sum(map(len, ids)), count))

    def on_text(job: Job, index: int, text: str, tokens: list[Token]) -> None:
        job.emit("token", {"text": text})

    options: dict[str, Any] = {"stop": request.stop, **({"on_text": on_text} if request.stream else {})}
    job = await server.make_job(model, request, config, lambda: model.token_ids(texts), finish, **options)
    model.worker.submit(job)
    return await stream(job.events(), write_event) if request.stream else await job.result()


def text_output(output: Output) -> schema.TextOutput:
    """Return an output with numbers that JSON can hold."""
    numbers = finite(output.score), finite(output.log_probability)
    return schema.TextOutput(output.text, *numbers, output.finished, output.logits_sha256 or msgspec.UNSET)


def write_event(event: Event) -> list[bytes]:
    """Return a server-sent event of its name and data."""
    return [event_bytes(event.name, event.data)]


@route("POST", "/classify")
async def classify(server: Server, request: schema.ClassifyRequest) -> schema.Classes:
    """Classify texts."""
    model = server.model(request.model, Classifier, task="classify")
    predictions = await model.worker.join(model.pipeline, texts_of("input", request.input))
    return schema.Classes(model.name, [schema.Class(i, *each) for i, each in enumerate(predictions)])


@route("POST", "/v1/rerank")
@route("POST", "/rerank")
async def rerank(server: Server, request: schema.RerankRequest) -> schema.Rerank:
    """Rank documents by their relevance to a query."""
    model = server.model(request.model, Reranker, task="order documents")
    documents = texts_of("documents", request.documents, schema.MAX_INPUTS)
    pairs = [(request.query, document) for document in documents]
    scores, num_tokens = await _relevances(server, model, pairs)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    shown = [schema.Document(each) if request.return_documents else msgspec.UNSET for each in documents]
    results = [schema.Relevance(index, scores[index], shown[index]) for index in order]
    return schema.Rerank(f"rerank-{secrets.token_hex(12)}", model.name, results, schema.usage(num_tokens, 0))


@route("POST", "/v1/score")
@route("POST", "/score")
async def score(server: Server, request: schema.ScoreRequest) -> schema.Json:
    """Score pairs of texts: by a cross-encoder, or as the cosine of the vectors of an embedder."""
    model = server.model(request.model, Reranker, Embedder, task="score pairs of texts")
    first, second = (texts_of(each, getattr(request, each), schema.MAX_INPUTS) for each in ("text_1", "text_2"))
    if len(first) != len(second) and 1 not in (len(first), len(second)):
        raise DataError(f"text_1 has {len(first)} texts and text_2 {len(second)}; expected as many, or one")
    count = max(len(first), len(second))
    first, second = first * (count // len(first)), second * (count // len(second))
    if isinstance(model.pipeline, Reranker):
        scores, num_tokens = await _relevances(server, model, list(zip(first, second, strict=True)))
    else:
        num_tokens = sum(map(len, await server.in_thread(model.pipeline.encoded, [*first, *second])))
        vectors = np.asarray(await model.worker.join(lambda texts: list(model.pipeline(texts)), [*first, *second]))
        lengths = np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)
        cosines = np.sum(vectors[:count] * vectors[count:], axis=1) / (lengths[:count] * lengths[count:])
        scores = cosines.tolist()
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)]
    head = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time()), "model": model.name}
    return {**head, "data": data, "usage": schema.usage(num_tokens, 0)}


async def _relevances(server: Server, model: ServedModel, pairs: list[Any]) -> tuple[list[float], int]:
    """Return how well the texts of pairs fit, from 0 to 1, and the number of tokens."""
    num_tokens = sum(len(ids) for ids, _ in await server.in_thread(model.pipeline.encode_pairs, pairs))
    scores = await model.worker.join(model.pipeline.scores, pairs)
    is_probability = model.pipeline.activation == "sigmoid"
    return [each if is_probability else 0.5 + 0.5 * math.tanh(0.5 * each) for each in scores], num_tokens
