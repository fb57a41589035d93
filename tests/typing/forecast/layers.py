"""Layers of its own, beside those of xformer."""

from __future__ import annotations

from typing import Any, Final, assert_type

import numpy as np

import xformer as xf
from xformer.layers.transformer import Residual


class Gate(xf.Module):
    """A layer with a parameter of its own; `Final` fields are read-only for type checkers, too."""

    weight: Final[xf.Array]
    maps: tuple[xf.Linear, ...]
    activation: xf.Activation

    def __init__(self, features: int, *, activation: xf.Activation = "silu", init: xf.Initializer | int = 0) -> None:
        init = init if isinstance(init, xf.Initializer) else xf.Initializer("numpy", seed=init)
        self.weight = init.ones((features,))
        self.maps = tuple(xf.Linear(features, features, init=init) for _ in range(2))
        self.activation = activation

    def __call__(self, x: xf.Array) -> xf.Array:
        xp = xf.array_namespace(x)
        assert_type(xp, xf.ArrayNamespace)
        gate, value = (linear(x) for linear in self.maps)
        assert_type(gate, xf.Array)
        assert_type(gate.T, xf.Array)
        assert_type(xp.exp(-gate), xf.Array)
        assert_type(xp.pi, float)
        assert_type(xp.broadcast_shapes(x.shape, (1,)), tuple[int, ...])
        assert_type(xp.can_cast(x, x.dtype), bool)
        largest = xp.max(xp.abs(x), axis=-1, keepdims=True)
        assert_type(largest, xf.Array)
        y: xf.Array = xf.ops.activation(self.activation)(gate) * value * self.weight / (largest + xp.finfo(x.dtype).eps)
        return y


class ScaledNorm(xf.LayerNorm, init=False):
    """A norm with the constructor of xformer's."""

    def __call__(self, x: xf.Array) -> xf.Array:
        y: xf.Array = 0.5 * super().__call__(x)
        return y


class Pair(xf.Module):
    """A module without `__init__`: its fields are the arguments."""

    first: xf.Linear
    second: xf.Linear
    scale: float = 1.0

    def __call__(self, x: xf.Array) -> xf.Array:
        y: xf.Array = self.second(self.first(x)) * self.scale
        return y


def encoder_layer(d_model: int, init: xf.Initializer, norm: xf.Norm | None = None) -> xf.EncoderLayer:
    """Return a layer of parts of xformer."""
    residuals: list[Residual] = [
        xf.PreNorm(norm or xf.layers.MaxScaledLayerNorm(d_model, epsilon=1e-6, init=init), dropout=0.1),
        xf.PostNorm(xf.RMSNorm(d_model, init=init)),
        xf.layers.OutputNorm(ScaledNorm(d_model, bias=False, init=init), scale=0.5),
    ]
    return xf.EncoderLayer(
        xf.MultiHeadAttention(d_model, 2, init=init),
        xf.GatedFeedForward(d_model, 4 * d_model, activation="gelu", init=init),
        residuals[0],
        residuals[-1],
    )


def checked_arrays() -> list[xf.Array]:
    """Arrays of every dtype are arrays for type checkers."""
    arrays: list[xf.Array] = [
        np.ones(2),
        np.ones(2, dtype=np.float32),
        np.ones(2, dtype=np.int64),
        np.ones(2, dtype=bool),
    ]
    return arrays


def move(module: Gate, device: xf.Device = None, dtype: xf.DType | str | None = None) -> Gate:
    """Return a layer with other fields, arrays and parameters."""
    moved = module.to("numpy", device=device, dtype=dtype)
    assert_type(moved, Gate)
    changed = xf.tree.with_fields(moved, activation="relu")
    assert_type(changed, Gate)
    arrays: dict[str, xf.Array] = {name: 2.0 * array for name, array in changed.named_arrays()}
    assert_type(xf.tree.replace(changed, arrays), Gate)
    frozen = xf.freeze(changed, "maps")
    assert_type(frozen, Gate)
    assert_type(xf.freeze((changed, changed)), tuple[Gate, Gate])
    return xf.unfreeze(frozen)


def states(layer: xf.EncoderLayer, x: xf.Array, options: dict[str, Any]) -> xf.Array:
    """Return the states of a layer."""
    y = layer(x, rng=xf.Rng(0), **options)
    assert_type(y, xf.Array)
    return y
