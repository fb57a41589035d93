from __future__ import annotations

import types

import pytest

from xformer.cli._options import parse_assignments, parse_recipe_overrides
from xformer.errors import BackendError, ConfigError
from xformer.runs import backend


@pytest.mark.parametrize(("dtype", "wanted"), [("float64", True), ("float32", False), (None, False)])
def test_jax_gets_float64_where_the_model_needs_it(monkeypatch, dtype, wanted):
    jax = pytest.importorskip("jax")
    updates = []
    monkeypatch.setattr(jax.config, "update", lambda *setting: updates.append(setting))
    backend.open_backend("jax", dtype)
    assert updates == ([("jax_enable_x64", True)] if wanted else [])


@pytest.mark.parametrize(("before", "setting", "wanted"), [(4, "2", 2), (1, "2", 1)])
def test_torch_uses_no_more_threads_than_allowed(monkeypatch, before, setting, wanted):
    torch = pytest.importorskip("torch")
    set_to = []
    monkeypatch.setenv("XFORMER_NUM_THREADS", setting)
    monkeypatch.setattr(torch, "get_num_threads", lambda: before)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    backend.open_backend("torch")
    assert set(set_to) == {wanted}


def test_a_library_without_a_device(monkeypatch):
    def zeros(size, dtype):
        raise RuntimeError("CUDA driver\nis insufficient")

    library = types.SimpleNamespace(float32=None, zeros=zeros, configure=lambda **options: None)
    monkeypatch.setattr(backend, "resolve", lambda name: library)
    with pytest.raises(BackendError, match="'cupy' is installed but cannot compute here: CUDA driver is insufficient"):
        backend.open_backend("cupy")


@pytest.mark.parametrize("name", ["XFORMER_KERNELS", "XFORMER_CHECK_KERNELS", "XFORMER_NUM_THREADS"])
def test_an_invalid_environment_variable_is_reported_before_training(
    refused, train_options, tmp_path, monkeypatch, name
):
    monkeypatch.setenv(name, "some")
    assert f"error: {name} is 'some'; expected" in refused(
        "train", *train_options, "--out", tmp_path / "run", untouched=tmp_path
    )


def test_assignments_are_written_as_in_toml():
    assert parse_assignments(["a=1", "b = 'x'", "c=true", "d=0.5", "e=gelu", "f=[1, 2]"]) == {
        "a": 1, "b": "x", "c": True, "d": 0.5, "e": "gelu", "f": [1, 2]
    }  # fmt: skip
    assert parse_recipe_overrides(["model.d_model=8", "training.seed=1", "model.copy=true"]) == {
        "model": {"d_model": 8, "copy": True},
        "training": {"seed": 1},
    }


def test_assignments_that_are_incomplete():
    for assignment, expected in (("seed", "NAME=VALUE"), ("seed=1", "TABLE.NAME=VALUE")):
        with pytest.raises(ConfigError, match=f"^--set is '{assignment}'; expected {expected}"):
            parse_recipe_overrides([assignment])
