"""Products of small float32 matrices inside compiled loops, for what is in the caches.

A product is made tile by tile, as Goto and van de Geijn (2008) do it: a tile of the result stays in the registers
while a few rows of the left matrix and a panel of columns of the right one run past it. Python has no words for
registers; what needs them is said to LLVM.

- A *block* holds the rows of a left matrix, STEP apart.
- *Panels* hold a right matrix, COLUMNS of its columns after the other, the last as many vectors wide as it takes.
- Elsewhere a place is an array, the number of an element in its memory, and the step from one row to the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numba.types import Array, void

from xformer.kernels.numba.loops import REORDERED, SETTINGS

_FEATURES = binding.get_host_cpu_features()
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx") else 4  # numbers in a vector register
# Of a tile: its sums, with a row of the right matrix and a number of the left one, fill the registers, 32 or 16.
ROWS, _VECTORS = (8 if _FEATURES.get("avx512f") or _FEATURES.get("neon") else 4), 3
COLUMNS = _VECTORS * LANES
DEPTH = 256  # numbers in a row of a block, at most
STEP = DEPTH + LANES  # rows a power of two apart would share lines of the cache
_LINE = 16  # numbers in a line of the cache

_INT, _VECTOR = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
_BYTES = ir.IntType(8).as_pointer()
_ZEROS, _UNKNOWN = ir.Constant(_VECTOR, [0.0] * LANES), ir.Constant(_VECTOR, ir.Undefined)
piece = njit(fastmath=REORDERED, **SETTINGS)

# --- what is said to LLVM ---------------------------------------------------------------------------------------------


def _number(value: Any) -> Any:
    return ir.Constant(_INT, value) if isinstance(value, int) else value


def _lanes(numbers: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers)


class _Rows:
    """A place in a matrix, and what is around it."""

    def __init__(self, context: Any, builder: Any, kind: Any, array: Any, first: Any, step: Any) -> None:
        data = context.make_array(kind)(context, builder, array).data
        self._builder, self._first, self._step = builder, builder.gep(data, [first]), _number(step)

    def element(self, row: Any, column: Any) -> Any:
        """The pointer to it."""
        from_first = self._builder.mul(_number(row), self._step)
        return self._builder.gep(self._first, [self._builder.add(from_first, _number(column))])

    def vector(self, row: Any, column: int) -> Any:
        return self._builder.load(self._place(row, column), align=4)

    def put(self, vector: Any, row: int, column: int) -> None:
        self._builder.store(vector, self._place(row, column), align=4)

    def fetch(self, row: Any, column: int) -> None:
        """Have what is there in the cache before it is wanted."""
        arguments = [_BYTES, *[ir.IntType(32)] * 3]
        prefetch = self._builder.module.declare_intrinsic(
            "llvm.prefetch", [_BYTES], ir.FunctionType(ir.VoidType(), arguments)
        )
        to_read_soon_data = (kind(number) for kind, number in zip(arguments[1:], (0, 3, 1), strict=True))
        self._builder.call(prefetch, [self._builder.bitcast(self.element(row, column), _BYTES), *to_read_soon_data])

    def _place(self, row: Any, column: int) -> Any:
        return self._builder.bitcast(self.element(row, column), _VECTOR.as_pointer())


def _tile(vectors: int, ahead: bool = False) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any,
        a: Any, at_a: Any,
        b: Any, at_b: Any, step_b: Any,
        out: Any, at_out: Any, step: Any,
        depth: Any, more: Any,
        start: Any, at_start: Any,
        at_next: Any,
    ) -> Any:  # fmt: skip
        """out = a b, or out += a b if there was more before; a: ROWS of a block, b and out: so many vectors wide.

        start: what is added to every row of the result, unless its place is below zero. at_next: the place in b's
        memory of what is fetched meanwhile, as large as b.
        """

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def rows(number: int, step: Any) -> _Rows:
                return _Rows(context, builder, signature.args[number], values[number], values[number + 1], step)

            rows_a, rows_b, rows_out = rows(0, STEP), rows(2, values[4]), rows(5, values[7])
            soon = _Rows(context, builder, signature.args[2], values[2], values[12], values[4])
            places = [(i, j) for i in range(ROWS) for j in range(vectors)]
            sums = [cgutils.alloca_once(builder, _VECTOR) for _ in places]  # LLVM puts them into registers
            fused = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
            multiply_add = cgutils.get_or_insert_function(builder.module, fused, f"llvm.fmuladd.v{LANES}f32")
            for i, j in places:
                rows_out.fetch(i, j * LANES)
            for total in sums:
                builder.store(_ZEROS, total)
            with builder.if_then(builder.icmp_signed(">=", values[11], _number(0))):
                added = [rows(10, 0).vector(0, j * LANES) for j in range(vectors)]
                for (_, j), total in zip(places, sums, strict=True):
                    builder.store(added[j], total)
            with cgutils.for_range(builder, values[8]) as along:
                of_b = [rows_b.vector(along.index, j * LANES) for j in range(vectors)]
                for j in range(vectors if ahead else 0):
                    soon.fetch(along.index, j * LANES)
                for i in range(ROWS):
                    number = builder.load(rows_a.element(i, along.index))
                    first = builder.insert_element(_UNKNOWN, number, ir.Constant(ir.IntType(32), 0))
                    of_a = builder.shuffle_vector(first, _UNKNOWN, _lanes([0] * LANES))
                    for j, total in enumerate(sums[i * vectors : (i + 1) * vectors]):
                        builder.store(builder.call(multiply_add, [of_a, of_b[j], builder.load(total)]), total)
            with builder.if_then(values[9]):
                for (i, j), total in zip(places, sums, strict=True):
                    builder.store(builder.fadd(rows_out.vector(i, j * LANES), builder.load(total)), total)
            for (i, j), total in zip(places, sums, strict=True):
                rows_out.put(builder.load(total), i, j * LANES)
            return context.get_dummy_value()

        return void(a, at_a, b, at_b, step_b, out, at_out, step, depth, more, start, at_start, at_next), generate

    return tile


def _square(turned: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def square(typing: Any, x: Any, at_x: Any, step_x: Any, y: Any, at_y: Any, step_y: Any) -> Any:
        """Copy (LANES, LANES) numbers, rows to rows, or, `turned`, rows to columns."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            given, made = (_Rows(context, builder, signature.args[n], *values[n : n + 3]) for n in (0, 3))
            rows, half = [given.vector(i, 0) for i in range(LANES)], LANES // 2
            # Rows half the square apart are merged, number by number: after log2(LANES) times it is transposed.
            merged = [_lanes([n for i in range(half) for n in (at + i, at + i + LANES)]) for at in (0, half)]
            for _ in range(LANES.bit_length() - 1 if turned else 0):
                pairs = [(rows[i], rows[i + half]) for i in range(half)]
                rows = [builder.shuffle_vector(*pair, lanes) for pair in pairs for lanes in merged]
            for i, row in enumerate(rows):
                made.put(row, i, 0)
            return context.get_dummy_value()

        return void(x, at_x, step_x, y, at_y, step_y), generate

    return square


