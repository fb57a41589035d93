"""Weights in 8 or 16 bits, and linear maps with them."""

from xformer.ops.quantized.definition import QUANTIZED_DTYPES, QuantizedWeight, quantized_dtype

__all__ = ["QUANTIZED_DTYPES", "QuantizedWeight", "quantized_dtype"]
