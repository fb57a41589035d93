"""Suites: the workloads that `xformer bench` measures over a grid of sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xformer.benchmarks import attention, decoding, stacks, training
from xformer.benchmarks.interleaved import Spec, Workload

AXES = ("batch", "length", "heads", "head_dim")


@dataclass(frozen=True)
class Sizes:
    """A grid of sizes: every combination of batch, length, heads and head_dim; d_model is heads * head_dim.

    The other fields are the same for the whole grid. Each suite uses some of them.

    Args:
        batch: Batch sizes.
        length: Lengths in tokens.
        heads: Numbers of attention heads.
        head_dim: Features of a head.
        causal: Causal attention.
        padded: Pad sentences of half the length or more.
        backward: Include the gradients.
        layer: The multi-head layer instead of attention alone.
        layers: Layers of each stack.
        beam: Beam size of decoding; 1 is greedy search.
        vocabulary: Tokens in the vocabulary.
        dtype: Dtype of weights and activations; when training, of activations only.
    """

    batch: Sequence[int]
    length: Sequence[int]
    heads: Sequence[int] = (8,)
    head_dim: Sequence[int] = (64,)
    causal: bool = False
    padded: bool = False
    backward: bool = False
    layer: bool = False
    layers: int = 6
    beam: int = 1
    vocabulary: int = 8000
    dtype: str = "float32"

    def points(self, *fields: str) -> list[dict[str, Any]]:
        """Return the settings of every combination of the axes, with these further fields."""
        common = {name: getattr(self, name) for name in fields}
        values = itertools.product(*(getattr(self, axis) for axis in AXES))
        return [{**dict(zip(AXES, point, strict=True)), **common} for point in values]


@dataclass(frozen=True)
class Suite:
    """A kind of workload over a grid of sizes.

    Args:
        workload: Returns the workload of one point of the grid.
        factory: Implementation by xformer, as in `Spec`.
        sizes: Default sizes.
        settings: The fields of Sizes, besides the axes, that the suite uses.
        rounds: Default number of rounds.
    """

    workload: Callable[[dict[str, Any]], Workload]
    factory: str
    sizes: Sizes
    settings: tuple[str, ...]
    rounds: int = 7

    def quick(self) -> Suite:
        """Return the suite with one size and at most three rounds."""
        first = {axis: getattr(self.sizes, axis)[:1] for axis in AXES}
        return dataclasses.replace(self, sizes=dataclasses.replace(self.sizes, **first), rounds=min(3, self.rounds))

    def workloads(self, sizes: Sizes) -> list[Workload]:
        """Return the workload of every point of a grid."""
        return [self.workload(point) for point in sizes.points(*self.settings)]


_ATTENTION = ("causal", "padded", "backward", "layer", "dtype")
SUITES: dict[str, Suite] = {
    "attention": Suite(
        attention.workload,
        "xformer.benchmarks.attention:build",
        Sizes((1, 8, 32), (32, 128, 512)),
        _ATTENTION,
    ),
    "encoder": Suite(
        stacks.encoder_workload,
        "xformer.benchmarks.stacks:build_encoder",
        Sizes((1, 8), (32, 128, 512)),
        ("layers", "dtype"),
    ),
    "train": Suite(
        training.workload,
        "xformer.benchmarks.training:build",
        Sizes((64,), (32,), head_dim=(32,), layers=3),
        ("layers", "vocabulary", "dtype"),
    ),
    "decode": Suite(
        decoding.workload,
        "xformer.benchmarks.decoding:build",
        Sizes((1, 8, 32), (32,)),
        ("layers", "vocabulary", "beam", "dtype"),
        rounds=5,
    ),
    "memory": Suite(
        attention.memory_workload,
        "xformer.benchmarks.attention:build",
        Sizes((1,), (1024, 2048, 4096, 8192, 16384), heads=(1,), backward=True),
        _ATTENTION,
        rounds=1,
    ),
}


def backend_specs(suite: Suite, backends: Sequence[str]) -> list[Spec]:
    """Return the implementations by xformer on these backends."""
    return [Spec(f"xformer {name}", suite.factory, {"backend": name}) for name in backends]
