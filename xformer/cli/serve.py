r"""`xformer serve`: serve models to the browser and to programs.

Serve models of text and speech on this machine: a page in the browser to explore them, and an HTTP API. Needs the extra
serve: pip install "array-transformers\[cli,serve]".

\b
Explore a run         xformer serve --model run
Compare two models    xformer serve --model run --model other
Name a model          xformer serve --model run --name translator
Another port          xformer serve --model run --port 9000
With a draft model    xformer serve --model SmolLM2-1.7B --draft-model SmolLM2-135M
On the local network  xformer serve --model run --host 0.0.0.0 --token SECRET

\b
Translate:
  curl localhost:8000/translate -H 'Content-Type: application/json' \
    -d '{"text": "Ein Mann schläft .", "num_beams": 4}'
Answer a chat:
  curl localhost:8000/v1/chat/completions \
    -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

Transcribe a recording:
  curl localhost:8000/v1/audio/transcriptions -F file=@speech.wav

Paths: /translate, /summarize, /v1/completions, /v1/chat/completions, /v1/responses, /v1/embeddings,
/v1/audio/transcriptions, /classify, /v1/rerank, /v1/score, /tokenize, /explore, /attention, /layers, /runs, /metrics;
http://localhost:8000/docs lists their fields. Concurrent requests with the same settings are computed together. Only
this machine can connect, unless --host and --token are passed. Ctrl-C waits for running requests and stops.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from xformer.cli import _io
from xformer.cli._options import DraftModelOption, check_utf8, config_options, value_option
from xformer.config import field_names
from xformer.errors import ConfigError
from xformer.families.checkpoint import check_exists, is_public
from xformer.pipelines import TextGenerator, pipeline_class
from xformer.runs.console import make_console
from xformer.serve.config import ServeConfig, check_ids
from xformer.text.extras import require

_NAME_HELP = "Id of a model in requests; repeatable, one for each --model in the same order."
_SECONDS_TO_STOP = 20
_BACKLOG = 256  # connections


@config_options(ServeConfig, names=field_names(ServeConfig))
def serve(
    model: Annotated[
        list[Path],
        value_option("--model", "DIR", "Directory of a run or public checkpoint, or a .gguf file; repeatable."),
    ],
    name: Annotated[
        list[str] | None,
        value_option("--name", "ID", f"{_NAME_HELP} \\[default: the last part of its path]", callback=check_utf8),
    ] = None,
    draft_model: DraftModelOption = None,
    *,
    settings: dict[str, Any],
    loading: dict[str, Any],
) -> None:
    """Serve models over HTTP."""
    uvicorn = require("uvicorn")
    require("starlette")
    from xformer.serve.app import create_app
    from xformer.serve.models import ServedModel

    if settings.get("token") == "auto":
        settings["token"] = secrets.token_urlsafe(24)
    config, names = ServeConfig(**settings), _names(model, name or ())
    for path in model:
        check_exists(path)
    classes = [pipeline_class(path) for path in model]
    options: dict[Any, dict[str, Any]] = {} if draft_model is None else {TextGenerator: {"draft_model": draft_model}}
    if draft_model is not None and TextGenerator not in classes:
        raise ConfigError("--draft-model is given without a model that continues texts; expected a language model")
    sockets = [listen(config.host, config.port)]
    models = []
    for id_, path, kind in zip(names, model, classes, strict=True):
        pipeline: Any = _io.load_pipeline(kind, path, **loading, **options.get(kind, {}))
        models.append(ServedModel(id_, pipeline, config, None if is_public(path) else path))
    settings = dict.fromkeys(("access_log", "server_header", "proxy_headers"), False)
    settings |= {"log_level": "warning", "ws": "none"}
    settings |= {"backlog": _BACKLOG, "timeout_graceful_shutdown": _SECONDS_TO_STOP}
    server = uvicorn.Server(uvicorn.Config(create_app(models, config), **settings))
    sockets[0].listen(_BACKLOG)  # from here on, connections wait for the server instead of failing
    shown = f"[{config.host}]" if ":" in config.host else config.host
    fragment = "" if config.token is None else f"/#token={config.token}"
    console = make_console(stderr=True)
    console.print(f"{_io.program()} serves {', '.join(each.name for each in models)}; Ctrl-C stops it")
    console.print(f"open http://{shown}:{sockets[0].getsockname()[1]}{fragment}")
    server.run(sockets=sockets)


def _names(paths: Sequence[Path], names: Sequence[str] = ()) -> list[str]:
    """Return the id of each model: that of --name, or the last part of its path as given, links not resolved."""
    if names and len(names) != len(paths):
        raise ConfigError(f"--name is given {len(names)} times for {len(paths)} models; expected one for each --model")
    ids = [*names] or [Path(os.path.abspath(path)).name.removesuffix(".gguf") for path in paths]
    if "" in ids:
        raise ConfigError(f"--model {paths[ids.index('')]} has no id; expected one, which --name sets")
    check_ids(ids)
    return ids


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket; raise ConfigError if the address is in use or invalid.

    asyncio turns off Nagle's algorithm, which delays answers by 40 ms, only for sockets with an explicit protocol.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        if os.name == "posix":  # on Windows, another program could take the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --port"
        ) from error
    return listener
