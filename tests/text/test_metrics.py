import importlib.util
import random
import re
import sys
from collections import Counter

import pytest
import sacrebleu
from hypothesis import strategies as st

from xformer.errors import BackendError, ConfigError, DataError
from xformer.text.metrics import bleu, bleu_tokenizer, chrf, exact_match, rouge, ter

HYPOTHESES = ["The dog runs across the green field.", "A man plays the guitar, loudly!", "Two children eat."]
REFERENCES = ["the dog runs across a green field.", "A man plays guitar, loudly!", "Two children are eating."]
OTHERS = ["The dog is running over the green field.", "A man plays the guitar loudly.", "Two children eat."]

lines = st.lists(st.text("abc ", min_size=1, max_size=12), min_size=1, max_size=5)


CHINESE = (
    ["我今天早上在公园里看见了一只黑色的小狗。", "他们明天要去北京开会。"],
    ["我今天早上在公园看见一只黑色小狗。", "他们明天去北京开会。"],
)


@pytest.mark.parametrize("tokenize", ["13a", "zh", "char", "intl", "none"])
def test_bleu_has_the_tokenizers_of_sacrebleu(tokenize):
    hypotheses, references = CHINESE
    score = bleu(hypotheses, references, tokenize=tokenize)
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenize).score
    assert score.value == pytest.approx(expected)
    assert f"|tok:{tokenize}|" in score.signature
    assert (expected > 50) == (tokenize in ("zh", "char"))


def test_unknown_tokenizers_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"^tokenize is 'moses'; expected one of none, zh, 13a, intl, char, ja-mecab"):
        bleu(["a"], ["a"], tokenize="moses")
    monkeypatch.setitem(sys.modules, "MeCab", None)
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    with pytest.raises(BackendError, match=r"^sacreBLEU has no tokenizer 'ja-mecab' on this machine: .*pip install"):
        bleu(["a"], ["a"], tokenize="ja-mecab")


def test_the_language_chooses_the_tokenizer():
    for language in ("zh", "zho_Hans", "zh_CN"):
        assert bleu_tokenizer(language) == "zh"
    for language in ("de", "eng_Latn", "", None):
        assert bleu_tokenizer(language) == "13a"
    for language, package in (("ja", "MeCab"), ("jpn_Jpan", "MeCab"), ("kor_Hang", "mecab_ko")):
        mecab = f"{language[:2]}-mecab" if importlib.util.find_spec(package) else "char"
        assert bleu_tokenizer(language) == mecab


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


def test_lines_that_cannot_be_scored_are_refused():
    for metric in (bleu, chrf, ter, rouge, exact_match):
        different = "got 3 hypotheses and 2 references; expected one reference line for each"
        for hypotheses, references, message in (
            (HYPOTHESES, REFERENCES[:2], different),
            (HYPOTHESES, [REFERENCES, OTHERS[:2]], different),
            ([], [], "^got 0 hypotheses and 0 references; expected at least one of each$"),
            (["a"], [], "^got 1 hypotheses and 0 references; expected at least one of each$"),
            ("ab", ["a", "b"], "expected a list of"),
            (["a", "b"], "ab", "expected a list of"),
            (["a", "b"], [["a", "b"], "ab"], "references is a single text"),
        ):
            with pytest.raises(DataError, match=message):
                metric(hypotheses, references)


def test_exact_match():
    assert exact_match(["a", "b", "c ", "d"], ["a", "B", "c", "d"]) == 50.0
    assert exact_match(["a", "b", "c", "d"], [["a", "B", "x", "d"], ["x", "b", "x", "d"]]) == 75.0
    with pytest.raises(DataError, match="got 1 hypotheses and 2 references"):
        exact_match(["a"], ["a", "b"])


