"""Transformers written once, against the Python Array API standard, that run and train on any array library."""

from xformer import kernels, masks
from xformer.autodiff import grad, remat, stop_gradient, value_and_grad, vjp
from xformer.backends import array_namespace
from xformer.generation import GenerationConfig, generate, stream
from xformer.layers import Initializer, MultiHeadAttention
from xformer.models import LanguageModel, LanguageModelConfig, Transformer, TransformerConfig
from xformer.ops import cross_entropy
from xformer.random import Rng
from xformer.threads import num_threads, set_num_threads

__version__ = "0.1.0"

__all__ = [
    "GenerationConfig",
    "Initializer",
    "LanguageModel",
    "LanguageModelConfig",
    "MultiHeadAttention",
    "Rng",
    "Transformer",
    "TransformerConfig",
    "__version__",
    "array_namespace",
    "cross_entropy",
    "generate",
    "grad",
    "kernels",
    "masks",
    "num_threads",
    "remat",
    "set_num_threads",
    "stop_gradient",
    "stream",
    "value_and_grad",
    "vjp",
]
