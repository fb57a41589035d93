from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.conftest import library_or_skip
from xformer.benchmarks import parts
from xformer.benchmarks.computation import fingerprint
from xformer.benchmarks.interleaved import difference

SETTINGS = {"batch": 3, "heads": 2, "length": 6, "head_dim": 4, "backend": "numpy"}
FLAGS = [
    dict(zip(("causal", "padded", "backward", "part"), values, strict=True))
    for values in itertools.product(*[(False, True)] * 3, ("attention", "layer"))
]


def fingerprint_of(settings):
    computation = parts.build(settings)
    with computation.context():
        return computation.fingerprint(computation.step(0))


def test_flops_count_matrix_products():
    core = {**SETTINGS, **FLAGS[0]}
    flops = parts.workload(core).flops
    assert flops == 2 * (2 * 3 * 2 * 6 * 6 * 4)
    assert parts.workload({**core, "causal": True}).flops == 2 * (2 * 3 * 2 * 21 * 4)
    assert parts.workload({**core, "backward": True}).flops == 3 * flops
    assert parts.workload({**core, "part": "layer"}).flops - flops == 4 * (2 * 18 * 8 * 8)


def test_padding_keeps_half_of_every_sentence():
    mask = parts.mask_of({**SETTINGS, "batch": 64, "padded": True})
    kept = mask.sum(axis=-1)
    assert (mask.shape, kept.min(), kept.max()) == ((64, 1, 1, 6), 3, 6)
    assert parts.mask_of({**SETTINGS, "padded": False}) is None


@pytest.mark.parametrize("flags", FLAGS[7::8], ids=lambda flags: "-".join(name for name in flags if flags[name]))
@pytest.mark.parametrize("backend", ["torch", "jax", "mlx"])
def test_libraries_compute_the_same(backend, flags):
    library_or_skip(backend)
    settings = {**SETTINGS, **flags}
    assert difference(fingerprint_of(settings), fingerprint_of({**settings, "backend": backend})) < 1e-5


def test_a_fingerprint_has_every_element_or_a_fixed_sample():
    x = np.arange(24.0).reshape(2, 3, 4)
    assert fingerprint((x, -x[0])) == [list(range(24)), [-i for i in range(12)]]
    large = np.arange(1e5).reshape(10, -1)
    (sample,) = fingerprint((large,))
    assert (len(sample), len(set(sample)) > 4000, fingerprint((large,))) == (4096, True, [sample])
