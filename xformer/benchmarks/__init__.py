"""Interleaved benchmarks of speed and memory: workloads, implementations, and a description of the machine."""

from xformer.benchmarks.computation import Backend, Computation
from xformer.benchmarks.interleaved import InterleavedBenchmark, Spec, Workload, interleaved_benchmark
from xformer.benchmarks.machine import describe_machine, gemm_flops_per_second
from xformer.benchmarks.report import format_table, make_run
from xformer.benchmarks.suites import SUITES, Sizes, Suite, backend_specs

__all__ = [
    "SUITES",
    "Backend",
    "Computation",
    "InterleavedBenchmark",
    "Sizes",
    "Spec",
    "Suite",
    "Workload",
    "backend_specs",
    "describe_machine",
    "format_table",
    "gemm_flops_per_second",
    "interleaved_benchmark",
    "make_run",
]
