"""The backward pass: walk the tape from the end and pull each cotangent back to the inputs of its record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from xformer.backends import accumulation_dtype
from xformer.tracing.base_functions import base_function
from xformer.tracing.rule import Record


def backward(
    xp: Any,
    tape: list[Record],
    seeds: dict[int, Any],
    leaves: int,
    on_leaf: Callable[[int, Any], object] | None = None,
) -> list[Any]:
    """Return the cotangents of the first `leaves` records; None if no output depends on one.

    The tape is consumed, so memory is freed on the way. `seeds` are the cotangents of the outputs by tape position.
    Cotangents are summed to the shapes and cast to the dtypes of their primals here, so that rules need not. `on_leaf`
    gets the position and the cotangent of each leaf as soon as it is complete.
    """
    complete = {} if on_leaf is None else _leaves_by_first_use(tape, leaves)
    on_leaf = on_leaf or (lambda leaf, cotangent: None)
    cotangents: list[Any] = [None] * len(tape)
    for position, seed in seeds.items():
        cotangents[position] = seed
    add = base_function(xp, "operator_add")
    outputs: list[Any] = []  # cotangents of the outputs of a multi-output record, which precede the record itself
    while len(tape) > leaves:
        for leaf in complete.get(len(tape), ()):
            on_leaf(leaf, cotangents[leaf])
        pull, parents, residuals, shape, _ = tape.pop()
        g = cotangents.pop()
        if pull is None:
            outputs.append(g)
            continue
        if shape is None:
            g, outputs = outputs[::-1], []
            if all(item is None for item in g):
                continue
        elif g is None:
            continue
        for parent, cotangent in zip(parents, pull(xp, g, residuals), strict=True):
            if parent < 0 or cotangent is None:
                continue
            _, _, _, shape, dtype = tape[parent]
            if cotangent.shape != shape or cotangent.dtype != dtype:
                cotangent = unbroadcast(xp, cotangent, shape, dtype)
            # Rules may hand one array to two inputs, so a sum is always a new array, never an update in place.
            previous = cotangents[parent]
            cotangents[parent] = cotangent if previous is None else add(previous, cotangent)
    for leaf in complete.get(leaves, ()):
        on_leaf(leaf, cotangents[leaf])
    return cotangents


def _leaves_by_first_use(tape: list[Record], leaves: int) -> dict[int, list[int]]:
    """Return the leaves by the position of the first record that uses them, or `leaves` if none does."""
    first = dict.fromkeys(range(leaves), leaves)
    for position in reversed(range(leaves, len(tape))):
        first.update((parent, position) for parent in tape[position][1] if 0 <= parent < leaves)
    positions = defaultdict(list)
    for leaf, position in first.items():
        positions[position].append(leaf)
    return positions


def unbroadcast(xp: Any, cotangent: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Bring a cotangent to the shape and dtype of its primal: sum over the axes along which the primal was broadcast.

    A cotangent with fewer elements is broadcast instead: a rule may return a scalar for "the same everywhere".
    """
    leading = len(cotangent.shape) - len(shape)
    repeated = tuple(
        axis
        for axis, size in enumerate(cotangent.shape)
        if axis < leading or (shape[axis - leading] == 1 and size != 1)
    )
    if repeated:
        sum_dtype = accumulation_dtype(xp, cotangent.dtype)
        cotangent = xp.sum(cotangent, axis=repeated, keepdims=True, dtype=sum_dtype)
        cotangent = xp.reshape(cotangent, tuple(cotangent.shape)[max(leading, 0) :])
    if tuple(cotangent.shape) != shape:
        cotangent = xp.broadcast_to(cotangent, shape)
    return cotangent if cotangent.dtype == dtype else xp.astype(cotangent, dtype)
