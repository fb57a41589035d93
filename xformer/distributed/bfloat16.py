"""Conversion of float32 arrays to the bits of bfloat16 and back, for NumPy and CuPy."""

from __future__ import annotations

from typing import Any

from xformer.backends import array_namespace, backend_name

_BLOCK = 2**15  # elements that NumPy converts at a time, in the cache
_QUIET_NAN = 0x7FC0


def to_bits(x: Any) -> Any:
    """Round a contiguous float32 array to bfloat16, to the nearest even; the bits are uint16."""
    return _in_blocks(_round, x, "uint16")


def from_bits(bits: Any) -> Any:
    """Return the float32 array of contiguous bfloat16 bits."""
    return _in_blocks(_expand, bits, "float32")


def _round(x: Any) -> Any:
    xp = array_namespace(x)
    bits = x.view(xp.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return xp.where(xp.isnan(x), _QUIET_NAN, rounded)


def _expand(bits: Any) -> Any:
    xp = array_namespace(bits)
    return (xp.astype(bits, xp.uint32) << 16).view(xp.float32)


def _in_blocks(function: Any, x: Any, dtype: str) -> Any:
    xp = array_namespace(x)
    out = xp.empty(x.shape, dtype=getattr(xp, dtype))
    source, target = x.reshape(-1), out.reshape(-1)
    step = _BLOCK if backend_name(xp) == "numpy" else max(1, source.size)
    for start in range(0, source.size, step):
        target[start : start + step] = function(source[start : start + step])
    return out
