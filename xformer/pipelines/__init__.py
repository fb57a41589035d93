"""Pipelines: from text to text, vectors or classes, and from speech to text."""

from xformer.pipelines.attention import Attention, AttentionMap, show_attention
from xformer.pipelines.base import Output, Pipeline
from xformer.pipelines.encoders import Classifier, Embedder, Prediction
from xformer.pipelines.evaluation import EncodedCorpus, ValidationScore
from xformer.pipelines.loading import pipeline_class
from xformer.pipelines.seq2seq import Result, Summarizer, TextToText, Translator, check_source_lengths
from xformer.pipelines.text_generation import Prompt, TextGenerator
from xformer.pipelines.tokenizers import Tokenizers
from xformer.pipelines.transcription import Transcriber

__all__ = [
    "Attention",
    "AttentionMap",
    "Classifier",
    "Embedder",
    "EncodedCorpus",
    "Output",
    "Pipeline",
    "Prediction",
    "Prompt",
    "Result",
    "Summarizer",
    "TextGenerator",
    "TextToText",
    "Tokenizers",
    "Transcriber",
    "Translator",
    "ValidationScore",
    "check_source_lengths",
    "pipeline_class",
    "show_attention",
]
