"""Products of small float32 matrices inside compiled kernels, for operands that are in the caches.

A product is computed tile by tile, as in Goto and van de Geijn (2008): a tile of the result stays in registers while a
few rows of the left matrix and a panel of columns of the right one are read. Python cannot express registers, so the
innermost loop is written in LLVM IR.

- A *block* holds the rows of a left matrix, STEP elements apart.
- *Panels* hold a right matrix, COLUMNS columns after the other; the last panel may have fewer.
- Any other matrix is given by an array, the offset of its first element, and the step between its rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numba.types import Array, void

from xformer.ops._numba.compile import inline

_FEATURES = binding.get_host_cpu_features()
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx") else 4  # elements of a vector register
# The sums of a tile, with a row of the right matrix and an element of the left one, fill the 32 or 16 registers.
ROWS, _VECTORS = (8 if _FEATURES.get("avx512f") or _FEATURES.get("neon") else 4), 3
COLUMNS = _VECTORS * LANES
GROUP = 8  # rows of a matrix that are multiplied by a single row at a time
DEPTH = 256  # maximum elements in a row of a block
STEP = DEPTH + LANES  # rows a power of two apart would share cache lines
_CACHE_LINE = 16  # elements

_INT, _VECTOR = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
_BYTES = ir.IntType(8).as_pointer()
_ZEROS, _UNDEFINED = ir.Constant(_VECTOR, [0.0] * LANES), ir.Constant(_VECTOR, ir.Undefined)

# --- LLVM IR ----------------------------------------------------------------------------------------------------------


def _constant(value: Any) -> Any:
    return ir.Constant(_INT, value) if isinstance(value, int) else value


def _lanes(indices: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), indices)


class _Matrix:
    """Rows that begin at an offset into an array, `step` elements apart."""

    def __init__(self, context: Any, builder: Any, array_type: Any, array: Any, offset: Any, step: Any) -> None:
        data = context.make_array(array_type)(context, builder, array).data
        self._builder, self._first, self._step = builder, builder.gep(data, [offset]), _constant(step)

    def pointer(self, row: Any, column: Any) -> Any:
        """Return the pointer to an element."""
        row_offset = self._builder.mul(_constant(row), self._step)
        return self._builder.gep(self._first, [self._builder.add(row_offset, _constant(column))])

    def load(self, row: Any, column: Any) -> Any:
        """Load a vector."""
        return self._builder.load(self._vector_pointer(row, column), align=4)

    def store(self, vector: Any, row: int, column: Any) -> None:
        """Store a vector."""
        self._builder.store(vector, self._vector_pointer(row, column), align=4)

    def prefetch(self, row: Any, column: int) -> None:
        """Fetch a cache line before it is needed."""
        arguments = [_BYTES, *[ir.IntType(32)] * 3]
        function = self._builder.module.declare_intrinsic(
            "llvm.prefetch", [_BYTES], ir.FunctionType(ir.VoidType(), arguments)
        )
        read_high_locality_data = (int_type(value) for int_type, value in zip(arguments[1:], (0, 3, 1), strict=True))
        pointer = self._builder.bitcast(self.pointer(row, column), _BYTES)
        self._builder.call(function, [pointer, *read_high_locality_data])

    def _vector_pointer(self, row: Any, column: Any) -> Any:
        return self._builder.bitcast(self.pointer(row, column), _VECTOR.as_pointer())


def _broadcast(builder: Any, element: Any) -> Any:
    first_lane = builder.insert_element(_UNDEFINED, element, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first_lane, _UNDEFINED, _lanes([0] * LANES))


def _multiply_add(builder: Any) -> Any:
    function_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fmuladd.v{LANES}f32")


def _tile(vectors: int, prefetch: bool = False) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any,
        a: Any, offset_a: Any,
        b: Any, offset_b: Any, step_b: Any,
        out: Any, offset_out: Any, step: Any,
        depth: Any, accumulate: Any,
        bias: Any, offset_bias: Any,
        offset_next: Any,
    ) -> Any:  # fmt: skip
        """Compute out = a b, or out += a b if `accumulate`: a has ROWS rows of a block, b and out `vectors` vectors.

        bias: a vector that is added to every row, unless its offset is negative. offset_next: offset of the tile of b
        that is prefetched meanwhile.
        """

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def matrix(index: int, step: Any) -> _Matrix:
                return _Matrix(context, builder, signature.args[index], values[index], values[index + 1], step)

            matrix_a, matrix_b, matrix_out = matrix(0, STEP), matrix(2, values[4]), matrix(5, values[7])
            next_b = _Matrix(context, builder, signature.args[2], values[2], values[12], values[4])
            positions = [(i, j) for i in range(ROWS) for j in range(vectors)]
            sums = [cgutils.alloca_once(builder, _VECTOR) for _ in positions]  # LLVM keeps them in registers
            fma = _multiply_add(builder)
            for i, j in positions:
                matrix_out.prefetch(i, j * LANES)
            for total in sums:
                builder.store(_ZEROS, total)
            with builder.if_then(builder.icmp_signed(">=", values[11], _constant(0))):
                bias_vectors = [matrix(10, 0).load(0, j * LANES) for j in range(vectors)]
                for (_, j), total in zip(positions, sums, strict=True):
                    builder.store(bias_vectors[j], total)
            with cgutils.for_range(builder, values[8]) as loop:
                b_vectors = [matrix_b.load(loop.index, j * LANES) for j in range(vectors)]
                for j in range(vectors if prefetch else 0):
                    next_b.prefetch(loop.index, j * LANES)
                for i in range(ROWS):
                    a_vector = _broadcast(builder, builder.load(matrix_a.pointer(i, loop.index)))
                    for j, total in enumerate(sums[i * vectors : (i + 1) * vectors]):
                        builder.store(builder.call(fma, [a_vector, b_vectors[j], builder.load(total)]), total)
            with builder.if_then(values[9]):
                for (i, j), total in zip(positions, sums, strict=True):
                    builder.store(builder.fadd(matrix_out.load(i, j * LANES), builder.load(total)), total)
            for (i, j), total in zip(positions, sums, strict=True):
                matrix_out.store(builder.load(total), i, j * LANES)
            return context.get_dummy_value()

        left, right, result = (a, offset_a), (b, offset_b, step_b), (out, offset_out, step)
        return void(*left, *right, *result, depth, accumulate, bias, offset_bias, offset_next), generate

    return tile


def _add_rows(count: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def add_rows(
        typing: Any, a: Any, offset_a: Any, b: Any, offset_b: Any, step_b: Any, out: Any, offset_out: Any, vectors: Any
    ) -> Any:
        """Compute out += a b for `count` elements of a, and `vectors` vectors of each row of b."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            row_a, matrix_b, row_out = (
                _Matrix(context, builder, signature.args[n], values[n], values[n + 1], step)
                for n, step in ((0, 0), (2, values[4]), (5, 0))
            )
            elements = [_broadcast(builder, builder.load(row_a.pointer(0, k))) for k in range(count)]
            with cgutils.for_range(builder, values[7]) as loop:
                column = builder.mul(loop.index, _constant(LANES))
                total = row_out.load(0, column)
                for k, element in enumerate(elements):
                    total = builder.call(_multiply_add(builder), [element, matrix_b.load(k, column), total])
                row_out.store(total, 0, column)
            return context.get_dummy_value()

        return void(a, offset_a, b, offset_b, step_b, out, offset_out, vectors), generate

    return add_rows


