"""Generation: from a model and its inputs to outputs."""

from xformer.generation.config import GenerationConfig, default_max_length
from xformer.generation.generate import generate, stream
from xformer.generation.grammar import Grammar, token_bytes
from xformer.generation.prefix_cache import PrefixCache
from xformer.generation.pretrained import PretrainedGeneration, read_generation
from xformer.generation.processors import (
    LogitsProcessor,
    Rows,
    StoppingCriteria,
    StopSequences,
    TokenAlternatives,
    TokenRecord,
)
from xformer.generation.results import BeamCandidate, BeamHistory, Hypothesis, alignments, length_penalty

__all__ = [
    "BeamCandidate", "BeamHistory", "GenerationConfig", "Grammar", "Hypothesis", "LogitsProcessor", "PrefixCache",
    "PretrainedGeneration", "Rows", "StopSequences", "StoppingCriteria", "TokenAlternatives", "TokenRecord",
    "alignments", "default_max_length", "generate", "length_penalty", "read_generation", "stream", "token_bytes",
]  # fmt: skip
