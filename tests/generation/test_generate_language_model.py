import numpy as np
import pytest

from tests.generation.definitions import log_softmax
from tests.reference import for_each, normal, raises_line
from xformer.errors import ConfigError, DataError, ShapeError
from xformer.generation import GenerationConfig, generate, stream
from xformer.generation.steps import DecodingSteps
from xformer.models import LanguageModel, LanguageModelConfig
from xformer.random import Rng
from xformer.tree import map_arrays

PROMPTS = [[1, 5, 6], [1, 7], [1, 8, 9, 10, 3]]
OPTIONS = {
    "greedy": GenerationConfig(max_new_tokens=6),
    "beam": GenerationConfig(max_new_tokens=6, num_beams=3, length_penalty=0.6),
    "sampling": GenerationConfig(max_new_tokens=6, temperature=1.0),
}


@pytest.fixture(scope="module", params=["sinusoidal", "rotary", "alibi"])
def model(request):
    config = LanguageModelConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=12, num_layers=2, positions=request.param)
    model = LanguageModel(config, xp="numpy", seed=1, dtype="float64")
    return map_arrays(lambda array: array * 1.5 + 0.1 * normal(array.size, *array.shape), model)


def continued(model, prompt, limit, special=True):
    """The definition of greedy search, without a cache."""
    tokens, total = list(prompt), 0.0
    while True:
        everywhere = np.ones((1, 1, 1, len(tokens)), dtype=bool)
        logits = np.array(model([tokens], mask=everywhere)[0, -1])
        if special:
            logits[:2] = -np.inf
        found = log_softmax(logits)
        best = int(found.argmax())
        if special and best == 2:
            return tokens[len(prompt) :], total + found[2], True
        if len(tokens) == len(prompt) + limit:
            return tokens[len(prompt) :], total, False
        tokens, total = [*tokens, best], total + found[best]


def test_prompts_of_different_lengths_are_continued(model):
    found = generate(model, PROMPTS, OPTIONS["greedy"])
    for prompt, (hypothesis,) in zip(PROMPTS, found, strict=True):
        tokens, total, finished = continued(model, prompt, 6)
        assert (hypothesis.tokens, hypothesis.finished) == (tokens, finished)
        assert hypothesis.log_probability == pytest.approx(total, abs=1e-9)


@for_each("method", OPTIONS)
def test_the_batch_changes_nothing(model, method):
    together = generate(model, PROMPTS, OPTIONS[method], rng=Rng(0))
    for number, prompt in enumerate(PROMPTS):
        (single,) = generate(model, [prompt], OPTIONS[method], rng=Rng(0), indices=[number])
        assert [h.tokens for h in single] == [h.tokens for h in together[number]]
        np.testing.assert_allclose([h.score for h in single], [h.score for h in together[number]], atol=1e-9)


@pytest.mark.parametrize("method", OPTIONS)
def test_prompts_of_very_different_lengths_need_little_padding(model, monkeypatch, method):
    lengths = [3, 150, 40, 70, 40, 1, 140, 33]
    prompts = [[1, *(3 + normal(n, n) * 100).astype(int) % 10 + 3] for n in lengths]
    assert {len(prompt) for prompt in prompts} == {n + 1 for n in lengths}
    sizes, step = [], LanguageModel.decode_step

    def record(self, ids, cache, **options):
        sizes.append(ids.shape)
        return step(self, ids, cache, **options)

    monkeypatch.setattr(LanguageModel, "decode_step", record)
    rng = Rng(4)
    together = generate(model, prompts, OPTIONS[method], rng=rng)
    entered = sum(rows * tokens for rows, tokens in sizes if tokens > 1)
    assert entered < 1.3 * sum(map(len, prompts)) < 0.8 * len(prompts) * 151
    for index, prompt in enumerate(prompts):
        (alone,) = generate(model, [prompt], OPTIONS[method], rng=rng, indices=[index])
        assert [each.tokens for each in together[index]] == [each.tokens for each in alone]
        assert together[index][0].score == pytest.approx(alone[0].score, abs=1e-9)


def test_scores_count_the_continuation_only(model):
    for hypotheses in generate(
        model, PROMPTS, GenerationConfig(max_new_tokens=6, num_beams=3, num_return_sequences=3, length_penalty=1.0)
    ):
        for hypothesis in hypotheses:
            length = len(hypothesis.tokens) + hypothesis.finished
            assert hypothesis.score == pytest.approx(hypothesis.log_probability * 6 / (5 + length), abs=1e-12)


