"""Which models stay, and what their mean is."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import raises_line, small_model
from xformer.backends import to_host
from xformer.errors import CheckpointError, ConfigError, ShapeError
from xformer.io import save_arrays
from xformer.runs.trainer import Checkpoints, average_models
from xformer.tree import flatten, map_arrays


def models(count=3, xp="numpy", **settings):
    return [small_model(xp, seed=seed, **settings) for seed in range(count)]


def files(directory):
    return sorted(path.name for path in directory.iterdir())


# --- Which ones stay --------------------------------------------------------------------------------------------------


def added(tmp_path, scores, *, keep, best):
    """Add a model after steps 2, 4, ...; returns the list that the caller keeps."""
    checkpoints, kept = Checkpoints(tmp_path, keep, best=best), []
    for number, (score, model) in enumerate(zip(scores, models(len(scores)), strict=True), start=1):
        kept = checkpoints.add(kept, 2 * number, score, model)
        checkpoints.prune(kept)
        assert files(tmp_path) == sorted(f"step-{step}.safetensors" for step, _ in kept)
    return kept


@pytest.mark.parametrize(
    ("best", "scores", "expected"),
    [
        (False, [9.0, None, 1.0, 2.0], [[6, 1.0], [8, 2.0]]),
        (True, [9.0, 3.0, 1.0, 2.0], [[2, 9.0], [4, 3.0]]),
        (True, [1.0, 2.0, 3.0, 4.0], [[6, 3.0], [8, 4.0]]),
        (True, [1.0, 1.0, 1.0, 1.0], [[6, 1.0], [8, 1.0]]),  # of equals the later one
    ],
)
def test_the_most_recent_or_the_best_stay(tmp_path, best, scores, expected):
    assert added(tmp_path, scores, keep=2, best=best) == expected


def test_a_new_one_is_safe_before_an_old_one_goes(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, 1, best=False)
    kept = checkpoints.add([], 2, 1.0, models(1)[0])

    def fsync(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("xformer.io.os.fsync", fsync)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints.add(kept, 4, 2.0, models(1)[0])
    assert files(tmp_path) == ["step-2.safetensors"]
    monkeypatch.undo()
    kept = checkpoints.add(kept, 4, 2.0, models(1)[0])
    assert files(tmp_path) == ["step-2.safetensors", "step-4.safetensors"]
    checkpoints.prune(kept)
    assert files(tmp_path) == ["step-4.safetensors"]


def test_only_checkpoints_are_pruned(tmp_path):
    (tmp_path / "best.safetensors").write_bytes(b"")
    (tmp_path / "step-3.safetensors").write_bytes(b"")
    Checkpoints(tmp_path, 1, best=False).prune([])
    assert files(tmp_path) == ["best.safetensors"]
    Checkpoints(tmp_path / "nowhere", 1, best=False).prune([])


# --- The mean ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32"])
def test_the_mean_is_that_of_each_number(xp, tmp_path, dtype):
    some = models(3, xp, dtype=dtype)
    expected = [
        np.mean([to_host(leaf).astype("float64") for leaf in leaves], axis=0).astype(dtype)
        for leaves in zip(*(flatten(model)[0] for model in some), strict=True)
    ]
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for path, model in zip(paths, some, strict=True):
        model.save(path)
    for mean in (average_models(some), average_models(paths, like=some[1])):
        assert type(mean) is type(some[0])
        assert mean.config == some[0].config
        for leaf, wanted in zip(flatten(mean)[0], expected, strict=True):
            assert_close(leaf, wanted, xp=xp, dtype=dtype, tolerance=1e-7 if dtype == "float32" else 1e-15)


def test_sums_are_made_in_float64():
    model = small_model(dtype="float32")
    parts = [map_arrays(lambda leaf, size=size: np.full_like(leaf, size), model) for size in (2.0**24, 1.0, 1.0)]
    mean = average_models(parts)
    assert {float(leaf.flat[0]) for leaf in flatten(mean)[0]} == {float(np.float32((2**24 + 2) / 3))}


def test_models_without_a_mean(tmp_path):
    model, other = small_model(), small_model(d_ff=16)
    with raises_line(ConfigError, "models is empty"):
        average_models([])
    with raises_line(ShapeError, r"of model 2 is \(.*16.*; expected \(.*12.*; models must have the same structure"):
        average_models([model, other])
    with raises_line(ShapeError, r"output_bias of model 2 is \(13,\); expected absent"):
        average_models([model, small_model(output_bias=True)])
    path = tmp_path / "other.safetensors"
    other.save(path)
    with raises_line(ConfigError, r"other.safetensors is a file; pass like="):
        average_models([path])
    with raises_line(ShapeError, r"of .*other.safetensors is"):
        average_models([path], like=model)
    save_arrays(path, dict(model.named_parameters()), {})
    with raises_line(CheckpointError, r"other.safetensors is not an xformer model"):
        average_models([path], like=model)
    with raises_line(CheckpointError, "cannot read"):
        average_models([tmp_path / "nowhere"], like=model)
