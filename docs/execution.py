"""Execution of the tutorial's code: in the site, as a hook of MkDocs, and in a terminal.

python docs/execution.py docs/tutorial/1-attention.md [FOLDER]  # prints what the page prints, and writes its figures
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import io
import os
import re
import sys
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "tutorial"
CACHE = ROOT / ".cache" / "tutorial"
CELL = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NO_OUTPUT = re.compile(
    r'<div class="result">\s*<div class="highlight"><pre><span></span><code>\s*</code></pre></div>\s*</div>'
)
# Figures draw text and axes in this gray; it becomes the color of the page's text.
TEXT_COLOR = "#7f7f7f"
FIGURE_STYLE = {
    "figure.figsize": (6.4, 3.2),
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.framealpha": 0.0,
    "savefig.facecolor": "none",
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": "cycler('color', ['4c8dd6', 'e0803a', '45a56b', 'c65b8e', '9a7fd1', 'b09a3c'])",
    **dict.fromkeys(
        ["text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"],
        TEXT_COLOR,
    ),
}
# Figures of the tutorial are files, which have the colors of the page that shows them.
STYLE = "><style>svg{color:#24292f}@media (prefers-color-scheme:dark){svg{color:#d0d7de}}</style>"
figure_ids = count()


def prepare() -> None:
    """Let cells import the modules beside their page, as in a notebook, and draw for light and dark pages."""
    import matplotlib as mpl

    sys.path.append(str(PAGES))
    mpl.use("agg")
    mpl.rcParams.update(FIGURE_STYLE)


def take_figures() -> str:
    """Return all open figures as SVG elements, and close them."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    elements = []
    for number in plt.get_fignums():
        svg = io.StringIO()
        # A different salt for every figure keeps the ids in one page distinct.
        with mpl.rc_context({"svg.hashsalt": f"figure {next(figure_ids)}"}):
            plt.figure(number).savefig(svg, format="svg", metadata={"Date": None})
        element = svg.getvalue()[svg.getvalue().index("<svg") :].replace(TEXT_COLOR, "currentColor")
        elements.append(f'<div class="figure">{element}</div>')
    plt.close("all")
    return "".join(elements)


def execute(page: Path, folder: Path | None = None) -> None:
    """Execute every block of a page that is fenced as python, and write its figures. Source code is not printed."""
    cells, number = CELL.findall(page.read_text(encoding="utf-8")), count(1)
    prepare()
    folder = folder and folder.resolve()
    os.chdir(PAGES)
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    for index, (options, cell) in enumerate(cells, start=1):
        code = compile(cell, f"{page.name}, cell {index}", "exec")
        with contextlib.redirect_stdout(io.StringIO() if 'result="python"' in options else sys.stdout):
            exec(code, namespace)
        for element in re.findall(r"<svg.*?</svg>", take_figures(), re.DOTALL):
            if folder is not None:
                svg = re.sub(r"\s*<metadata>.*?</metadata>", "", element, flags=re.DOTALL).replace(">", STYLE, 1)
                (folder / f"{page.stem}-{next(number)}.svg").write_text(f"{svg}\n", encoding="utf-8")


class Session:
    """The cells of one page, executed in order. Results come from the cache while all cells before are unchanged."""

    def __init__(self, page: str) -> None:
        """Start a session: the first key depends on the page and on the source of xformer."""
        self.page = page
        self.is_executing = False  # the source of a cell, which is shown, is a python block, too
        self.skipped: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        digest = hashlib.sha256(page.encode())
        beside = [path for path in sorted(PAGES.iterdir()) if path.suffix in (".py", ".json")]
        for source in [Path(__file__), *beside, *sorted((ROOT / "xformer").rglob("*.py"))]:
            digest.update(source.read_bytes())
        self.key = digest.hexdigest()

    def validate(self, language: str, inputs: dict[str, str], options: dict[str, Any], *arguments: Any) -> bool:
        """Accept python blocks of the tutorial: show their source and, below it, what they print."""
        from markdown_exec import validator

        if self.is_executing or not self.page.startswith("tutorial/"):
            return False
        defaults = {"exec": "on", "session": self.page, "source": "block", "result": "text", "workdir": str(PAGES)}
        inputs = inputs | ({"source": "block"} if inputs.get("source") == "folded" else {})
        return validator(language, defaults | inputs, options, *arguments)

    def format(self, source: str, *arguments: Any, **keywords: Any) -> str:
        """Return the HTML of a cell and its output."""
        self.key = hashlib.sha256(f"{self.key}{source}".encode()).hexdigest()
        cached = CACHE / f"{self.key}.html"
        if cached.exists():
            self.skipped.append(((source, *arguments), keywords))
            return cached.read_text(encoding="utf-8")
        for skipped, skipped_keywords in self.skipped:  # this cell needs their variables
            self.execute(*skipped, **skipped_keywords)
        self.skipped.clear()
        output = self.execute(source, *arguments, **keywords)
        CACHE.mkdir(parents=True, exist_ok=True)
        cached.write_text(output, encoding="utf-8")
        return output

    def execute(self, *arguments: Any, **keywords: Any) -> str:
        """Execute a cell without the cache. A cell that raises ends the build: other exceptions would be swallowed."""
        from markdown_exec import formatter
        from pymdownx.superfences import SuperFencesException

        self.is_executing = True
        try:
            output = NO_OUTPUT.sub("", str(formatter(*arguments, **keywords)))
        finally:
            self.is_executing = False
        text = html.unescape(re.sub("<[^>]*>", "", output))
        if "Traceback (most recent call last)" in text:
            raise SuperFencesException(f"{self.page}: {text}")
        take_figures()  # files beside the page, which show the same everywhere
        return output


session = Session("")


def on_config(config: Any) -> Any:
    """Execute python blocks: a hook of MkDocs."""
    prepare()
    fences = config["mdx_configs"].setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append(
        {
            "name": "python",
            "class": "python",
            "validator": lambda *arguments: session.validate(*arguments),
            "format": lambda *arguments, **keywords: session.format(*arguments, **keywords),
        }
    )
    return config


def on_page_markdown(markdown: str, *, page: Any, **arguments: Any) -> str:
    """Give every page a separate session: a hook of MkDocs."""
    global session
    session = Session(page.file.src_uri)
    return markdown


def on_page_content(content: str, *, page: Any, **arguments: Any) -> str:
    """Refuse examples that are not code: Markdown takes `>>>` outside of a section `Examples:` for a quotation."""
    from mkdocs.exceptions import PluginError

    if re.search(r"(<blockquote>\s*){3}", content):
        raise PluginError(f"{page.file.src_uri}: an example is shown as a quotation; its section is called 'Examples:'")
    return content


if __name__ == "__main__":
    execute(Path(sys.argv[1]), *map(Path, sys.argv[2:]))
