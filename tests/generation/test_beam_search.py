import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation import definitions
from tests.generation.definitions import SEEDS, SOURCES, Models, padded, rescored, varied_model
from tests.reference import for_each, without_jax
from xformer.backends import from_host
from xformer.families import load_pretrained
from xformer.generation import GenerationConfig, generate
from xformer.generation.beams import BeamGroup
from xformer.tree import replace

limited = settings(max_examples=8)
LIMIT = 8
sources = st.lists(st.lists(st.integers(3, 10), min_size=1, max_size=6), min_size=1, max_size=4)
alphas = st.sampled_from([0.0, 0.6, 1.0, 2.0])


@pytest.fixture(scope="module")
def models():
    """Models of which outputs end early, late and not at all."""
    return Models(varied_model(seed) for seed in SEEDS)


@pytest.fixture(scope="module")
def model(models):
    return models[0]


def beam(model, rows, size, **settings):
    settings = {"max_new_tokens": LIMIT, **settings}
    return generate(model, padded(rows), GenerationConfig(num_beams=size, **settings))


def pairs(hypotheses):
    return [(hypothesis.tokens, hypothesis.finished) for hypothesis in hypotheses]


# --- Against the definition -------------------------------------------------------------------------------------------


@limited
@given(seed=st.integers(0, 3), rows=sources, size=st.integers(2, 6), alpha=alphas, keep=st.booleans(), data=st.data())
def test_a_batch_with_a_cache_equals_the_definition(models, seed, rows, size, alpha, keep, data):
    num_return_sequences = data.draw(st.integers(1, size))
    found = beam(
        models[seed], rows, size, num_return_sequences=num_return_sequences, length_penalty=alpha, keep_greedy=keep
    )
    for row, hypotheses in zip(rows, found, strict=True):
        expected = definitions.beam(
            models[seed],
            row,
            size,
            limit=LIMIT,
            num_return_sequences=num_return_sequences,
            alpha=alpha,
            keep_greedy=keep,
        )
        assert [hypothesis.tokens for hypothesis in hypotheses] == [tokens for _, tokens in expected]
        np.testing.assert_allclose(
            [hypothesis.score for hypothesis in hypotheses], [score for score, _ in expected], atol=1e-9
        )


@limited
@given(seed=st.integers(0, 3), rows=sources, size=st.integers(2, 5), minimum=st.integers(0, 4),
       ngram=st.integers(0, 3), penalty=st.sampled_from([1.0, 1.3]))  # fmt: skip
def test_processors_work_within_beams(models, seed, rows, size, minimum, ngram, penalty):
    found = beam(
        models[seed], rows, size, min_new_tokens=minimum, no_repeat_ngram_size=ngram, repetition_penalty=penalty
    )
    for row, (hypothesis, *_) in zip(rows, found, strict=True):
        rules = {"minimum": minimum, "ngram": ngram, "penalty": penalty}
        (score, tokens), *_ = definitions.beam(models[seed], row, size, limit=LIMIT, **rules)
        assert hypothesis.tokens == tokens
        assert hypothesis.score == pytest.approx(score, abs=1e-9)
        assert not hypothesis.finished or len(tokens) >= minimum


@for_each("alpha", [0.0, 0.6])
@for_each("seed", SEEDS)
def test_a_wide_beam_finds_the_best_of_all_outputs(alpha, seed):
    model = varied_model(seed, target_vocab_size=6)
    limit = 3
    scored = sorted(
        (-total / definitions.lp(len(tokens) + 1, alpha), tokens)
        for tokens, total in definitions.every_output(model, SOURCES[0], limit, 6)
    )
    # At the last step 27 hypotheses have 4 continuations.
    found = beam(model, SOURCES[:1], 108, num_return_sequences=40, length_penalty=alpha, max_new_tokens=limit)[0]
    assert [hypothesis.tokens for hypothesis in found] == [tokens for _, tokens in scored]
    np.testing.assert_allclose([-hypothesis.score for hypothesis in found], [score for score, _ in scored], atol=1e-9)


