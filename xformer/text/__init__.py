"""Corpora, sentence splitting, tokenizers, metrics and synthetic tasks. No array library is needed here."""

from __future__ import annotations

from xformer.text.corpus import (
    MAX_CHARACTERS,
    ParallelCorpus,
    iter_lines,
    read_lines,
    read_parallel,
    read_text,
)
from xformer.text.demo_tasks import DemoTask, copy_task, numbers_task, reverse_task
from xformer.text.loading import load_tokenizer
from xformer.text.metrics import Score, bleu, chrf, exact_match, rouge, ter
from xformer.text.normalize import normalize_text
from xformer.text.number_words import english, german
from xformer.text.pretrained import PretrainedTokenizer
from xformer.text.sentences import split_sentences
from xformer.text.streaming import DecodeStream
from xformer.text.tokenizer import Tokenizer
from xformer.text.tokenizer_models import BOS_ID, EOS_ID, PAD_ID, SEPARATOR, SPECIAL_TOKENS, UNK_ID

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "MAX_CHARACTERS",
    "PAD_ID",
    "SEPARATOR",
    "SPECIAL_TOKENS",
    "UNK_ID",
    "DecodeStream",
    "DemoTask",
    "ParallelCorpus",
    "PretrainedTokenizer",
    "Score",
    "Tokenizer",
    "bleu",
    "chrf",
    "copy_task",
    "english",
    "exact_match",
    "german",
    "iter_lines",
    "load_tokenizer",
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
