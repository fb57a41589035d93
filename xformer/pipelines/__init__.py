"""Whole systems: from text to text."""

from xformer.pipelines.language_model import Continuation, TextGenerator
from xformer.pipelines.requests import GenerationRequest
from xformer.pipelines.text_to_text import Output, Result, Summarizer, TextToText, Translator, check_source_lengths
from xformer.pipelines.tokenizers import Tokenizers
from xformer.pipelines.training import EncodedCorpus, ValidationScore

__all__ = [
    "Continuation",
    "EncodedCorpus",
    "GenerationRequest",
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
