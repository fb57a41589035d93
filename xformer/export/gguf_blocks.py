"""Quantization to the blocks of GGUF files (ggml-quants.c), in NumPy; `ops.blocks` has the way back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from xformer.threads import parallel_map

_CHUNK = 2**18  # values quantized at a time
_TENTHS = np.arange(-10, 11, dtype=np.float32) / 10


def quantize(x: Any, code: str) -> bytes:
    """Return the bytes of a floating array, whose last axis is a multiple of the block, in a type of GGUF files."""
    num_values, convert = QUANTIZERS[code]
    blocks = np.ascontiguousarray(x, "f4").reshape(-1, num_values)

    def run(start: int) -> bytes:
        with np.errstate(divide="ignore", invalid="ignore"):
            return bytes(np.ascontiguousarray(convert(blocks[start : start + _CHUNK // num_values])).data)

    return b"".join(parallel_map(run, range(0, len(blocks), _CHUNK // num_values)))


def _bfloat16(x: Any) -> Any:
    bits = x.view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 64, rounded).astype("<u2")


def _inverse(x: Any) -> Any:
    return np.where(x == 0, np.float32(0), 1 / x)


def _halves(*scales: Any) -> Any:
    """Return scales, each (blocks, 1), as the bytes of float16 numbers."""
    return np.concatenate(scales, axis=1).astype("<f2").view(np.uint8)


def _extreme(x: Any) -> Any:
    """Return the value of each row that has the largest magnitude."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)


def _joined(values: Any, size: int) -> Any:
    """Return values of 4 bits in pairs: those of a group and of the next one, both of a size, are one byte."""
    groups = values.reshape(len(values), -1, 2, size) & 15
    return (groups[:, :, 0] | groups[:, :, 1] << 4).reshape(len(values), -1)


def _q8_0(x: Any) -> Any:
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    x = x * _inverse(scale)
    floor = np.floor(np.abs(x))  # rounds halves away from zero, as C does
    values = np.copysign(floor + (np.abs(x) - floor >= 0.5), x).astype(np.int8)
    return np.concatenate([_halves(scale), values.view(np.uint8)], axis=1)


def _legacy(x: Any, bits: int, zero: int) -> Any:
    """Quantize to scale * (value - zero), or scale * value + minimum if zero is 0."""
    if zero:
        scale = _extreme(x) / np.float32(-zero)
        head, values = _halves(scale), x.astype("f8") * _inverse(scale) + (zero + 0.5)
    else:
        low = x.min(axis=1, keepdims=True)
        scale = (x.max(axis=1, keepdims=True) - low) / np.float32(2**bits - 1)
        head, values = _halves(scale, low), (x - low) * _inverse(scale) + np.float32(0.5)
    values = np.minimum(values.astype(np.uint8), 2**bits - 1)
    fifth = [np.packbits(values >> 4, axis=1, bitorder="little")] if bits == 5 else []
    return np.concatenate([head, *fifth, _joined(values, 16)], axis=1)


def _k_quants(x: Any, bits: int) -> Any:
    """Quantize 8 groups of 32 values, whose scales and minima have 6 bits."""
    largest = np.float32(2**bits - 1)
    fitted = _fit_with_minimum(np.ascontiguousarray(x.reshape(-1, 32).T), largest, _TENTHS[5 * (bits == 5) :])
    outer = fitted.max(axis=2, keepdims=True) / np.float32(63)
    inner = np.clip(np.rint(fitted * _inverse(outer)), 0, 63).astype(np.uint8)
    scales, minima = outer.astype("<f2").astype("f4") * inner
    values = np.rint((x.reshape(-1, 8, 32) + minima[..., None]) * _inverse(scales)[..., None])
    values = np.clip(values, 0, largest).astype(np.uint8)
    first, last = inner[..., :4], inner[..., 4:]
    packed = [*(first | last >> 4 << 6), last[0] & 15 | last[1] << 4]
    fifth = [np.packbits(values >> 4, axis=1, bitorder="little")[:, 0]] if bits == 5 else []
    return np.concatenate([_halves(*outer), *packed, *fifth, _joined(values, 32)], axis=1)


