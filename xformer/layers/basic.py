"""The layers that others consist of: linear maps, norms and dropout; and initial values of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import numpy as np

from xformer.backends import Array, Device, DType, array_namespace, device, dtype_name, resolve
from xformer.config import check_bool, check_count, check_number
from xformer.errors import ConfigError, ShapeError, check_arguments, describe_type
from xformer.ops.activations import Activation, dropout
from xformer.ops.linear import linear
from xformer.ops.norms import layer_norm, rms_norm
from xformer.ops.weights import InferenceWeight
from xformer.random import Rng, check_rng
from xformer.tree import Module, check_array, is_array

_MAX_SIZE = 2**60  # elements, so that NumPy can address the bytes


class Initializer:
    """Source of the initial parameters of layers.

    Values are drawn on the host, so the same seed gives the same parameters on every backend. Each draw gives new
    values: two layers made with one initializer differ.

    Args:
        xp: Array library, as a module or by name.
        seed: Seed, or an `Rng` to draw from; None makes read-only zeros on NumPy that take no memory, as stand-ins for
            parameters that are loaded.
        dtype: Floating dtype of the parameters; default float32.
        device: Device of the parameters, as the library names it.

    Raises:
        BackendError: If the library, dtype or device is not available.
    """

    @check_arguments(
        scheme="layers choose the scheme; call initializer.xavier_uniform(shape) or initializer.normal(...)"
    )
    def __init__(
        self, xp: Any = "numpy", *, seed: int | Rng | None = 0, dtype: DType | str | None = None, device: Device = None
    ):
        self.xp = resolve(xp)
        self.dtype = self.xp.default_float(dtype)
        self.device = device
        self._rng = seed if seed is None or isinstance(seed, Rng) else Rng(seed).fold_in("parameters")
        self._num_draws = 0

    def xavier_uniform(self, shape: tuple[int, int]) -> Array:
        """Draw uniform values of variance 2 / (fan_in + fan_out) (Glorot and Bengio, 2010).

        Args:
            shape: (fan_in, fan_out).
        """
        return self.uniform(shape, math.sqrt(6.0 / sum(shape)))

    def uniform(self, shape: tuple[int, ...], bound: float) -> Array:
        """Draw uniform values from -bound to bound."""
        return self._draw(shape, lambda rng: rng.uniform(shape, -bound, bound))

    def normal(self, shape: tuple[int, ...], standard_deviation: float) -> Array:
        """Draw normal values with mean zero."""
        return self._draw(shape, lambda rng: rng.normal(shape, standard_deviation))

    # Constants draw nothing, so a layer with another norm, or without biases, leaves all other parameters as they were.

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Return zeros, for biases."""
        return self.full(shape, 0.0)

    def ones(self, shape: tuple[int, ...]) -> Array:
        """Return ones, for the weights of norms."""
        return self.full(shape, 1.0)

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        """Return an array of one value."""
        _check_sizes(shape)
        if self._rng is None:
            if math.prod(shape) > _MAX_SIZE:
                raise ConfigError(f"a parameter has shape {shape}; expected at most {_MAX_SIZE} elements")
            return np.broadcast_to(np.float32(value), shape)
        return self._array(np.full(shape, value))

    def _draw(self, shape: tuple[int, ...], draw: Callable[[Rng], Any]) -> Array:
        _check_sizes(shape)
        self._num_draws += 1
        return self.full(shape, 0.0) if self._rng is None else self._array(draw(self._rng.fold_in(self._num_draws)))

    def _array(self, values: Any) -> Array:
        return self.xp.from_host(values, dtype=self.dtype, device=self.device)


def _check_sizes(shape: tuple[int, ...]) -> None:
    for size in shape:
        check_count(f"a size of a parameter of shape {shape}", size, at_least=0)


Init = Initializer | int | None  # argument `init` of a layer; None is an error


def initializer(init: Init) -> Initializer:
    """Return an initializer; a seed makes a new one on NumPy.

    Raises:
        ConfigError: If `init` is None: equal default seeds would give equal parameters to several layers.
    """
    if init is None:
        hint = "pass a seed, e.g. init=0, another one for each layer, or one Initializer to all layers"
        raise ConfigError(f"init is missing; {hint}")
    return init if isinstance(init, Initializer) else Initializer(seed=init)


# --- Linear maps ------------------------------------------------------------------------------------------------------


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


# --- Normalization of the features of each token ----------------------------------------------------------------------
#
# Every norm accepts float16 and bfloat16 features up to the largest number of the format: rows are scaled down before
# they are squared (see ops/norms.py).