# --- Properties -------------------------------------------------------------------------------------------------------


@limited
@given(seed=st.integers(0, 3), rows=sources, size=st.integers(2, 5), alpha=alphas,
       extra=st.integers(0, 3), data=st.data())  # fmt: skip
def test_the_batch_its_order_and_its_padding_change_nothing(models, seed, rows, size, alpha, extra, data):
    model = models[seed]
    options = GenerationConfig(num_beams=size, num_return_sequences=2, length_penalty=alpha, max_new_tokens=LIMIT)
    single = [generate(model, [row], options)[0] for row in rows]
    order = data.draw(st.permutations(range(len(rows))))
    for left in (False, True):
        together = generate(model, padded([rows[i] for i in order], left=left, extra=extra), options)
        assert [pairs(found) for found in together] == [pairs(single[i]) for i in order]


@limited
@given(seed=st.integers(0, 3), rows=sources, size=st.integers(2, 6), groups=st.sampled_from([1, 2]), alpha=alphas,
       beta=st.sampled_from([0.0, 0.3]), data=st.data())  # fmt: skip
def test_stopping_early_changes_nothing(models, seed, rows, size, groups, alpha, beta, data):
    size *= groups
    settings = {
        "num_return_sequences": data.draw(st.integers(1, size)),
        "length_penalty": alpha,
        "num_beam_groups": groups,
        "coverage_penalty": beta,
    }
    early = beam(models[seed], rows, size, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BeamGroup, "is_done", property(lambda group: not group.beams))
        late = beam(models[seed], rows, size, **settings)
    assert [pairs(found) for found in late] == [pairs(found) for found in early]
    for one, two in zip(late, early, strict=True):
        np.testing.assert_allclose([h.score for h in one], [h.score for h in two], atol=1e-9)


@limited
@given(seed=st.integers(0, 3), rows=sources, size=st.integers(2, 6), alpha=alphas, limit=st.integers(1, 9),
       beta=st.sampled_from([0.0, 0.3]), groups=st.sampled_from([1, 2]))  # fmt: skip
def test_a_beam_is_never_worse_than_greedy_search(models, seed, rows, size, alpha, limit, beta, groups):
    settings = {"length_penalty": alpha, "coverage_penalty": beta, "max_new_tokens": limit}
    plain = generate(models[seed], padded(rows), GenerationConfig(**settings))
    found = beam(models[seed], rows, size * groups, num_beam_groups=groups, **settings)
    for (expected,), (hypothesis,) in zip(plain, found, strict=True):
        assert (hypothesis.finished, hypothesis.score + 1e-9) >= (expected.finished, expected.score)


def test_without_keep_greedy_the_greedy_hypothesis_can_be_lost():
    """Two beams lose the only output that ends in time, which greedy search finds."""
    model, options = varied_model(28), GenerationConfig(max_new_tokens=6)
    ((expected,),) = generate(model, [SOURCES[3]], options)
    assert expected.finished
    assert not beam(model, [SOURCES[3]], 2, max_new_tokens=6, keep_greedy=False)[0][0].finished
    assert beam(model, [SOURCES[3]], 2, max_new_tokens=6)[0][0].tokens == expected.tokens


SCHEMES = {
    "sinusoidal": {"positions": "sinusoidal", "tie_output": True},
    "rotary": {"positions": "rotary", "num_heads": 4, "num_key_value_heads": 2},
    "alibi": {"positions": "alibi"},
    "relative": {"positions": "relative"},
    "window": {"positions": "none", "window": 3},
    "copy": {"share_embeddings": True, "source_vocab_size": 13, "copy": True},
}


