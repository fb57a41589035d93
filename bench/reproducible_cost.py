"""The cost of reproducible bits: times with XFORMER_REPRODUCIBLE=1 relative to the default mode, on NumPy.

    python bench/reproducible_cost.py --out bench/results/2026-01-31-reproducible-cost.md
    python tests/test_docs.py                   # copies the table to docs/how-to/reproducible.md

Takes less than six minutes on two idle cores. Both modes run in processes of their own and take turns; times are
medians, and the cost is the median of the ratios of the rounds. The last column says whether the results of the two
modes have equal bits: of large outputs a sample of 4,096 elements, the loss of the first training step, or all tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads import decoding, language_model_decoding, stacks, training

from xformer.benchmarks.interleaved import Spec, Workload, interleaved_benchmark
from xformer.benchmarks.machine import describe_machine
from xformer.benchmarks.report import format_seconds, machine_line

MIN_ROUNDS = 5
REPRODUCIBLE = {"XFORMER_REPRODUCIBLE": "1"}
STEPS = {
    "3+3": {"batch": 64, "length": 32, "heads": 8, "head_dim": 32, "layers": 3, "vocabulary": 1000},
    "6+6": {"batch": 128, "length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": 8000},
}
ENCODER = {"batch": 8, "length": 512, "heads": 8, "head_dim": 64, "layers": 6}
MODEL = {"length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": 8000}
BATCHES = (1, 8, 32)


def workloads() -> Iterator[tuple[str, Workload, str]]:
    """Yield the label of each computation, its workload and its factory."""
    yield "encoder, 8 x 512 tokens, forward", stacks.encoder_workload(ENCODER), "workloads.stacks:build_encoder"
    for layers, sizes in STEPS.items():
        yield f"training step, {layers} layers", training.workload(sizes), "workloads.training:build"
    for search, beam in (("greedy search", 1), ("5 beams", 5)):
        for batch in BATCHES:
            workload = decoding.workload({**MODEL, "batch": batch, "beam": beam})
            yield f"translation, {search}, batch {batch}", workload, "workloads.decoding:build"
    for batch in BATCHES:
        workload = language_model_decoding.workload({**MODEL, "batch": batch})
        yield f"language model, batch {batch}", workload, "workloads.language_model_decoding:build"


def measure(workload: Workload, factory: str, seconds: float) -> dict[str, Any]:
    """Return the measurements of both modes after this time, or the fewest rounds."""
    specs = [Spec("default", factory, {"backend": "numpy"}), Spec("reproducible", factory, {"backend": "numpy"})]
    specs[1].environment.update(REPRODUCIBLE)
    with interleaved_benchmark(dataclasses.replace(workload, warmup_steps=1), specs) as benchmark:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or benchmark.rounds < MIN_ROUNDS:
            benchmark.run_round()
        return benchmark.result()


def row(label: str, result: dict[str, Any]) -> str:
    """Return the line of a computation in the table."""
    default, other = result["implementations"]
    times = " | ".join(format_seconds(each["seconds"]) for each in (default, other))
    low, high = other["ratio_quartiles"]
    equal = "yes" if other["difference"] == 0.0 else "no"
    return f"| {label} | {times} | {other['ratio']:.2f} ({low:.2f} to {high:.2f}) | {equal} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="", help="measure only computations with this text in their name")
    parser.add_argument("--seconds", type=float, default=14.0, help="time of the rounds of a computation (default 14)")
    parser.add_argument("--out", type=Path, metavar="FILE.md")
    arguments = parser.parse_args()
    machine = describe_machine()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        f"# The cost of reproducible bits, {today}",
        "",
        f"Measured on {today}: {machine_line({'machine': machine, 'gemm_flops_per_second': None})}.",
        "",
        "    python bench/reproducible_cost.py",
        "",
        "The cost is the time with `XFORMER_REPRODUCIBLE=1` divided by that of the default mode: the median and the",
        "quartiles of the rounds, in which the two modes take turns in processes of their own. Times are medians.",
        "",
        "| | default | reproducible | cost | same tokens or first loss |",
        "|---|---|---|---|---|",
    ]
    print(*lines, sep="\n", flush=True)
    for label, workload, factory in workloads():
        if arguments.pattern in label:
            lines.append(row(label, measure(workload, factory, arguments.seconds)))
            print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
