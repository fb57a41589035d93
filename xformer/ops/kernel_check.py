"""Comparison of the first call of each kernel, and its derivative, with the portable definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from xformer.backends import Array, array_namespace, device, dtype_name, is_floating, to_host
from xformer.errors import BackendError
from xformer.tracing.grad import unbroadcast

if TYPE_CHECKING:
    from xformer.ops.operation import Kernel, Operation

_CHECKED: set[str] = set()  # names of kernels


def checked(kernel: Kernel, operation: Operation) -> Callable[..., tuple[Any, Any]]:
    """Return the forward of a kernel that compares its first call with the definition of the operation.

    The comparison raises BackendError if they differ by more than the kernel's tolerance, or if the kernel returns NaN
    where the definition does not.
    """
    if kernel.tolerance == math.inf:
        return kernel.forward

    def forward(*arrays: Any, save: bool, **options: Any) -> tuple[Any, Any]:
        if kernel.name not in _CHECKED:
            _CHECKED.add(kernel.name)
            dtype = operation.signature.check("", arrays)
            is_saved = kernel.refusal(arrays, options, dtype, save=True) is None
            try:
                compare(kernel, operation, arrays, options, save=is_saved)
            except BackendError as error:
                raise BackendError(f"{error}; please report this, and set XFORMER_KERNELS=portable") from error
        return kernel.forward(*arrays, save=save, **options)

    return forward


def compare(
    kernel: Kernel, operation: Operation, arrays: tuple[Any, ...], options: dict[str, Any], *, save: bool
) -> None:
    """Compare the outputs of a kernel with those of the definition and, with `save`, the cotangents.

    The kernel gets copies of the arrays, because some kernels work in place.

    Raises:
        BackendError: If they differ by more than the kernel's tolerance, or if the kernel returns NaN where the
            definition does not.
    """
    definition = operation.reference(array_namespace(*arrays), arrays)
    for is_saved in (False, True) if save and kernel.vjp and definition.vjp else (False,):
        copies = tuple(None if array is None else array_namespace(array).asarray(array, copy=True) for array in arrays)
        output, residuals = kernel.forward(*copies, save=is_saved, **options)
        expected, expected_residuals = definition.forward(*arrays, save=is_saved, **options)
        pairs = zip(output, expected, strict=True) if isinstance(output, tuple) else [(output, expected)]
        for actual, reference in pairs:
            _compare(kernel, "", actual, reference, 0.0)
        if is_saved:
            cotangents = _cotangents(kernel.vjp, output, residuals, arrays, options)
            references = _cotangents(definition.vjp, expected, expected_residuals, arrays, options)
            # A cotangent that is zero in exact arithmetic holds only rounding error: compare it with the largest one.
            min_scale = 0.01 * max(map(_max_abs, references), default=0.0)
            for actual, reference in zip(cotangents, references, strict=True):
                _compare(kernel, "the derivative of ", actual, reference, min_scale)


def _cotangents(vjp: Any, output: Any, residuals: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> list[Array]:
    """Return the cotangents of all floating arrays, in the shapes of these, for arbitrary cotangents of the outputs."""
    xp = array_namespace(*arrays)
    g = [_arbitrary(y) for y in (output if isinstance(output, tuple) else (output,))]
    needs = tuple(array is not None and is_floating(array.dtype) for array in arrays)
    with np.errstate(all="ignore"):  # the call itself may need no derivative
        cotangents = vjp(g if isinstance(output, tuple) else g[0], residuals, needs, **options)
    return [
        xp.zeros_like(array) if cotangent is None else unbroadcast(xp, cotangent, tuple(array.shape), array.dtype)
        for array, cotangent, needed in zip(arrays, cotangents, needs, strict=True)
        if needed
    ]


def _arbitrary(output: Array) -> Array:
    xp = array_namespace(output)
    g = xp.cos(xp.arange(math.prod(output.shape), dtype=xp.float32, device=device(output)))
    return xp.astype(xp.reshape(g, output.shape), output.dtype)


# Relative error of a few roundings in these dtypes.
_ROUNDING = {"float16": 4e-3, "bfloat16": 3e-2}


def _compare(kernel: Kernel, quantity: str, actual: Array, expected: Array, min_scale: float) -> None:
    """Raise BackendError if `actual` differs, relative to the largest expected value or to `min_scale`."""
    if actual.shape != expected.shape:
        raise BackendError(
            f"kernel {kernel.name} returned shape {tuple(actual.shape)} for {quantity}the portable {kernel.operation}; "
            f"expected {tuple(expected.shape)}"
        )
    scale = max(_max_abs(expected), min_scale, 1e-30)
    tolerance = max(kernel.tolerance, _ROUNDING.get(dtype_name(expected.dtype), 0.0))
    actual, expected = to_host(actual), to_host(expected)
    differs = (actual != expected) & ((actual == actual) | (expected == expected))  # equal infinities and NaN agree
    difference = float(abs(actual[differs] - expected[differs]).max(initial=0.0)) / scale
    if not difference <= tolerance:
        raise BackendError(
            f"kernel {kernel.name} differs from {quantity}the portable {kernel.operation} by {difference:.1e} "
            f"(relative); expected at most {tolerance:.0e}"
        )


def _max_abs(array: Array) -> float:
    """Return the largest finite magnitude."""
    magnitudes = abs(to_host(array))
    return float(magnitudes[magnitudes < math.inf].max(initial=0.0))
