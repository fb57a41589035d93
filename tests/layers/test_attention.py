"""Multi-head attention: equal to torch.nn.MultiheadAttention, with errors for invalid arguments."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import attention_arrays, for_each, gradients, normal, raises_line, randomize, values, weighted_sum
from xformer import Initializer, Rng, grad, masks, value_and_grad
from xformer.backends import array_namespace, from_host, to_host
from xformer.errors import BackendError, ConfigError, ShapeError
from xformer.layers import (
    DisentangledAttention,
    FamilyAttention,
    KVCache,
    LayerNorm,
    MultiHeadAttention,
    RMSNorm,
    Rotary,
)
from xformer.ops import attention_weights
from xformer.tracing.activations import record
from xformer.tree import map_arrays, replace, with_fields

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
    """Return the mask of a case in torch's convention: (batch * heads, queries, keys), True = may not attend."""
    mask = masks.combine(case.get("mask"), masks.causal(QUERIES, keys, xp="numpy") if "causal" in case else None)
    if mask is None:
        return None
    blocked = ~np.broadcast_to(mask, (BATCH, NUM_HEADS, QUERIES, keys))
    return blocked.reshape(BATCH * NUM_HEADS, QUERIES, keys)


@for_each("name", CASES)
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
    _, (actual, dx, dmemory) = value_and_grad(lambda inputs: weighted_sum(inputs[0](*inputs[1:], **case), g))(
        (layer, x, memory)
    )
    assert_close(dx, torch_x.grad.numpy())
    assert_close(dmemory, torch_memory.grad.numpy())
    expected_gradients = attention_arrays(theirs, gradients)
    for parameter, gradient in actual.named_parameters():
        assert_close(gradient, expected_gradients[parameter])


def test_a_fully_masked_query_gets_the_output_bias(layer):
    x = normal(0, BATCH, QUERIES, D_MODEL)
    layer = map_arrays(lambda array: array + 0.25, layer)
    mask = np.ones((BATCH, 1, QUERIES, QUERIES), dtype=bool)
    mask[1, :, 2, :] = False
    assert_close(layer(x, mask=mask)[1, 2], layer.output.bias)
    assert not np.allclose(layer(x, mask=mask)[1, 1], layer.output.bias)


def test_d_model_must_be_divisible_by_num_heads():
    with raises_line(ConfigError, r"d_model 10 is not divisible by num_heads 4; choose e\.g\. d_model 8 "):
        MultiHeadAttention(10, 4, init=Initializer("numpy"))
    with raises_line(ConfigError, "num_heads is 0; expected an integer of at least 1"):
        MultiHeadAttention(10, 0, init=Initializer("numpy"))


def test_biases_are_chosen_by_name():
    layer = MultiHeadAttention(8, 2, bias=("query", "output"), init=0)
    has_bias = [name for name, _ in layer.named_parameters() if name.endswith("bias")]
    assert has_bias == ["query.bias", "output.bias"]
    with raises_line(
        ConfigError, r"bias is \['queries'\]; expected True, False, or names out of query, key, value, output"
    ):
        MultiHeadAttention(8, 2, bias=["queries"], init=0)
    with raises_line(ConfigError, "unknown argument 'sinks'; use xformer.layers.FamilyAttention"):
        MultiHeadAttention(8, 2, sinks=True, init=0)


def test_shapes_that_do_not_fit_are_refused(layer):
    x = normal(0, BATCH, QUERIES, D_MODEL)
    with raises_line(ShapeError, r"x of shape \(4, 12\); expected \(batch, length, in_features\)"):
        layer(x[0])
    with raises_line(
        ShapeError, r"x of shape \(2, 4, 11\) and weight\[0\] of shape \(12, 12\).* with one value of in_features"
    ):
        layer(x[..., 1:])
    with raises_line(
        ShapeError, r"query of shape \(2, 3, 4, 4\) and key of shape \(3, 3, 4, 4\) .* with one value of batch"
    ):
        layer(x, normal(0, 3, QUERIES, D_MODEL))


def test_masks_that_do_not_fit_are_refused(layer):
    x = normal(0, BATCH, QUERIES, D_MODEL)
    with raises_line(
        ShapeError, r"mask of shape \(2, 5\); expected a shape that broadcasts to .*, here \(2, 3, 4, 4\)"
    ):
        layer(x, mask=np.ones((2, 5), dtype=bool))
    with raises_line(ShapeError, r"mask of shape \(1, 2, 3, 4, 4\)"):
        layer(x, mask=np.ones((1, 2, 3, 4, 4), dtype=bool))
    with raises_line(ShapeError, "mask of dtype int64; expected bool, True = keep"):
        layer(x, mask=np.ones((4, 4), dtype="int64"))
    with raises_line(ShapeError, "mask of dtype float64"):
        layer.weights(x, mask=np.zeros((4, 4)))
    with raises_line(BackendError, "got a builtins.list; expected an array of numpy"):
        layer(x, mask=[[True]])


