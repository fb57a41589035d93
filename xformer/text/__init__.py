"""Text: parallel corpora, tokenizers, scores, and made-up tasks. No array library is needed here."""

from __future__ import annotations

from xformer.text.corpus import (
    MAX_CHARACTERS,
    ParallelCorpus,
    check_lengths,
    drop_long,
    iter_lines,
    read_lines,
    read_parallel,
)
from xformer.text.demo_tasks import DemoTask, copy_task, numbers_task, reverse_task
from xformer.text.metrics import Score, bleu, chrf, exact_match
from xformer.text.number_words import english, german
from xformer.text.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, UNK_ID, Tokenizer

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "MAX_CHARACTERS",
    "PAD_ID",
    "SPECIAL_TOKENS",
    "UNK_ID",
    "DemoTask",
    "ParallelCorpus",
    "Score",
    "Tokenizer",
    "bleu",
    "check_lengths",
    "chrf",
    "copy_task",
    "drop_long",
    "english",
    "exact_match",
    "german",
    "iter_lines",
    "numbers_task",
    "read_lines",
    "read_parallel",
    "reverse_task",
]
