"""The commands put together, and what becomes of their errors."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

import xformer
from xformer.cli import demo, generate, inspect, score, summarize, train, train_lm, translate
from xformer.errors import ConfigError, XformerError
from xformer.memory import shortage

HELP = """Train Transformers that translate, and translate with them, on any array library.

\b
See it work        xformer demo
Train              xformer train --source train.de --target train.en \\
                     --valid-source val.de --valid-target val.en --out run
Translate          xformer translate --model run --input test.de
Summarise          xformer summarize --model run --input documents
Learn a text       xformer train-lm --text input.txt --out run
Write more of it   xformer generate --model run --prompt "ROMEO:"
Score              xformer score --reference test.en --hypothesis out.en
Look into a run    xformer inspect run
Measure speed      xformer bench attention

Text files are in UTF-8, one sentence a line (for train-lm any text). Every command teaches itself: xformer train --help
"""
EPILOG = "Exit codes: 0 done; 2 bad input, with one line on stderr that says what and how to mend it; 130 Ctrl-C."
# What click, or typer's copy of it, raises for a wrong call: the base of all is ClickException.
_WRONG_CALL: Any = typer.BadParameter.__mro__[2]


def invoke(arguments: list[str]) -> int:
    """Run the command line; returns its exit code, after printing any error as one line."""
    application = _application()
    return _code_of(lambda: application(arguments or ["--help"], prog_name="xformer", standalone_mode=False))


def _application() -> typer.Typer:
    app = typer.Typer(
        help=HELP, epilog=EPILOG, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )
    app.callback()(_root)
    for module, command in (
        (demo, demo.demo),
        (train, train.train),
        (train_lm, train_lm.train_lm),
        (translate, translate.translate),
        (summarize, summarize.summarize),
        (generate, generate.generate),
        (score, score.score),
        (inspect, inspect.inspect),
    ):
        app.command(command.__name__.replace("_", "-"), help=module.HELP)(_guarded(command))
    if importlib.util.find_spec("xformer.cli.bench") is not None:
        bench = importlib.import_module("xformer.cli.bench")
        app.command("bench", help=bench.HELP)(_guarded(bench.bench))
    else:
        said = NO_BENCH.replace("[", "\\[")  # rich takes brackets for its own
        app.command("bench", help=said, context_settings={"ignore_unknown_options": True})(_guarded(_no_bench))
    return app


NO_BENCH = "The wheel carries no benchmarks; in a checkout of xformer, run: pip install -e '.[cli]'"


def _no_bench(_: Annotated[list[str] | None, typer.Argument(metavar="WORK", hidden=True)] = None) -> None:
    raise ConfigError(NO_BENCH[0].lower() + NO_BENCH[1:])


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"xformer {xformer.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _guarded(command: Callable[..., int | None]) -> Callable[..., int]:
    """Make a command return its exit code, whatever happens."""

    @functools.wraps(command)
    def guarded(*arguments: Any, **options: Any) -> int:
        # Here already, because the library around the commands treats some errors in ways of its own.
        return _code_of(lambda: command(*arguments, **options), options)

    return guarded


def _code_of(call: Callable[[], int | None], options: Collection[str] = ()) -> int:
    """Call something that has these options; returns its exit code, after printing any error as one line."""
    try:
        code = call() or 0
        sys.stdout.flush()
    except XformerError as error:
        return _fail(str(error))
    except _WRONG_CALL as error:
        return _fail(_usage(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        _drop_output()  # whoever read it has enough
        return 141
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        short = shortage(error)
        if short is not None:
            return _fail(f"out of memory: {short}; {_less_memory(options)}")
        if not isinstance(error, OSError):
            raise
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        if error.filename:
            return _fail(f"{error.filename}: {error.strerror or error}")
        if error.errno is None:  # not the system's: a library could not be loaded
            return _fail(str(error))
        return _fail(f"cannot write the output: {error.strerror or error}; free space, or choose another place")
    return int(code)


def _less_memory(options: Collection[str]) -> str:
    """How a command with these options needs less memory."""
    if "batch_tokens" in options:
        return "lower --batch-tokens"
    return (
        "lower batch_tokens or batch_size in the recipe, or its model"
        if "recipe" in options
        else "end other programs, or raise the limit"
    )


def _drop_output() -> None:
    """Make sure that what is left in the buffer does not raise again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _usage(error: Any) -> str:
    """The message of a wrong call, with the place to look."""
    message = error.format_message().strip().rstrip(".")
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "xformer"
    return f"{message[:1].lower()}{message[1:]}; see: {where} --help"
