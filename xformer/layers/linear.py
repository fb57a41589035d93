"""The affine layer."""

from __future__ import annotations

from typing import ClassVar

from xformer.backends import Array, array_namespace, dtype_name
from xformer.config import check_bool
from xformer.errors import ShapeError, describe_type
from xformer.layers.initializer import Init, initializer
from xformer.ops.activations import Activation
from xformer.ops.linear import linear
from xformer.ops.weights import InferenceWeight
from xformer.tree import Module, is_array


class Linear(Module):
    """Affine map of the features, `x @ weight + bias`.

    The weight is stored (in_features, out_features), the transpose of torch's. Initially it is Xavier-uniform and the
    bias zero.

    Args:
        in_features: Size of the last axis of the input.
        out_features: Size of the last axis of the output.
        bias: Add a learned bias.
        init: Source of the initial parameters, required: an `Initializer`, or a seed for a new one on NumPy. Layers
            with the same seed have equal parameters; one `Initializer` draws different ones for each layer.

    Examples:
        >>> import numpy as np
        >>> layer = Linear(4, 3, init=7)
        >>> layer(np.ones((2, 4), dtype=np.float32)).shape
        (2, 3)
    """

    _is_affine: ClassVar[bool] = True  # so that kernels may compute several at once, as those of experts

    weight: Array | InferenceWeight
    bias: Array | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, init: Init = None):
        init = initializer(init)
        self.weight = init.xavier_uniform((in_features, out_features))
        self.bias = init.zeros((out_features,)) if check_bool("bias", bias) else None

    def __call__(self, x: Array, activation: Activation | None = None) -> Array:
        """Apply the map, and optionally an activation.

        Args:
            x: Floating array of shape (..., in_features); cast to the dtype of the weight.
            activation: Name of a function applied to the result, e.g. "relu".

        Returns:
            Array of shape (..., out_features) in the dtype of the weight.
        """
        return linear(as_dtype_of(x, self.weight), self.weight, self.bias, activation=activation)


def as_dtype_of(x: Array, parameter: Array | InferenceWeight) -> Array:
    """Cast an input to the dtype of a layer's parameters; raise ShapeError unless it is an array of real numbers."""
    if getattr(x, "dtype", None) == parameter.dtype:
        return x
    own = parameter.elements if isinstance(parameter, InferenceWeight) else parameter
    xp, name = array_namespace(x, own), dtype_name(x.dtype) if is_array(x) else describe_type(x)
    if not name.startswith(("float", "bfloat", "int", "uint", "bool")):
        raise ShapeError(f"the input is {name}; expected an array of floating numbers")
    return xp.astype(x, parameter.dtype)
