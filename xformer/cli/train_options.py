"""Options that every command of training has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

DATA, LENGTH, SETTINGS, COMPUTING = "Text", "How long", "Settings", "Computing"


def file_option(option: str, what: str) -> Any:
    """An option that names a file of text."""
    return typer.Option(option, metavar="FILE", help=what, rich_help_panel=DATA)


OutOption = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Directory of the run: new or empty.", rich_help_panel=DATA)
]
MaxMinutesOption = Annotated[
    float | None,
    typer.Option(
        help="End after this many minutes of wall time, validation included, over all sittings "
        "(default: the recipe's; 30 when nothing else ends the run).",
        rich_help_panel=LENGTH,
    ),
]
MaxUpdatesOption = Annotated[
    int | None,
    typer.Option(
        help="End after this many updates (default: the recipe's). The cosine schedule reaches its end there, so "
        "moving it changes later learning rates.",
        rich_help_panel=LENGTH,
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with the run in DIR: same text, same settings; only its end may be moved.",
        rich_help_panel=LENGTH,
    ),
]
RecipeOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE.toml", help="Settings of model, tokenizer, training.", rich_help_panel=SETTINGS),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        help="The same seed gives the same model, to the bit, on the same machine (default: the recipe's, or 0).",
        rich_help_panel=SETTINGS,
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="float32|float64",
        help="Of the parameters, and of what is computed, but for --precision (default: the recipe's, or float32).",
        rich_help_panel=COMPUTING,
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        metavar="bfloat16|float16|float32",
        help="Mixed precision, with --dtype float32: forward and backward are computed in it, parameters stay in "
        "float32. It pays where the hardware multiplies 16-bit numbers (default: the recipe's, or float32: none).",
        rich_help_panel=COMPUTING,
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Array library to compute with: numpy (default), cupy, torch, jax or array_api_strict.",
        rich_help_panel=COMPUTING,
    ),
]
