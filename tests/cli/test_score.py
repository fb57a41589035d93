from __future__ import annotations

import json

import pytest

from xformer.text import bleu, chrf

REFERENCES = ["A man plays the guitar .", "Two children eat .", "The dog runs across the green field ."]
HYPOTHESES = ["a man plays a guitar .", "Two children eat .", "The dog runs across a field ."]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "ref").write_text("\n".join(REFERENCES) + "\n")
    (tmp_path / "hyp").write_text("\n".join(HYPOTHESES) + "\n")
    return tmp_path


def test_both_scores_with_their_signatures(xformer, files):
    done = xformer("score", "--reference", files / "ref", "--hypothesis", files / "hyp")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{bleu(HYPOTHESES, REFERENCES)}\n{chrf(HYPOTHESES, REFERENCES)}\n"
    assert "tok:13a" in done.out


def test_case_can_be_ignored(xformer, files):
    done = xformer("score", "--reference", files / "ref", "--hypothesis", files / "hyp", "--lowercase")
    assert str(bleu(HYPOTHESES, REFERENCES, lowercase=True)) in done.out
    assert str(chrf(HYPOTHESES, REFERENCES, lowercase=True)) in done.out


def test_json_from_standard_input(xformer, files):
    done = xformer("score", "--reference", files / "ref", "--json", stdin=(files / "hyp").read_bytes())
    score = bleu(HYPOTHESES, REFERENCES)
    values = json.loads(done.out)
    assert values["BLEU"] == {"score": score.value, "signature": score.signature}
    assert values["chrF"]["score"] == chrf(HYPOTHESES, REFERENCES).value
    assert values["lines"] == 3


def test_different_line_counts(refused, files):
    (files / "short").write_text("one\n")
    error = refused("score", "--reference", files / "ref", "--hypothesis", files / "short", untouched=files)
    assert f"{files / 'ref'} has 3 lines and {files / 'short'} has 1" in error
    assert "standard input has 0" in refused("score", "--reference", files / "ref", untouched=files)


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"\n\xff\n\n", "not valid UTF-8: line 2")])
@pytest.mark.parametrize("name", ["ref", "hyp"])
def test_bad_files(refused, files, name, content, message):
    (files / name).write_bytes(content)
    error = refused("score", "--reference", files / "ref", "--hypothesis", files / "hyp", untouched=files)
    assert message in error
    assert str(files / name) in error
