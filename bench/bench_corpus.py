"""Corpus decoding: memory of the parent process and time outside of chunk tasks, with a tiny translator.

    python bench/bench_corpus.py                                    # five million lines, two workers
    python bench/bench_corpus.py --lines 100000 --workers 4 --chunk-lines 1000 --output result.json
    python bench/bench_corpus.py --scheduler tcp://127.0.0.1:8786   # on the workers of a Dask cluster

Needs the extra cli. The text is generated; the command is `xformer translate --corpus-out` with a random model. The
model is as small as possible, so that everything else weighs as much as it can. A model of a useful size takes a
hundred times longer for a chunk, and the overhead is a hundred times smaller.

- overhead: share of the time of all workers in which they run no chunk. The time is that of the whole command: imports,
  the pass over the source, the start of the workers, the parts, and the merged output.
- RSS: memory of the parent process, sampled after each tenth of the lines.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench_serve import make_run

from xformer.benchmarks.machine import describe_machine
from xformer.cli.main import exit_code
from xformer.data.demo_tasks import english

SIZES = {"d_model": 8, "num_heads": 1, "d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}


def write_source(path: Path, num_lines: int) -> None:
    """Write number words, one number per line."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_lines):
            file.write(f"{english(rng.randrange(1_000_000))}\n")


def rss() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class MemorySamples(threading.Thread):
    """Sample the memory of this process whenever another tenth of the chunks is complete."""

    def __init__(self, directory: Path, num_chunks: int) -> None:
        super().__init__(daemon=True)
        self.directory, self.num_chunks = directory, num_chunks
        self.samples: dict[int, float] = {}  # by percentage
        self.is_done = threading.Event()

    def run(self) -> None:
        """Sample once a second."""
        while not self.is_done.wait(1.0):
            self.sample()

    def sample(self) -> None:
        """Add a sample if there is none for this tenth."""
        percent = 100 * len(list(self.directory.glob("part-*.txt"))) // self.num_chunks // 10 * 10
        if percent and percent not in self.samples:
            self.samples[percent] = rss()
            print(f"{percent:3} %  RSS {self.samples[percent]:.1f} MiB", flush=True)


def measure(directory: Path, num_lines: int, chunk_lines: int, executor: list[str], num_workers: int) -> dict[str, Any]:
    """Translate a generated file in chunks and return the figures."""
    source, out = directory / f"{num_lines}.txt", directory / f"{num_lines}.out"
    write_source(source, num_lines)
    memory = MemorySamples(out, -(-num_lines // chunk_lines))
    memory.start()
    options = ["--model", directory / "run", "--input", source, "--corpus-out", out, "--chunk-lines", chunk_lines]
    start = time.perf_counter()
    code = exit_code(["translate", *map(str, options), "--max-new-tokens", "1", "--batch-tokens", "65536", *executor])
    seconds = time.perf_counter() - start
    memory.is_done.set()
    memory.join()
    if code:
        raise SystemExit(code)
    events = [json.loads(line) for line in (out / "log.jsonl").open(encoding="utf-8")]
    task_seconds = sum(event["seconds"] for event in events)
    with (out / "output.txt").open("rb") as file:
        num_written = sum(1 for _ in file)
    return {
        "lines": num_lines,
        "chunk_lines": chunk_lines,
        "chunks": len(events),
        "workers": num_workers,
        "source_bytes": source.stat().st_size,
        "seconds": seconds,
        "lines_per_second": num_lines / seconds,
        "seconds_per_chunk": task_seconds / len(events),
        "overhead": 1.0 - task_seconds / (num_workers * seconds),
        "lines_written": num_written,
        "rss_mib": memory.samples,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Measure a short and the requested run, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=5_000_000)
    parser.add_argument("--chunk-lines", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2, help="number of workers, also of the scheduler")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="Dask scheduler")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    arguments = parser.parse_args()
    executor = ["--workers", str(arguments.workers)]
    if arguments.scheduler is not None:
        executor = ["--scheduler", arguments.scheduler]
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        make_run(directory / "run", SIZES)
        for num_lines in (min(100_000, arguments.lines), arguments.lines):
            results.append(measure(directory, num_lines, arguments.chunk_lines, executor, arguments.workers))
            print(json.dumps(results[-1], indent=2), flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=2), "utf-8")


if __name__ == "__main__":
    main()
