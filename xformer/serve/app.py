"""The HTTP application: routes, limits and security of `xformer serve`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hmac
import itertools
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import xformer
from xformer.errors import DataError, XformerError
from xformer.io import read_log
from xformer.pipelines import Classifier, Embedder, Summarizer, TextGenerator, TextToText, Translator
from xformer.serve import requests
from xformer.serve.config import LOOPBACK, ServeConfig
from xformer.serve.jobs import Event, Job, JobError
from xformer.serve.models import Row, ServedModel, usage
from xformer.serve.openapi import docs_page, openapi
from xformer.serve.tokens import Json, bytes_of_token, candidate_text, finite, texts_of_tokens

STATIC = Path(__file__).parent / "static"
_WILDCARDS = ("0.0.0.0", "::", "")
_PUBLIC_PATHS = ("/", "/health", "/openapi.json", "/docs", "/favicon.ico")
_MAX_POINTS = 2000  # of a training curve
_SECONDS_FOR_BODY = 20.0
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Endpoint = Callable[["Server", Request, Json], Awaitable[Any]]


class Server:
    """The models of a server and its limits.

    Args:
        models: Models to serve.
        config: Limits and access.
    """

    def __init__(self, models: Sequence[ServedModel], config: ServeConfig | None = None) -> None:
        self.models = {model.name: model for model in models}
        self.config = ServeConfig() if config is None else config
        self.num_active = 0
        self.is_draining = False

    def model(self, name: str | None, *pipelines: type, task: str) -> ServedModel:
        """Return a model by its id, or the first one that has one of the pipelines.

        Raises:
            JobError: If no model matches.
        """
        suitable = [each for each in self.models.values() if isinstance(each.pipeline, pipelines)]
        if name is None:
            if not suitable:
                raise JobError(f"no model on this server can {task}", 404, "model_not_found")
            return suitable[0]
        if name not in self.models:
            known = ", ".join(self.models)
            raise JobError(f"model {name[:80]!r} does not exist; expected one of: {known}", 404, "model_not_found")
        if self.models[name] not in suitable:
            raise JobError(f"model {name!r} cannot {task}: it is for {self.models[name].task.replace('_', ' ')}")
        return self.models[name]

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request; raise JobError if there are too many."""
        if self.num_active >= self.config.max_requests:
            raise JobError(f"more than {self.config.max_requests} requests at a time; try again", 429, "too_many")
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1

    def close(self) -> None:
        """Stop the models."""
        for model in self.models.values():
            model.worker.close()


class EventStream:
    """A response of server-sent events, which cancels its jobs if the client disconnects.

    Args:
        chunks: Texts to send.
        job: Its job.
        admitted: Context that ends with the response.
    """

    def __init__(self, chunks: AsyncIterator[str], job: Job, admitted: contextlib.ExitStack) -> None:
        self.chunks, self.job, self.admitted = chunks, job, admitted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            with contextlib.suppress(ClientDisconnect):
                await until_disconnect(self._send(send), receive)
        finally:
            self.job.cancel()
            self.admitted.close()

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(work: Any, receive: Receive) -> Any:
    """Return the result of a coroutine, which is cancelled if the client disconnects.

    Raises:
        ClientDisconnect: If the client disconnects first.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(disconnected())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def event_text(name: str, data: Any) -> str:
    """Return a server-sent event; without a name, only its data."""
    return (f"event: {name}\n" if name else "") + f"data: {dumps(data)}\n\n"


def dumps(data: Any) -> str:
    """Return compact JSON."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def error_json(error: Exception) -> tuple[int, Json]:
    """Return the status and the JSON of an error."""
    code = None
    if isinstance(error, JobError):
        status, message, code = error.status, str(error), error.code
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, XformerError):
        status, message = 400, str(error)
    else:
        status, message = 500, "internal error; the log of the server has details"
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return status, {"error": {"message": " ".join(message.split()), "type": kind, "param": None, "code": code}}


