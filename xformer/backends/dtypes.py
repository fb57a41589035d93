"""Names of dtypes, the same for every library."""

from __future__ import annotations

from typing import Any

from xformer.backends.array_types import DType, Namespace

_FLOATING = {"float16", "bfloat16", "float32", "float64"}
_NAMES: dict[type, dict[Any, str]] = {}  # torch.compile traces lookups, but not those among dtypes of MLX


def dtype_name(dtype: DType) -> str:
    """Return the name of a dtype of any library: "float32", "bfloat16", "int64", "bool"."""
    # By class, because dtypes of different libraries must not be compared with each other.
    names = _NAMES.get(type(dtype))
    if names is None:
        names = _NAMES[type(dtype)] = {}
    name = names.get(dtype)
    if name is None:
        # numpy.float32 and jax.numpy.float32 are classes; the dtype of an array is an instance with a name.
        name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
        name = names[dtype] = str(name).rsplit(".", maxsplit=1)[-1]
    return name


def is_floating(dtype: DType) -> bool:
    """Return whether a dtype is a real floating-point type; bfloat16, which the standard lacks, is one."""
    return dtype_name(dtype) in _FLOATING


def is_complex(dtype: DType) -> bool:
    """Return whether a dtype is a complex floating-point type."""
    return dtype_name(dtype).startswith("complex")


def is_inexact(dtype: DType) -> bool:
    """Return whether a dtype is a real or complex floating-point type; arrays of these have derivatives."""
    return is_floating(dtype) or is_complex(dtype)


def is_half_precision(dtype: DType) -> bool:
    """Return whether a dtype is a 16-bit floating-point type."""
    return dtype_name(dtype) in ("float16", "bfloat16")


def is_integer(dtype: DType) -> bool:
    """Return whether a dtype is a signed or unsigned integer; bool is not."""
    return dtype_name(dtype).startswith(("int", "uint"))


def accumulation_dtype(xp: Namespace, dtype: DType) -> DType:
    """Return the dtype to accumulate sums in: float32 for float16 and bfloat16, else the dtype itself."""
    return xp.float32 if is_half_precision(dtype) else dtype
