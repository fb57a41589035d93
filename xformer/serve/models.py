"""Models of a server: their pipelines, limits and workers."""

from __future__ import annotations

import copy
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

from xformer.errors import DataError
from xformer.families.run_directory import RunDirectory
from xformer.generation import GenerationConfig
from xformer.pipelines import (
    Classifier,
    Embedder,
    Reranker,
    Summarizer,
    TextGenerator,
    TextToText,
    Translator,
)
from xformer.pipelines.encoders import EncoderPipeline
from xformer.serve import schema
from xformer.serve.jobs import JobError, Worker, too_long

MAX_SOURCE_LENGTH = 1024
_EXAMPLES = {
    Translator: "The little girl is reading a book.",
    Summarizer: "",
    TextGenerator: "Once upon a time",
    Embedder: "A man sleeps.",
    Classifier: "A great film.",
    Reranker: "Where do pandas live?\nPandas live in China.\nThe bank is closed.",
}
_CHAT_EXAMPLE = "What is the capital of France?"
_TRANSLATION_EXAMPLES = {  # by language
    "de": "Das kleine Mädchen liest ein Buch.",
    "es": "La niña está leyendo un libro.",
    "fr": "La petite fille lit un livre.",
    "it": "La bambina legge un libro.",
    "nl": "Het meisje leest een boek.",
    "pt": "A menina está lendo um livro.",
    "ru": "Девочка читает книгу.",
    "zh": "小女孩在看书。",
}
_LONG_CODES = {"deu": "de", "spa": "es", "fra": "fr", "ita": "it", "nld": "nl", "por": "pt", "rus": "ru", "zho": "zh"}
AnyPipeline = TextToText | TextGenerator | EncoderPipeline


