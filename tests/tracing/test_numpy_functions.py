"""Functions and methods of NumPy on traced arrays have NumPy's values, the derivatives of differences, and programs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import itertools
import math
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import xformer as xf
from tests.reference import for_each, raises_line
from xformer.errors import DifferentiationError
from xformer.tracing import numpy_functions

RANDOM = np.random.default_rng(0)
X, M, S, T = RANDOM.random(6) + 0.2, RANDOM.random((4, 3)) + 0.1, RANDOM.random((4, 4)) + 0.1, RANDOM.random((2, 3, 4))
Q, W, V = RANDOM.random((5, 4, 4)) + 4.0 * np.eye(4), RANDOM.random((3, 2)), RANDOM.random(3)
P = Q[0] @ Q[0].T
HOLES = np.where(np.arange(12).reshape(4, 3) % 5 == 2, np.nan, 0.0)

REDUCTIONS = ("sum", "prod", "mean", "std", "var", "max", "min", "ptp", "median", "nansum", "nanmean", "nanstd", "amax")

# By name in NumPy: functions of one array, and the array.
CASES: dict[str, list[tuple[Any, Any]]] = {}


def each(names: Sequence[str], x: Any, *functions: Any, of: Any = np) -> None:
    """Add functions f(the function of NumPy, x) for each name."""
    for name in names:
        prefix = "" if of is np else f"{of.__name__.removeprefix('numpy.')}."
        case(prefix + name, x, *(functools.partial(function, getattr(of, name)) for function in functions))


def case(name: str, x: Any, *functions: Any) -> None:
    CASES.setdefault(name, []).extend((function, x) for function in functions)


each(
    (
        *(
            "sin",
            "cos",
            "tan",
            "exp",
            "expm1",
            "log",
            "log1p",
            "log2",
            "log10",
            "sqrt",
            "square",
            "reciprocal",
            "negative",
        ),
        *(
            "positive",
            "absolute",
            "fabs",
            "sinh",
            "cosh",
            "tanh",
            "arctan",
            "arcsinh",
            "exp2",
            "cbrt",
            "sinc",
            "sign",
            "floor",
        ),
        *(
            "ceil",
            "trunc",
            "rint",
            "fix",
            "deg2rad",
            "rad2deg",
            "radians",
            "degrees",
            "conjugate",
            "real",
            "nan_to_num",
        ),
        *(
            "ravel",
            "transpose",
            "squeeze",
            "flip",
            "flipud",
            "tril",
            "triu",
            "copy",
            "atleast_1d",
            "atleast_2d",
            "sort",
        ),
        *("sum", "prod", "mean", "std", "var", "max", "min", "amax", "amin", "ptp", "median", "cumsum", "cumprod"),
        *(
            "nansum",
            "nanprod",
            "nanmax",
            "nanmin",
            "nanmean",
            "nanvar",
            "nanstd",
            "diff",
            "average",
            "rot90",
            "ediff1d",
        ),
        *(
            "zeros_like",
            "ones_like",
            "imag",
            "angle",
            "round",
            "around",
            "matrix_transpose",
            "unique_values",
        ),
    ),
    M,
    lambda f, x: f(x),
)
each(
    REDUCTIONS,
    T,
    lambda f, x: f(x, axis=1),
    lambda f, x: f(x, 0, keepdims=True),
    lambda f, x: f(x, axis=(0, 2)),
)
each(("nansum", "nanprod", "nanmax", "nanmin", "nanmean", "nanvar", "nanstd"), M, lambda f, x: f(x + HOLES, axis=0))
each(("arcsin", "arccos", "arctanh"), M, lambda f, x: f(x * 0.8))
case("arccosh", M, lambda x: np.arccosh(x + 1.1))
each(
    (
        "add",
        "subtract",
        "multiply",
        "divide",
        "true_divide",
        "power",
        "float_power",
        "maximum",
        "minimum",
        "hypot",
        "arctan2",
        "copysign",
        "logaddexp",
        "logaddexp2",
        "fmax",
        "fmin",
        "fmod",
        "remainder",
        "mod",
        "floor_divide",
        "heaviside",
    ),
    M,
    lambda f, x: f(x, V) + f(0.7, x) + f(x, x * 0.5 + 0.3),
)
case("divmod", M, lambda x: np.divmod(x, 0.3)[0] + np.divmod(x, 0.3)[1])
case("nextafter", M, lambda x: np.nextafter(x, 2.0 * x))
case("matmul", M, lambda x: np.matmul(x, W), lambda x: np.matmul(S, x))
each(("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"), M, lambda f, x: x * f(x, 0.6))
each(("isfinite", "isinf", "isnan", "signbit", "logical_not"), M, lambda f, x: np.where(f(x), x, 2.0 * x))
each(("logical_and", "logical_or", "logical_xor"), M, lambda f, x: np.where(f(x > 0.5, x < 0.9), x, 2.0 * x))
each(("bitwise_and", "bitwise_or", "bitwise_xor"), M, lambda f, x: np.where(f(x > 0.5, x < 0.9), x, 2.0 * x))
case("invert", M, lambda x: np.where(np.invert(x > 0.5), x, 2.0 * x))
case("clip", X, lambda x: np.clip(x, 0.3, 0.8), lambda x: np.clip(x, None, 0.8), lambda x: np.clip(x, min=0.4))
case("round", X, lambda x: np.round(x, 1) + x, lambda x: np.round(x, decimals=2))
case("where", X, lambda x: np.where(x > 0.5, x**2, x), lambda x: x[np.where(X > 0.5)])
case("select", X, lambda x: np.select([x < 0.4, x < 0.8], [x, x**2], default=3.0))
case("nan_to_num", X, lambda x: np.nan_to_num(np.where(X > 0.5, np.inf, x), posinf=7.0))
case("angle", X, lambda x: np.angle(x + 1j), lambda x: np.angle(x * 1j, deg=True) * x)
# Shape and order.
case(
    "reshape",
    T,
    lambda x: np.reshape(x, (4, 6)),
    lambda x: np.reshape(x, -1),
    lambda x: x.reshape(3, -1),
    lambda x: x.reshape((8, 3)),
)
case(
    "transpose",
    T,
    lambda x: np.transpose(x, (1, 0, 2)),
    lambda x: x.T,
    lambda x: x.transpose(2, 0, 1),
    lambda x: x.transpose(),
)
case(
    "swapaxes",
    T,
    lambda x: np.swapaxes(x, 0, 2),
    lambda x: np.swapaxes(x, 0, 1),
    lambda x: x.swapaxes(2, 0),
    lambda x: x.swapaxes(-1, -2),
)
case("moveaxis", T, lambda x: np.moveaxis(x, 0, -1), lambda x: np.moveaxis(x, (0, 1), (2, 0)))
case("expand_dims", X, lambda x: np.expand_dims(x, 0), lambda x: np.expand_dims(x, (0, 2)))
case("squeeze", T, lambda x: np.squeeze(x[:, None]), lambda x: np.squeeze(x[None], 0), lambda x: x[None].squeeze())
case("broadcast_to", V, lambda x: np.broadcast_to(x, (2, 3)) * M[:2])
case("broadcast_arrays", V, lambda x: np.broadcast_arrays(x, M)[0] * M)
case(
    "meshgrid", V, lambda x: np.meshgrid(x, x)[0] * np.meshgrid(x, x)[1], lambda x: np.meshgrid(x, V, indexing="ij")[0]
)
case("atleast_1d", V, lambda x: np.atleast_1d(np.sum(x)))
case("concatenate", M, lambda x: np.concatenate([x, x**2]), lambda x: np.concatenate((x, np.ones((4, 2))), axis=1))
case("stack", M, lambda x: np.stack([x, x * 2], axis=1))
case("vstack", V, lambda x: np.vstack([x, 2 * x]), lambda x: np.vstack((x[:, None], np.ones((2, 1)))))
case("hstack", M, lambda x: np.hstack([x, x**2]), lambda x: np.hstack((x[0], 1.0)))
case("dstack", M, lambda x: np.dstack([x, x**2]), lambda x: np.dstack([x[0], x[1]]))
case("column_stack", M, lambda x: np.column_stack([x, x[:, 0]]))
case("append", M, lambda x: np.append(x, x[:1], axis=0), lambda x: np.append(x, 1.0))
case("tile", M, lambda x: np.tile(x, 2), lambda x: np.tile(x, (2, 1, 3)))
case("repeat", M, lambda x: np.repeat(x, 2), lambda x: np.repeat(x, 3, axis=1), lambda x: x.repeat(2, axis=0))
case("repeat", M, lambda x: np.repeat(x, [2, 0, 1], axis=1), lambda x: x.repeat(np.arange(4), 0), lambda x: x.repeat(2))
case(
    "block",
    M,
    lambda x: np.block([[x, S], [W.T @ x[:3], S[:2]]]),
    lambda x: np.block([x[0], 2.0, x[1]]),
    lambda x: np.block(x),
)
case("fliplr", M, lambda x: np.fliplr(x))
case("roll", M, lambda x: np.roll(x, 2), lambda x: np.roll(x, 1, axis=0), lambda x: np.roll(x, (1, 2), axis=(0, 1)))
case(
    "take", M, lambda x: np.take(x, [3, 0, 5]), lambda x: np.take(x, [0, -1], axis=1), lambda x: x.take([2, 2], axis=0)
)
case("take_along_axis", M, lambda x: np.take_along_axis(x, np.argsort(M, axis=0), axis=0))
case("compress", M, lambda x: np.compress([True, False, True], x, axis=1), lambda x: x.compress([0, 1]))
case(
    "diag", M, lambda x: np.diag(x), lambda x: np.diag(x[0]), lambda x: np.diag(x[0], -1), lambda x: np.diag(x[:, 0], 2)
)
case("diagonal", T, lambda x: np.diagonal(x), lambda x: np.diagonal(x, 1, 1, 2), lambda x: x.diagonal(-1))
case("trace", T, lambda x: np.trace(x), lambda x: np.trace(x, 1, 1, 2), lambda x: x.trace())
case("split", T, lambda x: np.split(x, 2, axis=2)[1], lambda x: np.split(x, [1, 2], axis=1)[1])
case("array_split", X, lambda x: np.array_split(x, 4)[1])
case("hsplit", M, lambda x: np.hsplit(x, 3)[2])
case("vsplit", M, lambda x: np.vsplit(x, 2)[1])
case("sort", M, lambda x: np.sort(x, axis=0), lambda x: np.sort(x, axis=None))
case("take_along_axis", M, lambda x: np.take_along_axis(x, np.argsort(M, axis=None)[::2], axis=None))
for _axis in (None, 0, 1, -1):
    case("argsort", T, lambda x, a=_axis: np.argsort(x, a) * 1.0, lambda x, a=_axis: x.argsort(axis=a) * 1.0)
case("unique", X, lambda x: np.unique(x))
case("rot90", M, lambda x: np.rot90(x, 3), lambda x: np.rot90(x, axes=(1, 0)))
for _mode in ("edge", "reflect", "symmetric", "wrap"):
    case("pad", M, lambda x, m=_mode: np.pad(x, 2, m), lambda x, m=_mode: np.pad(x, ((1, 0), (0, 2)), mode=m))
case("pad", M, lambda x: np.pad(x, 1), lambda x: np.pad(x, ((0, 1), (2, 0)), constant_values=(3.0, 4.0)))
# Reductions and statistics.
case("std", M, lambda x: np.std(x, ddof=1), lambda x: x.std(axis=0), lambda x: x.std(ddof=1))
case("var", M, lambda x: np.var(x, axis=1, ddof=1), lambda x: x.var())
case("cumsum", T, lambda x: np.cumsum(x, axis=-2), lambda x: x.cumsum())
case("cumprod", T, lambda x: np.cumprod(x, 2), lambda x: x.cumprod(axis=0))
case("median", T, lambda x: np.median(x, axis=(1, 2)), lambda x: np.median(x[..., :3], axis=-1))
case("quantile", T, lambda x: np.quantile(x, 0.3), lambda x: np.quantile(x, [0.1, 0.5], axis=2, keepdims=True))
case("percentile", T, lambda x: np.percentile(x, 25, axis=0), lambda x: np.percentile(x, [0, 100], axis=1))
case(
    "average",
    M,
    lambda x: np.average(x, axis=0),
    lambda x: np.average(x, weights=M),
    lambda x: np.average(x, axis=0, weights=[1, 2, 3, 4]),
)
case("average", V, lambda x: np.average(V, weights=x), lambda x: np.average(M, axis=1, weights=x))
case(
    "cov",
    M,
    lambda x: np.cov(x),
    lambda x: np.cov(x, rowvar=False, ddof=0),
    lambda x: np.cov(x[0], x[1]),
    lambda x: np.cov(x[0]),
)
case("corrcoef", M, lambda x: np.corrcoef(x), lambda x: np.corrcoef(x[0]))
case("cov", S, lambda x: np.cov(x, x[::-1] ** 2, rowvar=False), lambda x: np.cov(S**2, x[1], rowvar=False))
# Products.
case(
    "dot",
    M,
    lambda x: np.dot(x, W),
    lambda x: np.dot(x[0], V),
    lambda x: np.dot(2.0, x),
    lambda x: x.dot(W),
    lambda x: np.dot(S, x),
)
case("dot", T, lambda x: np.dot(S, np.moveaxis(x, -1, 1)), lambda x: np.dot(x, S))
case("inner", M, lambda x: np.inner(x, x), lambda x: np.inner(x[0], V), lambda x: np.inner(x, 3.0))
case("outer", M, lambda x: np.outer(x, V), lambda x: np.outer(V, x[0]))
case("vdot", M, lambda x: np.vdot(x, M), lambda x: np.real(np.vdot(x + 1j, x * 2j)))
case("vecdot", M, lambda x: np.vecdot(x, V))
case(
    "tensordot",
    T,
    lambda x: np.tensordot(x, S, axes=1),
    lambda x: np.tensordot(x, T, axes=([0, 1], [0, 1])),
    lambda x: np.tensordot(x, S, (2, 0)),
)
case("kron", M, lambda x: np.kron(x, W), lambda x: np.kron(V, x[0]))
case("cross", M, lambda x: np.cross(x, V), lambda x: np.cross(x[:3], W @ W.T, axis=0))
for _subscripts, _others in {
    "ij,jk->ik": (W,),
    "ij->ji": (),
    "ij->": (),
    "ij->j": (),
    "ij,ij->": (M,),
    "ij,ij->i": (M,),
    "ij,kl->ikjl": (W,),
    "ij,jk": (W,),
    "ij,j": (V,),
    "...j,j->...": (V,),
    "ij,jk,kl->il": (W, W.T),
    "ij,ij->ij": (M[:1],),
    "ji": (),
}.items():
    case("einsum", M, lambda x, s=_subscripts, o=_others: np.einsum(s, x, *o))
EINSUMS = {"bii->bi": (), "bij,bjk->bik": (Q,), "...ij,...jk->...ik": (Q,), "bii": (), "bij,b->ij": (Q[:, 0, 0],)}
EINSUMS |= {"bij,bij->b": (Q,), "aij,bjk->abik": (Q,), "bij,cji->bc": (Q,)}
for _subscripts, _others in EINSUMS.items():
    case("einsum", Q, lambda x, s=_subscripts, o=_others: np.einsum(s, x, *o, optimize=True))
# Linear algebra and transforms.
each(
    ("inv", "det", "pinv", "svdvals", "matrix_norm", "cond", "trace", "diagonal", "matrix_transpose"),
    Q,
    lambda f, x: f(x),
    of=np.linalg,
)
case("linalg.slogdet", Q, lambda x: np.linalg.slogdet(x)[1])
case("linalg.solve", Q, lambda x: np.linalg.solve(x, Q[::-1]), lambda x: np.linalg.solve(x[0], V[[0, 1, 2, 0]]))
case("linalg.cholesky", P, lambda x: np.linalg.cholesky(x + x.T))
case("linalg.eigh", P, lambda x: np.linalg.eigh(x + x.T)[0], lambda x: np.linalg.eigh(x + x.T).eigenvectors ** 2)
case("linalg.eigvalsh", P, lambda x: np.linalg.eigvalsh(x + x.T))
case("linalg.svd", M, lambda x: np.linalg.svd(x, full_matrices=False)[1], lambda x: np.linalg.svd(x, compute_uv=False))
case("linalg.qr", M, lambda x: np.linalg.qr(x)[1])
case("linalg.matrix_power", S, lambda x: np.linalg.matrix_power(x, 3))
case("linalg.multi_dot", M, lambda x: np.linalg.multi_dot([x, W, W.T]))
case("linalg.lstsq", M, lambda x: np.linalg.lstsq(x, S[:, 0], rcond=None)[0])
case("linalg.outer", V, lambda x: np.linalg.outer(x, V))
case("linalg.cross", V, lambda x: np.linalg.cross(x, V[::-1]))
case("linalg.vecdot", V, lambda x: np.linalg.vecdot(x, V))
case("linalg.tensordot", M, lambda x: np.linalg.tensordot(x, W, axes=1))
case("linalg.matmul", M, lambda x: np.linalg.matmul(x, W))
case("linalg.vector_norm", M, lambda x: np.linalg.vector_norm(x, axis=0))
for _arguments in ((), (None, 1), (1,), ("nuc",), (np.inf, 0), (2, None, True), (None, (0, 1), True)):
    case("linalg.norm", M, lambda x, a=_arguments: np.linalg.norm(x, *a))
case("linalg.norm", M, lambda x: np.linalg.norm(x[0], 3))
each(
    ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn", "rfft", "rfftn", "rfft2", "ihfft"),
    M,
    lambda f, x: np.abs(f(x)) ** 2,
    of=np.fft,
)
each(
    ("irfft", "irfftn", "irfft2", "hfft", "fftshift", "ifftshift"), M, lambda f, x: np.real(f(x * (1 + 1j))), of=np.fft
)
case("fft.fft", M, lambda x: np.real(np.fft.fft(x, 5, 0, "ortho")))
# Sequences and polynomials.
case("diff", M, lambda x: np.diff(x, axis=0), lambda x: np.diff(x, n=2), lambda x: np.diff(x, prepend=np.zeros((4, 1))))
case("diff", M, lambda x: np.diff(x, axis=0, prepend=0), lambda x: np.diff(x, append=x[1, 1], prepend=[[2]] * 4))
for _mode in ("wrap", "clip"):
    case("take", M, lambda x, m=_mode: np.take(x, [5, -7], 0, mode=m), lambda x, m=_mode: x.take([99, 3], mode=m))
case("delete", M, lambda x: np.delete(x, [0, 2], axis=0), lambda x: np.delete(x, slice(1, 9, 2)))
case("partition", M, lambda x: np.partition(x, 1)[:, 1], lambda x: np.partition(x, 3, axis=None)[3])
case("unwrap", 9.0 * X, lambda x: np.unwrap(x) ** 2, lambda x: np.unwrap(x, period=2.0) * x)
case(
    "unwrap", 9.0 * T, lambda x: np.unwrap(x, axis=1), lambda x: np.unwrap(x, 4.0, 0), lambda x: np.unwrap(x, period=2)
)
case(
    "lib.stride_tricks.sliding_window_view",
    M,
    lambda x: np.lib.stride_tricks.sliding_window_view(x, 2, axis=0),
    lambda x: np.lib.stride_tricks.sliding_window_view(x, (2, 3)),
)
case("divmod", M, lambda x: divmod(x, 0.3)[1] + divmod(3.0, x)[1] + divmod(x, V)[0])
if importlib.util.find_spec("scipy"):
    case("i0", M, lambda x: np.i0(x))
case("dsplit", T, lambda x: np.dsplit(x, 2)[1])
case("rollaxis", T, *(lambda x, a=_a, s=_s: np.rollaxis(x, a, s) for _a in (0, 1, -1) for _s in (0, 1, 2, 3, -1)))
case("atleast_3d", V, lambda x: np.atleast_3d(x), lambda x: np.atleast_3d(x[0]), lambda x: np.atleast_3d(x[None]))
case("real_if_close", V, lambda x: np.real_if_close(x * (1 + 0j)) * x, lambda x: abs(np.real_if_close(x * (1 + 1j))))
case("ravel", T, lambda x: np.ravel(x, "F"), lambda x: x.flatten("F"), lambda x: np.reshape(x, (4, -1), "F"))
case("array", M, lambda x: np.array([x[0, 0], x[1, 2]], like=x), lambda x: np.zeros(3, like=x) + x)
for _weights in ({"fweights": [1, 3, 2]}, {"aweights": V}, {"aweights": V, "fweights": [1, 3, 2], "ddof": 0}):
    case("cov", M, lambda x, w=_weights: np.cov(x, **w), lambda x, w=_weights: np.abs(np.cov(x + 1j * x**2, **w)))
case("cov", V, lambda x: np.cov(M, aweights=x))
for _mode in ("full", "same", "valid"):
    case("convolve", X, lambda x, m=_mode: np.convolve(x, V, m), lambda x, m=_mode: np.convolve(V, x, m))
    case("correlate", X, lambda x, m=_mode: np.correlate(x, V, m), lambda x, m=_mode: np.correlate(V, x, m))
case("convolve", X, *(lambda x, m=_mode: np.convolve(x, V, m) + np.correlate(V, x, m) for _mode in (0, 1, 2)))
case(
    "interp",
    X,
    lambda x: np.interp(x, [0.0, 0.5, 0.7, 1.0], [0.0, 1.0, 3.0, 2.0]),
    lambda x: np.interp([0.1, 2.5, 9.0], np.arange(6.0), x, left=-1.0),
)
case(
    "trapezoid",
    M,
    lambda x: np.trapezoid(x),
    lambda x: np.trapezoid(x, dx=0.5, axis=0),
    lambda x: np.trapezoid(x, [0.0, 1.0, 3.0]),
)
for _spacing in (1.0, 2.0, [0.0, 1.0, 3.0]):
    case("gradient", M, lambda x, h=_spacing: np.gradient(x, h, axis=1))
case("gradient", M, lambda x: np.gradient(x)[0])
case("bincount", X, lambda x: np.bincount([0, 1, 0, 4, 1, 4], x), lambda x: np.bincount(np.arange(6), x, 9) ** 2)
case("polyval", X, lambda x: np.polyval([3.0, -1.0, 2.0], x), lambda x: np.polyval(x, 0.7))
case("vander", V, lambda x: np.vander(x), lambda x: np.vander(x, 4, increasing=True))
case("linspace", V, lambda x: np.linspace(x[0], x[1], 5), lambda x: np.linspace(x, 2.0, 3, endpoint=False))
case("full_like", V, lambda x: np.full_like(x, 2.0) * x)
case(
    "sum",
    M,
    lambda x: x.sum(),
    lambda x: x.sum(axis=0, keepdims=True),
    lambda x: x.sum(1),
    lambda x: np.add.reduce(x),
    lambda x: np.add.reduce(x, axis=None),
)
case("prod", M, lambda x: np.multiply.reduce(x, axis=1))
case("max", M, lambda x: np.maximum.reduce(x), lambda x: x.max(axis=1))
case("cumsum", M, lambda x: np.add.accumulate(x, axis=1), lambda x: np.cumsum(x, axis=0))
case("cumprod", M, lambda x: np.multiply.accumulate(x))
case("outer", V, lambda x: np.multiply.outer(x, M), lambda x: np.add.outer(M, x), lambda x: np.subtract.outer(x, x))
case(
    "copy",
    M,
    lambda x: x.copy(),
    lambda x: x.flatten(),
    lambda x: x.ravel(),
    lambda x: x.astype(float),
    lambda x: x.clip(0.2, 0.6),
)
case(
    "real",
    M,
    lambda x: (x + 1j).real * x,
    lambda x: ((1 + x * 1j) ** 2).imag,
    lambda x: ((x + 1j) * (x + 1j).conj()).real,
)
case(
    "shape",
    M,
    lambda x: x * np.shape(x)[0],
    lambda x: x * np.size(x),
    lambda x: x * np.ndim(x),
    lambda x: x if np.isrealobj(x) else 2 * x,
)
case("count_nonzero", M, lambda x: x * np.count_nonzero(x > 0.5), lambda x: x * np.sum(x > 0.5))
case("permute_dims", M, lambda x: np.permute_dims(x, (1, 0)))
case("concat", M, lambda x: np.concat([x, x]))
case("astype", M, lambda x: np.astype(x, float))
case("unstack", M, lambda x: np.unstack(x)[1])
each(("cumulative_sum", "cumulative_prod"), M, lambda f, x: f(x, axis=0))
ROWS = [(name, function, x) for name, rows in CASES.items() for function, x in rows]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@for_each("name, function, x", ROWS)
def test_values_and_derivatives(name, function, x):
    expected = function(x)
    value, pull = xf.vjp(function, x)
    np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12)
    assert np.asarray(value).dtype == np.asarray(expected).dtype
    if np.asarray(value).dtype.kind != "f":
        return
    g, direction, step = RANDOM.normal(size=np.shape(expected)), RANDOM.normal(size=x.shape), 1e-6
    (cotangent,) = pull(np.asarray(g))
    difference = np.sum(g * (function(x + step * direction) - function(x - step * direction))) / (2.0 * step)
    np.testing.assert_allclose(np.sum(cotangent * direction), difference, rtol=1e-5, atol=1e-6)


OF_VALUES = {"real_if_close", "unique", "unique_values", "where", "select", "compress", "linalg.lstsq"}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@for_each("name, function, x", [row for row in ROWS if row[0] not in OF_VALUES])
def test_programs(name, function, x):
    compute = xf.jit(lambda x: function(x) * 1.0)
    for each in (x, x * 1.1, x):
        np.testing.assert_allclose(compute(each), function(each), rtol=1e-12, atol=1e-12)


C = RANDOM.normal(size=(2, 3)) @ np.asarray([[1.0, 1j, 0.0, 2.0], [0.5, 1.0, -1j, 0.3], [1j, 0.2, 0.7, 1.0]])
K = C[0, :3]
# Functions of complex arrays; the arrays.
OF_COMPLEX: list[tuple[Any, Any]] = [
    *((lambda x, f=f: f(x), C) for f in (np.var, np.std, np.nanvar, np.nanstd)),
    *((lambda x, f=f: f(x, axis=1, ddof=1, keepdims=True), C) for f in (np.var, np.std, np.nanvar, np.nanstd)),
    (lambda x: x.var() + x.std(axis=0), C),
    (lambda x: np.linalg.lstsq(C.T, x, rcond=None)[1], C[0] + np.arange(4)),
    *((lambda x, m=m: np.correlate(x, K, m), C[1]) for m in ("full", "same", "valid", 0, 1, 2)),
    *((lambda x, m=m: np.correlate(K, x, m), C[1]) for m in ("full", "same", "valid")),
    *((lambda x, m=m: np.convolve(x, K, m), C[1]) for m in ("full", "same", "valid")),
    (lambda x: np.correlate(x, x), C[1]),
    (lambda x: np.abs(np.cov(x)) + np.abs(np.vdot(x, C)), C),
]


@for_each("function, x", OF_COMPLEX)
def test_functions_of_complex_arrays(function, x):
    expected = function(x)
    value, pull = xf.vjp(function, x)
    assert np.asarray(value).dtype == np.asarray(expected).dtype
    for each in (value, xf.jit(function)(x), xf.vmap(function)(x[None])[0]):
        np.testing.assert_allclose(each, expected, rtol=1e-12, atol=1e-12)
    g = RANDOM.normal(size=np.shape(expected)) + (1j if np.iscomplexobj(expected) else 0.0)
    direction, step = RANDOM.normal(size=x.shape) + 1j * RANDOM.normal(size=x.shape), 1e-6
    slope = (function(x + step * direction) - function(x - step * direction)) / (2.0 * step)
    np.testing.assert_allclose(np.sum(pull(g)[0] * direction).real, np.sum(g * slope).real, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(xf.jvp(function, (x,), (direction,))[1], slope, rtol=1e-5, atol=1e-6)


# Inputs at which formulas fail, and values of the options that functions have, by name.
NAN, INF = np.nan, np.inf
SPECIAL = [
    [[1.5, NAN, -2.0], [0.0, 3.0, 0.5], [2.5, -0.5, 4.0]],
    [[INF, -INF, 1.0], [0.5, INF, -0.0], [-1.0, 2.0, INF]],
]
SPECIAL += [[[NAN, NAN], [1.0, NAN]], [0.0, -0.0, 1.0], [1.0, -INF, NAN, 0.25], [], 2.5, NAN, [[3.0, 1.0, 2.0]], [2.0]]
SPECIAL += [np.zeros((0, 3)), np.zeros((3, 0)), np.arange(24.0).reshape(2, 3, 4) * 7 % 25]
SECOND = [
    0.5,
    np.asarray([1.0, NAN, 0.0]),
    np.asarray([INF, 2.0, -1.0]),
    -2.0,
    np.asarray([*SPECIAL[0][1:], [1.0] * 3]),
]
OPTIONS: dict[str, list[Any]] = {
    "axis": [0, -1, None, (0, 1), ()], "keepdims": [True], "dtype": [np.float32], "ddof": [1], "rowvar": [False],
    "bias": [True], "deg": [True], "decimals": [1, -1], "n": [2, 0], "k": [1, -1], "offset": [1], "axis1": [1],
    "axis2": [0], "axisa": [0], "axisb": [0], "axisc": [0], "retstep": [True], "endpoint": [False], "num": [0, 1, 3],
    "method": ["lower"], "returned": [True], "period": [2.0], "order": ["F"], "shift": [1], "kind": ["stable"],
    "weights": [V], "fweights": [[1, 2, 1]], "aweights": [V], "mode": ["same", "full"], "nan": [1.0], "dx": [0.5],
    "posinf": [5.0], "neginf": [-5.0], "equal_nan": [True], "return_counts": [True], "stable": [True],
    "edge_order": [2], "increasing": [True], "to_end": [3.0], "right": [-1.0], "side": ["right"], "to_begin": [1.0],
}  # fmt: skip
ARGUMENTS = {
    "take": [[0, -1]],
    "repeat": [2],
    "roll": [1],
    "reshape": [-1],
    "tile": [2],
    "array_split": [2],
    "delete": [0],
}
ARGUMENTS |= {"quantile": [0.3, [0.0, 0.4]], "percentile": [30, [0.0, 40.0]], "full_like": [2.0], "expand_dims": [0]}
# They read values, raise errors of their own, or differ at infinite differences or without elements.
OTHERS = {
    *("unwrap", "var", "std", "vander", "compress", "partition", "float_power", "argpartition", "take", "polyval")
}
OTHERS |= {
    *(
        "i0",
        "block",
        "repeat",
        "quantile",
        "percentile",
        "take_along_axis",
        "select",
        "einsum",
        "nextafter",
        "asarray",
        "array",
        "astype",
    )
}
KNOWN = sorted({*numpy_functions.FUNCTIONS, *numpy_functions._STANDARD_NAMES, *CASES} - OTHERS)


def special_calls(name: str, f: Any) -> Any:
    """Return functions of an array: NumPy's with each further argument, and with each value of each option."""
    parameters = () if isinstance(f, np.ufunc) else inspect.signature(f).parameters.values()
    count = f.nin if isinstance(f, np.ufunc) else sum(p.default is p.empty and p.kind < 2 for p in parameters)
    options = [(p.name, v) for p in parameters if p.default is not p.empty for v in OPTIONS.get(p.name, ())]
    for more in [(second,) for second in ARGUMENTS.get(name, SECOND)] if count == 2 else [()]:
        for option in [(), *options, *([("dtype", np.float32), ("order", "F")] if isinstance(f, np.ufunc) else ())]:
            yield functools.partial(
                lambda x, more, given: f(x, *more, **given), more=more, given=dict([option] * bool(option))
            )


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@for_each("name", [name for name in KNOWN if hasattr(np, name)])
def test_special_inputs_and_options_have_the_values_of_numpy_or_are_refused(name):
    for function, x in itertools.product(special_calls(name, getattr(np, name)), map(np.asarray, SPECIAL)):
        try:
            expected = function(x)
        except (TypeError, ValueError, IndexError, RuntimeError, ZeroDivisionError):
            continue  # NumPy refuses it
        with contextlib.suppress(DifferentiationError):
            value = traced_value(function, x)
            assert same(value, expected), (x, function.keywords, value, expected)


