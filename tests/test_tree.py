"""Modules: immutable, flattened in a fixed order, moved between libraries, dtypes and devices."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import re
import subprocess
import sys
import typing
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import for_each, raises_line, small_model, without_jax
from xformer import Initializer
from xformer.backends import Array, array_namespace, dtype_name, from_host, to_host
from xformer.errors import BackendError, ConfigError, ShapeError
from xformer.hints import MODULES
from xformer.layers import Linear
from xformer.tree import (
    FrozenDict,
    Module,
    flatten,
    flatten_parameters,
    map_arrays,
    map_modules,
    map_parameters,
    replace,
    with_fields,
)


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
    with pytest.raises(AttributeError, match=r"Norm\.weight cannot be set; xf\.tree\.with_fields\(module, weight="):
        module.weight = np.zeros(1)
    with pytest.raises(AttributeError, match=r"Norm\.epsilon cannot be set"):
        module.epsilon = 0.1
    with pytest.raises(AttributeError, match="Norm has no field 'wieght'; annotate it in the class"):
        module.wieght = np.zeros(1)
    with pytest.raises(AttributeError, match=r"Norm\.weight cannot be deleted"):
        del module.weight


def test_fields_may_change_until_the_constructor_has_ended():
    class Stack(Module):
        layers: list[Norm]
        size: int

        def __init__(self, size):
            self.layers, self.size = [], 0
            for _ in range(size):
                self.layers.append(norm(1))
                self.size = self.size + 1

    class Named(Stack):
        name: str

        def __init__(self, name):
            super().__init__(2)
            self.layers.append(norm(1))
            if name:
                self.name = name

    class Plain:
        def __init__(self):
            self.weight = np.ones(2)

    class Mixed(Plain, Module, init=False):
        weight: object

    class Wrapped(Norm, init=False):
        @functools.wraps(Norm.__init__)
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.epsilon = 1.0

    assert Mixed().parameter_count() == 2
    assert Wrapped(np.ones(2)).epsilon == 1.0
    stack = Named("a")
    assert (type(stack.layers), len(stack.layers), stack.size, stack.parameter_count()) == (tuple, 3, 2, 3)
    with pytest.raises(AttributeError, match=r"Named\.size cannot be set"):
        stack.size = 3
    with pytest.raises(ConfigError, match=r"Named\.__init__ does not set the field 'name'"):
        Named("")


@for_each("name", sorted(MODULES))
def test_a_method_of_torch_modules_names_the_replacement(name):
    assert not hasattr(norm(1), name)
    assert name not in dir(norm(1))
    hint = f"'Norm' object has no attribute '{name}'; {MODULES[name]}"
    with pytest.raises(AttributeError, match=f"^{re.escape(hint)}$"):
        getattr(norm(1), name)
    with pytest.raises(AttributeError, match=r"^'Norm' object has no attribute 'wieght'$"):
        norm(1).wieght  # noqa: B018


def test_a_field_may_have_the_name_of_a_torch_method():
    class Table(Module):
        parameters: Array

    assert Table(np.ones(2)).parameters.tolist() == [1.0, 1.0]
    assert "parameters" in dir(Table(np.ones(2)))


@for_each(
    "annotation",
    [
        Any,
        np.ndarray,
        Array | None,
        typing.Optional[np.ndarray],  # noqa: UP045
        "jax.Array",
        "Array|None",
    ],
)
def test_an_array_is_a_leaf_whatever_the_annotation(annotation):
    class Scale(Module):
        __annotations__ = {"weight": annotation, "power": int}
        power = 2

    assert [name for name, _ in Scale(np.zeros(2)).named_parameters()] == ["weight"]
    assert [name for name, _ in Scale(None).named_parameters()] == []


def test_a_numpy_number_is_configuration_unless_annotated_as_an_array():
    class Scale(Module):
        weight: Array
        rate: Any

    assert [name for name, _ in Scale(np.float64(0.5), np.float64(0.5)).named_parameters()] == ["weight"]


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


class Routed(Module):
    weight: Array
    table: Array
    part: Any


def routed():
    return Routed(np.ones(2), np.asarray([3, 4]), {"used": np.asarray(True), "scale": np.ones(3, dtype=np.float32)})


def test_parameters_are_the_floating_arrays():
    module = routed()
    assert [name for name, _ in module.named_arrays()] == ["weight", "table", "part.scale", "part.used"]
    assert [name for name, _ in module.named_parameters()] == ["weight", "part.scale"]
    assert module.parameter_count() == 5
    leaves, rebuild = flatten_parameters(module)
    assert [leaf.shape for leaf in leaves] == [(2,), (3,)]
    assert rebuild(leaves) is module
    changed = rebuild([2.0 * leaf for leaf in leaves])
    assert changed.weight.tolist() == [2.0, 2.0]
    assert changed.table is module.table
    assert changed.part["used"] is module.part["used"]
    doubled = map_parameters(lambda leaf: 2.0 * leaf, module)
    assert doubled.table is None
    assert doubled.part["used"] is None
    assert [leaf.tolist() for leaf in flatten(doubled)[0]] == [[2.0, 2.0], [2.0, 2.0, 2.0]]
    assert [leaf.tolist() for leaf in flatten_parameters(doubled)[0]] == [[2.0, 2.0], [2.0, 2.0, 2.0]]


def test_other_arrays_are_replaced_and_moved_too(xp):
    module = routed().to(xp)
    assert {name: dtype_name(array.dtype) for name, array in module.named_arrays()} == {
        "weight": "float64",
        "table": "int64",
        "part.scale": "float32",
        "part.used": "bool",
    }
    changed = replace(module, {name: xp.zeros_like(array) for name, array in module.named_arrays()})
    assert not any(to_host(array).any() for _, array in changed.named_arrays())


def test_containers_are_frozen_when_they_are_assigned():
    layers, named = [norm(1)], {"b": [norm(2)], "a": {"inner": norm(3)}}
    module = Stack(norm(0), (), layers, named, (), "s")
    assert flatten(module)[0][0] == [0.0]
    layers.append(norm(8))
    named["b"].append(norm(8))
    named["c"] = norm(8)
    assert [float(array[0]) for _, array in module.named_parameters()] == [0.0, 1.0, 3.0, 2.0]
    assert type(module.more) is tuple
    assert type(module.named["b"]) is tuple
    change = "a dict in a module is read-only; use tree.with_fields"
    for mutate in (
        lambda x: x.update(c=1),
        lambda x: x.__setitem__("c", 1),
        lambda x: x.__delitem__("a"),
        lambda x: x.__ior__({}),
        lambda x: x.setdefault("c", 1),
        lambda x: x.pop("a"),
        lambda x: x.popitem(),
        lambda x: x.clear(),
    ):
        for frozen in (module.named, module.named["a"]):
            with raises_line(TypeError, change):
                mutate(frozen)
    assert module.named | {"c": 1} == {**module.named, "c": 1}


def test_frozen_containers_can_be_copied_pickled_and_rebuilt():
    module = stack()
    others = [copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    others += [map_arrays(np.copy, module), map_modules(lambda part: part, module), with_fields(module, label="s")]
    others.append(with_fields(module, named=dict(module.named), more=list(module.more)))
    for other in others:
        assert repr(other) == repr(module)
        assert type(other.named) is FrozenDict
        assert type(other.more) is tuple
        assert [float(array[0]) for _, array in other.named_parameters()] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_keys_that_name_no_array_are_refused():
    for key in (1, "a.b"):
        with raises_line(ConfigError, f"named has the key {key!r}; expected strings without '.' as names of arrays"):
            Stack(norm(1), (), (), {key: norm(2)}, (), "s")
    with raises_line(ConfigError, "a dict of arrays has keys of types int, str; expected strings"):
        flatten({1: np.ones(1), "1": np.ones(1)})


def test_a_dtype_is_no_array():
    class Typed(Module):
        weight: Array
        dtype: Any

    assert [name for name, _ in Typed(np.ones(1), np.float32).named_arrays()] == ["weight"]
    assert len(flatten({"dtype": np.float32, "weight": np.ones(1)})[0]) == 1


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


def test_repr_is_indented_and_collapses_repeated_layers():
    same = tuple(norm(value, 1) for value in range(3))
    tree = Stack(norm(1), (*same, norm(4)), [], {"a": Norm(np.zeros(1), epsilon=Pair(1, 2))}, (np.zeros(2),), "s" * 99)
    assert repr(tree).splitlines() == [
        "Stack(",
        "  first=Norm(weight=float64[1], bias=None, epsilon=1e-05),",
        "  layers=(",
        "    (0-2): 3 x Norm(weight=float64[1], bias=float64[1], epsilon=1e-05),",
        "    (3): Norm(weight=float64[1], bias=None, epsilon=1e-05),",
        "  ),",
        "  more=(),",
        "  named={'a': Norm(weight=float64[1], bias=None, epsilon=Pair(left=1, right=2))},",
        "  tables=((0): float64[2]),",
        "  label=str(...),",
        ")",
    ]


# --- Pytrees of JAX and torch -----------------------------------------------------------------------------------------


def jax_leaves(tree):
    library_or_skip("jax")
    return [leaf.tolist() for leaf in importlib.import_module("jax").tree.leaves(tree)]


def test_a_module_is_a_pytree_of_jax():
    xp = library_or_skip("jax")
    jax = importlib.import_module("jax")
    tree = stack().to(xp)
    assert jax_leaves(tree) == [leaf.tolist() for leaf in flatten(tree)[0]]
    calls = []

    @jax.jit
    def total(tree, x):
        calls.append(1)
        return x * sum(xp.sum(leaf) for leaf in flatten(tree)[0])

    doubled = jax.tree.map(lambda leaf: 2.0 * leaf, tree)
    assert (float(total(tree, 1.0)), float(total(doubled, 1.0))) == (36.0, 72.0)
    assert len(calls) == 1  # equal static fields reuse the compiled function
    total(jax.tree.map(lambda leaf: leaf, Stack(*vars_of(tree)[:-1], "other")), 1.0)
    assert len(calls) == 2
    gradient = jax.grad(lambda tree: xp.sum(tree.layers[0].weight ** 2))(tree)
    assert type(gradient) is Stack
    assert gradient.label == "s"
    assert [float(leaf[0]) for leaf in flatten(gradient)[0]] == [0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    path, _ = jax.tree_util.tree_leaves_with_path(tree)[1]
    assert jax.tree_util.keystr(path) == ".layers[0].weight"
    assert type(doubled.named) is FrozenDict
    assert len(jax.tree.leaves(tree.named)) == 2


def vars_of(module):
    return [getattr(module, name) for name in module.__fields__]


def test_a_module_is_a_pytree_of_torch():
    torch = library_or_skip("torch")
    pytree = importlib.import_module("torch.utils._pytree")
    tree = stack().to(torch)
    leaves, structure = pytree.tree_flatten(tree)
    assert sorted(float(leaf[0]) for leaf in leaves) == sorted(float(leaf[0]) for leaf in flatten(tree)[0])
    assert repr(pytree.tree_unflatten(leaves, structure)) == repr(tree)
    assert len(pytree.tree_leaves(tree.named)) == 2
    gradient = importlib.import_module("torch").func.grad(lambda tree: (tree.first.weight**2).sum())(tree)
    assert float(gradient.first.weight[0]) == 2.0


BEFORE_ANY_OPERATION = """
import xformer.tree
import jax, jax.numpy as jnp
class Scale(xformer.tree.Module):
    weight: jax.Array
print(jax.jit(lambda module, x: module.weight * x)(Scale(jnp.ones(())), 3.0))
"""


def test_a_module_is_a_pytree_before_any_operation_ran():
    library_or_skip("jax")
    done = subprocess.run([sys.executable, "-c", BEFORE_ANY_OPERATION], capture_output=True, text=True)
    assert done.stdout == "3.0\n", done.stderr


# --- Moving -----------------------------------------------------------------------------------------------------------


@for_each("dtype", ["float32", "float64"])
def test_to_another_library_and_back_is_the_identity(xp, dtype):
    model = small_model(dtype=dtype)
    there = model.to(xp)
    assert {array_namespace(array).name for array in flatten(there)[0]} == {xp.name}
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
    back = there.to("numpy") if xp.name != "numpy" else copy.deepcopy(there)
    back.weight[...] = 1.0  # also: it may be written to
    assert_close(there.weight, expected, xp=xp)
    if xp.name != "numpy":
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
    with raises_line(
        BackendError, r"backend 'float16' is unknown; expected .*; a device or a dtype is passed as device="
    ):
        module.to("float16")
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
