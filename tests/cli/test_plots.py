from __future__ import annotations

import pytest

from xformer.cli import _plots
from xformer.errors import ConfigError

LOG = [
    {"event": "step", "step": 1, "loss": 5.0},
    {"event": "step", "step": 10, "loss": 4.0},
    {"event": "validation", "step": 10, "loss": 4.5, "score": 3.0, "metric": "BLEU"},
    {"event": "validation", "step": 20, "loss": 4.0, "score": None, "metric": None},
]


@pytest.fixture
def figure(monkeypatch):
    """The figures that would have been written."""
    drawn = []
    monkeypatch.setattr(_plots, "save", lambda figure, path: drawn.append(figure))
    return drawn


def test_curves(figure, tmp_path):
    _plots.draw_curves(LOG, tmp_path / "curves.png")
    losses, scores = figure[0].axes
    assert [line.get_xydata().tolist() for line in losses.lines] == [[[1, 5], [10, 4]], [[10, 4.5], [20, 4]]]
    assert [line.get_xydata().tolist() for line in scores.lines] == [[[10, 3]]]
    assert (losses.get_ylabel(), scores.get_ylabel()) == ("loss (nats per token)", "validation BLEU")
    assert scores.get_xlabel() == "step"


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ConfigError, match="nothing to plot"):
        _plots.draw_curves([], tmp_path / "curves.png")


def bench_run(suite="attention", lengths=(8,), **sizes):
    """Return a run of two libraries, in which the second one takes twice as long."""
    results = [
        {
            "sizes": {"batch": 1, "length": length, "heads": 2, "head_dim": 4, "dtype": "float32", **sizes},
            "implementations": [
                {
                    "name": f"xformer {name}", "seconds": ratio * length / 1e3,
                    "seconds_quartiles": [0.5 * ratio * length / 1e3, 1.5 * ratio * length / 1e3], "ratio": ratio,
                    "ratio_quartiles": [0.9 * ratio, 1.1 * ratio], "peak_bytes": peak,
                }
                for name, ratio, peak in (("numpy", 1.0, 2**20), ("dask.array", 2.0, None))
            ],
        }
        for length in lengths
    ]  # fmt: skip
    machine = {"threads": 2, "processor": "CPU", "versions": {"numpy": "2.4.6", "dask": "2026.8.0"}}
    return {"suite": suite, "machine": machine, "results": results}


def test_a_bar_for_each_library_and_a_panel_for_each_size(figure, tmp_path):
    _plots.draw_bars(bench_run(lengths=(8, 16), layer=True, causal=True), tmp_path / "speed.png")
    assert figure[0].get_suptitle() == "Multi-head attention, causal, forward, float32: 2 threads of CPU"
    first, second = figure[0].axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["numpy 2.4.6", "dask.array 2026.8.0"]
    assert [bar.get_width() for bar in first.patches] == [8.0, 16.0]
    assert [bar.get_width() for bar in second.patches] == [16.0, 32.0]
    assert [text.get_text() for text in first.texts] == ["8.00 ms   1.00 × (0.90–1.10)", "16.0 ms   2.00 × (1.80–2.20)"]
    (whiskers,) = first.collections
    assert [segment[:, 0].tolist() for segment in whiskers.get_segments()] == [[4.0, 12.0], [8.0, 24.0]]
    assert (first.get_xscale(), first.get_xlim()[0]) == ("linear", 0.0)
    assert second.get_title(loc="left") == "batch 1, length 16, 2 heads of 4 features"
    assert first.get_xlabel() == "milliseconds   (× time of numpy, quartiles)"
    assert first.axison


def test_memory_is_plotted_as_memory(figure, tmp_path):
    _plots.draw_bars(bench_run("memory", backward=True), tmp_path / "memory.png")
    (axes,) = figure[0].axes
    assert [bar.get_width() for bar in axes.patches] == [1.0, 0.0]
    assert [text.get_text() for text in axes.texts] == ["1.0 MiB", "unknown"]
    assert axes.get_xlabel() == "peak memory (MiB)"
