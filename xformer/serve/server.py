"""The models of a server, and what their requests share: limits, threads and jobs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from xformer.generation import GenerationConfig
from xformer.generation.engine import Task
from xformer.pipelines import Output, TextGenerator
from xformer.pipelines.seq2seq import NUM_BEAMS_FOR_LENGTHS
from xformer.serve.config import ServeConfig, check_ids
from xformer.serve.jobs import Job, JobError
from xformer.serve.models import ServedModel

_ENCODING_THREADS = 2


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
                raise JobError(f"no model on this server can {task}", 404, "model_not_found", "model")
            return suitable[0]
        if name not in self.models:
            known = ", ".join(self.models)
            message = f"model {name[:80]!r} does not exist; expected one of: {known}"
            raise JobError(message, 404, "model_not_found", "model")
        if self.models[name] not in suitable:
            kind = self.models[name].pipeline.task.replace("_", " ")
            raise JobError(f"model {name!r} cannot {task}: it is for {kind}", param="model")
        return self.models[name]

    def ignored(self, request: Any) -> list[str]:
        """Return the fields of a request that have no effect."""
        if not hasattr(request, "ignored"):
            return []
        return request.ignored(self.model(request.model, TextGenerator, task="generate text").pipeline)

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
        finish: Callable[[Job, list[list[int]], Task[list[list[Output]]]], Task[Any]],
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
        job = Job(self.config.timeout, is_alone=config.method == "sampling" and seed is not None)
        options |= {"seed": secrets.randbits(32) if seed is None else seed, "stopping_criteria": [job.check]}
        for name, default in (("prefix", None), ("target_length", None), ("length_unit", "tokens")):
            value = getattr(request, name, default)
            if model.pipeline.has_source:
                options[name] = value
            elif value != default:
                raise JobError(f"{name} applies to encoder-decoders only; omit it", param=name)
        if model.pipeline.has_source and (ids := getattr(request, "prefix_ids", None)):
            if request.prefix is not None:
                raise JobError("prefix and prefix_ids are both given; expected one of them", param="prefix_ids")
            options["prefix"] = [ids]
        if model.pipeline.has_source and options["target_length"] is not None:
            model.check_limit("target_length", options["target_length"])
            if config.method == "greedy":  # as the pipeline does
                config = dataclasses.replace(config, num_beams=NUM_BEAMS_FOR_LENGTHS)
        if on_text := options.pop("on_text", None):
            options["on_text"] = lambda *arguments: on_text(job, *arguments)

        def prepare() -> Task[Any]:
            ids = encode()
            if not model.pipeline.has_source:
                model.check_prompts(request, ids, config)
            bias = [request.sequence_bias] * len(ids) if request.sequence_bias else None
            task = model.pipeline.search_task(ids, config, sequence_bias=bias, **options)
            return finish(job, ids, _limited(task, self.config.max_request_tokens))

        job.task = await self.in_thread(prepare)
        return job

    def close(self) -> None:
        """Stop the models."""
        for model in self.models.values():
            model.worker.close()
        self._encoding.shutdown(wait=False)


def _limited(task: Task[Any], limit: int) -> Task[Any]:
    """Return a task that raises JobError in place of searches whose rows have more tokens than the limit."""
    while True:
        try:
            searches = next(task)
        except StopIteration as end:
            return end.value
        sizes = [(len(each.batch.inputs) * each.batch.rows_per_input, each.batch.max_length) for each in searches]
        if (total := sum(rows * length for rows, length in sizes)) > limit:
            rows, length = sum(rows for rows, _ in sizes), max(length for _, length in sizes)
            raise JobError(
                f"the request takes {total} tokens ({rows} texts, outputs or beams of up to {length}); expected at "
                f"most {limit}, the limit of this server: send fewer texts, or ask for fewer outputs, beams or tokens"
            )
        yield searches
