from __future__ import annotations

import json
import shutil
import threading

import numpy as np
import pytest

from xformer.pipelines import Translator


@pytest.fixture(scope="module")
def translator(trained):
    return Translator.from_pretrained(trained, xp=np)


def expected(translator, lines, **limits):
    return "".join(f"{line}\n" for line in translator(lines, **limits))


def read(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def test_a_file_to_a_file(xformer, trained, translator, text, tmp_path):
    done = xformer("translate", "--model", trained, "--input", text / "test.en", "--output", tmp_path / "out")
    assert (done.code, done.out) == (0, "")
    assert (tmp_path / "out").read_text() == expected(translator, read(text / "test.en"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_standard_input_to_standard_output(xformer, trained, translator):
    done = xformer("translate", "--model", trained, stdin=b"one hundred\n\n  \nseven")
    assert done.code == 0
    assert done.out == expected(translator, ["one hundred", "", "", "seven"])
    assert done.out.split("\n")[1:3] == ["", ""]


def test_a_line_is_translated_when_it_arrives(start_process, trained, translator):
    process = start_process("translate", "--model", trained)
    answers = []
    for line in ("one hundred", "seven"):
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()
        reader = threading.Thread(target=lambda: answers.append(process.stdout.readline().decode()))
        reader.start()
        reader.join(timeout=60)
    assert "".join(answers) == expected(translator, ["one hundred", "seven"])
    rest, errors = process.communicate(b"nine", timeout=60)
    assert (process.returncode, rest.decode()) == (0, expected(translator, ["nine"]))
    assert b"Traceback" not in errors


def test_a_closed_output_pipe_ends_the_command_silently(start_process, trained):
    process = start_process("translate", "--model", trained, "--max-new-tokens", 1)
    process.stdout.close()
    process.stdin.write(b"one hundred\n" * 10)
    process.stdin.close()
    process.wait(timeout=60)
    assert (process.returncode, process.stderr.read()) == (1, b"")
    process.stdout = process.stdin = None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b"seven", b"\xff"], "error: standard input is not valid UTF-8: line 2"),
        ([b"seven", b"", b"one " * 30, b"nine"], "error: standard input line 3 has "),
    ],
)
def test_an_invalid_line_of_a_pipe_is_named(xformer, trained, lines, message):
    stdin = b"".join(line + b"\n" for line in lines)
    done = xformer("translate", "--model", trained, "--max-source-length", 20, stdin=stdin, pipe=True)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(message)
    assert done.err.count("\n") == 1


# --- Decoding ---------------------------------------------------------------------------------------------------------


def test_options_of_decoding_reach_the_search(xformer, trained, translator, text):
    settings = {"num_beams": 3, "length_penalty": 0.6, "max_new_tokens": 8, "no_repeat_ngram_size": 2, "prefix": "zwei"}
    options = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    done = xformer("translate", "--model", trained, "--input", text / "test.en", *options, "--sequence-bias", "hundert")
    outputs = expected(translator, read(text / "test.en"), sequence_bias=["hundert"], **settings)
    assert (done.code, done.out) == (0, outputs)


def test_n_best_lists_are_lines_of_json(xformer, trained, translator, text):
    options = ["--num-beams", 3, "--num-return-sequences", 2, "--max-new-tokens", 6]
    done = xformer("translate", "--model", trained, "--input", text / "test.en", *options)
    lines = [json.loads(line) for line in done.out.splitlines()]
    actual = translator.outputs(read(text / "test.en"), num_beams=3, num_return_sequences=2, max_new_tokens=6)
    assert [(line["line"], line["rank"], line["text"]) for line in lines] == [
        (row + 1, rank + 1, output.text) for row, each in enumerate(actual) for rank, output in enumerate(each)
    ]
    assert [line["score"] for line in lines] == [round(output.score, 6) for each in actual for output in each]


def test_alignments_name_the_tokens_they_link(xformer, trained, translator, text):
    done = xformer("translate", "--model", trained, "--input", text / "test.en", "--align", "--max-new-tokens", 5)
    lines = [json.loads(line) for line in done.out.splitlines()]
    actual = translator.outputs(read(text / "test.en"), align=True, max_new_tokens=5)
    assert [line["alignment"] for line in lines] == [outputs[0].alignment for outputs in actual]
    for line, source in zip(lines, read(text / "test.en"), strict=True):
        assert line["source_tokens"] == [
            *translator.tokenizers.source.tokens(translator.token_ids([source])[0]),
            "</s>",
        ]
        assert len(line["tokens"]) == len(line["alignment"])
        assert all(0 <= index < len(line["source_tokens"]) for index in line["alignment"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "min_new_tokens=9", "--max-new-tokens", 8], "min_new_tokens 9 is above max_new_tokens 8"),
        (["--num-beams", 4, "--set", "num_beam_groups=3"], "num_beam_groups 3 does not divide num_beams 4"),
        (["--sequence-bias", "東京"], "東京"),
        (["--length-unit", "lines"], "error: --length-unit is 'lines'; expected one of 'tokens', 'words'"),
        (["--set", "beams=2"], "unknown key 'beams' in --set; did you mean 'num_beams'?"),
        (["--prefix", "\udcff"], "invalid value for '--prefix': expected UTF-8 text; see"),
    ],
)
def test_options_that_contradict_each_other(refused, trained, text, tmp_path, options, message):
    error = refused("translate", "--model", trained, "--input", text / "test.en", "--output", tmp_path / "o", *options,
                    untouched=tmp_path)  # fmt: skip
    assert message in error


@pytest.mark.parametrize("file", ["test.en", "link", "run/log.jsonl"])
def test_an_output_replaces_nothing_that_is_read(refused, trained, text, tmp_path, monkeypatch, file):
    shutil.copytree(trained, tmp_path / "run")
    shutil.copy(text / "test.en", tmp_path)
    (tmp_path / "link").symlink_to("test.en")
    monkeypatch.setattr("xformer.cli._io.load_pipeline", lambda *_: pytest.fail("the model was loaded"))
    options = ("--model", tmp_path / "run", "--input", tmp_path / "test.en", "--output", tmp_path / file)
    assert f"--output {tmp_path / file} would replace " in refused("translate", *options, untouched=tmp_path)
