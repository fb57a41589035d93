"""Runs that start from a public checkpoint or from another run."""

import json
import re

import numpy as np
import pytest

import xformer as xf
from tests.checkpoints import checkpoint
from tests.pipelines.chat_model import CHATS, write_model
from xformer import native
from xformer.backends import resolve
from xformer.cli.main import exit_code
from xformer.families.run_directory import RunDirectory
from xformer.io import load_arrays
from xformer.ops.blocks import BlockWeight
from xformer.runs.recipe import make_recipe
from xformer.runs.tasks import load_initial_model
from xformer.tree import replace

TOKENS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
LINES = ["a man sleeps on a bench", "the dog runs", "the man runs", "a dog sleeps on the bench"]
SETTINGS = [
    "--set", "training.validate_every=2", "--set", "training.learning_rate=0.01", "--set", "training.warmup_steps=1",
]  # fmt: skip


def make(tmp_path, name):
    if name == "llama":
        return checkpoint(tmp_path, name, tokenizer_config={**TOKENS, "bos_token": "<s>"})
    if name == "marian":
        generation = {"bad_words_ids": [[60]], "max_length": 12}
        return checkpoint(tmp_path, name, tokenizer_config=TOKENS, generation_config=generation)
    config = {"tokenizer_class": "NllbTokenizer", "src_lang": "eng_Latn", **TOKENS}
    return checkpoint(tmp_path, name, tokenizer_config=config)


def arguments(tmp_path, name):
    text = tmp_path / "text"
    text.write_text("\n".join(LINES) + "\n")
    if name == "llama":
        return ["train-lm", "--text", text, "--valid-text", text, "--set", "training.context_length=6"]
    languages = ["--source-language", "deu_Latn", "--target-language", "eng_Latn"] if name == "m2m_100" else []
    names = ("--source", "--target", "--valid-source", "--valid-target")
    return ["train", *(each for option in names for each in (option, text)), *languages]


def run(*args):
    return exit_code([str(arg) for arg in args])


