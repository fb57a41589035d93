import numpy as np
import pytest

from tests.conftest import library_or_skip
from tests.generation import definitions
from tests.generation.definitions import SOURCES, lively_model, padded
from xformer.errors import ConfigError, DataError
from xformer.generation import greedy
from xformer.models import Transformer
from xformer.tree import replace


@pytest.fixture(scope="module")
def model():
    """A model whose sentences end after different numbers of tokens, some not at all."""
    return lively_model(12)


def test_it_is_what_the_definition_says(model):
    expected = [definitions.greedy(model, source, 12)[0] for source in SOURCES]
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
    limit = 3 if library == "jax" else 8  # jax compiles every length
    assert greedy(model.to(xp), padded(SOURCES), max_length=limit) == greedy(model, padded(SOURCES), max_length=limit)


def test_it_needs_no_boolean_indexing_and_no_data_dependent_shapes(model):
    xp = library_or_skip("array_api_strict")
    with xp.ArrayAPIStrictFlags(boolean_indexing=False, data_dependent_shapes=False):
        assert greedy(model.to(xp), padded(SOURCES), max_length=8) == greedy(model, padded(SOURCES), max_length=8)


def test_finished_sentences_leave_the_batch(model, monkeypatch):
    lengths = [len(row) for row in greedy(model, padded(SOURCES), max_length=12)]
    sizes = []
    step = Transformer.decode_step
    monkeypatch.setattr(
        Transformer, "decode_step", lambda self, tokens, cache: sizes.append(len(tokens)) or step(self, tokens, cache)
    )
    greedy(model, padded(SOURCES), max_length=12)
    # A sentence at the limit has one step more, which says whether it ends there.
    assert sizes == [sum(length >= step for length in lengths) for step in range(max(lengths) + 1)]


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
    """Not even where they are far more probable than all else."""
    eager = replace(model, {**dict(model.named_parameters()), "output_bias": np.where(np.arange(13) < 2, 100.0, 0.0)})
    for row in greedy(eager, padded(SOURCES), max_length=6):
        assert not {0, 1, 2} & set(row)


def test_an_empty_batch(model):
    assert greedy(model, np.zeros((0, 3), dtype="int64")) == []


def test_bad_arguments(model):
    with pytest.raises(ConfigError, match="max_length is 0"):
        greedy(model, [[4, 2]], max_length=0)
    with pytest.raises(DataError, match="source ids range from 4 to 13"):
        greedy(model, [[4, 13]])