@for_each("scheme", SCHEMES)
def test_every_scheme_of_positions_decodes_as_the_definition_says(scheme):
    model = varied_model(**SCHEMES[scheme])
    plain = [one[0].tokens for one in generate(model, padded(SOURCES, left=True), max_new_tokens=6)]
    found = beam(model, SOURCES, 3, max_new_tokens=6, num_return_sequences=2)
    left = generate(
        model, padded(SOURCES, left=True), GenerationConfig(num_beams=3, max_new_tokens=6, num_return_sequences=2)
    )
    assert [pairs(one) for one in left] == [pairs(one) for one in found]
    for row, hypotheses, tokens in zip(SOURCES, found, plain, strict=True):
        assert definitions.greedy(model, row, 6)[0] == tokens
        expected = definitions.beam(model, row, 3, limit=6, num_return_sequences=2)
        assert [hypothesis.tokens for hypothesis in hypotheses] == [tokens for _, tokens in expected]


# --- Groups -----------------------------------------------------------------------------------------------------------


@settings(max_examples=4)
@given(seed=st.integers(0, 3), rows=sources, shape=st.sampled_from([(4, 2), (6, 3), (6, 2), (4, 4)]),
       num_return_sequences=st.integers(1, 4), strength=st.sampled_from([0.2, 1.0, 5.0]),
       alpha=st.sampled_from([0.0, 1.0]))  # fmt: skip
def test_groups_equal_the_definition(models, seed, rows, shape, num_return_sequences, strength, alpha):
    size, groups = shape
    found = beam(
        models[seed], rows, size, num_beam_groups=groups, diversity_penalty=strength,
        num_return_sequences=num_return_sequences, length_penalty=alpha, max_new_tokens=5,
    )  # fmt: skip
    for row, hypotheses in zip(rows, found, strict=True):
        expected = definitions.diverse_beam(
            models[seed], row, size, groups, strength, limit=5, num_return_sequences=num_return_sequences, alpha=alpha
        )
        assert [hypothesis.tokens for hypothesis in hypotheses] == [tokens for _, tokens in expected]


# --- Coverage ---------------------------------------------------------------------------------------------------------


def coverage(model, source, tokens, finished):
    inputs = [1, *tokens] if finished else [1, *tokens][:-1]
    weights = np.mean([layer[0].mean(axis=0) for layer in model.cross_attention_weights([source], [inputs])], axis=0)
    return float(np.log(np.minimum(weights.sum(axis=0), 1.0)).sum())


@for_each("alpha", [0.0, 0.6])
def test_coverage_is_the_formula_and_chooses(models, alpha):
    changed = False
    for model in models:
        plain = beam(model, SOURCES, 5, num_return_sequences=5, length_penalty=alpha)
        covering = beam(model, SOURCES, 5, num_return_sequences=5, length_penalty=alpha, coverage_penalty=2.0)
        for row, one, two in zip(SOURCES, plain, covering, strict=True):
            changed |= pairs(one) != pairs(two)
            for found in two:
                length = len(found.tokens) + found.finished
                expected = found.log_probability / definitions.lp(length, alpha)
                expected += 2.0 * coverage(model, row, found.tokens, found.finished)
                assert found.score == pytest.approx(expected, abs=1e-9)
                assert found.score <= found.log_probability / definitions.lp(length, alpha)
    assert changed


def test_coverage_uses_the_length_condition():
    model, row, length = varied_model(length_encoding=True), SOURCES[0], 6
    options = GenerationConfig(num_beams=4, num_return_sequences=4, coverage_penalty=1.0, length_tolerance=0.5)
    (found,) = generate(model, padded([row]), options, target_lengths=[length])
    assert any(len(one.tokens) != length for one in found)
    for one in found:
        inputs = [1, *one.tokens] if one.finished else [1, *one.tokens][:-1]
        layers = model.cross_attention_weights([row], [inputs], lengths=[length + 1])
        received = np.mean([layer[0].mean(axis=0) for layer in layers], axis=0).sum(axis=0)
        assert one.score == pytest.approx(one.log_probability + np.log(np.minimum(received, 1.0)).sum(), abs=1e-9)


# --- The limit --------------------------------------------------------------------------------------------------------


def endless():
    """A model that never ends: the bias of eos is what no logit outweighs."""
    model = varied_model()
    bias = np.where(np.arange(13) == 2, -1e9, 0.0)
    return replace(model, {**dict(model.named_parameters()), "output_bias": bias})


