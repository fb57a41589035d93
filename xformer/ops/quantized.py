"""Weights in 8 or 16 bits, and linear maps with them, for inference."""

from __future__ import annotations

from typing import Any

from xformer.backends import Array, array_namespace, dtype_name
from xformer.errors import ConfigError, DataError
from xformer.ops.inference_weight import InferenceWeight, inference_weights
from xformer.ops.operation import Operation, Signature

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

    @property
    def T(self) -> QuantizedWeight:
        """Transpose of the matrix; shares its arrays."""
        return QuantizedWeight(self.scales, self.values, not self.is_transposed)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        rows, columns = self.values.shape
        return (columns, rows) if self.is_transposed else (rows, columns)

    @property
    def elements(self) -> Array:
        """The values."""
        return self.values

    @property
    def dtype(self) -> Any:
        """Floating dtype of the matrix, in which results are computed."""
        return self.scales.dtype

    @property
    def quantized_dtype(self) -> str:
        """Name of the dtype of the values."""
        return str(dtype_name(self.values.dtype))

    def dequantize(self) -> Array:
        """Return the matrix as a floating array."""
        matrix = _dequantize(self.scales, self.values)
        return array_namespace(matrix).matrix_transpose(matrix) if self.is_transposed else matrix

    def linear(self, rows: Array, bias: Array | None) -> Any:
        """Compute rows @ matrix + bias; the matrix usually has a scale for each output feature."""
        if self.is_transposed:
            return _operation(rows, self.scales, self.values, bias)
        y = rows @ self.dequantize()
        return y if bias is None else y + bias

    def take(self, indices: Array) -> Any:
        """Return rows of the matrix: (n, columns) for indices (n,)."""
        xp = array_namespace(self.values, indices)
        if self.is_transposed:
            return xp.take(self.dequantize(), indices, axis=0)
        return _dequantize(xp.take(self.scales, indices, axis=0), xp.take(self.values, indices, axis=0))


def _quantize(weight: Array, dtype: str) -> tuple[Array, Array]:
    """Return the scales and the values of some rows."""
    xp = array_namespace(weight)
    # Reshaping lays out the rows of a transposed matrix one after the other in memory, as kernels expect them.
    weight = xp.reshape(xp.reshape(xp.astype(weight, xp.float32, copy=False), (-1,)), weight.shape)
    if not xp.all(xp.isfinite(weight)):
        raise DataError("the weight has NaN or infinite elements; expected finite ones")
    if dtype == "bfloat16":
        return xp.ones_like(weight[:, 0]), xp.astype(weight, xp.dtype_named(dtype))
    scales = xp.max(xp.abs(weight), axis=1) / _LARGEST
    scales = xp.where(scales > 0.0, scales, xp.ones_like(scales))  # rows of zeros
    return scales, xp.astype(xp.round(weight / scales[:, None]), xp.int8)


def _dequantize(scales: Array, values: Array) -> Any:
    return array_namespace(values).astype(values, scales.dtype) * scales[:, None]


def _forward(x: Array, scales: Array, values: Array, bias: Array | None, *, save: bool) -> tuple[Array, Any]:
    y = x @ array_namespace(values).matrix_transpose(_dequantize(scales, values))
    return y if bias is None else y + bias, (scales, values)


def _vjp(g: Array, residuals: Any, needs: Any) -> tuple[Any, ...]:
    """Return the cotangents of x and the bias. Training changes weights by less than the rounding: they have none."""
    scales, values = residuals
    dx = g @ _dequantize(scales, values) if needs[0] else None
    return dx, None, None, array_namespace(g).sum(g, axis=0) if needs[3] else None


_operation = Operation(
    "quantized_linear",
    "x: (rows, in_features) float, scales: (out_features) float, values: (out_features, in_features) real, "
    "bias?: (out_features) float -> (rows, out_features)",
    _forward,
    _vjp,
)


def quantized_dtype(tree: Any) -> str | None:
    """Return the dtype of the quantized weights of a module, "int8" or "bfloat16", or None without any."""
    return next(filter(None, (each.quantized_dtype for each in inference_weights(tree))), None)
