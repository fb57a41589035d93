"""The backward pass: walk the tape from the end, pull each cotangent back to the inputs of its record."""

from __future__ import annotations

from typing import Any

from xformer.autodiff.namespace import DiffNamespace, _pull_several


def backward(namespace: DiffNamespace, seeds: dict[int, Any], leaves: list[int]) -> list[Any]:
    """Return the cotangents of `leaves` (tape positions), None where nothing depends on a leaf.

    seeds: the cotangents of the outputs, by tape position. The tape is consumed: memory is freed as the sweep goes.
    Cotangents are brought to the shape and dtype of what they belong to here, once, for all rules.
    """
    tape, xp = namespace.tape, namespace.base
    cotangents: list[Any] = [None] * len(tape)
    for position, seed in seeds.items():
        cotangents[position] = seed
    first_record = 1 + max((i for i in leaves if i >= 0), default=-1)
    several: list[Any] = []  # cotangents of outputs after the first, collected until their record is reached
    while len(tape) > first_record:
        pull, parents, saved, _, _ = tape.pop()
        g = cotangents.pop()
        if pull is None:
            several.append(g)
            continue
        if pull is _pull_several:
            g, several = [g, *reversed(several)], []
            if all(item is None for item in g):
                continue
        elif g is None:
            continue
        for parent, cotangent in zip(parents, pull(xp, g, saved, parents), strict=True):
            if parent < 0 or cotangent is None:
                continue
            _, _, _, shape, dtype = tape[parent]
            if cotangent.shape != shape:
                cotangent = sum_to_shape(xp, cotangent, shape)
            if cotangent.dtype != dtype:
                cotangent = xp.astype(cotangent, dtype)
            # Rules may hand one array to two inputs, so a sum is always a new array, never an update in place.
            known = cotangents[parent]
            cotangents[parent] = cotangent if known is None else known + cotangent
    return [cotangents[i] if i >= 0 else None for i in leaves]


def sum_to_shape(xp: Any, cotangent: Any, shape: tuple[int, ...]) -> Any:
    """Undo broadcasting: sum over the axes along which an input was repeated.

    A cotangent of fewer elements is broadcast instead (a rule may return a scalar for "the same everywhere").
    """
    came = tuple(cotangent.shape)
    if came == shape:
        return cotangent
    leading = len(came) - len(shape)
    repeated = tuple(
        axis for axis, size in enumerate(came) if axis < leading or (shape[axis - leading] == 1 and size != 1)
    )
    if repeated:
        cotangent = xp.sum(cotangent, axis=repeated, keepdims=True, dtype=cotangent.dtype)
        cotangent = xp.reshape(cotangent, tuple(cotangent.shape)[max(leading, 0) :])
    if tuple(cotangent.shape) != shape:
        cotangent = xp.broadcast_to(cotangent, shape)
    return cotangent
