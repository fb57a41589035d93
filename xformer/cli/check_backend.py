r"""`xformer check-backend`: run small Transformers on an array library, and compare them with NumPy.

Check whether Transformers run, train and decode on an array library.

Everything is compared with NumPy. A check that fails names the line of xformer and the error of the library. The exit
code is 0 if all checks pass except those of dtypes, which are optional, and 1 otherwise.

\b
  xformer check-backend dpnp
  xformer check-backend mlx.core --group forward --group gradients
  xformer check-backend torch --json > torch.json
  xformer check-backend torch --group functions --group parts --markdown
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from xformer import testing
from xformer.cli._options import argument, flag, value_option
from xformer.errors import BackendError

_GROUP_HELP = "Group of checks to run; may be repeated. Default: all but functions, derivatives and parts."
_LIMIT_HELP = "End a check after this time, as a failure."


def check_backend(
    module: Annotated[str, argument("MODULE", "Module with the functions of the Array API standard.")],
    group: Annotated[list[str] | None, value_option("--group", "NAME", _GROUP_HELP, None)] = None,
    time_limit: Annotated[float, value_option("--time-limit", "SECONDS", _LIMIT_HELP, None)] = 60.0,
    as_json: Annotated[bool, flag("--json", "Print the report as JSON.")] = False,
    as_markdown: Annotated[bool, flag("--markdown", "Print failures by cause as Markdown.")] = False,
) -> None:
    """Check an array library."""
    try:
        on_check = None if as_json or as_markdown else typer.echo
        report = testing.check_backend(module, groups=group, time_limit=time_limit, on_check=on_check)
    except BackendError as error:
        if not as_json:
            raise
        refused = {"library": module, "version": testing.version_of(module), "error": str(error), "passed": False}
        typer.echo(json.dumps(refused, indent=2))
        raise typer.Exit(1) from error
    typer.echo(report.to_json() if as_json else report.to_markdown() if as_markdown else report.summary())
    raise typer.Exit(0 if report.passed else 1)