def test_all_tokens_may_be_ordinary(model, monkeypatch):
    found = generate(model, [[0], [1, 2]], OPTIONS["greedy"], special_tokens=False)
    for prompt, (hypothesis,) in zip([[0], [1, 2]], found, strict=True):
        assert hypothesis.tokens == continued(model, prompt, 6, special=False)[0]
        assert len(hypothesis.tokens) == 6
        assert not hypothesis.finished
    steps, step = [], DecodingSteps.step
    monkeypatch.setattr(
        DecodingSteps,
        "step",
        lambda self, tokens, **options: steps.append(len(tokens)) or step(self, tokens, **options),
    )
    assert generate(model, [[0], [1, 2]], OPTIONS["greedy"], special_tokens=False) == found
    assert steps == [2] * 5  # after the prompts, which are read in one step
    wide = generate(model, [[0], [1, 2]], OPTIONS["beam"], special_tokens=False)
    greedy = generate(model, [[0], [1, 2]], OPTIONS["greedy"], length_penalty=0.6, special_tokens=False)
    assert all(one[0].score >= two[0].score - 1e-9 for one, two in zip(wide, greedy, strict=True))


def test_invalid_arguments_raise(model):
    with raises_line(DataError, "prompt 2 is empty; expected at least one token, e.g. bos_id"):
        generate(model, [[1], []])
    with raises_line(DataError, "prompt 1 has token id 13; expected 0 to 12"):
        generate(model, [[13]])
    with raises_line(ConfigError, "coverage_penalty applies to encoder-decoders only"):
        generate(model, [[1]], GenerationConfig(num_beams=2, coverage_penalty=0.1))
    with raises_line(ConfigError, "rng is None"):
        generate(model, [[1]], GenerationConfig(top_k=2))
    assert generate(model, []) == []


@for_each("settings", [{}, {"temperature": 1.0, "rng": Rng(0)}, {"num_beams": 2, "length_penalty": 1.0}])
@for_each("special_tokens", [True, False])
def test_learned_positions_bound_prompt_and_continuation(settings, special_tokens):
    """What fits is generated; the output is not finished."""
    sizes = {"vocab_size": 13, "d_model": 8, "num_heads": 2, "d_ff": 12, "num_layers": 1}
    model = LanguageModel(LanguageModelConfig(**sizes, positions="learned", max_positions=8), dtype="float64")
    options = {"special_tokens": special_tokens, "suppress_tokens": [2], **settings}
    found = generate(model, [[5] * 7, [5] * 3], max_new_tokens=9, **options)
    assert [(len(one[0].tokens), one[0].finished) for one in found] == [(1, False), (5, False)]
    assert [len(one[0].tokens) for one in generate(model, [[5] * 7], **options)] == [1]
    with raises_line(ConfigError, "prompt 2 has 8 tokens; expected at most 7: .* learned positions for 8"):
        generate(model, [[5], [5] * 8], **options)
    with raises_line(ConfigError, "the output needs 9 tokens, prompt included; this model has learned positions for 8"):
        generate(model, [[5] * 7], min_new_tokens=2, **options)


def test_padded_arrays_need_a_mask(model):
    prompts = [[5, 6, 7], [8, 9]]
    expected = generate(model, prompts, max_new_tokens=4)
    for padded in ([[5, 6, 7], [0, 8, 9]], [[5, 6, 7], [8, 9, 0]]):
        array = np.asarray(padded)
        with raises_line(DataError, "inputs is an array with pad_id 0 at the start or end of a row; expected lists"):
            generate(model, array, max_new_tokens=4)
        assert generate(model, array, max_new_tokens=4, attention_mask=(array > 0) * 1) == expected
        assert generate(model, padded, max_new_tokens=4, attention_mask=(array > 0).tolist()) == expected
    assert generate(model, np.asarray([[5, 6], [8, 9]]), max_new_tokens=4)[1][0].tokens == expected[1][0].tokens
    with raises_line(ShapeError, r"attention_mask has shape \(1, 3\); expected that of ids .*\(2, 3\)"):
        generate(model, array, attention_mask=[[1, 1, 1]])


@for_each("settings", [{}, {"temperature": 1.0, "rng": Rng(0)}, {"num_beams": 2}])
def test_a_row_without_a_possible_token_is_named(settings):
    """The second input has none at its second position."""

    def mask_all(tokens, lengths, logits, rows):
        return np.where(((rows.inputs == 1) & (lengths == 3))[:, None], -np.inf, logits)

    config = LanguageModelConfig(vocab_size=7, d_model=8, num_heads=2, d_ff=8, num_layers=1)
    for options, number in (({}, 2), ({"indices": [4, 7]}, 8)):
        with raises_line(DataError, f"input {number} has no possible token at position 4"):
            generate(
                LanguageModel(config),
                [[3, 4], [5, 6]],
                max_new_tokens=4,
                special_tokens=False,
                logits_processors=[mask_all],
                **settings,
                **options,
            )


