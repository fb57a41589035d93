"""Borders of the library: each odd call returns the right result, or raises one XformerError of one line."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xformer as xf
from tests.stress.conftest import MESSAGE, limits
from xformer.config import Config
from xformer.environment import clear_cache
from xformer.errors import XformerError
from xformer.models.config import GATED, POSITIONS
from xformer.ops.activations import ACTIVATIONS

SECONDS = 120  # for one call, the compilation of its kernels included


class Refused:
    """The outcome of a call that raised one line."""


def outcome(call, *, mode="auto"):
    """Return the value of a call, or the class `Refused` if it raised an XformerError of one line."""
    with pytest.MonkeyPatch.context() as patch, limits(SECONDS), np.errstate(all="ignore"):
        patch.setenv("XFORMER_KERNELS", mode)
        clear_cache()
        try:
            return call()
        except XformerError as error:
            message = str(error)
            assert 0 < len(message) <= MESSAGE
            assert "\n" not in message
            return Refused
        finally:
            patch.undo()
            clear_cache()


def assert_equal(actual, expected, tolerance=1e-4):
    assert actual.shape == expected.shape
    scale = np.max(np.abs(expected[np.isfinite(expected)]), initial=1.0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale, equal_nan=True)


def assert_same_outcome(module, call):
    """Call with a float32 module, and with its float64 copy on portable kernels: both refuse, or agree."""
    actual = outcome(lambda: call(module))
    expected = outcome(lambda: call(module.to(dtype="float64")), mode="portable")
    if actual is Refused or expected is Refused:
        assert actual is expected
        return Refused
    assert_equal(actual, expected)
    return actual


# --- Arrays -----------------------------------------------------------------------------------------------------------

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7])
KINDS = ["float32", "float32", "float32", "float64", "float16", "int64", "bool", "complex64", "object", "list", "view"]
KINDS += ["transposed", "read-only", "big-endian", "NaN", "scalar", "None", "text"]


def as_kind(array, kind):
    if kind in ("list", "scalar", "None", "text"):
        return {"list": array.tolist(), "scalar": 1.5, "None": None, "text": "x"}[kind]
    if kind == "view":
        return np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array
    if kind == "transposed":
        return np.ascontiguousarray(array.T).T
    if kind == "read-only":
        array.flags.writeable = False
        return array
    if kind == "NaN":
        array.flat[:1] = np.nan
        return array
    return array.astype({"big-endian": ">f4"}.get(kind, kind))


@st.composite
def vectors(draw, batch, length, features, kinds=KINDS):
    """Draw vectors (batch, length, features) that are mostly valid."""
    shape = [batch, length, features]
    change = draw(st.sampled_from(["none"] * 6 + ["size", "fewer axes", "more axes"]))
    if change == "size":
        shape[draw(st.integers(0, 2))] = draw(SIZES)
    elif change != "none":
        shape = shape[1:] if change == "fewer axes" else [1, *shape]
    array = np.random.default_rng(draw(st.integers(0, 99))).normal(size=shape).astype("float32")
    return as_kind(array, draw(st.sampled_from(kinds)))


@st.composite
def masks(draw, batch, heads, queries, keys):
    """Draw None, or a mask of mostly valid shape and kind."""
    if draw(st.booleans()):
        return None
    shape = [draw(st.sampled_from([1, size, size])) for size in (batch, heads, queries, keys)]
    shape = shape[draw(st.sampled_from([0, 0, 0, 1, 2, 3])) :]
    if draw(st.integers(0, 5)) == 0:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(SIZES)
    mask = np.random.default_rng(draw(st.integers(0, 99))).random(shape) < 0.7
    kind = draw(st.sampled_from(["bool"] * 8 + ["float32", "int64", "list", "text", "scalar"]))
    return mask if kind == "bool" else as_kind(mask, kind)


# --- Attention --------------------------------------------------------------------------------------------------------


@st.composite
def attentions(draw):
    heads = draw(st.sampled_from([1, 2, 3, 4]))
    options = {
        "num_key_value_heads": draw(st.sampled_from([None, None, 1, 2, heads, 0, -1])),
        "head_dim": draw(st.sampled_from([None, None, 1, 3, 4, 0, -1])),
        "bias": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, None, 1.0, 0.0, -1.0])),
        "softcap": draw(st.sampled_from([None, None, 2.0])),
        "window": draw(st.sampled_from([None, None, 1, 2, 10**9, 0, -1])),
        "norm": draw(st.sampled_from([None, None, xf.RMSNorm, xf.LayerNorm])),
    }
    d_model = draw(st.sampled_from([heads, 2 * heads, 4 * heads, 8 * heads, 5, 0]))
    return outcome(lambda: xf.MultiHeadAttention(d_model, heads, **options, init=0)), d_model, heads


@given(data=st.data())
def test_attention(data):
    attention, d_model, heads = data.draw(attentions())
    if attention is Refused:
        return
    batch, queries, keys = (data.draw(SIZES) for _ in range(3))
    query = data.draw(vectors(batch, queries, d_model))
    key = data.draw(st.none() | vectors(batch, keys, d_model))
    value = data.draw(st.none() | vectors(batch, keys, d_model))
    mask = data.draw(masks(batch, heads, queries, queries if key is None else keys))
    bias = data.draw(st.none() | masks(batch, heads, queries, queries if key is None else keys))
    if isinstance(bias, np.ndarray) and data.draw(st.booleans()):
        bias = bias.astype("float32")
    options = {"mask": mask, "bias": bias, "causal": data.draw(st.booleans())}
    values = next((x for x in (value, key, query) if x is not None), None)
    if isinstance(values, np.ndarray) and values.dtype.kind == "f" and values.flags.writeable:
        values[np.isnan(values)] = 0.0  # whether a masked NaN reaches the output depends on the kernel
    assert_same_outcome(attention, lambda module: module(query, key, value, **options))
    assert_same_outcome(attention, lambda module: module.weights(query, key, **options))
    alone = outcome(lambda: attention(query, **options))
    for arguments in ((query, query), (query, query, query)):
        same = outcome(lambda arguments=arguments: attention(*arguments, **options))
        assert (same is Refused) == (alone is Refused)
        if alone is not Refused:
            assert_equal(same, alone)


# --- Models -----------------------------------------------------------------------------------------------------------


MODEL_CHOICES = {
    "d_ff": (1, 5, 8), "head_dim": (None, None, None, 2, 4, 3), "embedding_scale": (1.0, 3.0),
    "residual_scale": (1.0, 0.5), "layer_scale": (False, False, True), "attention_scale": (None, 0.5),
    "qk_norm": (False, True), "qk_norm_all_heads": (False, True), "window": (None, None, 1, 2, 3, 100),
    "attention_softcap": (None, 3.0), "attention_sinks": (False, False, True), "num_experts": (0, 0, 0, 1, 3),
    "sinusoidal_layout": ("interleaved", "halves"), "activation": (*ACTIVATIONS, *GATED), "norm": ("layer", "rms"),
    "norm_position": ("pre", "post", "sandwich", "output"), "parallel_residual": (False, False, True),
    "shared_norm": (False, False, True), "final_norm": (None, False, True), "attention_bias": (False, True),
    "key_bias": (None, False, True), "attention_output_bias": (None, False, True), "feed_forward_bias": (False, True),
    "norm_bias": (False, True), "positions": tuple(POSITIONS), "max_positions": (1, 4, 1024), "alibi_scale": (1.0, 0.5),
    "relative_buckets": (2, 3, 4, 32), "relative_max_distance": (1, 2, 8, 128), "rope_local_theta": (None, None, 100.0),
    "rotary_fraction": (1.0, 0.5, 0.25), "scale_embeddings": (False, True), "scale_positions": (False, True),
    "embedding_norm": (False, True), "tie_output": (False, True), "scale_output": (False, True),
    "output_bias": (False, True), "logits_softcap": (None, 2.0), "rematerialize": (False, False, True),
    "pad_id": (0, 0, None, 2),
}  # fmt: skip
EXPERT_CHOICES = {
    "num_experts_per_token": (2, 1, 4), "router_bias": (False, True), "normalize_expert_weights": (True, False),
    "expert_d_ff": (None, None, 3), "shared_expert_d_ff": (None, None, 3), "dense_layers": ((), (), (0,), (1,)),
}  # fmt: skip


@st.composite
def model_options(draw):
    def choose(choices):
        return {name: draw(st.sampled_from(values)) for name, values in choices.items()}

    heads, layers = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(0, 2))
    sizes = {"d_model": (heads, 2 * heads, 4 * heads, 4 * heads, 5, 7)}
    sizes |= {"num_key_value_heads": (None, None, None, 1, heads, 2)}
    # Norms of few features divide by small numbers, which enlarges rounding errors.
    options = {"num_heads": heads, "norm_epsilon": 0.01, **choose(sizes), **choose(MODEL_CHOICES)}
    if options["num_experts"] or not draw(st.integers(0, 9)):  # refused otherwise
        options |= choose(EXPERT_CHOICES)
    if options["window"] is not None and draw(st.booleans()):
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        options["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    return options, layers


VOCABULARY = 9


@st.composite
def token_ids(draw, low=0):
    """Draw rows of ids, mostly of equal length, valid and of integers."""
    batch, length = draw(st.sampled_from([1, 1, 2, 3, 0])), draw(st.sampled_from([1, 2, 3, 5, 6, 0]))
    ids = np.random.default_rng(draw(st.integers(0, 99))).integers(low, VOCABULARY, (batch, length))
    change = draw(st.sampled_from(["none"] * 6 + ["value", "kind", "ragged", "padded", "one-hot"]))
    if change == "value" and ids.size:
        ids.flat[draw(st.integers(0, ids.size - 1))] = draw(st.sampled_from([-1, VOCABULARY, 2**40]))
    if change == "kind":
        return as_kind(
            ids, draw(st.sampled_from(["float32", "bool", "list", "text", "None", "scalar", "view", "object"]))
        )
    if change == "padded":
        ids[:, draw(st.integers(0, length)) :] = 0
    if change == "one-hot":
        return np.eye(VOCABULARY, dtype="float32")[ids]
    return [*ids.tolist(), [3]] if change == "ragged" else ids


def is_valid(ids):
    return isinstance(ids, np.ndarray) and ids.ndim == 2 and ids.size > 0 and ids.dtype.kind == "i"


@given(data=st.data())
def test_language_model(data):
    options, layers = data.draw(model_options())
    options |= {"logits_scale": data.draw(st.sampled_from([1.0, 0.25]))}
    options |= {"causal": data.draw(st.sampled_from([True, True, False]))}
    options |= {"layers_without_positions": data.draw(st.lists(st.integers(0, max(layers - 1, 0)), max_size=layers))}
    model = outcome(
        lambda: xf.LanguageModel(xf.LanguageModelConfig(vocab_size=VOCABULARY, num_layers=layers, **options))
    )
    ids = data.draw(token_ids())
    if model is Refused:
        return
    mask = None
    if is_valid(ids):
        mask = data.draw(masks(len(ids), options["num_heads"], ids.shape[1], ids.shape[1]))
    full = assert_same_outcome(model, lambda model: model(ids, mask=mask))
    if full is Refused or mask is not None or not is_valid(ids):
        return
    for row in range(len(ids)):
        assert_equal(model(ids[row : row + 1]), full[row : row + 1])
    if not model.config.causal:
        return
    if model.config.padding_id is not None and np.any(ids == model.config.padding_id):
        return
    cache, start = model.init_cache(len(ids)), data.draw(st.integers(1, ids.shape[1]))
    for stop in range(start, ids.shape[1] + 1):
        part = ids[:, :start] if stop == start else ids[:, stop - 1 : stop]
        assert_equal(model.decode_step(part, cache), full[:, stop - 1])


@given(data=st.data())
def test_transformer(data):
    options, layers = data.draw(model_options())
    options |= {"pad_id": data.draw(st.sampled_from([0, 0, None, 1, 2]))}
    options |= {"share_embeddings": data.draw(st.booleans()), "length_encoding": data.draw(st.booleans())}
    options |= {"copy": data.draw(st.sampled_from([False, False, True]))}
    options |= {"share_relative_bias": options["positions"] != "relative" or data.draw(st.booleans())}
    options |= {"decoder_norm_before_positions": options["embedding_norm"] and data.draw(st.booleans())}
    options |= {"num_encoder_layers": layers, "num_decoder_layers": data.draw(st.sampled_from([layers, 1, 1, 0]))}
    model = outcome(lambda: xf.Transformer(xf.TransformerConfig(**VOCABULARIES, **options)))
    source, target = data.draw(token_ids()), data.draw(token_ids() | st.none())
    if model is Refused:
        return
    if is_valid(source) and is_valid(target) and data.draw(st.booleans()):
        target = np.resize(target, (len(source), target.shape[1]))
    mask = data.draw(masks(len(source), 1, 1, source.shape[1])) if is_valid(source) else None
    full = assert_same_outcome(model, lambda model: model(source, target, source_mask=mask))
    assert_same_outcome(model, lambda model: model.encode(source, source_mask=mask))
    outcome(lambda: model.cross_attention_weights(source, target, source_mask=mask))
    if full is Refused or mask is not None or not is_valid(source) or not is_valid(target):
        return
    for row in range(len(source)):
        assert_equal(model(source[row : row + 1], target[row : row + 1]), full[row : row + 1])
    assert_equal(model.decode(target, model.encode(source), source=source), full)
    if model.config.padding_id is not None and np.any(target == model.config.padding_id):
        return
    lengths = [target.shape[1]] * len(source) if model.config.length_encoding else None
    cache = model.prefill(source, lengths=lengths)
    for stop in range(1, target.shape[1] + 1):
        assert_equal(model.decode_step(target[:, stop - 1 : stop], cache), full[:, stop - 1])


@given(data=st.data())
def test_encoder(data):
    options, layers = data.draw(model_options())
    options |= {"num_token_types": data.draw(st.sampled_from([0, 0, 2])), "num_labels": data.draw(st.integers(0, 3))}
    problem_types = ("single_label_classification", "multi_label_classification", "regression")
    options |= {"problem_type": data.draw(st.sampled_from(problem_types))}
    options |= {"pooler": data.draw(st.sampled_from(["none", "tanh", "relu"])), "masked_lm": data.draw(st.booleans())}
    options |= {name: data.draw(st.booleans()) for name in ("pooler_norm", "head_bias", "first_norm", "share_layers")}
    options |= {"pooling": data.draw(st.sampled_from(["cls", "mean"])), "relative_bias": data.draw(st.booleans())}
    options |= {"embedding_dim": data.draw(st.sampled_from([None, None, 3]))}
    options |= {"convolution_size": data.draw(st.sampled_from([0, 0, 1, 2, 3]))}
    if data.draw(st.booleans()):
        options["positions"] = "disentangled"
    model = outcome(lambda: xf.Encoder(xf.EncoderConfig(vocab_size=VOCABULARY, num_layers=layers, **options)))
    ids = data.draw(token_ids())
    if model is Refused:
        return
    types = data.draw(st.none() | token_ids())
    mask = None
    if is_valid(ids):
        mask = data.draw(masks(len(ids), 1, 1, ids.shape[1]))
        if types is not None and data.draw(st.booleans()):
            types = np.resize(types, ids.shape) % 2 if is_valid(types) else types
    full = assert_same_outcome(model, lambda model: model(ids, mask=mask, token_types=types))
    if full is Refused:
        return
    assert_same_outcome(model, lambda model: model.class_logits(full))
    assert_same_outcome(model, lambda model: model.masked_lm_logits(full))
    if is_valid(ids) and mask is None and types is None:
        for row in range(len(ids)):
            assert_equal(model(ids[row : row + 1]), full[row : row + 1])


# --- Generation -------------------------------------------------------------------------------------------------------

NUMBERS = [None, True, False, 0, 1, 2, 3, 5, -1, 0.0, 0.5, 1.5, -0.5, float("nan"), float("inf"), 10**9, 10**30]
NUMBERS += ["1", []]
VALID = {
    "num_beams": [1, 2, 3], "num_return_sequences": [1, 2], "num_beam_groups": [1, 2],
    "diversity_penalty": [None, 0.5], "keep_greedy": [True, False], "length_penalty": [0.0, 1.0],
    "length_penalty_base": ["wu", "length"], "coverage_penalty": [0.0, 0.2], "min_new_tokens": [0, 1, 3],
    "max_new_tokens": [1, 2, 5], "min_length_ratio": [0.0, 0.5], "max_length_ratio": [None, 0.5, 2.0],
    "no_repeat_ngram_size": [0, 1, 2, 100], "repetition_penalty": [1.0, 2.0, 0.5],
    "suppress_tokens": [(), (3,), (3, 4, 5, 6, 7, 8), [3]], "begin_suppress_tokens": [(), (2,), (3, 4)],
    "stop_token_ids": [(), (4,), (0,), (4, 5)], "do_sample": [None, True, False],
    "temperature": [None, 0.0, 0.5, 1000.0], "top_k": [None, 0, 1, 3, 100], "top_p": [None, 0.0, 0.5, 1.0],
    "min_p": [None, 0.0, 0.1, 1.0],
}  # fmt: skip
IDS = [[3], [], [3, 4], [3, 4, 5, 3, 4, 5], [9], [-1], ["a"], [None], [1.5], [[3]], 3, None, "ab", [0], [2, 2]]


@st.composite
def generation_options(draw):
    names = draw(st.lists(st.sampled_from(sorted(VALID)), max_size=5, unique=True))
    options = {name: draw(st.sampled_from(VALID[name])) for name in names}
    options.setdefault("max_new_tokens", 4)
    if draw(st.integers(0, 4)) == 0:
        options[draw(st.sampled_from(sorted(VALID)))] = draw(st.sampled_from(NUMBERS))
    return options


def small_model(cls, config, **options):
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 8, "dropout": 0.0}
    return cls(config(**sizes, **options))


LANGUAGE_MODELS = [
    small_model(xf.LanguageModel, xf.LanguageModelConfig, vocab_size=VOCABULARY, num_layers=1, **options)
    for options in (
        {}, {"positions": "learned", "max_positions": 7}, {"positions": "rotary", "window": 2},
        {"pad_id": None, "bos_id": None, "eos_id": None}, {"pad_id": None, "eos_id": 1, "positions": "alibi"},
    )
]  # fmt: skip
LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 1}
VOCABULARIES = {"source_vocab_size": VOCABULARY, "target_vocab_size": VOCABULARY}
TRANSFORMERS = [
    small_model(xf.Transformer, xf.TransformerConfig, **VOCABULARIES, **LAYERS, **options)
    for options in (
        {}, {"positions": "learned", "max_positions": 6}, {"length_encoding": True},
        {"share_embeddings": True, "copy": True}, {"pad_id": None, "positions": "relative"},
    )
]  # fmt: skip


def assert_hypotheses(results, count, options):
    assert len(results) == count
    for row in results:
        assert 0 < len(row) <= options.get("num_return_sequences", 1)
        assert all(isinstance(token, int) and 0 <= token < VOCABULARY for each in row for token in each.tokens)
        assert not any(np.isnan(each.score) for each in row)


def assert_single_results(results, generate, inputs):
    """Compare with the results of each input alone; equal scores may change the order."""
    for index, row in enumerate(results):
        if not len(inputs[index]):  # padded in a batch, and refused alone
            continue
        (alone,) = generate([inputs[index]], index)
        np.testing.assert_allclose([each.score for each in alone], [each.score for each in row], atol=1e-4)


@given(data=st.data())
def test_generate_with_a_language_model(data):
    model, options = data.draw(st.sampled_from(LANGUAGE_MODELS)), data.draw(generation_options())
    prompts = data.draw(
        st.lists(st.sampled_from(IDS), max_size=3) | st.sampled_from([None, "ab", 3, np.ones((2, 3), int)])
    )
    extra = {}
    if data.draw(st.integers(0, 4)) == 0:
        name = data.draw(st.sampled_from(["prefix", "target_lengths", "indices", "sequence_bias", "attention_mask"]))
        extra[name] = data.draw(st.sampled_from([[[3]], [[[[3]]]], [3], 3, "ab", [[]], [None], [-1], [["a"]]]))
    draft = data.draw(st.sampled_from([*LANGUAGE_MODELS, *TRANSFORMERS[:1], None, 3, "x"]))
    assisted = outcome(lambda: xf.generate(model, prompts, rng=xf.Rng(0), draft_model=draft, **options, **extra))
    results = outcome(lambda: xf.generate(model, prompts, rng=xf.Rng(0), **options, **extra))
    if results is Refused:
        return
    assert_hypotheses(results, len(prompts), options)
    if assisted is not Refused:  # the draft model changes no output
        for row, other in zip(results, assisted, strict=True):
            np.testing.assert_allclose([each.score for each in other], [each.score for each in row], atol=1e-4)
    if not extra:
        assert_single_results(
            results, lambda rows, index: xf.generate(model, rows, rng=xf.Rng(0), indices=[index], **options), prompts
        )
    streamed = outcome(lambda: list(xf.stream(model, prompts, rng=xf.Rng(0), **options, **extra)))
    if streamed is not Refused and len(prompts):
        for row, column in zip(results, zip(*streamed, strict=True), strict=True):
            assert list(row[0].tokens) == [
                token for tokens in column for token in tokens if token != model.config.eos_id
            ]


@given(data=st.data())
def test_generate_with_a_transformer(data):
    model, options = data.draw(st.sampled_from(TRANSFORMERS)), data.draw(generation_options())
    sources = data.draw(
        st.lists(st.sampled_from(IDS), max_size=3) | st.sampled_from([None, "ab", 3, np.ones((2, 3), int)])
    )
    extra = {}
    if model.config.length_encoding and data.draw(st.integers(0, 4)):
        extra["target_lengths"] = [3] * (len(sources) if hasattr(sources, "__len__") else 1)
    if data.draw(st.integers(0, 3)) == 0:
        names = ["prefix", "target_lengths", "indices", "sequence_bias", "attention_mask", "length_condition"]
        values = [[[3]], [[[[3]]]], [3], 3, "ab", [[]], [None], [-1], [["a"]], [10**9], [[3], [4, 5]], [2.5], [0, 0]]
        extra[data.draw(st.sampled_from(names))] = data.draw(st.sampled_from(values))
    results = outcome(lambda: xf.generate(model, sources, rng=xf.Rng(0), **options, **extra))
    if results is Refused:
        return
    assert_hypotheses(results, len(sources), options)
    if not extra:
        assert_single_results(
            results, lambda rows, index: xf.generate(model, rows, rng=xf.Rng(0), indices=[index], **options), sources
        )


# --- Texts ------------------------------------------------------------------------------------------------------------

PIECES = [
    "a", "b", "ein Satz", "Zwei Sätze.", " ", "  ", "\t", "\u2028", "\u2029", "\x85", "\0", "\ufeff", "\r", "\r\n",
    "\n", "e\u0301", "\u0301" * 5, "\u200b", "\u200d", "\ud800", "\udcff", "日本", "👩‍👩‍👧", "<s>", "</s>", "<pad>",
    "<unk>", "<sep>", "▁", "\x1f\x1e\x1c\x1d", "\x0b\x0c", "a" * 300, "\u202e", "İ", "ﬁ", "\U0010ffff", "-1",
    "{{", "{%",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=5).map("".join) | st.text(max_size=8)
NOT_TEXTS = [None, 1, b"a", ["a"], 1.5]


def tokenizers():
    lines = ["ein Satz", "Zwei Sätze.", "a b", "日本", "<s> -1", "\t\n", "\u2028e\u0301"] * 3
    for model in ("bpe", "words", "characters"):
        for separator in (False, True):
            yield xf.tokenizers.Tokenizer.train(lines, 60, model=model, separator=separator, lowercase=separator)


TOKENIZERS = list(tokenizers())
UNK = 3


@given(data=st.data())
def test_tokenizers(data):
    tokenizer = data.draw(st.sampled_from(TOKENIZERS))
    line = data.draw(texts)
    ids = outcome(lambda: tokenizer.encode(line))
    if ids is not Refused:
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        text = tokenizer.decode(ids)
        if UNK not in ids:
            expected = tokenizer.normalize(line).replace("▁", " ")
            assert "".join(text.replace("▁", " ").split()) == "".join(expected.split())
        assert tokenizer.encode_batch([line, "a"]) == [ids, tokenizer.encode("a")]
    ids = outcome(lambda: tokenizer.encode_text(line))
    if ids is not Refused and tokenizer.model == "characters" and UNK not in ids:
        assert tokenizer.decode(ids) == tokenizer.normalize(line)
    outcome(lambda: tokenizer.phrase_ids(line))
    outcome(lambda: tokenizer.normalize(line))
    for odd in (data.draw(st.sampled_from(NOT_TEXTS)), [line], [[line, line]], [[]], [None]):
        outcome(lambda odd=odd: tokenizer.encode(odd))
        outcome(lambda odd=odd: tokenizer.encode_batch(odd))
        outcome(lambda odd=odd: tokenizer.encode_documents(odd))
        outcome(lambda odd=odd: tokenizer.encode_text(odd))
        outcome(lambda odd=odd: tokenizer.phrase_ids(odd))
        outcome(lambda odd=odd: tokenizer.normalize(odd))
        outcome(lambda odd=odd: xf.tokenizers.Tokenizer.train(odd, 30))
    for odd in (*IDS, [10**30], np.asarray([3, 4]), np.asarray([3.0])):
        outcome(lambda odd=odd: tokenizer.decode(odd))
        outcome(lambda odd=odd: tokenizer.decode_batch([odd]))
        outcome(lambda odd=odd: tokenizer.tokens(odd))


@functools.cache
def translator(index):
    tokenizer = TOKENIZERS[index]
    sizes = {"source_vocab_size": tokenizer.vocab_size, "target_vocab_size": tokenizer.vocab_size}
    model = small_model(xf.Transformer, xf.TransformerConfig, **sizes, **LAYERS)
    return xf.Translator(model, xf.Tokenizers(tokenizer, tokenizer))


@functools.cache
def text_generator(index):
    tokenizer = TOKENIZERS[index]
    options = {"vocab_size": tokenizer.vocab_size, "num_layers": 1}
    return xf.TextGenerator(
        small_model(xf.LanguageModel, xf.LanguageModelConfig, **options), tokenizer, context_length=8
    )


PHRASES = [None, ["a"], [["a"], ["b"]], "a", [""], [None], [["\ud800"]], ["日本"], ["unbekannt"], [[]], 3]


@given(data=st.data())
def test_translators(data):
    pipeline, options = translator(data.draw(st.integers(0, len(TOKENIZERS) - 1))), data.draw(generation_options())
    lines = data.draw(st.lists(texts, max_size=3) | st.sampled_from(NOT_TEXTS) | st.lists(st.sampled_from(NOT_TEXTS)))
    if data.draw(st.integers(0, 2)) == 0:
        values = {
            "prefix": [None, "a", ["a", "b"], "", 3, ["a"], "\ud800", "unbekannt", [None]], "sequence_bias": PHRASES,
            "target_length": [None, 3, 0, -1, [3], [3, 4], "3", 2.5, 10**9, [None], True],
            "length_unit": ["words", "tokens", "x", None], "align": [True, False, "x"],
            "seed": [0, -1, 2**70, None, 1.5, "x"], "batch_tokens": [1, 0, -1, 10**9, "x", None, 2.5],
            "max_source_length": [1, 0, -1, "x", None], "first_index": [0, 5],
        }  # fmt: skip
        name = data.draw(st.sampled_from(sorted(values)))
        options[name] = data.draw(st.sampled_from(values[name]))
    outputs = outcome(lambda: pipeline.outputs(lines, **options))
    if outputs is Refused:
        return
    assert len(outputs) == len(lines)
    for line, row in zip(lines, outputs, strict=True):
        assert len(row) <= options.get("num_return_sequences", 1)
        assert line.strip() or not row
        for each in row:
            assert isinstance(each.text, str)
            each.text.encode()


@given(data=st.data())
def test_text_generators(data):
    pipeline, options = text_generator(data.draw(st.integers(0, len(TOKENIZERS) - 1))), data.draw(generation_options())
    prompt = texts | st.sampled_from(IDS) | st.sampled_from([{"role": "user"}, [{"role": "user", "content": "a"}]])
    prompts = data.draw(st.lists(prompt, max_size=3) | st.sampled_from(NOT_TEXTS) | prompt)
    if data.draw(st.integers(0, 2)) == 0:
        values = {
            "sequence_bias": PHRASES,
            "seed": [0, -1, 2**70, None, 1.5, "x"],
            "batch_tokens": [1, 0, -1, 10**9, "x", None, 2.5],
            "max_new_tokens": [1, 20],
        }
        name = data.draw(st.sampled_from(sorted(values)))
        options[name] = data.draw(st.sampled_from(values[name]))
    outputs = outcome(lambda: pipeline.outputs(prompts, **options))
    if outputs is Refused:
        return
    assert len(outputs) == len(prompts)
    for index, row in enumerate(outputs):
        assert 0 < len(row) <= options.get("num_return_sequences", 1)
        if index == 0 and "batch_tokens" not in options:
            text = outcome(lambda: "".join(pipeline.stream(prompts[0], **options)))
            assert text is Refused or text == pipeline([prompts[0]], **options)[0]


# --- Activations and analyses -----------------------------------------------------------------------------------------

NAMES = ["*", "*residual_out", "logits", "*.0.self_attention.weights", "*cross_attention*", "*.output", "states"]
NAMES += ["", "x", "[", "layers.9.residual_out", "*\n", None, 3, [], ["*", "x"], ["logits", "*.hidden"]]
CHANGES = [lambda x: x, lambda x: x, lambda x: 0 * x, lambda x: x * np.nan, lambda x: None, lambda x: x[..., :1]]
CHANGES += [
    lambda x: x.astype("float64"), lambda x: x.tolist(), np.zeros(3), np.zeros((1, 3, 8), "float32"), 3, "x", None,
]  # fmt: skip


@given(data=st.data())
def test_activations(data):
    model, ids = data.draw(st.sampled_from(LANGUAGE_MODELS + TRANSFORMERS)), data.draw(token_ids())
    inputs = [ids] if isinstance(model, xf.LanguageModel) else [ids, ids]
    names, changed = (data.draw(st.sampled_from(NAMES)) for _ in range(2))
    change = data.draw(st.sampled_from(CHANGES))
    before = outcome(lambda: model(*inputs))

    def call():
        interventions = {changed: change} if isinstance(changed, str) else changed
        with xf.intervene(model, interventions), xf.record(model, names, every_call=data.draw(st.booleans())) as found:
            return model(*inputs), found

    result, after = outcome(call), outcome(lambda: model(*inputs))
    assert (after is Refused) == (before is Refused)
    if result is not Refused:
        assert result[1]
        np.testing.assert_array_equal(after, before)
        if change is CHANGES[0] or change is CHANGES[1]:
            assert_equal(result[0], before)


# --- Configurations ---------------------------------------------------------------------------------------------------

ODD = [
    None, True, False, 0, 1, -1, 2, 2.5, 1.0, 10**30, 10**400, 1e308, float("nan"), float("inf"), -float("inf"), "",
    "1", "x", "true", [], [1], ["a"], {}, {"a": 1}, (), b"1", 1j, np.int64(2), np.float32(0.5), np.float64("nan"),
    np.True_, np.asarray(2), np.asarray([1, 2]), np.asarray(0.5), np.str_("x"), np.float16(1), {1}, object, "\n",
    "a\nb", "\ud800", [None], [[1]], ["sliding_attention"], "sliding_attention", {"rope_type": "yarn"},
    {"rope_type": 3}, {"factor": "x"}, {"rope_type": "llama3"}, {"rope_type": "linear", "factor": 0},
    {"rope_type": "dynamic", "factor": np.nan},
]  # fmt: skip
REQUIRED = {
    xf.LanguageModelConfig: {"vocab_size": VOCABULARY},
    xf.EncoderConfig: {"vocab_size": VOCABULARY},
    xf.TransformerConfig: VOCABULARIES,
    xf.SpeechTransformerConfig: {"target_vocab_size": VOCABULARY},
    xf.ImageEncoderConfig: {},
}
MODELS = {xf.LanguageModelConfig: xf.LanguageModel, xf.EncoderConfig: xf.Encoder, xf.TransformerConfig: xf.Transformer}
SMALL = {"d_model": 8, "num_heads": 2, "d_ff": 8}


def subclasses(cls):
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


CONFIGS = sorted(
    {
        each
        for each in subclasses(Config)
        if not each.__name__.startswith("_") and each.__module__.startswith("xformer.")
    },
    key=lambda each: each.__qualname__,
)


@given(data=st.data())
def test_configurations(data):
    cls = data.draw(st.sampled_from(CONFIGS) | st.sampled_from(sorted(MODELS, key=str)))
    names = [field.name for field in dataclasses.fields(cls)]
    values = dict(REQUIRED.get(cls, {}))
    if cls in MODELS:
        values |= SMALL | dict.fromkeys([name for name in names if name.startswith("num_") and "layers" in name], 1)
    changed = data.draw(st.lists(st.sampled_from([*names, "x", ""]), max_size=3))
    values |= {name: copy.deepcopy(data.draw(st.sampled_from(ODD))) for name in changed}
    source = data.draw(st.sampled_from([values] * 9 + [None, 3, [values], "x"]))
    config = outcome(lambda: cls.from_dict(source))
    if config is Refused:
        return
    for name, value in values.items():
        own = getattr(config, name)
        assert own == value or list(own) == list(np.atleast_1d(np.asarray(value, dtype=object)))
        assert isinstance(own, type(None) | bool | int | float | str | tuple | list | dict | frozenset)
    json.dumps(config.to_dict())
    assert cls.from_dict(config.to_dict()) == config
    if cls in MODELS:
        huge = [value for value in values.values() if isinstance(value, int | float) and value > 10**6]
        model = Refused if huge else outcome(lambda: MODELS[cls](config))
        if model is not Refused:
            ids = np.ones((1, 3), int)
            outcome(lambda: model(ids, ids) if cls is xf.TransformerConfig and model.decoder else model(ids))