def error_response(error: Exception) -> Response:
    """Return the response of an error."""
    status, content = error_json(error)
    headers = {"retry-after": "1"} if status == 429 else {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(content, status, headers)


class Guard:
    """ASGI middleware: checks host, origin and token, and adds security headers.

    Args:
        app: The application.
        config: Access.
    """

    def __init__(self, app: Any, config: ServeConfig) -> None:
        self.app, self.config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        error = self._refusal(scope)
        app = self.app if error is None else error_response(error)
        await app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> JobError | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        # Against DNS rebinding: a page of another site that resolves to this machine sends its own name.
        if self.config.host not in _WILDCARDS and _hostname(host) not in (*LOOPBACK, self.config.host):
            return JobError(f"host {host[:80]!r} is not served; expected {self.config.host}", 403, "host")
        origin = headers.get("origin")
        if origin is not None and origin.split("://")[-1] != host:
            return JobError(f"origin {origin[:80]!r} may not use this server", 403, "origin")
        path = scope["path"]
        if self.config.token is not None and path not in _PUBLIC_PATHS and not path.startswith("/static/"):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                token.encode("latin-1"), self.config.token.encode()
            ):
                return JobError("the token is missing or wrong; expected Authorization: Bearer TOKEN", 401, "token")
        return None


def _hostname(host: str) -> str:
    """Return the name in a Host header, without the port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()


def create_app(models: Sequence[ServedModel], config: ServeConfig | None = None) -> Any:
    """Return the ASGI application that serves models.

    Args:
        models: Models to serve; the first one that can do a task is its default.
        config: Limits and access.
    """
    server = Server(models, config)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        server.is_draining = True
        await asyncio.get_running_loop().run_in_executor(None, server.close)

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(error)

    routes: list[Any] = [
        Route("/", index),
        Route("/health", _get(server, health)),
        Route("/v1/models", _get(server, list_models)),
        Route("/runs", _get(server, list_runs)),
        Route("/runs/{model}", _get(server, show_run)),
        Route("/openapi.json", _get(server, show_openapi)),
        Route("/docs", show_docs),
        *(Route(path, _post(server, endpoint), methods=["POST"]) for path, endpoint in POST_ROUTES.items()),
    ]
    if STATIC.is_dir():
        routes.append(Mount("/static", StaticFiles(directory=STATIC)))
    handlers: Any = {HTTPException: on_error, Exception: on_error}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.state.server = server
    return Guard(app, server.config)


def _get(server: Server, endpoint: Callable[[Server, Request], Any]) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            return JSONResponse(endpoint(server, request))
        except (XformerError, JobError) as error:
            return error_response(error)

    return handle


def _post(server: Server, endpoint: Endpoint) -> Callable[[Request], Awaitable[Any]]:
    async def handle(request: Request) -> Any:
        with contextlib.ExitStack() as admitted:
            try:
                admitted.enter_context(server.admit())
                body = await read_json_body(request, server.config.max_body)
                result = await endpoint(server, request, body)
            except ClientDisconnect:
                return Response(status_code=400)  # which nobody receives
            except (XformerError, JobError) as error:
                return error_response(error)
            if not isinstance(result, EventStream):
                return Response(dumps(result), media_type="application/json")
            result.admitted = admitted.pop_all()
            return result

    return handle


async def read_json_body(request: Request, limit: int) -> Any:
    """Return the JSON value of a body; raise JobError for one that is too long, too slow or not JSON."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise JobError("the content type is not application/json", 415)
    too_long = JobError(f"the body is too long; expected at most {limit} bytes", 413)
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        raise too_long
    body = b""
    try:
        async with asyncio.timeout(_SECONDS_FOR_BODY):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_long
        value = json.loads(body)
        dumps(value).encode()  # raises for half of a surrogate pair
        return value
    except TimeoutError:
        raise JobError("the body did not arrive in time", 408) from None
    except (ValueError, RecursionError) as error:
        raise JobError(f"the body is not JSON: {error}") from error