def test_missing_sacrebleu(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(BackendError, match=r"pip install \"array-transformers\[cli\]"):
        bleu(["a"], ["a"])


# --- TER -----------------------------------------------------------------------------------------


def test_ter_is_that_of_sacrebleu():
    score = ter(HYPOTHESES, REFERENCES)
    metric = sacrebleu.TER(case_sensitive=True)
    assert score.name == "TER"
    assert score.value == pytest.approx(metric.corpus_score(HYPOTHESES, [REFERENCES]).score)
    assert score.signature.startswith("nrefs:1|case:mixed|tok:tercom|norm:no|punct:yes|asian:no|version:")
    assert score.lower_is_better
    assert not bleu(HYPOTHESES, REFERENCES).lower_is_better


def test_ter_takes_the_nearest_reference():
    both = ter(HYPOTHESES, [REFERENCES, OTHERS])
    assert both.signature.startswith("nrefs:2|")
    assert both.value < min(ter(HYPOTHESES, each).value for each in (REFERENCES, OTHERS))


# --- ROUGE ---------------------------------------------------------------------------------------


def rouge_values(hypotheses, references, **settings):
    return [score.value for score in rouge(hypotheses, references, **settings)]


def f1(matches, ours, theirs):
    return 200.0 * matches / (ours + theirs)


def test_rouge_takes_the_best_reference_of_each_item_and_score():
    hypotheses = ["a b c d", "x y"]
    first, second = ["a b d c", "z z"], ["a b c e f", "x y"]
    # The first item has its words and its sequence from the first reference, its pairs from the second.
    expected = [(100 + 100) / 2, (f1(2, 3, 4) + 100) / 2, (max(f1(3, 4, 4), f1(3, 4, 5)) + 100) / 2]
    assert rouge_values(hypotheses, [first, second]) == pytest.approx(expected)
    assert rouge_values(hypotheses, [second, first]) == pytest.approx(expected)


def test_rouge_says_how():
    scores = rouge(HYPOTHESES, REFERENCES)
    assert [score.name for score in scores] == ["ROUGE-1", "ROUGE-2", "ROUGE-L"]
    assert len({score.signature for score in scores}) == 1
    assert scores[0].signature.startswith("nrefs:1|case:lc|tok:a-z0-9|stem:no|f:1|mean:items|version:rouge-score.")
    other = rouge(HYPOTHESES, [REFERENCES, OTHERS], use_stemmer=True)[0]
    assert other.signature.startswith("nrefs:2.best|case:lc|tok:a-z0-9|stem:porter|")


def plain_rouge(hypothesis, reference):
    """Return ROUGE-1, ROUGE-2 and ROUGE-L of one pair, by their definitions."""
    ours, theirs = (re.findall("[a-z0-9]+", text.lower()) for text in (hypothesis, reference))
    scores = []
    for size in (1, 2):
        counts = [Counter(zip(*(words[k:] for k in range(size)), strict=False)) for words in (ours, theirs)]
        matches, totals = (counts[0] & counts[1]).total(), [each.total() for each in counts]
        scores.append(f1(matches, *totals) if matches else 0.0)
    lengths = {(i, j): 0 for i in range(len(ours) + 1) for j in range(len(theirs) + 1)}
    for i, one in enumerate(ours):
        for j, other in enumerate(theirs):
            longer = max(lengths[i, j + 1], lengths[i + 1, j])
            lengths[i + 1, j + 1] = lengths[i, j] + 1 if one == other else longer
    longest = lengths[len(ours), len(theirs)]
    return [*scores, f1(longest, len(ours), len(theirs)) if longest else 0.0]


def test_rouge_is_that_of_a_plain_implementation():
    rng = random.Random(0)
    words = ["the", "model", "Models", "of", "text,", "(text)", "word-level", "naïve", "3.5", "BERT", "a", "is"]
    hypotheses, references = ([" ".join(rng.choices(words, k=rng.randint(0, 15))) for _ in range(200)] for _ in "ab")
    rows = [plain_rouge(*pair) for pair in zip(hypotheses, references, strict=True)]
    expected = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    assert rouge_values(hypotheses, references) == pytest.approx(expected)
