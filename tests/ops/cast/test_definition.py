"""Casts of several arrays at once, on every library, and their use in mixed precision."""

from __future__ import annotations

import numpy as np

from xformer import value_and_grad
from xformer.backends import Array, array_namespace, dtype_name, from_host, to_host
from xformer.ops import cast
from xformer.training.precision import autocast
from xformer.tree import Module


def test_cast_changes_the_dtype_and_keeps_the_values(xp):
    hosts = [np.asarray([[0.1, -2.0]]), np.asarray(3.5), np.zeros((0, 2))]
    for before, after in [("float64", "float32"), ("float32", "float64"), ("float32", "float32")]:
        arrays = [from_host(xp, host, dtype=before) for host in hosts]
        for actual, host in zip(cast(*arrays, dtype=after), hosts, strict=True):
            assert dtype_name(actual.dtype) == after
            np.testing.assert_array_equal(to_host(actual), host.astype(before).astype(after))
    assert cast(dtype="float32") == ()


def test_cotangents_have_the_dtype_of_the_arrays(xp):
    arrays = [from_host(xp, np.asarray([1.0, 2.0]), dtype="float64"), from_host(xp, np.asarray(3.0), dtype="float32")]

    def total(arrays):
        first, second = cast(*arrays, dtype="float32")
        return array_namespace(first).sum(first * first) + second

    value, (first, second) = value_and_grad(total)(arrays)
    assert [dtype_name(array.dtype) for array in (first, second)] == ["float64", "float32"]
    assert float(value) == 8.0
    assert to_host(first).tolist() == [2.0, 4.0]
    assert float(second) == 1.0


class Counted(Module):
    weight: Array
    counts: Array

    def __init__(self, weight, counts):
        self.weight, self.counts = weight, counts


def test_integer_arrays_of_a_model_are_not_cast():
    model = Counted(np.asarray([1.0, 2.0], "float32"), np.asarray([70_001]))
    seen = autocast("float16", lambda model, batch, rng: model)(model, None)
    assert [seen.weight.dtype.name, seen.counts.dtype.name] == ["float16", "int64"]
    assert seen.counts.tolist() == [70_001]
