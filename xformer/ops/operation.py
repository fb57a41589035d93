"""Operations: a signature, a portable definition with its VJP, and the kernels that may replace it.

A file of this package has one operation, or a few that belong together, in Array API functions. `xformer/kernels` has
kernels: a module for each library. `README.md` describes all steps of a call.

Three environment variables, read once, when the kernels are loaded:

- `XFORMER_KERNELS`: `auto` (default), `portable` (no kernels), `no-native` (no native library),
  `no-cudnn`, or `no-native,no-cudnn`.
- `XFORMER_CHECK_KERNELS=1`: compare the first call of every kernel, and its derivative, with the definition, and raise
  BackendError if they differ. `0`: do not compare the kernels for CuPy at their first use (see checks.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from xformer import native
from xformer.backends import Library, Namespace, array_namespace, check_same_device, dtype_name, is_half_precision
from xformer.backends.library import loaded_libraries
from xformer.environment import clear_cache, env_flag, env_value
from xformer.errors import ConfigError, DataError, ShapeError, describe_type, nearest_hint
from xformer.ops.checks import checked, guarded
from xformer.threads import Collector, apply_thread_limits, fork_safe_lock

# --- signatures -------------------------------------------------------------------------------------------------------

_KINDS = {
    "float": "a floating dtype in native byte order",
    "int": "integers",
    "bool": "bool, True = keep",
    "real": "a real dtype",
}
_BOOL_HINT = "; compare numbers (mask != 0), or use masks.from_blocked(mask) if 1 means blocked"
_ARGUMENT = re.compile(r"(\w+)(\??): (~?)\(([^)]*)\) (float|int|bool|real)(?:\[0, (\w+)\))?")
_DTYPES: dict[type, dict[Any, tuple[str, str]]] = {}  # kinds and names by class, as dtypes._NAMES


class Argument(NamedTuple):
    """One array of a signature.

    Attributes:
        name: Name of the argument.
        sizes: Names of its last axes.
        more: Name of the leading axes, of any number: "...", or "...[i]" in a repetition; "" if none.
        kind: "float", "int", "bool" or "real".
        is_optional: Whether it may be None.
        is_broadcast: Whether it only has to broadcast to its sizes ("~").
        bound: Name of the size that its values stay below, or "".
        is_nonnegative: Whether its values are at least 0, which is not checked.
    """

    name: str
    sizes: tuple[str, ...]
    more: str
    kind: str
    is_optional: bool
    is_broadcast: bool
    bound: str
    is_nonnegative: bool

    def expected(self) -> str:
        """Return the shape in words, such as "(..., in_features)"."""
        return f"({', '.join([*(['...'] if self.more else []), *self.sizes])})"


class Signature:
    """Shapes and kinds of the arrays of an operation.

        x: (..., i) float, weight: (i, o) float, bias?: (o) float -> (..., o)

    A size has one value in all arrays, and "..." stands for the same axes in all of them. "?" marks an array that may
    be None, "~" one that broadcasts to its shape, "int[0, n)" integers below the size n, and "float[0, inf)" numbers
    that are not negative. The arguments in braces, `{...}*`, are repeated; a size that occurs only there may differ
    from repetition to repetition.

    Args:
        text: The signature.
        conditions: Predicates of the sizes, keyed by a description for the error message.
    """

    def __init__(self, text: str, conditions: Mapping[str, Callable[[dict[str, int]], bool]]) -> None:
        self.text, self.conditions = text, conditions
        inputs, _, _ = text.partition(" -> ")
        fixed, _, repeated = inputs.partition("{")
        self._fixed, self._repeated = _parse(fixed), _parse(repeated)
        self._by_count: dict[int, tuple[Argument, ...]] = {}
        for count in range(4):  # of repetitions; torch.compile traces a call again if it fills a dictionary
            self.arguments("", len(self._fixed) + count * len(self._repeated))

    @property
    def names(self) -> list[str]:
        """Names of the arguments; those that are repeated have a star."""
        return [each.name for each in self._fixed] + [f"*{each.name}" for each in self._repeated]

    def check(self, operation: str, arrays: tuple[Any, ...]) -> str:
        """Raise an error unless the arrays match.

        Args:
            operation: Name of the operation, for the message.
            arrays: The arrays, none of which belongs to the trace of a derivative; absent ones are None.

        Returns:
            The name of the dtype that all floating arrays share, or "" if their dtypes differ.

        Raises:
            ShapeError: If a shape or a dtype is not the expected one.
            DataError: If an integer is out of its range; checked where reading values is cheap.
        """
        arguments = self._by_count.get(len(arrays)) or self.arguments(operation, len(arrays))
        sizes: dict[str, Any] = {}
        common, is_numpy = None, True
        for argument, array in zip(arguments, arrays, strict=True):
            name, names, more, kind, is_optional, is_broadcast, bound, _ = argument
            if array is None and is_optional:
                continue
            is_numpy = is_numpy and type(array) is np.ndarray
            try:
                shape, dtype = array.shape, array.dtype
                known = _DTYPES.get(type(dtype))
                own_kind, dtype = (known.get(dtype) if known else None) or _kind_and_name(dtype)
            except AttributeError:
                received = describe_type(array)
                problem = f"{operation} got {received} as {name}"
                raise ShapeError(f"{problem}; expected an array of shape {argument.expected()}") from None
            if own_kind != kind and not (kind == "real" and own_kind in ("float", "int")):
                hint = _BOOL_HINT if kind == "bool" else ""
                raise ShapeError(f"{operation} got {name} of dtype {dtype}; expected {_KINDS[kind]}{hint}")
            if kind == "float":
                common = dtype if common is None or common == dtype else ""
            if is_broadcast:
                target = (*(sizes[more] if more else ()), *map(sizes.__getitem__, names))
                if tuple(shape) != target and not _broadcasts(shape, target):
                    expected = f"expected a shape that broadcasts to {argument.expected()}, here {target}"
                    raise ShapeError(f"{operation} got {name} of shape {tuple(shape)}; {expected}")
                continue
            extra = len(shape) - len(names)
            if extra < 0 or (extra and not more):
                raise ShapeError(f"{operation} got {name} of shape {tuple(shape)}; expected {argument.expected()}")
            if more and sizes.setdefault(more, shape[:extra]) != shape[:extra]:
                self._raise_mismatch(operation, more, arguments, arrays)
            for size_name, size in zip(names, shape[extra:], strict=True):
                if sizes.setdefault(size_name, size) != size:
                    self._raise_mismatch(operation, size_name, arguments, arrays)
            if bound:
                check = functools.partial(_check_range, operation, name, bound, sizes[bound])
                array_namespace(array).check_range(array, sizes[bound], check)
        for condition, holds in self.conditions.items():
            if not holds(sizes):
                shapes = (
                    f"{each.name} {tuple(x.shape)}" for each, x in zip(arguments, arrays, strict=True) if x is not None
                )
                raise ShapeError(f"{operation} got {', '.join(shapes)}; expected {condition} in {self.text}")
        if not is_numpy:
            check_same_device(arrays)
        return common or ""

    def arguments(self, operation: str, count: int) -> tuple[Argument, ...]:
        """Return the arguments of a call with `count` arrays."""
        repetitions, rest = divmod(count - len(self._fixed), len(self._repeated) or 1)
        if repetitions < 0 or rest or (repetitions and not self._repeated):
            raise ShapeError(f"{operation} got {count} arrays; expected {', '.join(self.names)}")
        shared = {size for each in self._fixed for size in (each.more, *each.sizes)}
        arguments = list(self._fixed)
        for number in range(repetitions):
            for each in self._repeated:
                sizes = tuple(size if size in shared else f"{size}[{number}]" for size in each.sizes)
                more = each.more if each.more in shared or not each.more else f"...[{number}]"
                arguments.append(each._replace(name=f"{each.name}[{number}]", sizes=sizes, more=more))
        self._by_count[count] = tuple(arguments)
        return self._by_count[count]

    def _raise_mismatch(
        self, operation: str, size: str, arguments: tuple[Argument, ...], arrays: tuple[Any, ...]
    ) -> None:
        """Raise ShapeError with all arrays that have a size."""
        having = [
            (argument, tuple(array.shape))
            for argument, array in zip(arguments, arrays, strict=True)
            if hasattr(array, "shape") and (size in (argument.more, *argument.sizes))
        ]
        shapes = " and ".join(f"{argument.name} of shape {shape}" for argument, shape in having)
        expected = ", ".join(f"{argument.name} {argument.expected()}" for argument, _ in having)
        raise ShapeError(f"{operation} got {shapes}; expected {expected} with one value of {size}")


def _parse(text: str) -> tuple[Argument, ...]:
    arguments = []
    for name, optional, broadcast, shape, kind, bound in _ARGUMENT.findall(text):
        sizes = [size for size in shape.replace(" ", "").split(",") if size]
        more = "..." if sizes[:1] == ["..."] else ""
        sizes = sizes[1:] if more else sizes
        is_nonnegative, bound = bound == "inf", "" if bound == "inf" else bound
        arguments.append(
            Argument(name, tuple(sizes), more, kind, bool(optional), bool(broadcast), bound, is_nonnegative)
        )
    if len(arguments) != text.count(": "):
        raise ConfigError(f"signature {text!r} cannot be read; expected arguments such as 'x: (..., n) float'")
    return tuple(arguments)


def _kind_and_name(dtype: Any) -> tuple[str, str]:
    """Return the kind of a dtype, and its name; swapped bytes have no kind."""
    name = dtype_name(dtype)
    kind = re.sub(r"^u?int\d+|^bfloat16|^float\d+", lambda match: "int" if "int" in match[0] else "float", name)
    if not getattr(dtype, "isnative", True):
        kind = name = dtype.str
    _DTYPES.setdefault(type(dtype), {})[dtype] = kind, name
    return kind, name


def _broadcasts(shape: Any, target: tuple[int, ...]) -> bool:
    for size, full in zip(reversed(shape), reversed(target), strict=False):
        if size not in (1, full):
            return False
    return len(shape) <= len(target)


def _check_range(operation: str, name: str, bound: str, size: int, array: Any) -> None:
    """Raise DataError if an integer of an array on the host is not in [0, size)."""
    if 0 in array.shape:
        return
    xp = array_namespace(array)
    array = xp.astype(array, xp.index_dtype, copy=False)  # torch has no minimum of most unsigned integers
    lowest, highest = int(xp.min(array)), int(xp.max(array))
    if lowest < 0 or highest >= size:
        received = f"{operation} got {name} from {lowest} to {highest}"
        raise DataError(f"{received}; expected 0 to {size - 1}, as {bound} is {size}")


# --- operations and kernels -------------------------------------------------------------------------------------------

# The modules of xformer.kernels for a backend. Their lists KERNELS are registered in this order, and of several kernels
# that can run a call, the one registered last does.
_MODULES = {"numpy": ("numpy", "native"), "cupy": ("cupy.kernels", "cupy.cudnn"), "torch": ("torch",)}
OPERATIONS: dict[str, Operation] = {}  # by name; each adds itself when it is created
_LOADED: set[tuple[str, str]] = set()  # backends and values of XFORMER_KERNELS
_LOCK = fork_safe_lock()
_LOG = logging.getLogger(__name__)  # the command line prints it


class Kernel(NamedTuple):
    """An implementation of one operation for one array library.

    Attributes:
        name: Unique name, "module.operation", as in "native.layer_norm".
        operation: Name of the operation.
        backend: Name of the array library, as in "numpy".
        forward: `forward(*arrays, save, **options)` returns (output, residuals). `save` is True if `vjp` needs the
            residuals. An operation with several outputs returns a tuple of them.
        vjp: `vjp(g, residuals, needs, **options)` returns one cotangent for each array, which may be None if `needs` is
            False for it. For several outputs g is the list of their cotangents, None for unused ones. None: the kernel
            has no derivative.
        dtypes: Names of the floating dtypes that it takes, one for all floating arrays of a call. None: any, also
            mixed.
        why_not: `why_not(*arrays, save, **options)` returns None if the kernel can run a call, else the reason in
            words. It need not check what the signature of the operation, or `dtypes`, rules out.
        disabled_by: Value of XFORMER_KERNELS that switches the kernel off, "no-native" or "no-cudnn". "portable"
            switches off every kernel.
        tolerance: Largest relative difference from the definition that XFORMER_CHECK_KERNELS accepts for float32 and
            float64; infinity: it is not compared.
        is_recordable: Whether `jit` records the calls of the native library that the kernel makes, which must be all
            that it computes. Any other kernel is one call of a program.
        records_options: Whether these calls also read the options that are arrays.
        needs_plain_arrays: Whether all arrays must be of the class np.ndarray itself and aligned in memory, as the
            native library reads them.
    """

    name: str
    operation: str
    backend: str
    forward: Callable[..., tuple[Any, Any]]
    vjp: Callable[..., Any] | None
    dtypes: Sequence[str] | None = None
    why_not: Callable[..., str | None] | None = None
    disabled_by: str = ""
    tolerance: float = 1e-4
    is_recordable: bool = False
    records_options: bool = False
    needs_plain_arrays: bool = False

    def refusal(self, arrays: tuple[Any, ...], options: dict[str, Any], dtype: str, *, save: bool) -> str | None:
        """Return None if the kernel can run a call, else the reason; `dtype` is that of all floating arrays, or ""."""
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"{f'dtype {dtype}' if dtype else 'mixed dtypes'} (the kernel takes {' or '.join(self.dtypes)})"
        if self.needs_plain_arrays:
            for array in arrays:
                if array is not None and type(array) is not np.ndarray:
                    return f"an array is a {type(array).__name__}"
                if array is not None and not array.flags.aligned:
                    return "an array is not aligned in memory"
        reason = None if self.why_not is None else self.why_not(*arrays, save=save, **options)
        return "the kernel has no derivative" if reason is None and save and self.vjp is None else reason


def _on(place: AbstractContextManager[Any], kernel: Kernel) -> Kernel:
    """Return a kernel with functions that run on a device."""

    def on(function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            with place:
                return function(*args, **options)

        return run

    return kernel._replace(forward=on(kernel.forward), vjp=kernel.vjp and on(kernel.vjp))


FINITE = -sys.float_info.max, sys.float_info.max  # the range of an option that may be any finite number


class Operation:
    """A function of arrays with a signature and a hand-written VJP, which kernels may replace.

    Args:
        name: Unique name.
        signature: Names, shapes and kinds of the arrays (see `Signature`).
        forward: Portable definition in Array API functions, with the interface of `Kernel.forward`.
        vjp: Its derivative, with the interface of `Kernel.vjp`, or None.
        compute_in_float32: Whether float16 and bfloat16 arrays that no kernel takes are computed in float32, and the
            output rounded once, on libraries that would otherwise change the dtype midway.
        conditions: Predicates of the sizes, keyed by a description for the error message.
        ranges: The smallest and largest value of each numeric option, by name.
    """

    def __init__(
        self,
        name: str,
        signature: str,
        forward: Callable[..., tuple[Any, Any]],
        vjp: Callable[..., Any] | None,
        *,
        compute_in_float32: bool = False,
        conditions: Mapping[str, Callable[..., bool]] | None = None,
        ranges: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self.name = name
        self.ranges = ranges or {}
        self.signature = Signature(signature, conditions or {})
        self.definition = Kernel("portable definition", name, "", forward, vjp)
        self.compute_in_float32 = compute_in_float32
        self.kernels: dict[str, list[Kernel]] = {}  # by library, in the order in which they are tried
        # (arrays, options) -> those of a smaller call that stands for it where a kernel is compared
        self.example: Callable[[tuple[Any, ...], dict[str, Any]], Any] = lambda *call: call
        OPERATIONS[name] = self

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        """Check the arrays and compute the operation; in a trace, append one record for the whole operation."""
        for name, (smallest, largest) in self.ranges.items():
            value = options[name]
            if type(value) is not float or not smallest <= value <= largest:
                self.check_options(options)
        return array_namespace(*arrays).apply(self, arrays, options)

    def check(self, *arrays: Any) -> str:
        """Raise an error unless the arrays match the signature; return the dtype of `Signature.check`."""
        return self.signature.check(self.name, arrays)

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise ConfigError for a numeric option that is no number of its range; scalar arrays are not read."""
        for name, (smallest, largest) in self.ranges.items():
            value: Any = options[name]
            if getattr(value, "shape", None) == () and not isinstance(value, Real):
                continue
            if not isinstance(value, Real) or not smallest <= value <= largest:  # type: ignore[operator]
                expected = "a finite number" if smallest < 0 else f"a number from {smallest:g} to {largest:g}"
                raise ConfigError(f"{self.name} got {name} {value!r}; expected {expected}")

    def select(
        self, xp: Namespace, arrays: tuple[Any, ...], options: dict[str, Any], dtype: str, *, save: bool
    ) -> Kernel:
        """Return the first kernel that can run a call on arrays of a library, else the definition.

        A trace selects itself: the definition, or a kernel that also records what it computes.
        """
        if xp.is_trace and not isinstance(xp, Library):  # for torch.compile, a Library is a plain module
            return xp.select(self, arrays, options, dtype, save=save)
        if xp.other_device is not None and (elsewhere := xp.other_device(arrays)) is not None:
            with elsewhere:
                kernel = self.select(xp, arrays, options, dtype, save=save)
            return _on(elsewhere, kernel)
        kernels = xp.kernels.get(self.name)
        if kernels is None:
            kernels = self.enable_kernels(xp.library)
        for kernel in kernels:
            if kernel.refusal(arrays, options, dtype, save=save) is None:
                break
        else:
            kernel = self.portable(xp, arrays)
        if SELECTIONS.blocks and (selections := SELECTIONS.items()) is not None:
            selections.append(self._describe(kernel, xp.library, arrays, options, dtype, save))
        return kernel

    def enable_kernels(self, library: Library) -> list[Kernel]:
        """Return the kernels that XFORMER_KERNELS does not switch off, as they run on arrays of a library."""
        mode = _mode()
        kernels = [each for each in kernels_of(self.name, library.name) if each.disabled_by not in mode.split(",")]
        kernels = [] if mode == "portable" else kernels
        if env_flag("XFORMER_CHECK_KERNELS"):
            kernels = [kernel._replace(forward=checked(kernel, self)) for kernel in kernels]
        elif kernels and env_value("XFORMER_CHECK_KERNELS") != "0" and library.kernel_identity() is not None:
            kernels = [guarded(kernel, self, library) for kernel in kernels]
        library.kernels[self.name] = kernels
        return kernels

    def portable(self, xp: Namespace, arrays: tuple[Any, ...], *, without_kernels: bool = False) -> Kernel:
        """Return the definition; for half precision, one that upcasts and rounds the output.

        Unless it is to be `without_kernels`, a kernel may compute what was upcast.
        """
        if not (self.compute_in_float32 and xp.needs_upcast and any(map(_is_half_precision, arrays))):
            return self.definition
        dtype = arrays[0].dtype

        def forward(*arrays: Any, save: bool, **options: Any) -> tuple[Any, Any]:
            arrays, kernel = _upcast(xp, arrays), self.definition
            if not without_kernels:
                kernel = self.select(xp, arrays, options, self.check(*arrays), save=save)
            output, residuals = kernel.forward(*arrays, save=save, **options)
            is_tuple = isinstance(output, tuple)
            rounded = tuple(xp.astype(y, dtype) for y in output) if is_tuple else xp.astype(output, dtype)
            return rounded, (kernel.vjp, residuals)

        name = f"in float32, rounded to {dtype_name(dtype)}"
        return self.definition._replace(name=name, forward=forward, vjp=_upcast_vjp)

    def _describe(
        self, chosen: Kernel, library: Library, arrays: Any, options: dict[str, Any], dtype: str, save: bool
    ) -> tuple[str, ...]:
        """Return a line with the kernel that runs a call, and one for each other kernel with the reason."""
        enabled = {kernel.name: kernel for kernel in library.kernels[self.name]}
        lines = [f"{self.name} on {library.name}: {chosen.name}"]
        for kernel in kernels_of(self.name, library.name):
            if kernel.name not in enabled:
                lines.append(f"  not {kernel.name}: XFORMER_KERNELS={_mode()}")
            elif kernel.name != chosen.name:
                reason = enabled[kernel.name].refusal(arrays, options, dtype, save=save)
                lines.append(f"  not {kernel.name}: {reason or f'{chosen.name} comes first'}")
        return tuple(lines)