@pytest.mark.parametrize("name", ["llama", "marian", "m2m_100"])
def test_a_checkpoint_is_tuned_resumed_used_and_exported(tmp_path, name, capsys):
    original = make(tmp_path, name)
    command = [*arguments(tmp_path, name), "--init", original, *SETTINGS]
    assert run(*command, "--out", tmp_path / "full", "--max-steps", 4) == 0
    assert run(*command, "--out", tmp_path / "parts", "--max-steps", 2) == 0
    assert run("resume", tmp_path / "parts", "--max-steps", 4) == 0
    full, parts = (load_arrays(tmp_path / each / "last.safetensors")[0] for each in ("full", "parts"))
    assert full.keys() == parts.keys()
    assert all(full[key].tobytes() == parts[key].tobytes() for key in full)
    assert run("export", tmp_path / "full", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == name
    pipeline = xf.TextGenerator if name == "llama" else xf.Translator
    options = {"source_language": "deu_Latn", "target_language": "eng_Latn"} if name == "m2m_100" else {}
    tuned = pipeline.from_pretrained(tmp_path / "full")
    exported = pipeline.from_pretrained(tmp_path / "out", **options)
    for one, other in zip(tuned.model.named_parameters(), exported.model.named_parameters(), strict=True):
        np.testing.assert_array_equal(one[1], other[1], err_msg=one[0])
    settings = {"max_new_tokens": 4, "do_sample": False}
    assert tuned.outputs(LINES[:2], **settings)[0][0].tokens == exported.outputs(LINES[:2], **settings)[0][0].tokens
    assert run("inspect", tmp_path / "full") == 0
    capsys.readouterr()
    if name == "marian":  # a tuned run keeps the files of its checkpoint
        again = [*arguments(tmp_path, name), "--init", tmp_path / "full", *SETTINGS, "--max-steps", 2]
        assert run(*again, "--out", tmp_path / "again") == 0
        assert (tmp_path / "again" / "pretrained" / "tokenizer.json").exists()


def test_a_run_starts_from_a_run(tmp_path):
    small = ["--set", "model.d_model=8", "--set", "model.num_heads=2", "--vocab-size", 40]
    base = [*arguments(tmp_path, "marian"), *SETTINGS, "--max-steps", 2]
    assert run(*base, *small, "--out", tmp_path / "a") == 0
    assert run(*base, "--init", tmp_path / "a", "--set", "model.dropout=0.2", "--out", tmp_path / "b") == 0
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (config["model"]["d_model"], config["model"]["dropout"]) == (8, 0.2)
    assert run("resume", tmp_path / "b", "--max-steps", 3) == 0


def test_settings_of_the_model_and_changed_weights_are_refused(tmp_path, capsys):
    original = make(tmp_path, "llama")
    command = [
        *arguments(tmp_path, "llama"), "--init", original, *SETTINGS, "--max-steps", 2, "--out", tmp_path / "run",
    ]  # fmt: skip
    assert run(*command, "--set", "model.d_model=8") == 2
    assert "d_model of [model] in the options cannot be changed" in capsys.readouterr().err
    assert run(*command) == 0
    xf.save_pretrained(xf.LanguageModel(xf.load_pretrained(original).config, seed=1), original)
    assert run("resume", tmp_path / "run", "--max-steps", 4) == 2
    assert "has changed since the run started" in capsys.readouterr().err


def test_a_gguf_file_is_tuned(tmp_path, capsys):
    pytest.importorskip("gguf")
    from tests.test_readme import make_gguf

    make_gguf(tmp_path / "model.gguf", "{{ messages }}")
    command = [*arguments(tmp_path, "llama"), "--init", tmp_path / "model.gguf", *SETTINGS, "--lora", 2]
    assert run(*command, "--out", tmp_path / "run", "--max-steps", 2) == 0
    assert run("resume", tmp_path / "run", "--max-steps", 3) == 0
    assert run("export", tmp_path / "run", tmp_path / "exported") == 0
    before = xf.load_pretrained(tmp_path / "model.gguf")
    tuned, exported = (xf.load_pretrained(tmp_path / name) for name in ("run", "exported"))
    ids = np.asarray([[3, 4, 5]])
    np.testing.assert_allclose(exported(ids), tuned(ids), rtol=0, atol=1e-5)
    assert not np.allclose(before(ids), tuned(ids))
    xf.save_pretrained(tuned, tmp_path / "saved")
    assert run("export", tmp_path / "model.gguf", tmp_path / "converted") == 0
    np.testing.assert_allclose(xf.load_pretrained(tmp_path / "converted")(ids), before(ids), rtol=0, atol=1e-5)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("exported", "saved", "converted")]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0]["tie_word_embeddings"] == before.config.tie_output
    texts = [
        xf.TextGenerator.from_pretrained(tmp_path / name)(["a man"], max_new_tokens=3) for name in ("run", "exported")
    ]
    assert texts[0] == texts[1]


