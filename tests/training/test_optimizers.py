"""Optimizers: equal to torch's, in every library, and what they do to their arguments."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import few_on_jax, for_each, raises_line, small_model
from xformer import value_and_grad
from xformer.backends import Array, array_namespace, dtype_name, from_host, to_host
from xformer.errors import ConfigError, ShapeError
from xformer.ops.optimizers import adam, orthogonalize
from xformer.training import SGD, Adafactor, Adam, AdamW, Muon, load_parameters, save_parameters, train_step
from xformer.tree import Module, flatten, map_arrays

STEPS = 20


def start():
    """A tree of parameters of several shapes; one is stored column by column."""
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(7, 5)),
        "b": rng.normal(size=3),
        "c": np.asfortranarray(rng.normal(size=(4, 6))),
        "d": rng.normal(size=(2, 3, 4)),
    }


def gradient_of(tree, step):
    """Gradients of very different sizes; one of them is zero at first."""
    return {
        "a": np.cos(tree["a"] * step) * 1e3,
        "b": np.sin(tree["b"]) * 1e-6,
        "c": tree["c"] * (0.0 if step < 4 else 1.0),
        "d": np.sin(tree["d"] + step),
    }


def run(optimizer, rate=0.01):
    tree = start()
    state = optimizer.init(tree)
    for step in range(1, STEPS + 1):
        tree, state = optimizer.update(tree, gradient_of(tree, step), state, rate / step)
    return tree, state


def run_torch(name, without_decay=(), rate=0.01, **settings):
    """The same updates by torch: (parameters, states), by name, as NumPy arrays."""
    library_or_skip("torch")
    import torch

    parameters = {key: torch.nn.Parameter(torch.from_numpy(array.copy())) for key, array in start().items()}
    groups = [
        {"params": [parameters[key] for key in parameters if key not in without_decay]},
        {"params": [parameters[key] for key in without_decay], "weight_decay": 0.0},
    ]
    optimizer = getattr(torch.optim, name)(groups if without_decay else groups[:1], **settings)
    for step in range(1, STEPS + 1):
        values = {key: parameter.detach().numpy() for key, parameter in parameters.items()}
        for key, gradient in gradient_of(values, step).items():
            parameters[key].grad = torch.from_numpy(np.ascontiguousarray(gradient))
        for group in optimizer.param_groups:
            group["lr"] = rate / step
        optimizer.step()
    states = {key: dict(optimizer.state[parameter]) for key, parameter in parameters.items()}
    return {key: parameter.detach().numpy() for key, parameter in parameters.items()}, states


@pytest.mark.parametrize("mode", ["auto", "portable"])
@pytest.mark.parametrize("settings", [{}, {"beta1": 0.8, "beta2": 0.999, "epsilon": 1e-3}])
def test_adam_equals_torch(monkeypatch, mode, settings):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    optimizer = Adam(**settings)
    ours, state = run(optimizer)
    parameters, moments = run_torch("Adam", betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.epsilon)
    assert state.step == STEPS
    for name, array in ours.items():
        np.testing.assert_allclose(array, parameters[name], rtol=0.0, atol=1e-13)
        np.testing.assert_allclose(state.exp_avg[name], moments[name]["exp_avg"], rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(state.exp_avg_sq[name], moments[name]["exp_avg_sq"], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", ["auto", "portable"])
@pytest.mark.parametrize("decay_all", [False, True])
def test_adamw_equals_torch(monkeypatch, mode, decay_all):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    ours, state = run(AdamW(weight_decay=0.1, decay_all=decay_all))
    betas, vectors = (0.9, 0.98), () if decay_all else ("b",)
    parameters, moments = run_torch("AdamW", vectors, betas=betas, eps=1e-9, weight_decay=0.1)
    for name, array in ours.items():
        np.testing.assert_allclose(array, parameters[name], rtol=0.0, atol=1e-12)
        np.testing.assert_allclose(state.exp_avg[name], moments[name]["exp_avg"], rtol=1e-12, atol=1e-15)
    plain, _ = run(Adam())
    assert np.array_equal(ours["b"], plain["b"]) != decay_all
    assert not np.array_equal(ours["d"], plain["d"])


@for_each("settings", [{}, {"nesterov": True}, {"momentum": 0.5}, {"momentum": 0.0}])
def test_sgd_equals_torch(settings):
    rate = 1e-5  # some gradients are large, and larger steps would blow up differences in rounding
    ours, state = run(SGD(**settings), rate)
    parameters, buffers = run_torch("SGD", rate=rate, **{"momentum": 0.9, **settings})
    for name, array in ours.items():
        np.testing.assert_allclose(array, parameters[name], rtol=1e-12, atol=1e-12)
        if state.velocity is not None:
            np.testing.assert_allclose(state.velocity[name], buffers[name]["momentum_buffer"], rtol=1e-12, atol=1e-12)
    assert (state.velocity is None) == (settings.get("momentum") == 0.0)


@for_each(
    "ours, theirs",
    [
        ({}, {}),
        ({"weight_decay": 0.1, "decay_all": True}, {"weight_decay": 0.1}),
        ({"epsilon": 1e-3, "min_scale": 2.0}, {"eps": (1e-3, 2.0)}),
        ({"clip_threshold": 2.5, "beta2_decay": -0.5}, {"d": 2.5, "beta2_decay": -0.5}),
    ],
)
def test_adafactor_equals_torch(ours, theirs):
    actual, state = run(Adafactor(**ours))
    parameters, moments = run_torch("Adafactor", **theirs)
    for name, array in actual.items():
        np.testing.assert_allclose(array, parameters[name], rtol=0.0, atol=1e-12)
        for mine, other in (("row", "row_var"), ("column", "col_var"), ("variance", "variance")):
            kept = getattr(state, mine)[name]
            assert (kept is None) == (other not in moments[name])
            if kept is not None:
                np.testing.assert_allclose(kept, moments[name][other], rtol=1e-12, atol=1e-15)


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix():
    state = Adafactor().init(start())
    assert [state.row["a"].shape, state.column["a"].shape, state.variance["a"]] == [(7, 1), (1, 5), None]
    assert [state.row["d"].shape, state.column["d"].shape, state.variance["d"]] == [(2, 3, 1), (2, 1, 4), None]
    assert [state.row["b"], state.column["b"], state.variance["b"].shape] == [None, None, (3,)]


def test_muon_equals_torch():
    library_or_skip("torch")
    import torch

    optimizer = Muon(weight_decay=0.1)
    tree, gradients = start(), [gradient_of(start(), step) for step in range(1, 6)]
    weights, others = ("a", "c"), ("b", "d")  # matrices, and all the rest
    parameters = {key: torch.nn.Parameter(torch.from_numpy(tree[key].copy())) for key in tree}
    theirs = [
        torch.optim.Muon([parameters[key] for key in weights], 0.01, 0.1, 0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([{"params": [parameters["b"]], "weight_decay": 0.0}, {"params": [parameters["d"]]}], 0.01),
    ]
    theirs[1].param_groups[1]["weight_decay"] = 0.1
    for group in theirs[1].param_groups:
        group.update(betas=(0.9, 0.98), eps=1e-9)
    state = optimizer.init(tree)
    assert [state.exp_avg_sq[key] is None for key in "abcd"] == [True, False, True, False]
    for gradient in gradients:
        tree, state = optimizer.update(tree, gradient, state, 0.01)
        for key, parameter in parameters.items():
            parameter.grad = torch.from_numpy(np.ascontiguousarray(gradient[key]))
        for other in theirs:
            other.step()
    for key in others:
        np.testing.assert_allclose(tree[key], parameters[key].detach().numpy(), rtol=0.0, atol=1e-12)
    for key in weights:  # torch makes the momentum orthogonal in bfloat16
        difference = np.abs(tree[key] - parameters[key].detach().numpy())
        assert np.mean(difference) < 0.02 * np.mean(np.abs(tree[key] - start()[key]))
        moment = theirs[0].state[parameters[key]]["momentum_buffer"]
        np.testing.assert_allclose(state.exp_avg[key], moment, rtol=1e-12, atol=1e-12)


@for_each("shape", [(7, 5), (4, 6), (1, 3)])
@for_each("num_iterations", [1, 5, None])
def test_orthogonalize_maps_the_singular_values_by_the_polynomial(shape, num_iterations):
    matrix = np.random.default_rng(0).normal(size=shape)
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values /= np.linalg.norm(matrix)
    arguments = () if num_iterations is None else (num_iterations,)
    for _ in range(num_iterations or 5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    assert_close(orthogonalize(matrix, *arguments), left * values @ right, tolerance=1e-12)
    assert np.all(orthogonalize(np.zeros(shape)) == 0.0)


def test_muon_takes_long_matrices_for_embeddings():
    tree = {"embedding": np.ones((17, 2)), "weight": np.ones((16, 2)), "empty": np.ones((0, 2))}
    state = Muon().init(tree)
    assert [state.exp_avg_sq[key] is None for key in tree] == [False, True, False]
    assert Muon(max_aspect_ratio=9.0).init(tree).exp_avg_sq["embedding"] is None
    only_weights, state = Muon().update([tree["weight"]], [tree["weight"]], Muon().init([tree["weight"]]), 0.1)
    assert state.step == 1
    assert np.all(only_weights[0] < 1.0)


def test_a_schedule_may_drive_adafactor_alone():
    """Without its own limit and scale, the first update is the learning rate times the sign of the gradient."""
    optimizer = Adafactor(scale_parameter=False, relative_step=False)
    (updated,), _ = optimizer.update([np.asarray([5.0, 7.0])], [np.asarray([0.3, -4.0])], state_of(optimizer, 2), 3.0)
    np.testing.assert_allclose(updated, [2.0, 10.0])
    (limited,), _ = Adafactor().update([np.asarray([1.0, 1.0])], [np.asarray([0.3, -4.0])], state_of(optimizer, 2), 3.0)
    np.testing.assert_allclose(limited, [0.0, 2.0])  # 1 / sqrt(1), not 3


def state_of(optimizer, size):
    return optimizer.init([np.ones(size)])


OPTIMIZERS = [Adam(), AdamW(weight_decay=0.5), Muon(), SGD(nesterov=True), SGD(momentum=0.0), Adafactor()]
DTYPES = ["float64", "float32", "bfloat16"]


@few_on_jax(
    "optimizer,dtype",
    itertools.product(OPTIMIZERS, DTYPES),
    on_jax=[*((optimizer, "float32") for optimizer in OPTIMIZERS), (Adam(), "float64"), (Adam(), "bfloat16")],
)
def test_every_library_makes_the_same_updates(xp, optimizer, dtype):
    if not hasattr(xp, dtype):
        pytest.skip(f"the library has no {dtype}")
    ends = []
    for space, kind in ((np, "float64"), (xp, dtype)):
        tree = [from_host(space, np.asarray(leaf, order="C"), dtype=kind) for leaf in start().values()]
        state = optimizer.init(tree)
        for step in range(1, 4):
            gradients = [from_host(space, np.sin(leaf + step), dtype=kind) for leaf in start().values()]
            scale = None if step == 1 else from_host(space, np.asarray(0.5 if step == 2 else np.nan))
            tree, state = optimizer.update(tree, gradients, state, 0.1, scale, donate=step == 2)
        assert state.step == 3
        ends.append((tree, flatten(state[1:])[0]))
    for got, expected in zip(ends[1][0], ends[0][0], strict=True):
        assert_close(got, expected, xp=xp, dtype=dtype)
    wide = "float32" if dtype == "bfloat16" else dtype
    for got, expected in zip(ends[1][1], ends[0][1], strict=True):
        assert_close(got, expected, xp=xp, dtype=wide, tolerance=3e-2 if dtype == "bfloat16" else None)


def test_updates_have_no_derivative_and_leave_their_arguments_alone():
    def loss(parameter):
        zeros = np.zeros(3)
        row = parameter, zeros, zeros, zeros
        return adam([row], learning_rate=1.0, step=1, beta1=0.9, beta2=0.9, epsilon=0.1)[0][0].sum()

    parameter = np.ones(3)
    with pytest.raises(NotImplementedError, match=r"^adam has no derivative; call it outside"):
        value_and_grad(loss)(parameter)
    assert parameter.tolist() == [1.0, 1.0, 1.0]


def test_gradients_are_not_written():
    tree = start()
    gradients = gradient_of(tree, 5)
    copies = map_arrays(np.copy, gradients)
    for leaf in gradients.values():
        leaf.flags.writeable = False
    Adam().update(tree, gradients, Adam().init(tree), 0.1)
    for name in copies:
        np.testing.assert_array_equal(gradients[name], copies[name])


def test_donated_numpy_buffers_are_written_in_place():
    tree = start()
    optimizer = Adam()
    state = optimizer.init(tree)
    updated, new_state = optimizer.update(tree, gradient_of(tree, 5), state, 0.1, donate=True)
    assert all(updated[name] is tree[name] for name in tree)
    assert all(new_state.exp_avg_sq[name] is state.exp_avg_sq[name] for name in tree)
    model = small_model()
    state = optimizer.init(model)
    again, after = optimizer.update(model, model, state, 0.1, donate=True)
    assert [again is model, after.exp_avg is state.exp_avg, after.exp_avg_sq is state.exp_avg_sq] == [True] * 3


def test_a_model_that_was_kept_survives_the_next_update(xp):
    for optimizer in OPTIMIZERS:
        tree = {name: from_host(xp, np.ascontiguousarray(leaf)) for name, leaf in start().items()}
        state = optimizer.init(tree)
        kept = [to_host(leaf).copy() for leaf in flatten((tree, state[1:]))[0]]
        updated, _ = optimizer.update(tree, tree, state, 0.1)
        for leaf, copy in zip(flatten((tree, state[1:]))[0], kept, strict=True):
            np.testing.assert_array_equal(to_host(leaf), copy)
        assert not np.array_equal(to_host(updated["a"]), to_host(tree["a"]))


def test_the_learning_rate_is_no_argument_of_an_optimizer():
    message = "Adam takes keyword arguments only; pass the learning rate to fit or train_step"
    with raises_line(ConfigError, f"^{message}$"):
        Adam(1e-3)


def test_read_only_parameters_are_replaced():
    tree = start()
    for leaf in tree.values():
        leaf.flags.writeable = False
    before = map_arrays(np.copy, tree)
    updated, _ = Adam().update(tree, gradient_of(tree, 5), Adam().init(tree), 0.1)
    for name in tree:
        np.testing.assert_array_equal(tree[name], before[name])
        assert not np.array_equal(updated[name], tree[name])


@for_each(
    "kind, settings, message",
    [
        (Adam, {"beta1": 1.0}, r"beta1 is 1.0; expected a number in \[0, 1\)"),
        (AdamW, {"weight_decay": -1.0}, "weight_decay is -1.0; expected at least 0"),
        (AdamW, {"epsilon": math.nan}, "epsilon is nan; expected at least 0"),
        (SGD, {"momentum": 1.0}, "momentum is 1.0; expected a number in"),
        (Adafactor, {"clip_threshold": -0.1}, "clip_threshold is -0.1; expected at least 0"),
    ],
)
def test_invalid_settings_are_refused(kind, settings, message):
    with raises_line(ConfigError, f"^{message}"):
        kind(**settings)


class Routed(Module):
    weight: Array
    table: Array
    is_used: Array

    def __call__(self, x):
        xp = array_namespace(self.table)  # a constant of the trace
        return xp.sum(xp.matmul(x, self.weight) ** 2)


OPTIMIZERS = [SGD(), SGD(momentum=0.0), Adam(), AdamW(decay_all=True), Muon(decay_all=True)]
OPTIMIZERS += [Adafactor(weight_decay=0.1, decay_all=True)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_other_than_floating_arrays_are_no_parameters(xp, optimizer, tmp_path):
    weight = from_host(xp, np.arange(6, dtype=np.float32).reshape(2, 3) / 10.0)
    table, is_used = from_host(xp, np.full((2, 3), 3), dtype="int32"), from_host(xp, np.asarray([True, False]))
    model = Routed(weight, table, is_used)
    start, state = model, optimizer.init(model)
    step = partial(train_step, loss_fn=lambda model, batch, rng: model(batch), optimizer=optimizer, num_tokens=1)
    for _ in range(2):
        x = from_host(xp, np.ones((1, 2), dtype=np.float32))
        model, state, _, grad_norm = step(model, state, [x], None, learning_rate=0.1, max_grad_norm=1.0)
        assert model.table is table
        assert model.is_used is is_used
        assert bool(xp.all(model.weight != start.weight))
        assert math.isfinite(float(grad_norm))
    for tree in state[1:]:
        assert tree is None or {name for name, _ in tree.named_arrays()} <= {"weight"}
    save_parameters(model, tmp_path / "model")
    loaded = load_parameters(start, tmp_path / "model")
    assert {name: dtype_name(array.dtype) for name, array in loaded.named_arrays()} == {
        "weight": "float32",
        "table": "int32",
        "is_used": "bool",
    }
    for (_, array), (_, expected) in zip(loaded.named_arrays(), model.named_arrays(), strict=True):
        assert bool(xp.all(array == expected))


def test_gradients_of_another_tree_are_refused():
    optimizer, tree = Adam(), start()
    state = optimizer.init(tree)
    with raises_line(ShapeError, "trees differ: 4 and 1 arrays; expected the same structure"):
        optimizer.update(tree, {"a": tree["a"]}, state, 0.1)
    with raises_line(ShapeError, "trees differ: 4 and 1 arrays; expected the same structure"):
        optimizer.update(tree, tree, optimizer.init({"a": tree["a"]}), 0.1)
