"""The translator of number words on the first page: train and export it, and, as a hook of MkDocs, embed it.

    python docs/translator.py [RUN]

writes the model to docs/assets/translator/model. RUN is the directory of a run that this program trained before; by
default it trains one, which takes some minutes. The site gets the other files of the page when it is built, if the npm
packages of docs/how-to/export-web.md are installed in the directory XFORMER_NPM or in the current one.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from xformer.cli.demo import RECIPE
from xformer.data.demo_tasks import numbers_task
from xformer.errors import ConfigError
from xformer.export import find_runtime
from xformer.export.web import write_explorer
from xformer.pipelines.export import export_run
from xformer.runs.launch import train

FOLDER = "assets/translator"
OUTPUT = Path(__file__).parent / FOLDER / "model"
NPM = os.environ.get("XFORMER_NPM", ".")


def train_small(run: Path) -> None:
    """Train a smaller model than `xformer demo`, for more steps."""
    sizes = {"d_model": 64, "d_ff": 128}
    training = {"max_steps": 4000, "learning_rate_factor": 0.5, "validate_every": 500, "max_minutes": 10.0}
    train(RECIPE, **numbers_task().texts, out=run, **sizes, **training)


def runtime() -> dict[str, Path] | None:
    """Return the files that the page runs on, or None if they are not installed."""
    try:
        return find_runtime(NPM)
    except ConfigError:
        return None


def on_page_markdown(markdown: str, *, page: Any, **arguments: Any) -> str:
    """Add the program that replaces the picture: a hook of MkDocs."""
    if '<div class="translator"' not in markdown or runtime() is None:
        return markdown
    address = "../" * page.file.src_uri.count("/") + f"{FOLDER}/embed.js"
    return f'{markdown}\n\n<script type="module" src="{address}"></script>\n'


def on_post_build(config: Any) -> None:
    """Write the page of the translator around its model: a hook of MkDocs."""
    if (found := runtime()) is not None:
        write_explorer(Path(config.site_dir, FOLDER), found)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        run, page = Path(temporary, "translator"), Path(temporary, "page")
        if sys.argv[1:]:
            run = Path(sys.argv[1])
        else:
            train_small(run)
        print(export_run(run, page, "web", max_length=64, runtime=NPM))
        shutil.rmtree(OUTPUT, ignore_errors=True)
        shutil.copytree(page / "model", OUTPUT)