@for_each("x", [np.asarray(x) for x in (*SPECIAL[:1], *SPECIAL[2:5], *SPECIAL[6:])])
def test_quantiles_of_nan_are_nan(x):
    for axis in range(-1, x.ndim):
        if not math.prod(x.shape[axis : axis + 1] if axis >= 0 else x.shape):
            continue
        for q in (0.0, 0.3, [0.5, 1.0]):
            function = functools.partial(np.quantile, q=q, axis=axis if axis >= 0 else None)
            finite = np.nan_to_num(x, neginf=-9.0) if np.isinf(x).any() else x
            assert same(traced_value(function, finite), function(finite))


def traced_value(function: Any, x: Any) -> Any:
    values: list[Any] = []
    xf.vjp(lambda x: values.append(numpy_functions._values(function(x), "bool")) or x, x)
    return values[0]


def same(value: Any, expected: Any) -> bool:
    if isinstance(expected, tuple | list):
        return len(value) == len(expected) and all(map(same, value, expected))
    value, expected = np.asarray(value), np.asarray(expected)
    is_close = np.shape(value) == expected.shape and np.allclose(value, expected, rtol=1e-6, equal_nan=True)
    return is_close and value.dtype == expected.dtype


@for_each("x, derivative", [(0.0, INF), (8.0, 1 / 12), (-8.0, 1 / 12), (INF, 0.0)])
def test_derivative_of_cbrt(x, derivative):
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(xf.grad(np.cbrt)(x), derivative, rtol=1e-6)