def _dot_rows(count: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def dot_rows(
        typing: Any, a: Any, offset_a: Any, b: Any, offset_b: Any, step_b: Any, out: Any, offset_out: Any, vectors: Any
    ) -> Any:
        """Compute the dot products of `vectors` vectors of a with those of `count` rows of b."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            row_a, matrix_b, row_out = (
                _Matrix(context, builder, signature.args[n], values[n], offset, step)
                for n, offset, step in ((0, values[1], 0), (2, values[3], values[4]), (5, values[6], 0))
            )
            sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(count)]
            for total in sums:
                builder.store(_ZEROS, total)
            with cgutils.for_range(builder, values[7]) as loop:
                column = builder.mul(loop.index, _constant(LANES))
                a_vector = row_a.load(0, column)
                for i, total in enumerate(sums):
                    arguments = [a_vector, matrix_b.load(i, column), builder.load(total)]
                    builder.store(builder.call(_multiply_add(builder), arguments), total)
            for i, total in enumerate(sums):
                vector, width = builder.load(total), LANES
                while width > 1:
                    width //= 2
                    rotated = _lanes([(lane + width) % LANES for lane in range(LANES)])
                    vector = builder.fadd(vector, builder.shuffle_vector(vector, _UNDEFINED, rotated))
                builder.store(builder.extract_element(vector, ir.Constant(ir.IntType(32), 0)), row_out.pointer(0, i))
            return context.get_dummy_value()

        return void(a, offset_a, b, offset_b, step_b, out, offset_out, vectors), generate

    return dot_rows


def _square(transposed: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def square(typing: Any, x: Any, offset_x: Any, step_x: Any, y: Any, offset_y: Any, step_y: Any) -> Any:
        """Copy (LANES, LANES) elements, transposed or not."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            source, target = (_Matrix(context, builder, signature.args[n], *values[n : n + 3]) for n in (0, 3))
            rows, half = [source.load(i, 0) for i in range(LANES)], LANES // 2
            # Interleaving the rows i and i + half, log2(LANES) times, transposes the square.
            interleaved = [
                _lanes([n for i in range(half) for n in (first + i, first + i + LANES)]) for first in (0, half)
            ]
            for _ in range(LANES.bit_length() - 1 if transposed else 0):
                pairs = [(rows[i], rows[i + half]) for i in range(half)]
                rows = [builder.shuffle_vector(*pair, lanes) for pair in pairs for lanes in interleaved]
            for i, row in enumerate(rows):
                target.store(row, i, 0)
            return context.get_dummy_value()

        return void(x, offset_x, step_x, y, offset_y, step_y), generate

    return square


@intrinsic  # type: ignore[untyped-decorator]
def memory(typing: Any, x: Any) -> Any:
    """Return a vector that begins with the first element of an array, to index its memory; its size has no meaning."""
    vector = Array(x.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(x)(context, builder, values[0])
        view, size = context.make_array(vector)(context, builder), ir.Constant(_INT, 4)
        length = ir.Constant(_INT, 2**60)  # any index is in bounds
        populate_array(view, data=array.data, shape=(length,), strides=(size,), itemsize=size, meminfo=array.meminfo)
        return impl_ret_borrowed(context, builder, vector, view._getvalue())

    return vector(x), generate


_tile_1, _tile_2, _tile_3 = map(_tile, (1, 2, 3))
_tile_prefetch = _tile(_VECTORS, prefetch=True)
add_rows, add_row = _add_rows(GROUP), _add_rows(1)
dot_rows, dot_row = _dot_rows(GROUP), _dot_rows(1)
_copy_square, _transpose_square = _square(False), _square(True)

# --- inline functions of kernels --------------------------------------------------------------------------------------


@inline
def aligned(count):
    """Allocate `count` elements, aligned to a cache line."""
    memory = np.empty(count + _CACHE_LINE, np.float32)
    first = -memory.ctypes.data // 4 % _CACHE_LINE
    return memory[first : first + count]


@inline
def padded(columns):
    """Round a number of columns up to whole vectors, as in panels."""
    return -(-columns // LANES) * LANES


@inline
def pack(x, i, j, rows, columns, y, offset, step):
    """Copy x[i : i + rows, j : j + columns], whose rows or columns are contiguous, to rows `step` apart in y."""
    row_stride, column_stride = x.strides[0] // 4, x.strides[1] // 4
    vector_rows, vector_columns = rows // LANES * LANES, columns // LANES * LANES
    for m in range(0, vector_rows, LANES):
        for n in range(0, vector_columns, LANES):
            if column_stride == 1:
                _copy_square(x, (i + m) * row_stride + j + n, row_stride, y, offset + m * step + n, step)
            else:
                _transpose_square(x, i + m + (j + n) * column_stride, column_stride, y, offset + m * step + n, step)
    for m in range(rows):
        for n in range(vector_columns if m < vector_rows else 0, columns):
            y[offset + m * step + n] = x[i + m, j + n]


@inline
def pack_panels(x, depth, columns, y):
    """Copy a right matrix, whose rows or columns are contiguous, to panels; the last one is padded with zeros."""
    for n in range(0, columns, COLUMNS):
        width = min(COLUMNS, columns - n)
        step = padded(width)
        pack(x, 0, n, depth, width, y, depth * n, step)
        for k in range(depth if width < step else 0):
            for j in range(width, step):
                y[depth * n + k * step + j] = np.float32(0.0)


@inline
def transpose(x, rows, columns, y):
    """Transpose a block into another; both must have space for whole vectors."""
    for i in range(0, rows, LANES):
        for j in range(0, columns, LANES):
            _transpose_square(x, i * STEP + j, STEP, y, j * STEP + i, STEP)


@inline
def microkernel(vectors, left, right, result, depth, accumulate, bias):
    """Compute out = a b, or out += a b if `accumulate`, for ROWS rows of a block and `vectors` vectors of columns.

    left: (block, offset); right, result: (array, offset, step); bias: (array, offset), a vector that is added to every
    row of the result, unless the offset is negative.
    """
    (a, offset_a), (b, offset_b, step_b), (out, offset, step), (bias_row, offset_bias) = left, right, result, bias
    if vectors == 3:
        _tile_3(a, offset_a, b, offset_b, step_b, out, offset, step, depth, accumulate, bias_row, offset_bias, offset_b)
    elif vectors == 2:
        _tile_2(a, offset_a, b, offset_b, step_b, out, offset, step, depth, accumulate, bias_row, offset_bias, offset_b)
    else:
        _tile_1(a, offset_a, b, offset_b, step_b, out, offset, step, depth, accumulate, bias_row, offset_bias, offset_b)


@inline
def microkernel_prefetch(left, right, result, depth, accumulate, bias, offset_next):
    """Run the microkernel for a whole tile while the tile of the right matrix at `offset_next` is prefetched."""
    (a, offset_a), (b, offset_b, step_b), (out, offset, step), (bias_row, offset_bias) = left, right, result, bias
    _tile_prefetch(
        a, offset_a, b, offset_b, step_b, out, offset, step, depth, accumulate, bias_row, offset_bias, offset_next
    )


@inline
def multiply(a, rows, right, k, depth, n, columns, out, offset, step, accumulate):
    """Compute out = a b, or out += a b if `accumulate`, with b[k : k + depth, n : n + columns] in panels.

    a: a block, whose first column is multiplied by row k. right: (panels, depth, columns) of the whole right matrix; n
    is the first column of a panel. out gets column n at `offset`, and must have space for whole tiles.
    """
    panels, total_depth, total_columns = right
    for j in range(n, n + columns, COLUMNS):
        panel_step = padded(min(COLUMNS, total_columns - j))
        for i in range(0, rows, ROWS):
            offset_out = offset + i * step + j - n
            offset_b = total_depth * j + k * panel_step
            panel = panels, offset_b, panel_step
            result = out, offset_out, step
            microkernel(panel_step // LANES, (a, i * STEP), panel, result, depth, accumulate, (a, -1))
