"""Weights in panels of 48 columns, and linear maps with them, for inference on a CPU.

Maps with int8 weights round their inputs to int8, too, as llama.cpp and CTranslate2 do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer import native
from xformer.backends import Array, array_namespace, device, dtype_name
from xformer.ops.inference_weight import InferenceWeight
from xformer.ops.operation import Operation
from xformer.ops.quantized import QuantizedWeight

# As in native/src/linear.cpp: columns; elements of a row of x with one scale; rows of int8 that are interleaved.
PANEL, GROUP, INTERLEAVED = 48, 64, 4


class PackedWeight(InferenceWeight):
    """A matrix whose columns are stored in panels, so that a product of few rows reads memory from start to end.

    Use `PackedWeight.pack` to make one.

    Attributes:
        scales: Array of shape (columns,) that the columns are multiplied by, or None.
        panels: Array of shape (panels, rows, 48), float32, int8 or bfloat16. The last panel is filled with zeros. In
            memory, panels of int8 are (panels, rows / 4, 48, 4), with rows of zeros up to a multiple of 4.
        rows: Number of rows.
        columns: Number of columns.
        is_transposed: The matrix is the transpose, (columns, rows).
    """

    # The scales come first: the first parameter of a model determines its floating dtype.
    scales: Array | None
    panels: Array
    rows: int
    columns: int
    is_transposed: bool

    @classmethod
    def pack(cls, weight: Array | QuantizedWeight) -> PackedWeight:
        """Copy a matrix (rows, columns) to panels."""
        scales: Array | None = None
        matrix: Any = weight
        if isinstance(weight, QuantizedWeight):
            if not weight.is_transposed:
                return cls.pack(weight.T).T
            scales, matrix = weight.scales, weight.values.T
        xp = array_namespace(matrix)
        rows, columns = matrix.shape
        is_int8 = dtype_name(matrix.dtype) == "int8"
        matrix = _padded(_padded(matrix, 0, INTERLEAVED if is_int8 else 1), 1, PANEL)
        panels = xp.permute_dims(xp.reshape(matrix, (matrix.shape[0], matrix.shape[1] // PANEL, PANEL)), (1, 0, 2))
        if is_int8:
            panels = _with_axes_swapped(panels, (INTERLEAVED, PANEL))
        if isinstance(panels, np.ndarray):
            memory = native.aligned_empty(panels.shape, panels.dtype)
            memory[...] = panels
            return cls(scales, memory, rows, columns, False)
        panels = xp.asarray(panels, copy=True) if panels.shape[0] == 1 else panels  # reshaping would not copy it
        return cls(scales, _contiguous(panels), rows, columns, False)

    def unpack(self) -> Array | QuantizedWeight:
        """Return the matrix as `pack` got it."""
        matrix = _unpacked(self.panels, self.rows, self.columns)
        if self.scales is None:
            return _contiguous(matrix.T if self.is_transposed else matrix)
        return QuantizedWeight(self.scales, _contiguous(matrix.T), not self.is_transposed)

    @property
    def T(self) -> PackedWeight:
        """Transpose of the matrix; shares its arrays."""
        return PackedWeight(self.scales, self.panels, self.rows, self.columns, not self.is_transposed)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return (self.columns, self.rows) if self.is_transposed else (self.rows, self.columns)

    @property
    def elements(self) -> Array:
        """The panels."""
        return self.panels

    @property
    def dtype(self) -> Any:
        """Floating dtype of the matrix, in which results are computed."""
        return (self.panels if self.scales is None else self.scales).dtype

    @property
    def quantized_dtype(self) -> str | None:
        """Name of the dtype that the matrix was quantized to, or None."""
        return None if self.scales is None else str(dtype_name(self.panels.dtype))

    def _scaled(self) -> Any:
        return _scaled(self.panels, self.scales, self.rows, self.columns)

    def linear(self, rows: Array, bias: Array | None) -> Any:
        """Compute rows @ matrix + bias."""
        if not self.is_transposed:
            rows = _padded(rows, 1, INTERLEAVED) if rows.shape[1] < self.panels.shape[1] else rows
            return _operation(rows, self.panels, self.scales, bias, columns=self.columns)
        matrix = array_namespace(rows).matrix_transpose(self._scaled())
        y = rows @ matrix
        return y if bias is None else y + bias

    def take(self, indices: Array) -> Any:
        """Return rows of the matrix: (n, columns) for indices (n,)."""
        xp = array_namespace(self.panels, indices)
        if not self.is_transposed:
            return xp.take(self._scaled(), indices, axis=0)
        height, integers = INTERLEAVED if dtype_name(self.panels.dtype) == "int8" else 1, xp.index_dtype
        indices = xp.astype(indices, integers, copy=False)
        first = indices // PANEL * (self.panels.shape[1] * PANEL) + indices % PANEL * height
        steps = xp.arange(self.rows, dtype=integers, device=device(indices))
        elements = xp.reshape(first[:, None] + steps // height * (height * PANEL) + steps % height, (-1,))
        rows = xp.reshape(xp.take(xp.reshape(self.panels, (-1,)), elements, axis=0), (indices.shape[0], self.rows))
        return rows if self.scales is None else _times(rows, xp.take(self.scales, indices, axis=0)[:, None])


def _contiguous(x: Array) -> Any:
    """Return an array whose elements are in the order of the indices in memory, which reshaping causes."""
    xp = array_namespace(x)
    return xp.reshape(xp.reshape(x, (-1,)), x.shape)


def _padded(x: Array, axis: int, multiple: int) -> Any:
    """Return a matrix with zeros up to a multiple of some size."""
    xp = array_namespace(x)
    shape = [-size % multiple if each == axis else size for each, size in enumerate(x.shape)]
    return xp.concat([x, xp.zeros(tuple(shape), dtype=x.dtype, device=device(x))], axis=axis) if shape[axis] else x


def _with_axes_swapped(panels: Array, sizes: tuple[int, int]) -> Any:
    """Swap the axes of these sizes in groups of rows: (4, 48) interleaves the rows, and (48, 4) undoes it."""
    xp = array_namespace(panels)
    parts = xp.reshape(panels, (panels.shape[0], panels.shape[1] // INTERLEAVED, *sizes))
    return xp.reshape(xp.permute_dims(parts, (0, 1, 3, 2)), panels.shape)


def _unpacked(panels: Array, rows: int, columns: int) -> Any:
    """Return the matrix (rows, columns) of some panels."""
    xp = array_namespace(panels)
    panels = _with_axes_swapped(panels, (PANEL, INTERLEAVED)) if dtype_name(panels.dtype) == "int8" else panels
    matrix = xp.reshape(xp.permute_dims(panels, (1, 0, 2)), (panels.shape[1], panels.shape[0] * PANEL))
    return matrix[:rows, :columns]


def _scaled(panels: Array, scales: Array | None, rows: int, columns: int) -> Any:
    matrix = _unpacked(panels, rows, columns)
    return matrix if scales is None else _times(matrix, scales)


def _times(values: Array, scales: Array) -> Any:
    return array_namespace(values).astype(values, scales.dtype) * scales


def _forward(
    x: Array, panels: Array, scales: Array | None, bias: Array | None, *, columns: int, save: bool
) -> tuple[Array, Any]:
    x = _rounded(x) if dtype_name(panels.dtype) == "int8" else x
    y = x @ _scaled(panels, scales, x.shape[1], columns)
    return y if bias is None else y + bias, None


def _rounded(x: Array) -> Any:
    """Return rows after rounding to int8 and back; the scale of a group is its largest magnitude divided by 127."""
    xp = array_namespace(x)
    padded = _padded(x, 1, GROUP)
    groups = xp.reshape(padded, (x.shape[0], padded.shape[1] // GROUP, GROUP))
    scales = xp.max(xp.abs(groups), axis=2, keepdims=True) / 127.0
    scales = xp.where(scales == 0.0, xp.ones_like(scales), scales)
    return xp.reshape(xp.round(groups / scales) * scales, padded.shape)[:, : x.shape[1]]


# Without a derivative: packing is for inference.
_operation = Operation(
    "packed_linear",
    "x: (rows, in_features) float, panels: (panels, in_features, panel) real, scales?: (out_features) float, "
    "bias?: (out_features) float -> (rows, out_features)",
    _forward,
    None,
    conditions={"panels of 48 columns": lambda sizes: sizes["panel"] == PANEL},
)