class ServedModel:
    """A model with its pipeline and the worker that runs it.

    Args:
        name: Id of the model.
        pipeline: Pipeline of the model.
        directory: Directory of a run, for its training log; None without one.
        backend: Name of the array library.
        max_tokens: Maximum of new tokens.
        max_batch: Maximum number of requests that generate text at the same time.
    """

    def __init__(
        self,
        name: str,
        pipeline: AnyPipeline,
        *,
        directory: str | os.PathLike[str] | None = None,
        backend: str = "numpy",
        max_tokens: int = 1024,
        max_batch: int = 32,
    ) -> None:
        self.name, self.backend, self.max_tokens = name, backend, max_tokens
        self.pipeline: Any = pipeline
        if isinstance(pipeline, TextGenerator):
            self.pipeline = limited = copy.copy(pipeline)
            limited.default_max_length = min(limited.default_max_length, max_tokens)
        run = None if directory is None else RunDirectory(directory)
        self.log = run.log if run is not None and run.log.is_file() else None
        config = {} if run is None else run.read_config()
        self.label_smoothing = config.get("recipe", {}).get("training", {}).get("label_smoothing", 0.0)
        self.example = config.get("example") or _example(pipeline)
        self.created = int(time.time())
        self.worker = Worker(f"xformer {name}", max_batch=max_batch)

    def describe(self) -> schema.Model:
        """Return the entry of the list of models."""
        pipeline, model = self.pipeline, self.pipeline.model
        config = model.config
        if pipeline.has_source:
            layers = config.num_encoder_layers, config.num_decoder_layers
        else:
            layers = (0, config.num_layers) if "decoder" in pipeline.attention_kinds else (config.num_layers, 0)
        supports = dict.fromkeys(("beam", "sampling", "topics"), pipeline.generates_text)
        supports |= dict.fromkeys(("target_length", "prefix"), pipeline.has_source) | {"chat": pipeline.has_chat}
        defaults = None
        if pipeline.generates_text:
            default = self.resolve({})
            length = default.max_new_tokens or pipeline.default_max_length
            defaults = default.to_dict() | {"do_sample": default.method == "sampling", "max_new_tokens": length}
        return schema.Model(
            id=self.name,
            created=self.created,
            task=pipeline.task,
            architecture=type(model).__name__,
            backend=self.backend,
            num_parameters=model.parameter_count(),
            vocab_size=self.vocab_size,
            encoder_layers=layers[0],
            decoder_layers=layers[1],
            heads=config.num_heads,
            context_length=getattr(pipeline, "context_length", config.max_positions),
            attention=list(pipeline.attention_kinds),
            supports=supports,
            defaults=defaults,
            has_log=self.log is not None,
            example=self.example,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, of outputs if the model has any."""
        model = self.pipeline.model
        return int(model.vocab_size if self.pipeline.generates_text else model.config.vocab_size)

    def token_ids(self, texts: Sequence[Any]) -> list[list[int]]:
        """Return the token ids of sources, prompts, chats or texts, as a search expects them.

        Raises:
            DataError: For a text with unknown characters.
            JobError: For a source that is too long.
        """
        if not self.pipeline.has_source:
            return [list(map(int, ids)) for ids in self.pipeline.token_ids(texts)]
        encoded, _ = self.pipeline.truncate(self.pipeline.token_ids(texts))
        limit = MAX_SOURCE_LENGTH
        if self.context_length is not None:
            limit = min(limit, self.context_length - len(self.pipeline.suffix))
        for number, size in enumerate(map(len, encoded), start=1):
            if size > limit:
                raise too_long(f"text {number} has {size} tokens; expected at most {limit}: split it", "text")
        return encoded

    def encode_request(
        self, request: schema.ExploreRequest | schema.AttentionRequest | schema.LayersRequest
    ) -> list[int]:
        """Return the token ids of the text or the chat of a request.

        Raises:
            DataError: Unless there is one of them, and for an invalid one.
        """
        if (request.text is None) == (request.messages is None):
            raise DataError("expected one of text and messages")
        name = "text" if request.messages is None else "messages"
        if request.messages is not None and not self.pipeline.has_chat:
            raise DataError(f"model {self.name!r} has no chat template; expected text instead of messages")
        (ids,) = self.token_ids([getattr(request, name)])
        if not ids:
            raise JobError(f"{name} is empty; expected some text", param=name)
        return ids

    def source_ids(self, ids: list[int]) -> list[int]:
        """Return the ids of a source as the encoder sees them, with eos."""
        return [*ids, *self.pipeline.suffix] if self.pipeline.has_source else ids

    def resolve(self, settings: dict[str, Any], target_length: int | None = None) -> GenerationConfig:
        """Return the settings of a search.

        Args:
            settings: Fields of `GenerationConfig`.
            target_length: Length of outputs, of an encoder-decoder.

        Raises:
            ConfigError: For invalid or contradictory settings.
            JobError: For more new tokens than the server allows.
        """
        options = {"target_length": target_length} if self.pipeline.has_source else {}
        config: GenerationConfig = self.pipeline.resolve_config(**settings, **options)
        for name in ("max_new_tokens", "min_new_tokens"):
            self.check_limit(name, settings.get(name) or 0)
        if config.max_new_tokens is not None and config.max_new_tokens > self.max_tokens:  # the default of the model
            config = dataclasses.replace(config, max_new_tokens=self.max_tokens)
        return config

    def check_limit(self, name: str, value: int) -> None:
        """Raise JobError for more tokens than the server allows, or than the output of the model can have."""
        if value > self.max_tokens:
            message = f"{name} is {value}; expected at most {self.max_tokens}, the limit of this server"
            raise JobError(message, param=name)
        limit = self.context_length if self.pipeline.has_source and name != "max_new_tokens" else None
        if limit is not None and value >= limit:  # outputs begin with another token
            raise too_long(f"{name} is {value}; expected at most {limit - 1}: the context has {limit} tokens", name)

    @property
    def context_length(self) -> int | None:
        """Largest number of tokens of a text with its output, or of either with an encoder-decoder; None: no limit."""
        config = self.pipeline.model.config
        if not self.pipeline.has_source:
            return int(self.pipeline.context_length)
        return int(config.max_positions) if config.positions == "learned" else None

    def check_prompts(self, request: Any, encoded: Sequence[Sequence[int]], config: GenerationConfig) -> None:
        """Raise JobError for a prompt without tokens, and for one that leaves no space for its output."""
        names = ("max_completion_tokens", "max_tokens", "max_new_tokens")
        name = next((each for each in names if getattr(request, each, None) == config.max_new_tokens), names[-1])
        param = next(each for each in ("messages", "prompt", "text") if getattr(request, each, None) is not None)
        context, new = self.pipeline.context_length, config.max_new_tokens or 1
        for number, size in enumerate(map(len, encoded), start=1):
            if not size:
                raise JobError(f"prompt {number} is empty; expected some text", param=param)
            if size >= context:
                message = f"prompt {number} has {size} tokens; the context of the model has {context}, with the output"
                raise too_long(f"{message}: shorten the prompt", param)
            if size + new > context:
                fit = f"the context of the model has {context}, so {size + new - context} do not fit"
                message = f"prompt {number} has {size} tokens and {name} is {new}; {fit}"
                raise too_long(f"{message}: shorten the prompt or lower {name}", param)


def _example(pipeline: AnyPipeline) -> str:
    """Return a text to try a model with, in the language that it expects."""
    if pipeline.has_chat:
        return _CHAT_EXAMPLE
    if not isinstance(pipeline, Translator):
        return _EXAMPLES[type(pipeline)]
    code = str(getattr(pipeline.source_tokenizer, "source_language", None)).replace("-", "_").partition("_")[0]
    return _TRANSLATION_EXAMPLES.get(_LONG_CODES.get(code, code), _EXAMPLES[Translator])
