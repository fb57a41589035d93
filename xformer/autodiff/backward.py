"""The backward pass: walk the tape from the end, pull each cotangent back to the inputs of its record."""

from __future__ import annotations

from typing import Any

from xformer.autodiff.rule import Record
from xformer.backends import accumulation_dtype


def backward(xp: Any, tape: list[Record], seeds: dict[int, Any], leaves: int) -> list[Any]:
    """Return the cotangents of the first `leaves` records, None where nothing depends on one.

    xp: the namespace to compute in. seeds: the cotangents of the outputs, by tape position. The tape is consumed:
    memory is freed as the sweep goes. Cotangents are brought to the shape and dtype of what they belong to here,
    once, for all rules.
    """
    cotangents: list[Any] = [None] * len(tape)
    for position, seed in seeds.items():
        cotangents[position] = seed
    several: list[Any] = []  # cotangents of the outputs of a record of several, which come before the record itself
    while len(tape) > leaves:
        pull, parents, saved, shape, _ = tape.pop()
        g = cotangents.pop()
        if pull is None:
            several.append(g)
            continue
        if shape is None:
            g, several = several[::-1], []
            if all(item is None for item in g):
                continue
        elif g is None:
            continue
        for parent, cotangent in zip(parents, pull(xp, g, saved), strict=True):
            if parent < 0 or cotangent is None:
                continue
            _, _, _, shape, dtype = tape[parent]
            if cotangent.shape != shape or cotangent.dtype != dtype:
                cotangent = unbroadcast(xp, cotangent, shape, dtype)
            # Rules may hand one array to two inputs, so a sum is always a new array, never an update in place.
            known = cotangents[parent]
            cotangents[parent] = cotangent if known is None else known + cotangent
    return cotangents


def unbroadcast(xp: Any, cotangent: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Bring a cotangent to a shape and a dtype: undo broadcasting by summing over the axes that were repeated.

    A cotangent of fewer elements is broadcast instead (a rule may return a scalar for "the same everywhere").
    """
    came = tuple(cotangent.shape)
    leading = len(came) - len(shape)
    repeated = tuple(
        axis for axis, size in enumerate(came) if axis < leading or (shape[axis - leading] == 1 and size != 1)
    )
    if repeated:
        wide = accumulation_dtype(xp, cotangent.dtype)
        cotangent = xp.sum(cotangent, axis=repeated, keepdims=True, dtype=wide)
        cotangent = xp.reshape(cotangent, tuple(cotangent.shape)[max(leading, 0) :])
    if tuple(cotangent.shape) != shape:
        cotangent = xp.broadcast_to(cotangent, shape)
    return cotangent if cotangent.dtype == dtype else xp.astype(cotangent, dtype)
