"""Adam of the native library: updates equal those of the definition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.native_cases import SPECIAL, assert_selected, kernels, needs_library, single  # noqa: F401
from tests.ops.numpy_cases import assert_close, memory_orders
from xformer import ops
from xformer.ops.optimizers import adam

pytestmark = needs_library
SETTINGS = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-9}


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("which", range(4))
def test_twenty_steps(monkeypatch, weight_decay, which):
    start = list(memory_orders("float32"))[which]
    ends = []
    for mode in ("auto", "portable"):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        arrays = [start.copy("K"), np.zeros_like(start), np.zeros_like(start)]
        if mode == "auto":
            assert_selected("adam", None, arrays[0], start, *arrays[1:])
        for step in range(1, 21):
            gradient = np.sin(step * start)
            gradient.flags.writeable = False
            grad_scale = np.asarray(0.625, "float32") if weight_decay else None
            slots = [(arrays[0], gradient, *arrays[1:])]
            (arrays,) = adam(slots, step=step, **SETTINGS, weight_decay=[weight_decay], grad_scale=grad_scale)
        ends.append(arrays)
    for actual, expected in zip(*ends, strict=True):
        assert_close(actual, expected)


def slots(*sizes, seed=0):
    return [tuple(np.abs(single(size, seed=seed + i)) for i in range(4)) for size in sizes]


@pytest.mark.parametrize("donate", [False, True])
def test_several_parameters_have_their_own_decay(monkeypatch, donate):
    sizes, decay, ends = [0, 1, 7, 16, 33, 70, 200_003], np.linspace(0.0, 0.9, 7).tolist(), []
    for mode in ("auto", "portable"):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        given = slots(*sizes)
        ends.append(adam(given, step=3, **SETTINGS, weight_decay=decay, donate=donate))
        if mode == "auto":
            assert all((new is old) == donate for old, new in zip(given[2][::2], ends[0][2][:2], strict=True))
    for actual, expected in zip(*ends, strict=True):
        for a, b in zip(actual, expected, strict=True):
            assert_close(a, b)


def test_numbers_may_be_arrays():
    rate, step = np.asarray(0.01), np.asarray(3.0)
    expected = adam(slots(40), step=3, **SETTINGS)
    actual = adam(slots(40), step=step, **SETTINGS | {"learning_rate": rate})
    np.testing.assert_array_equal(actual[0], expected[0])


def test_a_scale_of_nan_skips_the_update():
    before = slots(5, 40)
    after = adam(slots(5, 40), step=3, **SETTINGS, weight_decay=[0.1, 0.1], grad_scale=np.asarray(np.nan, "float32"))
    for (p, _, m, v), updated in zip(before, after, strict=True):
        for old, new in zip((p, m, v), updated, strict=True):
            np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("special", SPECIAL)
def test_special_gradients_stay_in_their_element(monkeypatch, special):
    (slot,) = slots(40)
    slot[1][20] = special
    ends = []
    for mode in ("auto", "portable"):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        ends.append(adam([slot], step=3, **SETTINGS)[0])
    for actual, expected in zip(*ends, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_strided_arrays_are_refused():
    four = np.ones((1, 1, 2, 3), "float32")[..., ::2]
    (line,) = (line for line in ops.explain("adam", None, *(four,) * 4).splitlines() if "native." in line)
    assert line.startswith("  not native.adam: arrays are not contiguous")


def test_arrays_are_writable_and_in_one_memory_order():
    parameter, zeros = single(4, 3), np.zeros((4, 3), "float32")
    every_other, mixed = np.zeros((4, 6), "float32")[:, ::2], np.asfortranarray(zeros)
    assert "contiguous" in ops.explain("adam", None, every_other, zeros, zeros.copy(), zeros.copy())
    assert "memory order" in ops.explain("adam", None, parameter, zeros, mixed, zeros.copy())
    parameter.flags.writeable = False
    assert "read-only" in ops.explain("adam", None, parameter, zeros, zeros.copy(), zeros.copy())
