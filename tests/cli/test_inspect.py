from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import types
from pathlib import Path

import numpy

import xformer as package
from xformer import native
from xformer.errors import BackendError
from xformer.kernels.cupy import machine
from xformer.models import Transformer


def test_everything_about_a_run(xformer, trained):
    import numpy as np

    done = xformer("inspect", trained)
    assert (done.code, done.err) == (0, "")
    total = Transformer.load(trained / "model.safetensors", xp=np).parameter_count()
    for words in (
        f"Transformer; run of xformer {package.__version__} for translation", "batch_tokens", "source_embedding",
        f"{total:,} in ", "bpe, 100 tokens, cased", "Validations (2)", "train_pairs",
    ):  # fmt: skip
        assert words in done.out
    assert "learning_rate_factor" not in done.out  # the default
    assert sum("best" in line.split() for line in done.out.split("\n")) == 1


def test_json(xformer, trained):
    done = xformer("inspect", trained, "--json")
    report = json.loads(done.out)
    assert report["config"]["recipe"]["model"]["d_model"] == 16
    assert sum(report["parameters"].values()) == report["config"]["num_parameters"]
    assert report["tokenizers"] == {"joint": {"model": "bpe", "vocab_size": 100, "lowercase": False}}
    assert [event["step"] for event in report["validations"]] == [4, 6]


def test_a_run_that_has_no_model_yet(xformer, trained, tmp_path, refused):
    shutil.copytree(trained, tmp_path / "run")
    for file in ("model.safetensors", "last.safetensors", "log.jsonl"):
        (tmp_path / "run" / file).unlink()
    done = xformer("inspect", tmp_path / "run")
    assert done.code == 0
    assert "no model yet" in done.out
    assert "no validation yet" in done.out
    error = refused("inspect", tmp_path / "run", "--plot", tmp_path / "curves.png", untouched=tmp_path)
    assert "nothing to plot" in error


def test_tensors(xformer, trained):
    assert "decoder.0.cross_attention.key.weight" not in xformer("inspect", trained).out
    done = xformer("inspect", trained, "--tensors")
    assert re.search(r"decoder.0.cross_attention.key.weight +float32 +16 x 16", done.out)
    tensors = json.loads(xformer("inspect", trained, "--tensors", "--json").out)["tensors"]
    assert tensors["decoder.0.cross_attention.key.weight"] == {"dtype": "float32", "shape": [16, 16]}


def test_a_plot_replaces_no_file_of_the_run(refused, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    model = tmp_path / "run" / "model.safetensors"
    error = refused("inspect", tmp_path / "run", "--plot", model, untouched=tmp_path)
    assert "expected a name ending in .png" in error
    (tmp_path / "link.png").symlink_to(model)
    error = refused("inspect", tmp_path / "run", "--plot", tmp_path / "link.png", untouched=tmp_path)
    assert f"link.png would replace {model}" in error


def test_the_environment_says_whether_the_native_library_is_used(xformer, monkeypatch):
    monkeypatch.setattr(native, "level", lambda: "avx2")
    text = xformer("inspect", "--environment").out
    assert re.search(r"^ *native library +avx2 *$", text, re.MULTILINE)
    assert re.search(rf"libraries +numpy {re.escape(numpy.__version__)}", text)
    monkeypatch.setattr(native, "level", lambda: "")
    monkeypatch.setattr(native, "WHY_NOT", "it was not compiled: with a C++ compiler")
    reason = "not used: it was not compiled: with a C++ compiler"
    assert re.search(
        rf"^ *native library +{re.escape(reason)} *$", xformer("inspect", "--environment").out, re.MULTILINE
    )
    assert json.loads(xformer("inspect", "--environment", "--json").out)["native"] == reason


def use_cupy(monkeypatch, describe):
    """Be a machine with CuPy."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "cupy" else find_spec(name))
    monkeypatch.setattr(machine, "resolve", describe)


def test_the_environment_says_what_cupy_finds(xformer, monkeypatch):
    runtime = types.SimpleNamespace(
        getDevice=lambda: 0,
        driverGetVersion=lambda: 13010,
        runtimeGetVersion=lambda: 13000,
        memGetInfo=lambda: (60 * 2**30, 80 * 2**30),
    )
    frontend = types.SimpleNamespace(backend_version=lambda: 91902, __version__="1.32.0")
    use_cupy(monkeypatch, lambda name: None)
    monkeypatch.setattr(machine, "cuda", lambda: types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(machine, "device_properties", lambda device: ("NVIDIA H100", 90))
    monkeypatch.setattr(machine, "identity", lambda: "GPU 1")
    monkeypatch.setattr(machine, "failures", lambda identity: {"cupy.relu (False,)": "it differs"})
    for reason, shown in ((None, "9.19.2, frontend 1.32.0"), ("the cuDNN frontend is not installed",) * 2):
        monkeypatch.setattr(machine.cudnn_plans, "frontend", lambda reason=reason: (frontend, reason))
        found = json.loads(xformer("inspect", "--environment", "--json").out)
        assert found["cuDNN"] == shown
    assert found["CUDA"] == "NVIDIA H100, capability 9.0; the driver knows 13.1, CuPy is built for 13.0"
    assert found["GPU memory"] == "60.0 of 80.0 GiB free"
    assert found["kernels off"].endswith("cupy.relu (False,): it differs")
    assert "60.0 of 80.0 GiB free" in xformer("inspect", "--environment").out


def test_the_environment_says_in_one_line_that_cupy_has_no_gpu(xformer, monkeypatch):
    def no_driver(name):
        raise BackendError("no NVIDIA GPU or driver was found (cudaErrorNoDevice); use xp=numpy")

    use_cupy(monkeypatch, no_driver)
    found = json.loads(xformer("inspect", "--environment", "--json").out)
    assert found["CUDA"] == "no NVIDIA GPU or driver was found (cudaErrorNoDevice); use xp=numpy"
    assert not {"cuDNN", "GPU memory", "kernels off"} & {*found}


def test_a_model_or_the_environment(refused, tmp_path):
    assert "inspect got no model; pass" in refused("inspect", untouched=tmp_path)
    assert "and --environment; pass one of them" in refused("inspect", tmp_path, "--environment", untouched=tmp_path)


def test_the_dropout_of_a_checkpoint_is_not_that_of_the_loaded_model(xformer):
    done = xformer("inspect", Path(__file__).parent.parent / "families" / "data" / "bert")
    text = " ".join(done.out.split())
    assert (
        "dropout 0 (the file has attention_probs_dropout_prob 0.1, hidden_dropout_prob 0.1; for training, use" in text
    )
    assert "model.with_config(dropout=0.1))" in text


def test_a_checkpoint_with_two_encoders_has_the_settings_of_both(xformer):
    done = xformer("inspect", Path(__file__).parent.parent / "families" / "data" / "clip")
    assert "ImageTextEncoder; clip, CLIPModel" in done.out
    for pattern in (r"\[text\] +d_model +16", r"\[image\] +d_model +24", r"activation +quick_gelu"):
        assert re.search(pattern, done.out)
