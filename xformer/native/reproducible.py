"""The mode in which results have the same bits for any batch, number of threads and processor."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from xformer.backends.library import Library, on_load
from xformer.environment import clear_cache
from xformer.errors import ConfigError
from xformer.native.library import LIB, MAX_DIMS, call, check_level, is_reproducible, record


def use_reproducible_algorithms(mode: bool = True) -> None:
    """Let float32 results on NumPy depend on the mathematical problem alone, at the cost of some speed.

    Then every sum has one order: results have the same bits for any batch, padding and step of decoding, in training
    and in decoding, for any number of threads, with AVX2 and AVX-512, and with any BLAS library or none. Call it before
    anything else; processes that this one starts inherit the mode. See the page on reproducible results.

    Args:
        mode: Whether to use them; False restores the default.

    Raises:
        ConfigError: If the native library is absent, or this processor has no fused products.
    """
    from xformer.config import check_bool  # array libraries need no configurations

    if check_bool("mode", mode):
        check_level()
    os.environ["XFORMER_REPRODUCIBLE"] = str(int(mode))
    clear_cache()
    if LIB is not None:
        LIB.xf_set_reproducible(mode)


def require_reproducible(xp: Any) -> None:
    """Use reproducible algorithms; raise ConfigError unless the array library is NumPy.

    Args:
        xp: The array library.
    """
    if xp.name != "numpy":
        raise ConfigError(f"reproducible results need NumPy; the array library is {xp.name}")
    use_reproducible_algorithms()


def are_matrices(*arrays: Any) -> bool:
    """Return whether all are arrays of float32 that the native product takes."""
    return all(type(x) is np.ndarray and x.dtype == np.float32 and 2 <= x.ndim <= MAX_DIMS for x in arrays)


def matmul(x1: Any, x2: Any, /) -> Any:
    """Multiply matrices as `np.matmul`, which sums in an order of its own, or if necessary in the reproducible order.

    Args:
        x1: Array of shape (..., rows, depth), or (depth,).
        x2: Array of shape (..., depth, columns), or (depth,).
    """
    if not is_reproducible() or not x1.dtype == x2.dtype == np.float32 or 0 in (x1.ndim, x2.ndim):
        return np.matmul(x1, x2)
    if x1.ndim == 1:
        return matmul(x1[None, :], x2)[..., 0, :]
    if x2.ndim == 1:
        return matmul(x1, x2[:, None])[..., 0]
    if not (are_matrices(x1, x2) and x1.shape[-1] == x2.shape[-2]):
        return np.matmul(x1, x2)
    out = np.empty((*np.broadcast_shapes(x1.shape[:-2], x2.shape[:-2]), x1.shape[-2], x2.shape[-1]), np.float32)
    with record(None):  # a program records the whole function
        call("matmul", (x1, x2, out))
    return out


def _replace_matmul(library: Library) -> None:
    if library.name == "numpy":
        vars(library).update(matmul=matmul, operator_matmul=matmul)


on_load(_replace_matmul)
