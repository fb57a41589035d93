from __future__ import annotations

import json
import re
import shlex
import shutil

import pytest

from xformer.cli import score
from xformer.text import bleu, chrf, rouge, ter

REFERENCES = ["A man plays the guitar .", "Two children eat .", "The dog runs across the green field ."]
OTHERS = ["A man is playing guitar .", "Two kids eat .", "The dog runs over a field ."]
HYPOTHESES = ["a man plays a guitar .", "Two children eat .", "The dog runs across a field ."]


@pytest.fixture
def files(tmp_path):
    for name, lines in (("ref", REFERENCES), ("other", OTHERS), ("hyp", HYPOTHESES)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return tmp_path


def rows(out):
    """The table: name -> (score, direction, signature)."""
    head, *lines = out.rstrip("\n").split("\n")
    assert head.split() == ["metric", "score", "better", "signature"]
    return {name: tuple(rest) for name, *rest in map(str.split, lines)}


def row(score, better="higher"):
    return (f"{score.value:.2f}", better, score.signature)


def test_all_measures(xformer, files):
    expected = {
        "BLEU": row(bleu(HYPOTHESES, REFERENCES)),
        "chrF": row(chrf(HYPOTHESES, REFERENCES)),
        "TER": row(ter(HYPOTHESES, REFERENCES), "lower"),
        **{each.name: row(each) for each in rouge(HYPOTHESES, REFERENCES)},
    }
    assert list(expected) == ["BLEU", "chrF", "TER", "ROUGE-1", "ROUGE-2", "ROUGE-L"]
    common = ("score", "--reference", files / "ref", "--hypothesis", files / "hyp")
    done = xformer(*common, "--metric", "all")
    assert rows(done.out) == expected
    some = xformer(*common, "--metric", "rouge", "--metric", "ter", "--metric", "ter")
    assert rows(some.out) == {name: expected[name] for name in ("TER", "ROUGE-1", "ROUGE-2", "ROUGE-L")}


def test_json_from_standard_input(xformer, files):
    done = xformer("score", "--reference", files / "ref", "--json", stdin=(files / "hyp").read_bytes())
    score = bleu(HYPOTHESES, REFERENCES)
    values = json.loads(done.out)
    assert values["BLEU"] == {"score": score.value, "signature": score.signature}
    assert values["chrF"]["score"] == chrf(HYPOTHESES, REFERENCES).value
    assert values["lines"] == 3


@pytest.mark.parametrize(
    ("lines", "warning"),
    [
        (["a", " ", "c"], "1 of 3 hypotheses is blank, the first on line 2"),
        (["", "", ""], "3 of 3 hypotheses are blank, the first on line 1"),
    ],
)
def test_blank_hypotheses_count_and_are_reported(xformer, files, lines, warning):
    (files / "hyp").write_text("\n".join(lines) + "\n")
    common = ("score", "--reference", files / "ref", "--hypothesis", files / "hyp", "--metric", "all")
    done = xformer(*common)
    assert done.err == f"warning: {warning}; they count as empty answers\n"
    assert rows(done.out)["BLEU"] == row(bleu(lines, REFERENCES))
    done = xformer(*common, "--json")
    assert json.loads(done.out)["blank_hypotheses"] == sum(not line.strip() for line in lines)
    assert done.err.startswith("warning: ")


def test_different_line_counts(refused, files):
    (files / "short").write_text("one\n")
    error = refused("score", "--reference", files / "ref", "--hypothesis", files / "short", untouched=files)
    assert f"{files / 'ref'} has 3 lines and {files / 'short'} has 1" in error
    assert "standard input has 0" in refused("score", "--reference", files / "ref", untouched=files)
    error = refused(
        *("score", "--reference", files / "ref", "--reference", files / "short", "--hypothesis", files / "hyp"),
        untouched=files,
    )
    assert f"{files / 'short'} has 1 lines and {files / 'hyp'} has 3" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--metric", "meteor"], "'meteor'"),
        (["--stem"], "--stem applies only to ROUGE"),
        (["--metric", "chrf", "--tokenize", "zh"], "--tokenize applies only to BLEU"),
    ],
)
def test_invalid_options_are_refused(refused, files, options, message, monkeypatch):
    monkeypatch.chdir(files)
    assert message in refused("score", "--reference", files / "ref", *options, untouched=files)


def test_the_examples_of_the_help_run(xformer, files, monkeypatch):
    monkeypatch.chdir(files)
    for name in ("test.en", "out.en", "a", "b", "out", "titles", "test.zh", "out.zh"):
        shutil.copy(files / "ref", files / name)
    examples = re.findall(r"xformer score (-.*)", str(score.__doc__).replace("\\\n", " "))
    assert len(examples) == 6
    for example in examples:
        done = xformer("score", *shlex.split(example), stdin=(files / "ref").read_bytes())
        assert done.code == 0, example
        assert done.out
    assert xformer("score", "--help").out.count("xformer score") >= len(examples)


# --- Standard input ------------------------------------------------------------------------------


def test_a_hint_is_printed_on_a_terminal(xformer, files, monkeypatch):
    monkeypatch.setattr("xformer.cli._io.is_terminal", lambda name: name == "-")
    done = xformer("score", "--reference", files / "ref", stdin=(files / "hyp").read_bytes())
    assert done.code == 0
    assert "type a line for each reference" in done.err
