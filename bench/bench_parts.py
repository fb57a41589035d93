"""Each part of a Transformer on each array library that is installed, compared with NumPy's results before it is timed.

    pytest bench/bench_parts.py --benchmark-only

Here pytest-benchmark alone measures, in one process: its options save runs, compare them and fail if one is slower. The
libraries take turns in `xformer bench all`.
"""

from __future__ import annotations

from typing import Any

import pytest

from xformer.benchmarks import parts
from xformer.benchmarks.interleaved import difference
from xformer.errors import BackendError

SETTINGS = {**parts.DEFAULTS, "batch": 2, "length": 64}
LIBRARIES = ["numpy", "torch", "jax", "mlx", "cupy", "dpnp", "array_api_strict"]


def fingerprint(computation: Any) -> Any:
    return computation.fingerprint(computation.step(0))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("part", parts.VARIANTS)
def test_part(benchmark: Any, part: str, library: str) -> None:
    name, _, backward = part.partition(", ")
    settings = {**SETTINGS, "part": name, "backward": bool(backward)}
    try:
        computation = parts.build({**settings, "backend": library})
    except BackendError as error:
        pytest.skip(str(error))

    def step() -> None:
        result = computation.step(0)
        if computation.wait:
            computation.wait(result)

    benchmark.group = part
    with computation.context():
        benchmark.extra_info["difference"] = difference(
            fingerprint(parts.build({**settings, "backend": "numpy"})), fingerprint(computation)
        )
        assert benchmark.extra_info["difference"] < 1e-3
        benchmark(step)
