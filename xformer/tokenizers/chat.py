"""Chat templates: Jinja programs in a checkpoint that write a conversation as one prompt.

Templates are untrusted code. They run in Jinja's sandbox, with bounds on loops and on the length of the output.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError, DataError
from xformer.text.extras import library_errors, read_bytes, require

CHAT_TEMPLATE_FILE = "chat_template.jinja"
_MAX_TEMPLATE = 1 << 20  # characters
_MAX_OUTPUT = 1 << 26  # characters
_MAX_ITEMS = 1_000_000  # of all calls of range() in one rendering
_MAX_REPEATED = 1 << 20  # elements of a repeated text or list
_MAX_BITS = 4096  # of a product or power


def read_chat_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a checkpoint by name; the main one is "default".

    Files of templates replace those in the settings, the contents of tokenizer_config.json. Raises CheckpointError if a
    template cannot be read or has a wrong type.
    """
    templates: dict[str, Any] = {}
    value = settings.get("chat_template")
    if isinstance(value, list):
        templates = {str(each.get("name")): each.get("template") for each in value if isinstance(each, Mapping)}
    elif isinstance(value, Mapping):
        templates = dict(value)
    elif value is not None:
        templates = {"default": value}
    named = [(path.stem, path) for path in template_files(directory)]
    for name, path in [*named, ("default", directory / CHAT_TEMPLATE_FILE)]:
        if path.exists():
            with library_errors(f"cannot read chat template {path}"):
                templates[name] = str(read_bytes(path, "chat template", 4 * _MAX_TEMPLATE), "utf-8-sig")
    for name, template in templates.items():
        if not isinstance(template, str) or len(template) > _MAX_TEMPLATE:
            raise CheckpointError(
                f"the chat template {name!r} of {directory} is not a text of at most {_MAX_TEMPLATE} characters"
            )
    return templates


def template_files(directory: Path) -> list[Path]:
    """Return the files of named chat templates."""
    return sorted((directory / "chat_templates").glob("*.jinja"))


def render_chat_template(template: str, **variables: Any) -> str:
    """Return the prompt that a chat template writes for messages, add_generation_prompt, bos_token, tools, ...

    Raises:
        CheckpointError: If the template is invalid, or takes too many steps.
        DataError: If the template rejects the messages.
        BackendError: If the package jinja2 is missing.
    """
    jinja2 = require("jinja2")
    try:
        pieces, length = [], 0
        variables["range"] = _bounded_range(jinja2.exceptions.SecurityError)
        for piece in _compiled(template).generate(**variables):
            pieces.append(piece)
            length += len(piece)
            if length > _MAX_OUTPUT:
                raise CheckpointError(f"the chat template wrote more than {_MAX_OUTPUT} characters")
        return "".join(pieces)
    except _Rejection as error:
        raise DataError(f"the chat template rejects the messages: {error}") from error
    except CheckpointError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"the chat template failed ({type(error).__name__}: {reason})") from error


class _Rejection(Exception):
    """Raised by a template that calls raise_exception."""


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
    """Return the environment that the templates of Hugging Face models expect."""
    sandbox, ext, nodes = (require(f"jinja2.{name}") for name in ("sandbox", "ext", "nodes"))

    class Environment(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc, name-defined]
        """Sandbox that also bounds the products of numbers and texts."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for sequence, count in ((left, right), (right, left)):
                is_repetition = isinstance(sequence, (str, list, tuple)) and isinstance(count, int)
                if is_repetition and len(sequence) * count > _MAX_REPEATED:
                    raise OverflowError(f"it repeats {len(sequence)} elements {count} times")
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                if bits > _MAX_BITS:
                    raise OverflowError(f"it computes a number of {bits} bits")
            return super().call_binop(context, operator, left, right)

    class Generation(ext.Extension):  # type: ignore[misc, name-defined]
        """The tag {% generation %} around answers, which writes the variables generation_start and generation_end."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            names = (nodes.Name(f"generation_{name}", "load", lineno=line) for name in ("start", "end"))
            start, end = (nodes.Output([name], lineno=line) for name in names)
            return [start, *body, end]

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    return environment


def _bounded_range(error: type[Exception]) -> Any:
    remaining = _MAX_ITEMS

    def bounded_range(*args: int) -> range:
        nonlocal remaining
        values = range(*args)
        remaining -= len(values)
        if remaining < 0:
            raise error(f"its loops have more than {_MAX_ITEMS} steps")
        return values

    return bounded_range


def _raise_exception(message: str) -> None:
    raise _Rejection(" ".join(str(message).split())[:300])


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes the characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
