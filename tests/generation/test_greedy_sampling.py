import numpy as np
import pytest

from tests.conftest import library_or_skip
from tests.generation.definitions import SOURCES, varied_model
from tests.reference import raises_line, small_language_model
from xformer.errors import ConfigError
from xformer.generation import StopSequences, generate, stream
from xformer.generation.steps import DecodingSteps
from xformer.models import Transformer
from xformer.random import Rng
from xformer.tree import replace

PROMPTS = [[3, 4, 5], [6, 7]]


@pytest.fixture(scope="module")
def model():
    """A model whose outputs end after different numbers of tokens, some not at all."""
    return varied_model(12)


def greedy(model, inputs=SOURCES, **settings):
    settings = {"max_new_tokens": 12, **settings}
    return [hypotheses[0].tokens for hypotheses in generate(model, inputs, **settings)]


@pytest.mark.parametrize("library", ["torch", "jax", "array_api_strict", "cupy"])
def test_every_library_generates_the_same(model, library):
    xp = library_or_skip(library)
    limit = 3 if library == "jax" else 8  # jax compiles every length
    assert greedy(model.to(xp), max_new_tokens=limit) == greedy(model, max_new_tokens=limit)


def test_finished_inputs_leave_the_batch(model, monkeypatch):
    lengths = [len(tokens) for tokens in greedy(model)]
    sizes, step = [], DecodingSteps.step
    monkeypatch.setattr(
        DecodingSteps,
        "step",
        lambda self, tokens, **options: sizes.append(len(tokens)) or step(self, tokens, **options),
    )
    greedy(model)
    # An output at the maximum length takes one more step, which shows whether it ends there.
    assert sizes == [sum(length >= step for length in lengths) for step in range(1, max(lengths) + 1)]


@pytest.mark.parametrize("settings", [{"top_p": 0}, {"temperature": 0}, {"top_p": 0.0, "temperature": 2.0}], ids=str)
def test_samples_that_leave_no_choice_are_greedy_outputs(model, settings):
    outputs = generate(model, SOURCES, max_new_tokens=9, do_sample=True, num_return_sequences=3, **settings)
    assert [[each.tokens for each in row] for row in outputs] == [[row] * 3 for row in greedy(model, max_new_tokens=9)]


def test_padding_and_start_are_never_chosen(model):
    """Not even if they are far more probable than all other tokens."""
    eager = replace(model, {**dict(model.named_parameters()), "output_bias": np.where(np.arange(13) < 2, 100.0, 0.0)})
    for tokens in greedy(eager, max_new_tokens=6):
        assert not {0, 1, 2} & set(tokens)


# --- Streaming --------------------------------------------------------------------------------------------------------


def streamed(model, inputs, **options):
    """Return the concatenated tokens of each input, and the number of tokens of the first by step."""
    outputs, steps = [[] for _ in inputs], []
    for new in stream(model, inputs, **options):
        steps.append(len(new[0]))
        for output, tokens in zip(outputs, new, strict=True):
            output += tokens
    return outputs, steps


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}], ids=["greedy", "sampling"])
@pytest.mark.parametrize("prefix", [None, [[5, 6], [7], [], [4], [4, 4, 4]], [[5, 6], [7, 8], [4, 4], [3, 3], [9, 9]]])
def test_streamed_tokens_concatenate_to_the_output(model, settings, prefix):
    options = {"max_new_tokens": 9, "prefix": prefix, "rng": Rng(5), **settings}
    outputs, steps = streamed(model, SOURCES, **options)
    assert outputs == [hypotheses[0].tokens for hypotheses in generate(model, SOURCES, **options)]
    assert max(steps[1:]) == 1


@pytest.mark.parametrize("special_tokens", [True, False])
def test_a_language_model_streams_without_the_prompt(special_tokens):
    model = small_language_model(seed=3)
    options = {"max_new_tokens": 5, "special_tokens": special_tokens}
    outputs, _ = streamed(model, PROMPTS, **options)
    assert outputs == [hypotheses[0].tokens for hypotheses in generate(model, PROMPTS, **options)]


def test_tokens_are_yielded_before_the_next_is_computed(model, monkeypatch):
    steps, step = [], Transformer.decode_step
    monkeypatch.setattr(
        Transformer, "decode_step", lambda self, tokens, cache: steps.append(1) or step(self, tokens, cache)
    )
    for number, _ in enumerate(stream(model, SOURCES, max_new_tokens=4), start=1):
        assert len(steps) == number


