"""Decoding on CuPy: the choice of tokens equals its definition, and searches on the device equal those on the host."""

from __future__ import annotations

import functools
import math
import types

import numpy as np

import xformer as xf
from tests.conftest import assert_close
from tests.ops._cupy.cuda_cases import DTYPES, normal
from tests.reference import for_each
from xformer.backends import resolve, to_host
from xformer.generation import steps
from xformer.generation.steps import Choices, _step
from xformer.kernels.cupy import calls, decoding
from xformer.kernels.cupy import linear as cupy_linear
from xformer.layers.weights import columns_of_one
from xformer.ops import attention, project_heads
from xformer.ops.attention import cached_attention
from xformer.ops.decoding import choose, truncate
from xformer.tracing.program import CudaProgram


@for_each("dtype", DTYPES)
@for_each("n", [1, 5, 64, 1033, 9000])
def test_choice(cuda, dtype, n):
    x = np.round(8.0 * normal(5, n)) / 8.0  # with equal elements
    x[1, n // 2 :] = -math.inf
    x[1, :1] = 3.0
    x[2] = -math.inf
    x[3, n // 2] = math.nan
    x = cuda.array(x, dtype)
    wide = to_host(x).astype(np.float64)
    found = to_host(choose(x))
    assert found[:3, 0].tolist() == np.argmax(wide, axis=-1)[:3].tolist()
    with np.errstate(invalid="ignore"):
        expected = 0.0 - np.log(np.sum(np.exp(wide - np.max(wide, axis=-1, keepdims=True)), axis=-1))
    np.testing.assert_allclose(found[:, 1], expected, rtol=1e-5, atol=1e-6)
    if cuda.launcher:
        assert any("choose" in name for name in cuda.launcher.launched)
        cuda.launcher.backwards = True
        np.testing.assert_array_equal(to_host(choose(x)), found)
        cuda.launcher.backwards = False


def test_choices_of_steps(cuda):
    """Masked tokens are not chosen; each step has its random numbers; a row has the same bits in any batch."""
    xp, x, mask, steps = cuda.xp, normal(3, 40), np.arange(40) % 2 == 0, 4
    settings, uniforms = {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.001}, normal(steps, 3, seed=2) % 1.0

    def found(rows):
        lengths = xp.zeros((len(rows),), dtype=xp.int64)
        choices = Choices(types.SimpleNamespace(lengths=lengths, capacity=5), 40)
        choices.start(np.zeros((len(rows), 1)), mask, uniforms[:, rows], settings)
        tokens = []
        model = types.SimpleNamespace(
            decode_step=lambda now, cache: tokens.append(to_host(now)[:, 0].tolist()) or cuda.array(x[rows], "float32")
        )
        for _ in range(steps):
            _step(decoding.choose_into, model, None, *choices._arrays)
        found = to_host(choices._arrays[-1])[:steps]
        assert tokens[1:] == found[:-1, :, 0].tolist()
        return found

    together = found([0, 1, 2])
    odd = cuda.array(x[:, 1::2].copy(), "float32")
    for step, pairs in enumerate(together):
        expected = to_host(choose(odd, cuda.array(uniforms[step], "float32"), **settings))
        np.testing.assert_allclose(pairs, expected * [2, 1] + [1, 0], rtol=1e-5)
    assert len({tuple(pairs[:, 0]) for pairs in together}) > 1
    np.testing.assert_array_equal(found([1]), together[:, 1:2])


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e-6},
    {"top_k": 1},
    {"top_k": 7, "temperature": 3.0},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 1.0 - 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
]


