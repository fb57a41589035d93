"""Routes of xformer: translation, classification, and what the page shows."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

import xformer
from xformer.errors import DataError
from xformer.generation import BeamCandidate, BeamHistory, alignments
from xformer.generation.engine import Task, run_task
from xformer.io import read_log
from xformer.models.token_ids import check_tokens
from xformer.pipelines import Classifier, Output, Reranker, Summarizer, TextGenerator, TextToText, Translator
from xformer.pipelines.output_text import Token, pieces_of, tokens_of
from xformer.serve import schema
from xformer.serve.interventions import interventions
from xformer.serve.jobs import Event, Job, JobError
from xformer.serve.models import ServedModel
from xformer.serve.routes import Chunks, event_bytes, route, stream
from xformer.serve.server import Server

MAX_COMPUTED_BYTES = 512_000_000  # of all layers
_MAX_POINTS = 2000  # of a training curve
_LOWEST = -1e9  # JSON has no infinity
_STREAM = 'Events "token" with {"text": ...}, then "result" with the whole answer.'
_STREAM_OF_SEARCH = 'Events "source", then "token" or "step" (beam search), then "result" with the whole answer.'


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
    return schema.Curves(
        model,
        next((event["metric"] for event in validations if event.get("metric")), None),
        served.label_smoothing,
        {column: [event.get(column) for event in steps] for column in columns},
        [{name: event.get(name) for name in fields} for event in validations],
    )


# --- Translation, summarization and classification --------------------------------------------------------------------


@route("POST", "/translate", _STREAM)
async def translate(server: Server, request: schema.TranslateRequest) -> schema.Outputs | Chunks:
    """Translate texts."""
    return await _text_to_text(server, request, server.model(request.model, Translator, task="translate"))


@route("POST", "/summarize", _STREAM)
async def summarize(server: Server, request: schema.TranslateRequest) -> schema.Outputs | Chunks:
    """Summarize texts."""
    return await _text_to_text(server, request, server.model(request.model, Summarizer, task="summarize"))


async def _text_to_text(
    server: Server, request: schema.TranslateRequest, model: ServedModel
) -> schema.Outputs | Chunks:
    texts, config = texts_of("text", request.text), model.resolve(request.settings(), request.target_length)
    if request.stream and (len(texts) > 1 or config.num_return_sequences > 1):
        raise DataError("stream is true for several texts or outputs; expected one of each")

    def finish(job: Job, ids: list[list[int]], task: Task[list[list[Output]]]) -> Task[schema.Outputs]:
        found = yield from task
        count = sum(len(output.tokens) for outputs in found for output in outputs)
        # A blank text has an empty output.
        rows = [[_output(each) for each in outputs] or [schema.TextOutput("", 0.0, 0.0, True)] for outputs in found]
        return schema.Outputs(model.name, rows, schema.usage(sum(map(len, ids)), count))

    def on_text(job: Job, index: int, text: str, tokens: list[Token]) -> None:
        job.emit("token", {"text": text})

    options: dict[str, Any] = {"on_text": on_text} if request.stream else {}
    job = await server.make_job(
        model, request, config, lambda: model.token_ids(texts), finish, stop=request.stop, **options
    )
    model.worker.submit(job)
    return await stream(job.events(), _write) if request.stream else await job.result()


def _output(output: Output) -> schema.TextOutput:
    return schema.TextOutput(output.text, finite(output.score), finite(output.log_probability), output.finished)


def _write(event: Event) -> list[bytes]:
    return [event_bytes(event.name, event.data)]


@route("POST", "/classify")
async def classify(server: Server, request: schema.ClassifyRequest) -> schema.Classes:
    """Classify texts."""
    model = server.model(request.model, Classifier, task="classify")
    texts = texts_of("input", request.input)
    predictions = await model.worker.join(model.pipeline, texts)
    return schema.Classes(model.name, [schema.Class(i, *each) for i, each in enumerate(predictions)])


@route("POST", "/v1/rerank")
@route("POST", "/rerank")
async def rerank(server: Server, request: schema.RerankRequest) -> schema.Rerank:
    """Rank documents by their relevance to a query."""
    model = server.model(request.model, Reranker, task="order documents")
    documents = texts_of("documents", request.documents, schema.MAX_INPUTS)
    pairs = [(request.query, document) for document in documents]
    num_tokens = sum(len(ids) for ids, _ in await server.in_thread(model.pipeline.encode_pairs, pairs))
    scores = await model.worker.join(model.pipeline.scores, pairs)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    is_probability = model.pipeline.activation == "sigmoid"
    results = [
        schema.Relevance(
            index,
            scores[index] if is_probability else 0.5 + 0.5 * math.tanh(0.5 * scores[index]),
            schema.Document(documents[index]) if request.return_documents else msgspec.UNSET,
        )
        for index in order
    ]
    return schema.Rerank(f"rerank-{secrets.token_hex(12)}", model.name, results, schema.usage(num_tokens, 0))


# --- Exploration ------------------------------------------------------------------------------------------------------


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

    def finish(job: Job, ids: list[list[int]], task: Task[list[list[Output]]]) -> Task[schema.Exploration]:
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
        outputs = [
            each._replace(
                text="".join(token.text for token in before) + each.text,
                tokens=[*forced, *each.tokens],
                logprobs=[*before, *(each.logprobs or ())],
            )
            for each in outputs
        ]
        return schema.Exploration(
            model=model.name,
            task=model.pipeline.task,
            method="beam" if history.steps else config.method,
            source=source,
            outputs=[
                schema.ExploredOutput(
                    **msgspec.structs.asdict(_output(each)), tokens=[*map(output_token, each.logprobs or ())]
                )
                for each in outputs
            ],
            alignment=_alignment(model, ids[0], outputs[0].tokens),
            beam=_beam(model, history) if history.steps else None,
            usage=schema.usage(len(prompt), len(outputs[0].tokens)),
            seconds=time.monotonic() - start,
        )

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
    return await stream(job.events(), _write) if request.stream else await job.result()


def _run_changed(model: ServedModel, job: Job, changes: dict[str, Any]) -> Any:
    """Run a job while the model is changed, which other jobs must not notice."""
    with xformer.intervene(model.pipeline.model, changes):
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
    return [
        schema.BeamToken(
            each.token,
            piece,
            f" {text}" if piece.startswith("▁") and text and not text.startswith(" ") else text,
            each.group,
            each.parent,
            finite(each.log_probability),
            finite(each.score),
            each.status,
        )
        for each, piece, text in zip(candidates, pieces, texts, strict=True)
    ]


def _beam(model: ServedModel, history: BeamHistory) -> schema.BeamTree:
    groups = 1 + max((each.group for step in history.steps[0] for each in step), default=0)
    return schema.BeamTree(groups, [_candidates(model, step) for step in history.steps[0]])
