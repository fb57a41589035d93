"""Decoding: from a trained model to tokens."""

from xformer.generation.alignment import alignments
from xformer.generation.config import DecodingOptions
from xformer.generation.generate import decode, generate
from xformer.generation.greedy import greedy
from xformer.generation.hypothesis import Hypothesis, length_penalty
from xformer.generation.lengths import default_limit

__all__ = [
    "DecodingOptions",
    "Hypothesis",
    "alignments",
    "decode",
    "default_limit",
    "generate",
    "greedy",
    "length_penalty",
]