# --- Running jobs -----------------------------------------------------------------------------------------------------


async def result_of(request: Request, model: ServedModel, job: Job) -> Any:
    """Run a job and return its result; cancel it if the client disconnects."""

    async def result() -> Any:
        while (event := await job.next_event()).name != "result":
            pass
        return event.data

    try:
        model.worker.submit(job)
        return await until_disconnect(result(), request.receive)
    finally:
        job.cancel()


def stream_of(model: ServedModel, job: Job, to_text: Callable[[Event], Iterator[str]], end: str = "") -> EventStream:
    """Run a job and return a response with its events.

    Args:
        model: Model of the job.
        job: The job.
        to_text: Returns the texts to send for an event.
        end: Text after the last event.
    """

    async def chunks() -> AsyncIterator[str]:
        try:
            while True:
                event = await job.next_event()
                for text in to_text(event):
                    yield text
                if event.name == "result":
                    break
        except JobError as error:
            yield event_text("error", error_json(error)[1])
        if end:
            yield end

    model.worker.submit(job)
    return EventStream(chunks(), job, contextlib.ExitStack())


# --- Information ------------------------------------------------------------------------------------------------------


async def index(request: Request) -> Response:
    """Return the page."""
    page = STATIC / "index.html"
    return FileResponse(page) if page.is_file() else await show_docs(request)


async def show_docs(request: Request) -> Response:
    """Return a page that describes the API."""
    return HTMLResponse(docs_page(request.app.state.server.config.max_tokens))


def health(server: Server, request: Request) -> Json:
    """Return the state of the server."""
    workers = [model.worker for model in server.models.values()]
    return {
        "status": "draining" if server.is_draining else "ok",
        "version": xformer.__version__,
        "running": sum(worker.num_running for worker in workers),
        "waiting": sum(worker.num_waiting for worker in workers),
    }


def list_models(server: Server, request: Request) -> Json:
    """Return the models."""
    return {"object": "list", "data": [model.describe() for model in server.models.values()]}


def list_runs(server: Server, request: Request) -> Json:
    """Return the ids of the models that have a training log."""
    return {"runs": [name for name, model in server.models.items() if model.log is not None]}


def show_run(server: Server, request: Request) -> Json:
    """Return the training curves of a model."""
    name = request.path_params["model"]  # the name of a model, never of a file
    model = server.models.get(name)
    if model is None or model.log is None:
        raise JobError(f"model {name[:80]!r} has no training log", 404)
    log = read_log(model.log)
    steps = [event for event in log if event.get("event") == "step"]
    steps = steps[:: max(1, math.ceil(len(steps) / _MAX_POINTS))]
    columns = ("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens_per_second", "minutes")
    fields = ("step", "epoch", "loss", "perplexity", "score", "metric", "best", "minutes")
    validations = [event for event in log if event.get("event") == "validation"]
    return {
        "model": name,
        "metric": next((event["metric"] for event in validations if event.get("metric")), None),
        "label_smoothing": model.label_smoothing,
        "steps": {column: [_number(event.get(column)) for event in steps] for column in columns},
        "validations": [{name: _number(event.get(name)) for name in fields} for event in validations],
    }


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def show_openapi(server: Server, request: Request) -> Json:
    """Return the OpenAPI description."""
    return openapi(server.config.max_tokens)


# --- Exploration ------------------------------------------------------------------------------------------------------


async def explore(server: Server, request: Request, body: Json) -> Any:
    """Generate from a text and return everything about the search."""
    parsed, settings = requests.parse(body, requests.ExploreRequest)
    model = server.model(parsed.model, TextToText, TextGenerator, task="generate text")
    ids = await run_in_threadpool(model.encode_request, parsed)
    job = model.explore_job(parsed, settings, ids, server.config.timeout)
    if not parsed.stream:
        return await result_of(request, model, job)
    return stream_of(model, job, lambda event: iter([event_text(event.name, event.data)]))


