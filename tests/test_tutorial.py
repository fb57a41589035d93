"""The code of the tutorial's pages runs, the solutions of the exercises included, and prints what tests/printed has.

python tests/test_tutorial.py  # writes tests/printed and the figures
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import xformer as xf
from tests.reference import native_levels
from xformer import native

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial"
SLOW = {
    "9-model",
    "10-decoding",
    "11-translator",
    "12-gpt",
    "appendix-libraries",
}  # pages that take more than three seconds
PAGES = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem in SLOW))
    for page in sorted(TUTORIAL.glob("*.md"))
]
PRINTED = ROOT / "tests" / "printed"
# The speed and the time of training, and the version of a package.
VARYING = re.compile(r".*tokens/s.*\n|\d+:\d\d  |\|version:.*")
is_reproducible = native.has_fused_products()
# Another processor and number of threads; NumPy warns of features that this processor lacks.
OLDER = {"XFORMER_NATIVE": "avx2", "XFORMER_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Nehalem"}
OLDER |= {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4", "PYTHONWARNINGS": "default"}
OTHER = pytest.param(
    TUTORIAL / "12-gpt.md",
    OLDER,
    id="older processor",
    marks=[pytest.mark.slow, pytest.mark.skipif("avx2" not in native_levels(), reason="needs the level AVX2")],
)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed_by(page: Path, figures: Path, **environment: str) -> str:
    """Return what the cells of a page print, without what differs from machine to machine, and write its figures."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **environment}
    command = [sys.executable, str(ROOT / "docs" / "execution.py"), str(page), str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=variables)
    assert done.returncode == 0, done.stderr
    return VARYING.sub("", done.stdout)


@pytest.mark.parametrize(
    ("page", "environment"), [*(pytest.param(*each.values, {}, id=each.id, marks=each.marks) for each in PAGES), OTHER]
)
def test_pages_print_the_same_numbers_everywhere(page: Path, environment: dict[str, str], tmp_path: Path) -> None:
    packages = ["matplotlib", "tokenizers", "sacrebleu"]
    packages += ["array_api_strict", "torch", "jax"] if page.stem == "appendix-libraries" else []
    for package in packages:
        pytest.importorskip(package)
    text = page.read_text(encoding="utf-8")
    printed = printed_by(page, tmp_path, **environment)
    shown = re.findall(r"^!\[[^\]]+\]\(figures/(.*)\)$", text, re.MULTILINE)
    assert shown == [f"{page.stem}-{number}.svg" for number in range(1, len([*tmp_path.iterdir()]) + 1)]
    assert all((TUTORIAL / "figures" / name).exists() for name in shown)
    if is_reproducible or "use_reproducible_algorithms" not in text:
        expected = (PRINTED / f"{page.stem}.txt").read_text(encoding="utf-8")
        assert printed == expected, "if the page is right, run: python tests/test_tutorial.py"


@pytest.mark.parametrize("page", PAGES)
def test_solutions_are_checked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    solution = r"^<details markdown>\n<summary>Solution</summary>\n.*?^</details>\n"
    exercises, solutions = (re.findall(p, text, re.M | re.S) for p in (r"^\*\*Exercise \d+\.\*\*", solution))
    checked = re.findall(solution + r"\n```python\n[^`]*check\(", text, re.M | re.S)
    assert len(exercises) == len(solutions) == len(checked)


@pytest.mark.parametrize("page", [page for page in PAGES if page.id != "index"])
def test_pages_end_with_what_was_learned_and_a_question(page: Path) -> None:
    _, learned = page.read_text(encoding="utf-8").split("\n## What you learned\n")
    assert re.search(r"\n\*\*A question for the explorer\.\*\*.*\n<summary>Answer</summary>\n", learned, re.DOTALL)
    assert "\n#" not in learned


def test_autodiff_takes_300_lines() -> None:
    cells = load("execution").CELL.findall((TUTORIAL / "appendix-autodiff.md").read_text(encoding="utf-8"))
    assert sum(len(cell.splitlines()) for _, cell in cells) <= 300


