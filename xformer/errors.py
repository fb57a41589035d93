"""The errors that xformer raises.

Each message says in one line what was received, what was expected and how to fix it.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from xformer.hints import ARGUMENTS, MOVED

Function = TypeVar("Function", bound=Callable[..., Any])


class XformerError(Exception):
    """Base class of all errors; the command line prints one line and exits with code 2."""

    def __str__(self) -> str:
        """Return the message in one line; long values from files and requests are shortened."""
        return abbreviate(" ".join(super().__str__().splitlines()))


class ShapeError(XformerError, ValueError):
    """An array has an invalid shape or dtype."""


class BackendError(XformerError, TypeError):
    """An array library is unknown or not installed, or arrays of two libraries or devices were mixed."""


class MissingPackageError(BackendError):
    """An optional package cannot be imported."""


class ConfigError(XformerError, ValueError):
    """A configuration value, recipe key or command-line option is invalid."""


class DataError(XformerError, ValueError):
    """Text or token ids are invalid: line counts differ, the text is not UTF-8, or an id is out of range."""


class CheckpointError(XformerError, OSError):
    """A model, tokenizer or training state cannot be read or written; earlier files are intact."""


class DifferentiationError(XformerError, NotImplementedError):
    """A function cannot be differentiated: a derivative is unknown, or a traced array is used outside its trace."""


class JitError(XformerError, RuntimeError):
    """A function cannot be traced by `jit`: it reads values on the host, or its shapes depend on values."""


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
    **{name: name for name in ("ctranslate2", "cudnn", "jax", "torch")},
    **dict.fromkeys(("msgspec", "soundfile", "starlette", "uvicorn"), "serve"),
    "distributed": "dask",
    "llguidance": "grammar",
    "mpi4py": "mpi",
    "cupy": "cuda",
    "PIL": "images",
    "tensorboardX": "tensorboard",
    **dict.fromkeys(("onnxruntime", "spox"), "onnx"),
}


def how_to_install(package: str) -> str:
    """Return the command that installs an optional package, given its import name.

    Examples:
        >>> how_to_install("rouge_score.rouge_scorer")
        'run: pip install "array-transformers[cli]"'
    """
    name = package.split(".")[0]
    extra = _EXTRAS.get(name)
    return f"run: pip install {name}" if extra is None else f'run: pip install "array-transformers[{extra}]"'


def abbreviate(text: str, limit: int = 800) -> str:
    """Return a text with its middle left out if it is longer than the limit.

    Examples:
        >>> abbreviate("layer_types is " + str([0] * 99) + "; expected names", 40)
        'layer_types is [0, ... ; expected names'
    """
    if len(text) <= limit:
        return text
    end = 2 * limit // 5
    return f"{text[: limit - end - 5].rstrip()} ... {text[-end:].lstrip()}"


def describe_type(value: Any) -> str:
    """Name the class of a wrong argument, with a hint for a pipeline, which has a model."""
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    name = type(value).__name__
    article = "an" if name[0] in "AEIOaeio" else "a"
    has_model = not isinstance(getattr(value, "model", ""), str)  # a tokenizer has the name of its model
    return f"{article} {name}{' (pass its .model)' if has_model else ''}"


def nearest_hint(name: str, known: Collection[str], hints: Mapping[str, str] | None = None) -> str:
    """Suggest what to use instead of an unknown name.

    Args:
        name: The unknown name.
        known: All known names.
        hints: Sentences for names of other libraries.

    Examples:
        >>> nearest_hint("lr", ["learning_rate", "steps"])
        "did you mean 'learning_rate'?"
    """
    if hints and name in hints:
        return hints[name]
    synonyms = [each for each in ARGUMENTS.get(name, ()) if each in known]
    near = synonyms or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(sorted(known))}"


def check_choice(subject: str, value: Any, known: Collection[str]) -> None:
    """Raise ConfigError for a value that is not one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{subject} is {value!r}; expected one of {', '.join(known)}")


def check_arguments(**hints: str) -> Callable[[Function], Function]:
    """Decorate a function so that an unknown keyword argument raises ConfigError with a hint.

    Args:
        **hints: Sentences for arguments that only other libraries have.
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return function
        known = [*parameters]

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            try:
                return function(*args, **keywords)
            except XformerError:  # some are TypeErrors
                raise
            except TypeError:
                unknown = [name for name in keywords if name not in known]
                if not unknown:
                    raise
            raise unknown_argument(type(args[0]) if known[0] == "self" else function, unknown, known, hints)

        return call  # type: ignore[return-value]

    return decorate


def unknown_argument(
    function: Any, unknown: Collection[str], known: Collection[str], hints: Mapping[str, str]
) -> ConfigError:
    """Return the error of a function, or of an instance of a class, for arguments that it does not have."""
    name = next(iter(unknown))
    hint = nearest_hint(name, [each for each in known if each not in ("self", "unknown")], hints)
    return ConfigError(f"{function.__name__} got an unknown argument {name!r}; {hint}")


def explain_moved_names(package: str) -> None:
    """Give a package a `__getattr__` whose error says what replaces a former name; type checkers do not see it."""

    def __getattr__(name: str) -> Any:
        new = MOVED[package].get(name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{f'; use {new}' if new else ''}")

    vars(sys.modules[package])["__getattr__"] = __getattr__


class _AbsentMethod:
    """An attribute that is absent, also for hasattr, and whose error says what to use instead."""

    def __init__(self, name: str, hint: str) -> None:
        self._name, self._hint = name, hint

    def __get__(self, instance: Any, cls: type) -> Any:
        hint = f"'{cls.__name__}' object has no attribute '{self._name}'; {self._hint}"
        raise AttributeError(hint, name=self._name, obj=instance)


def add_absent_methods(cls: type, hints: Mapping[str, str]) -> None:
    """Let errors of attributes that only other libraries have say what to use instead; `dir` does not list them."""
    for name, hint in hints.items():
        setattr(cls, name, _AbsentMethod(name, hint))
    listed: Any = cls.__dir__

    def __dir__(self: Any) -> list[str]:
        return [name for name in listed(self) if name not in hints or hasattr(self, name)]

    cls.__dir__ = __dir__  # type: ignore[assignment]


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
