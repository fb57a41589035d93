"""Scores of translations: BLEU, chrF and exact match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from xformer.errors import DataError
from xformer.text.extras import require

References = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True)
class Score:
    """A corpus score.

    value: 0 to 100, higher is better.
    signature: sacreBLEU's account of how it was computed; scores with other signatures do not compare.
    """

    name: str
    value: float
    signature: str

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


def exact_match(hypotheses: Sequence[str], references: References) -> float:
    """Compute the percentage of hypotheses that equal a reference of theirs, character by character.

    references: one line for each hypothesis, or several such lists, one for each set of references.

    Raises DataError when there is nothing to score or counts differ.
    """
    rows = zip(*_reference_streams(hypotheses, references), strict=True)
    matches = sum(line in row for line, row in zip(hypotheses, rows, strict=True))
    return 100.0 * matches / len(hypotheses)


def _score(metric: Any, name: str, hypotheses: Sequence[str], streams: list[list[str]]) -> Score:
    value = metric.corpus_score(list(hypotheses), streams).score
    # Only now: the signature counts the references that were seen.
    return Score(name, float(value), str(metric.get_signature()))


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