@pytest.mark.skipif(not native.is_available(), reason="blocks need the native library")
def test_adapters_of_a_gguf_file_leave_its_blocks(tmp_path):
    """The base stays in blocks, and the run has the model of the values of the blocks with the adapters."""
    gguf = pytest.importorskip("gguf")
    from tests.families.test_gguf import convert_wider

    path = convert_wider("llama", tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_1)
    task = {"init": {"path": str(path), "lora": 2}, "context_length": 300, "batch_size": 2, "learning_rate": 0.01}
    made = make_recipe(None, {**task, "max_steps": 2}, ["language_modeling"])
    blocks = load_initial_model(made, xf.LanguageModel, resolve("numpy"))
    assert blocks.config.rematerialize  # rows of more than 192 tokens
    weight = blocks.layers[0].feed_forward.up.weight.base
    assert isinstance(weight, BlockWeight)
    floats = xf.lora(xf.load_pretrained(path), 2)
    ids = np.random.default_rng(0).integers(0, 40, (2, 8))

    def loss(model):
        losses = xf.cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        return xf.array_namespace(losses).sum(losses)

    one, other = (xf.grad(loss)(model) for model in (blocks, floats))
    for (name, x), (_, y) in zip(one.named_arrays(), other.named_arrays(), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4, err_msg=name)
    trained = replace(
        blocks,
        {n: x + 0.1 for n, x in blocks.named_arrays() if ".lora_" in n}
        | {n: x for n, x in blocks.named_arrays() if ".lora_" not in n},
    )
    trained._save_merged(tmp_path / "merged.safetensors")
    np.testing.assert_allclose(xf.load(tmp_path / "merged.safetensors")(ids), trained(ids), rtol=0, atol=1e-4)
    np.testing.assert_allclose(xf.merge_lora(trained)(ids), trained(ids), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")  # peft uses names that transformers has deprecated
def test_adapters_of_a_run_are_exported_for_peft(tmp_path, capsys):
    original = make(tmp_path, "llama")
    command = [*arguments(tmp_path, "llama"), "--init", original, *SETTINGS, "--max-steps", 4]
    assert run(*command, "--lora", 2, "--out", tmp_path / "run") == 0
    assert run("export", tmp_path / "run", tmp_path / "adapters", "--format", "peft") == 0
    assert f"as adapters of {original}; load them with peft.PeftModel" in capsys.readouterr().out.replace("\n", " ")
    adapters = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert adapters["base_model_name_or_path"] == str(original)
    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == names
    ids = np.asarray([[3, 4, 5, 9]])
    tuned = xf.load_pretrained(tmp_path / "run", dtype="float64")(ids)
    adapted = xf.load_lora(xf.load_pretrained(original, dtype="float64"), tmp_path / "adapters")(ids)
    np.testing.assert_allclose(adapted, tuned, rtol=0, atol=1e-5)  # the merged weights are in float32
    assert np.abs(tuned - xf.load_pretrained(original)(ids)).max() > 1e-3
    peft, transformers = (pytest.importorskip(name) for name in ("peft", "transformers"))
    torch = pytest.importorskip("torch")
    from tests.families.make_references import float64_throughout

    with float64_throughout(), torch.no_grad():
        base = transformers.AutoModelForCausalLM.from_pretrained(original, attn_implementation="eager").double()
        model = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").double()
        expected = model(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(adapted, expected, rtol=0, atol=1e-10)


def test_runs_without_adapters_of_their_model_are_not_exported_for_peft(tmp_path, capsys):
    original = make(tmp_path, "llama")
    command = [*arguments(tmp_path, "llama"), "--init", original, *SETTINGS, "--max-steps", 2]
    assert run(*command, "--out", tmp_path / "full") == 0
    assert run("export", tmp_path / "full", tmp_path / "out", "--format", "peft") == 2
    assert "has no adapters; expected a run with --lora" in capsys.readouterr().err
    average = ["--set", "training.keep_checkpoints=2", "--set", "training.average=last"]
    assert run(*command, *average, "--lora", 2, "--max-steps", 4, "--out", tmp_path / "lora") == 0
    directory = RunDirectory(tmp_path / "lora")
    directory.back_up_best()  # as before an average that is better
    assert run("export", tmp_path / "lora", tmp_path / "out", "--format", "peft") == 2
    assert "is an average of checkpoints, which has no adapters of its rank" in capsys.readouterr().err
    assert directory.restore_best()
    assert run("export", tmp_path / "lora", tmp_path / "out", "--format", "peft") == 0


def test_chats_on_the_command_line(tmp_path, capsys):
    base = write_model(tmp_path / "base")
    chats = [{"messages": each} for each in CHATS * 2]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    command = ["train-lm", "--chats", tmp_path / "chats.jsonl", "--init", base, *SETTINGS, "--lora", 4]
    assert run(*command, "--context-length", 80, "--max-steps", 6, "--out", tmp_path / "run") == 0
    out = capsys.readouterr().out
    assert "training: 3 conversations, " in out
    assert "of them in answers\n" in out
    assert f"generate --model {tmp_path / 'run'} --chat --prompt TEXT" in out
    assert run("resume", tmp_path / "run", "--max-steps", 8) == 0
    assert run("inspect", tmp_path / "run") == 0
    capsys.readouterr()
    assert run("generate", "--model", tmp_path / "run", "--chat", "--prompt", "four ?", "--max-new-tokens", 4) == 0
    assert run("export", tmp_path / "run", tmp_path / "adapters", "--format", "peft") == 0
    assert run(*command, "--context-length", 10, "--out", tmp_path / "short") == 2
    assert re.search(r"chats\.jsonl line \d has \d+ tokens; expected at most 11", capsys.readouterr().err)
    assert run("train-lm", "--out", tmp_path / "none") == 2
    assert "neither text nor chats is given; expected one" in capsys.readouterr().err
