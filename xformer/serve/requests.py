"""The requests of the API: fields with help and ranges, and the generation settings of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from xformer.config import Config, check_keys, check_value, field_names, option, options_of
from xformer.errors import ConfigError, DataError
from xformer.generation import GenerationConfig
from xformer.pipelines import TextGenerator, TextToText

MAX_BEAMS = 32
MAX_TEXTS = 64
MAX_PHRASES, MAX_PHRASE_CHARACTERS = 64, 200
Settings = dict[str, Any]


class Steering(Config):
    """Arguments of pipelines that requests share."""

    seed: int | None = option(
        "Seed of sampling; the same seed gives the same outputs. Default: a new one for each request.", default=None
    )
    sequence_bias: list[str] | None = option("Words and phrases (topics) to favor.", default=None)
    prefix: str | None = option("Text that outputs begin with; encoder-decoders only.", default=None)
    target_length: int | None = option(
        "Length of outputs; encoder-decoders only.", default=None, at_least=1, at_most=100_000
    )
    length_unit: str = option("Unit of target_length.", default="tokens", choices=("tokens", "words"))


class TranslateRequest(Steering):
    """Texts to translate or summarize, with any field of `GenerationConfig`."""

    text: str | list[str] = option("A text, or a list of texts.")
    model: str | None = option("Id of the model. Default: the first suitable one.", default=None)
    stream: bool = option("Send the output token by token, as server-sent events; one text.", default=False)


class ExploreRequest(Steering):
    """A text to generate from, with everything that is shown about the search, and any field of `GenerationConfig`."""

    text: str | None = option("Source text or prompt.", default=None)
    messages: list[dict[str, Any]] | None = option("Messages of a chat, instead of a text.", default=None)
    model: str | None = option("Id of the model. Default: the first suitable one.", default=None)
    num_alternatives: int = option("Alternatives of each token.", default=10, at_least=0, at_most=50)
    stream: bool = option("Send tokens or beam steps as they are generated.", default=False)


class AttentionRequest(Config):
    """A text, and the output whose attention is shown."""

    text: str | None = option("Source text or prompt.", default=None)
    messages: list[dict[str, Any]] | None = option("Messages of a chat, instead of a text.", default=None)
    output_ids: list[int] | None = option("Token ids of the output; omit them for encoders.", default=None)
    kinds: list[str] | None = option('Any of "encoder", "decoder" and "cross". Default: all.', default=None)
    layer: int | None = option("One layer, counted from 0. Default: all.", default=None, at_least=0)
    model: str | None = option("Id of the model. Default: the first one.", default=None)


class OpenAIRequest(Config):
    """Fields that completions and chats share."""

    model: str | None = option("Id of the model. Default: the first language model.", default=None)
    n: int = option("Outputs per prompt or chat.", default=1, at_least=1, at_most=MAX_TEXTS)
    stop: str | list[str] | None = option("Stop strings; not included in the output.", default=None)
    stream: bool = option("Send the output token by token, as server-sent events.", default=False)
    stream_options: dict[str, Any] | None = option('{"include_usage": true} adds the usage to a stream.', default=None)
    seed: int | None = option("Seed of sampling. Default: a new one for each request.", default=None)
    sequence_bias: list[str] | None = option("Words and phrases to favor.", default=None)
    user: str | None = option("Ignored.", default=None)


class CompletionRequest(OpenAIRequest):
    """A prompt to continue (OpenAI-compatible), with any field of `GenerationConfig`."""

    prompt: str | list[Any] = option("A text, a list of texts, token ids, or a list of lists of them.")
    max_tokens: int | None = option("Maximum number of new tokens.", default=16, at_least=1, at_most=100_000)
    logprobs: int | None = option("Alternatives of each token to return.", default=None, at_least=0, at_most=50)
    echo: bool = option("Return the prompt before the output.", default=False)


class ChatRequest(OpenAIRequest):
    """A chat to answer (OpenAI-compatible), with any field of `GenerationConfig`."""

    messages: list[dict[str, Any]] = option("Messages with role and content.")
    max_tokens: int | None = option("Maximum number of new tokens.", default=None, at_least=1, at_most=100_000)
    max_completion_tokens: int | None = option("The same as max_tokens.", default=None, at_least=1, at_most=100_000)
    logprobs: bool = option("Return the log-probability of each token.", default=False)
    top_logprobs: int = option("Alternatives of each token to return.", default=0, at_least=0, at_most=50)


class EmbeddingsRequest(Config):
    """Texts to compute vectors of (OpenAI-compatible)."""

    input: str | list[str] = option("A text, or a list of texts.")
    model: str | None = option("Id of the model. Default: the first encoder.", default=None)
    encoding_format: str = option("Format of the vectors.", default="float", choices=("float", "base64"))
    user: str | None = option("Ignored.", default=None)


class ClassifyRequest(Config):
    """Texts to classify."""

    input: str | list[str] = option("A text, or a list of texts.")
    model: str | None = option("Id of the model. Default: the first classifier.", default=None)


# Fields of OpenAI's API that are accepted with values that have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "store": (None, False),
}


def neutral_fields(request: type[Config]) -> dict[str, tuple[Any, ...]]:
    """Return the further fields that a request accepts, with the values that have no effect."""
    return _NEUTRAL if request in (CompletionRequest, ChatRequest) else {}


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "list[str]": (list,),
    "list[int]": (list,),
    "list[Any]": (list,),
    "list[dict[str, Any]]": (list,),
    "dict[str, Any]": (dict,),
}
_ITEMS = {"list[str]": str, "list[int]": int, "list[dict[str, Any]]": dict}


def parse(body: Any, request: type[Config], *, generates: bool = True) -> tuple[Any, Settings]:
    """Return a request and the fields of `GenerationConfig` that it has.

    Args:
        body: The JSON value of the body.
        request: Class of the request.
        generates: Whether the request may have fields of `GenerationConfig`.

    Raises:
        ConfigError: For unknown, missing or invalid fields.
    """
    if not isinstance(body, dict):
        raise ConfigError(f"the body is a {type(body).__name__}; expected a JSON object")
    own = field_names(request)
    generation = [name for name in field_names(GenerationConfig) if generates and name not in own]
    for name, accepted in neutral_fields(request).items():
        if name in body and body.pop(name) not in accepted:
            raise ConfigError(f"{name} is not supported; omit it")
    check_keys(body, [*own, *generation], "the request")
    # null is the default, as in OpenAI's API.
    parsed = request.from_dict({name: body[name] for name in own if body.get(name) is not None}, "the request")
    for name, annotation, _, _ in options_of(request):
        _check_type(name, annotation, getattr(parsed, name))
    settings = {name: body[name] for name in generation if body.get(name) is not None}
    for name, _, _, field in options_of(GenerationConfig):
        if name in settings:
            check_value(field, settings[name])
    return parsed, settings


def _check_type(name: str, annotation: str, value: Any) -> None:
    """Raise ConfigError unless a value is of one of the types in the annotation of a field."""
    if value is None:
        return
    for each in annotation.split(" | "):
        if isinstance(value, _TYPES.get(each, ())) and (each == "bool" or not isinstance(value, bool)):
            item = _ITEMS.get(each, object)
            if not isinstance(value, list) or all(isinstance(x, item) and not isinstance(x, bool) for x in value):
                return
    names = {"str": "a string", "list[str]": "a list of strings", "list[int]": "a list of integers"}
    expected = " or ".join(names.get(each, each) for each in annotation.split(" | ") if each != "None")
    raise ConfigError(f"{name} is {str(value)[:60]!r}; expected {expected}")


def texts_of(name: str, value: str | Sequence[str]) -> list[str]:
    """Return a text or a list of texts as a list; raise DataError for an empty or a long one."""
    texts = [value] if isinstance(value, str) else list(value)
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise DataError(f"{name} has {len(texts)} texts; expected 1 to {MAX_TEXTS}")
    return texts


def resolve(pipeline: TextToText | TextGenerator, settings: Settings, max_tokens: int) -> GenerationConfig:
    """Return the settings of a search for a request.

    Args:
        pipeline: The pipeline, for its defaults.
        settings: Fields of `GenerationConfig`.
        max_tokens: Maximum of max_new_tokens.

    Raises:
        ConfigError: For invalid or contradictory settings, and those above the limits of the server.
    """
    if isinstance(pipeline, TextGenerator):
        config = pipeline.resolve_config(None, **settings)
    else:
        config = GenerationConfig.resolve(pipeline.defaults, settings)
    for name, value, limit in (
        ("num_beams", config.num_beams, MAX_BEAMS),
        ("num_return_sequences", config.num_return_sequences, MAX_BEAMS),
        ("max_new_tokens", settings.get("max_new_tokens") or 0, max_tokens),
        ("min_new_tokens", config.min_new_tokens, max_tokens),
    ):
        check_limit(name, value, limit)
    if config.max_new_tokens is not None and config.max_new_tokens > max_tokens:  # the default of the model
        config = dataclasses.replace(config, max_new_tokens=max_tokens)
    return config


def check_limit(name: str, value: int, limit: int) -> None:
    """Raise ConfigError for a value above a limit of the server."""
    if value > limit:
        raise ConfigError(f"{name} is {value}; expected at most {limit}, the limit of this server")


def check_phrases(phrases: Sequence[str]) -> None:
    """Raise ConfigError for too many phrases, or for a long one, which would hold the model for all others."""
    if len(phrases) > MAX_PHRASES or any(len(phrase) > MAX_PHRASE_CHARACTERS for phrase in phrases):
        raise ConfigError(
            f"sequence_bias has {len(phrases)} phrases; expected at most {MAX_PHRASES}, of at most "
            f"{MAX_PHRASE_CHARACTERS} characters each"
        )


def check_unsupported(request: Any, names: Collection[str], reason: str) -> None:
    """Raise ConfigError for the first field that differs from its default."""
    for name, _, _, field in options_of(type(request)):
        if name in names and getattr(request, name) != field.default:
            raise ConfigError(f"{name} {reason}; omit it")
