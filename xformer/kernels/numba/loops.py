"""The loops of the compiled kernels, in what numba compiles of Python: float32, one pass where NumPy needs many.

Each is compiled at its first call, for one signature whatever the shapes, and kept on the disk: in this folder's
__pycache__, or, where that is read-only, in numba's folder of the user (NUMBA_CACHE_DIR chooses another). numba tells
by a loop's own file whether what it kept is out of date; that another of these files has changed, it sees by the name.

An array that a caller does without has no elements. Sums may be reordered, which vectors need; nothing is said to
numba about infinity and NaN, which stay what they are.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import cfunc, njit
from numba.types import Array, CPointer, boolean, float32, float64, int64, void

from xformer.threads import apply_thread_limits, fork_safe_lock

_EXACT, REORDERED = {"contract"}, {"contract", "reassoc"}
SETTINGS = {"error_model": "numpy", "boundscheck": False}
_COMPILING = fork_safe_lock()
_LOG = logging.getLogger(__name__)  # the command line shows what it is told

_f32, _i32 = np.float32, np.int32  # a Python number would turn a computation into float64
ZERO, ONE = _f32(0.0), _f32(1.0)


@functools.cache
def _sources() -> str:
    """A digest of all files that loops are made of."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.blake2b(b"".join(map(Path.read_bytes, files)), digest_size=6).hexdigest()


class _Loop:
    """A function that is compiled when it is called first: once a machine, since it is kept on the disk."""

    def __init__(self, function: Callable[..., None], signature: Any) -> None:
        self._function, self._signature, self._compiled = function, signature, None
        function.__qualname__ += f"-{_sources()}"  # part of the name under which numba keeps it

    def __call__(self, *arguments: Any) -> None:
        (self._compiled or self._compile())(*arguments)

    def _compile(self) -> Any:
        with _COMPILING:
            if self._compiled is None:
                begin, kept = time.perf_counter(), ", once and for all"
                try:
                    compiled, found = self._make(cache=True)
                except (OSError, RuntimeError):  # there is no folder to keep it in, or no space
                    (compiled, found), kept = self._make(cache=False), "; there is no folder to keep it in"
                if not found:
                    seconds = time.perf_counter() - begin
                    _LOG.info("compiled %s for this processor in %.1f s%s", self._function.__name__, seconds, kept)
                self._compiled = compiled
                apply_thread_limits()  # where SciPy is there, numba has brought its BLAS
        return self._compiled

    def _make(self, cache: bool) -> tuple[Any, bool]:
        """What is compiled, and whether it was found on the disk."""
        # With a signature of its own it never compiles another: writeable arrays pass for read-only ones.
        made = njit(self._signature, cache=cache, nogil=True, fastmath=REORDERED, **SETTINGS)(self._function)
        return made, bool(made.stats.cache_hits)


class _Worker(_Loop):
    """A function that other compiled ones call, by its address."""

    @property
    def address(self) -> int:
        """Of the C function; it is compiled when somebody asks."""
        return (self._compiled or self._compile()).address  # type: ignore[no-any-return]

    def _make(self, cache: bool) -> tuple[Any, bool]:
        made = cfunc(self._signature, cache=cache, fastmath=REORDERED, **SETTINGS)(self._function)
        return made, bool(made.cache_hits)


def loop(*types: Any) -> Callable[[Callable[..., None]], _Loop]:
    """Compile a function of arguments of these types when it is first called."""
    return lambda function: _Loop(function, void(*types))


def worker(function: Callable[..., None]) -> _Worker:
    """Compile a function of a job (see thread_pool_loops) when it is first wanted."""
    return _Worker(function, void(CPointer(int64)))


def given(axes: int, dtype: Any = float32) -> Any:
    """An array that a loop reads."""
    return Array(dtype, axes, "C", readonly=True)


def made(axes: int) -> Any:
    """An array that a loop writes."""
    return Array(float32, axes, "C")


# --- exponential and maximum, in vectors ----------------------------------------------------------------------------

