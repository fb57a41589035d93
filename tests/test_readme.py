"""The code blocks of the README, and the Python blocks of the pages in docs/, run as written.

Training is shortened, nothing is installed, and tiny models take the places of public checkpoints.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import shutil
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.checkpoints import checkpoint
from tests.families.test_gguf import convert
from tests.pipelines.test_transcription import NOISE, make_whisper, write_wav
from tests.pipelines.test_zero_shot_images import write_checkpoint
from xformer import threads
from xformer.cli.main import exit_code
from xformer.data.demo_tasks import numbers_task

ROOT = Path(__file__).parents[1]
SOURCES = ("README.md", "docs/how-to/install.md", "docs/how-to/command-line.md", "docs/how-to/gpu.md")
TEXTS = [(ROOT / name).read_text(encoding="utf-8") for name in SOURCES]
BLOCKS = [block for text in TEXTS for block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
PAGES = [ROOT / "docs" / name for name in ("index.md", "sharp-bits.md")]
PAGES += sorted(page for page in (ROOT / "docs" / "how-to").glob("*.md") if page.name != "command-line.md")
PYTHON = re.compile(r"^( *)```python(?: title=\"(.*?)\")?\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)
# Blocks that need a server, an export, a tokenizer with all characters, a GPU, or large packages.
NEEDS_MORE = (
    "OpenAI(",
    "import ctranslate2",
    "client.",
    "quantize_dynamic",
    "Grammar(",
    '"text-classification"',
    "import cupy",
    '"cupy"',
    "import dpnp",
    "import ray",
)


def has_gpu() -> bool:
    return importlib.util.find_spec("cupy") is not None and importlib.import_module("cupy").cuda.is_available()


# Replacements that shorten training.
SHORTER = {
    "--max-minutes 90": "--max-steps 3 --recipe small.toml",
    "--out titles": "--out titles --max-steps 3 --recipe small.toml --task summarization",
}
SHORTER["xformer demo"] = "xformer demo --seconds 1"
SHORTER["--max-minutes 5"] = SHORTER["--max-minutes 90"]
SHORTER['"docs/recipes/multi30k-de-en.toml"'], SHORTER["max_minutes=90"] = '"small.toml"', "max_steps=3"
SHORTER["--backend cupy"] = f"--backend {'cupy' if has_gpu() else 'numpy'}"
SHORTER["--text input.txt"] = "--text input.txt --max-steps 3"
SHORTER["docs/recipes/tinyshakespeare.toml"] = shlex.quote(str(ROOT / "docs" / "recipes" / "tinyshakespeare.toml"))
SHORTER["--batch 8 --length 128 --backend numpy --backend torch --backend jax --backend mlx --backend dpnp"] = "--quick"
SHORTER["epochs=2,"] = "epochs=2, max_length=20,"
SHORTER["d_ff=128)"], SHORTER["max_new_tokens=8"] = "d_ff=128, num_layers=1)", "max_new_tokens=1"
SHORTER["[chat], max_new_tokens=40"] = "[chat], max_new_tokens=1"
SHORTER['connect("mpi")'], SHORTER["WorkerProcesses(4)"] = "None", "WorkerProcesses(1)"
SMALL = """
[model]
d_model = 16
num_heads = 2
d_ff = 32
num_encoder_layers = 1
num_decoder_layers = 1

