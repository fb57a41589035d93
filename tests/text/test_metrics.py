import sys

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from xformer.errors import BackendError, DataError
from xformer.text.metrics import Score, bleu, chrf, exact_match

HYPOTHESES = ["The dog runs across the green field.", "A man plays the guitar, loudly!", "Two children eat."]
REFERENCES = ["the dog runs across a green field.", "A man plays guitar, loudly!", "Two children are eating."]
OTHERS = ["The dog is running over the green field.", "A man plays the guitar loudly.", "Two children eat."]

lines = st.lists(st.text("abc ", min_size=1, max_size=12), min_size=1, max_size=5)


def test_bleu_is_one_hundred_for_equal_lines():
    assert bleu(HYPOTHESES, HYPOTHESES).value == pytest.approx(100)
    assert chrf(HYPOTHESES, HYPOTHESES).value == pytest.approx(100)


def test_bleu_by_hand():
    # 8 tokens against 7: precisions 6/8, 4/7, 2/6, 1/5, no brevity penalty.
    hypothesis, reference = ["a b c d x e f y"], ["a b c d e f g"]
    expected = 100 * (6 / 8 * 4 / 7 * 2 / 6 * 1 / 5) ** 0.25
    assert bleu(hypothesis, reference).value == pytest.approx(expected)


def test_bleu_splits_punctuation_as_13a_does():
    assert bleu(["One, two three (four)."], ["One , two three ( four ) ."]).value == pytest.approx(100)


def test_lowercase_ignores_case_and_says_so():
    upper = [line.upper() for line in HYPOTHESES]
    for metric in (bleu, chrf):
        cased, uncased = metric(upper, HYPOTHESES), metric(upper, HYPOTHESES, lowercase=True)
        assert cased.value < 30
        assert uncased.value == pytest.approx(100)
        assert "case:mixed" in cased.signature
        assert "case:lc" in uncased.signature


def test_scores_are_those_of_sacrebleu():
    score = bleu(HYPOTHESES, REFERENCES)
    assert score.name == "BLEU"
    assert score.value == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score)
    assert score.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    score = chrf(HYPOTHESES, REFERENCES)
    assert score.name == "chrF"
    assert score.value == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    assert score.signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")


@pytest.mark.parametrize("metric", [bleu, chrf])
def test_several_references(metric):
    both = metric(HYPOTHESES, [REFERENCES, OTHERS])
    assert both.signature.startswith("nrefs:2|")
    assert both.value > metric(HYPOTHESES, REFERENCES).value
    assert metric(HYPOTHESES, [REFERENCES]) == metric(HYPOTHESES, REFERENCES)


@pytest.mark.parametrize("metric", [bleu, chrf])
@pytest.mark.parametrize("references", [REFERENCES[:2], [REFERENCES, OTHERS[:2]]])
def test_different_counts(metric, references):
    with pytest.raises(DataError, match="got 3 hypotheses and 2 references; expected one reference line for each"):
        metric(HYPOTHESES, references)


@pytest.mark.parametrize("metric", [bleu, chrf, exact_match])
@pytest.mark.parametrize(("hypotheses", "references"), [([], []), ([], ["a"]), (["a"], [])])
def test_nothing_to_score(metric, hypotheses, references):
    counts = f"got {len(hypotheses)} hypotheses and {len(references)} references"
    with pytest.raises(DataError, match=f"^{counts}; expected at least one of each$"):
        metric(hypotheses, references)


@pytest.mark.parametrize("metric", [bleu, chrf, exact_match])
@pytest.mark.parametrize(("hypotheses", "references"), [("ab", ["a", "b"]), (["a", "b"], "ab")])
def test_one_string_is_not_a_list_of_lines(metric, hypotheses, references):
    with pytest.raises(DataError, match="one string; expected a list of lines"):
        metric(hypotheses, references)


def test_references_of_two_kinds():
    with pytest.raises(DataError, match="references mix lines and lists of lines"):
        bleu(["a", "b"], [["a", "b"], "ab"])


def test_exact_match():
    assert exact_match(["a", "b", "c ", "d"], ["a", "B", "c", "d"]) == 50.0
    assert exact_match(["a", "b", "c", "d"], [["a", "B", "x", "d"], ["x", "b", "x", "d"]]) == 75.0
    with pytest.raises(DataError, match="got 1 hypotheses and 2 references"):
        exact_match(["a"], ["a", "b"])


@given(lines)
def test_exact_match_of_equal_lines(texts):
    assert exact_match(texts, list(texts)) == 100.0
    assert exact_match(texts, [text + "." for text in texts]) == 0.0


def test_score_prints_its_signature():
    assert str(Score("BLEU", 37.518, "nrefs:1|case:lc")) == "BLEU 37.52 (nrefs:1|case:lc)"


@pytest.mark.parametrize("metric", [bleu, chrf])
def test_missing_sacrebleu(metric, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(BackendError, match=r"pip install 'xformer\[cli\]'"):
        metric(["a"], ["a"])
