"""Speed and memory, measured: cases, contenders that take turns, and the machine that the figures belong to."""

from xformer.benchmarks.interleaved import Case, Entry, Race, racing
from xformer.benchmarks.machine import describe_machine, gemm_flops_per_second
from xformer.benchmarks.plan import WORKS, Kind, Sizes, entries
from xformer.benchmarks.report import make_run, table
from xformer.benchmarks.workload import Library, Work

__all__ = [
    "WORKS",
    "Case",
    "Entry",
    "Kind",
    "Library",
    "Race",
    "Sizes",
    "Work",
    "describe_machine",
    "entries",
    "gemm_flops_per_second",
    "make_run",
    "racing",
    "table",
]