def _fit_with_minimum(x: Any, largest: Any, steps: Any) -> Any:
    """Return scales and minima, negated, that approximate each column by scale * integer + minimum (<= 0).

    As make_qkx2_quants: of several first guesses, the least squares fit with the smallest weighted error.
    """
    weights = np.sqrt(np.mean(x * x, axis=0)) + np.abs(x)
    low, high = np.minimum(x.min(axis=0), 0), x.max(axis=0)
    sum_w, sum_x = weights.sum(axis=0), (weights * x).sum(axis=0)
    scale = (high - low) / largest
    best = (weights * np.square(np.rint((x - low) * _inverse(scale)) * scale + low - x)).sum(axis=0)
    for step in steps:
        values = np.clip(np.rint((largest + step) * _inverse(high - low) * (x - low)), 0, largest)
        weighted = weights * values
        sum_l, sum_l2, sum_xl = weighted.sum(axis=0), (weighted * values).sum(axis=0), (weighted * x).sum(axis=0)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        minimum = np.minimum((sum_l2 * sum_x - sum_l * sum_xl) / determinant, 0)
        fitted = np.where(minimum < 0, (sum_w * sum_xl - sum_x * sum_l) / determinant, sum_xl / sum_l2)
        error = (weights * np.square(fitted * values + minimum - x)).sum(axis=0)
        is_better = (determinant > 0) & (error < best)
        scale, low, best = (np.where(is_better, *each) for each in ((fitted, scale), (minimum, low), (error, best)))
    return np.stack([scale, -low]).reshape(2, -1, 8)


def _q6_k(x: Any) -> Any:
    """Quantize 16 groups of 16 values, whose scales have 8 bits."""
    fitted = _fit(x.reshape(-1, 16)).reshape(-1, 16)
    largest = _extreme(fitted)
    scales = np.minimum(np.rint(-128 * _inverse(largest) * fitted), 127)
    head = _halves(largest / -128)
    values = np.rint(x.reshape(-1, 16, 16) * _inverse(head.view("<f2").astype("f4") * scales)[..., None])
    values = (np.clip(values, -32, 31) + 32).astype(np.uint8)
    quarters = (values >> 4).reshape(-1, 2, 4, 32)
    high = functools.reduce(np.bitwise_or, (quarters[:, :, i] << 2 * i for i in range(4))).reshape(-1, 64)
    return np.concatenate([_joined(values, 64), high, scales.astype(np.int8).view(np.uint8), head], axis=1)


def _fit(x: Any) -> Any:
    """Return scales that approximate each row by scale * integer from -32 to 31, as make_qx_quants does."""
    inverse, x = _inverse(_extreme(x)[:, 0]), np.ascontiguousarray(x.T)
    scale = best = np.zeros_like(inverse)
    for step in (np.float32(0), *_TENTHS[1:-1]):
        values = np.clip(np.rint(-(32 + step) * inverse * x), -32, 31)
        weighted = x * x * values
        sum_x, sum_2 = (weighted * x).sum(axis=0), (weighted * values).sum(axis=0)
        is_better = (sum_2 > 0) & (sum_x * sum_x > best * sum_2)
        scale = np.where(is_better, sum_x / sum_2, scale)
        best = np.where(is_better, scale * sum_x, best)
    return scale


# {type: (values of a block, function (blocks, values) -> its elements)}
QUANTIZERS: dict[str, tuple[int, Any]] = {
    "F32": (1, lambda x: x.astype("<f4")), "F16": (1, lambda x: x.astype("<f2")), "BF16": (1, _bfloat16),
    "Q8_0": (32, _q8_0), "Q4_0": (32, lambda x: _legacy(x, 4, 8)), "Q4_1": (32, lambda x: _legacy(x, 4, 0)),
    "Q5_0": (32, lambda x: _legacy(x, 5, 16)), "Q5_1": (32, lambda x: _legacy(x, 5, 0)),
    "Q4_K": (256, lambda x: _k_quants(x, 4)), "Q5_K": (256, lambda x: _k_quants(x, 5)), "Q6_K": (256, _q6_k),
}  # fmt: skip
