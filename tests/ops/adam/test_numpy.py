"""Adam on NumPy without the native library: donated arrays are updated in place, with the bits of the definition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.numpy_cases import memory_orders, normal
from xformer import ops
from xformer.ops.optimizers import adam

pytestmark = pytest.mark.usefixtures("no_native")
SETTINGS = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("grad_scale", [None, 0.625, np.nan])
def test_updates_in_place(dtype, grad_scale):
    given, decay = list(memory_orders(dtype)), [0.0, 0.3, 0.1, 0.0]
    slots = [(x, np.sin(x), 0.1 * x, np.square(x)) for x in given]
    for _, gradient, _, _ in slots:
        gradient.flags.writeable = False
    options = {"step": 3, "weight_decay": decay, "grad_scale": None if grad_scale is None else np.asarray(grad_scale)}
    expected = adam(slots, **SETTINGS, **options)
    results = adam(slots, **SETTINGS, **options, donate=True)
    for slot, result, correct in zip(slots, results, expected, strict=True):
        for old, new, definition in zip((slot[0], *slot[2:]), result, correct, strict=True):
            assert new is old
            np.testing.assert_array_equal(new, definition)


def test_only_donated_writable_arrays_are_updated_in_place():
    arrays = [normal(4, 3) for _ in range(4)]
    assert "numpy: numpy.adam" in ops.explain("adam", None, *arrays, donate=True, weight_decay=(0.0,))
    assert "not donated" in ops.explain("adam", None, *arrays)
    arrays[0].flags.writeable = False
    assert "read-only" in ops.explain("adam", None, *arrays, donate=True)
