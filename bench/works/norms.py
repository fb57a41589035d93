"""Layer normalization of rows, which is as fast as memory is read and written."""

from __future__ import annotations

import importlib
from typing import Any

from xformer.benchmarks import Case, Library, Work
from xformer.benchmarks.interleaved import in_dtype
from xformer.ops import layer_norm

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def case(settings: dict[str, Any]) -> Case:
    """The case of one size. settings: rows, features, dtype."""
    name = f"layer norm {settings['rows']}x{settings['features']} forward"
    return Case(in_dtype(name, settings), settings, (settings["rows"],))


def bytes_moved(settings: dict[str, Any]) -> int:
    """What has to be read and written at least: every row once each."""
    return 2 * int(settings["rows"]) * int(settings["features"]) * BYTES[settings["dtype"]]


def inputs(settings: dict[str, Any]) -> list[Any]:
    """Rows, weight and bias, in NumPy."""
    rng: Any = importlib.import_module("numpy").random.default_rng(0)
    shapes = (settings["rows"], settings["features"]), (settings["features"],), (settings["features"],)
    return [rng.standard_normal(shape, dtype="float32") for shape in shapes]


def work(settings: dict[str, Any]) -> Work:
    """By xformer, on the library that settings["backend"] names."""
    library = Library.of(settings)
    return library.work(lambda *arrays: (layer_norm(*arrays),), *map(library.array, inputs(settings)))
