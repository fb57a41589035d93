"""Layer normalization, which is limited by memory bandwidth."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.benchmarks.computation import Backend, Computation
from xformer.benchmarks.interleaved import Workload, name_with_dtype
from xformer.ops import layer_norm

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def workload(settings: dict[str, Any]) -> Workload:
    """Return the workload of one size; settings: rows, features, dtype."""
    name = f"layer norm {settings['rows']}x{settings['features']} forward"
    return Workload(name_with_dtype(name, settings), settings, (settings["rows"],))


def bytes_moved(settings: dict[str, Any]) -> int:
    """Return the bytes that must be moved: every row is read once and written once."""
    return 2 * int(settings["rows"]) * int(settings["features"]) * BYTES[settings["dtype"]]


def make_inputs(settings: dict[str, Any]) -> list[Any]:
    """Return rows, weight and bias as NumPy arrays."""
    rng = np.random.default_rng(0)
    shapes = (settings["rows"], settings["features"]), (settings["features"],), (settings["features"],)
    return [rng.standard_normal(shape, dtype="float32") for shape in shapes]


def build(settings: dict[str, Any]) -> Computation:
    """Build layer normalization by xformer on settings["backend"]."""
    backend = Backend.from_settings(settings)
    return backend.computation(lambda *arrays: (layer_norm(*arrays),), *map(backend.array, make_inputs(settings)))
