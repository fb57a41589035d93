"""The mode in which results have the same bits for any batch, number of threads and processor."""

from __future__ import annotations

import os
from types import MethodType, ModuleType
from typing import Any

import numpy as np

from xformer.backends.library import Library, on_load
from xformer.backends.portable import tensordot
from xformer.environment import clear_cache
from xformer.errors import ConfigError
from xformer.native.library import MAX_DIMS, call, is_reproducible, record, require_fused_products


def use_reproducible_algorithms(mode: bool = True) -> None:
    """Let float32 results on NumPy depend on the mathematical problem alone, at the cost of some speed.

    Then every sum has one order: results have the same bits for any batch, padding and step of decoding, in training
    and in decoding, for any number of threads, with AVX2 and AVX-512, and with any BLAS library or none. Call it before
    anything else; processes that this one starts inherit the mode. On CuPy, only the rows of a batch and those rows
    alone have the same bits. See the page on reproducible results.

    Args:
        mode: Whether to use them; False restores the default.

    Raises:
        ConfigError: If the native library is absent, or this processor has no fused products.
    """
    from xformer.config import check_bool  # array libraries need no configurations

    if check_bool("mode", mode):
        require_fused_products()
    os.environ["XFORMER_REPRODUCIBLE"] = str(int(mode))
    clear_cache()


def use_reproducible_on(*names: str | None) -> None:
    """Use reproducible algorithms; raise ConfigError for other libraries than NumPy and CuPy, or dtypes than float32.

    Args:
        *names: Names of array libraries and dtypes; None for an unknown one.
    """
    for name in names:
        if name not in ("numpy", "cupy", "float32", None):
            raise ConfigError(f"reproducible results need float32 on NumPy or CuPy; received {name}")
    use_reproducible_algorithms()


def matmul(x1: Any, x2: Any, /) -> Any:
    """Multiply matrices as `np.matmul`, which sums in an order of its own, or if necessary in the reproducible order.

    Args:
        x1: Array of shape (..., rows, depth), or (depth,).
        x2: Array of shape (..., depth, columns), or (depth,).
    """
    if not is_reproducible() or 0 in (x1.ndim, x2.ndim) or np.result_type(x1, x2) != np.float32:
        return np.matmul(x1, x2)
    if x2.ndim == 1:
        return matmul(x1, x2[:, None])[..., 0][()]
    if x1.ndim == 1:
        return matmul(x1[None, :], x2)[..., 0, :]
    x1, x2 = np.asarray(x1, np.float32), np.asarray(x2, np.float32)  # arrays of no subclass, in native byte order
    if max(x1.ndim, x2.ndim) > MAX_DIMS:
        return np.vectorize(matmul, "f", signature="(n,k),(k,m)->(n,m)")(x1, x2)
    out = np.empty((*np.broadcast_shapes(x1.shape[:-2], x2.shape[:-2]), x1.shape[-2], x2.shape[-1]), np.float32)
    with record(None):  # a program records the whole function
        call("matmul", (x1, x2, out))
    return out


def _vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    rows, columns = (np.moveaxis(x, axis, -1) for x in (x1, x2))
    return matmul(rows.conj()[..., None, :], columns[..., None])[..., 0, 0][()]


def _replace_products(library: Library) -> None:
    if library.name == "numpy":
        products = {"matmul": matmul, "tensordot": MethodType(tensordot, library), "vecdot": _vecdot}
        linalg = ModuleType("numpy.linalg")
        vars(linalg).update(vars(library.linalg) | products)
        vars(library).update(products, operator_matmul=matmul, linalg=linalg)


on_load(_replace_products)
