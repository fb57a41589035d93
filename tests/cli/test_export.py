"""`xformer export`, and `xformer inspect` of the checkpoint that it writes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xformer.pipelines import Translator
from xformer.tokenizers import load_tokenizer


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """Return the checkpoint of a trained run."""
    from xformer.cli.main import exit_code

    out = tmp_path_factory.mktemp("exported") / "checkpoint"
    assert exit_code(["export", str(trained), str(out)]) == 0
    return out


def test_a_checkpoint_has_the_scores_of_its_run(trained, exported, text):
    """The base of the length penalty is that of the run."""
    lines, options = (text / "valid.en").read_text().splitlines()[:8], {"num_beams": 3, "length_penalty": 2.0}
    runs, checkpoints = (Translator.from_pretrained(each).outputs(lines, **options) for each in (trained, exported))
    assert [each.text for (each,) in checkpoints] == [each.text for (each,) in runs]
    np.testing.assert_allclose([each.score for (each,) in checkpoints], [each.score for (each,) in runs], rtol=1e-4)


def test_sources_end_with_eos(exported, trained):
    assert json.loads((exported / "config.json").read_text())["model_type"] == "pegasus"
    tokenizer = load_tokenizer(exported)
    assert tokenizer.tokens(tokenizer.encode("a"))[-1] == "</s>"
    assert tokenizer.special_tokens["bos_token"] == "<s>"


def test_nothing_is_overwritten(refused, trained, exported):
    assert "is not an empty directory" in refused("export", trained, exported, untouched=exported)
    assert "expected one of huggingface, peft, onnx, ctranslate2" in refused(
        "export", trained, exported.parent / "new", "--format", "pickle", untouched=exported
    )


def test_a_checkpoint_is_inspected_without_its_weights(xformer, exported):
    result = xformer("inspect", exported, "--json")
    report = json.loads(result.out)
    assert (report["model_type"], report["model"]) == ("pegasus", "Transformer")
    assert list(report["dtypes"]) == ["float32"]
    assert report["bytes"] == (exported / "model.safetensors").stat().st_size
    assert report["generation"] == {"length_penalty_base": "wu", "suppress_tokens": [0, 1], "eos_token_id": [2]}
    assert report["config"]["norm_position"] == "pre"
    assert sum(report["parameters"].values()) > 1000
    assert report["tokenizers"][""]["special_tokens"]["eos_token"] == "</s>"
    text = xformer("inspect", exported).out
    for words in ("Transformer; pegasus, PegasusForConditionalGeneration", "BPE, 100 tokens", "sinusoidal_layout"):
        assert words in text
    assert "rope_theta" not in text  # the default


def test_onnx_files_translate_without_xformer(xformer, trained, text, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("spox")
    result = xformer("export", trained, tmp_path / "onnx", "--format", "onnx")
    assert "onnxruntime computes the same" in " ".join(result.out.split())
    options = ("--input", text / "valid.en", "--output", tmp_path / "expected", "--num-beams", 1)
    assert xformer("translate", "--model", trained, *options).code == 0
    example = Path(__file__).parents[2] / "docs" / "examples" / "onnx" / "translate.py"
    with (text / "valid.en").open() as source:
        command = [sys.executable, "-W", "error", example, tmp_path / "onnx"]
        output = subprocess.run(command, stdin=source, capture_output=True, text=True, check=True).stdout
    actual, expected = output.splitlines(), (tmp_path / "expected").read_text().splitlines()
    assert len(actual) == len(expected) == 10
    assert sum(map(str.__ne__, actual, expected)) <= 1  # rounding may decide between two tokens


def test_ctranslate2_translates_without_xformer(xformer, refused, trained, text, tmp_path):
    pytest.importorskip("ctranslate2")
    assert "quantization is 'int8'; the format huggingface expects none" in refused(
        "export", trained, tmp_path / "x", "--quantization", "int8", untouched=tmp_path
    )
    result = xformer("export", trained, tmp_path / "ct2", "--format", "ctranslate2")
    assert "differ from those of the model by" in " ".join(result.out.split())
    options = (
        "--input", text / "valid.en", "--output", tmp_path / "expected", "--num-beams", 1, "--max-new-tokens", 200,
    )  # fmt: skip
    assert xformer("translate", "--model", trained, *options).code == 0
    example = Path(__file__).parents[2] / "docs" / "examples" / "ctranslate2" / "translate.py"
    with (text / "valid.en").open() as source:
        command = [sys.executable, "-W", "error", example, tmp_path / "ct2"]
        output = subprocess.run(command, stdin=source, capture_output=True, text=True, check=True).stdout
    actual, expected = output.splitlines(), (tmp_path / "expected").read_text().splitlines()
    assert len(actual) == len(expected) == 10
    assert sum(map(str.__ne__, actual, expected)) <= 1
