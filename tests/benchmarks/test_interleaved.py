from __future__ import annotations

import contextlib
import json
import sys
from unittest.mock import Mock

import pytest

from xformer.benchmarks import InterleavedBenchmark, Spec, Workload, interleaved, interleaved_benchmark
from xformer.benchmarks.interleaved import quartiles
from xformer.errors import BackendError, ConfigError

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
        implementation = Mock(seconds=times, peak_bytes=None, agreement=None, metadata={})
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


def test_steps_of_different_sizes_count_their_own_tokens():
    result = measured(workload(tokens=[100, 900]), one=[0.01, 0.09])
    assert result["implementations"][0]["tokens_per_second"] == pytest.approx(10_000)


def test_steps_are_timed():
    seconds = run(workload(), [sleeper("one", 0.01)], 1)["implementations"][0]["seconds"]
    assert seconds >= 0.01


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


def test_threads_limit_variables_and_cores():
    with interleaved_benchmark(workload(), [sleeper("one", 0.001)], threads=1) as benchmark:
        assert benchmark.implementations[0].metadata == {"threads": "1", "cores": 1}


def test_different_results_are_refused():
    first, far = (sleeper(name, 0.001, result=result) for name, result in (("first", [1.0, 5]), ("far", [1.1, 5])))
    with pytest.raises(ConfigError, match=r"far computes 1\.1, first computes 1\.0"):
        run(workload(), [first, far], 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0001, 5], None),
        ([], None),
        ([1.1, 5], "other computes 1.1, first computes 1.0"),
        ([1.0, 6], "other computes 6, first computes 5"),
        ([1.0], "other computes 1, first computes 2"),
    ],
)
def test_results_agree_within_a_tolerance(values, message):
    first, other = Mock(fingerprint=[1.0, 5]), Mock(fingerprint=values)
    first.name, other.name = "first", "other"
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        interleaved._check(workload(), first, other)


def test_the_agreement_of_unchecked_implementations_is_measured():
    assert interleaved._agreement(workload(), [1.0, 5], [1.1, 5]) == 0.5


def test_an_implementation_that_cannot_start_is_named_with_the_reason():
    refuse, fail = (Spec("baseline", f"stub_computations:{name}") for name in ("refuse", "fail"))
    with pytest.raises(BackendError, match=r"^baseline failed: no such setting$"):
        run(workload(), [refuse], 1)
    optional = Spec("baseline", fail.factory, optional=True)
    result = run(workload(), [sleeper("one", 0.001), optional], 1)
    assert result["unavailable"] == {"baseline": "baseline failed: RuntimeError: no compiler"}
    assert [each["name"] for each in result["implementations"]] == ["one"]


def test_a_benchmark_needs_an_implementation():
    with pytest.raises(BackendError, match="no implementation can start: baseline failed: no such setting"):
        run(workload(), [Spec("baseline", "stub_computations:refuse", optional=True)], 1)


def test_an_implementation_that_exits_early_is_named():
    with pytest.raises(BackendError, match=r"baseline failed: .*exited with code 3"):
        run(workload(), [Spec("baseline", "stub_computations:die")], 2)


def test_output_of_libraries_is_ignored():
    assert run(workload(), [Spec("baseline", "stub_computations:print_first")], 2)["rounds"] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the peak")
def test_peak_memory_includes_temporary_arrays():
    size = 50_000_000
    result = run(workload(bytes=size), [Spec("one", "stub_computations:allocate")], 1)
    assert size < result["implementations"][0]["peak_bytes"] < 3 * size


def test_quartiles():
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 4.0]
    assert quartiles([7.0]) == [7.0, 7.0]
