"""Multi-head attention: equal to torch.nn.MultiheadAttention, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import attention_arrays, gradients, normal, raises_line, randomize, values, weighted_sum
from xformer import Initializer, masks, value_and_grad
from xformer.errors import BackendError, ConfigError, ShapeError
from xformer.layers import MultiHeadAttention
from xformer.tree import map_arrays, replace

D_MODEL, NUM_HEADS, BATCH, QUERIES, KEYS = 12, 3, 2, 4, 6
RANDOM = np.random.default_rng(1).random((BATCH, NUM_HEADS, QUERIES, KEYS)) < 0.7
RANDOM[..., 0] = True  # torch gives NaN where a query may attend nowhere
PADDING = masks.padding(np.asarray([[3, 4, 5, 0, 0, 0], [1, 2, 3, 4, 5, 0]]), 0)

CASES = {
    "self": {"self_attention": True},
    "self, causal": {"self_attention": True, "causal": True},
    "cross": {},
    "cross, causal": {"causal": True},
    "padding": {"mask": PADDING},
    "random": {"mask": RANDOM},
    "padding, causal": {"mask": PADDING, "causal": True},
}


@pytest.fixture
def layer():
    return MultiHeadAttention(D_MODEL, NUM_HEADS, init=Initializer("numpy", dtype="float64"))


def allowed(case, keys):
    """The mask of a case as torch wants it: (batch * heads, queries, keys), True = may not attend."""
    mask = masks.combine(case.get("mask"), masks.causal(QUERIES, keys, xp="numpy") if "causal" in case else None)
    if mask is None:
        return None
    blocked = ~np.broadcast_to(mask, (BATCH, NUM_HEADS, QUERIES, keys))
    return blocked.reshape(BATCH * NUM_HEADS, QUERIES, keys)


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_those_of_torch(layer, name):
    torch = pytest.importorskip("torch", reason="torch is what it is compared with")
    case = dict(CASES[name])
    x, memory, g = (
        normal(0, BATCH, QUERIES, D_MODEL),
        normal(1, BATCH, KEYS, D_MODEL),
        normal(2, BATCH, QUERIES, D_MODEL),
    )
    memory = x if case.pop("self_attention", False) else memory

    theirs = randomize(torch.nn.MultiheadAttention(D_MODEL, NUM_HEADS, batch_first=True, dtype=torch.float64))
    torch_x, torch_memory = (torch.tensor(array, requires_grad=True) for array in (x, memory))
    torch_mask = allowed(case, memory.shape[1])
    expected, weights = theirs(
        torch_x,
        torch_memory,
        torch_memory,
        attn_mask=None if torch_mask is None else torch.tensor(torch_mask),
        average_attn_weights=False,
    )
    (expected * torch.tensor(g)).sum().backward()

    layer = replace(layer, attention_arrays(theirs, values))
    assert_close(layer(x, memory, **case), expected.detach().numpy())
    assert_close(layer.weights(x, memory, **case), weights.detach().numpy())
    _, (found, dx, dmemory) = value_and_grad(lambda inputs: weighted_sum(inputs[0](*inputs[1:], **case), g))(
        (layer, x, memory)
    )
    assert_close(dx, torch_x.grad.numpy())
    assert_close(dmemory, torch_memory.grad.numpy())
    expected_gradients = attention_arrays(theirs, gradients)
    for parameter, gradient in found.named_parameters():
        assert_close(gradient, expected_gradients[parameter])


def test_a_query_that_may_attend_nowhere_gets_the_output_bias(layer):
    x = normal(0, BATCH, QUERIES, D_MODEL)
    layer = map_arrays(lambda array: array + 0.25, layer)
    mask = np.ones((BATCH, 1, QUERIES, QUERIES), dtype=bool)
    mask[1, :, 2, :] = False
    assert_close(layer(x, mask=mask)[1, 2], layer.output.bias)
    assert not np.allclose(layer(x, mask=mask)[1, 1], layer.output.bias)


def test_d_model_has_to_be_divisible_by_num_heads():
    with raises_line(ConfigError, r"d_model 10 is not divisible by num_heads 4; choose e\.g\. d_model 8 "):
        MultiHeadAttention(10, 4, init=Initializer("numpy"))
    with raises_line(ConfigError, "num_heads is 0; expected at least 1"):
        MultiHeadAttention(10, 0, init=Initializer("numpy"))


def test_shapes_that_do_not_fit_are_refused(layer):
    x = normal(0, BATCH, QUERIES, D_MODEL)
    with raises_line(ShapeError, r"must have shape \(batch, length, d_model\); one has \(4, 12\)"):
        layer(x[0])
    with raises_line(ShapeError, r"x has shape \(2, 4, 11\); expected \(\.\.\., 12\) for a weight"):
        layer(x[..., 1:])
    with raises_line(ShapeError, r"shapes \(2, 3, 4, 4\), \(3, 3, 4, 4\), \(3, 3, 4, 4\); expected"):
        layer(x, normal(0, 3, QUERIES, D_MODEL))


def test_masks_that_do_not_fit_are_refused(layer):
    x = normal(0, BATCH, QUERIES, D_MODEL)
    with raises_line(ShapeError, r"mask has shape \(2, 5\); expected one broadcastable to \(2, 3, 4, 4\)"):
        layer(x, mask=np.ones((2, 5), dtype=bool))
    with raises_line(ShapeError, r"mask has shape \(1, 2, 3, 4, 4\)"):
        layer(x, mask=np.ones((1, 2, 3, 4, 4), dtype=bool))
    with raises_line(ShapeError, "mask has dtype int64; expected bool, True = may attend"):
        layer(x, mask=np.ones((4, 4), dtype="int64"))
    with raises_line(ShapeError, "mask has dtype float64"):
        layer.weights(x, mask=np.zeros((4, 4)))
    with raises_line(BackendError, "got a builtins.list; expected an array of numpy"):
        layer(x, mask=[[True]])


def test_arrays_of_two_libraries_are_refused(layer):
    torch = pytest.importorskip("torch", reason="torch is the second library")
    x = normal(0, BATCH, QUERIES, D_MODEL)
    for arguments in (
        {"x": torch.tensor(x)},
        {"x": x, "memory": torch.tensor(x)},
        {"x": x, "mask": torch.ones((4, 4), dtype=torch.bool)},
    ):
        with raises_line(BackendError, r"arrays of (numpy and torch|torch and numpy) were mixed; move one over"):
            layer(**arguments)