async def attention(server: Server, request: Request, body: Json) -> Any:
    """Return the attention weights of a text and its output."""
    parsed, _ = requests.parse(body, requests.AttentionRequest, generates=False)
    model = server.model(parsed.model, TextToText, TextGenerator, Embedder, Classifier, task="show attention")
    ids = await run_in_threadpool(model.encode_request, parsed)
    return await result_of(request, model, model.attention_job(parsed, ids, server.config.timeout))


# --- Translation and summarization ------------------------------------------------------------------------------------


async def text_to_text(server: Server, request: Request, body: Json, *, pipeline: type, task: str) -> Any:
    """Translate or summarize texts."""
    parsed, settings = requests.parse(body, requests.TranslateRequest)
    model = server.model(parsed.model, pipeline, task=task)
    sources = await run_in_threadpool(model.encode, requests.texts_of("text", parsed.text))
    generation = model.generation(parsed, settings, sources, stream=parsed.stream)
    if parsed.stream and (len(sources) > 1 or generation.config.num_return_sequences > 1):
        raise DataError("stream is true for several texts or outputs; expected one of each")
    job = model.generation_job(generation, server.config.timeout)

    def to_json(rows: list[Row]) -> Json:
        outputs = [
            [
                {
                    "text": output.text,
                    "score": finite(output.score),
                    "log_probability": finite(output.log_probability),
                    "finished": output.finished,
                }
                for output in row.outputs
            ]
            or [{"text": "", "score": 0.0, "log_probability": 0.0, "finished": True}]  # of a blank text
            for row in rows
        ]
        return {"model": model.name, "outputs": outputs, "usage": _usage(rows)}

    def to_text(event: Event) -> Iterator[str]:
        if event.name == "text":
            yield event_text("token", {"text": event.data[1]})
        else:
            yield event_text("result", to_json(event.data))

    if parsed.stream:
        return stream_of(model, job, to_text)
    return to_json(await result_of(request, model, job))


def _usage(rows: Sequence[Row]) -> Json:
    return usage(
        sum(len(row.ids) for row in rows if row.number % row.generation.num_copies == 0),
        sum(len(output.tokens) for row in rows for output in row.outputs),
    )


# --- OpenAI-compatible completions and chats --------------------------------------------------------------------------


async def completions(server: Server, request: Request, body: Json) -> Any:
    """Continue prompts."""
    parsed, settings = requests.parse(body, requests.CompletionRequest)
    model = server.model(parsed.model, TextGenerator, task="continue prompts")
    prompt = parsed.prompt
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    prompts = [prompt] if is_one else list(prompt)
    if not prompts or len(prompts) * parsed.n > requests.MAX_TEXTS:
        raise DataError(
            f"prompt has {len(prompts)} texts and n is {parsed.n}; expected 1 to {requests.MAX_TEXTS} outputs"
        )
    for each in prompts:
        if not isinstance(each, str) and not (isinstance(each, list) and each and all(type(x) is int for x in each)):
            raise DataError("prompt is not a text, a list of texts or token ids")
    completion = Completion(model, parsed, is_chat=False)
    completion.num_alternatives = parsed.logprobs
    completion.prompts = prompts
    if "max_new_tokens" not in settings:
        requests.check_limit("max_tokens", parsed.max_tokens, model.max_tokens)
        settings["max_new_tokens"] = parsed.max_tokens
    return await completion.respond(server, request, await run_in_threadpool(model.encode, prompts), settings)


