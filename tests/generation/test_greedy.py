import math

import numpy as np
import pytest

from tests.conftest import library_or_skip
from xformer.errors import ConfigError, DataError
from xformer.generation import DecodingCache, greedy
from xformer.models import Transformer, TransformerConfig
from xformer.namespace import to_host
from xformer.tree import map_arrays, replace

CONFIG = TransformerConfig(
    source_vocab_size=13,
    target_vocab_size=17,
    d_model=16,
    num_heads=4,
    d_ff=24,
    num_encoder_layers=2,
    num_decoder_layers=2,
)
SOURCES = [[4, 5, 6, 7, 2], [8, 2], [9, 10, 11, 2], [5, 5, 2], [12, 11, 10, 9, 8, 7, 6, 2]]


@pytest.fixture(scope="module")
def model():
    """A model whose sentences end after different numbers of tokens, some not at all."""
    model = Transformer(CONFIG, xp=np, seed=24, dtype="float64")
    return map_arrays(lambda array: array * 3.0 if array.ndim == 2 else array, model)


def padded(sources):
    longest = max(map(len, sources))
    return [[*source, *[0] * (longest - len(source))] for source in sources]


def greedy_without_cache(model, source, max_length):
    """The definition: at each step, all of the target so far goes through the decoder."""
    target = [1]
    for _ in range(max_length):
        logits = model([source], [target])[0, -1]
        logits[[0, 1]] = -math.inf
        best = int(logits.argmax())
        if best == 2:
            break
        target.append(best)
    return target[1:]


def test_it_is_what_the_definition_says(model):
    expected = [greedy_without_cache(model, source, 12) for source in SOURCES]
    assert greedy(model, padded(SOURCES), max_length=12) == expected
    assert len({len(row) for row in expected}) > 2, "the sentences should end at different times"


def test_a_batch_gives_what_single_sentences_give(model):
    single = [greedy(model, [source], max_length=12)[0] for source in SOURCES]
    assert greedy(model, padded(SOURCES), max_length=12) == single
    wider = [[*row, 0, 0, 0] for row in padded(SOURCES)]
    assert greedy(model, wider, max_length=12) == single


@pytest.mark.parametrize("library", ["torch", "jax", "array_api_strict", "cupy"])
def test_every_library_decodes_alike(model, library):
    xp = library_or_skip(library)
    assert greedy(model.to(xp), padded(SOURCES), max_length=8) == greedy(model, padded(SOURCES), max_length=8)


def test_it_needs_no_boolean_indexing_and_no_data_dependent_shapes(model):
    xp = library_or_skip("array_api_strict")
    with xp.ArrayAPIStrictFlags(boolean_indexing=False, data_dependent_shapes=False):
        assert greedy(model.to(xp), padded(SOURCES), max_length=8) == greedy(model, padded(SOURCES), max_length=8)


def test_finished_sentences_leave_the_batch(model, monkeypatch):
    lengths = [len(row) for row in greedy(model, padded(SOURCES), max_length=12)]
    sizes = []
    decode = Transformer.decode
    monkeypatch.setattr(
        Transformer,
        "decode",
        lambda self, target, *rest, **options: sizes.append(len(target)) or decode(self, target, *rest, **options),
    )
    greedy(model, padded(SOURCES), max_length=12)
    steps = min(12, max(lengths) + 1)
    assert sizes == [sum(length >= step for length in lengths) for step in range(steps)]


def test_it_ends_at_the_limit(model):
    unlimited = greedy(model, padded(SOURCES), max_length=12)
    assert greedy(model, padded(SOURCES), max_length=2) == [row[:2] for row in unlimited]


def test_each_sentence_may_have_a_limit_of_its_own(model):
    unlimited = greedy(model, padded(SOURCES), max_length=12)
    limits = [3, 1, 5, 2, 12]
    expected = [row[:limit] for row, limit in zip(unlimited, limits, strict=True)]
    assert greedy(model, padded(SOURCES), max_length=limits) == expected
    with pytest.raises(ConfigError, match="got 2 limits for 5 sentences"):
        greedy(model, padded(SOURCES), max_length=[3, 3])


def test_padding_and_start_are_never_chosen(model):
    def eager(array):
        """A table in which padding and start are far more probable than all else."""
        table = array.copy()
        table[:2] = 100.0 * np.sign(table[2:3])
        return table

    arrays = {
        name: eager(array) if name == "target_embedding.weight" else array for name, array in model.named_parameters()
    }
    for row in greedy(replace(model, arrays), padded(SOURCES), max_length=6):
        assert not {0, 1, 2} & set(row)


def test_an_empty_batch(model):
    assert greedy(model, np.zeros((0, 3), dtype="int64")) == []


def test_bad_arguments(model):
    with pytest.raises(ConfigError, match="max_length is 0"):
        greedy(model, [[4, 2]], max_length=0)
    with pytest.raises(DataError, match="source ids range from 4 to 13"):
        greedy(model, [[4, 13]])


# --- The cache --------------------------------------------------------------------------------------------------------


def test_cached_logits_are_those_of_full_decoding(model):
    source = np.asarray(padded(SOURCES))
    target = np.random.default_rng(0).integers(3, 17, (len(SOURCES), 9))
    target[:, 0] = 1
    memory = model.encode(source)
    full = model.decode(target, memory, source=source)
    cache = DecodingCache(model)
    for step in range(target.shape[1]):
        logits = model.decode(target[:, step : step + 1], memory, source=source, cache=cache)
        np.testing.assert_allclose(logits[:, 0], full[:, step], rtol=0, atol=1e-10)


def test_several_tokens_may_come_at_once(model):
    source = np.asarray([SOURCES[0]])
    target = np.asarray([[1, 5, 9, 4, 16, 3]])
    memory = model.encode(source)
    full = model.decode(target, memory, source=source)
    cache = DecodingCache(model)
    for part in (slice(0, 3), slice(3, 4), slice(4, 6)):
        logits = model.decode(target[:, part], memory, source=source, cache=cache)
        np.testing.assert_allclose(logits, full[:, part], rtol=0, atol=1e-10)


def test_rows_of_a_cache_can_be_chosen(model):
    source = np.asarray(padded(SOURCES))
    memory = model.encode(source)
    cache = DecodingCache(model)
    first = np.ones((len(SOURCES), 1), dtype="int64")
    model.decode(first, memory, source=source, cache=cache)
    rows = np.asarray([3, 0, 0])
    cache.select(rows)
    second = np.asarray([[7], [8], [9]])
    logits = model.decode(second, memory[rows], source=source[rows], cache=cache)
    full = model.decode(np.concatenate([first[:3], second], axis=1), memory[rows], source=source[rows])
    np.testing.assert_allclose(logits[:, 0], full[:, 1], rtol=0, atol=1e-10)


def test_an_empty_cache_has_no_rows_to_choose(model):
    cache = DecodingCache(model)
    cache.select(np.asarray([0]))
    assert cache.layers[0].self_attention.key is None
    assert to_host(np.asarray(cache.length)) == 0
