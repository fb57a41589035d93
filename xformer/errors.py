"""The errors that xformer raises.

Each message says in one line what was received, what was expected and how to fix it.
"""

from __future__ import annotations


class XformerError(Exception):
    """Base class of all errors; the command line prints one line and exits with code 2."""


class ShapeError(XformerError, ValueError):
    """An array has an invalid shape or dtype."""


class BackendError(XformerError, TypeError):
    """An array library is unknown or not installed, or arrays of two libraries or devices were mixed."""


class ConfigError(XformerError, ValueError):
    """A configuration value, recipe key or command-line option is invalid."""


class DataError(XformerError, ValueError):
    """Text or token ids are invalid: line counts differ, the text is not UTF-8, or an id is out of range."""


class CheckpointError(XformerError, OSError):
    """A model, tokenizer or training state cannot be read or written; earlier files are intact."""


class TrainingError(XformerError, ArithmeticError):
    """Training stopped because the loss or the gradient norm is not finite."""


class OutOfMemoryError(XformerError, MemoryError):
    """The host or a device ran out of memory; files that were saved before are intact."""


# Distributions of packages with another name.
_WHEELS = {
    "cupy": "'cupy-cuda13x[ctk]' ml_dtypes",
    "ml_dtypes": "ml_dtypes",
    "cudnn": "nvidia-cudnn-frontend nvidia-cudnn-cu13",
}


def how_to_install(package: str) -> str:
    """Return the command that installs a package, given its import name.

    >>> how_to_install("rouge_score.rouge_scorer")
    'run: pip install rouge-score'
    """
    name = package.split(".")[0]
    return f"run: pip install {_WHEELS.get(name, name.replace('_', '-'))}"
