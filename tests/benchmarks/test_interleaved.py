from __future__ import annotations

import json
import math
import sys
from unittest.mock import Mock

import pytest

from xformer.benchmarks import parts, worker
from xformer.benchmarks.interleaved import (
    _TOLERANCES,
    InterleavedBenchmark,
    Spec,
    Workload,
    difference,
    interleaved_benchmark,
)
from xformer.benchmarks.report import format_label
from xformer.errors import BackendError

pytestmark = pytest.mark.usefixtures("no_stray_processes")


def workload(tokens=(100,), flops=0, warmup_steps=0, **settings):
    return Workload("workload", settings, tokens, flops, warmup_steps)


def run(workload, specs, rounds, **options):
    with interleaved_benchmark(workload, specs, **options) as benchmark:
        for _ in range(rounds):
            benchmark.run_round()
        return benchmark.result()


def sleeper(name, *seconds, **settings):
    return Spec(name, "stub_computations:sleep", {"seconds": seconds, **settings})


def measured(workload, **seconds):
    """Return the result of implementations with these measured times."""
    implementations = []
    for name, times in seconds.items():
        implementation = Mock(seconds=times, synchronous_seconds=[], fingerprint=[], peak_bytes=None, metadata={})
        implementation.name = name
        implementations.append(implementation)
    benchmark = InterleavedBenchmark(workload, implementations, {})
    benchmark.rounds = len(times)
    return benchmark.result()


def test_times_ratios_and_rates():
    result = measured(workload(tokens=[100], flops=10**9), fast=[0.01, 0.02, 0.01], slow=[0.03, 0.02, 0.04])
    fast, slow = result["implementations"]
    assert (result["rounds"], fast["name"], slow["name"]) == (3, "fast", "slow")
    assert (fast["seconds"], slow["seconds"]) == (0.01, 0.03)
    assert (fast["ratio"], slow["ratio"]) == (1.0, pytest.approx(3.0))
    assert slow["ratio_quartiles"] == pytest.approx([2.0, 3.5])
    assert slow["tokens_per_second"] == pytest.approx(100 / 0.03)
    assert slow["flops_per_second"] == pytest.approx(1e9 / 0.03)
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize(("repeats", "waits"), [(1, False), (4, False), (1, True), (4, True)])
def test_steps_are_timed(monkeypatch, repeats, waits):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def step(index):
        now[0] += index

    def wait(result):
        now[0] += 2.0

    computation = Mock(step=step, wait=wait if waits else None)
    assert worker.duration(computation, 3, repeats) == (3.0 * repeats + 2.0 * waits) / repeats


def test_each_round_starts_with_another_implementation(monkeypatch):
    order = []
    with interleaved_benchmark(workload(), [sleeper("a", 0.001), sleeper("b", 0.001)]) as benchmark:
        for implementation in benchmark.implementations:
            monkeypatch.setattr(
                implementation, "step", lambda index, name=implementation.name: order.append(name) or benchmark.rounds
            )
        benchmark.run_round()
        benchmark.run_round()
    assert order == ["a", "b", "b", "a"]


def test_different_results_are_reported():
    specs = [
        sleeper(name, 0.001, result=[result])
        for name, result in (("first", [3.0, 4.0]), ("near", [3.0001, 4.0]), ("far", [3.0, 4.5]), ("random", []))
    ]
    specs[-1].settings["result"] = []
    near, far, random = run(workload(), specs, 1)["implementations"][1:]
    assert (near["difference"], near["differs"]) == (pytest.approx(2e-5), False)
    assert (far["difference"], far["differs"]) == (pytest.approx(0.1), True)
    assert (random["difference"], random["differs"]) == (None, False)
    assert [format_label(each) for each in (near, far)] == ["near", "far (differs by 10.0%)"]


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([[3.0, 4.0], [1, 2, 3, 4]], 0.0),
        ([[3.0, 4.5], [1, 2, 3, 4]], 0.1),
        ([[3.0, 4.0], [1, 2, 3, 5]], 0.25),
        ([[0.0, 0.0], [1, 2, 3, 4]], 1.0),
        ([[math.nan, 4.0], [1, 2, 3, 4]], 1.0),
        ([[3.0, 4.0]], 1.0),
        ([[3.0, 4.0], [1, 2, 3]], 1.0),
        ([], None),
    ],
)
def test_results_are_compared_by_norm_and_tokens_one_by_one(actual, expected):
    assert difference([[3.0, 4.0], [1, 2, 3, 4]], actual) == (expected if expected is None else pytest.approx(expected))


def test_zeros_are_not_attention_in_bfloat16_but_rounded_results_are():
    settings = {"batch": 1, "heads": 1, "length": 1024, "head_dim": 8, "causal": False, "padded": False}
    computation = parts.build({**settings, "backward": True, "part": "attention", "backend": "numpy"})
    results = computation.step(0)
    expected, zeros = (computation.fingerprint(arrays) for arrays in (results, [x * 0 for x in results]))
    assert difference(expected, zeros) == 1.0
    rounded = [(x.view("uint32") & 0xFFFF0000).view("float32") for x in results]
    assert 1e-3 < difference(expected, computation.fingerprint(rounded)) < _TOLERANCES["bfloat16"]


def test_an_implementation_that_cannot_start_is_named_with_the_reason():
    refuse, fail = (Spec("baseline", f"stub_computations:{name}") for name in ("refuse", "fail"))
    with pytest.raises(BackendError, match=r"^baseline failed: no such setting\n(?s:.*)no such setting\n$"):
        run(workload(), [refuse], 1)
    optional = Spec("baseline", fail.factory, optional=True)
    result = run(workload(), [sleeper("one", 0.001), optional], 1)
    assert result["unavailable"] == {"baseline": "baseline failed: RuntimeError: no compiler"}
    assert [each["name"] for each in result["implementations"]] == ["one"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the peak")
def test_peak_memory_includes_temporary_arrays():
    size = 50_000_000
    result = run(workload(bytes=size), [Spec("one", "stub_computations:allocate")], 1)
    assert size < result["implementations"][0]["peak_bytes"] < 3 * size
