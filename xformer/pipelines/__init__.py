"""Pipelines: from text to text, vectors or classes, from speech to text, and from images to classes."""

from xformer.pipelines.attention import Attention, AttentionMap, show_attention
from xformer.pipelines.base import GenerationPipeline, Pipeline
from xformer.pipelines.chat import encode_conversation
from xformer.pipelines.corpus import ChunkFunction, ChunkOutput, Corpus, CorpusProgress, process_corpus
from xformer.pipelines.encoders import Classifier, Embedder, Prediction, Ranked, Reranker
from xformer.pipelines.images import ImageClassifier, ZeroShotImageClassifier
from xformer.pipelines.loading import model_digests, pipeline_class
from xformer.pipelines.options import PromptArguments, SearchArguments, SourceArguments, SpeechOptions
from xformer.pipelines.output_text import Output, Token
from xformer.pipelines.sentence_transformers import Dense
from xformer.pipelines.seq2seq import Result, Summarizer, TextToText, Translator, check_source_lengths
from xformer.pipelines.text_generation import Prompt, TextGenerator
from xformer.pipelines.tokenizers import Tokenizers
from xformer.pipelines.transcript import Segment, Transcription, Word
from xformer.pipelines.transcription import Transcriber
from xformer.pipelines.worker_processes import WorkerProcesses

__all__ = [
    "Attention", "AttentionMap", "ChunkFunction", "ChunkOutput", "Classifier", "Corpus", "CorpusProgress", "Dense",
    "Embedder", "GenerationPipeline", "ImageClassifier", "Output", "Pipeline", "Prediction", "Prompt",
    "PromptArguments", "Ranked", "Reranker", "Result", "SearchArguments", "Segment", "SourceArguments", "SpeechOptions",
    "Summarizer", "TextGenerator", "TextToText", "Token", "Tokenizers", "Transcriber", "Transcription", "Translator",
    "Word", "WorkerProcesses", "ZeroShotImageClassifier", "check_source_lengths", "encode_conversation",
    "model_digests", "pipeline_class", "process_corpus", "show_attention",
]  # fmt: skip