# --- half precision ---------------------------------------------------------------------------------------------------


def _is_half_precision(array: Any) -> bool:
    return array is not None and is_half_precision(array.dtype)


def _upcast(xp: Namespace, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Cast float16 and bfloat16 arrays to float32; other arrays and None stay as they are."""
    return tuple(xp.astype(array, xp.float32) if _is_half_precision(array) else array for array in arrays)


def _upcast_vjp(g: Any, residuals: Any, needs: Any, **options: Any) -> Any:
    vjp, residuals = residuals
    cotangents = g if isinstance(g, list | tuple) else (g,)
    upcast = _upcast(array_namespace(*cotangents), cotangents)
    return vjp(list(upcast) if cotangents is g else upcast[0], residuals, needs, **options)


# --- kernels ----------------------------------------------------------------------------------------------------------


def register(kernel: Kernel) -> None:
    """Register a kernel ahead of earlier ones; a kernel of the same name is replaced.

    Args:
        kernel: The kernel.

    Raises:
        ConfigError: If the operation is unknown.
    """
    if not isinstance(kernel, Kernel):
        raise ConfigError(f"register got {kernel!r}; expected a Kernel")
    operation = _operation(kernel.operation)
    load_kernels(kernel.backend)  # first, so that this kernel is tried before those of the package
    _add(operation, kernel)


def _add(operation: Operation, kernel: Kernel) -> None:
    kernels = operation.kernels.setdefault(kernel.backend, [])
    names = [other.name for other in kernels]
    if kernel.name in names:
        kernels[names.index(kernel.name)] = kernel
    else:
        kernels.insert(0, kernel)
    for library in loaded_libraries():
        library.kernels.pop(operation.name, None)


def kernels_of(operation: str, backend: str) -> Sequence[Kernel]:
    """Return the kernels of an operation for a backend, in the order in which they are tried."""
    if (backend, _mode()) not in _LOADED:
        load_kernels(backend)
    return OPERATIONS[operation].kernels.get(backend, ())


def load_kernels(backend: str) -> None:
    """Import the kernels of a backend.

    Raises:
        ConfigError: If XFORMER_KERNELS or XFORMER_CHECK_KERNELS has an invalid value.
    """
    mode = _mode()
    env_flag("XFORMER_CHECK_KERNELS")
    # Other threads wait until all kernels are loaded: a call that ran the definition would give different bits.
    with _LOCK:
        if (backend, mode) in _LOADED:
            return
        for module in _MODULES.get(backend, ()):
            if importlib.util.find_spec(backend) is not None and (module != "native" or native.is_available()):
                _register_module(module)
        apply_thread_limits()
        _LOADED.add((backend, mode))


@functools.cache
def _register_module(module: str) -> None:
    """Register the kernels of a module, unless the package they need cannot be imported."""
    try:
        kernels = importlib.import_module(f"xformer.kernels.{module}").KERNELS
    except ImportError as error:
        _LOG.warning("the kernels in xformer.kernels.%s are switched off: %s", module, error)
        return
    for kernel in kernels:
        _add(OPERATIONS[kernel.operation], kernel)


def load_with_library(library: Library) -> None:
    """Load the kernels for torch before the first operation, because torch.compile cannot trace imports."""
    if library.name == "torch":
        for name in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "bool"):
            _kind_and_name(getattr(library, name))
        for operation in OPERATIONS.values():
            operation.enable_kernels(library)


def _mode() -> str:
    mode = env_value("XFORMER_KERNELS", "auto")
    if mode not in ("auto", "portable") and not {*mode.split(",")} <= {"no-native", "no-cudnn"}:
        clear_cache()  # so that a corrected value is read
        received = f"XFORMER_KERNELS is {mode!r}"
        raise ConfigError(f"{received}; expected 'auto', 'portable', 'no-native', 'no-cudnn' or 'no-native,no-cudnn'")
    return mode


def _operation(name: Any) -> Operation:
    if not isinstance(name, str) or name not in OPERATIONS:
        raise ConfigError(f"unknown operation {name!r}; {nearest_hint(str(name), OPERATIONS)}")
    return OPERATIONS[name]


# --- explain ----------------------------------------------------------------------------------------------------------


SELECTIONS: Collector[tuple[str, ...]] = Collector("kernel_selections")  # lines for each call that `explain` follows


def explain(call: str | Callable[[], Any], *arrays: Any, save: bool = False, **options: Any) -> str:
    """Describe which implementation runs an operation, and why the other kernels do not.

        explain(lambda: model(x))
        explain("softmax", x, mask)
        explain("softmax", x, mask, save=True)  # if xformer differentiates it

    Args:
        call: A function without arguments, which is called once and whose operations are listed; or the name of an
            operation, which is not run.
        *arrays: Arrays of the operation, None for absent ones.
        save: Whether xformer differentiates the operation.
        **options: Keyword arguments of the operation.

    Returns:
        For each operation, a line with what runs, and an indented line with a reason for each other kernel.

    Raises:
        ConfigError: If the operation or an option is unknown.
        ShapeError: If the arrays do not match the signature of the operation.
    """
    if callable(call):
        with SELECTIONS.collect() as selections:
            call()
        counted = Counter(selections).items()
        return "\n".join(
            line for (first, *rest), n in counted for line in (f"{first} ({n} calls)" if n > 1 else first, *rest)
        )
    operation = _operation(call)
    library, dtype = array_namespace(*arrays).library, operation.check(*arrays)
    parameters = inspect.signature(operation.definition.forward).parameters.values()
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != "save"]
    try:
        if not {*options} <= {*known}:
            raise TypeError("an unknown option")
        with (library.other_device and library.other_device(arrays)) or contextlib.nullcontext():
            kernel = operation.select(library, arrays, options, dtype, save=save)
            lines = [*operation._describe(kernel, library, arrays, options, dtype, save)]
    except TypeError as error:
        received = f"explain({call!r}) got the options {', '.join(options) or 'none'}"
        raise ConfigError(f"{received}; expected {', '.join(known) or 'none'}") from error
    if "in float32" in kernel.name:
        lines.append(explain(call, *_upcast(library, arrays), save=save, **options))
    return "\n".join(lines)