def test_every_function_has_a_case():
    known = {*numpy_functions.FUNCTIONS, *numpy_functions._STANDARD_NAMES, *numpy_functions._ARGUMENTS}
    of_values = {*("allclose", "array_equal", "array_equiv", "isclose", "digitize", "isin", "lexsort")}
    of_values |= {*("iscomplex", "isreal", "isneginf", "isposinf")}
    of_values |= {*("argmax", "argmin", "argwhere", "flatnonzero", "all", "any", "argpartition")}
    of_values |= {*("iscomplexobj", "isrealobj", "ndim", "size", "left_shift", "right_shift", "row_stack", "trapz")} | {
        "i0"
    } - {*CASES}
    assert known - {*CASES} == of_values


def test_functions_without_a_derivative_read_values():
    def loss(x: Any) -> Any:
        assert np.allclose(x, X)
        assert np.array_equal(x, X)
        best, order = np.argmax(x), np.argsort(x)
        assert np.any(x > 0.5)
        assert not np.all(x > 0.5)
        return x[best] ** 2 + np.sum(x[order] * np.arange(6.0)) + x[x.argmin()] + np.sum(x * np.digitize(x, [0.5]))

    numbers = np.argsort(np.argsort(X)) + (X > 0.5) + 2.0 * X * (X.max() == X) + (X.min() == X)
    np.testing.assert_allclose(xf.grad(loss)(X), numbers)


