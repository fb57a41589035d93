r"""The `xformer` command: parse the arguments, run one command, report errors as one line.

Run public checkpoints, and train translators, summarizers, classifiers and language models, on any array library.

\b
Chat               xformer generate --model SmolLM2.gguf --chat --prompt "Hello"
Vectors of texts   xformer embed --model all-MiniLM-L6-v2 --input texts --output vectors.npy
Order passages     xformer rerank --model ms-marco-MiniLM-L6-v2 --query "..." --input texts
Transcribe         xformer transcribe --model whisper-tiny speech.wav
Inspect a model    xformer inspect all-MiniLM-L6-v2

\b
Try it out         xformer demo
Train              xformer train --source train.de --target train.en \
                     --valid-source val.de --valid-target val.en --out run
Resume             xformer resume run
Translate          xformer translate --model run --input test.de
Summarize          xformer summarize --model run --input documents
Language model     xformer train-lm --text input.txt --out run
Generate           xformer generate --model run --prompt "ROMEO:"
Classifier         xformer classify --train train.tsv --init bert-base-uncased --out run
Classify           xformer classify --model run --input texts
Score              xformer score --reference test.en --hypothesis out.en
Inspect a run      xformer inspect run
Export a run       xformer export run checkpoint
Explore and serve  xformer serve --model run
Check a library    xformer check-backend mlx.core
Check a machine    xformer verify
Measure speed      xformer bench attention

Text files are UTF-8 with one sentence per line (any text for train-lm). Run `xformer COMMAND --help` for the options
and examples of a command.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_REQUIRED = ("typer", "rich")
# The list of --help. Each command is the function of its name in the module of its name, whose docstring is its help.
COMMANDS = {
    "demo": "Train a small translator on made-up text, in a minute.",
    "train": "Train a translator or summarizer on parallel text.",
    "train-lm": "Train a language model on plain text or chats.",
    "classify": "Train a classifier of texts, and classify texts.",
    "resume": "Continue a training run, or train a finished one longer.",
    "translate": "Translate text, line by line.",
    "summarize": "Summarize documents, one per line.",
    "transcribe": "Write the text of WAV files.",
    "generate": "Continue prompts, or answer them, with a language model.",
    "embed": "Compute a vector for each line of a file.",
    "rerank": "Order the lines of a file by a query.",
    "score": "Score translations or summaries.",
    "inspect": "Show a run, a public checkpoint, or the environment.",
    "export": "Write the best model of a run for another library.",
    "serve": "Serve models: a page to explore them, and an HTTP API.",
    "check-backend": "Check whether Transformers run on an array library.",
    "verify": "Check that this machine computes the expected bits.",
    "bench": "Measure speed and memory on this machine.",
}

# What other programs call commands.
_OTHER_COMMANDS = {
    "chat": "generate --chat",
    "convert": "export",
    "finetune": "train --init, train-lm --init or classify --init",
}
EPILOG = "Exit codes: 0 success; 2 invalid input, reported in one line on stderr; 130 interrupted by Ctrl-C."


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with its exit code.

    Args:
        arguments: Command-line arguments; default those of the process.
    """
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "22")  # 2^22 cycles: idle threads of NumPy would spin for 2^26
    gc.disable()
    try:
        _open_closed_streams()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # print "?" for characters that the terminal cannot encode
        _log_to_stderr()
        code = exit_code(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        code = 130
    exec("")  # forget a KeyboardInterrupt inside exec, as of dataclasses: Python would end by the signal instead
    gc.freeze()  # Python would look for garbage before it ends
    sys.exit(code)


def _open_closed_streams() -> None:
    """Connect closed standard streams to nothing, so that messages disappear and no file gets their descriptors.

    Python leaves them None. Standard input stays None, since text is expected there.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor
            os.set_inheritable(number, True)
            if name != "stdin":
                setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - kept open


def _log_to_stderr() -> None:
    """Print messages of the package to the current sys.stderr, which a progress bar replaces so that it stays below."""
    import logging  # here, as other modules: Ctrl-C is handled only when this module has been imported

    logging.getLogger("xformer").setLevel(logging.INFO)
    if logging.lastResort is not None:  # the handler of loggers without one
        logging.lastResort.setLevel(logging.INFO)


def exit_code(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; errors are printed as one line on stderr."""
    from importlib.util import find_spec

    missing = [name for name in _REQUIRED if find_spec(name) is None]
    if missing:
        from xformer.errors import how_to_install

        return _fail(f"the command xformer needs {' and '.join(missing)}; {how_to_install(missing[0])}")
    try:
        arguments = list(arguments) or ["--help"]
        app = _load_app(arguments)
        if not gc.isenabled():  # `run` has started the process; nothing that has been imported becomes garbage
            gc.freeze()
            gc.enable()
        code = app(arguments, prog_name="xformer", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:  # the reader has closed the pipe; flushing at exit must not raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if type(error).__name__ == "Abort":  # Ctrl-C in older versions of typer; newer ones return 130
            return 130
        message = _message(error)
        if message is None:
            raise
        return _fail(message)


def _load_app(arguments: Sequence[str]) -> Any:
    """Return the typer application; Ctrl-C meanwhile ends the process at once.

    KeyboardInterrupt could be lost while modules are imported, or become another exception. Nothing is to be saved.
    """
    import signal
    import threading

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) != signal.default_int_handler:  # e.g. ignored, under nohup
        return _make_app(arguments)
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    try:
        return _make_app(arguments)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _make_app(arguments: Sequence[str]) -> Any:
    """Return the typer application, which parses the arguments and runs a command; only that command is imported."""
    import typer
    from typer import core

    import xformer

    def show_version(requested: bool) -> None:
        if requested:
            typer.echo(f"xformer {xformer.__version__}")
            raise typer.Exit

    version = typer.Option(False, "--version", help="Print the version.", callback=show_version, is_eager=True)

    def root(version: bool = version) -> None:
        pass

    parameter: Any = getattr(core, "_TyperParameter", None)
    if hasattr(parameter, "get_runtime_param"):  # in newer versions
        parameter.get_runtime_param = lambda self: SimpleNamespace(coerce=partial(_read, self.type_descriptor))
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    app = typer.Typer(
        help=_help(__doc__),
        epilog=EPILOG,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich" if chosen else None,  # importing rich takes longer than the rest of --help
    )
    app.callback()(root)
    for name, summary in COMMANDS.items():
        command, description = root, summary
        if name == chosen:
            function = name.replace("-", "_")
            module = importlib.import_module(f"xformer.cli.{function}")
            command, description = getattr(module, function), _help(module.__doc__)
        app.command(name, help=description)(command)
    return app


_READERS: dict[Any, Any] = {str: str, int: int, float: float, Path: Path, list[str]: list}


def _read(descriptor: Any, value: Any, param: Any, ctx: Any) -> Any:
    """Return the value of an option as typer does, which imports pydantic for it: that takes longer than NumPy."""
    if value is None:
        return () if param.multiple or param.nargs == -1 else None
    with contextlib.suppress(ValueError):
        if descriptor.annotation in _READERS and not descriptor.is_ranged:
            return _READERS[descriptor.annotation](value)
    from typer._coercion import build_runtime_param

    return build_runtime_param(descriptor).coerce(value, param, ctx)


def _help(docstring: str | None) -> str:
    """Return the paragraphs of a docstring but the first; a backslash and b before one keep its lines."""
    _, *paragraphs = (docstring or "").rstrip().split("\n\n")
    return "\n\n".join(p.replace("\\b", "\b", 1) if p.startswith("\\b") else " ".join(p.split()) for p in paragraphs)


def _message(error: Exception) -> str | None:
    """Return the error message for the user, or None for an error that is a bug of ours."""
    from xformer.errors import XformerError, is_out_of_memory

    if hasattr(error, "format_message"):  # a usage error of click, or of typer's copy of it
        message = error.format_message().strip().rstrip(".")
        context = getattr(error, "ctx", None)
        command = "xformer" if context is None else context.command_path
        hint = next((f"; use {hint}" for name, hint in _OTHER_COMMANDS.items() if f"command '{name}'" in message), "")
        option = getattr(error, "option_name", None)
        if option == "--task" and command.endswith("demo"):
            hint = "; programs for other tasks are in docs/examples/"
        elif option and command.endswith(("train", "train-lm", "classify")):
            from xformer.runs.recipe import setting

            hint = f"; use --set {name}=VALUE" if (name := setting(command.split()[-1], option)) else hint
        return f"{message[:1].lower()}{message[1:]}{hint}; see: {command} --help"
    if isinstance(error, XformerError):
        return str(error)
    if is_out_of_memory(error):
        return (
            f"out of memory ({str(error) or type(error).__name__}); use a smaller batch (batch_tokens, batch_size) "
            "or a smaller model"
        )
    if not isinstance(error, OSError):
        return None
    if error.filename:
        return f"{error.filename}: {error.strerror or error}"
    return f"cannot write the output: {error.strerror}" if error.errno else str(error)


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2
