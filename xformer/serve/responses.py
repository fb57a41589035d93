"""The answers of the API as JSON schemas, for its OpenAPI description."""

from __future__ import annotations

from typing import Any

from xformer.serve.tokens import Json

_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "None": "null"}


def schema(value: Any) -> Json:
    """Return the schema of a short notation.

    Args:
        value: Names of types as in annotations ("str", "float | None"), a list with the notation of its items, a
            dictionary with the notations of the fields of an object, or a tuple of alternatives.

    Example:
        >>> schema({"text": "str", "score": "float | None"})["properties"]["score"]
        {'type': ['number', 'null']}
    """
    if isinstance(value, list):
        return {"type": "array", "items": schema(value[0])}
    if isinstance(value, tuple):
        return {"anyOf": [schema(each) for each in value]}
    if isinstance(value, dict):
        properties = {name: schema(each) for name, each in value.items()}
        return {"type": "object", "properties": properties, "required": list(value)}
    types = [_TYPES[name] for name in value.split(" | ")]
    return {"type": types if len(types) > 1 else types[0]}


def notation(value: Any) -> str:
    """Return the short notation as text for readers.

    Example:
        >>> notation({"labels": ["str"], "usage": ({"tokens": "int"}, "None")})
        '{labels: [str], usage: {tokens: int} | None}'
    """
    if isinstance(value, list):
        return f"[{notation(value[0])}]"
    if isinstance(value, tuple):
        return " | ".join(map(notation, value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {notation(each)}" for name, each in value.items()) + "}"
    return str(value)


ERROR = {"error": {"message": "str", "type": "str", "param": "str | None", "code": "str | None"}}

_USAGE = {"prompt_tokens": "int", "completion_tokens": "int", "total_tokens": "int"}
_TOKEN = {"id": "int", "token": "str", "text": "str"}
_PROBABILITY = {**_TOKEN, "log_probability": "float", "probability": "float"}
_OUTPUT = {"text": "str", "score": "float", "log_probability": "float", "finished": "bool"}
_OUTPUTS = {"model": "str", "outputs": [[_OUTPUT]], "usage": _USAGE}
_CANDIDATE = {
    **_TOKEN,
    "group": "int",
    "parent": "int | None",
    "log_probability": "float",
    "score": "float",
    "status": "str",
}
_COMPLETION = {"id": "str", "object": "str", "created": "int", "model": "str"}
_LOGPROBS = {
    "tokens": ["str"],
    "token_logprobs": ["float"],
    "top_logprobs": ["dict"],
    "text_offset": ["int"],
}
_LOGPROB = {"token": "str", "logprob": "float", "bytes": ["int"]}
_MODEL = {
    "id": "str",
    "object": "str",
    "created": "int",
    "owned_by": "str",
    "task": "str",
    "class": "str",
    "backend": "str",
    "num_parameters": "int",
    "vocab_size": "int",
    "encoder_layers": "int",
    "decoder_layers": "int",
    "heads": "int",
    "context_length": "int | None",
    "attention": ["str"],
    "supports": "dict",
    "defaults": "dict | None",
    "has_log": "bool",
    "example": "str",
}
_CHOICE = {"index": "int", "finish_reason": "str"}

RESPONSES: dict[str, Any] = {
    "/translate": _OUTPUTS,
    "/summarize": _OUTPUTS,
    "/v1/completions": {
        **_COMPLETION,
        "choices": [{**_CHOICE, "text": "str", "logprobs": (_LOGPROBS, "None")}],
        "usage": _USAGE,
    },
    "/v1/chat/completions": {
        **_COMPLETION,
        "choices": [
            {
                **_CHOICE,
                "message": {"role": "str", "content": "str"},
                "logprobs": ({"content": [{**_LOGPROB, "top_logprobs": [_LOGPROB]}]}, "None"),
            }
        ],
        "usage": _USAGE,
    },
    "/v1/embeddings": {
        "object": "str",
        "model": "str",
        "data": [{"object": "str", "index": "int", "embedding": (["float"], "str")}],
        "usage": _USAGE,
    },
    "/classify": {
        "model": "str",
        "data": [{"index": "int", "label": "str", "probability": "float", "probabilities": "dict"}],
    },
    "/explore": {
        "model": "str",
        "task": "str",
        "method": "str",
        "source": {"text": "str", "tokens": [_TOKEN]},
        "outputs": [{**_OUTPUT, "tokens": [{**_PROBABILITY, "alternatives": [_PROBABILITY]}]}],
        "alignment": ([["float"]], "None"),
        "beam": ({"groups": "int", "steps": [[_CANDIDATE]]}, "None"),
        "usage": _USAGE,
        "seconds": "float",
    },
    "/attention": {
        "model": "str",
        "source": {"text": "str", "tokens": [_TOKEN]},
        "output": {"tokens": [_TOKEN]},
        "attention": "dict",
    },
    "/v1/models": {"object": "str", "data": [_MODEL]},
    "/runs": {"runs": ["str"]},
    "/runs/{model}": {
        "model": "str",
        "metric": "str | None",
        "label_smoothing": "float",
        "steps": "dict",
        "validations": ["dict"],
    },
    "/health": {"status": "str", "version": "str", "running": "int", "waiting": "int"},
}
"""Successful answers, by path."""

EVENTS = {
    "/translate": 'Events "token" with {"text": ...}, then "result" with the whole answer.',
    "/explore": 'Events "source", then "token" or "step" (beam search), then "result" with the whole answer.',
    "/v1/completions": 'OpenAI-compatible chunks ("object": "text_completion"), then [DONE].',
    "/v1/chat/completions": 'OpenAI-compatible chunks ("object": "chat.completion.chunk"), then [DONE].',
}
"""Streams of server-sent events, by path. An error during a stream is an event "error" with the answer of errors."""
EVENTS["/summarize"] = EVENTS["/translate"]
