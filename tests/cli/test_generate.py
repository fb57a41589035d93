"""`xformer generate`: prompts in, texts out."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.cli.test_train_lm import RECIPE, TEXT
from tests.pipelines.chat_model import write_model
from tests.pipelines.sliding_generator import SlidingGenerator
from xformer.cli.main import exit_code
from xformer.generation.sampling import DraftModel
from xformer.pipelines import TextGenerator

RUN = object()
PROMPTS = ["one hundred", "", "seven"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has hardly learned anything; to be read only."""
    folder = tmp_path_factory.mktemp("language_model")
    (folder / "text").write_text(TEXT, encoding="utf-8")
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    options = ["--text", folder / "text", "--recipe", folder / "recipe.toml", "--out", folder / "run"]
    assert exit_code(["train-lm", *map(str, options)]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def generator(run):
    return SlidingGenerator.from_pretrained(run)


def blocks(prompts, texts):
    return f"\n{'-' * 15}\n".join(prompt + text for prompt, text in zip(prompts, texts, strict=True)) + "\n"


def test_prompts_on_the_command_line(xformer, run, generator):
    options = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    done = xformer("generate", "--context", "slide", "--model", run, *options, "--max-new-tokens", 30, "--seed", 4)
    assert done.out == blocks(PROMPTS, generator(PROMPTS, max_new_tokens=30, seed=4))
    for seed, others, is_equal in ((5, [], False), (4, [], True), (4, ["--prompt-lookup-num-tokens", 3], True)):
        options = [*options[:6], "--max-new-tokens", 30, "--seed", seed, *others]
        again = xformer("generate", "--context", "slide", "--model", run, *options)
        assert (again.out == done.out) == is_equal


def test_verbose_reports_the_speed_in_a_line(xformer, run, generator):
    options = ["--model", run, "--max-new-tokens", 9, "--seed", 4, "--context", "slide", "--verbose"]
    done = xformer("generate", *options, *[word for prompt in PROMPTS for word in ("--prompt", prompt)])
    assert done.out == blocks(PROMPTS, generator(PROMPTS, max_new_tokens=9, seed=4))
    assert re.fullmatch(
        r"[\d.]+ tokens/s, [\d.]+ GB/s of weights and cache, \d+% of a copy \([\d.]+ GB/s\)\n", done.err
    )
    numbers = [float(number) for number in re.findall(r"[\d.]+", done.err)]
    assert numbers[0] > 0
    assert numbers[3] > 0


def test_a_draft_model_changes_no_text(xformer, run, generator, tmp_path, monkeypatch):
    calls, draft = [], DraftModel.__call__
    monkeypatch.setattr(
        DraftModel, "__call__", lambda self, tokens: calls.append(self.num_tokens) or draft(self, tokens)
    )
    options = ["--prompt", "one", "--max-new-tokens", 20, "--seed", 4, "--draft-model", run, "--num-draft-tokens", 3]
    done = xformer("generate", "--model", run, *options, "--context", "slide")
    assert done == (0, blocks(["one"], generator(["one"], max_new_tokens=20, seed=4)), "")
    assert set(calls) == {3}
    (tmp_path / "prompts").write_text("one\n", encoding="utf-8")
    corpus = ["--input", tmp_path / "prompts", "--corpus-out", tmp_path / "parts", "--output", tmp_path / "out"]
    assert xformer("generate", "--model", run, "--context", "slide", *options[2:], *corpus).code == 0
    assert (tmp_path / "out").read_text(encoding="utf-8") == done.out


def test_prompts_from_standard_input(xformer, run, generator):
    stdin, options = "\n".join(PROMPTS).encode(), ["--max-new-tokens", 20]
    for form in ({}, {"pipe": True}):
        for source in (["--input", "-"], []):
            done = xformer("generate", "--context", "slide", "--model", run, *source, *options, stdin=stdin, **form)
            assert done == (0, blocks(PROMPTS, generator(PROMPTS, max_new_tokens=20)), "")
    done = xformer("generate", "--model", run, "--prompt", "one", "--max-new-tokens", 5, stdin=stdin)
    assert done.out == blocks(["one"], generator(["one"], max_new_tokens=5))
    assert "--chat needs a prompt; add --prompt" in xformer("generate", "--model", run, "--chat").err


def test_one_prompt_is_streamed_to_a_terminal(xformer, run, generator, monkeypatch):
    texts = []

    def stream(self, *arguments, **options):
        for text in original(self, *arguments, **options):
            texts.append(text)
            yield text

    original = TextGenerator.stream
    monkeypatch.setattr(TextGenerator, "stream", stream)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    options = ("generate", "--context", "slide", "--model", run, "--prompt", "one", "--max-new-tokens", 30)
    done = xformer(*options)
    assert (done.code, done.out) == (0, blocks(["one"], generator(["one"], max_new_tokens=30)))
    assert len(texts) > 10
    assert xformer(*options, "--json").out.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudoterminals")
def test_a_conversation_is_typed_on_a_terminal(tmp_path):
    model = write_model(tmp_path / "model")
    generator, chat = TextGenerator.from_pretrained(model), [{"role": "system", "content": "one"}]
    leader, terminal = os.openpty()
    options = ["--model", model, "--chat", "--system", "one", "--max-new-tokens", 4]
    command = [sys.executable, "-m", "xformer", "generate", *map(str, options)]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE) as process:
        os.close(terminal)
        for message in ("what is two ?", "five", "\x04"):
            printed = b""
            while not printed.endswith(b"> "):
                chunk = os.read(leader, 1000)
                assert chunk
                printed += chunk
            if len(chat) > 1:
                answer = generator([chat], max_new_tokens=4)[0]
                assert answer in printed.decode().replace("\r\n", "\n")
                chat.append({"role": "assistant", "content": answer})
            chat.append({"role": "user", "content": message})
            os.write(leader, f"{message}\n".encode() if message.isprintable() else message.encode())
        assert process.communicate(timeout=60)[1] == b"type a message; Ctrl-D ends the conversation\n"
    os.close(leader)
    assert process.returncode == 0


