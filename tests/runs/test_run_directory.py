import errno
import hashlib
import json
import os

import numpy as np
import pytest

from xformer.errors import CheckpointError, ConfigError
from xformer.io import load_arrays, save_arrays
from xformer.models import Transformer, TransformerConfig
from xformer.runs.run_directory import sha256
from xformer.text import Tokenizer
from xformer.training import SGD, Adafactor, Adam, AdamW, RunDirectory
from xformer.tree import flatten, map_arrays


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["one two three", "two three four"], 40)


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


# --- Starting ---------------------------------------------------------------------------------------------------------


def test_a_start_leaves_a_whole_run(run, tokenizer):
    run.start({"kind": "train"}, {"joint": tokenizer})
    digest = hashlib.sha256((run.path / "tokenizer.json").read_bytes()).hexdigest()
    assert run.read_config() == {"kind": "train", "tokenizers": {"tokenizer.json": digest}}
    assert run.load_tokenizer("joint").encode("one") == tokenizer.encode("one")
    with pytest.raises(ConfigError, match="holds a run that ended before anything was saved; remove it to begin anew"):
        run.start({}, {"joint": tokenizer})
    run.last.touch()
    with pytest.raises(ConfigError, match="holds another run; pass --resume"):
        run.start({}, {"joint": tokenizer})


def test_two_tokenizers_have_files_of_their_own(run, tokenizer):
    run.start({}, {"source": tokenizer, "target": tokenizer})
    assert set(run.read_config()["tokenizers"]) == {"source_tokenizer.json", "target_tokenizer.json"}


def test_an_empty_directory_is_free(run, tokenizer):
    run.path.mkdir()
    run.start({}, {"joint": tokenizer})
    assert run.config.exists()


def test_places_that_are_taken(run, tmp_path):
    run.path.mkdir()
    (run.path / "letter").write_text("dear")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        run.check_is_free()
    with pytest.raises(ConfigError, match="is a file; expected a directory"):
        RunDirectory(run.path / "letter").check_is_free()
    with pytest.raises(CheckpointError, match=r"cannot make .*letter/run: .*letter is not a directory"):
        RunDirectory(run.path / "letter" / "run").check_is_free()


@pytest.mark.parametrize("exists", [True, False])
def test_a_start_that_fails_leaves_nothing(run, tokenizer, monkeypatch, exists):
    if exists:
        run.path.mkdir()

    def write_json(path, value):
        raise CheckpointError("no space")

    monkeypatch.setattr("xformer.runs.run_directory.write_json", write_json)
    with pytest.raises(CheckpointError, match="no space"):
        run.start({}, {"joint": tokenizer})
    assert run.path.exists() == exists
    assert not exists or list(run.path.iterdir()) == []


def test_a_tokenizer_that_was_exchanged_is_refused(run, tokenizer):
    run.start({}, {"joint": tokenizer})
    Tokenizer.train(["one two three", "two three fivefive"], tokenizer.vocab_size).save(run.tokenizer("joint"))
    with pytest.raises(CheckpointError, match="is not the tokenizer that this run began with"):
        run.load_tokenizer("joint")


def test_a_configuration_that_is_not_there(run):
    with pytest.raises(CheckpointError, match=r"holds no run \(no config.json\)"):
        run.read_config()


@pytest.mark.parametrize("key", ["recipe", "model", "data", "counts", "tokenizers"])
def test_a_configuration_of_the_wrong_kind_is_refused(run, key):
    run.path.mkdir()
    run.config.write_text(json.dumps({key: [1, 2]}))
    with pytest.raises(CheckpointError, match=f"is damaged: '{key}' is not a table"):
        run.read_config()


