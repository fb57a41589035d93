import hashlib
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.reference import raises_line, small_model
from xformer.errors import CheckpointError, ConfigError
from xformer.families.run_directory import FORMAT, RunDirectory
from xformer.io import load_arrays
from xformer.tokenizers import Tokenizer
from xformer.tree import map_arrays


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["one two three", "two three four"], 40)


# --- Starting ---------------------------------------------------------------------------------------------------------


def test_a_start_writes_tokenizers_and_configuration(run, tokenizer):
    run.start({"task": "translation"}, {"joint": tokenizer})
    digest = hashlib.sha256((run.path / "tokenizer.json").read_bytes()).hexdigest()
    assert run.read_config() == {"format": FORMAT, "task": "translation", "tokenizers": {"tokenizer.json": digest}}
    assert run.load_tokenizer("joint").encode("one") == tokenizer.encode("one")
    with pytest.raises(ConfigError, match="holds a run; continue it with: xformer resume"):
        run.start({}, {"joint": tokenizer})


def test_a_run_has_no_model_for_tasks_that_xformer_does_not_train(run, tokenizer):
    run.start({"task": "translation"}, {"joint": tokenizer})
    images = xf.ImageClassifier, xf.ZeroShotImageClassifier
    for pipeline in (xf.Embedder, xf.Classifier, xf.Reranker, xf.Transcriber, *images):
        with raises_line(ConfigError, f"holds a model for translation; expected one for {pipeline.task}; use: xformer"):
            pipeline.from_pretrained(run.path)


def test_another_tokenizer_is_refused(run, tokenizer):
    run.start({}, {"joint": tokenizer})
    Tokenizer.train(["one two three", "two three fivefive"], tokenizer.vocab_size).save(run.tokenizer("joint"))
    with pytest.raises(CheckpointError, match="is not the tokenizer that this run started with"):
        run.load_tokenizer("joint")


def test_a_configuration_of_another_program_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"task": "translation"}))
    with pytest.raises(
        CheckpointError, match=r"config\.json has neither model_type .* nor format 2 .*; expected one of them$"
    ):
        RunDirectory(tmp_path).read_config()


@pytest.mark.parametrize("name", ["translation", "language_model"])
def test_a_run_of_0_1_can_be_converted(name, tmp_path):
    """The runs, and the outputs, are those of xformer 0.1.0."""
    old, new = Path(__file__).parent / "runs_0_1" / name, tmp_path / "new"
    with raises_line(CheckpointError, r"is a run of xformer 0\.1\.0, .* as docs/how-to/upgrade\.md says"):
        RunDirectory(old).read_config()
    with raises_line(CheckpointError, r"is a model of xformer 0\.1; convert it as docs/how-to/upgrade\.md says"):
        xf.load(old / "model.safetensors")
    script = Path(__file__).parents[2] / "docs" / "examples" / "upgrade" / "convert_run.py"
    names = runpy.run_path(str(script))
    names["convert_run"](old, new)
    if name == "translation":  # it was trained with long_lines = "cut" and max_length = 5
        outputs = xf.Translator.from_pretrained(new).outputs(["five six three"], num_beams=3, num_return_sequences=2)[0]
        assert [each.text for each in outputs] == ["drei drei drei", "sieben drei drei"]
        np.testing.assert_allclose([each.score for each in outputs], [-4.788747, -4.806201], rtol=1e-5)
        long = "one two three four five six seven one two"
        assert xf.Translator.from_pretrained(new)([long]) == ["vier eins drei vier"]
    else:
        outputs = xf.TextGenerator.from_pretrained(new)(["the c"], top_k=1, max_new_tokens=20, context="slide")
        assert outputs == ["at on  t t the t t a"]


def test_a_checkpoint_is_not_a_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="is a checkpoint in the Hugging Face format; expected the directory of"):
        RunDirectory(tmp_path).read_config()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.gguf is a GGUF file; expected the directory of a run"):
        RunDirectory(tmp_path / "model.gguf").read_config()


# --- The best model ---------------------------------------------------------------------------------------------------


def test_the_best_model_can_be_restored(run):
    """An average may replace it."""
    model = small_model(dtype="float32")
    best, average, other = (map_arrays(lambda leaf, n=n: np.full_like(leaf, n), model) for n in (1.0, 2.0, 3.0))
    assert not run.restore_best()
    best.save(run.model)
    for model in (average, other):  # twice, as when a run was killed in between
        run.back_up_best()
        model.save(run.model)
    assert set(first_numbers(run.model)) == {3.0}
    assert run.restore_best()
    assert set(first_numbers(run.model)) == {1.0}
    assert not run.restore_best()


def first_numbers(path):
    return [float(array.flat[0]) for array in load_arrays(path)[0].values()]