def test_truncated_outputs_are_returned_only_if_none_finished(model):
    found = beam(endless(), SOURCES, 4, num_return_sequences=3, max_new_tokens=5)
    for row, hypotheses in zip(SOURCES, found, strict=True):
        assert len(hypotheses) == 3
        for hypothesis in hypotheses:
            assert len(hypothesis.tokens) == 5
            assert not hypothesis.finished
            expected = rescored(endless(), row, hypothesis.tokens, finished=False)
            assert hypothesis.log_probability == pytest.approx(expected, abs=1e-9)
    mixed = [
        h
        for size in (2, 3, 4)
        for found in beam(model, SOURCES, size, num_return_sequences=size, max_new_tokens=2)
        for h in found
    ]
    assert {h.finished for h in mixed} == {True, False}


# --- The machinery ----------------------------------------------------------------------------------------------------


def test_finished_sentences_leave_the_batch(model, monkeypatch):
    sizes = []
    step = type(model).decode_step
    monkeypatch.setattr(
        type(model), "decode_step", lambda self, tokens, cache: sizes.append(len(tokens)) or step(self, tokens, cache)
    )
    beam(model, SOURCES, 3, max_new_tokens=20)
    assert sizes[0] == len(SOURCES)
    assert sizes[1] <= 3 * len(SOURCES)
    assert all(size % 3 == 0 for size in sizes[1:])
    assert sizes[1:] == sorted(sizes[1:], reverse=True)
    assert sizes[-1] < sizes[1]


def test_the_memory_of_a_sentence_is_never_repeated(model, monkeypatch):
    prefill, caches = type(model).prefill, []
    monkeypatch.setattr(
        type(model), "prefill", lambda self, *a, **k: caches.append(prefill(self, *a, **k)) or caches[-1]
    )
    beam(model, SOURCES, 4, max_new_tokens=3)
    (cache,) = caches
    assert cache.layers[0].cross_attention.key.shape[0] <= len(SOURCES)
    assert cache.layers[0].self_attention.key.shape[0] == 4 * cache.layers[0].cross_attention.key.shape[0]


@without_jax
def test_every_library_finds_the_same(model, xp):
    options = GenerationConfig(
        num_beams=4, num_return_sequences=2, num_beam_groups=2, length_penalty=0.6, coverage_penalty=0.2,
        no_repeat_ngram_size=2, repetition_penalty=1.2, min_new_tokens=2, max_new_tokens=6,
    )  # fmt: skip
    expected = generate(model, padded(SOURCES), options)
    found = generate(model.to(xp), from_host(xp, padded(SOURCES)), options)
    assert [pairs(one) for one in found] == [pairs(one) for one in expected]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_early_stopping_ends_a_search_as_in_transformers(tmp_path, alpha):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sizes = {"d_model": 16, "vocab_size": 20, "max_position_embeddings": 40, "init_std": 1.0}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 16}
    later = []
    for seed in (0, 1, 3, 6):
        torch.manual_seed(seed)
        reference = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes)).double().eval()
        reference.generation_config.forced_eos_token_id = None
        reference.save_pretrained(tmp_path)
        model = load_pretrained(tmp_path)
        options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": alpha}
        for source in ([4, 7, 10, 2], [5, 8, 11, 14, 2], [9, 4, 18, 6, 12, 2]):
            with torch.no_grad():
                ids = torch.tensor([source])
                expected = reference.generate(ids, early_stopping=True, do_sample=False, max_new_tokens=20, **options)
            expected = [row[1:].tolist() for row in expected]
            if not all(2 in row for row in expected):
                continue
            options |= {"length_penalty_base": "length", "keep_greedy": False, "max_new_tokens": 19}
            found, full = (generate(model, [source], early_stopping=stops, **options)[0] for stops in (True, False))
            assert [each.tokens for each in found] == [row[: row.index(2)] for row in expected]
            later.append([each.tokens for each in found] != [each.tokens for each in full])
            del options["length_penalty_base"], options["keep_greedy"], options["max_new_tokens"]
    assert any(later) or not alpha