def test_derivatives_of_derivatives_and_of_closures():
    hessian = np.stack(
        [xf.grad(lambda x, i=i: xf.grad(lambda y: np.sum(np.sin(y) ** 3 * np.prod(y)))(x)[i])(V) for i in range(3)]
    )
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-10)
    weight = np.asarray([1.0, 2.0, 3.0])
    both = xf.grad(lambda x: xf.grad(lambda y: np.sum(np.outer(x, y) ** 2))(weight)[0])(V)
    np.testing.assert_allclose(both, 4.0 * V * weight[0])


@for_each(
    "function, message",
    [
        (lambda x: np.histogram(x)[0], "np.histogram of a traced array has no derivative rule"),
        (lambda x: np.linalg.eig(S * x[0])[0], "np.linalg.eig of a traced array has no derivative rule"),
        (lambda x: np.sum(x, where=x > 0.5), r"np.sum of a traced .* no argument where; use np.where\(condition, x, y"),
        (lambda x: np.sin(x, where=x > 0.5), r"np.sin of a traced .* no argument where; use np.where\(condition, x, y"),
        (lambda x: np.emath.sqrt(x - 1.0), "np.emath.sqrt of a traced array has no derivative rule"),
        (lambda x: np.emath.logn(2, x), "np.emath.logn of a traced array has no derivative rule"),
        (lambda x: np.char.equal(x, x), "np.char.equal of a traced array has no derivative rule"),
        (lambda x: np.char.join(x, x), "np.strings._join of a traced array has no derivative rule"),
        (lambda x: np.sort(x, order="a"), "np.sort of a traced array has no argument order"),
        (lambda x: x.sum(foo=0), "np.sum of a traced array has no argument foo"),
        (lambda x: np.ravel(x, "K"), "np.ravel of a traced array has no argument order='K'"),
        (lambda x: np.maximum.at(x, [0], 1.0), "np.maximum.at of a traced array has no derivative rule"),
        (
            lambda x: np.percentile(x, 20, method="nearest"),
            "np.quantile of a traced array has no argument method='near",
        ),
        (
            lambda x: np.pad(x, 2, "reflect", reflect_type="odd"),
            "np.pad of a traced array has no argument reflect_type",
        ),
        (
            lambda x: np.multiply(x, X, out=np.zeros(6)),
            "np.multiply of a traced .* no argument out; use the result, as",
        ),
        (lambda x: np.sum(x, out=np.zeros(())), "np.sum of a traced array has no argument out; use the result"),
        (
            lambda x: np.polyfit(x, X, 1),
            "np.polyfit of a traced .*others, or see 'Derivatives of your own' in docs/how",
        ),
        (lambda x: f"{x[0]:.3f}", r"float\(x\) of a traced array, .* use float\(xformer.stop_gradient\(x\)\)"),
        (lambda x: round(x[0], 2), r"float\(x\) of a traced array, .* use float\(xformer.stop_gradient\(x\)\)"),
        (
            lambda x: np.sum(np.asarray(x)),
            r"another library \(np.asarray\(x\) in <lambda> of .*use x for np.asarray\(x\)",
        ),
        (
            lambda x: np.sum([x[0], x[1]]),
            r"another library \(np.sum\(\[x\[0\], x\[1\]\]\) in <lambda> of .* use .*np.stack",
        ),
        (lambda x: np.r_[x, x], r"another library \(np.r_\[x, x\] in <lambda> of tests"),
        (lambda x: RANDOM.normal(x), r"another library \(RANDOM.normal\(x\) in <lambda> of tests"),
        (lambda x: np.linalg.lstsq(S, x[:4], rcond=0.1)[0], "np.linalg.lstsq of a traced array has no argument rcond"),
    ],
)
def test_what_has_no_rule_says_so_by_its_name(function, message):
    with raises_line(DifferentiationError, message):
        xf.grad(function)(X)


