"""Write the pages of the tutorial as notebooks: `python docs/notebooks.py FOLDER`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jupytext
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

PAGES = Path(__file__).parent / "tutorial"
SOLUTION = "<details markdown>"


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


def write(folder: Path) -> None:
    """Write one notebook per page; links between pages become links between notebooks."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted(PAGES.glob("*.md")):
        notebook = jupytext.read(page)
        cells = [commands_as_text(cell) for cell in notebook.cells]
        notebook.cells = fold_solutions(cells)
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = re.sub(r"\]\(([\w-]+)\.md", r"](\1.ipynb", cell.source)
        jupytext.write(notebook, folder / f"{page.stem}.ipynb")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
