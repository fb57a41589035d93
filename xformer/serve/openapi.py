"""The OpenAPI description of the API, derived from the classes of requests, and a page that shows it."""

from __future__ import annotations

import dataclasses
import html
from typing import Any

import xformer
from xformer.config import Config, describe_values, options_of
from xformer.generation import GenerationConfig
from xformer.serve import requests
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


def openapi() -> Json:
    """Return the description in OpenAPI 3.1."""
    error = {"description": "An error", "content": _json_content({"$ref": "#/components/schemas/Error"})}
    responses = {"200": {"description": "Success", "content": _json_content({"type": "object"})}, "default": error}
    paths: Json = {path: {"get": {"summary": text, "responses": responses}} for path, text in _GET.items()}
    paths["/runs/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    schemas: Json = {"Error": _ERROR}
    for path, request, generates, text in _POST:
        schemas[request.__name__] = _schema(request, generates)
        body = {"required": True, "content": _json_content({"$ref": f"#/components/schemas/{request.__name__}"})}
        stream = {"text/event-stream": {"schema": {"type": "string"}}} if "stream" in _properties(request) else {}
        success = {"description": "Success", "content": {**_json_content({"type": "object"}), **stream}}
        paths[path] = {"post": {"summary": text, "requestBody": body, "responses": {**responses, "200": success}}}
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


def docs_page() -> str:
    """Return an HTML page that lists paths and fields."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>xformer serve</title><h1>xformer serve</h1>",
        "<p>Bodies are JSON. <a href=/openapi.json>openapi.json</a> has this description in OpenAPI 3.1.</p>",
    ]
    parts += [f"<h2>GET {html.escape(path)}</h2><p>{html.escape(text)}</p>" for path, text in _GET.items()]
    for path, request, generates, text in _POST:
        fields = "Fields of the search follow below." if generates else ""
        parts += [f"<h2>POST {path}</h2><p>{html.escape(text)} {fields}</p>{_table(request)}"]
    parts += [f"<h2>Fields of the search</h2>{_table(GenerationConfig)}</html>"]
    return "".join(parts)


_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _json_content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _schema(request: type[Config], generates: bool) -> Json:
    properties = {**(_properties(GenerationConfig) if generates else {}), **_properties(request)}
    required = [name for name, _, _, field in options_of(request) if _is_required(field)]
    return {
        "type": "object",
        "description": request.__doc__,
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


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


def _table(config: type[Config]) -> str:
    rows = []
    for name, annotation, _, field in options_of(config):
        values = describe_values(field.metadata)
        default = "required" if _is_required(field) else f"default {field.default}"
        cells = (name, annotation, default, f"{field.metadata['help']} {values and f'({values})'}")
        rows.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"
