"""Large files: the options --corpus-out, --chunk-lines, --workers and --scheduler of several commands."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import xformer
from xformer.cli import _io
from xformer.cli._options import option_name
from xformer.config import Config, option, take_options
from xformer.errors import CheckpointError, ConfigError, CorpusError
from xformer.pipelines import ChunkOutput, CorpusProgress, Pipeline, WorkerProcesses, model_digests, process_corpus
from xformer.pipelines.corpus import check_not_ledger
from xformer.runs.console import format_duration, make_console, plural, progress_line
from xformer.text.extras import require


class CorpusOptions(Config):
    """Options for large files.

    Args:
        corpus_out: Process the input in chunks, whose outputs are kept in this directory; the same command resumes.
        chunk_lines: Lines of a chunk.
        workers: Processes of this machine, which share its cores.
        scheduler: Address, or JSON file, of a Dask scheduler whose workers compute.
    """

    corpus_out: str | None = option(default=None, panel="Large files")
    chunk_lines: int = option(default=10_000, at_least=1)
    workers: int = option(default=1, at_least=1)
    scheduler: str | None = option(default=None)

    @classmethod
    def pop_from(cls, settings: dict[str, Any]) -> Self:
        """Remove the options from the settings of a command; raise ConfigError if they contradict each other."""
        values = take_options(cls, settings)
        if values and "corpus_out" not in values:
            raise ConfigError(f"{option_name(next(iter(values)))} needs --corpus-out; add --corpus-out DIR, or omit it")
        if "workers" in values and "scheduler" in values:
            raise ConfigError("--workers and --scheduler are both given; expected only one of them")
        return cls(**values)

    def output_path(self, output: str, suffix: str = ".txt") -> str:
        """Return the output; standard output stands for a file in the directory of the corpus, if there is one.

        Raises:
            ConfigError: If it is a file that the corpus keeps.
        """
        if self.corpus_out is None:
            return output
        check_not_ledger(output, self.corpus_out)
        return os.path.join(self.corpus_out, f"output{suffix}") if output == _io.STANDARD else output


@dataclass(frozen=True)
class ChunkFunction:
    """A function of chunks with a pipeline that every process loads once.

    Args:
        process: Function (pipeline, lines, first index, **arguments) of a module.
        pipeline_type: Class of the pipeline.
        model: Directory of the model.
        loading: Arguments of `_io.load_pipeline`.
        arguments: Arguments of `process`.
        digests: Those of the model, which `process_file` sets.
    """

    process: Callable[..., ChunkOutput]
    pipeline_type: type[Pipeline]
    model: Path
    loading: dict[str, Any]
    arguments: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)

    def __call__(self, lines: list[str], first_index: int) -> ChunkOutput:
        key = repr(self)
        with _lock:
            pipeline: Any = _pipelines.get(key)
            if pipeline is None:
                _pipelines.clear()
                pipeline = _io.load_pipeline(self.pipeline_type, self.model, visible=False, **self.loading)
                if model_digests(self.model) != self.digests:  # another copy on another machine, or training goes on
                    raise CheckpointError(f"{self.model} has changed since the run started; restore it, or start anew")
                _pipelines[key] = pipeline
        return self.process(pipeline, lines, first_index, **self.arguments)


_pipelines: dict[str, Any] = {}
_lock = threading.Lock()


def process_file(
    function: ChunkFunction, source: str | None, output: str, options: CorpusOptions, suffix: str = ".txt"
) -> dict[str, int]:
    """Process a large file in chunks, merge their outputs, and return the sums of their counts.

    Args:
        function: The function of chunks.
        source: File to read.
        output: File to write.
        options: Options of the corpus.
        suffix: Suffix of the parts.

    Raises:
        ConfigError: If the source is not a file.
        CorpusError: If chunks failed.
    """
    if source is None or source == _io.STANDARD:
        raise ConfigError("--corpus-out needs a file; add --input FILE")
    directory = Path(str(options.corpus_out))
    function = replace(function, model=Path(os.path.abspath(function.model)), digests=model_digests(function.model))
    settings = {"xformer": xformer.__version__, "pipeline": function.pipeline_type.__name__, "model": function.digests}
    settings |= {**function.loading, **function.arguments}
    console = make_console(stderr=True)
    start_time = time.monotonic()
    num_new = 0
    with progress_line(console, "reading ...") as show, _open_executor(options) as executor:

        def on_progress(progress: CorpusProgress) -> None:
            nonlocal num_new
            num_new = progress.num_done - progress.num_resumed
            if progress.num_done and not (num_new or progress.num_failed):  # at the start
                console.print(f"resuming after {plural(progress.num_done, 'line')}")
            text = f"{progress.num_done:,} of {progress.num_lines:,} lines"
            if num_new:
                seconds = time.monotonic() - start_time
                left = format_duration((progress.num_lines - progress.num_done) * seconds / num_new)
                text += f"  {_speed(num_new, seconds)}  {left} left"
            if progress.num_failed:
                text += f"  {plural(progress.num_failed, 'chunk')} failed"
            show(text, completed=progress.num_done, total=progress.num_lines)

        more: dict[str, Any] = {"chunk_lines": options.chunk_lines, "suffix": suffix, "on_progress": on_progress}
        corpus = process_corpus(function, source, directory, executor=executor, settings=settings, **more)
    for path, error in corpus.failures.items():
        received = f"{len(corpus.failures)} of {plural(corpus.num_chunks, 'chunk')} failed, the first with"
        raise CorpusError(f"{received}: {error.splitlines()[0]}; see {path}, and run the same command again")
    (corpus.merge_arrays if suffix == ".npy" else corpus.merge_lines)(output)
    seconds = time.monotonic() - start_time
    speed = f"{plural(num_new, 'line')} in {format_duration(seconds)}, {_speed(num_new, seconds)}; "
    console.print(f"{speed if num_new else ''}wrote {output}")
    return corpus.counts


def _speed(num_lines: int, seconds: float) -> str:
    """Format a speed: "1,200 lines/s", "0.25 lines/s"."""
    speed = num_lines / seconds
    return f"{speed:,.0f} lines/s" if speed >= 10 else f"{speed:.2g} lines/s"


@contextlib.contextmanager
def _open_executor(options: CorpusOptions) -> Iterator[Executor]:
    """Yield the processes of this machine, or the workers of a Dask scheduler."""
    if options.scheduler is None:
        with WorkerProcesses(options.workers) as processes:
            yield processes
        return
    distributed = require("distributed")
    is_file = options.scheduler.endswith(".json")
    try:
        client = distributed.Client(**{"scheduler_file" if is_file else "address": options.scheduler})
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot connect to the Dask scheduler {options.scheduler}: {error}") from error
    with client:
        if not client.nthreads():
            make_console(stderr=True).print("the scheduler has no workers yet; waiting for one")
        yield client.get_executor(pure=False)  # pure: a task that failed would not run again
