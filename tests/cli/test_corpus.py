"""--corpus-out: large files in chunks, on processes of this machine and on Dask."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.checkpoints import checkpoint
from tests.cli.test_summarize import run as summarizer_run  # noqa: F401 - a fixture
from xformer.models import load
from xformer.pipelines import Translator

# One line in each batch: rounding does not depend on the other lines of a chunk.
SINGLE = ["--batch-tokens", 1, "--max-new-tokens", 6]


@pytest.fixture
def threads(monkeypatch):
    """Run chunks on threads of this process, which need no time to start."""
    monkeypatch.setattr("xformer.cli._corpus.WorkerProcesses", ThreadPoolExecutor)


def read(path):
    return path.read_text(encoding="utf-8")


def test_two_workers_give_what_translate_gives(xformer, trained, text, tmp_path):
    options = ["--model", trained, "--input", text / "test.en", "--temperature", 1.0, "--seed", 3, *SINGLE]
    plain = xformer("translate", *options)
    done = xformer("translate", *options, "--corpus-out", tmp_path / "out", "--chunk-lines", 5, "--workers", 2)
    assert (done.code, done.out) == (0, "")
    assert read(tmp_path / "out" / "output.txt") == plain.out
    assert f"wrote {tmp_path / 'out' / 'output.txt'}\n" in done.err
    assert "reached the length limit" in plain.err
    assert done.err.endswith(plain.err)


@pytest.mark.usefixtures("threads")
def test_a_line_break_in_an_output_does_not_shift_the_lines(xformer, tmp_path):
    model = checkpoint(tmp_path, "marian")
    tokenizer = json.loads(read(model / "tokenizer.json"))
    separators = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        f"{token}{separators[index % 10]}z" if token.startswith("word") else token: index
        for token, index in vocab.items()
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "in").write_text("a man sleeps\n\nthe dog runs\n" * 4)
    options = ["--model", model, "--input", tmp_path / "in", "--temperature", 5.0, *SINGLE]
    plain = xformer("translate", *options)
    assert xformer("translate", *options, "--corpus-out", tmp_path / "out", "--chunk-lines", 5).code == 0
    assert read(tmp_path / "out" / "output.txt") == plain.out
    lines = plain.out.split("\n")[:-1]
    assert lines == plain.out.splitlines()
    assert (len(lines), lines[1::3]) == (12, [""] * 4)
    assert xformer("translate", *options, "--num-return-sequences", 2).out.count("\\n") > 3


@pytest.mark.usefixtures("threads")
def test_the_same_command_resumes_and_another_is_refused(xformer, trained, text, tmp_path):
    options = ["--model", trained, "--input", text / "test.en", "--corpus-out", tmp_path / "out", *SINGLE]
    assert xformer("translate", *options, "--chunk-lines", 5).code == 0
    expected = read(tmp_path / "out" / "output.txt")
    (tmp_path / "out" / "part-00000001.txt").unlink()
    done = xformer("translate", *options, "--chunk-lines", 5)
    assert (done.code, read(tmp_path / "out" / "output.txt")) == (0, expected)
    assert "resuming after 7 lines\n5 lines in " in done.err
    done = xformer("translate", *options, "--chunk-lines", 5, "--num-beams", 2)
    assert done.code == 2
    assert "was started with generation.num_beams unset, not 2; repeat the first command" in done.err


@pytest.mark.usefixtures("threads")
def test_another_model_is_refused(xformer, trained, text, tmp_path):
    for file in trained.glob("*.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    options = ["--model", tmp_path, "--input", text / "test.en", "--corpus-out", tmp_path / "out", *SINGLE]
    assert xformer("translate", *options).code == 0
    load(trained / "model.safetensors", dtype="float16").save(tmp_path / "model.safetensors")
    done = xformer("translate", *options)
    assert done.code == 2
    assert "out was started with model.model.safetensors " in done.err


def test_workers_check_that_they_have_the_same_model(xformer, trained, text, tmp_path, monkeypatch):
    monkeypatch.setattr("xformer.cli._corpus.WorkerProcesses", ThreadPoolExecutor)
    digests = [{"model.safetensors": "a"}, {"model.safetensors": "b"}]
    monkeypatch.setattr("xformer.cli._corpus.model_digests", lambda model: digests.pop())
    done = xformer("translate", "--model", trained, "--input", text / "test.en", "--corpus-out", tmp_path / "out")
    assert done.code == 2
    assert "has changed since the run started" in done.err


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("mode", ["blank", "cut"])
def test_long_lines_do_not_end_a_run(xformer, trained, tmp_path, mode):
    (tmp_path / "in").write_text("\n".join(["seven", "one " * 500, "x" * 200_000, "nine"]))
    options = ["--model", trained, "--max-source-length", 3, *SINGLE, "--input", tmp_path / "in"]
    corpus = ["--corpus-out", tmp_path / "out", "--chunk-lines", 3, "--long-lines", mode]
    done = xformer("translate", *options, *(corpus if mode == "cut" else corpus[:-2]))
    assert done.code == 0
    assert f"note: 2 lines of more than 3 tokens {'cut' if mode == 'cut' else 'left blank'}" in done.err
    written = read(tmp_path / "out" / "output.txt").split("\n")
    expected = ["", ""]
    if mode == "cut":
        translator = Translator.from_pretrained(trained)
        ids = [ids[:3] for ids in translator.token_ids(["one one one one", "xxxxxxxxxxxx"])]
        expected = [result.outputs[0].text for batch in translator.batches_of_ids(ids, batch_tokens=1, max_new_tokens=6)
                    for result in batch]  # fmt: skip
    assert written[1:3] == expected
    assert all(written[row] for row in (0, 3))


@pytest.mark.usefixtures("threads")
def test_a_chunk_that_fails_is_named(xformer, trained, tmp_path):
    (tmp_path / "in").write_text("seven\nnine\n" + "one " * 500)
    options = ["--model", trained, "--max-source-length", 3, *SINGLE, "--long-lines", "error"]
    corpus = ["--input", tmp_path / "in", "--corpus-out", tmp_path / "out", "--chunk-lines", 2]
    done = xformer("translate", *options, *corpus)
    error = tmp_path / "out" / "part-00000001.error"
    assert done.code == 2
    assert "1 of 2 chunks failed, the first with: line 3 has 1001 tokens" in done.err
    assert f"see {error}, and run the same command again" in done.err
    assert read(error).startswith("line 3 has ")
    assert (tmp_path / "out" / "part-00000000.txt").exists()
    assert not (tmp_path / "out" / "output.txt").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--corpus-out", "out"], "--corpus-out needs a file; add --input FILE"),
        (["--chunk-lines", 5, "--input", "in"], "--chunk-lines needs --corpus-out"),
        (["--corpus-out", "out", "--input", "in", "--workers", 2, "--scheduler", "a:1"], "expected only one of them"),
        (["--corpus-out", "in", "--input", "in"], "in is not a writable directory"),
        (["--corpus-out", "out", "--input", "in", "--output", "in"], "--output in would replace in"),
    ],
)
def test_options_that_contradict_each_other(refused, trained, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text("one\n")
    assert message in refused("translate", "--model", trained, *options, untouched=tmp_path)


@pytest.mark.parametrize("exists", [False, True])
def test_the_files_of_a_corpus_are_no_output(refused, trained, tmp_path, exists):
    """Whether the run has them yet, and through links."""
    (tmp_path / "in").write_text("one\n")
    if exists:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "manifest.json").write_text("{}")
    (tmp_path / "link").symlink_to("out/log.jsonl")
    options = ["--model", trained, "--input", tmp_path / "in", "--corpus-out", tmp_path / "out"]
    for name in ("out/log.jsonl", "out/manifest.json", "out/part-00000001.txt", "out/.lock", "out", "link"):
        error = refused("translate", *options, "--output", tmp_path / name, untouched=tmp_path)
        assert "belongs to the run in" in error


@pytest.mark.usefixtures("threads")
def test_continuations(xformer, tmp_path):
    model = checkpoint(tmp_path, "llama")
    (tmp_path / "in").write_text("a man\n\nthe dog\nthe bench runs\ndog\n")
    options = ["--model", model, "--input", tmp_path / "in", "--temperature", 1.0, "--seed", 5, *SINGLE, "--json"]
    assert xformer("generate", *options, "--corpus-out", tmp_path / "out", "--chunk-lines", 2).code == 0
    assert read(tmp_path / "out" / "output.txt") == xformer("generate", *options).out


@pytest.mark.usefixtures("threads")
def test_vectors(xformer, tmp_path):
    model = checkpoint(tmp_path, "bert", tokenizer_config={"model_max_length": 6})
    (tmp_path / "in").write_text("a man sleeps\n\nthe dog runs on a bench\ndog\na\n")
    options = ["--model", model, "--input", tmp_path / "in", "--batch-tokens", 1, "--output"]
    assert xformer("embed", *options, tmp_path / "plain.npy").code == 0
    assert (
        xformer("embed", *options, tmp_path / "v.npy", "--corpus-out", tmp_path / "out", "--chunk-lines", 2).code == 0
    )
    assert np.load(tmp_path / "v.npy").shape[0] == 5
    os.mkfifo(tmp_path / "pipe")  # without .npy
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert xformer("embed", *options, tmp_path / "pipe").code == 0
    assert os.read(reader, 10_000) == (tmp_path / "plain.npy").read_bytes()
    os.close(reader)
    assert (tmp_path / "v.npy").read_bytes() == (tmp_path / "plain.npy").read_bytes()


def test_a_scheduler_that_cannot_be_reached(xformer, trained, text, tmp_path):
    pytest.importorskip("distributed")
    options = ["--model", trained, "--input", text / "test.en", "--corpus-out", tmp_path / "out"]
    done = xformer("translate", *options, "--scheduler", "nonsense")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "cannot connect to the Dask scheduler nonsense" in done.err
