"""Routes: a function with its path, whose annotations are the schema of its request and of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import email
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.routing import compile_path

import xformer
from xformer.errors import XformerError
from xformer.serve import schema
from xformer.serve.jobs import Event, JobError, public_error, timed_out
from xformer.serve.schema import Json

STATIC = Path(__file__).parent / "static"
_SECONDS_FOR_BODY = 20.0
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Chunks = AsyncIterator[bytes]  # server-sent events


class Route(NamedTuple):
    """A path, and the function that answers its requests.

    Attributes:
        method: "GET" or "POST".
        path: Path.
        function: Coroutine function of the server and the request (of the server and the parts of the path for GET).
        request: Structure of the body; None for GET.
        answer: Structure of the answer, Json for an object that is not described, or Response for a text.
        events: Description of the stream of server-sent events; empty without one.
        is_form: Whether the body is a form, whose values are texts and files, not JSON.
    """

    method: str
    path: str
    function: Callable[..., Awaitable[Any]]
    request: Any
    answer: Any
    events: str
    is_form: bool


ROUTES: list[Route] = []


def route(method: str, path: str, events: str = "", *, is_form: bool = False) -> Callable[[Any], Any]:
    """Declare a `Route`; its schemas are the annotations of the function."""

    def declare(function: Any) -> Any:
        hints = get_type_hints(function)
        answer = next((each for each in get_args(hints["return"]) if each is not Chunks), hints["return"])
        ROUTES.append(Route(method, path, function, hints.get("request"), answer, events, is_form))
        return function

    return declare


def starlette_route(route: Route, server: Any) -> StarletteRoute:
    """Return the route of the application for a route."""

    async def answer(request: Request) -> Any:
        headers = {}
        if route.request is None:
            result = await route.function(server, **request.path_params)
        else:
            limit = server.config.max_audio if route.is_form else server.config.max_body
            content = await read_body(request, limit, is_form=route.is_form)
            body = schema.read(content, route.request, strict=not route.is_form)
            result = await until_disconnect(route.function(server, body), request.receive)
            if ignored := server.ignored(body):
                headers["x-xformer-ignored"] = ", ".join(ignored)
                logging.getLogger("xformer").warning("%s: %s without effect", route.path, headers["x-xformer-ignored"])
        if isinstance(result, AsyncIterator):
            return EventStream(result, headers)
        if isinstance(result, Response):
            result.headers.update(headers)
            return result
        return Response(msgspec.json.encode(result), 200, headers, "application/json")

    async def handle(request: Request) -> Any:
        start, response = time.monotonic(), Response(status_code=500)
        with contextlib.ExitStack() as admitted:
            admitted.callback(lambda: measure(getattr(response, "status_code", 200), time.monotonic() - start))
            try:
                if route.request is not None:
                    admitted.enter_context(server.admit())
                async with asyncio.timeout(server.config.timeout):
                    response = await answer(request)
            except TimeoutError:
                response = error_response(timed_out())
            except ClientDisconnect:
                response = Response(status_code=400)  # which nobody receives
            except (XformerError, JobError) as error:
                response = error_response(error)
            if isinstance(response, EventStream):
                response.admitted = admitted.pop_all()
            return response

    def measure(status: int, seconds: float) -> None:
        server.metrics.add("xformer_requests_total", path=route.path, status=str(status))
        server.metrics.observe("xformer_request_seconds", seconds, path=route.path)

    found = StarletteRoute(route.path, handle, methods=[route.method])
    found.path_regex, *_ = compile_path(route.path.replace("}", ":path}"))  # ids may have slashes
    return found


async def read_body(request: Request, limit: int, *, is_form: bool = False) -> Any:
    """Return the value of a body: JSON, or the fields of a form.

    Raises:
        JobError: For one that is too long, too slow or of another type.
    """
    kind, expected = request.headers.get("content-type", ""), "multipart/form-data" if is_form else "application/json"
    if kind.split(";")[0].strip().lower() != expected:
        raise JobError(f"the content type is not {expected}", 415)
    too_long = JobError(f"the body is too long; expected at most {limit} bytes", 413)
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(_SECONDS_FOR_BODY):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_long
        return parse_form(kind, bytes(body)) if is_form else msgspec.json.decode(body)
    except TimeoutError:
        raise JobError("the body did not arrive in time", 408) from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise JobError(f"the body is not {'a form' if is_form else 'JSON'}: {error}") from error


def parse_form(content_type: str, body: bytes) -> Json:
    """Return the fields of a form: files as bytes, others as texts, and a list for a name with [] at its end."""
    boundary = email.message_from_string(f"Content-Type: {content_type}\n").get_boundary("")
    fields: Json = {}
    delimiter = rb"\r\n--" + re.escape(boundary.encode()) + rb"(?:--)?[ \t]*(?=\r\n|\Z)"
    for part in re.split(delimiter, b"\r\n" + body)[1:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        header = email.message_from_bytes(head.lstrip())
        name = str(header.get_param("name", "", "content-disposition"))
        value = content.decode() if header.get_filename() is None else content
        if name.endswith("[]"):
            fields.setdefault(name.removesuffix("[]"), []).append(value)
        elif value:
            fields[name] = value
    return fields


class EventStream:
    """A response of server-sent events, which ends if the client disconnects.

    Args:
        chunks: Events.
        headers: Further headers.
    """

    def __init__(self, chunks: Chunks, headers: dict[str, str]) -> None:
        self.chunks, self.admitted = chunks, contextlib.ExitStack()
        self.headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store", **headers}

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send the events."""
        with self.admitted, contextlib.suppress(ClientDisconnect):
            async with contextlib.aclosing(self.chunks):  # type: ignore[type-var]
                await until_disconnect(self._send(send), receive)

    async def _send(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
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
        await asyncio.wait(tasks)


async def stream(events: AsyncIterator[Event], write: Callable[[Event], Sequence[bytes]], end: bytes = b"") -> Chunks:
    """Return the server-sent events for those of a job; an error before the first one is raised.

    Args:
        events: Events of a job.
        write: Returns what to send for an event.
        end: What follows the last event.
    """
    first = await anext(events)

    async def chunks() -> Chunks:
        async with contextlib.aclosing(events):  # type: ignore[type-var]
            try:
                for chunk in write(first):
                    yield chunk
                async for event in events:
                    for chunk in write(event):
                        yield chunk
            except (XformerError, JobError) as error:
                yield event_bytes("error", error_answer(error)[1])
            yield end

    return chunks()


def event_bytes(name: str, data: Any) -> bytes:
    """Return a server-sent event; without a name, only its data."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + msgspec.json.encode(data) + b"\n\n"


def error_answer(error: Exception) -> tuple[int, schema.Error]:
    """Return the status and the answer of an error."""
    if isinstance(error, HTTPException):
        error = JobError(str(error.detail), error.status_code)
    known = public_error(error)
    kind = _ERROR_TYPES.get(known.status, "invalid_request_error" if known.status < 500 else "server_error")
    details = schema.ErrorDetails(" ".join(str(known).split()), kind, known.param, known.code)
    return known.status, schema.Error(details)


def error_response(error: Exception) -> Response:
    """Return the response of an error."""
    status, answer = error_answer(error)
    headers = {"retry-after": "1"} if status == 429 else {"www-authenticate": "Bearer"} if status == 401 else None
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


# --- Documentation ----------------------------------------------------------------------------------------------------


def openapi(max_tokens: int) -> Json:
    """Return the description of the routes in OpenAPI 3.1.

    Args:
        max_tokens: Largest number of new tokens that the server allows.
    """
    types = [each for route in ROUTES for each in (route.request, route.answer) if isinstance(each, msgspec.StructMeta)]
    _, schemas = msgspec.json.schema_components([*types, schema.Error], ref_template="#/components/schemas/{name}")
    for name in ("max_tokens", "max_completion_tokens", "max_new_tokens", "min_new_tokens"):
        for each in schemas.values():
            if name in each.get("properties", {}):
                each["properties"][name]["maximum"] = max_tokens
    for each in schemas.values():
        for field in each.get("properties", {}).values():
            if field.get("default", 0) is None:
                del field["default"]
    error = {"description": "An error", "content": _content(schema.Error)}
    paths: Json = {}
    for route in sorted(ROUTES, key=lambda route: route.path):
        content = _content(route.answer)
        if route.events:
            content["text/event-stream"] = {"schema": {"type": "string", "description": route.events}}
        success = {"description": "Success", "content": content}
        summary = (route.function.__doc__ or "").split("\n")[0]
        entry: Json = {"summary": summary, "responses": {"200": success, "default": error}}
        if route.request is not None:
            kind = "multipart/form-data" if route.is_form else "application/json"
            entry["requestBody"] = {"required": True, "content": _content(route.request, kind)}
        if "{model}" in route.path:
            entry["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[route.path] = {route.method.lower(): entry}
    return {
        "openapi": "3.1.0",
        "info": {"title": "xformer serve", "version": xformer.__version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _content(structure: Any, kind: str = "application/json") -> Json:
    if not isinstance(structure, msgspec.StructMeta):
        return {"text/plain": {"schema": {}}} if structure is Response else {kind: {"schema": {"type": "object"}}}
    return {kind: {"schema": {"$ref": f"#/components/schemas/{structure.__name__}"}}}
