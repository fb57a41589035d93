"""Models as files of other inference engines, and as static pages."""

from xformer.export.ctranslate2 import CTranslate2Export, export_ctranslate2
from xformer.export.gguf import export_gguf, export_gguf_lora
from xformer.export.onnx import OnnxExport, export_onnx
from xformer.export.web import export_web, find_runtime

__all__ = [
    "CTranslate2Export", "OnnxExport", "export_ctranslate2", "export_gguf", "export_gguf_lora", "export_onnx",
    "export_web", "find_runtime",
]  # fmt: skip