_LOG2_E, _LN2_HIGH, _LN2_LOW = _f32(1.4426950408889634), _f32(0.693359375), _f32(-2.12194440e-4)
_ROUNDER = _f32(1.5 * 2**23)  # adding it rounds to a whole number, which then stands in the lowest bits
_EXPONENT = _i32(127 - _ROUNDER.view(_i32))
_MANTISSA_BITS, _SIGN_BIT, _ALL_BUT_SIGN = _i32(23), _i32(31), _i32(0x7FFFFFFF)
_LEAST = _f32(-87.3)  # below, the result would have less digits than a float32 has
# exp(r) = 1 + r + r^2 (...), fitted for the least relative error over |r| <= ln(2)/2, which is 3e-9.
_C2, _C3, _C4, _C5, _C6 = map(_f32, (0.4999999343, 0.166665204, 0.04166839079, 0.008368745213, 0.001381454008))


@njit(fastmath=_EXACT, **SETTINGS)
def exp(x):
    """exp(x) = 2^n exp(r) for x up to 88, zero below -87.3; without branches, right to 2 units in the last place."""
    t = x * _LOG2_E + _ROUNDER
    n = t - _ROUNDER
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r + ONE
    p = p * r + ONE
    power = _i32((_f32(t).view(_i32) + _EXPONENT) << _MANTISSA_BITS).view(_f32)
    return ZERO if x < _LEAST else p * power


@njit(fastmath=_EXACT, **SETTINGS)
def ordered(x):
    """An integer for a float, in the same order, NaN being the largest: the maximum of floats makes no vectors."""
    bits = _f32(x).view(_i32)
    return _i32(bits ^ ((bits >> _SIGN_BIT) & _ALL_BUT_SIGN))


@njit(fastmath=_EXACT, **SETTINGS)
def unordered(ordered):
    """The float that an integer stands for."""
    return _i32(ordered ^ ((ordered >> _SIGN_BIT) & _ALL_BUT_SIGN)).view(_f32)


LOWEST = _i32(-0x7F800000)  # stands for the lowest finite number

# --- elementwise ----------------------------------------------------------------------------------------------------


@loop(given(1), given(1), float32, made(1), made(1))
def gelu(x, tail, p, y, slope):
    """As in numpy_gelu. tail: the polynomial's eight coefficients."""
    c0, c1, c2, c3, c4, c5, c6, c7 = tail[0], tail[1], tail[2], tail[3], tail[4], tail[5], tail[6], tail[7]
    farthest, half, density = _f32(30.0), _f32(-0.5), _f32(1.0 / math.sqrt(2.0 * math.pi))
    save = slope.size > 0
    for i in range(x.size):
        a = abs(x[i])
        a = farthest if a > farthest else a
        power = exp(half * a * a)
        t = ONE / (ONE + p * a)
        s = (((((((c7 * t + c6) * t + c5) * t + c4) * t + c3) * t + c2) * t + c1) * t + c0) * t * power
        y[i] = (x[i] if x[i] > ZERO else ZERO) - a * s
        if save:
            s -= density * a * power
            slope[i] = s if x[i] < ZERO else ONE - s


@loop(given(1), made(1))
def relu(x, y):
    """y = x where it is not below zero; NaN stays visible."""
    for i in range(x.size):
        y[i] = ZERO if x[i] < ZERO else x[i]


@loop(given(1), given(1), made(1))
def relu_vjp(g, y, dx):
    """dx = g where y is above zero."""
    for i in range(g.size):
        dx[i] = g[i] if y[i] > ZERO else ZERO


@loop(given(1), given(1, boolean), float32, made(1))
def dropout(x, keep, scale, y):
    """y = x times the scale where it is kept."""
    for i in range(x.size):
        y[i] = x[i] * scale if keep[i] else ZERO


@loop(made(1), given(1), made(1), made(1), *[float64] * 7)
def adam(p, g, m, v, step_size, beta1, beta2, second_scale, epsilon, keep, factor):
    """Update parameter and moments in place, by the gradient times the factor."""
    keep1, take1, keep2, take2 = _f32(beta1), _f32(1.0 - beta1), _f32(beta2), _f32(1.0 - beta2)
    step, scale, least, kept = _f32(step_size), _f32(second_scale), _f32(epsilon), _f32(keep)
    for i in range(p.size):
        gradient = _f32(factor) * g[i]
        m[i] = keep1 * m[i] + take1 * gradient
        v[i] = keep2 * v[i] + take2 * (gradient * gradient)
        p[i] = kept * p[i] - step * m[i] / (math.sqrt(v[i] * scale) + least)


