import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.reference import raises_line, small_language_model
from xformer.errors import CheckpointError
from xformer.io import load_arrays, save_arrays
from xformer.layers.weights import lora
from xformer.models import Transformer, TransformerConfig
from xformer.training import SGD, Adafactor, Adam, AdamW, Muon, load_parameters, save_parameters
from xformer.training.checkpoint import TrainingFiles
from xformer.tree import Module, flatten, map_arrays


@pytest.fixture
def files(tmp_path):
    return TrainingFiles(tmp_path / "run")


def make_model(d_model=8, dtype="float32"):
    config = TransformerConfig(
        source_vocab_size=9,
        target_vocab_size=9,
        d_model=d_model,
        num_heads=2,
        d_ff=16,
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
    return Transformer(config, xp=np, seed=0, dtype=dtype)


def trained(model, optimizer=Adam()):  # noqa: B008 - it is frozen
    """A model and an optimizer state that are not those of a fresh start."""
    numbers = np.random.default_rng(0)
    noisy = lambda array: array + numbers.normal(size=array.shape).astype(array.dtype)  # noqa: E731
    return map_arrays(noisy, model), map_arrays(noisy, optimizer.init(model))._replace(step=7)


# --- States -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [Adam(), AdamW(), Muon(), Adafactor(), SGD(), SGD(momentum=0.0)],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_a_state_comes_back_to_the_bit(files, optimizer):
    model, state = trained(make_model(), optimizer)
    files.save_state(model, state, "Adam", {"step": 7, "epoch": 1})
    fresh = make_model()
    loaded, loaded_state, progress = files.load_state(fresh, optimizer.init(fresh), "Adam")
    assert (progress["step"], progress["epoch"]) == (7, 1)
    assert type(loaded_state) is type(state)
    assert loaded_state.step == 7
    for one, other in ((loaded, model), *zip(loaded_state[1:], state[1:], strict=True)):
        assert (one is None) == (other is None)
        for a, b in zip(flatten(one)[0], flatten(other)[0], strict=True):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()


def test_a_state_of_another_optimizer_is_refused(files):
    model, state = trained(make_model(), SGD())
    files.save_state(model, state, "Adam", {"step": 7})
    with pytest.raises(CheckpointError, match="is not the training state of this run"):
        files.load_state(model, Adam().init(model), "Adam")


def test_other_files_are_no_states(files):
    model, state = trained(make_model())
    files.directory.mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        files.load_state(model, state, "Adam")
    files.state.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="is not a valid safetensors file"):
        files.load_state(model, state, "Adam")
    model.save(files.state)
    with pytest.raises(CheckpointError, match="is not the training state"):
        files.load_state(model, state, "Adam")
    save_arrays(files.state, {}, {"format": "xformer-training-state", "progress": "{"})
    with pytest.raises(CheckpointError, match="is not the training state"):
        files.load_state(model, state, "Adam")


# --- The log ----------------------------------------------------------------------------------------------------------


def test_the_log_can_be_wound_back(files):
    files.directory.mkdir()
    assert files.read_log() == []
    for step in (1, 10, 20, 30):
        files.append_log({"event": "update", "step": step})
    files.rewind_log(20)
    assert [event["step"] for event in files.read_log()] == [1, 10, 20]
    files.append_log({"event": "update", "step": 21})
    assert [event["step"] for event in files.read_log()] == [1, 10, 20, 21]


def test_a_line_that_was_cut_off_is_left_out(files):
    files.directory.mkdir()
    files.log.write_text(json.dumps({"step": 1}) + "\n[1, 2]\n" + '{"step": 2')
    assert files.read_log() == [{"step": 1}]
    files.rewind_log(5)
    assert files.log.read_text() == '{"step": 1}\n'


# --- The directory ----------------------------------------------------------------------------------------------------


def test_two_processes_do_not_train_in_one_directory(files):
    code = (
        "import sys; from xformer.training.checkpoint import TrainingFiles\n"
        "with TrainingFiles(sys.argv[1]).open(): pass"
    )
    with files.open(), files.open():  # one process may nest the locks
        done = subprocess.run(
            [sys.executable, "-c", code, files.directory], capture_output=True, text=True, check=False
        )
    assert f"another process is training in {files.directory}" in done.stderr
    with files.open():
        pass


def test_parameters_come_back(tmp_path):
    model, _ = trained(make_model())
    save_parameters(model, tmp_path / "model.safetensors")
    loaded = load_parameters(make_model(), tmp_path / "model.safetensors")
    for one, other in zip(flatten(loaded)[0], flatten(model)[0], strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(("rank", "alpha"), [(2, 8), (4, 2)])
def test_parameters_of_adapters_with_another_scale_are_refused(tmp_path, rank, alpha):
    base, path = small_language_model(), tmp_path / "model.safetensors"
    save_parameters(lora(base, rank, alpha=alpha), path)
    assert flatten(load_parameters(lora(base, rank, alpha=alpha).to("numpy", dtype="float32"), path))[0]
    with raises_line(CheckpointError, "scaling .*; expected .*; use the same model"):
        load_parameters(lora(base, rank, alpha=2 * alpha), path)
    arrays, _ = load_arrays(path)
    save_arrays(path, arrays, {"format": "xformer"})  # as before files had settings
    assert load_parameters(lora(base, rank, alpha=2 * alpha), path)


class Exporting(Module):
    """A module with a `save` of its own, which takes other arguments."""

    weight: Any

    def __init__(self):
        self.weight = np.ones(3)

    def save(self, directory, *, overwrite):
        raise NotImplementedError


def test_a_module_with_a_save_of_its_own_is_saved_by_names(tmp_path):
    save_parameters(Exporting(), tmp_path / "model.safetensors")
    assert load_parameters(Exporting(), tmp_path / "model.safetensors").weight.tolist() == [1.0, 1.0, 1.0]
