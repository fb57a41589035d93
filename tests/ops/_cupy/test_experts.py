"""Linear maps of experts on CuPy against the definition."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

from tests.ops._cupy.cuda_cases import DTYPES, normal
from tests.reference import for_each, raises_line
from xformer import ops, vjp
from xformer.backends import array_namespace, to_host
from xformer.backends.numpy import NumpyLibrary
from xformer.errors import ShapeError
from xformer.layers import Initializer, Linear, quantize
from xformer.ops.experts import apply_experts
from xformer.tree import replace

# Of rows, and the number of experts: all rows for one of them, experts without rows, a row each, many tiles, no rows.
INDICES = [
    (np.asarray([0, 0, 1, 3, 3, 3]), 4),
    (np.asarray([2] * 70), 3),
    (np.repeat([0, 2, 3, 4], [40, 1, 17, 64]), 6),
    (np.arange(5), 5),
    (np.asarray([4]), 9),
    (np.zeros(0, int), 2),
    (np.zeros(33, int), 1),
]


def case(indices, count, *, bias=True, shape=(12, 9)):
    """Return a function of x and of the arrays of the experts, and these arrays."""
    maps = [Linear(*shape, bias=bias, init=Initializer("numpy", seed=seed, dtype="float64")) for seed in range(count)]
    each = 2 if bias else 1

    def function(x, *arrays):
        parts = [arrays[each * place : each * place + each] for place in range(count)]
        own = [
            replace(one, dict(zip(["weight", "bias"], part, strict=False)))
            for one, part in zip(maps, parts, strict=True)
        ]
        return apply_experts(x, array_namespace(x).asarray(indices), own)

    shapes = [shape, (shape[1],)][:each] * count
    arrays = [normal(*own, seed=seed) for seed, own in enumerate(shapes, 1)]
    return function, normal(len(indices), shape[0]), *arrays


@for_each("dtype", DTYPES)
@for_each("indices, count", INDICES)
def test_values_and_derivatives(cuda, dtype, indices, count):
    for bias in (True, False):
        function, *hosts = case(indices, count, bias=bias)
        arrays = [cuda.array(x, dtype) for x in hosts]
        assert ": cupy.experts" in ops.explain(functools.partial(function, *arrays)).split("\n")[0]
        cuda.agree(function, *hosts, dtype=dtype)


def test_transposed_weights(cuda):
    function, x, *weights = case(np.repeat([0, 1], 20), 2, bias=False, shape=(16, 8))

    def transposed(x, *tables):
        return function(x, *(array_namespace(x).matrix_transpose(table) for table in tables))

    cuda.agree(transposed, x, *(weight.T.copy() for weight in weights), dtype="float32")


@pytest.mark.parametrize("backwards", [False, True])
def test_the_number_of_launches_does_not_depend_on_the_experts(cuda_host, monkeypatch, backwards):
    monkeypatch.setattr(cuda_host.launcher, "backwards", backwards)
    launched = []
    for count in (2, 24):
        function, *hosts = case(np.sort(np.arange(48) % count), count)
        arrays = [cuda_host.array(x, "float32") for x in hosts]
        cuda_host.launcher.launched.clear()
        output, pull = vjp(function, *arrays)
        pull(cuda_host.xp.ones_like(output))
        launched.append([name.split(".")[1].split("<")[0] for name in cuda_host.launcher.launched])
    product = ["route", "fill_tiles", "collect"]
    assert launched == [[*product, *product, "fill_tiles", "sum_tiles", "sum_tiles"]] * 2


def test_a_comparison_at_the_first_use_has_two_experts(cuda_host, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(NumpyLibrary, "kernel_identity", lambda self: "a GPU", raising=False)
    monkeypatch.setattr(cuda_host.xp, "kernels", {})
    function, *hosts = case(np.sort(np.arange(50) % 30), 30)
    function(*(cuda_host.array(host, "float32") for host in hosts))
    products = [name for name in cuda_host.launcher.launched if "route" in name]
    assert len(products) == 2
    (verdicts,) = json.loads((tmp_path / "xformer" / "kernel_checks.json").read_text()).values()
    (key,) = (key for key in verdicts if key.startswith("cupy.experts"))
    assert verdicts[key] == ""
    assert len(key) < 600


def test_infinite_rows_do_not_reach_other_experts(cuda):
    function, x, *hosts = case(np.repeat([0, 1, 2], 20), 3)
    x[:20] = np.inf
    arrays = [cuda.array(host, "float32") for host in (x, *hosts)]
    with np.errstate(invalid="ignore"):
        output, pull = vjp(function, *arrays)
        cotangents = pull(cuda.xp.ones_like(output))
    assert np.isfinite(to_host(output)[20:]).all()
    assert all(np.isfinite(to_host(each)).all() for each in cotangents[3:])


def test_indices_out_of_range_give_zeros_and_unsorted_ones_nan(cuda):
    _, x, *hosts = case(np.zeros(6, int), 3)
    function, *_ = case(np.asarray([-2, -1, 0, 2, 3, 9]), 3)
    y = to_host(function(*(cuda.array(host, "float32") for host in (x, *hosts))))
    assert y.any(axis=1).tolist() == [False, False, True, True, False, False]
    for indices in ([2, 2, 1, 1, 0, 0], [0, 2, 0, 2, 0, 2], [1, 0, 0, 0, 0, 0]):
        function, *_ = case(np.asarray(indices), 3)
        y = to_host(function(*(cuda.array(host, "float32") for host in (x, *hosts))))
        right = np.stack([row @ hosts[2 * i] + hosts[2 * i + 1] for row, i in zip(x, indices, strict=True)])
        assert np.isnan(y).any()
        assert all(np.isnan(row).all() or np.allclose(row, own, atol=1e-5) for row, own in zip(y, right, strict=True))


def test_shapes_that_do_not_fit_are_refused(cuda):
    function, x, weight, bias, *_ = (cuda.array(each) if index else each for index, each in enumerate(case([0, 0], 1)))
    with raises_line(ShapeError, r"experts got x of shape \(2, 11\) and weights of shape \(12, 9\)"):
        function(x[:, :11], weight, bias)


def test_explain_gives_the_reason(cuda):
    x, indices = cuda.array(normal(4, 12), "float32"), cuda.array(np.asarray([0, 0, 1, 1]))
    maps = [Linear(12, 9, bias=bias, init=Initializer(cuda.xp, seed=0)) for bias in (True, False, True)]
    wide = Linear(12, 9, init=Initializer(cuda.xp, seed=0, dtype="float64"))
    reasons = {
        "the experts are not linear maps with arrays as weights, all of them with a bias or none": (
            maps[:2],
            [quantize(maps[0])] * 2,
        ),
        "the weights have another dtype than the rows, or are not contiguous": ([wide] * 2,),
        "600 experts (the kernel takes 448)": (maps[:1] * 600,),
    }
    for reason, cases in reasons.items():
        for own in cases:
            text = ops.explain(lambda own=own: apply_experts(x, indices, own))
            assert f"  not cupy.experts: {reason}" in text
