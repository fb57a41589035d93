"""The array library that a command computes with."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from xformer.backends import BACKENDS, resolve
from xformer.errors import BackendError
from xformer.kernels.registry import load
from xformer.threads import disable_malloc_trim, num_threads
from xformer.training.precision import check_precision

BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="NAME",
        help=f"Array library to compute with: {', '.join(BACKENDS)}. Those that are not installed say how to.",
        rich_help_panel="Computing",
    ),
]


def open_backend(name: str, dtype: str | None = None, precision: str = "float32") -> Any:
    """Return the namespace of a library and make the process ready to compute with it.

    dtype: what the model will be in, where that is known; precision: what it will be trained in.
    Raises BackendError when the library is unknown, not installed, finds no device, or cannot compute in the precision;
    ConfigError for what XFORMER_KERNELS, XFORMER_CHECK_KERNELS or XFORMER_NUM_THREADS cannot be.
    """
    xp = resolve(name)
    disable_malloc_trim()
    if name == "jax" and dtype == "float64":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
    if name == "torch":
        torch = importlib.import_module("torch")
        torch.set_num_threads(min(num_threads(), torch.get_num_threads()))
    try:
        array = xp.zeros(1, dtype=xp.float32)
    except (RuntimeError, OSError) as error:
        # The first array is where a library without a usable device gives up.
        reason = " ".join(str(error).split())
        raise BackendError(f"backend {name!r} is installed but cannot compute here: {reason}") from error
    check_precision(precision, array)
    load(xp)
    num_threads()
    return xp
