import subprocess
import sys

import xformer.text
import xformer.tokenizers


def test_all_names_exist_and_are_sorted():
    for module in (xformer.text, xformer.tokenizers):
        names = module.__all__
        assert len(names) == len(set(names))
        assert all(hasattr(module, name) for name in names)


def test_import_loads_no_optional_package():
    code = """
import sys, xformer.text, xformer.tokenizers
heavy = {"tokenizers", "sacrebleu", "rouge_score", "jinja2", "torch", "jax", "cupy", "rich", "typer", "matplotlib"}
print(sorted(heavy & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
