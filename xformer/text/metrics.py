"""Metrics of translations and summaries: BLEU, chrF, TER, ROUGE and exact match."""

from __future__ import annotations

import importlib.metadata
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from xformer.errors import DataError
from xformer.text.extras import require

References = Sequence[str] | Sequence[Sequence[str]]

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


def bleu(hypotheses: Sequence[str], references: References, *, lowercase: bool = False) -> Score:
    """Compute corpus BLEU (Papineni et al., 2002) with sacreBLEU (Post, 2018) and its 13a tokenizer.

    Args:
        hypotheses: Lines to score.
        references: One line per hypothesis, or several such lists, one per set of references.
        lowercase: Ignore case; such a score is not comparable with a cased one.

    Raises:
        DataError: If there is nothing to score or the counts differ.
        BackendError: If the package sacrebleu is missing.
    """
    streams = _reference_streams(hypotheses, references)
    return _score(require("sacrebleu").BLEU(lowercase=lowercase, tokenize="13a"), "BLEU", hypotheses, streams)


def chrf(hypotheses: Sequence[str], references: References, *, lowercase: bool = False) -> Score:
    """Compute corpus chrF, the F-score (beta 2) of character 1- to 6-grams (Popović, 2015).

    Arguments and errors are those of `bleu`.
    """
    streams = _reference_streams(hypotheses, references)
    return _score(require("sacrebleu").CHRF(lowercase=lowercase), "chrF", hypotheses, streams)


def ter(hypotheses: Sequence[str], references: References, *, lowercase: bool = False) -> Score:
    """Compute TER (Snover et al., 2006): edits per 100 reference words; moving a sequence of words is one edit.

    Words are separated by white space. Of several references the nearest one counts, and their mean length. Case counts
    by default, unlike in sacreBLEU's command. Arguments and errors are those of `bleu`.
    """
    streams = _reference_streams(hypotheses, references)
    metric = require("sacrebleu").TER(case_sensitive=not lowercase)
    return _score(metric, "TER", hypotheses, streams, lower_is_better=True)


def rouge(hypotheses: Sequence[str], references: References, *, use_stemmer: bool = False) -> list[Score]:
    """Compute the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004) with the rouge-score package.

    ROUGE-L treats an item as one sequence. Of several references, each score takes the best one per item. The package
    lower-cases text and takes runs of a-z and 0-9 as words: accented letters separate words, and other scripts score 0.

    Args:
        hypotheses: Lines to score.
        references: One line per hypothesis, or several such lists, one per set of references.
        use_stemmer: Compare the stems of English words (Porter, 1980).

    Raises:
        DataError: If there is nothing to score or the counts differ.
        BackendError: If the package rouge-score is missing.
    """
    streams = _reference_streams(hypotheses, references)
    scorer = require("rouge_score.rouge_scorer").RougeScorer(list(_ROUGE_TYPES), use_stemmer=use_stemmer)
    items = []
    for hypothesis, *row in zip(hypotheses, *streams, strict=True):
        scored = [scorer.score(reference, hypothesis) for reference in row]
        items.append({rouge_type: max(score[rouge_type].fmeasure for score in scored) for rouge_type in _ROUGE_TYPES})
    signature = "|".join(
        (
            f"nrefs:{len(streams)}{'' if len(streams) == 1 else '.best'}",
            "case:lc",
            "tok:a-z0-9",
            f"stem:{'porter' if use_stemmer else 'no'}",
            "f:1",
            "mean:items",
            f"version:rouge-score.{importlib.metadata.version('rouge-score')}",
        )
    )
    return [
        Score(name, 100.0 * statistics.fmean(item[rouge_type] for item in items), signature)
        for rouge_type, name in _ROUGE_TYPES.items()
    ]


def exact_match(hypotheses: Sequence[str], references: References) -> float:
    """Compute the percentage of hypotheses that equal one of their references.

    Args:
        hypotheses: Lines to score.
        references: One line per hypothesis, or several such lists, one per set of references.

    Raises:
        DataError: If there is nothing to score or the counts differ.
    """
    rows = zip(*_reference_streams(hypotheses, references), strict=True)
    matches = sum(line in row for line, row in zip(hypotheses, rows, strict=True))
    return 100.0 * matches / len(hypotheses)


def _score(
    metric: Any, name: str, hypotheses: Sequence[str], streams: list[list[str]], *, lower_is_better: bool = False
) -> Score:
    value = metric.corpus_score(list(hypotheses), streams).score
    # After scoring, because the signature contains the number of references.
    return Score(name, float(value), str(metric.get_signature()), lower_is_better)


def _reference_streams(hypotheses: Sequence[str], references: References) -> list[list[str]]:
    """Return the references as one list per set, checked against the hypotheses."""
    if isinstance(hypotheses, str) or isinstance(references, str):
        raise DataError("hypotheses or references are one string; expected a list of lines")
    if not hypotheses or not references:
        raise DataError(
            f"got {len(hypotheses)} hypotheses and {len(references)} references; expected at least one of each"
        )
    if isinstance(references[0], str):
        references = [cast("Sequence[str]", references)]
    for stream in references:
        if isinstance(stream, str):
            raise DataError("references mix lines and lists of lines; expected either")
        if len(stream) != len(hypotheses):
            raise DataError(
                f"got {len(hypotheses)} hypotheses and {len(stream)} references; "
                "expected one reference line for each hypothesis"
            )
    return [list(stream) for stream in references]
