"""Public checkpoints in the Hugging Face format, read and written by one table for each family."""

import importlib

from xformer.errors import explain_moved_names as _explain_moved_names
from xformer.families.checkpoint import load_pretrained, save_pretrained
from xformer.families.family import FAMILIES, Family, family_of, register
from xformer.families.peft import load_lora, save_lora

_explain_moved_names(__name__)

__all__ = [
    "FAMILIES", "Family", "family_of", "load_lora", "load_pretrained", "register", "save_lora", "save_pretrained",
]  # fmt: skip

for _name in ("gemma", "gpt", "llama", "mixtral", "bert", "clip", "deberta", "modernbert", "vit", "bart", "t5"):
    importlib.import_module(f"xformer.families.{_name}")  # registers its families
