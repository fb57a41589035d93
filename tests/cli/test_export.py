"""`xformer export`, and `xformer inspect` of the checkpoint that it writes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.checkpoints import checkpoint
from xformer.export import export_gguf
from xformer.families import gguf_file
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
    assert "expected one of huggingface, peft, gguf, gguf-lora, onnx, ctranslate2" in refused(
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


# --- GGUF -------------------------------------------------------------------------------------------------------------


def make_llama(directory):
    """Write a tiny random Llama of transformers with a byte-level BPE tokenizer and a chat template."""
    tokenizers, torch = pytest.importorskip("tokenizers"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    steps = tokenizers.pre_tokenizers
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer, inner.decoder = steps.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=sorted(steps.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(["a man sleeps on a bench", "the dog runs, isn't it?"] * 3, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template="{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}",
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def answers(path, prompt="the man's dog 12 é"):
    """Return the greedy answers to a prompt and a chat."""
    generator = xf.TextGenerator.from_pretrained(path)
    return generator([prompt, [{"role": "user", "content": "a dog"}]], max_new_tokens=8, do_sample=False)


def test_a_checkpoint_becomes_a_gguf_file_that_answers_the_same(xformer, refused, tmp_path):
    source = make_llama(tmp_path / "llama")
    result = xformer("export", source, tmp_path / "model.gguf", "--format", "gguf")
    assert f"the model is in {tmp_path / 'model.gguf'}, tensors: 16 in BF16; 5 in F32" in result.out.replace("\n", " ")
    assert answers(tmp_path / "model.gguf") == answers(source)
    arguments = ("export", tmp_path / "model.gguf", tmp_path / "small.gguf", "--format", "gguf", "--quantization")
    words = xformer(*arguments, "Q4_K").out.split()
    assert " ".join(words).endswith("16 in Q5_0, as their rows do not fit Q4_K; 5 in F32")
    assert (tmp_path / "small.gguf").stat().st_size < (tmp_path / "model.gguf").stat().st_size
    assert "quantization is 'Q9'; expected one of F32, F16" in refused(*arguments, "Q9", untouched=tmp_path)
    for arguments, message in [
        ([tmp_path / "model.gguf", tmp_path / "model.gguf", "--format", "gguf"], "the output .* would replace"),
        ([source, tmp_path / "out", "--format", "gguf"], "expected the path of a file that ends in .gguf"),
        ([source, tmp_path / "out.gguf"], "expected the path of a directory, or the format gguf"),
        ([source, tmp_path / "out.gguf", "--format", "gguf-lora"], "expected the directory of a run"),
        ([source, tmp_path / "out.gguf", "--format", "gguf", "--runtime", "."], "the format gguf expects none"),
    ]:
        assert re.search(message, " ".join(refused("export", *arguments, untouched=tmp_path).split()))


def test_what_is_no_language_model_with_such_a_tokenizer_is_refused(refused, trained, tmp_path):
    arguments = (tmp_path / "out.gguf", "--format", "gguf")
    assert "GGUF files expect a LanguageModel" in refused("export", trained, *arguments, untouched=tmp_path)
    words = checkpoint(tmp_path, "llama", tokenizer_config={"unk_token": "<unk>"})
    assert "GGUF files expect byte-level BPE" in refused("export", words, *arguments, untouched=tmp_path)


def test_a_run_with_adapters_becomes_a_gguf_file_or_adapters(xformer, tmp_path):
    source = make_llama(tmp_path / "llama")
    base = tmp_path / "base.gguf"
    xformer("export", source, base, "--format", "gguf", "--quantization", "Q4_0")
    (tmp_path / "text").write_text("a man sleeps on a bench\nthe dog runs\n" * 9)
    text = ("--text", tmp_path / "text", "--valid-text", tmp_path / "text", "--set", "training.context_length=16")
    steps = ("--max-steps", 2, "--set", "training.validate_every=2", "--set", "training.warmup_steps=1")
    rate = ("--set", "training.learning_rate=0.05")
    assert xformer("train-lm", *text, "--init", base, "--lora", 2, *steps, *rate, "--out", tmp_path / "run").code == 0
    merged = xformer("export", tmp_path / "run", tmp_path / "merged.gguf", "--format", "gguf")
    exact = xformer("export", tmp_path / "run", tmp_path / "exact.gguf", "--format", "gguf", "--quantization", "F32")
    assert ["round away" in done.err + done.out for done in (merged, exact)] == [True, False]
    assert answers(tmp_path / "exact.gguf") == answers(tmp_path / "run")
    before, after = (gguf_file.read_header(path)[1] for path in (base, tmp_path / "merged.gguf"))
    assert {key: entry.code for key, entry in before.items()} == {key: entry.code for key, entry in after.items()}
    changed = {key for key, entry in before.items() if not np.array_equal(entry.read(), after[key].read())}
    assert "blk.1.ffn_down.weight" in changed
    assert "token_embd.weight" not in changed
    xformer("export", tmp_path / "run", tmp_path / "lora.gguf", "--format", "gguf-lora")
    adapters = gguf_file.read_header(tmp_path / "lora.gguf")[1]
    assert {key.removesuffix(".lora_a") for key in adapters if key.endswith("a")} == changed


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")  # peft uses names that transformers has deprecated
def test_adapters_of_peft_become_a_gguf_file(xformer, refused, tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    from transformers import LlamaForCausalLM

    source = make_llama(tmp_path / "llama")
    settings = {"r": 4, "lora_alpha": 6, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3}}
    config = peft.LoraConfig(**settings, target_modules="all-linear", init_lora_weights=False, use_rslora=True)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(LlamaForCausalLM.from_pretrained(source, dtype=torch.float32), config)
    adapted.save_pretrained(tmp_path / "adapters")
    xformer("export", tmp_path / "adapters", tmp_path / "lora.gguf", "--format", "gguf")
    named = ("--format", "gguf-lora", "--base", source)
    xformer("export", tmp_path / "adapters", tmp_path / "same.gguf", *named)
    assert (tmp_path / "lora.gguf").read_bytes() == (tmp_path / "same.gguf").read_bytes()
    metadata, adapters, _ = gguf_file.read_header(tmp_path / "lora.gguf")
    model = xf.merge_lora(xf.load_lora(xf.load_pretrained(source, dtype="float32"), tmp_path / "adapters"))
    for name, each in {"base": xf.load_pretrained(source, dtype="float32"), "merged": model}.items():
        export_gguf(each, tmp_path / f"{name}.gguf")
    before, after = (gguf_file.read_header(tmp_path / f"{name}.gguf")[1] for name in ("base", "merged"))
    names = {key for key in before if not np.array_equal(before[key].read(), after[key].read())}
    assert {key.removesuffix(".lora_a") for key in adapters if key.endswith("a")} == names
    assert len(names) == 14
    for name in names:  # as llama.cpp adds them
        a, b = (adapters[f"{name}.lora_{kind}"].read() for kind in "ab")
        expected = after[name].read() - before[name].read()
        np.testing.assert_allclose(metadata["adapter.lora.alpha"] / len(a) * b @ a, expected, rtol=0, atol=1e-5)
    xf.save_lora(xf.lora(xf.load_pretrained(source), 2), tmp_path / "own")
    arguments = (tmp_path / "own", tmp_path / "own.gguf", "--format", "gguf")
    for wrong, message in [
        (arguments, "the base model of"),
        ((*arguments, "--quantization", "F16"), "the format gguf-lora expects none"),
        ((source, *arguments[1:], "--base", source), "has no adapter_config.json"),
    ]:
        assert message in refused("export", *wrong, untouched=tmp_path)
    xformer("export", *arguments, "--base", source)
    assert len(gguf_file.read_header(tmp_path / "own.gguf")[1]) == 28