def test_beam_search_and_several_outputs_cannot_be_streamed(model):
    for options in ({"num_beams": 2}, {"temperature": 1.0, "num_return_sequences": 2, "rng": Rng(0)}):
        with raises_line(ConfigError, "only a single output per input can be streamed"):
            stream(model, SOURCES, **options)
    assert list(stream(model, np.zeros((0, 3), dtype="int64"))) == []


# --- User processors and stopping criteria ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"top_k": 3, "rng": Rng(0)}], ids=["greedy", "beam", "sample"]
)
def test_a_user_processor_sees_every_step_and_changes_the_result(model, settings):
    calls = []

    def only_even_tokens(tokens, lengths, logits, rows):
        calls.append((len(tokens), len(lengths), len(rows.inputs), tuple(logits.shape)))
        return np.where(np.arange(13) % 2 == 0, logits, -np.inf)

    for hypotheses in generate(model, SOURCES, max_new_tokens=6, logits_processors=[only_even_tokens], **settings):
        for hypothesis in hypotheses:
            assert all(token % 2 == 0 for token in hypothesis.tokens)
    assert all(n == lengths == inputs == rows and size == 13 for n, lengths, inputs, (rows, size) in calls)


def test_scores_include_user_processors(model):
    ((hypothesis,),) = generate(
        model, SOURCES[:1], max_new_tokens=4, logits_processors=[lambda tokens, lengths, logits: np.zeros_like(logits)]
    )
    assert hypothesis.log_probability == pytest.approx(-4 * np.log(13))


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3, "num_return_sequences": 3}, {"temperature": 2.0, "rng": Rng(0)}]
)
def test_a_stopping_criterion_finishes_outputs(model, settings):
    settings = {"max_new_tokens": 10, "suppress_tokens": [2], **settings}
    stops = 0
    for hypotheses in generate(model, SOURCES, stopping_criteria=[StopSequences([[7], [9, 9]])], **settings):
        for hypothesis in hypotheses:
            ends = hypothesis.tokens[-1:] == [7] or hypothesis.tokens[-2:] == [9, 9]
            assert hypothesis.finished == ends
            assert 7 not in hypothesis.tokens[:-1]
            stops += ends
    assert stops


def test_a_stopped_output_is_scored_without_eos(model):
    plain = generate(model, SOURCES, max_new_tokens=6, length_penalty=1.0)
    stopped = generate(
        model, SOURCES, max_new_tokens=6, length_penalty=1.0,
        stopping_criteria=[lambda tokens, lengths: lengths == 2],
    )  # fmt: skip
    for (one,), (two,) in zip(plain, stopped, strict=True):
        assert two.tokens == one.tokens[:2]
        if len(one.tokens) > 1:
            assert two.finished
            assert two.score == pytest.approx(two.log_probability / (7 / 6))


def test_a_criterion_never_stops_within_a_prefix_or_a_prompt(model):
    always = [lambda tokens, lengths: [True] * len(lengths)]
    prefix = [[5, 6, 7], [7], [], [4], [4, 4, 4]]
    for start, (hypothesis,) in zip(
        prefix, generate(model, SOURCES, prefix=prefix, stopping_criteria=always), strict=True
    ):
        assert hypothesis.tokens[: len(start)] == start
        assert len(hypothesis.tokens) <= len(start) + 1
    language_model = small_language_model(seed=3)
    for special_tokens in (True, False):
        options = {"max_new_tokens": 1, "stopping_criteria": always, "special_tokens": special_tokens}
        for (hypothesis,) in generate(language_model, PROMPTS, suppress_tokens=[2], **options):
            assert (len(hypothesis.tokens), hypothesis.finished) == (1, True)


def test_empty_stop_sequences_raise():
    with raises_line(ConfigError, r"stop sequences are \[\[3\], \[\]\]; expected at least one token each"):
        StopSequences([[3], []])


@pytest.mark.parametrize("pad_id", [None, 2])
def test_lists_of_different_lengths_are_masked_if_padding_is_ambiguous(pad_id):
    model = varied_model(12, positions="sinusoidal", pad_id=pad_id)
    for settings in ({}, {"num_beams": 3, "coverage_penalty": 0.5}):
        together = generate(model, SOURCES, max_new_tokens=5, **settings)
        for source, (hypothesis, *_) in zip(SOURCES, together, strict=True):
            ((alone, *_),) = generate(model, [source], max_new_tokens=5, **settings)
            assert hypothesis.tokens == alone.tokens
            assert hypothesis.score == pytest.approx(alone.score, abs=1e-9)
