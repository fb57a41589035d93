"""Checks of the exercises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def check(
    answer: Callable[[], Any], expected: Any, tolerance: float = 1e-6
) -> None:
    """Compare an answer with the expected one, numbers up to a tolerance.

    Args:
        answer: Function without arguments that returns the answer; it may use
            names that are not defined yet.
        expected: Array, number, list or text.
        tolerance: Absolute tolerance of numbers, and relative to their size.

    Raises:
        AssertionError: If they differ, or if the answer is missing. The message
            says what was expected and what was received.
    """
    try:
        received = answer()
    except NameError as error:
        # Show the traceback only if the name is missing inside of the answer.
        inside = error.__traceback__.tb_next.tb_next
        raise AssertionError(
            f"{error}: write the answer in the cell above and run it"
        ) from (inside and error)
    shapes = [np.shape(value) for value in (expected, received)]
    if shapes[0] != shapes[1]:
        names = [f"shape {s}" if s else "one value" for s in shapes]
        raise AssertionError(
            f"expected {names[0]}, received {names[1]}: {received}"
        )
    values = [np.asarray(value) for value in (expected, received)]
    is_number = all(value.dtype.kind in "iufb" for value in values)
    if not (
        np.allclose(values[1], values[0], rtol=tolerance, atol=tolerance)
        if is_number
        else np.array_equal(*values)
    ):
        raise AssertionError(f"expected {expected}, received {received}")