def test_the_digest_is_that_of_sha256sum(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    assert sha256(tmp_path / "file") == hashlib.sha256(b"content").hexdigest()
    with pytest.raises(CheckpointError, match="cannot read"):
        sha256(tmp_path / "nowhere")


# --- States -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", [Adam(), AdamW(), Adafactor(), SGD(), SGD(momentum=0.0)], ids=str)
def test_a_state_comes_back_to_the_bit(run, dtype, optimizer):
    model, state = trained(make_model(dtype=dtype), optimizer)
    run.save_state(model, state, {"step": 7, "epoch": 1})
    fresh = make_model(dtype=dtype)
    loaded, loaded_state, progress = run.load_state(fresh, optimizer.init(fresh))
    assert progress == {"step": 7, "epoch": 1}
    assert type(loaded_state) is type(state)
    assert loaded_state.step == 7
    for one, other in ((loaded, model), *zip(loaded_state[1:], state[1:], strict=True)):
        assert (one is None) == (other is None)
        for a, b in zip(flatten(one)[0], flatten(other)[0], strict=True):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()


def test_a_state_of_another_optimizer_is_refused(run):
    model, state = trained(make_model(), SGD())
    run.save_state(model, state, {"step": 7})
    with pytest.raises(CheckpointError, match="is not the training state of this run"):
        run.load_state(model, Adam().init(model))


def test_the_best_model_can_be_brought_back(run):
    """An average may stand in for it for a while."""
    best, average, other = (map_arrays(lambda leaf, n=n: np.full_like(leaf, n), make_model()) for n in (1.0, 2.0, 3.0))
    assert not run.restore_best()
    best.save(run.model)
    run.replace_best(average)
    run.replace_best(other)  # as when a run was killed in between
    assert set(first_numbers(run.model)) == {3.0}
    assert run.restore_best()
    assert set(first_numbers(run.model)) == {1.0}
    assert not run.restore_best()


def first_numbers(path):
    return [float(array.flat[0]) for array in load_arrays(path)[0].values()]


def test_a_state_of_another_model_is_refused(run):
    model, state = trained(make_model())
    run.save_state(model, state, {"step": 7})
    other = make_model(d_model=16)
    with pytest.raises(CheckpointError, match="is not the training state of this run"):
        run.load_state(other, Adam().init(other))


def test_other_files_are_no_states(run):
    model, state = trained(make_model())
    run.path.mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        run.load_state(model, state)
    run.last.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        run.load_state(model, state)
    model.save(run.last)
    with pytest.raises(CheckpointError, match="is not the training state"):
        run.load_state(model, state)
    save_arrays(run.last, {}, {"format": "xformer-training-state", "progress": "{"})
    with pytest.raises(CheckpointError, match="is not the training state"):
        run.load_state(model, state)


def test_a_full_disk_leaves_the_old_state(run, monkeypatch):
    model, state = trained(make_model())
    run.save_state(model, state, {"step": 7})
    before = run.last.read_bytes()

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("xformer.io.os.fsync", fsync)
    with pytest.raises(CheckpointError, match="No space left"):
        run.save_state(*trained(model), {"step": 8})
    assert run.last.read_bytes() == before


# --- The log ----------------------------------------------------------------------------------------------------------


def test_the_log_can_be_wound_back(run):
    run.path.mkdir()
    assert run.read_log() == []
    for step in (1, 10, 20, 30):
        run.append_log({"event": "update", "step": step})
    run.rewind_log(20)
    assert [event["step"] for event in run.read_log()] == [1, 10, 20]
    run.append_log({"event": "update", "step": 21})
    assert [event["step"] for event in run.read_log()] == [1, 10, 20, 21]


def test_a_line_that_was_cut_off_is_left_out(run):
    run.path.mkdir()
    run.log.write_text(json.dumps({"step": 1}) + "\n[1, 2]\n" + '{"step": 2')
    assert run.read_log() == [{"step": 1}]
    run.rewind_log(5)
    assert run.log.read_text() == '{"step": 1}\n'


def test_a_log_that_cannot_be_written(run):
    run.path.mkdir()
    run.log.mkdir()
    with pytest.raises(CheckpointError, match="cannot write"):
        run.append_log({})