# --- Fewer keys and values, windows, biases, stores -------------------------------------------------------------------


@for_each("shared", [1, 2])
def test_grouped_queries_are_heads_with_repeated_keys_and_values(xp, shared):
    init = Initializer(xp, dtype="float64")
    grouped = MultiHeadAttention(8, 4, num_key_value_heads=shared, init=init)

    def repeated(array):
        heads = xp.reshape(array, (*array.shape[:-1], shared, 2))
        return xp.reshape(xp.repeat(heads, 4 // shared, axis=-2), (*array.shape[:-1], 8))

    arrays = dict(grouped.named_parameters())
    for name in ("key.weight", "key.bias", "value.weight", "value.bias"):
        arrays[name] = repeated(arrays[name])
    ungrouped = replace(MultiHeadAttention(8, 4, init=init), arrays)
    x, mask = xp.asarray(normal(0, 2, 5, 8)), xp.asarray(np.random.default_rng(0).random((2, 1, 5, 5)) < 0.7)
    assert_close(grouped(x, mask=mask, causal=True), ungrouped(x, mask=mask, causal=True))
    assert_close(grouped.weights(x, mask=mask), ungrouped.weights(x, mask=mask))


def test_a_window_is_a_mask(xp):
    windowed, plain = (
        MultiHeadAttention(8, 2, window=window, init=Initializer(xp, dtype="float64")) for window in (2, None)
    )
    x = xp.asarray(normal(0, 2, 6, 8))
    near = np.abs(np.arange(6)[:, None] - np.arange(6)) < 2
    for causal in (True, False):
        expected = plain(x, mask=xp.asarray(near), causal=causal)
        assert_close(windowed(x, causal=causal), expected)
    memory = xp.asarray(normal(1, 2, 9, 8))
    near = np.abs(np.arange(3, 9)[:, None] - np.arange(9)) < 2  # the last query is at the position of the last key
    assert_close(windowed(x, memory), plain(x, memory, mask=xp.asarray(near)))


def test_a_norm_of_all_heads_is_applied_to_the_projections(xp):
    layer = FamilyAttention(
        12, 6, num_key_value_heads=2, norm=RMSNorm, norm_all_heads=True, init=Initializer(xp, dtype="float64")
    )
    weights = {"query_norm.weight": xp.asarray(normal(1, 12)), "key_norm.weight": xp.asarray(normal(2, 4))}
    layer, x = replace(layer, dict(layer.named_arrays()) | weights), xp.asarray(normal(0, 2, 5, 12))
    q = xp.permute_dims(xp.reshape(layer.query_norm(layer.query(x)), (2, 5, 6, 2)), (0, 2, 1, 3))
    k = xp.permute_dims(xp.reshape(layer.key_norm(layer.key(x)), (2, 5, 2, 2)), (0, 2, 1, 3))
    assert_close(layer.keys_and_values(x)[0], k)
    assert_close(layer.weights(x), attention_weights(q, k))


@for_each(
    "settings",
    [
        {},
        {"window": 2},
        {"norm": LayerNorm},
        {"num_key_value_heads": 1, "window": 3},
        {"num_key_value_heads": 1, "norm": RMSNorm, "norm_all_heads": True},
    ],
)
@for_each("options", ["none", "causal", "mask", "bias", "rotation", "dropout", "cache"])
def test_queries_are_the_default_of_keys_and_values(xp, settings, options):
    cls = FamilyAttention if "norm_all_heads" in settings else MultiHeadAttention
    layer = cls(16, 2, dropout=0.5, init=Initializer(xp, dtype="float64"), **settings)
    x = xp.asarray(normal(0, 2, 5, 16))
    earlier = layer.keys_and_values(xp.asarray(normal(1, 2, 3, 16)))
    keywords = {
        "none": {},
        "causal": {"causal": True},
        "mask": {"mask": masks.padding(xp.asarray([[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]), 0)},
        "bias": {"bias": xp.asarray(normal(2, 2, 5, 5))},
        "rotation": {"rotation": Rotary(8).rotation(5, like=x)},
        "dropout": {"rng": Rng(0)},
        "cache": {},
    }[options]

    def call(*args):
        cache = {"cache": KVCache(*earlier)} if options == "cache" else {}
        return layer(*args, **keywords, **cache)

    expected = call(x)
    assert_close(call(x, x), expected, tolerance=0.0)
    assert_close(call(x, x, x), expected, tolerance=0.0)
    copy = xp.asarray(x, copy=True)
    assert_close(call(x, copy), expected)
    assert_close(call(x, copy, copy), expected)
    assert_close(call(x, x, copy), expected)
    if options in ("none", "causal", "mask", "bias", "rotation"):
        assert_close(layer.weights(x, x, **keywords), layer.weights(x, **keywords), tolerance=0.0)


@for_each("shape", [(2, 3, 4, 6), (3, 4, 6), (1, 3, 1, 6)])
def test_a_bias_is_added_to_the_scores_and_has_a_gradient(layer, shape):
    torch = pytest.importorskip("torch", reason="torch is what it is compared with")
    x, memory, bias, g = normal(0, 2, 4, 12), normal(1, 2, 6, 12), normal(2, *shape), normal(3, 2, 4, 12)
    query, key, value = (
        torch.tensor(y).reshape(2, -1, 3, 4).transpose(1, 2)
        for y in (x @ layer.query.weight, memory @ layer.key.weight, memory @ layer.value.weight)
    )
    torch_bias = torch.tensor(bias, requires_grad=True)
    mask = torch.tensor(RANDOM)
    scores = query @ key.transpose(2, 3) / 2.0 + torch_bias
    heads = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ value
    expected = heads.transpose(1, 2).reshape(2, 4, 12) @ torch.tensor(layer.output.weight)
    (expected * torch.tensor(g)).sum().backward()
    assert_close(layer(x, memory, mask=RANDOM, bias=bias), expected.detach().numpy())
    _, dbias = value_and_grad(lambda b: weighted_sum(layer(x, memory, mask=RANDOM, bias=b), g))(bias)
    assert_close(dbias, torch_bias.grad.numpy())


def test_attention_with_a_cache_equals_full_attention(xp):
    layer = MultiHeadAttention(8, 4, num_key_value_heads=2, window=3, init=Initializer(xp, dtype="float64"))
    x = xp.asarray(normal(0, 2, 6, 8))
    full, store = layer(x, causal=True), KVCache()
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        assert_close(layer(x[:, start:stop, :], causal=True, cache=store), full[:, start:stop, :])
    assert tuple(store.key.shape) == (2, 2, 6, 2)


def test_a_cache_grows_and_reorders_like_arrays(xp):
    key, value = (xp.asarray(normal(seed, 3, 2, 40, 4)) for seed in (0, 1))
    original = xp.asarray(to_host(key[:, :, :5, :]), copy=True)
    store, rows = KVCache(original, value[:, :, :5, :]), xp.asarray([2, 0, 2])
    for start in range(5, 40):
        store.append(key[:, :, start : start + 1, :], value[:, :, start : start + 1, :])
    assert_close(store.key, key, tolerance=0.0)
    store.reorder(rows)
    both = store.append(key[:, :, :2, :], value[:, :, :2, :])
    for result, full in zip(both, (key, value), strict=True):
        expected = xp.concat([xp.take(full, rows, axis=0), full[:, :, :2, :]], axis=2)
        assert_close(result, expected, tolerance=0.0)
    assert_close(original, key[:, :, :5, :], tolerance=0.0)  # it was not written


@for_each("tokens", [0, 20])
def test_moving_rows_of_a_cache_equals_reordering_all(xp, tokens):
    key, value = (xp.asarray(normal(seed, 4, 2, 30, 4)) for seed in (0, 1))
    rows, moved = xp.asarray([0, 2, 1, 2]), (xp.asarray([1, 2, 3]), xp.asarray([2, 1, 2]))
    original = xp.asarray(to_host(key[:, :, :5, :]), copy=True)
    all_of_them, those_that_move = KVCache(original, value[:, :, :5, :]), KVCache(original, value[:, :, :5, :])
    for store in (all_of_them, those_that_move):
        for start in range(5, 5 + tokens):
            store.append(key[:, :, start : start + 1, :], value[:, :, start : start + 1, :])
    assert those_that_move.is_own == (tokens > 0 and xp.name in ("numpy", "cupy"))  # what was given is not moved
    all_of_them.reorder(rows)
    if those_that_move.is_own:
        those_that_move.move(*moved)
    else:
        those_that_move.reorder(rows)
    assert_close(those_that_move.key, all_of_them.key, tolerance=0.0)
    assert_close(those_that_move.value, all_of_them.value, tolerance=0.0)
    assert_close(original, key[:, :, :5, :], tolerance=0.0)  # it was not written


def test_rows_sharing_a_memory_equal_rows_with_their_own(xp):
    layer = MultiHeadAttention(8, 2, init=Initializer(xp, dtype="float64"))
    x, memory = xp.asarray(normal(0, 6, 2, 8)), xp.asarray(normal(1, 2, 5, 8))
    mask = masks.padding(xp.asarray([[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]), 0)
    shared = layer.attend(x, KVCache(*layer.keys_and_values(memory)), mask=mask)
    assert_close(shared, layer(x, xp.repeat(memory, 3, axis=0), mask=xp.repeat(mask, 3, axis=0)))
    with raises_line(ShapeError, "the cache is empty"):
        layer.attend(x, KVCache())
    cache = KVCache(*layer.keys_and_values(memory))
    message = (
        r"query has shape \({}\) .*; expected \(rows, queries, d_model\) with a multiple of the 2 rows of the cache"
    )
    with raises_line(ShapeError, message.format("5, 2, 8")):
        layer.attend(x[:5, :, :], cache)
    with raises_line(ShapeError, message.format("2, 8")):
        layer.attend(x[0, :, :], cache)


def test_a_cache_rejects_other_shapes():
    store = KVCache(*(np.zeros((3, 2, 5, 4), "float32") for _ in range(2)))
    with pytest.raises(ShapeError, match=r"shape \(1, 2, 1, 4\) .*; expected \(3, 2, new tokens, 4\)"):
        store.append(*(np.zeros((1, 2, 1, 4), "float32") for _ in range(2)))
    key, _ = store.append(*(np.ones((3, 2, 1, 4), "float64") for _ in range(2)))
    assert key.dtype == "float64"


@for_each("options", [{}, {"causal": True}, {"mask": np.asarray([True, False, True, True, True])}])
def test_sinks_take_a_share_of_the_attention(xp, options):
    """Compare with a softmax over one more score, whose weight is dropped."""
    layer = FamilyAttention(8, 4, num_key_value_heads=2, sinks=True, init=Initializer(xp, dtype="float64"))
    sinks = np.asarray([0.5, -1.0, 2.0, 0.0])
    plain = MultiHeadAttention(8, 4, num_key_value_heads=2, init=Initializer("numpy", dtype="float64"))
    layer, x = with_fields(layer, sinks=from_host(xp, sinks)), normal(0, 2, 5, 8)
    ours = {name: from_host(xp, x) if name == "mask" else x for name, x in options.items()}
    share = plain.weights(x, **options)
    queries, keys, values = plain._project(query=x, key=x, value=x)
    scores = queries @ np.repeat(keys, 2, axis=1).swapaxes(-1, -2) * 2.0**-0.5
    total = np.sum(np.exp(scores) * (share > 0), axis=-1, keepdims=True)
    share = share * total / (total + np.exp(sinks)[:, None, None])
    expected = (share @ np.repeat(values, 2, axis=1)).swapaxes(1, 2).reshape(2, 5, 8) @ plain.output.weight
    with record(layer, "weights") as recorded:
        actual = layer(from_host(xp, x), **ours)
    assert_close(actual, expected, xp=xp)
    assert_close(recorded["weights"], share, xp=xp)
    assert_close(layer.weights(from_host(xp, x), **ours), share, xp=xp)
    if "causal" not in options:
        cache = KVCache()
        cache.append(*layer.keys_and_values(from_host(xp, x)))
        assert_close(layer.attend(from_host(xp, x), cache, **ours), expected, xp=xp)


def test_sinks_are_within_every_window():
    options = {"sinks": True, "init": Initializer("numpy", dtype="float64")}
    layer, x = FamilyAttention(8, 2, window=3, **options), normal(0, 2, 9, 8)
    layer = with_fields(layer, sinks=np.asarray([0.5, 2.0]))
    whole = with_fields(layer, window=None)
    near = abs(np.arange(9)[:, None] - np.arange(9)) < 3
    for causal in (False, True):
        np.testing.assert_allclose(layer(x, causal=causal), whole(x, mask=near, causal=causal), rtol=1e-12)


def test_the_gradient_of_sinks():
    layer, x = FamilyAttention(8, 2, sinks=True, init=Initializer("numpy", dtype="float64")), normal(0, 2, 5, 8)

    def total(sinks):
        y = with_fields(layer, sinks=sinks)(x, causal=True)
        return array_namespace(y).sum(y * y)

    sinks, step = np.asarray([0.5, -1.0]), np.asarray([2e-6, -1e-6])
    difference = (total(sinks + step) - total(sinks - step)) / 2
    assert float(grad(total)(sinks) @ step) == pytest.approx(float(difference), rel=1e-6)


def test_weights_of_disentangled_attention_are_those_of_a_call():
    layer = DisentangledAttention(8, 2, init=0)
    x, distances = np.random.default_rng(0).normal(size=(2, 3, 8)), np.random.default_rng(1).normal(size=(5, 8))
    with record(layer, "weights") as recorded:
        layer(x, distances=distances)
    assert_close(layer.weights(x, distances=distances), recorded["weights"], tolerance=0.0)
