"""The operations of layers: portable definitions with their VJPs, which kernels may replace.

`explain(lambda: model(x))` lists which kernel runs each operation, and why others do not.
"""

from xformer.backends.library import on_load as _on_load
from xformer.errors import check_arguments as _check_arguments
from xformer.ops.activations import activation, dropout, gelu_tanh, quick_gelu, relu, relu_squared, silu
from xformer.ops.activations import gelu as _gelu
from xformer.ops.attention import attention as _attention
from xformer.ops.attention import attention_weights
from xformer.ops.blocks import BlockWeight, PackedBlocks
from xformer.ops.decoding import logsumexp, top_k
from xformer.ops.embedding import embedding, rotate
from xformer.ops.experts import apply_experts
from xformer.ops.linear import linear, project_heads
from xformer.ops.norms import layer_norm as _layer_norm
from xformer.ops.norms import rms_norm as _rms_norm
from xformer.ops.operation import Kernel, Operation, explain, register
from xformer.ops.operation import load_with_library as _load_with_library
from xformer.ops.optimizers import adafactor, adam, cast, muon, sgd, squared_norm
from xformer.ops.softmax import cross_entropy as _cross_entropy
from xformer.ops.softmax import softmax as _softmax
from xformer.ops.weights import PackedWeight, QuantizedWeight

__all__ = [
    "BlockWeight", "Kernel", "Operation", "PackedBlocks", "PackedWeight", "QuantizedWeight", "activation", "adafactor",
    "adam", "apply_experts", "attention", "attention_weights", "cast", "cross_entropy", "dropout", "embedding",
    "explain", "gelu", "gelu_tanh", "layer_norm", "linear", "logsumexp", "muon", "project_heads", "quick_gelu",
    "register", "relu", "relu_squared", "rms_norm", "rotate", "sgd", "silu", "softmax", "squared_norm", "top_k",
]  # fmt: skip

# Only programs that use the package get hints for unknown arguments: layers call the functions themselves.
_LAST_AXIS = "the softmax is over the last axis"
attention = _check_arguments()(_attention)
cross_entropy = _check_arguments(reduction="each label has its own loss; use xp.sum or xp.mean")(_cross_entropy)
gelu = _check_arguments(approximate="for the tanh approximation, use gelu_tanh")(_gelu)
layer_norm = _check_arguments()(_layer_norm)
rms_norm = _check_arguments()(_rms_norm)
softmax = _check_arguments(dim=_LAST_AXIS, axis=_LAST_AXIS)(_softmax)

_on_load(_load_with_library)  # after all operations, since the program may have loaded libraries before this package