@for_each("dtype", DTYPES)
@for_each("n", [1, 7, 700])
def test_draws_equal_their_definition(cuda, dtype, n):
    """With equal elements, masked ones, and numbers at both ends; those at the border of two tokens may differ."""
    x = 3.0 * normal(9, n)
    x[:4] = np.round(x[:4])
    x[:, n // 3 + 1 : n // 2] = -math.inf
    x, uniforms = cuda.array(x, dtype), np.linspace(0.0, 1.0 - 2**-30, 9)
    wide = to_host(x).astype(np.float64)
    for changed in SETTINGS if dtype in ("float32", "float64") else SETTINGS[-1:]:
        settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changed
        found = to_host(choose(x, cuda.array(uniforms, dtype), **changed)).astype(np.float64)
        scaled = truncate(wide, **settings)
        chosen = found[:, 0].astype(int)
        weights = np.exp(scaled - np.max(scaled, axis=-1, keepdims=True))
        after = np.cumsum(weights, axis=-1) / np.sum(weights, axis=-1, keepdims=True)
        rows = np.arange(9)
        assert np.all(weights[rows, chosen] > 0.0), changed
        rounded = to_host(cuda.array(uniforms, dtype)).astype(np.float64)
        slack = 1e-5 if dtype != "float64" else 1e-12
        assert np.all(after[rows, chosen] >= rounded - slack), changed
        assert np.all(after[rows, chosen] - weights[rows, chosen] / weights.sum(axis=-1) <= rounded + slack), changed
        log_probs = wide - np.log(np.sum(np.exp(wide), axis=-1, keepdims=True))
        np.testing.assert_allclose(found[:, 1], log_probs[rows, chosen], rtol=1e-5, atol=1e-5)
        alone = to_host(choose(x[4:5, :], cuda.array(uniforms[4:5], dtype), **settings))
        np.testing.assert_array_equal(alone.astype(np.float64)[0], found[4])


# --- attention ------------------------------------------------------------------------------------------------------

# Rows, heads, heads of keys, queries, keys, features; the last have keys of several rounds, and vectors not aligned.
SHAPES = [(2, 4, 4, 1, 5, 16), (1, 8, 2, 1, 70, 64), (3, 2, 2, 3, 40, 8), (2, 6, 3, 2, 300, 20), (1, 2, 1, 7, 9, 5)]


def expected_attention(query, key, value, mask, bias, scale):
    arrays = [to_host(x).astype(np.float64) for x in (query, key, value)]
    key, value = (np.repeat(x, arrays[0].shape[1] // x.shape[1], axis=1) for x in arrays[1:])
    scores = scale * arrays[0] @ np.swapaxes(key, -1, -2) + (0.0 if bias is None else to_host(bias))
    seen = np.broadcast_to(True if mask is None else to_host(mask), scores.shape)
    weights = np.where(seen, np.exp(scores - np.max(scores, axis=-1, keepdims=True)), 0.0)
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30) @ value


@for_each("dtype", ["float32", "float16", "bfloat16"])
@for_each("shape", SHAPES)
def test_attention_of_few_queries(cuda, dtype, shape):
    rows, heads, kv_heads, queries, keys, features = shape
    query = cuda.array(normal(rows, queries, heads, features), dtype).transpose(0, 2, 1, 3)
    key, value = (
        cuda.array(normal(rows, keys, kv_heads, features, seed=seed), dtype).transpose(0, 2, 1, 3) for seed in (1, 2)
    )
    mask = np.random.default_rng(3).random((rows, 1, queries, keys)) < 0.6
    mask[0, 0, 0] = False
    bias = cuda.array(normal(heads, 1, keys), dtype)
    for own_mask, own_bias in ((None, None), (cuda.array(mask), None), (cuda.array(mask[:1]), bias), (None, bias)):
        found = attention(query, key, value, own_mask, own_bias, scale=0.3)
        expected = expected_attention(query, key, value, own_mask, own_bias, 0.3)
        assert_close(found, expected, xp=cuda.xp, dtype=dtype)
        first = [None if x is None else x[:1, ...] if x.ndim == 4 else x for x in (own_mask, own_bias)]
        alone = attention(*(x[:1, ...] for x in (query, key, value)), *first, scale=0.3)
        np.testing.assert_array_equal(to_host(alone), to_host(found)[:1])
    assert not np.any(to_host(attention(query, key, value, cuda.array(mask)))[0, :, 0])
    if cuda.launcher:
        assert any("attend" in name for name in cuda.launcher.launched)


@for_each("dtype", ["float32", "bfloat16"])
@for_each("shape", SHAPES)
def test_attention_to_a_cache(cuda, dtype, shape):
    """New keys and values are stored where they belong, and nothing else changes; what lies beyond is not read."""
    rows, heads, kv_heads, tokens, capacity, features = shape
    query = cuda.array(normal(rows, heads, tokens, features), dtype)
    key, value = (cuda.array(normal(rows, kv_heads, tokens, features, seed=seed), dtype) for seed in (1, 2))
    keys, values = (normal(rows, kv_heads, capacity, features, seed=seed) for seed in (3, 4))
    starts = np.arange(rows) + 1
    mask = np.arange(capacity) <= (starts[:, None] + np.arange(tokens))[:, None, :, None]
    for each in (keys, values):
        each[~mask[:, :, -1:, :].repeat(kv_heads, 1)[:, :, 0]] = np.nan
    expected_keys, expected_values = (to_host(cuda.array(x, dtype)).copy() for x in (keys, values))
    keys, values, starts, mask = (cuda.array(x, dtype) for x in (keys, values, starts, mask))
    arrays = query, key, value, keys, values, starts, mask, None
    assert cuda.served("cached_attention", *arrays, scale=0.3)
    found = cached_attention(*arrays, scale=0.3)
    for new, old, x in ((key, expected_keys, keys), (value, expected_values, values)):
        for row, start in enumerate(to_host(starts)):
            old[row, :, start : start + tokens] = to_host(new)[row]
        np.testing.assert_array_equal(to_host(x), old)
    clean = [cuda.array(np.nan_to_num(x), dtype) for x in (expected_keys, expected_values)]
    assert_close(found, expected_attention(query, *clean, mask, None, 0.3), xp=cuda.xp, dtype=dtype)


# --- joined projections -----------------------------------------------------------------------------------------------


@for_each("has_bias", [True, False])
def test_neighboring_columns_are_multiplied_at_once(cuda, has_bias, monkeypatch):
    products, affine = [], cupy_linear._affine
    monkeypatch.setattr(cupy_linear, "_affine", lambda *args: products.append(args) or affine(*args))
    x = cuda.array(normal(3, 2, 8), "float32")
    weights = columns_of_one([cuda.array(normal(8, n, seed=n), "float32") for n in (8, 4, 4)])
    biases = columns_of_one([cuda.array(normal(n, seed=n), "float32") for n in (8, 4, 4)]) if has_bias else [None] * 3
    maps = list(zip(weights, biases, (2, 1, 1), strict=True))
    recording = calls._Recording(())
    with monkeypatch.context() as context:
        context.setattr(calls._THREAD, "recording", recording)
        found = project_heads(x, *maps)
    assert not recording.is_complete  # other weights of these shapes and strides may be no neighbors
    for one, (weight, bias, heads) in zip(found, maps, strict=True):
        (alone,) = project_heads(x, (weight.copy(), None if bias is None else bias.copy(), heads))
        assert_close(one, to_host(alone), xp=cuda.xp, dtype="float32")
    project_heads(x, *maps[1:])
    project_heads(x, maps[0], maps[2])  # no neighbors
    assert [args[1].shape[1] for args in products] == [16, 8]  # of neighbors


# --- searches ---------------------------------------------------------------------------------------------------------


class Device:
    """Runs programs of NumPy as if they were CUDA graphs, and counts what they launch and what the host reads."""

    def __init__(self, monkeypatch):
        self.launches, self.reads, self.captures = 0, 0, 0
        library = type(resolve("numpy").library)
        monkeypatch.setattr(library, "graph_capture", lambda library: self.capture)
        monkeypatch.setattr(steps, "compiler", lambda xp: functools.partial(CudaProgram, self.capture))
        monkeypatch.setattr(decoding, "read_later", self.read_later)
        monkeypatch.setattr(steps, "_pool", steps.ProgramPool(64, 2**28))

    def capture(self, function):
        self.captures += 1

        def launch():
            self.launches += 1
            function()

        return launch

    def read_later(self, array):
        self.reads += 1
        now = array.copy()
        return lambda: now


def models():
    sizes = {"d_model": 16, "num_heads": 1, "d_ff": 32}
    config = xf.TransformerConfig(
        source_vocab_size=29, target_vocab_size=29, num_encoder_layers=1, num_decoder_layers=1, **sizes
    )
    yield xf.Transformer(config, seed=1), [[5, 6, 7], [8, 9], [11, 5, 5, 12]], {"suppress_tokens": [3, 7]}
    yield xf.Transformer(config, seed=3), [[5, 6], [8, 9]], {"min_new_tokens": 5}
    config = xf.LanguageModelConfig(vocab_size=29, num_layers=1, **sizes)
    yield xf.LanguageModel(config, seed=2), [[5, 4], [7], [9, 9, 9], [12, 3]], {"stop_token_ids": [5, 8, 10]}
    yield xf.LanguageModel(config, seed=2), [[5, 4]], {"max_new_tokens": 40, "special_tokens": False}  # the cache grows


SEARCHES = {
    "greedy": {},
    "samples": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "num_return_sequences": 2},
}


@for_each("search", SEARCHES)
def test_searches_on_the_device_equal_those_on_the_host(cuda_host, monkeypatch, search):
    for model, inputs, settings in models():
        settings = {"max_new_tokens": 13, "rng": xf.Rng(4)} | settings | SEARCHES[search]
        expected = xf.generate(model, inputs, **settings)
        with monkeypatch.context() as context:
            device = Device(context)
            for _ in range(2):  # programs are kept
                launches, reads = device.launches, device.reads
                assert xf.generate(model, inputs, **settings) == expected
                longest = max(len(output.tokens) for outputs in expected for output in outputs)
                assert device.reads > reads
                assert device.launches - launches <= longest + 2 * 4
            assert device.captures <= 2


def test_settings_of_a_search_do_not_stay(cuda_host, monkeypatch):
    """Programs are shared by all settings, and tokens belong to a seed."""
    model, inputs, _ = list(models())[2]
    runs = [{"temperature": 2.0, "suppress_tokens": [3]}, {"top_p": 0.7}, {"top_k": 5}, {}, {"do_sample": True}] * 2
    runs = [{"max_new_tokens": 12, "rng": xf.Rng(seed % 3)} | run for seed, run in enumerate(runs)]
    expected = [tokens_of(xf.generate(model, inputs, **run)) for run in runs]
    device = Device(monkeypatch)
    assert [tokens_of(xf.generate(model, inputs, **run)) for run in runs] == expected
    assert device.captures == 1


def tokens_of(outputs):
    return [output.tokens for of_input in outputs for output in of_input]
