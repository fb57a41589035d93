"""Models as files of other inference engines."""

from xformer.export.ctranslate2 import CTranslate2Export, export_ctranslate2
from xformer.export.onnx import OnnxExport, export_onnx

__all__ = ["CTranslate2Export", "OnnxExport", "export_ctranslate2", "export_onnx"]