def test_constants_are_arrays_for_any_function():
    special = pytest.importorskip("scipy.special")

    def j0(x: Any) -> Any:
        value = xf.stop_gradient(x)
        return special.j0(value) - special.j1(np.asarray(value)) * (x - value)

    np.testing.assert_allclose(xf.grad(lambda x: np.sum(j0(x) ** 2))(X), -2.0 * special.j0(X) * special.j1(X))
    is_ufunc = isinstance(special.j0, np.ufunc)  # not with SCIPY_ARRAY_API=1
    message = "j0 of a traced array has no derivative rule; compose it of others, or see"
    with raises_line(DifferentiationError, message if is_ufunc else "special.j0 has no derivative rule; define one"):
        xf.grad(special.j0)(0.5)


def test_arrays_of_other_libraries_have_no_functions_of_numpy():
    torch = pytest.importorskip("torch")
    with raises_line(DifferentiationError, "a traced array was passed to a function of another library"):
        xf.grad(lambda x: np.sum(x))(torch.ones(3))


def test_unknown_modes_are_refused_as_by_numpy():
    for function in (np.convolve, np.correlate):
        with pytest.raises(ValueError, match="'valid', 'same', or 'full'"):
            xf.grad(lambda x, f=function: np.sum(f(x, V, "all")))(X)