# --- rows -----------------------------------------------------------------------------------------------------------


@loop(given(2), given(1), given(1), float32, boolean, made(2), made(2))
def norm(x, weight, bias, epsilon, centred, y, moments):
    """Layer norm, or RMS norm of rows that are not centred. moments: (2, rows), the means and the factors of rows."""
    features = x.shape[1]
    for i in range(x.shape[0]):
        row, to, mean, variance = x[i], y[i], ZERO, ZERO
        if centred:
            for j in range(features):
                mean += row[j]
            mean /= _f32(features)
        for j in range(features):
            variance += (row[j] - mean) * (row[j] - mean)
        inverse = ONE / math.sqrt(variance / _f32(features) + epsilon)
        moments[0, i], moments[1, i] = mean, inverse
        if bias.size > 0:
            for j in range(features):
                to[j] = (row[j] - mean) * inverse * weight[j] + bias[j]
        else:
            for j in range(features):
                to[j] = (row[j] - mean) * inverse * weight[j]


@loop(given(2), given(2), given(1), given(2), boolean, made(2), made(1), made(1))
def norm_vjp(g, x, weight, moments, centred, dx, dweight, dbias):
    """With x^ the normalized rows and h = g w: dx = (h - mean(h) - x^ mean(h x^)) / sigma."""
    features = x.shape[1]
    for i in range(x.shape[0]):
        row, of, to, mean, inverse = x[i], g[i], dx[i], moments[0, i], moments[1, i]
        along_ones, along_row = ZERO, ZERO
        for j in range(features):
            hat, h = (row[j] - mean) * inverse, of[j] * weight[j]
            along_ones += h
            along_row += h * hat
            dweight[j] += of[j] * hat
            dbias[j] += of[j]
        along_ones = along_ones / _f32(features) if centred else ZERO
        along_row /= _f32(features)
        for j in range(features):
            hat = (row[j] - mean) * inverse
            to[j] = (of[j] * weight[j] - along_ones - hat * along_row) * inverse


@loop(given(2), given(1, int64), int64, float32, float32, made(1), made(2))
def cross_entropy(x, labels, pad_id, smoothing, z_loss, losses, kept):
    """The loss of each row. kept: (2, rows), the largest logit and the sum of exponentials relative to it."""
    classes = x.shape[1]
    for i in range(x.shape[0]):
        row, top, total, plain = x[i], LOWEST, ZERO, ZERO
        losses[i] = ZERO
        if labels[i] == pad_id:
            continue
        for j in range(classes):
            plain += row[j]
            top = max(top, ordered(row[j]))
        largest = unordered(top)
        for j in range(classes):
            total += exp(row[j] - largest)
        kept[0, i], kept[1, i] = largest, total
        log_partition = largest + math.log(total)
        loss = (ONE - smoothing) * (log_partition - row[labels[i]]) + z_loss * log_partition * log_partition
        losses[i] = loss + smoothing * (log_partition - plain / _f32(classes)) if smoothing > ZERO else loss


@loop(given(1), given(2), given(1, int64), given(2), int64, float32, float32, made(2))
def cross_entropy_vjp(g, x, labels, kept, pad_id, smoothing, z_loss, dx):
    """dx = g (p - q + 2 z log(Z) p), q being the smoothed one-hot distribution, Z the partition function."""
    classes = x.shape[1]
    for i in range(x.shape[0]):
        row, to, largest, total = x[i], dx[i], kept[0, i], kept[1, i]
        if labels[i] == pad_id:
            for j in range(classes):
                to[j] = ZERO
            continue
        factor = g[i] * (ONE + _f32(2.0) * z_loss * (largest + math.log(total))) / total
        low = g[i] * smoothing / _f32(classes)
        for j in range(classes):
            to[j] = exp(row[j] - largest) * factor - low
        to[labels[i]] -= (ONE - smoothing) * g[i]