@pytest.mark.parametrize(("options", "message"), [
    (["--prompt", "Quite"], "prompt 1 has characters that the tokenizer does not know: 'Q'"),
    (["--prompt", "one", "--input", "-"], "--prompt and --input are both given"),
    (["--num-beams", 2, "--max-new-tokens", 99], "the context of the model has"),
    (["--prompt", "one", "--prompt", "\udcff"], "invalid value for '--prompt': expected UTF-8 text; see"),
    (["--sequence-bias", "\udcff"], "invalid value for '--sequence-bias': expected UTF-8 text; see"),
    (["--set", "coverage_penalty=1"], "coverage_penalty does not apply to text generation"),
    (["--draft-model", "nowhere"], "nowhere does not exist; expected the directory of a run"),
    (["--draft-model", RUN, "--num-beams", 2], "--draft-model is given with --num-beams or --prompt-lo"),
    (["--draft-model", RUN, "--prompt-lookup-num-tokens", 2], "--draft-model is given with --num-beams or --pr"),
    (["--num-draft-tokens", 2], "--num-draft-tokens is given without --draft-model; expected both"),
])  # fmt: skip
def test_invalid_options_are_refused(refused, run, tmp_path, options, message):
    options = [run if option is RUN else option for option in options]
    error = refused("generate", "--model", run, "--output", tmp_path / "out", *options, untouched=tmp_path)
    assert message.lower() in error.lower()


def test_a_run_of_another_task_is_named(refused, run, trained, tmp_path):
    error = refused("generate", "--model", trained, untouched=tmp_path)
    assert f"{trained} holds a model for translation; expected one for language_modeling" in error
    for command, task in (("translate", "translation"), ("summarize", "summarization")):
        error = refused(command, "--model", run, untouched=tmp_path, stdin=b"one\n")
        assert f"{run} holds a model for language_modeling; expected one for {task}" in error
    assert "has no config.json; expected the directory of a run" in refused(
        "generate", "--model", tmp_path, untouched=tmp_path
    )
