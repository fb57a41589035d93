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


@pytest.mark.parametrize("arguments", [
    "demo", "bench attention", "resume {run}", "generate --model {run} --prompt one", "serve --model {run}",
    "train {files} --out {out}", "embed --model {run} --input {out} --output {out}",
])  # fmt: skip
def test_commands_that_cannot_be_reproducible_say_so(refused, trained, train_options, tmp_path, monkeypatch, arguments):
    monkeypatch.setattr("xformer.native.LIB", None)
    monkeypatch.setattr("xformer.native.WHY_NOT", "XFORMER_NATIVE=off")
    files = " ".join(map(str, train_options))
    error = refused(
        *arguments.format(run=trained, files=files, out=tmp_path / "out").split(), "--reproducible", untouched=tmp_path
    )
    assert error.startswith("error: reproducible results need the native library")
    assert error.endswith("XFORMER_NATIVE=off\n")


def test_only_numpy_is_reproducible(refused, trained, tmp_path, monkeypatch):
    pytest.importorskip("array_api_strict")
    monkeypatch.setenv("XFORMER_REPRODUCIBLE", "1")
    options = ["--model", trained, "--input", "-", "--output", tmp_path / "out", "--backend", "array_api_strict"]
    error = refused("translate", *options, untouched=tmp_path)
    assert error == "error: reproducible results need float32 on NumPy or CuPy; received array_api_strict\n"


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
