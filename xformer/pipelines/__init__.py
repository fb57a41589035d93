"""Pipelines: from text to text."""

from xformer.pipelines.base import Output, Pipeline
from xformer.pipelines.evaluation import EncodedCorpus, ValidationScore
from xformer.pipelines.seq2seq import Result, Summarizer, TextToText, Translator, check_source_lengths
from xformer.pipelines.text_generation import TextGenerator
from xformer.pipelines.tokenizers import Tokenizers

__all__ = [
    "EncodedCorpus",
    "Output",
    "Pipeline",
    "Result",
    "Summarizer",
    "TextGenerator",
    "TextToText",
    "Tokenizers",
    "Translator",
    "ValidationScore",
    "check_source_lengths",
]
