from __future__ import annotations

import os

import pytest

from xformer.cli import _plots, bench_plot
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
    for module in (_plots, bench_plot):
        monkeypatch.setattr(module, "save", lambda figure, path: drawn.append(figure))
    return drawn


def test_curves(figure, tmp_path):
    _plots.draw_curves(LOG, tmp_path / "curves.png")
    losses, scores = figure[0].axes
    assert [line.get_xydata().tolist() for line in losses.lines] == [[[1, 5], [10, 4]], [[10, 4.5], [20, 4]]]
    assert [line.get_xydata().tolist() for line in scores.lines] == [[[10, 3]]]
    assert (losses.get_ylabel(), scores.get_ylabel()) == ("loss (nats per token)", "validation BLEU")
    assert scores.get_xlabel() == "step"


def test_curves_without_bleu(figure, tmp_path):
    _plots.draw_curves(LOG[:2], tmp_path / "curves.png")
    (losses,) = figure[0].axes
    assert losses.get_xlabel() == "step"


def test_label_smoothing_is_named_in_the_legend(figure, tmp_path):
    for smoothing in (0.0, 0.1):
        _plots.draw_curves(LOG, tmp_path / "curves.png", label_smoothing=smoothing)
    labels = [each.axes[0].lines[0].get_label() for each in figure]
    assert labels == ["training", "training (with label smoothing)"]


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ConfigError, match="nothing to plot"):
        _plots.draw_curves([], tmp_path / "curves.png")


def test_throughput_against_length_and_batch(figure, tmp_path):
    results = [
        {
            "sizes": {"batch": batch, "length": length, "causal": True},
            "implementations": [
                {"name": name, "tokens_per_second": 100 * batch * length} for name in ("numpy", "torch")
            ],
        }
        for length in (16, 8)
        for batch in (1, 2)
    ]
    run = {"suite": "attention", "machine": {"threads": 2, "processor": "CPU"}, "results": results}
    bench_plot.draw_throughput(run, tmp_path / "speed.png")
    by_length, by_batch = figure[0].axes
    assert [line.get_label() for line in by_length.lines] == [
        f"{name}, batch {batch}" for batch in (1, 2) for name in ("numpy", "torch")
    ]
    assert by_length.lines[2].get_xydata().tolist() == [[8, 1600], [16, 3200]]
    assert by_length.lines[0].get_color() == by_length.lines[2].get_color() != by_length.lines[1].get_color()
    assert [line.get_xdata().tolist() for line in by_batch.lines] == [[1, 2]] * 4
    bench_plot.draw_throughput({**run, "results": results[:1]}, tmp_path / "speed.png")
    assert len(figure[1].axes) == 1


def test_a_plot_replaces_no_device_and_follows_links(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real.png")
    _plots.draw_curves(LOG, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real.png").read_bytes().startswith(b"\x89PNG")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        _plots.draw_curves(LOG, tmp_path / "pipe")
