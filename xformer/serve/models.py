"""The models of a server, and what their requests share: pipelines, limits, threads, workers and jobs."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import hashlib
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, dtype_name, to_host
from xformer.errors import DataError
from xformer.families.run_directory import RunDirectory
from xformer.generation import GenerationConfig
from xformer.generation.engine import Task
from xformer.generation.processors import Rows
from xformer.io import StrPath, read_json
from xformer.native import is_reproducible, use_reproducible_on
from xformer.pipelines import TextGenerator, TextToText, Transcriber, Translator
from xformer.pipelines.encoders import EncoderPipeline
from xformer.pipelines.options import SearchOptions
from xformer.pipelines.output_text import Outputs
from xformer.pipelines.seq2seq import NUM_BEAMS_FOR_LENGTHS
from xformer.serve import schema
from xformer.serve.config import ServeConfig, check_ids
from xformer.serve.jobs import Job, JobError, Worker, too_long
from xformer.serve.metrics import Metrics

_ENCODING_THREADS = 2
MAX_SOURCE_LENGTH = 1024
_EXAMPLES = Path(__file__).with_name("examples.json")
AnyPipeline = TextToText | TextGenerator | EncoderPipeline | Transcriber
_ROUTES = {  # that serve a task best
    "translation": "/translate", "summarization": "/summarize", "language_modeling": "/v1/completions",
    "embedding": "/v1/embeddings", "classification": "/classify", "reranking": "/v1/rerank",
    "transcription": "/v1/audio/transcriptions",
}  # fmt: skip


class ServedModel:
    """A model with its pipeline and the worker that runs it.

    Args:
        name: Id of the model.
        pipeline: Pipeline of the model.
        config: Limits of the server.
        directory: Directory of a run, for its training log; None without one.
    """

    def __init__(
        self, name: str, pipeline: AnyPipeline, config: ServeConfig | None = None, directory: StrPath | None = None
    ) -> None:
        limits = ServeConfig() if config is None else config
        self.name, self.max_tokens = name, limits.max_tokens
        self.pipeline: Any = pipeline
        if isinstance(pipeline, TextGenerator):
            self.pipeline = limited = copy.copy(pipeline)
            limited.default_max_length = min(limited.default_max_length, limits.max_tokens)
        run = None if directory is None else RunDirectory(directory)
        self.log = run.log if run is not None and run.log.is_file() else None
        about = {} if run is None else run.read_config()
        self.label_smoothing = about.get("recipe", {}).get("training", {}).get("label_smoothing", 0.0)
        self.example = about.get("example") or _example(pipeline)
        self.created = int(time.time())
        self.worker = Worker(f"xformer {name}", max_batch=limits.max_batch)

    def describe(self) -> schema.Model:
        """Return the entry of the list of models."""
        pipeline, model = self.pipeline, self.pipeline.model
        config = model.config
        if hasattr(config, "num_encoder_layers"):
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
            backend=array_namespace(model._parameter).name,
            num_parameters=model.parameter_count(),
            vocab_size=self.vocab_size,
            encoder_layers=layers[0],
            decoder_layers=layers[1],
            heads=config.num_heads,
            context_length=getattr(pipeline, "context_length", getattr(config, "max_positions", None)),
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
        return int(getattr(model, "vocab_size", None) or model.config.vocab_size)

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
    examples = read_json(_EXAMPLES, "examples")
    if pipeline.has_chat:
        return str(examples["chat"])
    language = str(getattr(pipeline.source_tokenizer, "source_language", None)).replace("-", "_").partition("_")[0]
    by_language = examples["translation"] if isinstance(pipeline, Translator) else {}
    return str(by_language.get(language, examples["tasks"][pipeline.task]))


class Server:
    """The models of a server and its limits.

    Args:
        models: Models to serve.
        config: Limits and access.

    Raises:
        ConfigError: If two models have the same id.
    """

    def __init__(self, models: Sequence[ServedModel], config: ServeConfig | None = None) -> None:
        check_ids([model.name for model in models])
        self.models = {model.name: model for model in models}
        self.config = ServeConfig() if config is None else config
        if self.config.reproducible:
            parameters = [model.pipeline.model._parameter for model in models]
            use_reproducible_on(*[name for x in parameters for name in (array_namespace(x).name, dtype_name(x.dtype))])
        self.metrics = Metrics()
        self.num_active = 0
        self.is_draining = False
        self._encoding = ThreadPoolExecutor(_ENCODING_THREADS, "xformer encoding")

    def model(self, name: str | None, *pipelines: type, task: str) -> ServedModel:
        """Return a model by its id, or the first one that has one of the pipelines.

        Raises:
            JobError: If no model matches.
        """
        suitable = [each for each in self.models.values() if isinstance(each.pipeline, pipelines)]
        if name is None:
            if not suitable:
                tasks = {each.pipeline.task: None for each in self.models.values()}
                expected = " or ".join(f"{_ROUTES[each]} for {each.replace('_', ' ')}" for each in tasks)
                message = f"no model on this server can {task}; expected {expected}"
                raise JobError(message, 404, "model_not_found", "model")
            return suitable[0]
        if name not in self.models:
            known = ", ".join(self.models)
            message = f"model {name[:80]!r} does not exist; expected one of: {known}"
            raise JobError(message, 404, "model_not_found", "model")
        if self.models[name] not in suitable:
            kind = self.models[name].pipeline.task
            message = f"model {name!r} cannot {task}: it is for {kind.replace('_', ' ')}; expected {_ROUTES[kind]}"
            raise JobError(message, param="model")
        return self.models[name]

    def ignored(self, request: Any) -> list[str]:
        """Return the fields of a request that have no effect."""
        names: list[str] = request.ignored()
        if getattr(request, "tools", None):
            has_tools = self.model(request.model, TextGenerator, task="generate text").pipeline.has_tools
            names += [] if has_tools else ["tools"]
        return names

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function that tokenizes, which the event loop never does."""
        return await asyncio.get_running_loop().run_in_executor(self._encoding, function, *arguments)

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

    async def make_job(
        self,
        model: ServedModel,
        request: Any,
        config: GenerationConfig,
        encode: Callable[[], list[list[int]]],
        finish: Callable[[Job, list[list[int]], Task[Outputs]], Task[Any]],
        seed: int | None = None,
        **options: Any,
    ) -> Job:
        """Return the job of a search, for the worker of the model.

        Args:
            model: The model.
            request: The request.
            config: Settings that `resolve` returned.
            encode: Returns token ids; called in another thread.
            finish: Function of the job, the token ids and the task of the search, which returns the task of the job.
            seed: Seed of sampling. Default: that of the request, or a new one.
            **options: Arguments of `search_task`; `on_text` with the job as its first argument.
        """
        seed = request.seed if seed is None else seed
        seed = None if seed is None else seed % 2**64  # `Rng` takes no negative ones
        # A search with a seed shares no steps, so that rounding cannot change its samples.
        is_alone = config.method == "sampling" and seed is not None and not is_reproducible()
        job = Job(self.config.timeout, is_alone=is_alone)
        options |= {"seed": secrets.randbits(32) if seed is None else seed, "stopping_criteria": [job.check]}
        for name in ("prefix", "target_length", "length_unit"):
            value = getattr(request, name, None)
            if value is None or value == getattr(SearchOptions, name):
                continue
            if model.pipeline.has_source:
                options[name] = value
            else:
                raise JobError(f"{name} applies to encoder-decoders only; omit it", param=name)
        if model.pipeline.has_source and (ids := getattr(request, "prefix_ids", None)):
            if request.prefix is not None:
                raise JobError("prefix and prefix_ids are both given; expected one of them", param="prefix_ids")
            options["prefix"] = [ids]
        if "target_length" in options:
            model.check_limit("target_length", options["target_length"])
            if config.method == "greedy":  # as the pipeline does
                config = dataclasses.replace(config, num_beams=NUM_BEAMS_FOR_LENGTHS)
        if on_text := options.pop("on_text", None):
            waiting = [time.monotonic()]

            def send(*arguments: Any) -> None:
                if waiting:
                    seconds = time.monotonic() - waiting.pop()
                    self.metrics.observe("xformer_first_token_seconds", seconds, model=model.name)
                on_text(job, *arguments)

            options["on_text"] = send

        def count(found: Outputs) -> None:
            number = sum(len(output.tokens) for outputs in found for output in outputs)
            self.metrics.add("xformer_generation_tokens_total", number, model=model.name)

        def prepare() -> Task[Any]:
            ids = encode()
            if not model.pipeline.has_source:
                model.check_prompts(request, ids, config)
            bias = [request.sequence_bias] * len(ids) if request.sequence_bias else None
            is_single = model.pipeline.has_source or config.method == "beam"
            record = LogitsHash(1 if is_single else config.num_return_sequences)
            if is_reproducible():
                options["logits_processors"] = [*options.get("logits_processors", ()), record]
            task = model.pipeline.search_task(ids, config, sequence_bias=bias, **options)
            self.metrics.add("xformer_prompt_tokens_total", sum(map(len, ids)), model=model.name)
            return finish(job, ids, record.add_to(_limited(task, self.config.max_request_tokens, count)))

        job.task = await self.in_thread(prepare)
        return job

    def close(self) -> None:
        """Stop the models."""
        for model in self.models.values():
            model.worker.close()
        self._encoding.shutdown(wait=False)