def test_checks_of_exercises_say_what_was_expected_and_received() -> None:
    check = load("tutorial/exercises").check
    check(lambda: [0.25, 0.5 + 1e-9], np.asarray([0.25, 0.5]))
    check(lambda: ["a", "b"], ["a", "b"])
    for answer, message in [
        (lambda: [0.25, 0.75], r"expected \[0.25, 0.5\], received \[0.25, 0.75\]"),
        (lambda: [0.25], r"expected shape \(2,\), received shape \(1,\): \[0.25\]"),
        (lambda: None, r"expected shape \(2,\), received one value: None"),
        (lambda: ["a", "b"], r"expected \[0.25, 0.5\], received \['a', 'b'\]"),
        (lambda: undefined, "name 'undefined' is not defined: write the answer"),  # noqa: F821
    ]:
        with pytest.raises(AssertionError, match=message):
            check(answer, [0.25, 0.5])

    def answer_with_mistake() -> Any:
        return missing  # noqa: F821

    with pytest.raises(AssertionError, match="'missing' is not defined") as error:
        check(lambda: answer_with_mistake(), 0)
    assert isinstance(error.value.__cause__, NameError)


def test_notebooks_that_were_edited_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jupytext = pytest.importorskip("jupytext")
    notebooks = load("notebooks")
    names = ("1-attention", "2-multi-head-attention", "index")
    (tmp_path / "pages").mkdir()
    for name in ("bank.json", *(f"{name}.md" for name in names)):
        shutil.copy(TUTORIAL / name, tmp_path / "pages")
    monkeypatch.setattr(notebooks, "PAGES", tmp_path / "pages")
    notebooks.write(tmp_path)
    edited, other, stale = (tmp_path / f"{name}.ipynb" for name in names)
    notebook = jupytext.read(edited)
    hidden = [cell.source for cell in notebook.cells if cell.metadata.get("jupyter") == {"source_hidden": True}]
    assert any("imshow" in source for source in hidden)
    links = {link for cell in notebook.cells for link in re.findall(r"\]\(([^)#:]+)\)", cell.source)}
    assert links >= {"2-multi-head-attention.ipynb"}
    notebook.cells[-1].source += "  # MY ANSWER"
    jupytext.write(notebook, edited)
    # A page that changed replaces its notebook, unless that was edited; what cells print is no edit.
    for path, source in ((other, None), (stale, "An older text.")):
        notebook = jupytext.read(path)
        notebook.metadata["mark"] = True
        if source is not None:
            notebook.cells[0].source = source
            notebook.metadata["xformer"] = {"digest": notebooks.digest(notebook)}
        jupytext.write(notebook, path)
    capsys.readouterr()
    notebooks.write(tmp_path)
    assert capsys.readouterr().out == f"{edited} was edited and stays as it is; delete it to get the page anew\n"
    assert "MY ANSWER" in edited.read_text(encoding="utf-8")
    assert "mark" in jupytext.read(other).metadata
    assert "mark" not in jupytext.read(stale).metadata
    assert (tmp_path / "bank.json").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_llama_in_numpy_agrees_on_tied_and_untied_models(tmp_path: Path, dtype: str) -> None:
    llama = load("tutorial/llama_numpy")
    config = xf.LanguageModelConfig(
        vocab_size=11, d_model=16, num_heads=4, num_key_value_heads=2, d_ff=24, num_layers=2, activation="swiglu",
        norm="rms", positions="rotary", attention_bias=False, attention_output_bias=False, feed_forward_bias=False,
        scale_embeddings=False, tie_output=dtype == "float32", eos_id=2,
    )  # fmt: skip
    model = xf.LanguageModel(config, seed=0)
    xf.save_pretrained(model.to(dtype=dtype), tmp_path)
    weights = llama.read_safetensors(tmp_path / "model.safetensors")
    settings = {"num_attention_heads": 4, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    logits = llama.forward(weights, settings, [3, 1, 4, 1, 5], [])
    expected = model.to(dtype=dtype).to(dtype="float32")([[3, 1, 4, 1, 5]])[0]
    np.testing.assert_allclose(logits, expected, atol=1e-5)


if __name__ == "__main__":
    PRINTED.mkdir(exist_ok=True)
    for path in sorted(TUTORIAL.glob("*.md")):
        printed = printed_by(path, TUTORIAL / "figures")
        (PRINTED / f"{path.stem}.txt").write_text(printed, encoding="utf-8", newline="\n")
