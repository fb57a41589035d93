"""Layer norm and RMS norm."""

from xformer.ops.norms.definition import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