@for_each(
    "inputs, options, error, message",
    [
        ([5, 3], {}, DataError, "prompt 1 is 5; expected a list of token ids"),
        (["hello"], {}, DataError, "prompt 1 is 'hello'; expected a list of token ids"),
        ([[1]], {"logits_processors": [lambda tokens, lengths, logits: None]}, ShapeError, "returned None; expected"),
        (
            [[1]],
            {"logits_processors": [lambda tokens, lengths, logits: logits[:, :2]]},
            ShapeError,
            "returned shape .1, 2.;",
        ),
        ([[1]], {"stopping_criteria": [lambda tokens, lengths: False]}, ShapeError, "returned False; expected one"),
    ],
)
def test_wrong_inputs_and_results_of_functions_are_named(inputs, options, error, message):
    config = LanguageModelConfig(vocab_size=7, d_model=8, num_heads=2, d_ff=8, num_layers=1)
    with raises_line(error, message):
        generate(LanguageModel(config), inputs, max_new_tokens=3, **options)


@for_each("special_tokens", [True, False])
@for_each("method", ["greedy", "beam", "sampling"])
def test_further_tokens_end_an_output(model, method, special_tokens):
    """The output until the first of them, which a beam may reach by another way."""
    config, options = OPTIONS[method], {"rng": Rng(3), "special_tokens": special_tokens}
    (full,), *_ = generate(model, PROMPTS, config, num_beams=1, **options)
    stop = full.tokens[2]
    first = full.tokens.index(stop)
    (ended,), *_ = generate(model, PROMPTS, config, stop_token_ids=[stop], **options)
    assert ended.finished
    assert stop not in ended.tokens
    if method == "beam":  # by its score: the end counts, with the log-probability of the token
        logits = model([[*PROMPTS[0], *ended.tokens]])[0, len(PROMPTS[0]) - 1 :]
        logits = np.where(np.isin(range(13), list(model.config.suppressed_ids) * special_tokens), -np.inf, logits)
        log_probs = log_softmax(logits)
        ends = max(log_probs[-1, [stop, *[2] * special_tokens]])
        total = log_probs[range(len(ended.tokens)), ended.tokens].sum() + ends
        assert ended.log_probability == pytest.approx(total, abs=1e-9)
    else:
        assert ended.tokens == full.tokens[:first]
        steps = stream(model, PROMPTS[:1], config, stop_token_ids=[stop], **options)
        assert [token for (new,) in steps for token in new] == ended.tokens


@for_each("method", OPTIONS)
def test_a_prompt_may_contain_tokens_that_end_outputs(model, method):
    """In a batch, too, in which the tokens of longer prompts are forced."""
    prompts = [[1, 5, 2, 6, 11, 7], [1, 7]]
    options = {"rng": Rng(0), "stop_token_ids": [11]}
    together = generate(model, prompts, OPTIONS[method], **options)
    for number, prompt in enumerate(prompts):
        (single,) = generate(model, [prompt], OPTIONS[method], indices=[number], **options)
        assert [h.tokens for h in together[number]] == [h.tokens for h in single]
        assert together[number][0].score == pytest.approx(single[0].score, abs=1e-9)


def test_tokens_can_be_suppressed_at_the_beginning_only(model):
    (free,), *_ = generate(model, PROMPTS, OPTIONS["greedy"])
    first = free.tokens[0]
    (changed,), *_ = generate(model, PROMPTS, OPTIONS["greedy"], begin_suppress_tokens=[first])
    assert changed.tokens[0] != first
    tokens = [*PROMPTS[0], changed.tokens[0]]
    assert generate(model, [tokens], OPTIONS["greedy"])[0][0].tokens[:4] == changed.tokens[1:5]


def test_the_length_penalty_may_be_a_power_of_the_length(model):
    config = GenerationConfig(max_new_tokens=6, num_beams=3, length_penalty=2.0, length_penalty_base="length")
    for (hypothesis,) in generate(model, PROMPTS, config):
        length = len(hypothesis.tokens) + hypothesis.finished
        assert hypothesis.score == pytest.approx(hypothesis.log_probability / length**2)


def test_ids_outside_the_vocabulary_do_not_end_outputs(model):
    with raises_line(DataError, "token id 13 is suppressed, biased or ends outputs; expected 0 to 12"):
        generate(model, PROMPTS, stop_token_ids=[model.vocab_size])
