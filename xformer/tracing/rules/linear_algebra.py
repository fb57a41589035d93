"""Derivatives of products, factorizations and Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xformer.backends import device, is_complex
from xformer.backends.portable import tensordot
from xformer.errors import DifferentiationError
from xformer.tracing.rule import DECOMPOSITIONS, decomposition, defvjp, defvjp_outputs, not_differentiable
from xformer.tracing.rules.elementwise import conjugate, squared_size


def _rows(xp: Any, x: Any) -> Any:
    """View (..., n) as a matrix (rows, n)."""
    return xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _matmul_first(xp: Any, g: Any, a_shape: Any, b: Any) -> Any:
    if b.ndim == 1:  # (..., n) @ (n,) -> (...)
        return xp.expand_dims(g, axis=-1) * b
    if len(a_shape) == 1:  # (n,) @ (..., n, m) -> (..., m)
        return xp.matmul(b, xp.expand_dims(g, axis=-1))[..., 0]
    return xp.matmul(g, xp.matrix_transpose(b))


def _matmul_second(xp: Any, g: Any, a: Any, b_shape: Any) -> Any:
    if a.ndim == 1:
        if len(b_shape) == 1:
            return g * a
        return xp.expand_dims(a, axis=-1) * xp.expand_dims(g, axis=-2)
    if len(b_shape) == 1:
        return xp.matmul(xp.matrix_transpose(a), xp.expand_dims(g, axis=-1))[..., 0]
    if len(b_shape) == 2 and a.ndim > 2:
        # One product of flattened rows instead of a stack of products that would be summed afterwards.
        return xp.matmul(xp.matrix_transpose(_rows(xp, a)), _rows(xp, g))
    return xp.matmul(xp.matrix_transpose(a), g)


defvjp("matmul", _matmul_first, _matmul_second)
defvjp(
    "vecdot",
    lambda xp, g, b, *, axis=-1: conjugate(xp, xp.expand_dims(g, axis=axis) * b),
    lambda xp, g, a, *, axis=-1: xp.expand_dims(g, axis=axis) * conjugate(xp, a),
)
DECOMPOSITIONS["tensordot"] = tensordot


# --- xp.linalg --------------------------------------------------------------------------------------------------------
#
# Rules of factorizations are those of symmetric inputs where the function reads one triangle, as in JAX and torch.


def _t(xp: Any, x: Any) -> Any:
    return xp.matrix_transpose(x)


def _real(name: str, x: Any) -> None:
    """Refuse complex matrices, whose factorizations have other rules."""
    if is_complex(x.dtype):
        raise DifferentiationError(f"linalg.{name} of complex matrices has no derivative rule")


def _diagonals(xp: Any, x: Any) -> Any:
    """Return matrices (..., n, n) that have x (..., n) on the diagonal."""
    return xp.expand_dims(x, axis=-2) * xp.eye(x.shape[-1], dtype=x.dtype, device=device(x))


def _times_transposed(xp: Any, g: Any, y: Any) -> Any:
    """Return -g y^T, for the first argument of solve, whose other ones may be vectors."""
    return -(xp.expand_dims(g, axis=-1) * y) if y.ndim == 1 else -(g @ _t(xp, y))


def _solve_second(xp: Any, g: Any, a: Any) -> Any:
    return xp.linalg.solve(_t(xp, a), g)


defvjp("linalg.inv", lambda xp, g, y: -(_t(xp, y) @ g @ _t(xp, y)))
defvjp("linalg.solve", lambda xp, g, a, y: _times_transposed(xp, _solve_second(xp, g, a), y), _solve_second)


def _det(xp: Any, g: Any, x: Any, y: Any) -> Any:
    """Return the cofactors: those of the inverse, or, if that does not exist, those of the singular values."""
    try:
        return (g * y)[..., None, None] * _t(xp, xp.linalg.inv(x))
    except (ValueError, RuntimeError):  # the LinAlgError of NumPy, and that of torch
        u, s, vh = xp.linalg.svd(x)
        others = xp.where(xp.eye(x.shape[-1], dtype=xp.bool, device=device(x)), 1.0, xp.expand_dims(s, axis=-2))
        g = g * xp.linalg.det(u) * xp.linalg.det(vh)
        return g[..., None, None] * (conjugate(xp, u) * xp.prod(others, axis=-1)[..., None, :]) @ conjugate(xp, vh)


@defvjp_outputs("linalg.slogdet")
def _slogdet(xp: Any, g: Any, x: Any, outputs: Any) -> Any:
    _real("slogdet", x)
    return g[1][..., None, None] * _t(xp, xp.linalg.inv(x))


def _cholesky(xp: Any, g: Any, y: Any, *, upper: bool = False) -> Any:
    _real("cholesky", y)
    g, factor = (_t(xp, g), _t(xp, y)) if upper else (g, y)
    lower = xp.tril(_t(xp, factor) @ g)
    lower = 0.5 * (lower + xp.tril(lower, k=-1))  # half of the diagonal
    inner = xp.linalg.solve(_t(xp, factor), lower + _t(xp, lower))
    return 0.5 * _t(xp, xp.linalg.solve(_t(xp, factor), _t(xp, inner)))


def _pinv(xp: Any, g: Any, x: Any, y: Any, *, rtol: Any = None) -> Any:
    """Golub and Pereyra, 1973, "The Differentiation of Pseudo-Inverses", equation 4.12, for a constant rank."""
    _real("pinv", x)
    g_t, y_t = _t(xp, g), _t(xp, y)
    return -(y_t @ g @ y_t) + y_t @ (y @ (g_t - g_t @ y @ x)) + (g_t - x @ (y @ g_t)) @ y @ y_t


defvjp("linalg.cholesky", _cholesky)
defvjp("linalg.det", _det)
defvjp("linalg.pinv", _pinv)


@defvjp_outputs("linalg.qr")
def _qr(xp: Any, g: Any, x: Any, outputs: Any, *, mode: str = "reduced") -> Any:
    _real("qr", x)
    (q, r), (g_q, g_r), (rows, columns) = outputs, g, x.shape[-2:]
    if rows < columns or (mode == "complete" and rows != columns):
        raise DifferentiationError(f"linalg.qr of {rows} x {columns} matrices has no derivative rule in mode {mode!r}")
    m = r @ _t(xp, g_r) - _t(xp, g_q) @ q
    lower = xp.tril(m, k=-1)
    symmetric = xp.tril(m) + _t(xp, lower)
    return _t(xp, xp.linalg.solve(r, _t(xp, g_q + q @ symmetric)))


def _divisor(xp: Any, x: Any, is_used: Any) -> Any:
    """Return x, or one where it is zero for vectors without a cotangent, of which only the values need a derivative."""
    return xp.where(is_used | (x != 0), x, 1.0)


def _over_gaps(xp: Any, x: Any, values: Any, g_vectors: Any) -> Any:
    """Divide the elements of x by the differences of two values; the diagonal becomes zero."""
    eye = xp.eye(values.shape[-1], dtype=x.dtype, device=device(x))
    is_used = xp.any(g_vectors != 0, axis=-2)
    gaps = xp.expand_dims(values, axis=-2) - xp.expand_dims(values, axis=-1) + eye
    return x / _divisor(xp, gaps, is_used[..., None, :] | is_used[..., :, None]) * (1.0 - eye)


@defvjp_outputs("linalg.eigh")
def _eigh(xp: Any, g: Any, x: Any, outputs: Any) -> Any:
    _real("eigh", x)
    (values, vectors), (g_values, g_vectors) = outputs, g
    inner = _over_gaps(xp, _t(xp, vectors) @ g_vectors, values, g_vectors) + _diagonals(xp, g_values)
    total = vectors @ inner @ _t(xp, vectors)
    return 0.5 * (total + _t(xp, total))


@defvjp_outputs("linalg.svd")
def _svd(xp: Any, g: Any, x: Any, outputs: Any, *, full_matrices: bool = True) -> Any:
    _real("svd", x)
    (u, s, vh), (g_u, g_s, g_vh), (rows, columns) = outputs, g, x.shape[-2:]
    if full_matrices and rows != columns:
        raise DifferentiationError("linalg.svd has a derivative rule with full_matrices=False, or for square matrices")
    v, g_v = _t(xp, vh), _t(xp, g_vh)

    def rotated(of: Any, cotangent: Any) -> Any:
        product = _t(xp, of) @ cotangent
        return _over_gaps(xp, product - _t(xp, product), s * s, cotangent)

    inner = rotated(u, g_u) * s[..., None, :] + s[..., :, None] * rotated(v, g_v) + _diagonals(xp, g_s)
    total = u @ inner @ vh
    if rows > columns:
        total = total + (g_u - u @ (_t(xp, u) @ g_u)) / _divisor(xp, s, xp.any(g_u != 0, axis=-2))[..., None, :] @ vh
    if columns > rows:
        total = total + u / _divisor(xp, s, xp.any(g_v != 0, axis=-2))[..., None, :] @ (g_vh - g_vh @ v @ vh)
    return total


DECOMPOSITIONS |= {
    "linalg.eigvalsh": lambda xp, x: xp.linalg.eigh(x)[0],
    "linalg.svdvals": lambda xp, x: xp.linalg.svd(x, full_matrices=False)[1],
    "linalg.outer": lambda xp, x1, x2: x1[:, None] * x2[None, :],
    "linalg.trace": lambda xp, x, *, offset=0, **options: xp.sum(
        xp.linalg.diagonal(x, offset=offset), axis=-1, **options
    ),
}


@decomposition("linalg.matrix_power")
def _matrix_power(xp: Any, x: Any, n: int, /) -> Any:
    """Multiply squares of squares; a negative power is that of the inverse."""
    x, n = (xp.linalg.inv(x), -n) if n < 0 else (x, n)
    power = None
    while n:
        power = x if n % 2 and power is None else power @ x if n % 2 else power
        x, n = x @ x if n > 1 else x, n // 2
    eye = xp.eye(x.shape[-1], dtype=x.dtype, device=device(x))
    return xp.zeros_like(x) + eye if power is None else +power


@decomposition("linalg.cross")
def _cross(xp: Any, x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    (a1, a2), (b1, b2) = ([xp.roll(x, -i, axis=axis) for i in (1, 2)] for x in (x1, x2))
    return a1 * b2 - a2 * b1


@decomposition("linalg.diagonal")
def _diagonal(xp: Any, x: Any, /, *, offset: int = 0) -> Any:
    rows, columns = x.shape[-2:]
    count = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    start = max(offset, 0) if offset >= 0 else -offset * columns  # of the diagonal among the elements of a matrix
    indices = start + (columns + 1) * xp.arange(count, device=device(x))
    return xp.take(xp.reshape(x, (*x.shape[:-2], rows * columns)), indices, axis=-1)


@decomposition("linalg.vector_norm")
def _vector_norm(xp: Any, x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Any:
    """Decompose into sums; a root has the derivative zero where all elements are zero."""
    options = {"axis": axis, "keepdims": keepdims}
    if ord == 0:
        return xp.sum(xp.astype(x != 0, xp.abs(x).dtype), **options)
    size = xp.abs(x)
    if math.isinf(ord) or ord == 1:
        return (xp.sum if ord == 1 else xp.max if ord > 0 else xp.min)(size, **options)
    if ord == 2:
        powers = squared_size(xp, x)
    else:
        is_zero = size == 0
        powers = xp.where(is_zero, 0.0 if ord > 0 else math.inf, xp.where(is_zero, 1.0, size) ** ord)
    total = xp.sum(powers, **options)
    is_zero = (total == 0) | xp.isinf(total)
    root = xp.where(is_zero, 1.0, total)
    return xp.where(is_zero, total if ord > 0 else 0.0, xp.sqrt(root) if ord == 2 else root ** (1 / ord))


@decomposition("linalg.matrix_norm")
def _matrix_norm(xp: Any, x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    if ord == "fro":
        return xp.linalg.vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in (2, -2, "nuc"):
        values = xp.linalg.svdvals(x)
        norm = (xp.sum if ord == "nuc" else xp.max if ord == 2 else xp.min)(values, axis=-1)
    else:
        sums = xp.sum(xp.abs(x), axis=-2 if abs(ord) == 1 else -1)
        norm = (xp.max if ord > 0 else xp.min)(sums, axis=-1)
    return norm[..., None, None] if keepdims else norm


not_differentiable("linalg.matrix_rank")


# --- xp.fft: transforms are linear and symmetric, so each cotangent is another transform ------------------------------

_INVERSE = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


def _resized(xp: Any, x: Any, size: int, axis: int) -> Any:
    """Cut an axis, or append zeros."""
    before = (slice(None),) * (axis % x.ndim)
    missing = size - x.shape[axis]
    if missing <= 0:
        return x[(*before, slice(size), ...)]
    shape = tuple(missing if i == axis % x.ndim else length for i, length in enumerate(x.shape))
    return xp.concat([x, xp.zeros(shape, dtype=x.dtype, device=device(x))], axis=axis)


def _transform(name: str) -> Any:
    def vjp(xp: Any, g: Any, x_shape: Any, *, n: Any = None, axis: int = -1, norm: str = "backward") -> Any:
        return _resized(xp, getattr(xp.fft, name)(g, axis=axis, norm=norm), x_shape[axis], axis)

    return vjp


def _rfft(xp: Any, g: Any, x_shape: Any, *, n: Any = None, axis: int = -1, norm: str = "backward") -> Any:
    size = x_shape[axis] if n is None else n
    full = xp.fft.fft(_resized(xp, g, size, axis), axis=axis, norm=norm)
    return _resized(xp, xp.real(full), x_shape[axis], axis)


def _irfft(xp: Any, g: Any, x_shape: Any, *, n: Any = None, axis: int = -1, norm: str = "backward") -> Any:
    """Count each frequency between the first and, of even lengths, the last one twice, as it stands for two."""
    size, count = g.shape[axis], g.shape[axis] // 2 + 1
    half = xp.conj(xp.fft.rfft(g, axis=axis, norm=_INVERSE[norm]))
    weights = [1.0 if i == 0 or (size % 2 == 0 and i == count - 1) else 2.0 for i in range(count)]
    weights = xp.asarray(weights, dtype=g.dtype, device=device(g))
    weights = xp.reshape(weights, tuple(count if i == axis % g.ndim else 1 for i in range(g.ndim)))
    return _resized(xp, half * weights, x_shape[axis], axis)


defvjp("fft.fft", _transform("fft"))
defvjp("fft.ifft", _transform("ifft"))
defvjp("fft.rfft", _rfft)
defvjp("fft.irfft", _irfft)


@decomposition("fft.hfft")
def _hfft(xp: Any, x: Any, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Any:
    return xp.fft.irfft(xp.conj(x), n=n, axis=axis, norm=_INVERSE[norm])


@decomposition("fft.ihfft")
def _ihfft(xp: Any, x: Any, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Any:
    return xp.conj(xp.fft.rfft(x, n=n, axis=axis, norm=_INVERSE[norm]))


def _over_axes(name: str, last: str, other: str) -> None:
    """Decompose a transform over several axes into one for each: the last one, then the others, or the other way."""

    @decomposition(f"fft.{name}")
    def transform(
        xp: Any, x: Any, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str = "backward"
    ) -> Any:
        if axes is None:
            axes = tuple(range(-(x.ndim if s is None else len(s)), 0))
        sizes = (None,) * len(axes) if s is None else tuple(s)
        steps = [(other, size, axis) for size, axis in zip(sizes[:-1], axes[:-1], strict=True)]
        steps.insert(len(steps) if name.startswith("ir") else 0, (last, sizes[-1], axes[-1]))
        for function, size, axis in steps:
            x = getattr(xp.fft, function)(x, n=size, axis=axis, norm=norm)
        return x


_over_axes("fftn", "fft", "fft")
_over_axes("ifftn", "ifft", "ifft")
_over_axes("rfftn", "rfft", "fft")
_over_axes("irfftn", "irfft", "ifft")


def _shifted(name: str, half: Any) -> None:
    @decomposition(f"fft.{name}")
    def shift(xp: Any, x: Any, /, *, axes: Any = None) -> Any:
        axes = tuple(range(x.ndim)) if axes is None else (axes,) if isinstance(axes, int) else tuple(axes)
        return xp.roll(x, tuple(half(x.shape[axis]) for axis in axes), axis=axes)


_shifted("fftshift", lambda size: size // 2)
_shifted("ifftshift", lambda size: -(size // 2))
not_differentiable("fft.fftfreq", "fft.rfftfreq")
