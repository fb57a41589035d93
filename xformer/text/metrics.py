"""Scores of translations and summaries: BLEU, chrF, TER, ROUGE and exact match."""

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
    """A score of a whole set of lines.

    value: 0 to 100, higher is better; an error rate (lower_is_better) begins at 0 and may exceed 100.
    signature: an account of how it was computed; scores with other signatures do not compare.
    """

    name: str
    value: float
    signature: str
    lower_is_better: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f} ({self.signature})"


def bleu(hypotheses: Sequence[str], references: References, *, lowercase: bool = False) -> Score:
    """Compute corpus BLEU (Papineni et al., 2002) as sacreBLEU does (Post, 2018), with its 13a tokenizer.

    references: one line for each hypothesis, or several such lists, one for each set of references.
    lowercase: ignore case; never compare such a score with a cased one.

    Raises DataError when there is nothing to score or counts differ, BackendError without sacrebleu.
    """
    streams = _reference_streams(hypotheses, references)
    return _score(require("sacrebleu").BLEU(lowercase=lowercase, tokenize="13a"), "BLEU", hypotheses, streams)


def chrf(hypotheses: Sequence[str], references: References, *, lowercase: bool = False) -> Score:
    """Compute corpus chrF, the F-score (beta 2) of character 1- to 6-grams (Popović, 2015).

    references: one line for each hypothesis, or several such lists, one for each set of references.

    Raises DataError when there is nothing to score or counts differ, BackendError without sacrebleu.
    """
    streams = _reference_streams(hypotheses, references)
    return _score(require("sacrebleu").CHRF(lowercase=lowercase), "chrF", hypotheses, streams)


def ter(hypotheses: Sequence[str], references: References, *, lowercase: bool = False) -> Score:
    """Compute TER (Snover et al., 2006): edits for each 100 words of reference, a shift of words counting as one.

    Words are what stands between white space. Of several references the nearest counts, and their mean length.

    references: one line for each hypothesis, or several such lists, one for each set of references.
    lowercase: ignore case, as sacreBLEU's own command does; here it counts unless asked for, as in the other scores.

    Raises DataError when there is nothing to score or counts differ, BackendError without sacrebleu.
    """
    streams = _reference_streams(hypotheses, references)
    metric = require("sacrebleu").TER(case_sensitive=not lowercase)
    return _score(metric, "TER", hypotheses, streams, lower_is_better=True)


def rouge(hypotheses: Sequence[str], references: References, *, use_stemmer: bool = False) -> list[Score]:
    """Compute ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004): F1, the mean over items, by the rouge-score package.

    ROUGE-L takes an item as one sequence. Of several references, each of the three scores counts the one that is best
    for it, item by item. The package lower-cases and takes runs of a-z and 0-9 as words, so letters with accents
    separate words, and texts in other scripts score 0.

    references: one line for each hypothesis, or several such lists, one for each set of references.
    use_stemmer: compare the stems of English words (Porter, 1980).

    Raises DataError when there is nothing to score or counts differ, BackendError without rouge-score.
    """
    streams = _reference_streams(hypotheses, references)
    scorer = require("rouge_score.rouge_scorer").RougeScorer(list(_ROUGE_TYPES), use_stemmer=use_stemmer)
    items = []
    for hypothesis, *row in zip(hypotheses, *streams, strict=True):
        scored = [scorer.score(reference, hypothesis) for reference in row]
        items.append({kind: max(each[kind].fmeasure for each in scored) for kind in _ROUGE_TYPES})
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
        Score(name, 100.0 * statistics.fmean(item[kind] for item in items), signature)
        for kind, name in _ROUGE_TYPES.items()
    ]


def exact_match(hypotheses: Sequence[str], references: References) -> float:
    """Compute the percentage of hypotheses that equal a reference of theirs, character by character.

    references: one line for each hypothesis, or several such lists, one for each set of references.

    Raises DataError when there is nothing to score or counts differ.
    """
    rows = zip(*_reference_streams(hypotheses, references), strict=True)
    matches = sum(line in row for line, row in zip(hypotheses, rows, strict=True))
    return 100.0 * matches / len(hypotheses)


def _score(
    metric: Any, name: str, hypotheses: Sequence[str], streams: list[list[str]], *, lower_is_better: bool = False
) -> Score:
    value = metric.corpus_score(list(hypotheses), streams).score
    # Only now: the signature counts the references that were seen.
    return Score(name, float(value), str(metric.get_signature()), lower_is_better)


def _reference_streams(hypotheses: Sequence[str], references: References) -> list[list[str]]:
    """Return the references as one list for each set, checked against the hypotheses."""
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
            raise DataError("references mix lines and lists of lines; expected one kind")
        if len(stream) != len(hypotheses):
            raise DataError(
                f"got {len(hypotheses)} hypotheses and {len(stream)} references; "
                "expected one reference line for each hypothesis"
            )
    return [list(stream) for stream in references]
