import subprocess
import sys


def test_import_loads_no_optional_package():
    code = """
import sys, xformer.text, xformer.tokenizers
heavy = {"tokenizers", "sacrebleu", "rouge_score", "jinja2", "torch", "jax", "cupy", "rich", "typer", "matplotlib"}
print(sorted(heavy & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
