"""Write the pages of the tutorial as notebooks: `python docs/notebooks.py FOLDER`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import jupytext
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

PAGES = Path(__file__).parent / "tutorial"
SOLUTION = "<details markdown>"
# A notebook draws its figures itself, and folds their code.
FIGURE = re.compile(
    r"^<details markdown>\n<summary>Code of the figure</summary>\n\n(.*?)\n\n</details>$", re.DOTALL | re.MULTILINE
)
IMAGE = re.compile(r"\n\n!\[[^\]]*\]\(figures/[^)]*\)$", re.MULTILINE)


def fold_solutions(cells: list[NotebookNode]) -> list[NotebookNode]:
    """Turn each solution into text that is folded, after an empty cell; its check may fail until that is filled in."""
    folded: list[NotebookNode] = []
    solution: list[str] = []
    for cell in cells:
        if solution:  # between <details> and </details>: code becomes text
            solution.append(f"```python\n{cell.source}\n```" if cell.cell_type == "code" else cell.source)
            if cell.source.endswith("</details>"):
                folded.append(new_markdown_cell("\n\n".join(solution).replace(SOLUTION, "<details>")))
                solution = []
        elif cell.cell_type == "markdown" and SOLUTION in cell.source:
            question, rest = cell.source.split(SOLUTION)
            folded += [new_markdown_cell(question.strip()), new_code_cell("# Your answer\n")]
            solution = [SOLUTION + rest]
        else:
            if folded and folded[-1].source.endswith("</details>"):
                cell.metadata["tags"] = ["raises-exception"]
            folded.append(cell)
    return folded


def commands_as_text(cell: NotebookNode) -> NotebookNode:
    """Turn a block of shell commands, which Jupytext reads as a cell with a %% magic, back into text."""
    if cell.cell_type == "code" and cell.source.startswith("%%"):
        language, commands = cell.source.removeprefix("%%").split("\n", 1)
        return new_markdown_cell(f"```{language}\n{commands}\n```")
    return cell


def notebook_of(page: Path, folder: Path) -> NotebookNode:
    """Return the notebook of a page, whose links lead from `folder` to other notebooks and to the documentation."""
    text = IMAGE.sub("", FIGURE.sub(r"\1", page.read_text(encoding="utf-8")))
    notebook = jupytext.reads(text, fmt="md")
    notebook.cells = fold_solutions([commands_as_text(cell) for cell in notebook.cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    docs = Path(os.path.relpath(PAGES.parent, folder)).as_posix()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\(([\w-]+)\.md", r"](\1.ipynb", cell.source)
            cell.source = re.sub(r"\]\(\.\./", f"]({docs}/", cell.source)
        elif cell.metadata.get("source") == "folded":
            cell.metadata["jupyter"] = {"source_hidden": True}
    notebook.metadata["xformer"] = {"digest": digest(notebook)}
    return notebook


def digest(notebook: NotebookNode) -> str:
    """Return a digest of the cells, which is stored when they are written and differs once they are edited."""
    cells = [[cell.cell_type, cell.source] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def write(folder: Path) -> None:
    """Write one notebook per page, and the files that its cells read. Notebooks that were edited stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted(PAGES.glob("*.md")):
        path = folder / f"{page.stem}.ipynb"
        notebook = notebook_of(page, folder)
        if path.exists():
            current = jupytext.read(path)
            if current.metadata.get("xformer") != {"digest": digest(current)}:
                print(f"{path} was edited and stays as it is; delete it to get the page anew")
                continue
            if current.metadata["xformer"] == notebook.metadata["xformer"]:
                continue  # keeps its outputs
        jupytext.write(notebook, path)
    for file in PAGES.iterdir():
        if file.suffix in (".py", ".json"):
            shutil.copy(file, folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
