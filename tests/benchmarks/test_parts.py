"""Every part of a Transformer has the same values on every library and in the peers, and sizes form a grid."""

from __future__ import annotations

import pytest

import xformer as xf
from tests.conftest import library_or_skip
from tests.reference import for_each, raises_line
from xformer.benchmarks import interleaved, parts
from xformer.benchmarks.interleaved import difference
from xformer.errors import ConfigError

TINY = {"batch": 2, "length": 6, "heads": 2, "head_dim": 4, "layers": 1, "vocabulary": 20}


def fingerprint_of(factory, **settings):
    computation = getattr(parts, factory)({**parts.DEFAULTS, **TINY, **settings})
    with computation.context():
        for index in range(2):
            result = computation.step(index)
        return computation.fingerprint(result)


@for_each("library", ["torch", "jax", "mlx", "array_api_strict"])
@for_each("part", parts.NAMES)
def test_libraries_compute_the_same(monkeypatch, library, part):
    library_or_skip(library)
    monkeypatch.setattr(parts, "_NEW_TOKENS", 4)  # JAX compiles the steps of each length
    settings = {"part": part, "backward": part not in parts.FORWARD_ONLY}
    expected = fingerprint_of("build", backend="numpy", **settings)
    assert expected
    assert difference(expected, fingerprint_of("build", backend=library, **settings)) < 1e-4


@for_each("part", [name for name in parts.NAMES if name != "decode"])
def test_programs_compute_the_same(part):
    settings = {"part": part, "backend": "numpy", "backward": part != "train-step"}
    assert difference(fingerprint_of("build", **settings), fingerprint_of("build", jit=True, **settings)) < 1e-5


@for_each(
    "peer, backward, causal", [("torch.nn", True, False), ("torch.nn", False, True), ("textbook NumPy", False, True)]
)
def test_peers_compute_the_same(peer, backward, causal):
    if peer == "torch.nn":
        pytest.importorskip("torch")
    factory, names = parts.PEERS[peer]
    for part in names:
        settings = {"part": part, "backward": backward, "causal": causal and part in ("attention", "layer")}
        expected = fingerprint_of("build", backend="numpy", **settings)
        assert difference(expected, fingerprint_of(factory, **settings)) < 1e-5


def test_the_grid_has_every_combination():
    workloads = parts.SUITES["attention"].workloads()
    assert len({workload.name for workload in workloads}) == len(workloads) == 9
    assert {workload.settings["heads"] for workload in workloads} == {8}
    assert [each.settings["part"] for each in parts.SUITES["all"].workloads()] == [*parts.NAMES]
    for suite in parts.SUITES.values():
        assert len(suite.quick().workloads()) == len(suite.parts)
        assert all(each.tokens[0] > 0 for each in suite.workloads())


def test_rows_from_python(monkeypatch):
    monkeypatch.setattr(interleaved, "_PAUSE_SECONDS", 0.0)
    seen = []
    sizes = {**TINY, "length": (3, 5)}
    backends, peers = ["numpy", "array_api_strict"], ["textbook NumPy"]
    rows = xf.benchmark("norm", backends, rounds=1, peers=peers, on_progress=seen.append, **sizes)
    assert [(row["part"], row["length"], row["name"]) for row in rows] == [
        ("norm", length, name)
        for length in (3, 5)
        for name in ("xformer numpy", "xformer array_api_strict", "textbook NumPy")
    ]
    assert all(row["seconds"] > 0 and not row["differs"] for row in rows)
    assert len(seen) == 2


@for_each(
    "arguments, settings, message",
    [
        (("atention",), {}, "the part is 'atention'; expected one of attention, layer"),
        (("norm",), {"lenght": 3}, "the setting is 'lenght'; expected one of batch, length"),
        (("norm",), {"batch": 0}, "batch is 0; expected an integer of at least 1"),
        (("norm",), {"rounds": 0}, "rounds is 0; expected an integer of at least 1"),
        (("norm",), {"length": (8, 2.0)}, "length is 2.0; expected an integer of at least 1"),
        (("norm", []), {}, "the number of backends is 0; expected an integer of at least 1"),
        (("norm",), {"peers": ["torch"]}, "the peer is 'torch'; expected one of torch.nn, textbook NumPy"),
    ],
)
def test_unknown_names_are_refused(arguments, settings, message):
    with raises_line(ConfigError, message):
        xf.benchmark(*arguments, **settings)
