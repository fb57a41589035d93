"""Apply a different module to each group of rows, as in a mixture of experts."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import Array, array_namespace
from xformer.errors import DataError, ShapeError
from xformer.ops.operation import Operation
from xformer.tracing.grad import vjp_in
from xformer.tree import Module, flatten


class Expert(NamedTuple):
    """The structure of a module.

    Attributes:
        num_arrays: Number of its arrays.
        rebuild: Makes the module from its arrays.
        frozen: Positions of the arrays that training does not change, which get no cotangent.
        is_affine: Whether it maps rows to rows @ weight + bias; the weight is its first array, the bias its second.
    """

    num_arrays: int
    rebuild: Any
    frozen: frozenset[int]
    is_affine: bool

    def __hash__(self) -> int:
        """Refuse: `rebuild` holds arrays, which no key of a cache may keep."""
        raise TypeError("unhashable type: 'Expert'")

    def apply(self, rows: Array, arrays: Sequence[Array], *, save: bool) -> tuple[Any, Any]:
        """Return the output for some rows and, with `save`, the pullback to the rows and the arrays.

        The derivative is that of the module, so experts may have weights in any form.
        """
        if not save:
            return self.rebuild(arrays)(rows), None
        constants = [1 + position for position in self.frozen]
        leaves = [rows, *arrays]
        return vjp_in(array_namespace(*leaves), lambda x: self.rebuild(x[1:])(x[0]), leaves, constants)


def arrays_of(experts: Sequence[Expert], arrays: Sequence[Array]) -> list[Sequence[Array]]:
    """Return the arrays of each expert."""
    ends = itertools.accumulate((expert.num_arrays for expert in experts), initial=0)
    return [arrays[start:end] for start, end in itertools.pairwise(ends)]


# Rows of an expert: a slice where they are sorted and values can be read, else a mask of all rows.
Rows = Any


def _of(rows: Rows, x: Array) -> Any:
    """Return the rows of an expert, all rows with zeros in place of those of others if they are a mask."""
    if isinstance(rows, slice):
        return x[rows, ...]
    xp = array_namespace(rows, x)
    return xp.where(rows, x, xp.zeros_like(x))


def _together(selections: Sequence[Rows], parts: Iterable[Array]) -> Any:
    """Return all rows, given those of each expert."""
    if isinstance(selections[0], slice):
        parts = list(parts)
        return array_namespace(*parts).concat(parts, axis=0)
    return functools.reduce(operator.add, map(_of, selections, parts))


def _apply(x: Array, calls: Sequence[tuple[Rows, Expert, Sequence[Array]]], *, save: bool) -> tuple[Array, Any]:
    saved = []

    def outputs() -> Iterator[Array]:
        for rows, expert, arrays in calls:
            y, pull = expert.apply(_of(rows, x), arrays, save=save)
            saved.append((rows, pull))
            yield y

    return _together([rows for rows, _, _ in calls], outputs()), saved


def experts_vjp(g: Array, saved: Any, needs: Any, *, experts: tuple[Expert, ...]) -> tuple[Any, ...]:
    """Return the cotangents of the rows and of the arrays of all experts."""
    cotangents: list[Any] = []

    def parts() -> Iterator[Array]:
        for rows, pull in saved:
            drows, *own = pull([_of(rows, g)])
            cotangents.extend(own)
            yield drows

    return _together([rows for rows, _ in saved], parts()), None, *cotangents


def _forward(
    x: Array, expert_indices: Array, *arrays: Array, experts: tuple[Expert, ...], save: bool
) -> tuple[Array, Any]:
    """Apply every expert to all rows, those of others being zeros, so that no shape depends on values."""
    xp = array_namespace(x, *arrays)
    masks = [xp.expand_dims(expert_indices == index, axis=1) for index in range(len(experts))]
    return _apply(x, list(zip(masks, experts, arrays_of(experts, arrays), strict=True)), save=save)


def sliced_forward(
    x: Array, expert_indices: Array, *arrays: Array, experts: tuple[Expert, ...], save: bool
) -> tuple[Array, Any]:
    """Apply each expert to a slice with its rows, for libraries where values can be read."""
    ends = itertools.accumulate(_counts(expert_indices, len(experts)), initial=0)
    slices = itertools.starmap(slice, itertools.pairwise(ends))
    calls = list(zip(slices, experts, arrays_of(experts, arrays), strict=True))
    used = calls if save else [call for call in calls if call[0].start < call[0].stop]
    return _apply(x, used or calls[:1], save=save)


def _counts(expert_indices: Any, num_experts: int) -> list[int]:
    """Return the number of rows of each expert; raise DataError unless they are sorted by their experts."""
    host = np.asarray(expert_indices.tolist(), np.int64)  # which torch also allows inside torch.func.grad
    if host.size and (host[0] < 0 or host[-1] >= num_experts or np.any(host[1:] < host[:-1])):
        raise DataError(f"experts got expert_indices {host!r:.60}; expected ascending ones from 0 to {num_experts - 1}")
    counts: list[int] = np.bincount(host, minlength=num_experts).tolist()
    return counts


_operation = Operation(
    "experts",
    "x: (rows, in_features) float, expert_indices: (rows) int, {array: (...) real}* -> (rows, out_features)",
    _forward,
    experts_vjp,
)


def _example(arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return a call of two experts: all have the same sizes where kernels take them."""
    experts = options["experts"][:2]
    return arrays[: 2 + sum(expert.num_arrays for expert in experts)], {"experts": experts}


_operation.example = _example


def apply_experts(x: Array, expert_indices: Array, experts: Sequence[Module]) -> Array:
    """Apply one of several modules to each row, `experts[expert_indices[i]](x[i])`.

    Args:
        x: Array of shape (rows, in_features), floating.
        expert_indices: Index of the expert of each row, ascending integers (rows,) in [0, number of experts).
        experts: Modules that map each row of (n, in_features) on its own, to (n, out_features), such as `Linear`.

    Returns:
        Array of shape (rows, out_features).

    Raises:
        ShapeError: If there are no experts, or shapes or dtypes do not match.
        DataError: If the indices are not ascending, or out of range; checked on NumPy, and on torch on a CPU.
    """
    if not experts:
        raise ShapeError("apply_experts got no experts; expected at least one module")
    arrays: list[Array] = []
    structures = []
    for expert in experts:
        frozen: list[int] = []
        leaves, rebuild = flatten(expert, frozen=frozen)
        arrays += leaves
        is_affine = getattr(expert, "_is_affine", False) and [leaf.ndim for leaf in leaves] in ([2], [2, 1])
        structures.append(Expert(len(leaves), rebuild, frozenset(frozen), is_affine))
    return _operation(x, expert_indices, *arrays, experts=tuple(structures))
