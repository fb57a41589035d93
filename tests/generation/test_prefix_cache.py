"""A prompt that is partly cached gives the bits of a prompt that is not."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.reference import for_each, raises_line
from xformer.errors import ConfigError
from xformer.generation import PrefixCache, generate
from xformer.models import LanguageModel, LanguageModelConfig
from xformer.models.config import POSITIONS
from xformer.random import Rng

SYSTEM = [3 + (7 * number) % 20 for number in range(150)]
SETTINGS = [{}, {"num_beams": 3}, {"temperature": 1.0, "rng": Rng(1), "num_return_sequences": 2}]


def new_model(**settings):
    sizes = {"vocab_size": 23, "d_model": 32, "num_heads": 4, "d_ff": 64, "num_layers": 2, "max_positions": 512}
    return LanguageModel(LanguageModelConfig(**sizes, **settings), dtype=settings.pop("dtype", None))


@pytest.fixture
def lengths(monkeypatch):
    """Numbers of tokens that enter the model in each call with more than one."""
    seen, step = [], LanguageModel.decode_step

    def decode_step(self, tokens, cache, **options):
        seen.extend([tokens.shape[1]] if tokens.shape[1] > 1 else [])
        return step(self, tokens, cache, **options)

    monkeypatch.setattr(LanguageModel, "decode_step", decode_step)
    return seen


@for_each("settings", SETTINGS)
@for_each("positions, window", [*((each, None) for each in POSITIONS), ("rotary", 5)])
def test_cached_prompts_have_the_same_bits(positions, window, settings, lengths):
    lengths.clear()
    model = new_model(positions=positions, window=window)
    options = {"max_new_tokens": 6, **settings}
    questions = [[4, 5, 6], [7] * 70, [8]]
    cache = PrefixCache()
    found = [generate(model, [[*SYSTEM, *each]], prefix_cache=cache, **options) for each in questions]
    assert lengths == [64, 64, 25, 64, 28, 23]  # the system prompt once
    again = [generate(model, [[*SYSTEM, *each]], prefix_cache=cache, **options) for each in questions]
    cold = [generate(model, [[*SYSTEM, *each]], prefix_cache=PrefixCache(), **options) for each in questions]
    assert found == again == cold
    for outputs, each in zip(found, questions, strict=True):
        plain = generate(model, [[*SYSTEM, *each]], **options)
        assert [x.tokens for x in outputs[0]] == [x.tokens for x in plain[0]]
        np.testing.assert_allclose([x.score for x in outputs[0]], [x.score for x in plain[0]], atol=1e-4)


def test_on_any_library(xp):
    model, cache = new_model().to(xp), PrefixCache()
    first, second = (generate(model, [SYSTEM[:70]], max_new_tokens=2, prefix_cache=cache) for _ in range(2))
    assert first == second


def test_the_memory_is_bounded_and_the_latest_prompts_stay(lengths):
    model = new_model()
    block = 2 * 2 * 64 * 32 * 4  # layers, keys and values, tokens, features, bytes
    cache = PrefixCache(max_bytes=3 * block)
    prompts = [[3 + number] * 129 for number in range(4)]
    for prompt in prompts:
        generate(model, [prompt], max_new_tokens=1, prefix_cache=cache)
        assert cache.num_bytes <= 3 * block
    lengths.clear()
    generate(model, [prompts[3]], max_new_tokens=1, prefix_cache=cache)
    assert lengths == []
    generate(model, [prompts[2]], max_new_tokens=1, prefix_cache=cache)
    assert lengths == [64]  # its second block was dropped
    lengths.clear()
    generate(model, [prompts[0]], max_new_tokens=1, prefix_cache=cache)
    assert lengths == [64, 64]
    cache.clear()
    assert cache.num_bytes == 0


def test_another_model_does_not_get_the_keys_of_the_first():
    cache = PrefixCache()
    for seed in (0, 1):
        model = LanguageModel(new_model().config, seed=seed)
        assert generate(model, [SYSTEM], prefix_cache=cache, max_new_tokens=5) == generate(
            model, [SYSTEM], prefix_cache=PrefixCache(), max_new_tokens=5
        )
    assert copy.deepcopy(cache).num_bytes == 0


def test_threads_share_a_cache():
    model, cache = new_model(), PrefixCache()
    prompts = [[*SYSTEM, *[3 + number % 7] * (1 + number)] for number in range(12)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: generate(model, [prompt], max_new_tokens=5, prefix_cache=cache), prompts))
    for outputs, prompt in zip(found, prompts, strict=True):
        assert outputs == generate(model, [prompt], max_new_tokens=5, prefix_cache=PrefixCache())


def test_longrope_uses_the_cache_for_short_texts_only(lengths):
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [5.0] * 4,
        "original_max_position_embeddings": 140,
        "factor": 4.0,
    }
    model, cache = new_model(positions="rotary", rope_scaling=scaling), PrefixCache()
    for prompt, expected in ((SYSTEM[:130], [64, 64, 2]), (SYSTEM[:130], [2]), (SYSTEM, [150])):
        lengths.clear()
        found = generate(model, [prompt], max_new_tokens=20, prefix_cache=cache)
        assert lengths == expected
        assert found[0][0].tokens == generate(model, [prompt], max_new_tokens=20)[0][0].tokens


def test_wrong_caches_are_refused():
    with raises_line(ConfigError, "prefix_cache is True; expected a PrefixCache"):
        generate(new_model(), [SYSTEM], prefix_cache=True)
    with raises_line(ConfigError, "max_bytes is 0; expected an integer of at least 1"):
        PrefixCache(0)
