"""Pipelines: from text to text, vectors or classes, and from speech to text."""

from xformer.pipelines.attention import Attention, AttentionMap, show_attention
from xformer.pipelines.base import GenerationPipeline, Pipeline
from xformer.pipelines.corpus import ChunkFunction, ChunkOutput, Corpus, CorpusProgress, process_corpus
from xformer.pipelines.encoders import Classifier, Embedder, Prediction, Ranked, Reranker
from xformer.pipelines.loading import model_digests, pipeline_class
from xformer.pipelines.output_text import Output, Token
from xformer.pipelines.seq2seq import Result, Summarizer, TextToText, Translator, check_source_lengths
from xformer.pipelines.text_generation import Prompt, TextGenerator
from xformer.pipelines.tokenizers import Tokenizers
from xformer.pipelines.transcription import Transcriber
from xformer.pipelines.worker_processes import WorkerProcesses

__all__ = [
    "Attention", "AttentionMap", "ChunkFunction", "ChunkOutput", "Classifier", "Corpus", "CorpusProgress",
    "Embedder", "GenerationPipeline", "Output", "Pipeline", "Prediction", "Prompt", "Ranked", "Reranker", "Result",
    "Summarizer", "TextGenerator", "TextToText", "Token", "Tokenizers", "Transcriber", "Translator",
    "WorkerProcesses", "check_source_lengths", "model_digests", "pipeline_class", "process_corpus",
    "show_attention",
]  # fmt: skip