def test_attributes_without_a_derivative_name_others():
    for name, hint in {"tolist": r"list\(x\)", "flat": r"xp.reshape\(x, shape\)"}.items():
        with raises_line(AttributeError, f"traced arrays have no method {name!r}; use {hint}"):
            xf.grad(lambda x, n=name: getattr(x, n))(X)


def test_constants_are_formatted_and_rounded():
    def loss(x: Any) -> Any:
        constant = xf.stop_gradient(x)
        assert (f"{constant[0]:.3f}", round(constant[0], 2)) == (f"{X[0]:.3f}", round(X[0], 2))
        assert f"{x}" == str(x)
        return np.sum(x)

    np.testing.assert_array_equal(xf.grad(loss)(X), np.ones(6))


def test_scipy_is_told_of_its_environment_variable():
    linalg = pytest.importorskip("scipy.linalg")
    function = xf.grad(lambda x: np.sum(linalg.expm(x[:, None] * np.eye(6))))
    with raises_line(DifferentiationError, "another library .* in expm of scipy.* use SciPy with SCIPY_ARRAY_API=1"):
        function(X)


def test_columns_of_pandas_are_told_to_become_arrays():
    in_pandas = {"__name__": "pandas.core.construction", "np": np}
    to_series = types.FunctionType((lambda x: np.asarray(x)).__code__, in_pandas)
    with raises_line(DifferentiationError, r"another library .* of pandas.* use x.to_numpy\(\) for a column"):
        xf.grad(lambda x: np.sum(to_series(x)))(X)


def test_unwrap_of_a_batch():
    function, x = np.unwrap, 9.0 * T
    np.testing.assert_allclose(xf.vmap(function)(x), function(x), rtol=1e-12)
