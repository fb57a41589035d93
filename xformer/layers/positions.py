"""Where a token stands in its sentence."""

from __future__ import annotations

import functools

from xformer.namespace import Array, Device, DType, Namespace, base_namespace, dtype_name, from_host, resolve

_FEWEST_ROWS = 64


@functools.lru_cache(maxsize=16)
def _table(length: int, d_model: int, dtype: str) -> Array:
    """The table on the host, computed in float64 and rounded once."""
    host = resolve("numpy")
    position = host.reshape(host.arange(length, dtype=host.float64), (length, 1))
    even = host.arange(0, d_model, 2, dtype=host.float64)
    angle = position / 10000.0 ** (even / d_model)
    table = host.empty((length, d_model), dtype=host.float64)
    table[:, 0::2] = host.sin(angle)
    table[:, 1::2] = host.cos(angle)[:, : d_model // 2]  # an odd d_model has one sine more than cosines
    table = host.astype(table, getattr(host, dtype))
    table.flags.writeable = False  # every caller gets a view of it
    return table


def sinusoidal(
    length: int, d_model: int, *, start: int = 0, xp: Namespace, dtype: DType, device: Device = None
) -> Array:
    """Sines and cosines of the position, in wavelengths from 2 pi to 10000 * 2 pi (Vaswani et al., 2017, 3.5).

    Returns (length, d_model) for the positions start .. start + length - 1; even features hold sines, odd ones
    cosines.
    """
    # Tables have a power of two of rows, so that growing sentences share a few of them.
    rows = max(_FEWEST_ROWS, 1 << max(start + length - 1, 0).bit_length())
    name = dtype_name(dtype)
    table = _table(rows, d_model, "float32" if name in ("float16", "bfloat16") else name)
    return from_host(base_namespace(xp), table[start : start + length], dtype=dtype, device=device)
