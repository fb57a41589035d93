"""`xformer export`, and `xformer inspect` of the checkpoint that it writes."""

import json

import pytest

from xformer.text import load_tokenizer


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """Return the checkpoint of a trained run."""
    from xformer.cli.main import exit_code

    out = tmp_path_factory.mktemp("exported") / "checkpoint"
    assert exit_code(["export", str(trained), str(out)]) == 0
    return out


def test_a_checkpoint_translates_as_its_run_does(xformer, trained, exported, text, tmp_path):
    for name, model in (("run", trained), ("checkpoint", exported)):
        options = ("--input", text / "valid.en", "--output", tmp_path / name, "--num-beams", 2)
        assert xformer("translate", "--model", model, *options, "--length-penalty", 0).code == 0
    assert (tmp_path / "checkpoint").read_text() == (tmp_path / "run").read_text()


def test_sources_end_with_eos(exported, trained):
    assert json.loads((exported / "config.json").read_text())["model_type"] == "pegasus"
    tokenizer = load_tokenizer(exported)
    assert tokenizer.tokens(tokenizer.encode("a"))[-1] == "</s>"
    assert tokenizer.special_tokens["bos_token"] == "<s>"


def test_nothing_is_overwritten(refused, trained, exported):
    assert "is not an empty directory" in refused("export", trained, exported, untouched=exported)
    assert "expected one of huggingface, onnx" in refused(
        "export", trained, exported.parent / "new", "--format", "pickle", untouched=exported
    )


def test_a_checkpoint_is_inspected_without_its_weights(xformer, exported):
    result = xformer("inspect", exported, "--json")
    report = json.loads(result.out)
    assert (report["model_type"], report["model"]) == ("pegasus", "Transformer")
    assert list(report["dtypes"]) == ["float32"]
    assert report["bytes"] == (exported / "model.safetensors").stat().st_size
    assert report["generation"] == {"suppress_tokens": [0, 1], "eos_token_id": [2]}
    assert report["config"]["norm_position"] == "pre"
    assert sum(report["parameters"].values()) > 1000
    assert report["tokenizers"][""]["special_tokens"]["eos_token"] == "</s>"
    text = xformer("inspect", exported).out
    for words in ("Transformer; pegasus, PegasusForConditionalGeneration", "BPE, 100 tokens", "sinusoidal_layout"):
        assert words in text
    assert "rope_theta" not in text  # the default
