"""The OpenAPI description of the API, derived from the classes of requests, and a page that shows it."""

from __future__ import annotations

import dataclasses
import html
from typing import Any

import xformer
from xformer.config import Config, describe_values, options_of
from xformer.generation import GenerationConfig
from xformer.serve import requests
from xformer.serve.responses import ERROR, EVENTS, RESPONSES, notation
from xformer.serve.responses import schema as response_schema
from xformer.serve.tokens import Json

# Path, request, whether it has the fields of GenerationConfig, summary.
_POST: list[tuple[str, type[Config], bool, str]] = [
    ("/translate", requests.TranslateRequest, True, "Translate texts."),
    ("/summarize", requests.TranslateRequest, True, "Summarize texts."),
    ("/v1/completions", requests.CompletionRequest, True, "Continue prompts with a language model."),
    ("/v1/chat/completions", requests.ChatRequest, True, "Answer a chat with a language model."),
    ("/v1/embeddings", requests.EmbeddingsRequest, False, "Compute vectors of texts with an encoder."),
    ("/classify", requests.ClassifyRequest, False, "Classify texts."),
    ("/explore", requests.ExploreRequest, True, "Generate, and show alternatives, alignment and the beam."),
    ("/attention", requests.AttentionRequest, False, "Return attention weights by layer and head, as base64 float32."),
]
_GET = {
    "/v1/models": "List the models.",
    "/runs": "List the models that have a training log.",
    "/runs/{model}": "Return the training curves of a model.",
    "/health": "Return the state of the server.",
}
_TYPES: dict[str, Json] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "list[str]": {"type": "array", "items": {"type": "string"}},
    "list[int]": {"type": "array", "items": {"type": "integer"}},
    "list[Any]": {"type": "array"},
    "list[dict[str, Any]]": {"type": "array", "items": {"type": "object"}},
    "dict[str, Any]": {"type": "object"},
    "tuple[int, ...]": {"type": "array", "items": {"type": "integer"}},
}
_BOUNDS = {"at_least": "minimum", "at_most": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}


def openapi(max_tokens: int) -> Json:
    """Return the description in OpenAPI 3.1.

    Args:
        max_tokens: Largest number of new tokens that the server allows.
    """
    error = {"description": "An error", "content": _json_content({"$ref": "#/components/schemas/Error"})}
    paths: Json = {}
    for path, text in _GET.items():
        success = {"description": "Success", "content": _json_content(response_schema(RESPONSES[path]))}
        paths[path] = {"get": {"summary": text, "responses": {"200": success, "default": error}}}
    paths["/runs/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    schemas: Json = {"Error": response_schema(ERROR)}
    for path, request, generates, text in _POST:
        schemas[request.__name__] = _schema(request, generates, max_tokens)
        body = {"required": True, "content": _json_content({"$ref": f"#/components/schemas/{request.__name__}"})}
        content = _json_content(response_schema(RESPONSES[path]))
        if path in EVENTS:
            content["text/event-stream"] = {"schema": {"type": "string", "description": EVENTS[path]}}
        success = {"description": "Success", "content": content}
        paths[path] = {"post": {"summary": text, "requestBody": body, "responses": {"200": success, "default": error}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "xformer serve", "version": xformer.__version__},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


_HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>xformer serve</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
    '<link rel="icon" href="static/icon.svg" type="image/svg+xml">'
    '<link rel="stylesheet" href="static/style.css"></head>'
)


def docs_page(max_tokens: int) -> str:
    """Return an HTML page that lists paths and fields; arguments as of `openapi`."""
    parts = [
        f'{_HEAD}<body class="docs"><h1>xformer serve</h1>',
        "<p>Bodies are JSON. <a href=/openapi.json>openapi.json</a> has this description in OpenAPI 3.1.</p>",
    ]
    parts += [
        f"<h2>GET {html.escape(path)}</h2><p>{html.escape(text)}</p>{_answer(path)}" for path, text in _GET.items()
    ]
    for path, request, generates, text in _POST:
        fields = "Fields of the search follow below." if generates else ""
        parts += [f"<h2>POST {path}</h2><p>{html.escape(text)} {fields}</p>{_table(request)}{_answer(path)}"]
    limits = f"At most {max_tokens} new tokens and {requests.MAX_BEAMS} beams. Temperature 0 is greedy search."
    defaults = "Defaults are those of the model, see <a href=/v1/models>/v1/models</a>."
    table = _table(GenerationConfig, has_defaults=False)
    parts += [f"<h2>Fields of the search</h2><p>{limits} {defaults}</p>{table}</body></html>"]
    return "".join(parts)


def _answer(path: str) -> str:
    stream = f"<p>Stream: {html.escape(EVENTS[path])}</p>" if path in EVENTS else ""
    return f"<p>Answer: <code>{html.escape(notation(RESPONSES[path]))}</code></p>{stream}"


def _json_content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _schema(request: type[Config], generates: bool, max_tokens: int) -> Json:
    search = _properties(GenerationConfig) if generates else {}
    for schema in search.values():
        del schema["default"]
        schema["description"] += " Default: that of the model, see /v1/models."
    properties = {**search, **_properties(request)}
    for name, maximum in _maxima(max_tokens).items():
        if name in properties:
            properties[name]["maximum"] = maximum
    if generates:
        properties["temperature"] |= {
            "minimum": 0,
            "description": search["temperature"]["description"] + " 0: greedy search.",
        }
    for name, accepted in requests.neutral_fields(request).items():
        properties[name] = {"enum": list(accepted), "description": "Accepted without effect."}
    required = [name for name, _, _, field in options_of(request) if _is_required(field)]
    return {
        "type": "object",
        "description": request.__doc__,
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _maxima(max_tokens: int) -> dict[str, int]:
    """Return the limits of a server, which are lower than those of the library."""
    tokens = ("max_tokens", "max_completion_tokens", "max_new_tokens", "min_new_tokens")
    return dict.fromkeys(tokens, max_tokens) | dict.fromkeys(("num_beams", "num_return_sequences"), requests.MAX_BEAMS)


def _is_required(field: Any) -> bool:
    return field.default is dataclasses.MISSING


def _properties(config: type[Config]) -> Json:
    properties = {}
    for name, annotation, _, field in options_of(config):
        types = [dict(_TYPES[each]) for each in annotation.split(" | ") if each != "None"]
        schema: Json = types[0] if len(types) == 1 else {"anyOf": types}
        schema["description"] = field.metadata["help"]
        if field.metadata["choices"]:
            schema["enum"] = list(field.metadata["choices"])
        bounds = field.metadata["bounds"]
        schema |= {_BOUNDS[key]: bound for key, bound in bounds.items() if bound is not None}
        if not _is_required(field):
            schema["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
        properties[name] = schema
    return properties


def _table(config: type[Config], *, has_defaults: bool = True) -> str:
    rows = []
    for name, annotation, _, field in sorted(options_of(config), key=lambda option: not _is_required(option[3])):
        values = describe_values(field.metadata)
        default = "required" if _is_required(field) else f"default {field.default}"
        shown = (name, annotation, default) if has_defaults else (name, annotation)
        cells = (*shown, f"{field.metadata['help']} {values and f'({values})'}")
        rows.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    neutral = ", ".join(requests.neutral_fields(config))
    note = f"<p>Accepted only with values that have no effect: {neutral}.</p>" if neutral else ""
    return f"<table>{''.join(rows)}</table>{note}"
