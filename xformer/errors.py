"""The errors that xformer raises.

Each message says in one line what was received, what was expected and how to fix it.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Collection, Iterator


class XformerError(Exception):
    """Base class of all errors; the command line prints one line and exits with code 2."""

    def __str__(self) -> str:
        """Return the message; long values from files and requests are shortened."""
        return abbreviate(super().__str__())


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


class DifferentiationError(XformerError, NotImplementedError):
    """A function cannot be differentiated: a derivative is unknown, or a traced array is used outside its trace."""


class CaptureError(XformerError, RuntimeError):
    """A function cannot be captured: it reads values on the host, or its shapes depend on values."""


class CorpusError(XformerError, RuntimeError):
    """Chunks of a corpus failed; the parts on disk are complete, and the same call computes the others."""


class TrainingError(XformerError, ArithmeticError):
    """Training stopped because the loss or the gradient norm is not finite."""


class OutOfMemoryError(XformerError, MemoryError):
    """The host or a device ran out of memory; files that were saved before are intact."""


# Extras of pyproject.toml that install a package, by its import name.
_EXTRAS = {
    **dict.fromkeys(("tokenizers", "jinja2"), "chat"),
    **dict.fromkeys(("matplotlib", "rich", "rouge_score", "sacrebleu", "typer"), "cli"),
    **{name: name for name in ("ctranslate2", "cudnn", "gguf", "jax", "numba", "torch")},
    **dict.fromkeys(("starlette", "uvicorn"), "serve"),
    "distributed": "dask",
    "mpi4py": "mpi",
    "cupy": "cuda",
    "tensorboardX": "tensorboard",
    **dict.fromkeys(("onnxruntime", "spox"), "onnx"),
}


def how_to_install(package: str) -> str:
    """Return the command that installs an optional package, given its import name.

    >>> how_to_install("rouge_score.rouge_scorer")
    'run: pip install "array-transformers[cli]"'
    """
    name = package.split(".")[0]
    extra = _EXTRAS.get(name)
    return f"run: pip install {name}" if extra is None else f'run: pip install "array-transformers[{extra}]"'


def abbreviate(text: str, limit: int = 800) -> str:
    """Return a text with its middle left out if it is longer than the limit.

    >>> abbreviate("layer_types is " + str([0] * 99) + "; expected names", 40)
    'layer_types is [0, ... ; expected names'
    """
    if len(text) <= limit:
        return text
    end = 2 * limit // 5
    return f"{text[: limit - end - 5].rstrip()} ... {text[-end:].lstrip()}"


def nearest_hint(name: str, known: Collection[str]) -> str:
    """Suggest the known name nearest to an unknown one, or list all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(sorted(known))}"


# --- Out of memory ----------------------------------------------------------------------------------------------------

# Raised as RuntimeError by jax, by torch on a CPU, by Python, and by cuBLAS.
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "can't allocate memory", "can't start new thread", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of any library says that memory ran out."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or any(message in str(error) for message in _OUT_OF_MEMORY)
    )


@contextlib.contextmanager
def out_of_memory(operation: str, suggestion: str) -> Iterator[None]:
    """Turn an out-of-memory error inside the block into an OutOfMemoryError that names the operation."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        on_gpu = type(error).__name__ == "OutOfMemoryError" or "CUBLAS" in str(error)  # of torch, CuPy and cuBLAS
        memory = "GPU memory" if on_gpu else "memory"
        raise OutOfMemoryError(f"{operation} ran out of {memory}; {suggestion}") from error
