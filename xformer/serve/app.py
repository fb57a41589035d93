"""The HTTP application: access, limits and security of `xformer serve`."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from xformer.serve import audio, interpret, native, openai, responses  # noqa: F401 - they declare routes
from xformer.serve.config import LOOPBACK, ServeConfig
from xformer.serve.jobs import JobError
from xformer.serve.models import ServedModel, Server
from xformer.serve.routes import ROUTES, STATIC, Receive, Send, error_response, openapi, starlette_route
from xformer.text.extras import require

_PAGES = Path(__file__).parents[2] / "docs"  # of a clone
_WILDCARDS = ("0.0.0.0", "::", "")
_PUBLIC_PATHS = ("/", "/health", "/openapi.json", "/docs", "/favicon.ico")
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Guard:
    """ASGI middleware: checks client, host, origin and token, and adds security headers.

    Args:
        app: The application.
        config: Access.
    """

    def __init__(self, app: Any, config: ServeConfig) -> None:
        self.app, self.config = app, config

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
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

    def _refusal(self, scope: dict[str, Any]) -> JobError | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        # Against DNS rebinding: a page of another site that resolves to this machine sends its own name.
        # A proxy may send its own name, which is that of its origin.
        proxies = [_hostname(origin.split("://")[-1]) for origin in self.config.cors_origins]
        if self.config.host not in _WILDCARDS and _hostname(host) not in (*LOOPBACK, self.config.host, *proxies):
            return JobError(f"host {host[:80]!r} is not served; expected {self.config.host}", 403, "host")
        origin = headers.get("origin")
        if origin is not None and origin.split("://")[-1] != host and origin not in self.config.cors_origins:
            return JobError(f"origin {origin[:80]!r} may not use this server", 403, "origin")
        if self.config.token is None:  # whatever address the application listens on
            client = scope.get("client")
            if client is not None and not _is_local(client[0]):
                return JobError(f"client {client[0]} is another machine; expected a server with a token", 403, "client")
            return None
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in _PUBLIC_PATHS and not path.startswith(("/static/", "/pages/")):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            expected = self.config.token.encode()
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode("latin-1"), expected):
                return JobError("the token is missing or wrong; expected Authorization: Bearer TOKEN", 401, "token")
        return None


def _hostname(host: str) -> str:
    """Return the name in a Host header, without the port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()


def _is_local(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def create_app(models: Sequence[ServedModel], config: ServeConfig | None = None) -> Any:
    """Return the ASGI application that serves models.

    Args:
        models: Models to serve; the first one that can do a task is its default.
        config: Limits and access. Without a token, only programs on this machine can connect.
    """
    server = Server(models, config)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        server.is_draining = True
        await asyncio.get_running_loop().run_in_executor(None, server.close)

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def index(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def docs(request: Request) -> Response:
        return FileResponse(STATIC / "docs.html")

    async def page(request: Request) -> Response:
        name = request.path_params["page"]
        path, found = pages.lookup_path(f"{name}.md")
        if not found:
            raise HTTPException(404, "the page is not installed; the folder docs of the repository has it")
        text = require("markdown_it").MarkdownIt().enable("table").render(Path(path).read_text(encoding="utf-8"))
        root = "../" * (1 + name.count("/"))  # a proxy may serve the application under any prefix
        return HTMLResponse((STATIC / "page.html").read_text(encoding="utf-8").format(root=root, text=text))

    async def description(request: Request) -> Response:
        return JSONResponse(openapi(server.config.max_tokens))

    routes: list[Any] = [Route("/", index), Route("/docs", docs), Route("/openapi.json", description)]
    routes += [starlette_route(route, server) for route in ROUTES]
    here = Path.cwd() / "docs"  # an installed package serves the pages of the clone that it was installed from
    pages = StaticFiles(directory=here if (here / "tutorial" / "1-attention.md").is_file() else _PAGES, check_dir=False)
    routes += [Route("/pages/{page:path}.md", page), Mount("/pages", pages)]
    routes.append(Mount("/static", StaticFiles(directory=STATIC)))
    handlers: Any = {HTTPException: on_error, Exception: on_error}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.state.server = server
    guarded = Guard(app, server.config)
    if not server.config.cors_origins:
        return guarded
    access: Any = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["x-xformer-ignored"]}
    return CORSMiddleware(guarded, allow_origins=server.config.cors_origins, **access)
