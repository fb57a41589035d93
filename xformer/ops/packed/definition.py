"""Weights in panels of 48 columns, and linear maps with them, for inference on a CPU."""

from __future__ import annotations

from typing import Any

from xformer.backends import Array, array_namespace, device, dtype_name, index_dtype
from xformer.ops.inference_weight import InferenceWeight
from xformer.ops.operation import Operation
from xformer.ops.quantized.definition import QuantizedWeight

PANEL = 48  # columns, as in native/src/linear.cpp


class PackedWeight(InferenceWeight):
    """A matrix whose columns are stored in panels, so that a product of few rows reads memory from start to end.

    Use `PackedWeight.pack` to make one.

    Attributes:
        scales: Array of shape (columns,) that the columns are multiplied by, or None.
        panels: Array of shape (panels, rows, 48), float32, int8 or bfloat16. The last panel is filled with zeros.
        columns: Number of columns.
        is_transposed: The matrix is the transpose, (columns, rows).
    """

    # The scales come first: the first parameter of a model determines its floating dtype.
    scales: Array | None
    panels: Array
    columns: int
    is_transposed: bool

    @classmethod
    def pack(cls, weight: Array | QuantizedWeight) -> PackedWeight:
        """Copy a matrix (rows, columns) to panels."""
        scales = None
        if isinstance(weight, QuantizedWeight):
            if not weight.is_transposed:
                return cls.pack(weight.T).T
            scales, weight = weight.scales, weight.values.T
        xp = array_namespace(weight)
        rows, columns = weight.shape
        count = -(-columns // PANEL)
        if columns % PANEL:
            padding = xp.zeros((rows, count * PANEL - columns), dtype=weight.dtype)
            weight = xp.concat([weight, padding], axis=1)
        panels = xp.permute_dims(xp.reshape(weight, (rows, count, PANEL)), (1, 0, 2))
        panels = xp.asarray(panels, copy=True) if count == 1 else panels  # reshaping would not copy it
        return cls(scales, _contiguous(panels), columns, False)

    def unpack(self) -> Array | QuantizedWeight:
        """Return the matrix as `pack` got it."""
        matrix = unpacked(self.panels, self.columns)
        if self.scales is None:
            return _contiguous(matrix.T if self.is_transposed else matrix)
        return QuantizedWeight(self.scales, _contiguous(matrix.T), not self.is_transposed)

    @property
    def T(self) -> PackedWeight:
        """Transpose of the matrix; shares its arrays."""
        return PackedWeight(self.scales, self.panels, self.columns, not self.is_transposed)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        rows = self.panels.shape[1]
        return (self.columns, rows) if self.is_transposed else (rows, self.columns)

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

    def linear(self, rows: Array, bias: Array | None) -> Any:
        """Compute rows @ matrix + bias."""
        if not self.is_transposed:
            return _operation(rows, self.panels, self.scales, bias, columns=self.columns)
        matrix = array_namespace(rows).matrix_transpose(_scaled(self.panels, self.scales, self.columns))
        y = rows @ matrix
        return y if bias is None else y + bias

    def take(self, indices: Array) -> Any:
        """Return rows of the matrix: (n, columns) for indices (n,)."""
        xp = array_namespace(self.panels, indices)
        if not self.is_transposed:
            return xp.take(_scaled(self.panels, self.scales, self.columns), indices, axis=0)
        size, integers = self.panels.shape[1], index_dtype(xp)
        indices = xp.astype(indices, integers, copy=False)
        first = indices // PANEL * (size * PANEL) + indices % PANEL
        steps = xp.arange(0, size * PANEL, PANEL, dtype=integers, device=device(indices))
        elements = xp.reshape(first[:, None] + steps, (-1,))
        rows = xp.reshape(xp.take(xp.reshape(self.panels, (-1,)), elements, axis=0), (indices.shape[0], size))
        return rows if self.scales is None else _times(rows, xp.take(self.scales, indices, axis=0)[:, None])


def _contiguous(x: Array) -> Any:
    """Return an array whose elements are in the order of the indices in memory, which reshaping causes."""
    xp = array_namespace(x)
    return xp.reshape(xp.reshape(x, (-1,)), x.shape)


def unpacked(panels: Array, columns: int) -> Any:
    """Return the matrix (rows, columns) of some panels."""
    xp = array_namespace(panels)
    matrix = xp.reshape(xp.permute_dims(panels, (1, 0, 2)), (panels.shape[1], panels.shape[0] * PANEL))
    return matrix[:, :columns]


def _scaled(panels: Array, scales: Array | None, columns: int) -> Any:
    matrix = unpacked(panels, columns)
    return matrix if scales is None else _times(matrix, scales)


def _times(values: Array, scales: Array) -> Any:
    return array_namespace(values).astype(values, scales.dtype) * scales


def _forward(
    x: Array, panels: Array, scales: Array | None, bias: Array | None, *, columns: int, save: bool
) -> tuple[Array, Any]:
    y = x @ _scaled(panels, scales, columns)
    return y if bias is None else y + bias, None


# Without a derivative: packing is for inference.
_operation = Operation(
    "packed_linear",
    "x: (rows, in_features) float, panels: (panels, in_features, panel) real, scales?: (out_features) float, "
    "bias?: (out_features) float -> (rows, out_features)",
    _forward,
    None,
    conditions={"panels of 48 columns": lambda sizes: sizes["panel"] == PANEL},
)
