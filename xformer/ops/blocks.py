"""Weights in the quantized blocks of GGUF files, and linear maps with them, whose inputs have derivatives.

The formats are those of ggml (ggml-common.h, ggml-quants.c). A block has one or two scales in float16, and 32 or 256
values of 4 to 8 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import Array, array_namespace, device
from xformer.ops.operation import Operation
from xformer.ops.weights import InferenceWeight, padded_to, rounded, table_rows

_CHUNK = 2**18  # values dequantized at a time, which bounds the memory


class BlockWeight(InferenceWeight):
    """A matrix in the quantized blocks of a GGUF file, which linear maps and embeddings take as their weight.

    The rows are the output features of a linear map and the tokens of an embedding. Use `BlockWeight.of` to make one.

    Attributes:
        blocks: Array of shape (rows, blocks of a row, bytes of a block), uint8. The number of bytes determines the
            format.
        is_transposed: The matrix is the transpose, (columns, rows).
    """

    _elements = "blocks"
    is_packed = True

    blocks: Array
    is_transposed: bool

    @classmethod
    def of(cls, matrix: Any, shape: tuple[int, ...]) -> BlockWeight:
        """Return the weight of a matrix of blocks; its memory is used if its rows are contiguous.

        Args:
            matrix: NumPy array of shape (rows, blocks of a row) or its transpose, whose elements are blocks (dtype
                void).
            shape: The expected shape, which tells the rows from the columns.
        """
        num_bytes = matrix.dtype.itemsize
        is_transposed = matrix.shape[0] * _FORMATS[num_bytes].num_values == shape[0] or matrix.shape[1] == shape[1]
        rows = matrix.T if is_transposed else matrix
        return cls(np.ascontiguousarray(rows).view(np.uint8).reshape(*rows.shape, num_bytes), is_transposed)

    @property
    def dtype(self) -> Any:
        """float32, in which results are computed."""
        return array_namespace(self.blocks).float32

    def unpack(self) -> Any:
        """Return the matrix as a float32 array."""
        return self.dequantize()

    def _table_shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], num_columns(self.blocks)

    def _table(self) -> Any:
        return dequantize(self.blocks)

    def _product(self, rows: Array, bias: Array | None) -> Any:
        return _linear(rows, self.blocks, bias)

    def _take(self, indices: Array) -> Any:
        return dequantize(array_namespace(self.blocks, indices).take(self.blocks, indices, axis=0))


STRIP, ROUNDED = 16, 32  # as in native/src/blocks.cpp: blocks side by side; elements of a row of x with one scale


class PackedBlocks(BlockWeight):
    """A matrix in strips of 16 rows of blocks, by which inputs are multiplied after rounding them to int8.

    The scale of 32 inputs is their largest magnitude divided by 127. Use `PackedBlocks.pack` to make one.

    Attributes:
        blocks: Array of shape (strips, blocks of a row, bytes of 16 blocks), uint8, with zeros after the last row.
            Of 16 blocks, a unit of each is stored, then the next one: a float16, or four bytes.
        rows: Number of rows.
    """

    rows: int

    @classmethod
    def pack(cls, weight: BlockWeight) -> PackedBlocks:
        """Copy the blocks of a matrix to strips."""
        padded = padded_to(weight.blocks, 0, STRIP)
        xp, (rows, count, num_bytes) = array_namespace(padded), padded.shape
        strips = xp.permute_dims(xp.reshape(padded, (rows // STRIP, STRIP, count, num_bytes)), (0, 2, 1, 3))
        strips = xp.reshape(strips, (rows // STRIP, count, STRIP * num_bytes))
        return cls(_ordered(strips, _order(num_bytes)[0]), weight.is_transposed, weight.blocks.shape[0])

    def _table_shape(self) -> tuple[int, int]:
        return self.rows, self.blocks.shape[1] * _FORMATS[self.blocks.shape[2] // STRIP].num_values

    def _table(self) -> Any:
        return dequantize(_unpacked(self.blocks)[: self.rows, ...])

    def _product(self, rows: Array, bias: Array | None) -> Any:
        return _rounded_linear(rows, self.blocks, bias, columns=self.rows)

    def _take(self, indices: Array) -> Any:
        xp, (_, count, size) = array_namespace(self.blocks, indices), self.blocks.shape
        options = {"dtype": xp.index_dtype, "device": device(indices)}
        indices = xp.astype(indices, xp.index_dtype, copy=False)
        table = xp.from_host(_order(size // STRIP)[1].reshape(STRIP, -1), **options)  # of the bytes of 16 blocks
        places = (indices // STRIP * (count * size))[:, None] + size * xp.arange(count, **options)
        places = places[:, :, None] + xp.take(table, indices % STRIP, axis=0)[:, None, :]
        taken = xp.take(xp.reshape(self.blocks, (-1,)), xp.reshape(places, (-1,)), axis=0)
        return dequantize(xp.reshape(taken, places.shape))


@functools.cache
def _order(num_bytes: int) -> tuple[Any, Any]:
    """Return the position in 16 blocks of each byte of a strip, and the inverse; one end of a block is float16."""
    places, split = np.arange(STRIP * num_bytes).reshape(STRIP, num_bytes), 4 - num_bytes % 4
    ends = ((0, 208, 4), (208, 210, 2)) if num_bytes == 210 else ((0, split, 2), (split, num_bytes, 4))
    units = (places[:, start:end].reshape(STRIP, -1, size).swapaxes(0, 1) for start, end, size in ends)
    order = np.concatenate([each.ravel() for each in units])
    return order, np.argsort(order)


def _ordered(strips: Any, order: Any) -> Any:
    """Return bytes of 16 blocks each in another order."""
    xp = array_namespace(strips)
    return xp.take(strips, xp.from_host(order, dtype=xp.index_dtype, device=device(strips)), axis=2)


def _unpacked(strips: Array) -> Any:
    """Return strips as blocks (rows, blocks of a row, bytes), with those after the last row."""
    xp, (num, count, size) = array_namespace(strips), strips.shape
    blocks = xp.reshape(_ordered(strips, _order(size // STRIP)[1]), (num, count, STRIP, size // STRIP))
    return xp.reshape(xp.permute_dims(blocks, (0, 2, 1, 3)), (num * STRIP, count, size // STRIP))


def num_columns(blocks: Array) -> int:
    """Return the number of values in a row of blocks."""
    return int(blocks.shape[1]) * _FORMATS[blocks.shape[2]].num_values


# --- formats ----------------------------------------------------------------------------------------------------------


class _Format(NamedTuple):
    """A format of blocks.

    Attributes:
        num_values: Values of a block.
        dequantize: (xp, blocks) -> values, in arrays of any number of leading axes.
    """

    num_values: int
    dequantize: Callable[[Any, Array], Any]


def _half(xp: Any, blocks: Any, start: int) -> Any:
    """Return the float16 in two bytes of each block as float32, with an axis of length 1."""
    table = xp.from_host(_halves(), device=device(blocks))
    low, high = (xp.astype(blocks[..., i], xp.index_dtype) for i in (start, start + 1))
    numbers = xp.reshape(low + 256 * high, (-1,))
    return xp.reshape(xp.take(table, numbers, axis=0), (*blocks.shape[:-1], 1))


@functools.cache
def _halves() -> Any:
    """Return all float16 numbers by their bits."""
    return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _split(x: Any, *shape: int) -> Any:
    """Split the last axis."""
    return array_namespace(x).reshape(x, (*x.shape[:-1], *shape))


def _shifted(xp: Any, x: Any, *steps: int) -> Any:
    """Return x, of shape (..., n), shifted right by each step: (..., steps, n)."""
    return x[..., None, :] >> xp.asarray(steps, dtype=xp.uint8, device=device(x))[:, None]


def _signed(xp: Any, x: Any) -> Any:
    """Return bytes as float32 numbers from -128 to 127."""
    x = xp.astype(x, xp.float32)
    return xp.where(x > 127.0, x - 256.0, x)


def _legacy(xp: Any, blocks: Any, *, bits: int, zero: int) -> Any:
    """Return scale * (value - zero), or scale * value + minimum; a fifth bit of all values follows the scales."""
    start = 2 if zero else 4
    values = xp.reshape(_shifted(xp, blocks[..., -16:], 0, 4) & 15, (*blocks.shape[:-1], 32))
    if bits == 5:
        high = blocks[..., start : start + 4, None] >> xp.arange(8, dtype=xp.uint8, device=device(blocks))
        values = values | xp.reshape(high & 1, values.shape) << 4
    scaled = _half(xp, blocks, 0) * (xp.astype(values, xp.float32) - zero)
    return scaled if zero else scaled + _half(xp, blocks, 2)


def _q8_0(xp: Any, blocks: Any) -> Any:
    return _half(xp, blocks, 0) * _signed(xp, blocks[..., 2:])


def _k_quants(xp: Any, blocks: Any, *, bits: int) -> Any:
    """Return the values of 8 groups, whose scales and minima have 6 bits."""
    first, second, third = (blocks[..., i : i + 4] for i in (4, 8, 12))
    scales = xp.concat([first & 63, (third & 15) | first >> 6 << 4], axis=-1)
    minima = xp.concat([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    values = _shifted(xp, _split(blocks[..., -128:], 4, 32), 0, 4) & 15
    values = xp.reshape(values, (*blocks.shape[:-1], 8, 32))
    if bits == 5:
        values = values | (_shifted(xp, blocks[..., 16:48], *range(8)) & 1) << 4
    return _of_groups(xp, _half(xp, blocks, 0), scales, values, _half(xp, blocks, 2), minima)


def _q2_k(xp: Any, blocks: Any) -> Any:
    """Return the values of 16 groups, whose scales and minima have 4 bits."""
    values = _shifted(xp, _split(blocks[..., 16:80], 2, 32), 0, 2, 4, 6) & 3
    scales, values = blocks[..., :16], xp.reshape(values, (*blocks.shape[:-1], 16, 16))
    return _of_groups(xp, _half(xp, blocks, 80), scales & 15, values, _half(xp, blocks, 82), scales >> 4)


def _of_groups(xp: Any, scale: Any, scales: Any, values: Any, minimum: Any, minima: Any) -> Any:
    """Return scale * scales * values - minimum * minima for integers of each group."""
    scales, minima, values = (xp.astype(x, xp.float32) for x in (scales, minima, values))
    scaled = (scale * scales)[..., None] * values - (minimum * minima)[..., None]
    return xp.reshape(scaled, (*scales.shape[:-1], 256))


def _q6_k(xp: Any, blocks: Any) -> Any:
    """Return the values of 16 groups, whose scales have 8 bits."""
    shape = (*blocks.shape[:-1], 16, 16)
    low = xp.reshape(_shifted(xp, _split(blocks[..., :128], 2, 64), 0, 4) & 15, shape)
    high = xp.reshape(_shifted(xp, _split(blocks[..., 128:192], 2, 32), 0, 2, 4, 6) & 3, shape)
    scales = _half(xp, blocks, 208) * _signed(xp, blocks[..., 192:208])
    scaled = scales[..., None] * (xp.astype(low | high << 4, xp.float32) - 32)
    return xp.reshape(scaled, (*blocks.shape[:-1], 256))


# By the bytes of a block: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, and Q2_K, which has no compiled products.
_FORMATS = {
    18: _Format(32, functools.partial(_legacy, bits=4, zero=8)),
    20: _Format(32, functools.partial(_legacy, bits=4, zero=0)),
    22: _Format(32, functools.partial(_legacy, bits=5, zero=16)),
    24: _Format(32, functools.partial(_legacy, bits=5, zero=0)),
    34: _Format(32, _q8_0),
    144: _Format(256, functools.partial(_k_quants, bits=4)),
    176: _Format(256, functools.partial(_k_quants, bits=5)),
    210: _Format(256, _q6_k),
    84: _Format(256, _q2_k),
}


# --- operations -------------------------------------------------------------------------------------------------------


def _chunks(blocks: Any) -> Any:
    """Yield the values of some rows of blocks at a time; at least once."""
    xp, (rows, _, num_bytes), columns = array_namespace(blocks), blocks.shape, num_columns(blocks)
    step = max(1, _CHUNK // max(1, columns))
    for i in range(0, max(1, rows), step):
        values = _FORMATS[num_bytes].dequantize(xp, blocks[i : min(i + step, rows), ...])
        yield xp.reshape(values, (values.shape[0], columns))


def _linear_forward(x: Array, blocks: Array, bias: Array | None, *, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(x, blocks)
    matrices = (xp.matrix_transpose(xp.astype(values, x.dtype, copy=False)) for values in _chunks(blocks))
    parts = [xp.matmul(x, matrix) for matrix in matrices]
    y = xp.concat(parts, axis=1)
    return y if bias is None else y + bias, blocks


def _linear_vjp(g: Array, blocks: Array, needs: Any) -> tuple[Any, ...]:
    """Return the cotangents of x and the bias; blocks are constants."""
    xp, dx = array_namespace(g), None
    for rows in table_rows(blocks.shape[0], num_columns(blocks)) if needs[0] else ():
        part = xp.matmul(g[:, rows], xp.astype(dequantize(blocks[rows, ...]), g.dtype, copy=False))
        dx = part if dx is None else dx + part
    return dx, None, xp.sum(g, axis=0) if needs[2] else None


_IS_FORMAT = {f"blocks of {', '.join(map(str, _FORMATS))} bytes": lambda sizes: sizes["bytes"] in _FORMATS}

# The values of quantized blocks, float32. Without a derivative: blocks are constants.
dequantize = Operation(
    "dequantize",
    "blocks: (rows, blocks, bytes) int -> (rows, columns)",
    lambda blocks, *, save: (array_namespace(blocks).concat(list(_chunks(blocks)), axis=0), None),
    None,
    conditions=_IS_FORMAT,
)
_linear = Operation(
    "block_linear",
    "x: (rows, in_features) float, blocks: (out_features, blocks, bytes) int, bias?: (out_features) float "
    "-> (rows, out_features)",
    _linear_forward,
    _linear_vjp,
    conditions=_IS_FORMAT
    | {
        "rows of in_features values": lambda sizes: (
            sizes["blocks"] * _FORMATS[sizes["bytes"]].num_values == sizes["in_features"]
        )
    },
)
_rounded_linear = Operation(
    "rounded_block_linear",
    "x: (rows, in_features) float, strips: (strips, blocks, bytes) int, bias?: (out_features) float "
    "-> (rows, out_features)",
    lambda x, strips, bias, *, columns, save: _linear_forward(
        rounded(x, ROUNDED), _unpacked(strips)[:columns, ...], bias, save=save
    ),
    None,
)
