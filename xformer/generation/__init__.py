"""Generation: from a model and its inputs to outputs."""

from xformer.generation.alignment import alignments
from xformer.generation.beam_history import BeamCandidate, BeamHistory
from xformer.generation.config import GenerationConfig
from xformer.generation.generate import generate, stream
from xformer.generation.hypothesis import Hypothesis, length_penalty
from xformer.generation.lengths import default_max_length
from xformer.generation.logits_processors import Histories, LogitsProcessor
from xformer.generation.pretrained import PretrainedGeneration, read_generation
from xformer.generation.stopping_criteria import StoppingCriteria, StopSequences
from xformer.generation.token_record import TokenAlternatives, TokenRecord

__all__ = [
    "BeamCandidate",
    "BeamHistory",
    "GenerationConfig",
    "Histories",
    "Hypothesis",
    "LogitsProcessor",
    "PretrainedGeneration",
    "StopSequences",
    "StoppingCriteria",
    "TokenAlternatives",
    "TokenRecord",
    "alignments",
    "default_max_length",
    "generate",
    "length_penalty",
    "read_generation",
    "stream",
]
