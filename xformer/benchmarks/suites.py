"""Suites: the workloads that `xformer bench` measures over a grid of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from xformer.benchmarks import attention
from xformer.benchmarks.interleaved import Spec, Workload

AXES = ("batch", "length", "heads", "head_dim")
_DEFAULTS = {"causal": False, "padded": False, "backward": False, "layer": False, "dtype": "float32"}


@dataclass(frozen=True)
class Suite:
    """Attention over a grid of sizes.

    Args:
        settings: Defaults of the settings of `attention.workload`; sizes are a sequence for each axis of the grid.
        rounds: Default number of rounds.
        warmup_steps: Steps before the first round; to measure memory, no further step is needed.
    """

    settings: dict[str, Any]
    rounds: int = 7
    warmup_steps: int = 3

    def quick(self) -> Suite:
        """Return the suite with one size and at most three rounds."""
        first = {axis: self.settings[axis][:1] for axis in AXES}
        return replace(self, settings=self.settings | first, rounds=min(3, self.rounds))

    def workloads(self, **settings: Any) -> list[Workload]:
        """Return the workload of every combination of sizes, with these settings instead of the defaults."""
        settings = {**_DEFAULTS, **self.settings, **settings}
        points = itertools.product(*(settings.pop(axis) for axis in AXES))
        workloads = (attention.workload({**dict(zip(AXES, point, strict=True)), **settings}) for point in points)
        return [replace(workload, warmup_steps=self.warmup_steps) for workload in workloads]


_HEADS = {"heads": (8,), "head_dim": (64,)}
SUITES = {
    "attention": Suite({"batch": (1, 8, 32), "length": (32, 128, 512), **_HEADS}),
    "memory": Suite(
        {"batch": (1,), "length": (1024, 2048, 4096, 8192, 16384), **_HEADS, "heads": (1,), "backward": True}, 1, 0
    ),
}


def backend_specs(backends: Sequence[str]) -> list[Spec]:
    """Return the implementations by xformer on these backends."""
    return [Spec(f"xformer {name}", "xformer.benchmarks.attention:build", {"backend": name}) for name in backends]
