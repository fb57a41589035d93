"""Corpora, sentence splitting, metrics and synthetic tasks. No array library is needed here."""

from __future__ import annotations

from xformer.text.corpus import MAX_CHARACTERS, ParallelCorpus, iter_lines, read_lines, read_parallel, read_text
from xformer.text.demo_tasks import DemoTask, copy_task, numbers_task, reverse_task
from xformer.text.metrics import Score, bleu, chrf, exact_match, rouge, ter
from xformer.text.normalize import normalize_text
from xformer.text.number_words import english, german
from xformer.text.sentences import split_sentences

__all__ = [
    "MAX_CHARACTERS",
    "DemoTask",
    "ParallelCorpus",
    "Score",
    "bleu",
    "chrf",
    "copy_task",
    "english",
    "exact_match",
    "german",
    "iter_lines",
    "normalize_text",
    "numbers_task",
    "read_lines",
    "read_parallel",
    "read_text",
    "reverse_task",
    "rouge",
    "split_sentences",
    "ter",
]