class Norm(Protocol):
    """Protocol of a normalization layer."""

    def __call__(self, x: Array) -> Array:
        """Normalize the last axis of an array of shape (..., features); return the same shape."""
        ...


class LayerNorm(Module):
    """Layer normalization with a learned scale and shift (Ba, Kiros and Hinton, 2016).

    Args:
        features: Size of the last axis.
        epsilon: Added to the (biased) variance.
        bias: Add a learned shift.
        init: An `Initializer`, or a seed for a new one on NumPy; only its library and dtype are used.
    """

    weight: Array
    bias: Array | None
    epsilon: float

    def __init__(self, features: int, *, epsilon: float = 1e-5, bias: bool = True, init: Initializer | int = 0):
        init = initializer(init)
        self.weight = init.ones((features,))
        self.bias = init.zeros((features,)) if check_bool("bias", bias) else None
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """Normalize the last axis.

        Args:
            x: Floating array of shape (..., features); cast to the dtype of the weight.

        Returns:
            Array of the shape of `x`.
        """
        return layer_norm(as_dtype_of(x, self.weight), self.weight, self.bias, epsilon=self.epsilon)


class MaxScaledLayerNorm(LayerNorm, init=False):
    """Layer normalization of rows divided by max |x| + epsilon, so that no row is too large to square.

    Arguments are those of `LayerNorm`.
    """

    def __call__(self, x: Array) -> Array:
        """Normalize the last axis: (..., features) -> the same shape."""
        x = as_dtype_of(x, self.weight)
        xp = array_namespace(x)
        largest = xp.max(xp.abs(x), axis=-1, keepdims=True) + self.epsilon
        scaled = x / as_dtype_of(largest, x)  # NumPy widens bfloat16 plus a Python float to float32
        return layer_norm(scaled, self.weight, self.bias, epsilon=self.epsilon)


class RMSNorm(Module):
    """Root mean square normalization with a learned scale (Zhang and Sennrich, 2019): the mean is not subtracted.

    Args:
        features: Size of the last axis.
        epsilon: Added to the mean square.
        init: An `Initializer`, or a seed for a new one on NumPy; only its library and dtype are used.
    """

    weight: Array
    epsilon: float

    def __init__(self, features: int, *, epsilon: float = 1e-5, init: Initializer | int = 0):
        self.weight = initializer(init).ones((features,))
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """Normalize the last axis: (..., features) -> the same shape."""
        return rms_norm(as_dtype_of(x, self.weight), self.weight, epsilon=self.epsilon)


class Identity(Module):
    """Return the input: a layer in place of a norm, for no norm."""

    def __call__(self, x: Array) -> Array:
        """Return `x`, of any shape."""
        return x


NORMS: dict[str, Callable[..., Norm]] = {"layer": LayerNorm, "max_scaled": MaxScaledLayerNorm, "rms": RMSNorm}


# --- Dropout that is active when, and only when, an Rng is passed -----------------------------------------------------


class Dropout(Module):
    """Zero elements with probability `rate` and scale up the rest (Srivastava et al., 2014).

    There is no training mode: the layer is the identity unless it is called with an `Rng`.

    Args:
        rate: Probability that an element is zeroed, in [0, 1).

    Raises:
        ConfigError: If the rate is not in [0, 1).
    """

    rate: float

    def __init__(self, rate: float):
        check_number("dropout", rate, at_least=0, below=1)
        self.rate = rate

    def __call__(self, x: Array, rng: Rng | None = None) -> Array:
        """Apply dropout.

        Args:
            x: Floating array of any shape.
            rng: Source of the mask, or None for no dropout.

        Returns:
            Array of the shape and dtype of `x`.
        """
        shape = check_array(x, "x")
        if rng is None:
            return x
        mask, keep_probability = self.draw(shape, x, rng)
        return x if mask is None else dropout(x, mask, keep_probability)

    def draw(self, shape: tuple[int, ...], like: Array, rng: Rng | None) -> tuple[Array | None, float]:
        """Draw a mask without applying it.

        Args:
            shape: Shape of the mask.
            like: Array of the library and device.
            rng: Source of the mask, or None for no dropout.

        Returns:
            The boolean mask, True for elements to keep, and the probability of keeping one; (None, 1.0) without
            dropout.

        Raises:
            ConfigError: If rng is neither an Rng nor None.
        """
        if not isinstance(rng, Rng):
            check_rng(rng)
        if rng is None or self.rate == 0.0:
            return None, 1.0
        return rng.bernoulli(1.0 - self.rate, shape, array_namespace(like), device(like))