async def chat_completions(server: Server, request: Request, body: Json) -> Any:
    """Answer a chat."""
    parsed, settings = requests.parse(body, requests.ChatRequest)
    model = server.model(parsed.model, TextGenerator, task="answer chats")
    if not model.has_chat:
        raise DataError(f"model {model.name!r} has no chat template; expected /v1/completions")
    completion = Completion(model, parsed, is_chat=True)
    completion.num_alternatives = parsed.top_logprobs if parsed.logprobs else None
    for name in ("max_tokens", "max_completion_tokens"):
        if (limit := getattr(parsed, name)) is not None:
            requests.check_limit(name, limit, model.max_tokens)
            settings["max_new_tokens"] = limit
    messages = [_plain_message(message) for message in parsed.messages]
    return await completion.respond(server, request, await run_in_threadpool(model.encode, [messages]), settings)


def _plain_message(message: Json) -> Json:
    """Return a message with text content and its other keys; raise DataError for other content."""
    role, content = message.get("role"), message.get("content", 0)
    content = "" if content is None else content  # of an assistant that calls tools
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise DataError("messages has content other than text; expected text only")
        content = "".join(part["text"] for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError("messages has an entry without role or content; expected both, as strings")
    return {**message, "content": content}


class Completion:
    """An OpenAI-compatible response.

    Args:
        model: The model.
        parsed: The request.
        is_chat: True for chats, False for completions.
    """

    def __init__(self, model: ServedModel, parsed: Any, *, is_chat: bool) -> None:
        self.model, self.parsed, self.is_chat = model, parsed, is_chat
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.num_alternatives: int | None = None
        self.prompts: list[Any] = []
        self._begun: set[int] = set()  # choices of a stream that have the role

    async def respond(self, server: Server, request: Request, prompts: list[list[int]], settings: Json) -> Any:
        """Run the request and return the response."""
        parsed, model = self.parsed, self.model
        stop = (parsed.stop,) if isinstance(parsed.stop, str) else tuple(parsed.stop or ())
        if len(stop) > 16 or not all(stop):
            raise DataError("stop is invalid; expected up to 16 texts that are not empty")
        generation = model.generation(
            parsed,
            settings,
            [ids for ids in prompts for _ in range(parsed.n)],
            stop=stop,
            num_alternatives=self.num_alternatives,
            stream=parsed.stream,
            num_copies=parsed.n,
        )
        if generation.config.num_return_sequences > 1:
            raise DataError("num_return_sequences is above 1; use n")
        if generation.config.method == "beam" and parsed.n > 1:
            raise DataError(f"n is {parsed.n} and num_beams above 1; expected n of 1")
        job = model.generation_job(generation, server.config.timeout)
        if parsed.stream:
            return stream_of(model, job, self._events, "data: [DONE]\n\n")
        rows: list[Row] = await result_of(request, model, job)
        choices = [self._choice(row) for row in rows]
        return {**self._head(""), "choices": choices, "usage": _usage(rows)}

    def _head(self, suffix: str) -> Json:
        kind = f"chat.completion{suffix}" if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}

    def _choice(self, row: Row) -> Json:
        (output,) = row.outputs
        reason = "stop" if output.finished else "length"
        if self.is_chat:
            content: Json = {"message": {"role": "assistant", "content": output.text}}
        else:
            content = {"text": self._echo(row) + output.text}
        return {"index": row.number, **content, "logprobs": self._logprobs(row), "finish_reason": reason}

    def _echo(self, row: Row) -> str:
        """Return the prompt if the answer begins with it, else an empty text."""
        if not self.parsed.echo:
            return ""
        prompt = self.prompts[row.number // self.parsed.n]
        return prompt if isinstance(prompt, str) else str(self.model.target_tokenizer.decode(prompt))

    def _logprobs(self, row: Row) -> Json | None:
        if self.num_alternatives is None:
            return None
        tokenizer, end = self.model.target_tokenizer, len(row.outputs[0].text)
        texts = texts_of_tokens(tokenizer, [step.token for step in row.steps], row.ids)
        offsets = [0, *itertools.accumulate(map(len, texts))]
        # Without the tokens of a stop text, which is not part of the output.
        steps = [each for each in zip(row.steps, texts, offsets, strict=False) if each[2] < end or not self.parsed.stop]
        alternatives = [
            [_logprob(tokenizer, token, candidate_text(tokenizer, token), value) for token, value in step.alternatives]
            for step, _, _ in steps
        ]
        values = [_logprob(tokenizer, step.token, text, step.log_probability) for step, text, _ in steps]
        if self.is_chat:
            rows = zip(values, alternatives, strict=True)
            return {"content": [{**value, "top_logprobs": others} for value, others in rows]}
        return {
            "tokens": [value["token"] for value in values],
            "token_logprobs": [value["logprob"] for value in values],
            "top_logprobs": [{each["token"]: each["logprob"] for each in others} for others in alternatives],
            "text_offset": [len(self._echo(row)) + offset for _, _, offset in steps],
        }

    def _events(self, event: Event) -> Iterator[str]:
        if event.name == "text":
            number, text = event.data
            yield self._chunk(number, text, None)
            return
        for row in event.data:
            reason = "stop" if row.outputs[0].finished else "length"
            yield self._chunk(row.number, "", reason, self._logprobs(row))
        if (self.parsed.stream_options or {}).get("include_usage"):
            yield event_text("", {**self._head(".chunk"), "choices": [], "usage": _usage(event.data)})

    def _chunk(self, number: int, text: str, reason: str | None, logprobs: Json | None = None) -> str:
        delta: Json = {"content": text} if text else {}
        if number not in self._begun:
            self._begun.add(number)
            delta = {"role": "assistant", "content": text}
        content: Json = {"delta": delta} if self.is_chat else {"text": text}
        choice = {"index": number, **content, "logprobs": logprobs, "finish_reason": reason}
        return event_text("", {**self._head(".chunk"), "choices": [choice]})


def _logprob(tokenizer: Any, token: int, text: str, log_probability: float) -> Json:
    return {"token": text, "logprob": finite(log_probability), "bytes": list(bytes_of_token(tokenizer, token, text))}


# --- Encoders ---------------------------------------------------------------------------------------------------------


async def embeddings(server: Server, request: Request, body: Json) -> Any:
    """Return vectors of texts."""
    parsed, _ = requests.parse(body, requests.EmbeddingsRequest, generates=False)
    model = server.model(parsed.model, Embedder, task="compute vectors")
    texts = requests.texts_of("input", parsed.input)
    num_tokens = sum(map(len, await run_in_threadpool(model.encode, texts)))
    vectors = await result_of(request, model, model.embed_job(texts, server.config.timeout))

    def encode(vector: Any) -> Any:
        if parsed.encoding_format == "float":
            return vector.tolist()
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode("ascii")

    data = [{"object": "embedding", "index": i, "embedding": encode(vector)} for i, vector in enumerate(vectors)]
    return {"object": "list", "model": model.name, "data": data, "usage": usage(num_tokens, 0)}


async def classify(server: Server, request: Request, body: Json) -> Any:
    """Return classes of texts."""
    parsed, _ = requests.parse(body, requests.ClassifyRequest, generates=False)
    model = server.model(parsed.model, Classifier, task="classify")
    texts = requests.texts_of("input", parsed.input)
    predictions = await result_of(request, model, model.embed_job(texts, server.config.timeout))
    return {"model": model.name, "data": [{"index": i, **each._asdict()} for i, each in enumerate(predictions)]}


POST_ROUTES: dict[str, Endpoint] = {
    "/explore": explore,
    "/attention": attention,
    "/translate": functools.partial(text_to_text, pipeline=Translator, task="translate"),
    "/summarize": functools.partial(text_to_text, pipeline=Summarizer, task="summarize"),
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/v1/embeddings": embeddings,
    "/classify": classify,
}
