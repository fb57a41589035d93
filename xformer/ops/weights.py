"""Weights that are stored in another form than a matrix, for inference: quantized, or packed in panels.

Maps with packed int8 weights round their inputs to int8, too, as llama.cpp and CTranslate2 do. `blocks.py` has two more
forms, those of GGUF files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from xformer import native
from xformer.backends import Array, array_namespace, device, dtype_name
from xformer.errors import ConfigError, DataError
from xformer.ops.operation import Operation, Signature
from xformer.tree import Module, children_of, is_array, with_fields


class InferenceWeight(Module):
    """A matrix in another form, which linear maps and embeddings take as their weight.

    A table (rows, columns) is stored, and the matrix is this table or, if the last field `is_transposed` is true, its
    transpose. A subclass has these methods:

    - `_table_shape()`: (rows, columns).
    - `_table()`: the table as a floating array.
    - `_product(rows, bias)`: rows @ matrix + bias, if the orientation is the one of `multiplies_transposed`.
    - `_take(indices)`: rows of the matrix in the other orientation.
    """

    _elements: ClassVar[str]  # name of the field that has them
    multiplies_transposed: ClassVar[bool] = True
    is_packed: ClassVar[bool] = False  # whether `unpack` changes the weight

    @property
    def elements(self) -> Array:
        """The array that has the elements of the matrix, before they are multiplied by the scales."""
        array: Array = getattr(self, self._elements)
        return array

    @property
    def dtype(self) -> Any:
        """Floating dtype of the matrix, in which results are computed."""
        scales = getattr(self, "scales", None)
        return (self.elements if scales is None else scales).dtype

    @property
    def quantized_dtype(self) -> str | None:
        """Name of the dtype that the matrix was quantized to, or None."""
        return None if getattr(self, "scales", None) is None else str(dtype_name(self.elements.dtype))

    @property
    def T(self: Any) -> Any:
        """Transpose of the matrix; shares its arrays."""
        return with_fields(self, is_transposed=not self.is_transposed)

    @property
    def shape(self: Any) -> tuple[int, ...]:
        """Shape of the matrix."""
        rows, columns = self._table_shape()
        return (columns, rows) if self.is_transposed else (rows, columns)

    def dequantize(self: Any) -> Any:
        """Return the matrix as a floating array."""
        table = self._table()
        return array_namespace(table).matrix_transpose(table) if self.is_transposed else table

    def linear(self: Any, rows: Array, bias: Array | None) -> Any:
        """Compute rows @ matrix + bias.

        Args:
            rows: Array of shape (rows, in_features).
            bias: Array of shape (out_features,), or None.

        Returns:
            Array of shape (rows, out_features).
        """
        if self.is_transposed == self.multiplies_transposed:
            return self._product(rows, bias)
        matrix = self.dequantize()
        y = array_namespace(rows, matrix).matmul(rows, matrix)
        return y if bias is None else y + bias

    def take(self: Any, indices: Array) -> Any:
        """Return rows of the matrix: (n, columns) for indices (n,)."""
        if self.is_transposed != self.multiplies_transposed:
            return self._take(indices)
        return array_namespace(self.elements, indices).take(self.dequantize(), indices, axis=0)


def inference_weights(tree: Any) -> Iterator[InferenceWeight]:
    """Yield the inference weights of a module."""
    return (weight for _, weight in named_weights(tree) if isinstance(weight, InferenceWeight))


def named_weights(tree: Any, name: str = "") -> Iterator[tuple[str, Array | InferenceWeight]]:
    """Yield the arrays of a module by name as `named_arrays`, but inference weights as a whole."""
    if isinstance(tree, InferenceWeight) or is_array(tree):
        yield name, tree
        return
    for key, child in children_of(tree):
        yield from named_weights(child, f"{name}.{key}" if name else str(key))


def quantized_dtype(tree: Any) -> str | None:
    """Return the dtype of the quantized weights of a module, "int8" or "bfloat16", or None without any."""
    return next(filter(None, (each.quantized_dtype for each in inference_weights(tree))), None)


# --- quantized: 8 or 16 bits, and one scale for each row --------------------------------------------------------------

QUANTIZED_DTYPES = ("int8", "bfloat16")
_MATRIX = Signature("weight: (rows, columns) float", {"at least one column": lambda sizes: sizes["columns"] > 0})
_CHUNK = 2**18  # elements quantized at a time, which bounds the memory
_LARGEST = 127  # of int8; -128 is not used, so that values are symmetric


class QuantizedWeight(InferenceWeight):
    """A matrix in 8 or 16 bits with one scale for each row, which linear maps and embeddings take as their weight.

    Element (i, j) is `values[i, j] * scales[i]`. The rows are the output features of a linear map and the tokens of an
    embedding. Use `QuantizedWeight.quantize` to make one.

    Attributes:
        scales: Array of shape (rows,), float32.
        values: Array of shape (rows, columns), int8 or bfloat16.
        is_transposed: The matrix is the transpose, (columns, rows).
    """

    _elements = "values"

    # The scales come first: the first parameter of a model determines its floating dtype.
    scales: Array
    values: Array
    is_transposed: bool

    @classmethod
    def quantize(cls, weight: Array, dtype: str) -> QuantizedWeight:
        """Round each row of a matrix to the nearest multiples of its scale.

        Args:
            weight: Floating array of shape (rows, columns).
            dtype: "int8", with the largest magnitude of a row divided by 127 as its scale; or "bfloat16", with
                scales of 1.

        Raises:
            ConfigError: For another dtype.
            ShapeError: If the weight is not a floating matrix with columns.
            BackendError: If the library has no such dtype.
        """
        if dtype not in QUANTIZED_DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; expected 'int8' or 'bfloat16'")
        xp = array_namespace(weight)
        _MATRIX.check("quantize", (weight,))
        rows, columns = weight.shape
        step = max(1, _CHUNK // columns)
        chunks = [_quantize(weight[i : min(i + step, rows), :], dtype) for i in range(0, max(1, rows), step)]
        scales, values = (xp.concat(arrays, axis=0) for arrays in zip(*chunks, strict=True))
        return cls(scales, values, False)

    def _table_shape(self) -> tuple[int, ...]:
        return self.values.shape

    def _table(self) -> Any:
        return _times(self.values, self.scales[:, None])

    def _product(self, rows: Array, bias: Array | None) -> Any:
        return _quantized_linear(rows, self.scales, self.values, bias)

    def _take(self, indices: Array) -> Any:
        xp = array_namespace(self.values, indices)
        return _times(xp.take(self.values, indices, axis=0), xp.take(self.scales, indices, axis=0)[:, None])


def _quantize(weight: Array, dtype: str) -> tuple[Array, Array]:
    """Return the scales and the values of some rows."""
    xp = array_namespace(weight)
    # Reshaping lays out the rows of a transposed matrix one after the other in memory, as kernels expect them.
    weight = contiguous(xp.astype(weight, xp.float32, copy=False))
    if not xp.all(xp.isfinite(weight)):
        raise DataError("the weight has NaN or infinite elements; expected finite ones")
    if dtype == "bfloat16":
        return xp.ones_like(weight[:, 0]), xp.astype(weight, xp.dtype_named(dtype))
    scales = xp.max(xp.abs(weight), axis=1) / _LARGEST
    scales = xp.where(scales > 0.0, scales, xp.ones_like(scales))  # rows of zeros
    return scales, xp.astype(xp.round(weight / scales[:, None]), xp.int8)


def _times(values: Array, scales: Array) -> Any:
    return array_namespace(values).astype(values, scales.dtype) * scales


def contiguous(x: Array) -> Any:
    """Return an array whose elements are in the order of the indices in memory, which reshaping causes."""
    xp = array_namespace(x)
    return xp.reshape(xp.reshape(x, (-1,)), x.shape)


def quantized_forward(x: Array, scales: Array, values: Array, bias: Array | None, *, save: bool) -> tuple[Array, Any]:
    """Return x @ table.T + bias."""
    xp = array_namespace(x, values)
    y = xp.matmul(x, xp.matrix_transpose(_times(values, scales[:, None])))
    return y if bias is None else y + bias, (scales, values)


def _quantized_vjp(g: Array, residuals: Any, needs: Any) -> tuple[Any, ...]:
    """Return the cotangents of x and the bias. Training changes weights by less than the rounding: they have none."""
    (scales, values), xp, dx = residuals, array_namespace(g), None
    g_scaled = g * scales if needs[0] else g
    for rows in table_rows(*values.shape) if needs[0] else ():
        part = xp.matmul(g_scaled[:, rows], xp.astype(values[rows, :], scales.dtype))
        dx = part if dx is None else dx + part
    return dx, None, None, xp.sum(g, axis=0) if needs[3] else None


def table_rows(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Yield the rows of a table that a derivative reads as floats at a time, which bounds the memory; at least once."""
    step = 4 * _CHUNK // max(1, num_columns) + 1
    for start in range(0, max(1, num_rows), step):
        yield slice(start, min(start + step, num_rows))


