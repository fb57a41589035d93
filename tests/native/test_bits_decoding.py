"""Reproducible inference: rows, padding, chunks, steps, searches, requests and threads change no bit of any model."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import xformer as xf
from xformer import native
from xformer.generation import PrefixCache
from xformer.generation.batch import GenerationBatch
from xformer.generation.engine import Engine
from xformer.generation.generate import searches_of
from xformer.models import base
from xformer.models.config import GATED, POSITIONS
from xformer.models.encoder import AttentionPooler
from xformer.ops.activations import ACTIVATIONS
from xformer.ops.blocks import BlockWeight
from xformer.ops.decoding import log_softmax
from xformer.threads import num_threads, set_num_threads
from xformer.tree import map_arrays, map_modules, with_fields

pytestmark = pytest.mark.usefixtures("reproducible")
VOCABULARY = 23
WEIGHTS = (
    "float32",
    "int8",
    "bfloat16",
    "packed",
    "packed int8",
    "blocks",
    "packed blocks",
    "lora",
    "dora",
    "lora int8",
)


@pytest.fixture(autouse=True)
def restored_threads(monkeypatch):
    monkeypatch.setattr("xformer.threads._requested", None)  # which is restored at the end
    before = num_threads()
    yield
    set_num_threads(before)


# --- Models and inputs ------------------------------------------------------------------------------------------------


def one_of(*values):
    return st.sampled_from(values)


def rarely(*values):
    """Half of the time None, the default of the option."""
    return st.none() | st.sampled_from(values)


ATTENTION = {
    "num_heads": one_of(1, 2, 4),
    "num_key_value_heads": rarely(1),
    "head_dim": one_of(2, 8, 10, 18),
    "window": rarely(1, 3, 8),
    "qk_norm": st.booleans(),
    "attention_softcap": rarely(2.0),
    "attention_sinks": st.booleans(),
}
NETWORK = {
    "d_model": one_of(8, 20, 48),
    "d_ff": one_of(12, 33, 64),
    "activation": one_of(*ACTIVATIONS, *GATED),
    "num_experts": rarely(2, 5),
    "norm": one_of("layer", "rms"),
    "norm_position": one_of("pre", "post", "sandwich"),
    "embedding_norm": st.booleans(),
}
LANGUAGE_MODEL = {
    **ATTENTION,
    **NETWORK,
    "positions": one_of(*POSITIONS),
    "tie_output": st.booleans(),
    "logits_softcap": rarely(3.0),
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "language model": (
        xf.LanguageModel,
        functools.partial(xf.LanguageModelConfig, vocab_size=VOCABULARY, num_layers=2),
        LANGUAGE_MODEL,
    ),
    "encoder-decoder": (
        xf.Transformer,
        functools.partial(
            xf.TransformerConfig,
            source_vocab_size=VOCABULARY,
            target_vocab_size=VOCABULARY,
            num_encoder_layers=1,
            num_decoder_layers=1,
            share_embeddings=True,
        ),
        {**LANGUAGE_MODEL, "copy": st.booleans()},
    ),
    "encoder": (
        xf.Encoder,
        functools.partial(xf.EncoderConfig, vocab_size=VOCABULARY, num_layers=2, num_labels=3),
        {
            **ATTENTION,
            **NETWORK,
            "positions": one_of(*POSITIONS, "disentangled"),
            "pooler": one_of("none", "tanh", "attention"),
            "num_token_types": one_of(0, 2),
            "masked_lm": st.booleans(),
            "convolution_size": rarely(3),
        },
    ),
}  # fmt: skip


@functools.lru_cache(maxsize=8)
def make(kind: str, weights: str, options: tuple[tuple[str, Any], ...]) -> Any:
    """Return a model with noise in all parameters, so that no bias is zero and no norm is one."""
    values = {name: value for name, value in options if value is not None}
    if values.get("positions") == "disentangled":
        values.pop("num_key_value_heads", None)
    if "blocks" in weights:
        values |= {"d_model": 64, "d_ff": 96, "head_dim": 16, "num_experts": 0}
    cls, config, _ = KINDS[kind]
    model, random = cls(config(**values, max_positions=256)), np.random.default_rng(0)
    if "int8" in weights or weights == "bfloat16":
        model = model.quantize(weights.split()[-1])
    if "lora" in weights or weights == "dora":
        model = xf.lora(model, rank=3, targets=("query", "value", "up"), use_dora=weights == "dora")

    def changed(x):
        is_changed = x.dtype == np.float32
        return (x + 0.2 * random.normal(size=x.shape)).astype(np.float32) if is_changed else x

    model = map_modules(blocks, model) if "blocks" in weights else map_arrays(changed, model)
    return model.pack(inputs="int8" if "blocks" in weights else None) if "packed" in weights else model


def blocks(layer):
    """Replace the weight of a linear map by random blocks of a GGUF file, Q8_0."""
    weight = getattr(layer, "weight", None)
    if type(layer).__name__ != "Linear" or weight.shape[0] % 32:
        return layer
    values = np.random.default_rng(1).integers(0, 256, (weight.shape[1], weight.shape[0] // 32, 34), dtype=np.uint8)
    values[..., :2] = np.asarray([0.002], np.float16).view(np.uint8)
    return with_fields(layer, weight=BlockWeight(values, True))


def models(kind):
    options = st.fixed_dictionaries(KINDS[kind][2]).map(lambda values: tuple(sorted(values.items())))
    return st.builds(make, st.just(kind), one_of(*WEIGHTS), options)


LENGTHS = st.integers(1, 12) | st.integers(1, 12) | st.integers(1, 40) | st.integers(60, 200)


def texts(lengths, seed):
    return [np.random.default_rng((seed, i)).integers(3, VOCABULARY, n).tolist() for i, n in enumerate(lengths)]


FEW = st.lists(LENGTHS, min_size=1, max_size=5)
MANY = st.integers(1, 32).map(lambda count: [1 + 7 * i % 13 for i in range(count)])
TEXTS = st.builds(texts, FEW | MANY, st.integers(0, 3))
THREADS = st.integers(1, 4)


def padded(rows, left=False):
    size = max(map(len, rows))
    return np.asarray([[0] * (size - len(row)) * left + row + [0] * (size - len(row)) * (not left) for row in rows])


def assert_bits(found, expected):
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def run(check, *strategies, examples):
    """Run a check on examples; the first one that fails is not shrunk, which may take long."""
    settings(max_examples=examples, deadline=None, phases=[Phase.generate])(given(*strategies)(check))()


def examples(count):
    return pytest.mark.parametrize("examples", [count])


# --- A row of a batch is the row alone --------------------------------------------------------------------------------


def results_of(model, rows, left, targets):
    """Return arrays for all rows, each with the texts whose tokens are its second axis; None for no such axis."""
    ids = padded(rows, left)
    if isinstance(model, xf.Transformer):
        weights = model.cross_attention_weights(ids, padded(targets))[0]
        largest = np.max(weights[:, :, 0, :], axis=-1)
        return [(model.encode(ids), rows), (model(ids, padded(targets)), targets), (largest, None)]
    states = model.states(ids) if isinstance(model, xf.LanguageModel) else model(ids)
    results = [(states, rows)]
    if isinstance(model, xf.LanguageModel):
        results.append((model(ids), rows))
    else:
        results += [(model.masked_lm_logits(states), rows)] if model.masked_lm is not None else []
        takes_first = not isinstance(model.pooler, AttentionPooler)  # the first column, which may be padding
        results += [] if left and takes_first else [(model.class_logits(states, mask=ids != 0), None)]
    return results


def check_rows(model, rows, left, threads):
    targets = [[1, *row[::-1]] for row in rows]
    set_num_threads(threads)
    together = results_of(model, rows, left, targets)
    set_num_threads(1)
    for i in {0, len(rows) // 2, len(rows) - 1}:
        alone = results_of(model, [rows[i]], left, [targets[i]])
        for (found, texts), (expected, _) in zip(together, alone, strict=True):
            found = found[i]
            if texts is not None:
                size = len(texts[i])
                found = found[-size:] if left and texts is rows else found[:size]
            assert_bits(found, expected[0])


@pytest.mark.parametrize("kind", KINDS)
@examples(15)
def test_a_row_is_the_row_alone(kind, examples):
    run(check_rows, models(kind), TEXTS, st.booleans(), THREADS, examples=examples)


# --- Chunks, steps and programs are a full pass -----------------------------------------------------------------------


def in_parts(model, row, cache, sizes, capacity):
    """Return the logits after each token of a row that enters a model in parts; with a capacity of fixed shape."""
    found, start, sizes = [], 0, itertools.cycle(sizes)
    while start < len(row):
        size = next(sizes)
        if start and capacity is not None and cache.capacity is None:
            cache = model.to_static(cache, len(row) + capacity)
        found.append(model.decode_step(np.asarray([row[start : start + size]]), cache, all_logits=True)[0])
        start += size
    return np.concatenate(found)


def check_parts(model, rows, sizes, capacity):
    row = rows[0]
    if isinstance(model, xf.LanguageModel):
        expected, cache = model([row])[0], model.init_cache(1)
    else:
        source, row = [row], [1, *rows[-1]]
        expected, cache = model(source, [row])[0], model.prefill(source)
    assert_bits(in_parts(model, row, cache, sizes, capacity), expected)


@pytest.mark.parametrize("kind", ["language model", "encoder-decoder"])
@examples(12)
def test_parts_are_the_whole(kind, examples):
    sizes = st.just([1]) | st.lists(one_of(1, 2, 3, 8, 17, 64), min_size=1, max_size=4)
    run(check_parts, models(kind), TEXTS, sizes, rarely(0, 1, 30), examples=examples)


def check_program(model, rows, left, threads):
    arguments = padded(rows, left), padded([[1, *row] for row in rows])
    arguments = arguments if isinstance(model, xf.Transformer) else arguments[:1]
    expected = model(*arguments)
    set_num_threads(threads)
    program = xf.jit(lambda model, *arguments: model(*arguments))
    for _ in range(2):
        assert_bits(program(model, *arguments), expected)


@pytest.mark.parametrize("kind", KINDS)
@examples(5)
def test_programs_are_calls(kind, examples):
    run(check_program, models(kind), TEXTS, st.booleans(), THREADS, examples=examples)


# --- Searches ---------------------------------------------------------------------------------------------------------

SEARCHES = st.fixed_dictionaries(
    {"max_new_tokens": one_of(3, 9, 20)},
    optional={"repetition_penalty": st.just(1.3)},
).flatmap(
    lambda options: one_of(
        {},
        {"num_beams": 3},
        {"num_beams": 2, "no_repeat_ngram_size": 2, "num_return_sequences": 2},
        {"do_sample": True, "top_p": 0.8},
        {"do_sample": True, "top_k": 5, "min_p": 0.01, "temperature": 0.7, "num_return_sequences": 3},
    ).map(lambda more: {**options, **more})
)


def hypotheses(rows):
    return [[(each.tokens, each.log_probability, each.score, each.finished) for each in row] for row in rows]


def generate(model, rows, first=0, **options):
    options = {"rng": xf.Rng(7), "indices": range(first, first + len(rows)), **options}
    return hypotheses(xf.generate(model, rows, **options))


def check_searches(model, rows, options, threads):
    set_num_threads(threads)
    together = generate(model, rows, **options)
    set_num_threads(1)
    for i in {0, len(rows) - 1}:
        assert generate(model, [rows[i]], first=i, **options) == [together[i]]


@pytest.mark.parametrize("kind", ["language model", "encoder-decoder"])
@examples(6)
def test_a_search_is_the_search_alone(kind, examples):
    run(check_searches, models(kind), TEXTS, SEARCHES, THREADS, examples=examples)


def check_requests(model, requests, order, pauses, threads):
    """Add requests to an engine in any order, some steps apart; searches leave it when they end."""
    set_num_threads(threads)
    engine, searches = Engine(is_shared=True), {}
    for i, pause in zip(order, itertools.cycle(pauses)):
        rows, options = requests[i % len(requests)]
        searches[i] = searches_of(GenerationBatch(model, rows, rng=xf.Rng(7), **options))
        engine.add(searches[i])
        for _ in range(pause):
            engine.step()
    while not engine.is_idle:
        engine.step()
    set_num_threads(1)
    for i, each in searches.items():
        rows, options = requests[i % len(requests)]
        assert hypotheses(row for search in each for row in search.result()) == generate(model, rows, **options)


@pytest.mark.parametrize("kind", ["language model", "encoder-decoder"])
@examples(3)
def test_a_request_is_the_request_alone(kind, examples):
    requests = st.lists(st.tuples(TEXTS.map(lambda rows: rows[:2]), SEARCHES), min_size=1, max_size=5)
    pauses = st.lists(st.integers(0, 5), min_size=1, max_size=4)
    run(check_requests, models(kind), requests, st.permutations(range(6)), pauses, THREADS, examples=examples)


DRAFT = make("language model", "float32", (("num_heads", 2), ("d_model", 8)))


def check_shortcuts(model, row, options, size):
    """Tokens that are proposed, and prefixes that are remembered, change nothing but the time."""
    expected = generate(model, [row], **options)
    for shortcut in ({"prompt_lookup_num_tokens": size}, {"draft_model": DRAFT, "num_draft_tokens": size}):
        assert generate(model, [row], **options, **shortcut) == expected
    cache = PrefixCache()
    for _ in range(2):
        assert generate(model, [row], **options, prefix_cache=cache) == expected


@examples(6)
def test_shortcuts_are_the_search(examples):
    rows = TEXTS.map(lambda rows: [token for row in rows for token in row][:200])
    options = one_of({"max_new_tokens": 12}, {"max_new_tokens": 12, "do_sample": True, "top_p": 0.8})
    run(check_shortcuts, models("language model"), rows, options, st.integers(1, 4), examples=examples)


def check_log_probabilities(model, row, threads):
    """The log-probability of a sampled text is that of the logits that a training step computes for it."""
    set_num_threads(threads)
    options = {"max_new_tokens": 15, "do_sample": True, "rng": xf.Rng(5)}
    ((text,),) = xf.generate(model, [row], **options)
    set_num_threads(1)
    rows = [*row, *text.tokens, *[2] * text.finished]
    logits = model([rows])[0, len(row) - 1 : -1].copy()
    logits[:, [0, 1]] = -np.inf  # padding and the start, which no text contains
    expected = log_softmax(logits)[np.arange(len(logits)), rows[len(row) :]]
    assert text.log_probability == sum(map(float, expected))


@examples(12)
def test_sampled_log_probabilities_are_those_of_training(examples):
    run(check_log_probabilities, models("language model"), TEXTS.map(lambda rows: rows[0]), THREADS, examples=examples)


# --- A break of each rule is noticed ----------------------------------------------------------------------------------

TEXT = [[*range(3, 20), 4, 9, 5], [7, 3]]


def model_with(kind="language model", weights="float32", **options):
    return make(kind, weights, tuple({"num_heads": 2, "d_model": 16, "d_ff": 32, **options}.items()))


def broken(change):
    """Return a `native.call` that changes the arrays of operations before it computes or after it has computed."""
    call = native.call

    def changed(name, arrays, *integers, **numbers):
        call(name, arrays, *integers, **numbers)
        change(name, arrays, *integers, **numbers)

    return changed


def blas_for_many_rows(name, arrays, *integers, **numbers):
    """Sum products of many rows in another order, as a BLAS library may."""
    if name == "matmul" and len(arrays[0]) > 9 and arrays[0].dtype == np.float32 and not any(integers):
        x, w, out, *rest = arrays
        half = len(w) // 2
        out[...] = x[:, half:] @ w[half:] + x[:, :half] @ w[:half]
        out += rest[0] if rest and rest[0] is not None else 0.0


def two_parts_of_keys(name, arrays, causal=False, **numbers):
    """Sum the values of a single query in two parts, as kernels for decoding may."""
    query, key, value, mask, bias, _, out, *_ = arrays if name == "attention" else [np.zeros((0, 0, 2, 0))] * 7
    if query.shape[2] == 1 and mask is None and bias is None and query.shape[1] == key.shape[1]:
        scores = numbers["n0"] * query @ key.mT
        weights, half = np.exp(scores - scores.max()), key.shape[2] // 2
        total = weights[..., half:] @ value[:, :, half:] + weights[..., :half] @ value[:, :, :half]
        out[...] = total / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(
    ("change", "check", "arguments"),
    [
        (blas_for_many_rows, check_rows, (TEXT, False, 1)),
        (blas_for_many_rows, check_parts, (TEXT, [1], None)),
        (blas_for_many_rows, check_searches, (TEXT, {"max_new_tokens": 9}, 1)),
        (blas_for_many_rows, check_log_probabilities, (TEXT[0], 1)),
        (two_parts_of_keys, check_parts, (TEXT, [1], None)),
    ],
)  # fmt: skip
def test_another_order_of_sums_is_noticed(monkeypatch, change, check, arguments):
    model = model_with()
    check(model, *arguments)
    monkeypatch.setattr(native, "call", broken(change))
    with pytest.raises(AssertionError):
        check(model, *arguments)


def test_angles_of_padding_are_noticed(monkeypatch):
    model = model_with(positions="rotary")
    check_rows(model, TEXT, True, 1)
    monkeypatch.setattr(base, "_begin_with_padding", lambda positions: False)
    with pytest.raises(AssertionError):
        check_rows(model, TEXT, True, 1)


def test_products_of_numpy_are_noticed(monkeypatch):
    """Limited scores need products of matrices outside of the layers."""
    model = model_with(attention_softcap=2.0)
    check_parts(model, TEXT, [1], None)
    for name in ("matmul", "operator_matmul"):
        monkeypatch.setitem(vars(xf.array_namespace(np.ones(1))), name, np.matmul)
    with pytest.raises(AssertionError):
        check_parts(model, TEXT, [1], None)


def test_a_cache_of_fixed_shape_keeps_its_last_token():
    """The memory of the first tokens has the order of a pass, (batch, length, heads, features)."""
    check_parts(model_with(positions="relative"), TEXT, [len(TEXT[0]) - 1], 0)
