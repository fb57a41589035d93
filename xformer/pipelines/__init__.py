"""Pipelines: from text to text."""

from xformer.pipelines.evaluation import EncodedCorpus, ValidationScore
from xformer.pipelines.seq2seq import Output, Result, Summarizer, TextToText, Translator, check_source_lengths
from xformer.pipelines.text_generation import Continuation, TextGenerator
from xformer.pipelines.tokenizers import Tokenizers

__all__ = [
    "Continuation",
    "EncodedCorpus",
    "Output",
    "Result",
    "Summarizer",
    "TextGenerator",
    "TextToText",
    "Tokenizers",
    "Translator",
    "ValidationScore",
    "check_source_lengths",
]
