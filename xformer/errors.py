"""The errors that xformer raises on bad input.

Every message says what came, what was expected and how to mend it, in one line.
"""

from __future__ import annotations


class XformerError(Exception):
    """Base of all errors that xformer raises on purpose; the command line turns it into one line, exit code 2."""


class ShapeError(XformerError, ValueError):
    """An array has a shape or dtype that the operation cannot take."""


class BackendError(XformerError, TypeError):
    """An array library is unknown or absent, or arrays of two libraries or devices were mixed."""


class ConfigError(XformerError, ValueError):
    """A configuration value, recipe key or command-line option is not usable."""


class DataError(XformerError, ValueError):
    """Text or token ids are not usable: line counts differ, invalid UTF-8, an id out of range."""


class CheckpointError(XformerError, OSError):
    """A model, tokenizer or training state could not be read or written; what was saved before is intact."""


class TrainingError(XformerError, ArithmeticError):
    """Training cannot go on: the loss or the gradient norm is no longer finite."""


class OutOfMemoryError(XformerError, MemoryError):
    """Memory ran out, on the host or on a device; what was saved before is intact."""


# What to install for a package, where that is not its name.
_WHEELS = {
    "cupy": "'cupy-cuda13x[ctk]' ml_dtypes",
    "ml_dtypes": "ml_dtypes",
    "cudnn": "nvidia-cudnn-frontend nvidia-cudnn-cu13",
}


def how_to_install(package: str) -> str:
    """How to mend the absence of a package that is imported by this name.

    >>> how_to_install("rouge_score.rouge_scorer")
    'run: pip install rouge-score'
    """
    name = package.split(".")[0]
    return f"run: pip install {_WHEELS.get(name, name.replace('_', '-'))}"
