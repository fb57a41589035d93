from __future__ import annotations

import json
import sys

import pytest

from xformer.benchmarks import Spec, Workload, interleaved_benchmark
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


def test_times_ratios_and_rates():
    specs = [sleeper("quick", 0.01), sleeper("slow", 0.03)]
    result = run(workload(tokens=[100], flops=10**9), specs, 3)
    quick, slow = result["implementations"]
    assert (result["rounds"], quick["name"], slow["name"]) == (3, "quick", "slow")
    assert quick["ratio"] == 1.0
    assert slow["ratio"] == pytest.approx(3.0, rel=0.3)
    assert slow["ratio_quartiles"][0] <= slow["ratio"] <= slow["ratio_quartiles"][1]
    assert slow["tokens_per_second"] == pytest.approx(100 / slow["seconds"])
    assert slow["flops_per_second"] == pytest.approx(1e9 / slow["seconds"])
    assert json.loads(json.dumps(result)) == result


def test_steps_of_different_sizes_count_their_own_tokens():
    result = run(workload(tokens=[100, 900]), [sleeper("one", 0.01, 0.09)], 2)
    assert result["implementations"][0]["tokens_per_second"] == pytest.approx(10_000, rel=0.2)


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
    first = sleeper("first", 0.001, result=[1.0, 5])
    near, far, other = (
        sleeper(name, 0.001, result=value)
        for name, value in (("near", [1.0001, 5]), ("far", [1.1, 5]), ("other", [1.0, 6]))
    )
    run(workload(), [first, near], 1)
    for spec, message in ((far, "far computes 1.1, first computes 1.0"), (other, "other computes 6, first computes 5")):
        with pytest.raises(ConfigError, match=message):
            run(workload(), [first, spec], 1)
    unchecked = run(workload(), [first, Spec("far", far.factory, far.settings, checked=False)], 1)
    assert [each["agreement"] for each in unchecked["implementations"]] == [None, 0.5]
    with pytest.raises(ConfigError, match="short computes 1, first computes 2"):
        run(workload(), [first, sleeper("short", 0.001, result=[1.0])], 1)


@pytest.mark.parametrize(("function", "reason"), [("refuse", "no such setting"), ("fail", "RuntimeError: no compiler")])
def test_an_implementation_that_cannot_start_is_named_with_the_reason(function, reason):
    spec = Spec("baseline", f"stub_computations:{function}")
    with pytest.raises(BackendError, match=f"^baseline failed: {reason}$"):
        run(workload(), [sleeper("one", 0.001), spec], 1)
    optional = Spec("baseline", spec.factory, optional=True)
    result = run(workload(), [sleeper("one", 0.001), optional], 1)
    assert result["unavailable"] == {"baseline": f"baseline failed: {reason}"}
    assert [each["name"] for each in result["implementations"]] == ["one"]
    with pytest.raises(BackendError, match="no implementation can start"):
        run(workload(), [optional], 1)


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
