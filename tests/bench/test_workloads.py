from __future__ import annotations

import numpy as np
import pytest
from workloads import stacks, training

from tests.conftest import library_or_skip

SIZES = {"batch": 3, "length": 5, "heads": 2, "head_dim": 4, "layers": 2, "vocabulary": 17}


def test_flops_of_a_layer():
    d_model, d_ff, keys = 8, 32, 5
    projections, feed_forward, attention = 4 * 2 * 8 * 8, 2 * 2 * 8 * 32, 2 * 2 * 8 * 5
    assert stacks.layer_flops(d_model, d_ff, keys) == projections + feed_forward + attention


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_libraries_compute_the_same(backend):
    library_or_skip(backend)
    fingerprints = {}
    for name in ("numpy", backend):
        computation = stacks.build_encoder({**SIZES, "backend": name})
        with computation.context():
            fingerprints[name] = computation.fingerprint(computation.step(0))
    np.testing.assert_allclose(fingerprints[backend], fingerprints["numpy"], atol=1e-5)


def test_training_lowers_the_loss():
    computation = training.build({**training.workload(SIZES).settings, "backend": "numpy"})
    with computation.context():
        losses = [computation.step(index) for index in range(4)]
    assert losses[-1] < losses[0]
