"""Transformers written once, against the Python Array API standard, that run and train on any array library."""

from xformer import kernels, masks
from xformer.autodiff import checkpoint, grad, stop_gradient, value_and_grad, vjp
from xformer.host import num_threads, set_num_threads
from xformer.layers import Initializer, MultiHeadAttention
from xformer.models import LanguageModel, LanguageModelConfig, Transformer, TransformerConfig
from xformer.namespace import array_namespace
from xformer.ops import cross_entropy
from xformer.random import Rng

__version__ = "0.1.0"

__all__ = [
    "Initializer",
    "LanguageModel",
    "LanguageModelConfig",
    "MultiHeadAttention",
    "Rng",
    "Transformer",
    "TransformerConfig",
    "__version__",
    "array_namespace",
    "checkpoint",
    "cross_entropy",
    "grad",
    "kernels",
    "masks",
    "num_threads",
    "set_num_threads",
    "stop_gradient",
    "value_and_grad",
    "vjp",
]
