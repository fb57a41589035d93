"""`xformer check-backend`: run small Transformers on an array library, and compare them with NumPy."""

from __future__ import annotations

from typing import Annotated

import typer

from xformer import testing

HELP = """Check whether Transformers run, train and decode on an array library.

Everything is compared with NumPy. A check that fails names the line of xformer and the error of the library. The exit \
code is 0 if all checks pass except those of dtypes, which are optional, and 1 otherwise.

\b
  xformer check-backend dpnp
  xformer check-backend mlx.core --group forward --group gradients
  xformer check-backend torch --json > torch.json
"""


def check_backend(
    module: Annotated[
        str, typer.Argument(metavar="MODULE", help="Module with the functions of the Array API standard.")
    ],
    group: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Group of checks to run; may be repeated. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check an array library."""
    report = testing.check_backend(module, groups=group, on_check=None if as_json else typer.echo)
    typer.echo(report.to_json() if as_json else report.summary())
    raise typer.Exit(0 if report.passed else 1)
