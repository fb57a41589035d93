from __future__ import annotations

import json
import sys

import pytest

from xformer.benchmarks import Case, Entry, racing
from xformer.benchmarks.interleaved import quartiles
from xformer.errors import BackendError, ConfigError

pytestmark = pytest.mark.usefixtures("no_stray_processes")


def case(tokens=(100,), flops=0, warm_up=0, **settings):
    return Case("work", settings, tokens, flops, warm_up)


def run(case, entries, turns, **options):
    with racing(case, entries, **options) as running:
        for _ in range(turns):
            running.turn()
        return running.result()


def sleeper(name, *seconds, **settings):
    return Entry(name, "stub_work:sleep", {"seconds": seconds, **settings})


def test_times_ratios_and_rates():
    entries = [sleeper("quick", 0.01), sleeper("slow", 0.03)]
    result = run(case(tokens=[100], flops=10**9), entries, 3)
    quick, slow = result["contenders"]
    assert (result["turns"], quick["name"], slow["name"]) == (3, "quick", "slow")
    assert quick["ratio"] == 1.0
    assert slow["ratio"] == pytest.approx(3.0, rel=0.3)
    assert slow["ratio_quartiles"][0] <= slow["ratio"] <= slow["ratio_quartiles"][1]
    assert slow["tokens_per_second"] == pytest.approx(100 / slow["seconds"])
    assert slow["flops_per_second"] == pytest.approx(1e9 / slow["seconds"])
    assert json.loads(json.dumps(result)) == result


def test_steps_of_different_sizes_count_their_own_tokens():
    result = run(case(tokens=[100, 900]), [sleeper("one", 0.01, 0.09)], 2)
    assert result["contenders"][0]["tokens_per_second"] == pytest.approx(10_000, rel=0.2)


def test_whoever_begins_changes(monkeypatch):
    order = []
    with racing(case(), [sleeper("a", 0.001), sleeper("b", 0.001)]) as running:
        for contender in running.contenders:
            monkeypatch.setattr(
                contender, "step", lambda number, name=contender.name: order.append(name) or running.turns
            )
        running.turn()
        running.turn()
    assert order == ["a", "b", "b", "a"]


def test_threads_limit_variables_and_cores():
    with racing(case(), [sleeper("one", 0.001)], threads=1) as running:
        assert running.contenders[0].facts == {"threads": "1", "cores": 1}


def test_different_answers_are_refused():
    first = sleeper("first", 0.001, answer=[1.0, 5])
    near, far, other = (
        sleeper(name, 0.001, answer=answer)
        for name, answer in (("near", [1.0001, 5]), ("far", [1.1, 5]), ("other", [1.0, 6]))
    )
    run(case(), [first, near], 1)
    for entry, message in ((far, "far computes 1.1 where first computes 1.0"), (other, "other computes 6 where")):
        with pytest.raises(ConfigError, match=message):
            run(case(), [first, entry], 1)
    unchecked = run(case(), [first, Entry("far", far.factory, far.settings, checked=False)], 1)
    assert [each["agreement"] for each in unchecked["contenders"]] == [None, 0.5]
    with pytest.raises(ConfigError, match="short computes 1 where first computes 2"):
        run(case(), [first, sleeper("short", 0.001, answer=[1.0])], 1)


@pytest.mark.parametrize(("function", "reason"), [("refuse", "no such setting"), ("fail", "RuntimeError: no compiler")])
def test_who_cannot_start_is_named_with_the_reason(function, reason):
    entry = Entry("peer", f"stub_work:{function}")
    with pytest.raises(BackendError, match=f"^peer cannot take part: {reason}$"):
        run(case(), [sleeper("one", 0.001), entry], 1)
    optional = Entry("peer", entry.factory, optional=True)
    result = run(case(), [sleeper("one", 0.001), optional], 1)
    assert result["absent"] == {"peer": f"peer cannot take part: {reason}"}
    assert [each["name"] for each in result["contenders"]] == ["one"]
    with pytest.raises(BackendError, match="no contender can start"):
        run(case(), [optional], 1)


def test_who_ends_in_the_middle_is_named():
    with pytest.raises(BackendError, match=r"peer cannot take part: .*ended with code 3"):
        run(case(), [Entry("peer", "stub_work:die")], 2)


def test_what_libraries_print_is_no_answer():
    assert run(case(), [Entry("peer", "stub_work:print_first")], 2)["turns"] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak")
def test_memory_is_what_the_work_takes():
    size = 50_000_000
    result = run(case(bytes=size), [Entry("one", "stub_work:allocate")], 1)
    assert size < result["contenders"][0]["peak_bytes"] < 3 * size


def test_quartiles():
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 4.0]
    assert quartiles([7.0]) == [7.0, 7.0]