_quantized_linear = Operation(
    "quantized_linear",
    "x: (rows, in_features) float, scales: (out_features) float, values: (out_features, in_features) real, "
    "bias?: (out_features) float -> (rows, out_features)",
    quantized_forward,
    _quantized_vjp,
    compute_in_float32=True,
)


# --- packed: panels of 48 columns -------------------------------------------------------------------------------------

# As in native/src/linear.cpp: columns; elements of a row of x with one scale; rows of int8 that are interleaved.
PANEL, GROUP, INTERLEAVED = 48, 64, 4
_SMALLEST = 1.17549435e-38  # of a scale: of subnormal ones, quotients may be larger than 127


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

    _elements = "panels"
    multiplies_transposed = False
    is_packed = True

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
        matrix = padded_to(padded_to(matrix, 0, INTERLEAVED if is_int8 else 1), 1, PANEL)
        panels = xp.permute_dims(xp.reshape(matrix, (matrix.shape[0], matrix.shape[1] // PANEL, PANEL)), (1, 0, 2))
        if is_int8:
            panels = _with_axes_swapped(panels, (INTERLEAVED, PANEL))
        if isinstance(panels, np.ndarray):
            memory = native.aligned_empty(panels.shape, panels.dtype)
            memory[...] = panels
            return cls(scales, memory, rows, columns, False)
        panels = xp.asarray(panels, copy=True) if panels.shape[0] == 1 else panels  # reshaping would not copy it
        return cls(scales, contiguous(panels), rows, columns, False)

    def unpack(self) -> Array | QuantizedWeight:
        """Return the matrix as `pack` got it."""
        matrix = _unpacked(self.panels, self.rows, self.columns)
        if self.scales is None:
            return contiguous(matrix.T if self.is_transposed else matrix)
        return QuantizedWeight(self.scales, contiguous(matrix.T), not self.is_transposed)

    def _table_shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def _table(self) -> Any:
        return _scaled(self.panels, self.scales, self.rows, self.columns)

    def _product(self, rows: Array, bias: Array | None) -> Any:
        rows = padded_to(rows, 1, INTERLEAVED) if rows.shape[1] < self.panels.shape[1] else rows
        return _packed_linear(rows, self.panels, self.scales, bias, columns=self.columns)

    def _take(self, indices: Array) -> Any:
        xp = array_namespace(self.panels, indices)
        height, integers = INTERLEAVED if dtype_name(self.panels.dtype) == "int8" else 1, xp.index_dtype
        indices = xp.astype(indices, integers, copy=False)
        first = indices // PANEL * (self.panels.shape[1] * PANEL) + indices % PANEL * height
        steps = xp.arange(self.rows, dtype=integers, device=device(indices))
        elements = xp.reshape(first[:, None] + steps // height * (height * PANEL) + steps % height, (-1,))
        rows = xp.reshape(xp.take(xp.reshape(self.panels, (-1,)), elements, axis=0), (indices.shape[0], self.rows))
        return rows if self.scales is None else _times(rows, xp.take(self.scales, indices, axis=0)[:, None])


def padded_to(x: Array, axis: int, multiple: int) -> Any:
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


def packed_forward(
    x: Array, panels: Array, scales: Array | None, bias: Array | None, *, columns: int, save: bool
) -> tuple[Array, Any]:
    """Return x @ table + bias."""
    x = rounded(x, GROUP) if dtype_name(panels.dtype) == "int8" else x
    y = array_namespace(x, panels).matmul(x, _scaled(panels, scales, x.shape[1], columns))
    return y if bias is None else y + bias, None


def rounded(x: Array, size: int) -> Any:
    """Return rows after rounding to int8 and back; the scale of a group is its largest magnitude divided by 127."""
    xp = array_namespace(x)
    padded = padded_to(x, 1, size)
    groups = xp.reshape(padded, (x.shape[0], padded.shape[1] // size, size))
    scales = xp.max(xp.abs(groups), axis=2, keepdims=True) / 127.0
    scales = xp.where(scales < _SMALLEST, xp.ones_like(scales), scales)
    return xp.reshape(xp.round(groups / scales) * scales, padded.shape)[:, : x.shape[1]]


# Without a derivative: packing is for inference.
_packed_linear = Operation(
    "packed_linear",
    "x: (rows, in_features) float, panels: (panels, in_features, panel) real, scales?: (out_features) float, "
    "bias?: (out_features) float -> (rows, out_features)",
    packed_forward,
    None,
    conditions={"panels of 48 columns": lambda sizes: sizes["panel"] == PANEL},
)
