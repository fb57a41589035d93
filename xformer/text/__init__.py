"""Corpora, sentence splitting and metrics. No array library is needed here."""

from __future__ import annotations

from xformer.text.corpus import MAX_CHARACTERS, ParallelCorpus, iter_lines, read_lines, read_parallel, read_text
from xformer.text.metrics import Score, bleu, chrf, exact_match, rouge, ter
from xformer.text.normalize import normalize_text
from xformer.text.sentences import split_sentences

__all__ = [
    "MAX_CHARACTERS", "ParallelCorpus", "Score", "bleu", "chrf", "exact_match", "iter_lines", "normalize_text",
    "read_lines", "read_parallel", "read_text", "rouge", "split_sentences", "ter",
]  # fmt: skip
