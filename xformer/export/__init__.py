"""Models as files of other inference engines."""

from xformer.export.onnx import OnnxExport, export_onnx

__all__ = ["OnnxExport", "export_onnx"]
