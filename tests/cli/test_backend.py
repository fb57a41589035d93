from __future__ import annotations

import sys

import pytest

from xformer.cli import backend
from xformer.errors import BackendError


def test_numpy_is_opened_and_keeps_its_memory(monkeypatch):
    called = []
    monkeypatch.setattr(backend, "disable_malloc_trim", lambda: called.append(True))
    assert backend.open_backend("numpy").zeros(2).shape == (2,)
    assert called == [True]


@pytest.mark.parametrize(("dtype", "wanted"), [("float64", True), ("float32", False), (None, False)])
def test_jax_gets_float64_where_the_model_needs_it(monkeypatch, dtype, wanted):
    jax = pytest.importorskip("jax")
    updates = []
    monkeypatch.setattr(jax.config, "update", lambda *setting: updates.append(setting))
    backend.open_backend("jax", dtype)
    assert updates == ([("jax_enable_x64", True)] if wanted else [])


@pytest.mark.parametrize(("before", "setting", "wanted"), [(4, "2", 2), (1, "2", 1)])
def test_torch_keeps_to_the_number_of_threads(monkeypatch, before, setting, wanted):
    torch = pytest.importorskip("torch")
    set_to = []
    monkeypatch.setenv("XFORMER_NUM_THREADS", setting)
    monkeypatch.setattr(torch, "get_num_threads", lambda: before)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    backend.open_backend("torch")
    assert set(set_to) == {wanted}


def test_a_library_that_finds_no_device_says_so(monkeypatch):
    class NoDevice:
        float32 = None

        def zeros(self, size, dtype):
            raise RuntimeError("CUDA driver\nis insufficient")

    monkeypatch.setattr(backend, "resolve", lambda name: NoDevice())
    with pytest.raises(BackendError, match="'cupy' is installed but cannot compute here: CUDA driver is insufficient"):
        backend.open_backend("cupy")


@pytest.mark.parametrize("name", ["XFORMER_KERNELS", "XFORMER_CHECK_KERNELS", "XFORMER_NUM_THREADS"])
def test_a_wrong_setting_of_the_environment_is_refused_before_there_is_work(
    refused, train_options, tmp_path, monkeypatch, name
):
    monkeypatch.setenv(name, "some")
    assert f"error: {name} is 'some'; expected" in refused(
        "train", *train_options, "--out", tmp_path / "run", untouched=tmp_path
    )


def test_an_unknown_library():
    with pytest.raises(BackendError, match="'tensorflow' is unknown"):
        backend.open_backend("tensorflow")
    assert "tensorflow" not in sys.modules
