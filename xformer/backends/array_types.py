"""Types of arrays, dtypes, devices and namespaces, for annotations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, TypeVarTuple

T = TypeVar("T", bound=Any)  # an array, a Module or another tree
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
Ts = TypeVarTuple("Ts")
Of = Callable[Concatenate[T, P], R]  # a function of T and more arguments
Positions = int | Sequence[int]
Shape = tuple[int, ...]
DType = Any  # every library has its own classes
Device = Any
NativeArray = Any  # an array of one library, with all of that library's methods


class Namespace(Protocol):
    """Functions of an array library, of which nothing is known: a module will do."""

    __name__: str

    def __getattr__(self, name: str, /) -> Any: ...


class ArrayNamespace(Namespace, Protocol):
    """The namespace of `array_namespace`: functions return an array, but for those that are declared here."""

    name: str
    library: Any
    is_trace: bool
    is_writable: bool
    needs_upcast: bool
    e: float
    inf: float
    nan: float
    pi: float
    can_cast: Callable[..., bool]
    isdtype: Callable[..., bool]
    result_type: Callable[..., Any]
    finfo: Any
    iinfo: Any
    fft: Any
    linalg: Any
    broadcast_arrays: Any
    broadcast_shapes: Callable[..., tuple[int, ...]]
    meshgrid: Any
    nonzero: Any
    top_k: Any
    unique_all: Any
    unique_counts: Any
    unique_inverse: Any
    unstack: Any

    def __getattr__(self, name: str, /) -> Callable[..., Array]: ...


class Array(Protocol):
    """An array of any library that follows the Array API standard, or a traced array.

    `xp = array_namespace(x)` has the functions, such as `xp.mean(x)`, which return an `Array`. The protocol catches
    attributes and methods that the standard lacks, such as `x.mean()`. Operators return `Any`, since pyright would take
    minutes to compare those of NumPy.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""

    @property
    def dtype(self) -> Any:
        """Data type of the elements."""

    @property
    def ndim(self) -> int:
        """Number of axes."""

    @property
    def size(self) -> Any:
        """Number of elements."""

    @property
    def device(self) -> Any:
        """Device of the array."""

    @property
    def T(self) -> Array:
        """Transpose of a matrix."""

    @property
    def mT(self) -> Array:
        """Transpose of the last two axes."""

    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...
    def __bool__(self) -> bool: ...
    def __int__(self) -> int: ...
    def __float__(self) -> float: ...
    def __neg__(self) -> Any: ...
    def __abs__(self) -> Any: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __radd__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __rsub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __rmul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __rtruediv__(self, other: Any, /) -> Any: ...
    def __floordiv__(self, other: Any, /) -> Any: ...
    def __mod__(self, other: Any, /) -> Any: ...
    def __pow__(self, other: Any, /) -> Any: ...
    def __matmul__(self, other: Any, /) -> Any: ...
    def __and__(self, other: Any, /) -> Any: ...
    def __or__(self, other: Any, /) -> Any: ...
    def __eq__(self, other: Any, /) -> Any: ...
    def __ne__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...
