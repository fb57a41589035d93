"""Products of integers by the native library: other arrays are refused before they are read."""

from __future__ import annotations

import numpy as np
import pytest

from xformer import native
from xformer.errors import ShapeError

if not native.is_available():
    pytest.skip(native.WHY_NOT, allow_module_level=True)


def floats(*shape):
    return np.zeros(shape, np.float32)


def numbers(*shape, dtype=np.uint8):
    return np.zeros(shape, dtype)


def refuse(name, arrays, changes, message):
    native.call(name, tuple(arrays))
    for index, array in changes.items():
        arrays[index] = array
    with pytest.raises(ShapeError, match=message):
        native.call(name, tuple(arrays))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: np.zeros((3, 65))}, "expected float32, uint8 and float32"),
        ({0: floats(2, 65)}, "rows differ"),
        ({0: floats(3, 64)}, "groups differ"),
        ({1: numbers(3, 127)}, "groups differ"),
        ({2: floats(3, 1)}, "groups differ"),
        ({2: None}, "expected float32, uint8 and float32"),
    ],
)
def test_other_arrays_are_not_rounded(changes, message):
    refuse("round_rows", [floats(3, 65), numbers(3, 128), floats(3, 2)], changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: numbers(3, 64)}, "groups differ"),
        ({0: numbers(2, 128)}, "rows differ"),
        ({0: numbers(3, 128, dtype=np.int8)}, "expected uint8, float32, int8 and float32"),
        ({1: floats(3, 1)}, "groups differ"),
        ({2: numbers(2, 67, 48, dtype=np.int8)}, "the panels are of another matrix"),
        ({2: numbers(1, 68, 48, dtype=np.int8)}, "the panels are of another matrix"),
        ({2: numbers(2, 132, 48, dtype=np.int8)}, "groups differ"),
        ({3: floats(3, 100)[:, ::2]}, "expected contiguous rows"),
        ({4: floats(49)}, "for the columns of out"),
        ({5: None}, "expected x, w, out and the scales of both"),
        ({5: floats(51)}, "for the columns of out"),
    ],
)
def test_other_arrays_are_not_multiplied(changes, message):
    arrays = [numbers(3, 128), floats(3, 2), numbers(2, 68, 48, dtype=np.int8), floats(3, 50), floats(50), floats(50)]
    refuse("matmul_rounded", arrays, changes, message)
