"""Measure parts of a Transformer on array libraries, from Python: `xformer.benchmark`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xformer.backends import resolve
from xformer.benchmarks import parts
from xformer.benchmarks.interleaved import Workload, interleaved_benchmark
from xformer.config import check_count
from xformer.errors import BackendError, check_choice


def benchmark(
    part: str = "attention",
    backends: str | Sequence[str] = "numpy",
    *,
    peers: Sequence[str] = (),
    rounds: int = 5,
    threads: int | None = None,
    on_progress: Callable[[str], object] | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Measure a part of a Transformer on array libraries that are installed, in turns, each in its own process.

    Args:
        part: "attention", "layer" (multi-head attention), "feed-forward", "norm", "encoder", "decoder", "model",
            "train-step" or "decode".
        backends: Names of array libraries; results of all are compared with those of the first one before it is timed.
        peers: Other implementations: "torch.nn", "textbook NumPy".
        rounds: Number of measurements of each implementation.
        threads: Threads of each one; default those of this process.
        on_progress: Called with the name of what is measured before each round.
        **settings: batch, length, heads, head_dim, layers, vocabulary (integers or sequences of them, for a grid);
            causal, padded, backward, jit; dtype.

    Returns:
        A row for each size and implementation: "part", the sizes, "name", "seconds" (median), "ratio" (median of the
        time relative to the first implementation), "difference" (of the results from the first implementation's),
        "tokens_per_second", "flops_per_second", "peak_bytes"; "error" instead of these if it failed.

    Raises:
        ConfigError: If a part, a peer or a setting is unknown.
        BackendError: If the first library cannot be used.
    """
    names = (backends,) if isinstance(backends, str) else tuple(backends)
    check_count("the number of backends", len(names))
    for kind, given, known in (("part", (part,), parts.NAMES), ("peer", peers, tuple(parts.PEERS)),
                               ("setting", tuple(settings), tuple(parts.DEFAULTS))):  # fmt: skip
        for name in given:
            check_choice(f"the {kind}", name, known)
    for setting, value in (("rounds", rounds), *((name, settings[name]) for name in settings if name in parts.AXES)):
        for size in value if isinstance(value, tuple | list) else (value,):
            check_count(setting, size)
    resolve(names[0])
    workloads = parts.Suite((part,), {}).workloads(**settings)
    results, notes = measure(workloads, names, rounds, threads, peers, on_progress)
    if not results:
        raise BackendError(notes[0])
    rows = []
    for result in results:
        facts = {"part": part, **{key: result["sizes"][key] for key in parts.DEFAULTS if key in result["sizes"]}}
        rows += [{**facts, **measured} for measured in result["implementations"]]
        rows += [{**facts, "name": name, "error": reason} for name, reason in result["unavailable"].items()]
    return rows


def measure(
    workloads: Sequence[Workload],
    backends: Sequence[str],
    rounds: int,
    threads: int | None = None,
    peers: Sequence[str] = (),
    on_progress: Callable[[str], object] | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the results of workloads, and a note for each one that failed."""
    results: list[dict[str, Any]] = []
    notes: list[str] = []
    for workload in workloads:
        try:
            specs = parts.specs(workload.settings["part"], backends, peers)
            with interleaved_benchmark(workload, specs, threads) as running:
                for _ in range(rounds):
                    if on_progress is not None:
                        on_progress(workload.name)
                    running.run_round()
                results.append(running.result())
        except BackendError as error:
            notes.append(f"{workload.name}: {error}")
    return results, notes