class LogitsHash:
    """Hashes the logits that the tokens of each text are chosen from; a logits processor that changes nothing.

    A hash is the SHA-256 of the rows of all steps, in float32, after the other processors: a row is a sample or a beam.

    Args:
        num_samples: Number of samples of a text that have an index each.
    """

    def __init__(self, num_samples: int) -> None:
        self._hashes: dict[int, Any] = defaultdict(hashlib.sha256)  # by the index of the text
        self._num_samples = num_samples

    def __call__(self, tokens: Array, lengths: Array, logits: Array, rows: Rows) -> Array:
        """Add the rows of a step."""
        for index, row in zip(rows.indices.tolist(), np.asarray(to_host(logits), "<f4", order="C"), strict=True):
            self._hashes[index // self._num_samples].update(row)
        return logits

    def add_to(self, task: Task[Outputs]) -> Task[Outputs]:
        """Return a task whose outputs have the hash of their text, if there is one."""
        found = yield from task
        hashes = {index: each.hexdigest() for index, each in self._hashes.items()}
        return [[each._replace(logits_sha256=hashes.get(i)) for each in outputs] for i, outputs in enumerate(found)]


def _limited(task: Task[Any], limit: int, on_result: Callable[[Any], None]) -> Task[Any]:
    """Return a task that raises JobError in place of searches whose rows have more tokens than the limit."""
    while True:
        try:
            searches = next(task)
        except StopIteration as end:
            on_result(end.value)
            return end.value
        sizes = [(len(each.batch.inputs) * each.batch.rows_per_input, each.batch.max_length) for each in searches]
        if (total := sum(rows * length for rows, length in sizes)) > limit:
            rows, length = sum(rows for rows, _ in sizes), max(length for _, length in sizes)
            raise JobError(
                f"the request takes {total} tokens ({rows} texts, outputs or beams of up to {length}); expected at "
                f"most {limit}, the limit of this server: send fewer texts, or ask for fewer outputs, beams or tokens"
            )
        yield searches
