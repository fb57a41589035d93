"""Arrays for the tests of CuPy kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends import array_namespace

DTYPES = ["float32", "float64", "float16", "bfloat16"]


def normal(*shape: int, seed: int = 0) -> Any:
    """Return normally distributed float64 values."""
    return np.random.default_rng(seed).normal(size=shape)


def _off_by_one(x: Any) -> Any:
    """Copy to memory one element beyond an aligned address."""
    xp = array_namespace(x)
    flat = xp.concat([xp.zeros(1, dtype=x.dtype), xp.reshape(x, (-1,))])
    return xp.reshape(flat[1:], x.shape)


def _every_other(x: Any) -> Any:
    xp = array_namespace(x)
    twice = xp.stack([x, xp.zeros_like(x)], axis=-1)
    return xp.reshape(twice, (*x.shape[:-1], 2 * x.shape[-1]))[..., ::2]


def _columns_first(x: Any) -> Any:
    return array_namespace(x).asfortranarray(x)


# Memory layouts.
LAYOUTS = {
    "plain": lambda x: x,
    "off by one": _off_by_one,
    "every other": _every_other,
    "columns first": _columns_first,
    "reversed": lambda x: array_namespace(x).flip(array_namespace(x).flip(x, axis=0).copy(), axis=0),
}