@intrinsic  # type: ignore[untyped-decorator]
def memory(typing: Any, x: Any) -> Any:
    """A view of the memory that begins with the first number of an array, for places in it; its size says nothing."""
    kind = Array(x.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        given = context.make_array(x)(context, builder, values[0])
        made, item = context.make_array(kind)(context, builder), ir.Constant(_INT, 4)
        populate_array(made, data=given.data, shape=(item,), strides=(item,), itemsize=item, meminfo=given.meminfo)
        return impl_ret_borrowed(context, builder, kind, made._getvalue())

    return kind(x), generate


_tile_of_1, _tile_of_2, _tile_of_3 = map(_tile, (1, 2, 3))
_tile_and_next = _tile(_VECTORS, ahead=True)
_copy_square, _turn_square = _square(False), _square(True)

# --- what loops are made of -------------------------------------------------------------------------------------------


@piece
def aligned(count):
    """Memory for so many numbers, which begin with a line of the cache."""
    memory = np.empty(count + _LINE, np.float32)
    first = -memory.ctypes.data // 4 % _LINE
    return memory[first : first + count]


@piece
def padded(columns):
    """How many columns a right matrix has in panels."""
    return -(-columns // LANES) * LANES


@piece
def pack(x, i, j, rows, columns, y, at, step):
    """Copy rows i and further, columns j and further, of which rows or columns are contiguous, to a place."""
    down, right = x.strides[0] // 4, x.strides[1] // 4
    even_rows, even_columns = rows // LANES * LANES, columns // LANES * LANES
    for m in range(0, even_rows, LANES):
        for n in range(0, even_columns, LANES):
            if right == 1:
                _copy_square(x, (i + m) * down + j + n, down, y, at + m * step + n, step)
            else:
                _turn_square(x, i + m + (j + n) * right, right, y, at + m * step + n, step)
    for m in range(rows):
        for n in range(even_columns if m < even_rows else 0, columns):
            y[at + m * step + n] = x[i + m, j + n]


@piece
def pack_panels(x, depth, columns, y):
    """Copy a right matrix, whose rows or columns are contiguous, to panels; zeros fill the last."""
    for n in range(0, columns, COLUMNS):
        wide = min(COLUMNS, columns - n)
        step = padded(wide)
        pack(x, 0, n, depth, wide, y, depth * n, step)
        for k in range(depth if wide < step else 0):
            for j in range(wide, step):
                y[depth * n + k * step + j] = np.float32(0.0)


@piece
def turn(x, rows, columns, y):
    """Copy a block transposed to another. Both are as large as whole vectors need."""
    for i in range(0, rows, LANES):
        for j in range(0, columns, LANES):
            _turn_square(x, i * STEP + j, STEP, y, j * STEP + i, STEP)


@piece
def multiply_tile(vectors, left, right, result, depth, more, start):
    """out = a b, or out += a b if there was more before, for ROWS rows of a block and so many vectors of columns.

    left: the block and the place; right: matrix, place and step, and result likewise. start: an array and a place, what
    is added to every row of the result, unless the place is below zero.
    """
    (a, at_a), (b, at_b, step_b), (out, at, step), (added, at_added) = left, right, result, start
    if vectors == 3:
        _tile_of_3(a, at_a, b, at_b, step_b, out, at, step, depth, more, added, at_added, at_b)
    elif vectors == 2:
        _tile_of_2(a, at_a, b, at_b, step_b, out, at, step, depth, more, added, at_added, at_b)
    else:
        _tile_of_1(a, at_a, b, at_b, step_b, out, at, step, depth, more, added, at_added, at_b)


@piece
def multiply_tile_fetching(left, right, result, depth, more, start, at_next):
    """multiply_tile for whole tiles, while those of the right matrix at another place are fetched into the cache."""
    (a, at_a), (b, at_b, step_b), (out, at, step), (added, at_added) = left, right, result, start
    _tile_and_next(a, at_a, b, at_b, step_b, out, at, step, depth, more, added, at_added, at_next)


@piece
def multiply(a, rows, right, k, depth, n, columns, out, at, step, more):
    """out = a b, or out += a b, for rows of a block, and b in panels: rows k and further, columns n and further.

    right: the panels, and how many rows and columns there are in all; n is that of a panel's first column. `a` begins
    with row k's factors, `out` with column n. Whole tiles are computed, for which `out` needs room.
    """
    panels, all_depth, all_columns = right
    for j in range(n, n + columns, COLUMNS):
        panel_step = padded(min(COLUMNS, all_columns - j))
        for i in range(0, rows, ROWS):
            place = at + i * step + j - n
            at_b = all_depth * j + k * panel_step
            panel = panels, at_b, panel_step
            multiply_tile(panel_step // LANES, (a, i * STEP), panel, (out, place, step), depth, more, (a, -1))
