"""Suites: the workloads that `xformer bench` measures over a grid of sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xformer.benchmarks import attention
from xformer.benchmarks.interleaved import Spec, Workload

AXES = ("batch", "length", "heads", "head_dim")


@dataclass(frozen=True)
class Sizes:
    """A grid of sizes: every combination of batch, length, heads and head_dim; d_model is heads * head_dim.

    The other fields are settings of `attention.workload`, the same for the whole grid.
    """

    batch: Sequence[int]
    length: Sequence[int]
    heads: Sequence[int] = (8,)
    head_dim: Sequence[int] = (64,)
    causal: bool = False
    padded: bool = False
    backward: bool = False
    layer: bool = False
    dtype: str = "float32"

    def points(self) -> list[dict[str, Any]]:
        """Return the settings of every combination of the axes."""
        values = itertools.product(*(getattr(self, axis) for axis in AXES))
        return [{**vars(self), **dict(zip(AXES, point, strict=True))} for point in values]


@dataclass(frozen=True)
class Suite:
    """A kind of workload over a grid of sizes.

    Args:
        workload: Returns the workload of one point of the grid.
        sizes: Default sizes.
        rounds: Default number of rounds.
    """

    workload: Callable[[dict[str, Any]], Workload]
    sizes: Sizes
    rounds: int = 7

    def quick(self) -> Suite:
        """Return the suite with one size and at most three rounds."""
        first = {axis: getattr(self.sizes, axis)[:1] for axis in AXES}
        return dataclasses.replace(self, sizes=dataclasses.replace(self.sizes, **first), rounds=min(3, self.rounds))

    def workloads(self, sizes: Sizes) -> list[Workload]:
        """Return the workload of every point of a grid."""
        return [self.workload(point) for point in sizes.points()]


SUITES: dict[str, Suite] = {
    "attention": Suite(attention.workload, Sizes((1, 8, 32), (32, 128, 512))),
    "memory": Suite(
        attention.memory_workload,
        Sizes((1,), (1024, 2048, 4096, 8192, 16384), heads=(1,), backward=True),
        rounds=1,
    ),
}


def backend_specs(backends: Sequence[str]) -> list[Spec]:
    """Return the implementations by xformer on these backends."""
    return [Spec(f"xformer {name}", "xformer.benchmarks.attention:build", {"backend": name}) for name in backends]
