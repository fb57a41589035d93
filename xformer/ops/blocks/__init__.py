"""Weights in the quantized blocks of GGUF files, and linear maps with them."""

from xformer.ops.blocks.definition import BlockWeight, dequantize

__all__ = ["BlockWeight", "dequantize"]
