"""Derivatives of xp.fft: transforms are linear and symmetric, so each cotangent is another transform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xformer.backends import device
from xformer.tracing.rule import decomposition, defvjp, not_differentiable

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