[tokenizer]
vocab_size = 120
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with the files that the commands of the README use."""
    path = tmp_path_factory.mktemp("readme")
    task = numbers_task(num_train=1200, num_valid=20, num_test=20, largest=9999)
    for name, corpus in (("train", task.train), ("val", task.valid), ("test", task.test)):
        (path / f"{name}.de").write_text("\n".join(corpus.target) + "\n", encoding="utf-8")
        (path / f"{name}.en").write_text("\n".join(corpus.source) + "\n", encoding="utf-8")
    for name, corpus in (("train", task.train), ("dev", task.valid), ("test", task.test)):
        (path / f"{name}.abstract").write_text("\n".join(f"We have {line}." for line in corpus.source) + "\n")
        (path / f"{name}.title").write_text("\n".join(corpus.target) + "\n", encoding="utf-8")
    (path / "input.txt").write_text("ROMEO:\nTo be, or not to be, that is the question:\n" * 300, encoding="utf-8")
    (path / "small.toml").write_text(SMALL, encoding="utf-8")
    make_checkpoints(path)
    return path


def make_checkpoints(path: Path) -> None:
    """Make tiny random models in place of the public checkpoints."""
    template = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}assistant :"
    bert, llama = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "<unk>": 3}, {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    marian, t5 = {"</s>": 0, "<unk>": 1, "<pad>": 60}, {"<pad>": 0, "</s>": 1, "<unk>": 2}
    for name, model, affixes, special, files in (
        ("all-MiniLM-L6-v2", "bert", "[CLS] $A [SEP]", bert, {}),
        ("distilbert-sst2", "distilbert_classifier", "[CLS] $A [SEP]", bert, {}),
        ("SmolLM2-135M-Instruct", "llama", "<s> $A", llama, {"tokenizer_config": {"chat_template": template}}),
        ("opus-mt-de-en", "marian", "$A </s>", marian, {"tokenizer_config": {"unk_token": "<unk>"}}),
        ("t5-small", "t5", "$A </s>", t5, {"tokenizer_config": {"unk_token": "<unk>"}}),
    ):
        checkpoint(path, model, template=affixes, special=special, **files).rename(path / name)
    make_gguf(path / "SmolLM2-135M-Instruct.gguf", template)
    shutil.copytree(path / "SmolLM2-135M-Instruct", path / "SmolLM2-1.7B-Instruct")
    make_whisper(path / "whisper-tiny")
    write_checkpoint("clip", path / "clip-vit-base-patch32")
    for name in ("1.jpg", "2.jpg"):
        Image.new("RGB", (20, 30), "red").save(path / name)
    write_wav(path / "speech.wav", NOISE[:1000])


def make_gguf(path: Path, template: str) -> None:
    def add_tokenizer(writer: Any) -> None:
        tokens = ["<pad>", "<s>", "</s>", "<unk>", *map(chr, range(97, 123))]
        tokens += [f"word{i}" for i in range(61 - len(tokens))]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_unk_token_id(3)
        writer.add_chat_template(template)
        del writer.kv_data[0]["llama.context_length"]
        writer.add_context_length(128)  # letters are tokens, so a question is longer than the context of 64

    convert("llama", path, change=add_tokenizer)


def run_line(line: str) -> None:
    for original, replacement in SHORTER.items():
        line = line.replace(original, replacement)
    for words in map(shlex.split, line.split(" && ")):
        if words[0] == "xformer":
            assert exit_code(words[1:]) == 0, line
        else:
            check_setup(words)


def check_setup(words: list[str]) -> None:
    """Check that the extras and nox sessions of a command exist; it does not run inside a nox session."""
    if words[1].startswith("bench/"):
        assert (ROOT / words[1]).exists(), words
        return
    assert words[:2] == ["python3", "-m"], words
    if words[2] == "pip":
        assert words[3] == "install"
        extras = re.fullmatch(r"(?:\.|array-transformers)\[(.*)\](?: @ git\+URL)?", words[4])
        assert words[4:] in (["."], ["nox"]) or (extras and set(extras[1].split(",")) <= set(EXTRAS))
    else:
        assert words[2:4] == ["nox", "-s"]
        assert f"def {words[4]}(session" in (ROOT / "noxfile.py").read_text(encoding="utf-8")


def test_every_block_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(threads, "_requested", None)
    names: dict[str, object] = {}
    languages = []
    for language, text in BLOCKS:
        languages.append(language)
        if language == "python":
            for original, replacement in SHORTER.items():
                text = text.replace(original, replacement)
            exec(compile(text, "README.md", "exec"), names)
        elif language != "text":
            assert language == "sh", f"a page has a code block in {language!r}; expected sh, text or python"
            for line in filter(None, map(str.strip, text.split("\n"))):
                run_line(line)
    assert {"sh", "text", "python"} == set(languages)


def test_files_named_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:docs|xformer|bench|tests)/[^`\s]*|[A-Z]+\.(?:md|cff))`", text)
    assert names
    for name in names:
        assert (ROOT / name).exists(), f"the README names {name}, which does not exist"


@pytest.mark.parametrize("library", ["numpy", "torch", pytest.param("jax.numpy", marks=pytest.mark.slow)])
def test_losses_of_the_readme_are_those_of_each_library(library: str) -> None:
    xp = pytest.importorskip(library)
    names: dict[str, Any] = {"library": xp}
    (text,) = [text for language, text in BLOCKS if language == "python" and "xf.fit(" in text]
    assert "xp=np" in text
    exec(compile(text.replace("xp=np", "xp=library"), "README.md", "exec"), names)
    (row,) = re.findall(rf"^\| `xp={library}` \| (.*) \|$", TEXTS[0], flags=re.MULTILINE)
    received = [step.loss for step in names["history"][::10]]
    np.testing.assert_allclose(received, [*map(float, row.split(" | "))], atol=2e-4)
    fit = (ROOT / "docs" / "examples" / "fit_arrays.py").read_text(encoding="utf-8")
    fit = fit.replace("xp = np  #", "xp = library  #").replace("steps=300,\n", "steps=2,\n")
    exec(compile(fit[: fit.index("assert")], "fit_arrays.py", "exec"), {**names, "__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_pages_run(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(threads, "_requested", None)
    for name in ("run", "xformer-demo"):
        shutil.copytree("opus-mt-de-en", name, dirs_exist_ok=True)
    shutil.copy("test.de", "news.de")
    names: dict[str, object] = {"__name__": "__main__"}
    for _, file, text in PYTHON.findall(page.read_text(encoding="utf-8")):
        block = textwrap.dedent(text)
        if file.startswith("docs/examples/") or any(word in block for word in NEEDS_MORE):
            continue  # test_docs.py runs the examples
        for library in {"torch", "jax"} & {*re.findall(r"^import (\w+)", block, flags=re.MULTILINE)}:
            pytest.importorskip(library)
        for original, replacement in SHORTER.items():
            block = block.replace(original, replacement)
        if file:
            Path(file).write_text(block, encoding="utf-8")
        exec(compile(block, page.name, "exec"), names)
