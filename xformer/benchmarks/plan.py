"""The kinds of work that can be measured, and their cases over a grid of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xformer.benchmarks import attention, decoding, stacks, training
from xformer.benchmarks.interleaved import Case, Entry

AXES = ("batch", "length", "heads", "head_dim")


@dataclass(frozen=True)
class Sizes:
    """A grid: every batch size with every length, number of heads and head_dim; d_model is heads * head_dim.

    The other fields do not vary within a run; which of them mean something depends on the kind of work.
    causal, padded, backward, layer: of attention; layers: of each stack; vocabulary: of a model; beam: of decoding, 1
    is greedy; dtype: of weights and activations, in training of activations alone.
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

    def points(self, *fixed: str) -> list[dict[str, Any]]:
        """Every combination of the axes, with the fixed settings of these names."""
        common = {name: getattr(self, name) for name in fixed}
        values = itertools.product(*(getattr(self, axis) for axis in AXES))
        return [{**dict(zip(AXES, point, strict=True)), **common} for point in values]


@dataclass(frozen=True)
class Kind:
    """A kind of work.

    cases: over a grid. factory: who does it for xformer. sizes: where nothing else is asked for. settings: the fields
    of Sizes beside the axes that mean something. turns: how often to measure, where nothing else is asked for.
    """

    cases: Callable[[Sizes], list[Case]]
    factory: str
    sizes: Sizes
    settings: tuple[str, ...]
    turns: int = 7


_ATTENTION = ("causal", "padded", "backward", "layer", "dtype")


def _over(case: Callable[[dict[str, Any]], Case], *settings: str) -> Callable[[Sizes], list[Case]]:
    """The cases of every point of a grid."""
    return lambda sizes: [case(point) for point in sizes.points(*settings)]


_MODEL = ("layers", "vocabulary")
WORKS: dict[str, Kind] = {
    "attention": Kind(
        _over(attention.case, *_ATTENTION),
        "xformer.benchmarks.attention:work",
        Sizes((1, 8, 32), (32, 128, 512)),
        _ATTENTION,
    ),
    "encoder": Kind(
        _over(stacks.encoder_case, "layers", "dtype"),
        "xformer.benchmarks.stacks:encoder",
        Sizes((1, 8), (32, 128, 512)),
        ("layers", "dtype"),
    ),
    "train": Kind(
        _over(training.case, *_MODEL, "dtype"),
        "xformer.benchmarks.training:work",
        Sizes((64,), (32,), head_dim=(32,), layers=3),
        (*_MODEL, "dtype"),
    ),
    "decode": Kind(
        _over(decoding.case, *_MODEL, "beam", "dtype"),
        "xformer.benchmarks.decoding:work",
        Sizes((1, 8, 32), (32,)),
        (*_MODEL, "beam", "dtype"),
        turns=5,
    ),
    "memory": Kind(
        _over(attention.memory_case, *_ATTENTION),
        "xformer.benchmarks.attention:work",
        Sizes((1,), (1024, 2048, 4096, 8192, 16384), heads=(1,), backward=True),
        _ATTENTION,
        turns=1,
    ),
}


def entries(kind: Kind, backends: Sequence[str]) -> list[Entry]:
    """xformer on each of these array libraries."""
    return [Entry(f"xformer {name}", kind.factory, {"backend": name}) for name in backends]
