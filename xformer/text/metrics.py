"""Metrics of translations and summaries: BLEU, chrF, TER, ROUGE and exact match."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from xformer.errors import BackendError, DataError, check_choice
from xformer.text.extras import require
from xformer.text.normalize import check_texts

References = Sequence[str] | Sequence[Sequence[str]]

_BLEU_TOKENIZERS = {"zh": ("zh", "zho", "cmn", "yue"), "ja-mecab": ("ja", "jpn"), "ko-mecab": ("ko", "kor")}
_ROUGE_TYPES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


@dataclass(frozen=True)
class Score:
    """Score of a corpus.

    Attributes:
        name: Name of the metric.
        value: From 0 to 100; error rates may exceed 100.
        signature: Description of the computation; scores with other signatures are not comparable.
        lower_is_better: True for error rates.
    """

    name: str
    value: float
    signature: str
    lower_is_better: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f} ({self.signature})"


def bleu(hypotheses: Sequence[str], references: References, *, lowercase: bool = False, tokenize: str = "13a") -> Score:
    """Compute corpus BLEU (Papineni et al., 2002) with sacreBLEU (Post, 2018).

    Args:
        hypotheses: Lines to score.
        references: One line per hypothesis, or several such lists, one per set of references.
        lowercase: Ignore case; such a score is not comparable with a cased one.
        tokenize: Tokenizer of sacreBLEU, e.g. "13a" for languages that separate words by spaces, or "zh"; see
            `bleu_tokenizer`.

    Raises:
        DataError: If there is nothing to score or the counts differ.
        ConfigError: If sacreBLEU has no such tokenizer.
        BackendError: If the package sacrebleu, or one that the tokenizer needs, is missing.
    """
    return _score(make_bleu(lowercase, tokenize), "BLEU", hypotheses, references)


def make_bleu(lowercase: bool, tokenize: str) -> Any:
    """Return the BLEU object of sacreBLEU; raises what `bleu` raises about its settings."""
    sacrebleu = require("sacrebleu")
    check_choice("tokenize", tokenize, sacrebleu.BLEU.TOKENIZERS)
    try:
        return sacrebleu.BLEU(lowercase=lowercase, tokenize=tokenize)
    except (ImportError, RuntimeError, OSError) as error:  # a package, or a model that sacreBLEU downloads
        reason = " ".join(str(error).split())
        raise BackendError(f"sacreBLEU has no tokenizer {tokenize!r} on this machine: {reason}") from error


def bleu_tokenizer(language: str | None) -> str:
    """Return the tokenizer that sacreBLEU recommends for a language: "zh", "ja-mecab", "ko-mecab", or else "13a".

    Without the package for Japanese or Korean it is "char".

    Args:
        language: Code such as "zh", "zh_CN" or "zho_Hans"; None if it is unknown.

    Raises:
        BackendError: If the package sacrebleu is missing.
    """
    code = re.split("[-_]", (language or "").lower())[0]
    name = next((name for name, codes in _BLEU_TOKENIZERS.items() if code in codes), "13a")
    if name.endswith("mecab"):
        try:
            make_bleu(False, name)
        except BackendError:
            require("sacrebleu")
            return "char"
    return name


def chrf(hypotheses: Sequence[str], references: References, *, lowercase: bool = False) -> Score:
    """Compute corpus chrF, the F-score (beta 2) of character 1- to 6-grams (Popović, 2015).

    Arguments and errors are those of `bleu`.
    """
    return _score(require("sacrebleu").CHRF(lowercase=lowercase), "chrF", hypotheses, references)


def ter(hypotheses: Sequence[str], references: References, *, lowercase: bool = False) -> Score:
    """Compute TER (Snover et al., 2006): edits per 100 reference words; moving a sequence of words is one edit.

    Words are separated by white space. Of several references the nearest one counts, and their mean length. Case counts
    by default, unlike in sacreBLEU's command. Arguments and errors are those of `bleu`.
    """
    metric = require("sacrebleu").TER(case_sensitive=not lowercase)
    return _score(metric, "TER", hypotheses, references, lower_is_better=True)


def rouge(hypotheses: Sequence[str], references: References, *, use_stemmer: bool = False) -> list[Score]:
    """Compute the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004) with the rouge-score package.

    ROUGE-L treats an item as one sequence. Of several references, each score takes the best one per item. The package
    lower-cases text and takes runs of a-z and 0-9 as words: accented letters separate words, and other scripts score 0.
    With `use_stemmer`, stems of English words are compared (Porter, 1980). Arguments and errors are those of `bleu`.
    """
    streams = _reference_streams(hypotheses, references)
    scorer = require("rouge_score.rouge_scorer").RougeScorer(list(_ROUGE_TYPES), use_stemmer=use_stemmer)
    items = []
    for hypothesis, *row in zip(hypotheses, *streams, strict=True):
        scored = [scorer.score(reference, hypothesis) for reference in row]
        items.append({rouge_type: max(score[rouge_type].fmeasure for score in scored) for rouge_type in _ROUGE_TYPES})
    best, stem = "" if len(streams) == 1 else ".best", "porter" if use_stemmer else "no"
    version = require("importlib.metadata").version("rouge-score")
    signature = (
        f"nrefs:{len(streams)}{best}|case:lc|tok:a-z0-9|stem:{stem}|f:1|mean:items|version:rouge-score.{version}"
    )
    return [
        Score(name, 100.0 * statistics.fmean(item[rouge_type] for item in items), signature)
        for rouge_type, name in _ROUGE_TYPES.items()
    ]


def exact_match(hypotheses: Sequence[str], references: References) -> float:
    """Compute the percentage of hypotheses that equal one of their references; arguments are those of `bleu`."""
    rows = zip(*_reference_streams(hypotheses, references), strict=True)
    matches = sum(line in row for line, row in zip(hypotheses, rows, strict=True))
    return 100.0 * matches / len(hypotheses)


def _score(
    metric: Any, name: str, hypotheses: Sequence[str], references: References, *, lower_is_better: bool = False
) -> Score:
    value = metric.corpus_score(list(hypotheses), _reference_streams(hypotheses, references)).score
    # After scoring, because the signature contains the number of references.
    return Score(name, float(value), str(metric.get_signature()), lower_is_better)


def _reference_streams(hypotheses: Sequence[str], references: References) -> list[list[str]]:
    """Return the references as one list per set, checked against the hypotheses."""
    check_texts(hypotheses, "hypotheses")
    if isinstance(references, str | dict | type) or not hasattr(references, "__len__"):
        raise DataError("references is no list; expected a list of lines, or several of them")
    if not len(hypotheses) or not len(references):
        problem = f"got {len(hypotheses)} hypotheses and {len(references)} references"
        raise DataError(f"{problem}; expected at least one of each")
    if isinstance(references[0], str):
        references = [cast("Sequence[str]", references)]
    for stream in references:
        check_texts(stream, "references")
        if len(stream) != len(hypotheses):
            received = f"got {len(hypotheses)} hypotheses and {len(stream)} references"
            raise DataError(f"{received}; expected one reference line for each hypothesis")
    return [list(stream) for stream in references]
