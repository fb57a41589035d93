"""Adam: equal to torch's, in every library, and what it does to its arguments."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from xformer.namespace import array_namespace, dtype_name, from_host, is_floating
from xformer.training import Adam
from xformer.tree import flatten, map_arrays

STEPS = 20


def start():
    """A tree of parameters of several shapes; the last is stored column by column."""
    rng = np.random.default_rng(0)
    return {"a": rng.normal(size=(7, 5)), "b": rng.normal(size=3), "c": np.asfortranarray(rng.normal(size=(4, 6)))}


def gradient_of(tree, step):
    """Gradients of very different sizes; one of them is zero at first."""
    return {
        "a": np.cos(tree["a"] * step) * 1e3,
        "b": np.sin(tree["b"]) * 1e-6,
        "c": tree["c"] * (0.0 if step < 4 else 1.0),
    }


def run(optimizer, steps=STEPS, **settings):
    tree = start()
    state = optimizer.initial(tree)
    for step in range(1, steps + 1):
        tree, state = optimizer.update(tree, gradient_of(tree, step), state, 0.01 / step, **settings)
    return tree, state


@pytest.mark.parametrize("mode", ["auto", "portable"])
@pytest.mark.parametrize("settings", [{}, {"beta1": 0.8, "beta2": 0.999, "epsilon": 1e-3}])
def test_adam_equals_torch(monkeypatch, mode, settings):
    library_or_skip("torch")
    import torch

    monkeypatch.setenv("XFORMER_KERNELS", mode)
    optimizer = Adam(**settings)
    ours, state = run(optimizer)
    tree = start()
    parameters = {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in tree.items()}
    reference = torch.optim.Adam(parameters.values(), betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.epsilon)
    for step in range(1, STEPS + 1):
        values = {name: parameter.detach().numpy() for name, parameter in parameters.items()}
        for name, gradient in gradient_of(values, step).items():
            parameters[name].grad = torch.from_numpy(np.ascontiguousarray(gradient))
        reference.param_groups[0]["lr"] = 0.01 / step
        reference.step()
    assert state.step == STEPS
    for name, array in ours.items():
        np.testing.assert_allclose(array, parameters[name].detach().numpy(), rtol=0.0, atol=1e-13)
        moments = reference.state[parameters[name]]
        np.testing.assert_allclose(state.first[name], moments["exp_avg"].numpy(), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(state.second[name], moments["exp_avg_sq"].numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_one_step_in_every_library(xp, dtype):
    """After one step, the correction of the bias leaves learning_rate * gradient / (|gradient| + epsilon)."""
    if dtype == "bfloat16" and not hasattr(xp, "bfloat16"):
        pytest.skip("the library has no bfloat16 of its own")
    if not hasattr(xp, dtype):
        pytest.skip(f"the library has no {dtype}")
    parameter, gradient = (from_host(xp, np.asarray([[1.0, 2.0], [3.0, value]]), dtype=dtype) for value in (4.0, 0.0))
    optimizer = Adam()
    state = optimizer.initial([parameter])
    (updated,), state = optimizer.update([parameter], [gradient], state, 0.5, gradient_scale=2.0)
    assert_close(updated, [[0.5, 1.5], [2.5, 4.0]], xp=xp, dtype=dtype)
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    assert [dtype_name(leaf.dtype) for leaf in flatten((state.first, state.second))[0]] == [wide, wide]
    assert_close(state.first[0], [[0.2, 0.4], [0.6, 0.0]], xp=xp, dtype=wide)


def test_gradient_scale_is_a_factor_of_the_gradients():
    def scaled(tree, step):
        return map_arrays(lambda leaf: 0.25 * leaf, gradient_of(tree, step))

    optimizer = Adam()
    tree, state = start(), optimizer.initial(start())
    other, other_state = start(), optimizer.initial(start())
    for step in range(1, 6):
        gradients = gradient_of(tree, step)
        other, other_state = optimizer.update(other, scaled(tree, step), other_state, 0.01)
        tree, state = optimizer.update(tree, gradients, state, 0.01, gradient_scale=0.25)
        for name in tree:
            np.testing.assert_allclose(tree[name], other[name], rtol=1e-12)
            np.testing.assert_allclose(state.second[name], other_state.second[name], rtol=1e-12)


def test_gradients_are_not_written():
    tree = start()
    gradients = gradient_of(tree, 5)
    copies = map_arrays(np.copy, gradients)
    for leaf in gradients.values():
        leaf.flags.writeable = False
    Adam().update(tree, gradients, Adam().initial(tree), 0.1)
    for name in copies:
        np.testing.assert_array_equal(gradients[name], copies[name])


def test_numpy_buffers_are_written_in_place():
    tree = start()
    optimizer = Adam()
    state = optimizer.initial(tree)
    updated, new_state = optimizer.update(tree, gradient_of(tree, 5), state, 0.1)
    assert all(updated[name] is tree[name] for name in tree)
    assert all(new_state.second[name] is state.second[name] for name in tree)


def test_read_only_parameters_are_replaced():
    tree = start()
    for leaf in tree.values():
        leaf.flags.writeable = False
    before = map_arrays(np.copy, tree)
    updated, _ = Adam().update(tree, gradient_of(tree, 5), Adam().initial(tree), 0.1)
    for name in tree:
        np.testing.assert_array_equal(tree[name], before[name])
        assert not np.array_equal(updated[name], tree[name])


def test_initial_moments_are_zero_and_apart():
    tree = start()
    state = Adam().initial(tree)
    leaves = flatten((state.first, state.second))[0]
    assert state.step == 0
    assert all((leaf == 0).all() and is_floating(leaf.dtype) for leaf in leaves)
    assert len({id(leaf) for leaf in leaves}) == len(leaves)
    assert array_namespace(*leaves).__name__ == "array_api_compat.numpy"
