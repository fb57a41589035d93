"""Modules: immutable, flattened in a fixed order, moved between libraries, dtypes and devices."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import raises_line, small_model, without_jax
from xformer import Initializer
from xformer.backends import Array, array_namespace, backend_name, dtype_name, from_host
from xformer.errors import BackendError, ConfigError, ShapeError
from xformer.layers import Linear
from xformer.tree import Module, flatten, map_arrays, replace


class Norm(Module):
    weight: Array
    bias: Array | None
    epsilon: float

    def __init__(self, weight, bias=None, epsilon=1e-5):
        self.weight = weight
        self.bias = bias
        self.epsilon = epsilon


class Stack(Module):
    first: Norm
    layers: tuple[Norm, ...]
    more: list[Norm]
    named: dict[str, Any]
    tables: tuple[Array, ...]
    label: str


class Pair(NamedTuple):
    left: Any
    right: Any


def norm(value, bias=None):
    return Norm(np.asarray([float(value)]), None if bias is None else np.asarray([float(bias)]))


def stack():
    return Stack(norm(1), (norm(2, 3), norm(4)), [norm(5)], {"b": norm(7), "a": norm(6)}, (np.asarray([8.0]),), "s")


def test_a_module_cannot_be_changed():
    module = norm(1)
    with pytest.raises(AttributeError, match=r"Norm\.weight is frozen; use replace\(\)"):
        module.weight = np.zeros(1)
    with pytest.raises(AttributeError, match=r"Norm\.epsilon is frozen"):
        module.epsilon = 0.1
    with pytest.raises(AttributeError, match="Norm has no field 'wieght'; its fields are"):
        module.wieght = np.zeros(1)
    with pytest.raises(AttributeError, match="Norm is frozen"):
        del module.weight


def test_an_array_in_a_field_without_the_annotation_is_refused():
    """It would silently be left out of training."""

    class Forgetful(Module):
        weight: Any

    with pytest.raises(AttributeError, match=r"Forgetful\.weight is given an array; annotate it `weight: Array`"):
        Forgetful(np.zeros(2))
    assert Forgetful(np.float64(0.5)).weight == 0.5  # a NumPy number is configuration


def test_parameters_have_dotted_names_in_a_fixed_order():
    named = {name: float(array[0]) for name, array in stack().named_parameters()}
    expected = {
        "first.weight": 1.0,
        "layers.0.weight": 2.0,
        "layers.0.bias": 3.0,
        "layers.1.weight": 4.0,
        "more.0.weight": 5.0,
        "named.a.weight": 6.0,
        "named.b.weight": 7.0,
        "tables.0": 8.0,
    }
    assert list(named.items()) == list(expected.items())
    assert [float(leaf[0]) for leaf in flatten(stack())[0]] == list(expected.values())
    assert stack().parameter_count() == 8


def test_flatten_and_rebuild():
    tree = {"b": [norm(1), 2], "a": Pair(np.asarray([3.0]), (norm(4, 5), "x"))}
    leaves, rebuild = flatten(tree)
    assert [float(leaf[0]) for leaf in leaves] == [3.0, 4.0, 5.0, 1.0]
    rebuilt = rebuild([leaf + 1 for leaf in leaves])
    assert list(rebuilt) == ["b", "a"]
    assert rebuilt["b"][0].weight == [2.0]
    assert rebuilt["b"][1] == 2
    assert type(rebuilt["a"]) is Pair
    assert rebuilt["a"].right[0].bias == [6.0]
    assert rebuilt["a"].right[0].epsilon == 1e-5
    assert rebuilt["a"].right[1] == "x"
    assert tree["b"][0].weight == [1.0]
    with raises_line(ShapeError, "got 3 arrays for a tree of 4; expected one for each leaf"):
        rebuild(leaves[:3])


def test_map_arrays_over_trees_of_one_structure():
    doubled = map_arrays(lambda a, b: a + b, stack(), stack())
    assert [float(leaf[0]) for leaf in flatten(doubled)[0]] == [2.0 * value for value in range(1, 9)]
    assert doubled.label == "s"
    with raises_line(ShapeError, "trees differ: 8 and 1 arrays; expected the same structure"):
        map_arrays(lambda a, b: a, stack(), norm(1))


def test_replace_exchanges_all_arrays_by_name():
    module = norm(1, 2)
    changed = replace(module, {"bias": np.asarray([4.0]), "weight": np.asarray([3.0])})
    assert (changed.weight, changed.bias, module.weight) == ([3.0], [4.0], [1.0])
    with raises_line(ConfigError, r"unknown \['wieght'\], missing \['bias', 'weight'\]; expected the 2 names"):
        replace(module, {"wieght": np.zeros(1)})
    with raises_line(ShapeError, r"bias has shape \(2,\); expected \(1,\)"):
        replace(module, {"bias": np.zeros(2), "weight": np.zeros(1)})


def test_repr_shows_arrays_by_dtype_and_shape():
    assert repr(norm(1)) == "Norm(weight=float64[1], bias=None, epsilon=1e-05)"


def test_modules_can_be_copied_and_pickled():
    layer = Linear(2, 3, init=Initializer("numpy"))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_close(other.weight, layer.weight)
        assert not np.shares_memory(other.weight, layer.weight)


# --- Moving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_to_another_library_and_back_is_the_identity(xp, dtype):
    model = small_model(dtype=dtype)
    there = model.to(xp)
    assert {backend_name(array_namespace(array)) for array in flatten(there)[0]} == {backend_name(xp)}
    back = there.to("numpy")
    for array, expected in zip(flatten(back)[0], flatten(model)[0], strict=True):
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, expected)
    assert back.config == model.config


def test_modules_in_two_libraries_share_no_memory(xp):
    """Libraries share with NumPy where they can; an optimizer that writes in place would change both models."""
    layer = Linear(32, 32, init=Initializer("numpy"))
    expected = layer.weight.copy()
    there = layer.to(xp)
    back = there.to("numpy") if backend_name(xp) != "numpy" else copy.deepcopy(there)
    back.weight[...] = 1.0  # also: it may be written to
    assert_close(there.weight, expected, xp=xp)
    if backend_name(xp) != "numpy":
        layer.weight[...] = 2.0
        assert_close(there.weight, expected, xp=xp)


@without_jax
def test_to_another_dtype_leaves_integers_alone(xp):
    class Counted(Module):
        weight: Array
        steps: Array

    module = Counted(from_host(xp, np.ones(2)), from_host(xp, np.asarray(3)))
    narrow = module.to(dtype="float32")
    assert (dtype_name(narrow.weight.dtype), dtype_name(narrow.steps.dtype)) == ("float32", "int64")
    other = module.to("numpy", dtype="float32")
    assert (other.weight.dtype.name, other.steps.dtype.name) == ("float32", "int64")
    with raises_line(BackendError, "dtype is int32; parameters need a floating dtype such as 'float32'"):
        module.to(dtype="int32")


def test_bfloat16_round_trip():
    torch = library_or_skip("torch")
    layer = Linear(8, 8, init=Initializer(torch, dtype="bfloat16"))
    for back in (layer.to("numpy").to(torch), layer.to("numpy", dtype="float32").to(torch, dtype="bfloat16")):
        assert back.weight.dtype == torch.bfloat16
        assert bool((back.weight == layer.weight).all())


def test_to_a_device():
    strict = library_or_skip("array_api_strict")
    layer = Linear(2, 2, init=Initializer("numpy"))
    device = strict.Device("device1")
    for moved in (layer.to(strict, device=device), layer.to(strict).to(device=device)):
        assert moved.weight.device == device
        assert_close(moved.weight, layer.weight, xp=strict)
    with raises_line(BackendError, "numpy cannot place data on device 'cuda'; it knows only 'cpu'"):
        layer.to(device="cuda")
    with raises_line(BackendError, "array_api_strict cannot place data on device 'moon'"):
        layer.to(strict, device="moon")
    with raises_line(BackendError, "backend 'numpi' is unknown"):
        layer.to("numpi")


class Defaults(Module):
    weight: Array
    bias: Array | None = None
    parts: tuple = ()

    def __init__(self, weight, bias):
        self.weight = weight
        self.count = None if bias is None else self.parameter_count()
        self.bias = bias

    count: int | None = None


def test_a_module_that_is_looked_at_while_it_is_made():
    module = Defaults(np.ones(2), np.ones(3))
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    leaves, rebuild = flatten(module)
    assert [leaf.shape for leaf in leaves] == [(2,), (3,)]
    again = rebuild([np.zeros(2), np.zeros(3)])
    assert again.parts == ()
    assert again.bias.tolist() == [0.0, 0.0, 0.0]
    assert [name for name, _ in Defaults(np.ones(2), None).named_parameters()] == ["weight"]


def test_a_leaf_that_becomes_none_is_none():
    leaves, rebuild = flatten(Defaults(np.ones(2), np.ones(3)))
    thinner = rebuild([leaves[0], None])
    assert [leaf.shape for leaf in flatten(thinner)[0]] == [(2,)]
