"""Experts: each row gets the module of its index, by kernels and by the portable definition."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.conftest import assert_close, library_or_skip
from tests.ops.numpy_cases import assert_same, normal
from tests.reference import raises_line
from xformer import ops
from xformer.backends import array_namespace, from_host
from xformer.errors import DataError, ShapeError
from xformer.layers import FeedForward, Initializer, Linear, quantize
from xformer.ops import apply_experts
from xformer.tree import freeze, replace

EXPERT_INDICES = np.asarray([0, 0, 1, 3, 3, 3])


def linear_maps(xp="numpy", count=4, dtype="float64", **options):
    init = Initializer(xp, seed=5, dtype=dtype)
    return [Linear(3, 5, init=init, **options) for _ in range(count)]


def test_each_row_gets_the_module_of_its_index(xp):
    x, expert_indices = normal(6, 3), from_host(xp, EXPERT_INDICES)
    expected = [linear_maps()[index](row) for index, row in zip(EXPERT_INDICES, x, strict=True)]
    assert_close(apply_experts(from_host(xp, x), expert_indices, linear_maps(xp)), np.stack(expected), xp=xp)


@pytest.mark.parametrize("expert_indices", [EXPERT_INDICES, np.asarray([2] * 6), np.zeros(0, int)], ids=str)
def test_kernels_have_the_derivative_of_the_definition(monkeypatch, expert_indices):
    monkeypatch.setenv("XFORMER_KERNELS", "auto")
    maps = linear_maps()

    def function(x, *arrays):
        own = [
            replace(each, {"weight": weight, "bias": bias})
            for each, weight, bias in zip(maps, arrays[::2], arrays[1::2], strict=True)
        ]
        return apply_experts(x, expert_indices, own)

    arrays = [np.array(array) for each in maps for _, array in each.named_arrays()]
    assert_same(monkeypatch, function, normal(len(expert_indices), 3), *arrays)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_explain_names_the_kernel(name):
    xp = library_or_skip(name)
    x, expert_indices, maps = from_host(xp, normal(6, 3)), from_host(xp, EXPERT_INDICES), linear_maps(xp)
    assert f"experts on {name}: {name}.experts" in ops.explain(lambda: apply_experts(x, expert_indices, maps))


def test_derivatives_of_torch():
    torch = pytest.importorskip("torch", reason="it differentiates here")
    x, maps = normal(6, 3), linear_maps()

    def total(x, maps, expert_indices=EXPERT_INDICES):
        y = apply_experts(x, expert_indices, maps)
        return array_namespace(y).sum(y * y * y)

    expected = xf.grad(total, argnums=(0, 1))(x, maps)
    leaf = torch.asarray(x).requires_grad_()
    total(leaf, linear_maps("torch"), torch.asarray(EXPERT_INDICES)).backward()
    np.testing.assert_allclose(leaf.grad, expected[0], rtol=1e-12)


@pytest.mark.parametrize("mode", ["auto", "portable"])
def test_second_derivatives(monkeypatch, mode):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    x, maps = normal(6, 3), linear_maps()

    def slope(x):
        y, pull = xf.vjp(lambda x: apply_experts(x, EXPERT_INDICES, maps) ** 2, x)
        return array_namespace(y).sum(pull(y)[0] ** 2)

    step = 1e-6 * normal(6, 3, seed=1)
    difference = (slope(x + step) - slope(x - step)) / 2
    assert float(np.sum(xf.grad(slope)(x) * step)) == pytest.approx(float(difference), rel=1e-6)


@pytest.mark.parametrize("mode", ["auto", "portable"])
def test_frozen_and_quantized_modules(monkeypatch, mode):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    x = normal(6, 3).astype("float32")
    for maps in (freeze(linear_maps(dtype="float32")), [quantize(each) for each in linear_maps(dtype="float32")]):
        expected = np.stack([maps[index](row[None])[0] for index, row in zip(EXPERT_INDICES, x, strict=True)])
        assert_close(apply_experts(x, EXPERT_INDICES, maps), expected)
        gradient = xf.grad(lambda x, maps=maps: array_namespace(x).sum(apply_experts(x, EXPERT_INDICES, maps)))(x)
        rows = [
            xf.grad(lambda x, e=maps[n]: array_namespace(x).sum(e(x)))(r[None])[0]
            for n, r in zip(EXPERT_INDICES, x, strict=True)
        ]
        assert_close(gradient, np.stack(rows))


def test_a_program_computes_other_rows_in_its_next_run():
    maps = linear_maps()
    both = xf.jit(lambda x, expert_indices: xf.value_and_grad(_total, argnums=(0, 1))(x, maps, expert_indices))
    for expert_indices in (EXPERT_INDICES, np.asarray([1, 1, 1, 2, 2, 2]), np.asarray([3] * 6)):
        x = normal(6, 3, seed=len(set(expert_indices)))
        value, (dx, dmaps) = both(x, expert_indices)
        expected, (expected_dx, expected_dmaps) = xf.value_and_grad(_total, argnums=(0, 1))(x, maps, expert_indices)
        assert value == expected
        np.testing.assert_array_equal(dx, expected_dx)
        for actual, other in zip(dmaps, expected_dmaps, strict=True):
            np.testing.assert_array_equal(actual.weight, other.weight)


def _total(x, maps, expert_indices):
    y = apply_experts(x, expert_indices, maps)
    return array_namespace(y).sum(y * y)


def test_modules_of_several_layers():
    init = Initializer("numpy", seed=0, dtype="float64")
    experts = [FeedForward(3, 4, init=init) for _ in range(4)]
    x = normal(6, 3)
    expected = np.stack([experts[index](row) for index, row in zip(EXPERT_INDICES, x, strict=True)])
    assert_close(apply_experts(x, EXPERT_INDICES, experts), expected)


def test_infinite_rows_do_not_reach_other_experts(monkeypatch):
    x = normal(6, 3)
    x[0] = np.inf
    for mode in ("auto", "portable"):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        with np.errstate(invalid="ignore"):
            gradient = xf.grad(
                lambda maps: array_namespace(maps[3].weight).sum(apply_experts(x, EXPERT_INDICES, maps))
            )(linear_maps())
        assert np.isfinite(gradient[3].weight).all()


def test_wrong_arrays_are_refused():
    x, maps = normal(6, 3), linear_maps()
    with raises_line(ShapeError, "apply_experts got no experts; expected at least one module"):
        apply_experts(x, EXPERT_INDICES, [])
    with raises_line(ShapeError, r"experts got x of shape \(6, 3\) and expert_indices of shape \(5,\); expected"):
        apply_experts(x, EXPERT_INDICES[:5], maps)
    with raises_line(ShapeError, "experts got expert_indices of dtype float64; expected integers"):
        apply_experts(x, EXPERT_INDICES.astype(float), maps)
    for expert_indices in (EXPERT_INDICES[::-1].copy(), EXPERT_INDICES + 1, EXPERT_INDICES - 1):
        with raises_line(DataError, r"experts got expert_indices array\(.*; expected ascending ones from 0 to 3"):
            apply_experts(x, expert_indices, maps)
    with raises_line(ShapeError, r"linear got x of shape \(2, 4\) and weight of shape \(3, 5\)"):
        apply_experts(normal(6, 4), EXPERT_INDICES, maps)
