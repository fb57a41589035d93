"""Operations on rows: bits for any instruction set and number of threads, and refusal of arrays that do not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference import native_levels
from xformer import native
from xformer import native as library
from xformer.errors import ShapeError

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the library was not compiled")

ROWS, N = 67, 1033
_RNG = np.random.default_rng(0)
X, G, Y = (_RNG.normal(size=(ROWS, N)).astype(np.float32) for _ in range(3))
VECTOR, ANGLES = _RNG.normal(size=N).astype(np.float32), _RNG.normal(size=(ROWS, 501)).astype(np.float32)
STATISTICS = np.abs(_RNG.normal(size=(2, ROWS))).astype(np.float32) + 1.0
KEEP, LABELS = _RNG.random((ROWS, N)) < 0.7, _RNG.integers(0, ROWS, ROWS)
SETTINGS = np.asarray([1e-3, 0.9, 0.98, 1.5, 1e-8, 1e-3, 0.5])

# For each operation: arrays (None for outputs of the size of X), integers and numbers.
Call = tuple[tuple[Any, ...], tuple[int, ...], dict[str, float]]
CALLS: dict[str, Call] = {
    "relu": ((X, Y), (), {}),
    "relu_vjp": ((G, X, Y), (), {}),
    "gelu": ((X, VECTOR[:8].copy(), Y, np.empty_like(X)), (), {"n0": 0.3}),
    "logistic_unit": ((X, Y, np.empty_like(X)), (), {"n0": 1.6, "n1": 0.04}),
    "norm": ((X, VECTOR, VECTOR.copy(), Y, np.empty_like(STATISTICS)), (1,), {"n0": 1e-5}),
    "norm_vjp": ((G, X, VECTOR, STATISTICS, Y, np.empty((5, 2, N), np.float32)), (1,), {}),
    "sums_of_squares": ((np.empty(6), X, VECTOR), (), {}),
    "softmax": ((X, KEEP, Y), (), {}),
    "softmax_vjp": ((G, X, Y), (), {}),
    "cross_entropy": (
        (X, LABELS, np.empty(ROWS, np.float32), np.empty_like(STATISTICS)),
        (-1,),
        {"n0": 0.1, "n1": 1e-4},
    ),
    "cross_entropy_vjp": ((X, LABELS, VECTOR[:ROWS].copy(), STATISTICS, Y), (-1,), {"n0": 0.1, "n1": 1e-4}),
    "top_k": ((X, np.empty((ROWS, 9), np.float32), np.empty((ROWS, 9), np.int64)), (), {}),
    "rotate": ((X[None], ANGLES, ANGLES.copy(), Y[None]), (1,), {}),
    "dropout": ((X, KEEP, Y), (), {"n0": 1.4}),
    "add_rows": ((G, LABELS, Y), (), {"n0": 1.5}),
    "adam": ((Y, G, np.empty_like(X), np.empty_like(X), SETTINGS), (), {"n0": 0.01}),
}
OPTIONAL = {("gelu", 3), ("logistic_unit", 2), ("norm", 2), ("softmax", 1)}


def digest() -> str:
    """Return a digest of all arrays after all calls."""
    import hashlib

    result = hashlib.sha256()
    for name, (arrays, integers, numbers) in CALLS.items():
        copies = tuple(np.abs(x) if name == "adam" else x.copy() for x in arrays)
        if name == "adam":
            copies[2][:], copies[3][:] = 0.25, 0.5
        native.call(name, copies, *integers, **numbers)
        assert all(np.isfinite(x).all() for x in copies), name
        result.update(b"".join(x.tobytes() for x in copies))
    return result.hexdigest()


_SCRIPT = """
import sys
from tests.native.test_rows import digest
from xformer import native
from xformer.threads import set_num_threads
assert native.level() == sys.argv[1], native.WHY_NOT
set_num_threads(int(sys.argv[2]))
print(digest())
"""


def test_bits_do_not_depend_on_threads_and_vectors() -> None:
    levels = [level for level in native_levels() if level != "baseline"] or ["baseline"]
    digests = set()
    for level in levels:
        for threads in ("1", "3"):
            environment = os.environ | {"XFORMER_NATIVE": level, "PYTHONPATH": str(Path(__file__).parents[2])}
            command = [sys.executable, "-c", _SCRIPT, level, threads]
            digests.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(digests) == 1


def misfits(x: Any) -> dict[str, Any]:
    """Return arrays that differ from `x` in one respect."""
    *leading, size = x.shape
    return {
        "short": np.zeros((*leading, size - 1), x.dtype),
        "long": np.zeros((*leading, size + 1), x.dtype),
        "float16": np.zeros(x.shape, np.float16),
        "float64": np.zeros(x.shape, np.float64 if x.dtype == np.float32 else np.float32),
        "strided": np.zeros((*leading, 2 * size), x.dtype)[..., ::2],
        "absent": None,
    }


# Misfits that an array may be: sizes that no other array has, and masks of any strides.
ALLOWED = {
    **{array: {"absent"} for array in OPTIONAL},
    ("softmax", 1): {"absent", "strided"},
    ("cross_entropy", 0): {"short", "long"},
    ("top_k", 0): {"short", "long"},
    ("sums_of_squares", 1): {"short", "long"},
    ("sums_of_squares", 2): {"short", "long"},
}


@pytest.mark.parametrize("name", CALLS)
def test_arrays_that_do_not_fit_are_refused(name: str) -> None:
    arrays, integers, numbers = CALLS[name]
    for i, x in enumerate(arrays):
        for kind, other in misfits(x).items():
            is_copied = kind == "strided" and not library._OUTPUTS[name] >> i & 1
            if kind not in ALLOWED.get((name, i), ()) and not is_copied:
                with pytest.raises(ShapeError):
                    native.call(name, (*arrays[:i], other, *arrays[i + 1 :]), *integers, **numbers)


@pytest.mark.parametrize("name", CALLS)
def test_inputs_that_are_not_contiguous_are_copied(name: str) -> None:
    arrays, integers, numbers = CALLS[name]
    is_output = [library._OUTPUTS[name] >> i & 1 for i in range(len(arrays))]
    results = []
    for is_strided in (False, True):
        given = [
            np.repeat(x, 2, axis=-1)[..., ::2] if is_strided and not output and x.dtype != np.int64 else x.copy()
            for x, output in zip(arrays, is_output, strict=True)
        ]
        native.call(name, tuple(given), *integers, **numbers)
        results.append([x for x, output in zip(given, is_output, strict=True) if output])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("name", "i"), sorted(OPTIONAL))
def test_optional_arrays(name: str, i: int) -> None:
    arrays, integers, numbers = CALLS[name]
    present = [x.copy() for x in (*arrays[:i], *arrays[i + 1 :])]
    native.call(name, (*present[:i], None, *present[i:]), *integers, **numbers)
    assert all(np.isfinite(x).all() for x in present)
