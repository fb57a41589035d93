"""Exponential and maximum of float32 that LLVM vectorizes."""

from __future__ import annotations

import numpy as np

from xformer.ops._numba.compile import inline_exact

_f32, _i32 = np.float32, np.int32  # a Python number would turn a computation into float64
ZERO, ONE = _f32(0.0), _f32(1.0)

_LOG2_E, _LN2_HIGH, _LN2_LOW = _f32(1.4426950408889634), _f32(0.693359375), _f32(-2.12194440e-4)
_ROUNDER = _f32(1.5 * 2**23)  # adding it rounds to an integer, which is then in the lowest bits
_EXPONENT = _i32(127 - _ROUNDER.view(_i32))
_MANTISSA_BITS, _SIGN_BIT, _ALL_BUT_SIGN = _i32(23), _i32(31), _i32(0x7FFFFFFF)
_MIN_EXPONENT = _f32(-87.3)  # below, the result would be subnormal
# exp(r) = 1 + r + r^2 (...), with the least relative error over |r| <= ln(2)/2, which is 3e-9.
_C2, _C3, _C4, _C5, _C6 = map(_f32, (0.4999999343, 0.166665204, 0.04166839079, 0.008368745213, 0.001381454008))


@inline_exact
def exp(x):
    """Compute the exponential as 2^n e^r for x up to 88, and zero below -87.3; branch-free, accurate to 2 ulp."""
    t = x * _LOG2_E + _ROUNDER
    n = t - _ROUNDER
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r + ONE
    p = p * r + ONE
    power = _i32((_f32(t).view(_i32) + _EXPONENT) << _MANTISSA_BITS).view(_f32)
    return ZERO if x < _MIN_EXPONENT else p * power


@inline_exact
def float_to_sortable_int(x):
    """Return an integer in the same order, NaN being the largest: maxima of integers vectorize, of floats do not."""
    bits = _f32(x).view(_i32)
    return _i32(bits ^ ((bits >> _SIGN_BIT) & _ALL_BUT_SIGN))


@inline_exact
def sortable_int_to_float(integer):
    """Invert float_to_sortable_int."""
    return _i32(integer ^ ((integer >> _SIGN_BIT) & _ALL_BUT_SIGN)).view(_f32)


MIN_SORTABLE_INT = _i32(-0x7F800000)  # of the lowest finite float
