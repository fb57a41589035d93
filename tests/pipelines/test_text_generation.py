"""Text generation with a language model."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest

from tests.pipelines.chat_model import write_model
from tests.pipelines.sliding_generator import SlidingGenerator
from tests.reference import raises_line
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.families import load_pretrained
from xformer.generation import GenerationConfig, StopSequences
from xformer.generation import generate as search
from xformer.generation.sampling import DraftModel
from xformer.models import LanguageModel, LanguageModelConfig
from xformer.pipelines import TextGenerator
from xformer.tokenizers import Tokenizer
from xformer.tree import map_arrays

TEXT = "the cat sat\non the mat\n" * 5
LOOKUP = {"prompt_lookup_num_tokens": 2}
PROMPTS = ["the", "", "on the mat", "c"]


def make(text=TEXT, *, context_length=12, model="characters", **settings):
    tokenizer = Tokenizer.train([text], 60, model=model)
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 16, "num_heads": 2, "d_ff": 32, "num_layers": 1}
    network = LanguageModel(LanguageModelConfig(**sizes | settings), xp=np, seed=3, dtype="float64")
    network = map_arrays(lambda array: array * 1.5, network)
    return SlidingGenerator(network, tokenizer, context_length=context_length)


@pytest.fixture(scope="module")
def generator():
    return make()


def test_a_continuation_has_the_maximum_length_and_excludes_the_prompt(generator):
    outputs = generator.outputs(PROMPTS, max_new_tokens=40)
    for (output,), text in zip(outputs, generator(PROMPTS, max_new_tokens=40), strict=True):
        assert len(output.tokens) == len(output.text) == 40
        assert min(output.tokens) > 3
        assert output.text == generator.tokenizer.decode(output.tokens) == text
        assert output.log_probability < 0.0
    assert len(generator(["t"])[0]) == 500


def test_a_long_text_continues_from_its_later_half(generator):
    """By hand: the most probable token each time, given the last 6 to 11 tokens."""
    ids = generator.tokenizer.encode_text("the cat sat on the mat")
    context, log_probability = ids[-6:], 0.0
    for _ in range(20):
        logits = generator.model([context])[0, -1]
        logits[:4] = -np.inf
        log_probability += logits.max() - np.log(np.exp(logits).sum())
        context = [*context, int(logits.argmax())]
        ids = [*ids, context[-1]]
        context = ids[-6:] if len(context) == 12 else context
    ((output,),) = generator.outputs(["the cat sat on the mat"], max_new_tokens=20, top_k=1)
    assert output.tokens == ids[-20:]
    assert output.log_probability == pytest.approx(log_probability, abs=1e-9)


def test_samples_depend_on_seed_and_prompt_only(generator):
    together = generator.outputs(PROMPTS, max_new_tokens=30, seed=1)
    assert generator.outputs(PROMPTS, max_new_tokens=30, seed=1) == together
    assert generator(PROMPTS, max_new_tokens=30, seed=2) != generator(PROMPTS, max_new_tokens=30, seed=1)
    for number, prompt in enumerate(PROMPTS):
        ((alone,),) = generator.outputs([prompt], first_index=number, max_new_tokens=30, seed=1)
        assert alone.tokens == together[number][0].tokens
    indices = set()
    options = {"batch_tokens": 1, "on_text": lambda index, text, tokens: indices.add(index)}
    small = generator.outputs(PROMPTS, max_new_tokens=30, seed=1, **options)
    assert [each[0].tokens for each in small] == [each[0].tokens for each in together]
    assert indices == {*range(len(PROMPTS))}


def test_several_texts_are_sorted_by_probability(generator):
    outputs = generator.outputs(["the", "on"], num_return_sequences=3, max_new_tokens=20, temperature=3.0)
    for each in outputs:
        assert len({output.text for output in each}) == 3
        assert [output.log_probability for output in each] == sorted(
            (output.log_probability for output in each), reverse=True
        )
    texts = generator(["the", "on"], num_return_sequences=3, max_new_tokens=20, temperature=3.0)
    assert texts == [[output.text for output in each] for each in outputs]


@pytest.mark.parametrize(("size", "has_draft_model"), [(9, False), (110, True)])
def test_samples_of_a_prompt_share_its_prefill(monkeypatch, size, has_draft_model):
    generator, settings = make(context_length=256, max_positions=256), {"max_new_tokens": 8, "temperature": 2.0}
    prompt, read, decode_step = TEXT[:size], [], LanguageModel.decode_step
    expected = [generator.outputs([prompt], first_index=index, **settings)[0][0] for index in range(4)]

    def record(self, tokens, cache, **options):
        read.extend([tokens.shape] if self is generator.model else [])
        return decode_step(self, tokens, cache, **options)

    monkeypatch.setattr(LanguageModel, "decode_step", record)
    if has_draft_model:
        generator.draft_model = map_arrays(np.copy, generator.model)
    for prompts, count in ([prompt], 4), ([prompt] * 4, 1):
        generator.prefix_cache.clear()
        read.clear()
        outputs = generator.outputs(prompts, num_return_sequences=count, **settings)
        found = sorted(output.text for each in outputs for output in each)
        assert found == sorted(output.text for output in expected)
        assert sum(rows * tokens for rows, tokens in read if tokens > 8) == size


def ending(context_length=12):
    """A generator with the defaults of a public checkpoint, whose model ends outputs of various lengths."""
    generator = make()
    return TextGenerator(
        generator.model, generator.tokenizer, context_length=context_length, defaults=GenerationConfig()
    )


@pytest.mark.parametrize("settings", [{"length_penalty": 3.0, "length_penalty_base": "length"}, {}])
def test_hypotheses_have_the_order_and_scores_of_the_search(settings):
    generator, settings = ending(), {"max_new_tokens": 6, "num_beams": 4, "stop_token_ids": [10], **settings}
    prompts = ["the", "on", "c", "cat", "mat"]
    outputs = generator.outputs(prompts, num_return_sequences=4, **settings)
    found = search(generator.model, generator.token_ids(prompts), num_return_sequences=4, **settings)
    for row, hypotheses in zip(outputs, found, strict=True):
        assert [output.tokens for output in row] == [hypothesis.tokens for hypothesis in hypotheses]
        for output, hypothesis in zip(row, hypotheses, strict=True):
            assert output[2:4] == pytest.approx(hypothesis[1:3], abs=1e-9)
            assert output.finished == hypothesis.finished
    best = generator.outputs(prompts, **settings)
    assert [row[0].tokens for row in outputs] == [row[0].tokens for row in best]
    if "length_penalty" in settings:
        assert any(row[0].log_probability < row[-1].log_probability for row in outputs)


def test_invalid_arguments_raise(generator):
    with raises_line(DataError, r"prompt 2 has characters that the tokenizer does not know: 'X', 'é'"):
        generator(["the", "Xé"])
    with raises_line(DataError, r"prompt 8 has characters"):
        generator.outputs(["the", "é"], first_index=6)
    with raises_line(DataError, r"prompt 1 is empty and the tokenizer has no line end"):
        make("no line ends here")([""])
    with raises_line(DataError, r"prompts is 'the'; expected a list of texts"):
        generator("the")
    with raises_line(ConfigError, r"unknown key 'target_length' in GenerationConfig"):
        generator(["the"], target_length=3)
    with raises_line(ConfigError, r"length_penalty does not apply to text generation; omit it"):
        generator(["the"], num_beams=2, length_penalty=1.0)
    with raises_line(ConfigError, r"num_beams is 2 and sampling is requested"):
        generator(["the"], num_beams=2, temperature=1.0)
    with raises_line(ConfigError, "num_beams and num_return_sequences above 1 cannot be streamed"):
        generator.stream("the", num_beams=2)
    with raises_line(ConfigError, r"context_length is '8'; expected an integer of at least 2"):
        TextGenerator(generator.model, generator.tokenizer, context_length="8")
    with raises_line(ConfigError, r"model is a Tokenizer; expected an instance of LanguageModel"):
        TextGenerator(generator.tokenizer, generator.model)
    with raises_line(ConfigError, r"tokenizer is None; expected an instance of BaseTokenizer"):
        TextGenerator(generator.model, None)
    with raises_line(ConfigError, r"the context of the model is 1; expected an integer of at least 2"):
        make(positions="learned", max_positions=1, context_length=2)
    with raises_line(CheckpointError, r"the tokenizer has \d+ tokens, the model \d+; expected both from the same run"):
        TextGenerator(generator.model, Tokenizer.train(["abc"], 60, model="characters"))


def test_the_default_is_sampling_as_documented(generator):
    config = generator.resolve_config()
    assert (config.method, config.temperature, config.top_k, config.max_new_tokens) == ("sampling", 0.8, 200, None)
    assert generator.default_max_length == 500
    config = generator.resolve_config(top_p=0.9, temperature=None)
    assert (config.method, config.temperature, config.top_k, config.top_p) == ("sampling", None, 200, 0.9)
    assert generator.resolve_config(num_beams=3).method == "beam"
    for greedy in ({"do_sample": False}, {"temperature": 0}):
        assert generator.resolve_config(**greedy).method == "greedy"
        assert generator(["the"], max_new_tokens=9, **greedy) == generator(["the"], max_new_tokens=9, top_k=1)
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    plain = GenerationConfig(do_sample=True, max_new_tokens=9)
    assert generator(["the"], max_new_tokens=9, **off) == generator(["the"], plain)
    assert generator.resolve_config(GenerationConfig(max_new_tokens=7)) == GenerationConfig(max_new_tokens=7)
    assert generator.resolve_config(GenerationConfig(), top_k=2) == GenerationConfig(top_k=2)


def test_texts_that_do_not_fit_are_refused_by_default(generator):
    plain = TextGenerator(generator.model, generator.tokenizer, context_length=12)
    message = (
        "prompt 2 has 10 tokens and max_new_tokens is 5; the context of the model has 12, so 3 do not fit: shorten the "
        "prompt or lower max_new_tokens, or use context='slide'"
    )
    with raises_line(ConfigError, re.escape(message)):
        plain(["the", "on the mat"], max_new_tokens=5)
    with raises_line(ConfigError, "prompt 1 has 22 tokens and max_new_tokens is 500; the context of the model has 12"):
        plain.stream("the cat sat on the mat")
    with raises_line(ConfigError, "context is 'cut'; expected one of 'error', 'slide'"):
        plain(["the"], context="cut")
    lengths = [len(output.tokens) for (output,) in plain.outputs(["the", "on the mat"])]
    assert lengths == [9, 2]  # the default of max_new_tokens is lowered
    defaults = GenerationConfig(max_new_tokens=20)
    other = TextGenerator(generator.model, generator.tokenizer, context_length=12, defaults=defaults)
    assert other(["the"], suppress_tokens=[2])[0] == other(["the"], max_new_tokens=9, suppress_tokens=[2])[0]
    for same_as_default in ({"max_new_tokens": 20}, {"config": defaults}):
        with raises_line(ConfigError, "prompt 1 has 3 tokens and max_new_tokens is 20"):
            other(["the"], **same_as_default)
    with raises_line(ConfigError, "prompt 1 has 3 tokens and max_new_tokens is 500"):
        plain(["the"], max_new_tokens=500)
    assert "".join(plain.stream("the", seed=3)) == plain(["the"], seed=3)[0]
    assert plain(["the"], max_new_tokens=30, context="slide") == generator(["the"], max_new_tokens=30)


# --- Streaming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "prompt"), [({"seed": 3}, ""), ({"top_k": 3, "sequence_bias": ["cat"]}, "the cat sat on the mat")]
)
def test_streamed_text_concatenates_to_the_output(generator, settings, prompt):
    texts = list(generator.stream(prompt, max_new_tokens=40, **settings))
    assert "".join(texts) == generator([prompt], max_new_tokens=40, **settings)[0]
    assert len(texts) == 40  # characters; the context has 12 tokens


def test_streaming_decodes_a_short_suffix_at_each_step(generator, monkeypatch):
    decode, lengths = generator.tokenizer.decode, []
    monkeypatch.setattr(generator.tokenizer, "decode", lambda tokens: lengths.append(len(tokens)) or decode(tokens))
    assert len("".join(generator.stream("the", max_new_tokens=60))) == 60
    assert max(lengths) <= 4


@pytest.mark.parametrize("text", ["€", "😀"])
def test_a_character_that_the_prompt_splits_is_streamed_as_a_whole(generator, monkeypatch, text):
    """As with a tokenizer of bytes."""
    data = f"a{text}b".encode()
    tokens = {4 + number: byte for number, byte in enumerate(dict.fromkeys(data))}
    ids = [next(token for token, value in tokens.items() if value == byte) for byte in data]
    decode = lambda row: bytes(tokens.get(token, 65) for token in row).decode(errors="replace")  # noqa: E731
    monkeypatch.setattr(generator.tokenizer, "decode", decode)
    monkeypatch.setattr(generator.tokenizer, "decode_batch", lambda rows: [*map(decode, rows)])

    def force(tokens, lengths, logits):
        return np.where(np.arange(logits.shape[1]) == np.asarray(ids)[lengths][:, None], 0.0, -np.inf)

    for split in range(2, len(ids) - 1):
        settings = {"max_new_tokens": len(ids) - split, "do_sample": False, "logits_processors": [force]}
        (output,) = generator([ids[:split]], **settings)
        assert output == text + "b"
        assert "".join(generator.stream(ids[:split], **settings)) == output


@pytest.mark.parametrize(("prompt", "stop"), [("on the mat", "   "), ("c", "eeeeeeeee")])
def test_a_stop_string_of_several_tokens_ends_beams(prompt, stop):
    """As its tokens do, which are its characters; the text ends before it, and other beams go on."""
    generator = make(context_length=40)
    settings = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 10}
    (outputs,) = generator.outputs([prompt], stop=[stop, "another"], **settings)
    (ids,), encode = generator.token_ids([prompt]), generator.tokenizer.encode_text
    criteria = [StopSequences([encode(stop)])]
    (expected,) = search(
        generator.model, [ids], stopping_criteria=criteria, suppress_tokens=range(4), special_tokens=False, **settings
    )
    assert [(each.tokens, each.finished) for each in outputs] == [(each.tokens, each.finished) for each in expected]
    assert [each.text for each in outputs] == [generator.tokenizer.decode(x.tokens).split(stop)[0] for x in expected]
    assert outputs[0].finished
    assert len(outputs[0].text) < len(generator.outputs([prompt], **settings)[0][0].text)


def test_a_stop_string_of_beams_does_not_begin_in_the_prompt():
    """The prompt ends with the first of its characters."""
    generator = make(context_length=40)
    outputs = generator.outputs(["the"], stop="eee", num_beams=3, max_new_tokens=10)[0]
    assert (generator.tokenizer.decode(outputs[0].tokens), outputs[0].text) == ("eee", "")


def test_stop_tokens_end_texts_of_models_without_eos(generator):
    stop = generator.token_ids(["t"])[0][0]
    settings = {"max_new_tokens": 60, "temperature": 5.0, "stop_token_ids": [stop]}
    for prompt in PROMPTS:
        ((output,),) = generator.outputs([prompt], **settings)
        assert output.finished == (len(output.tokens) < 60)
        assert "t" not in output.text
        assert "".join(generator.stream(prompt, **settings)) == output.text


@pytest.mark.parametrize(
    ("settings", "draft"),
    [
        ({"seed": 3}, {"prompt_lookup_num_tokens": 4}),
        ({"seed": 3}, {"num_draft_tokens": 3}),
        ({"top_k": 1, "stop": "at", "logprobs": 2}, {"num_draft_tokens": 3}),
    ],
)
def test_draft_tokens_change_no_text(generator, settings, draft):
    assisting = copy.copy(generator)
    if "num_draft_tokens" in draft:
        assisting.draft_model = make(num_heads=1).model
    settings, prompts = {"max_new_tokens": 40, **settings}, [*PROMPTS, TEXT[:9]]
    assisted = assisting.outputs(prompts, **settings, **draft)
    for (found,), (expected,) in zip(assisted, generator.outputs(prompts, **settings), strict=True):
        assert (found.text, found.tokens, found.finished) == (expected.text, expected.tokens, expected.finished)
        assert found.log_probability == pytest.approx(expected.log_probability, abs=1e-9)
        assert [each.text for each in found.logprobs or ()] == [each.text for each in expected.logprobs or ()]
    stream = assisting.stream(prompts[-1], first_index=len(prompts) - 1, **settings, **draft)
    assert "".join(stream) == assisted[-1][0].text


def test_a_draft_model_belongs_to_the_generator(generator, monkeypatch):
    calls, draft = [], DraftModel.__call__
    monkeypatch.setattr(DraftModel, "__call__", lambda self, tokens: calls.append(1) or draft(self, tokens))
    assisted = TextGenerator(generator.model, generator.tokenizer, draft_model=make(num_heads=1).model)
    assert "draft_model" not in repr(assisted)
    for settings, is_used in (({"num_return_sequences": 2}, True), ({"num_beams": 2}, False), (LOOKUP, False)):
        calls.clear()
        settings = {"max_new_tokens": 5, "top_k": 1, **settings} if is_used else {"max_new_tokens": 5, **settings}
        plain = TextGenerator(generator.model, generator.tokenizer)(["the"], **settings)
        assert assisted(["the"], **settings) == plain
        assert bool(calls) == is_used
    with raises_line(ConfigError, "draft_model has 16 tokens and the model 15; expected the same vocabulary"):
        assisted.draft_model = make(TEXT + "z").model
    with raises_line(ConfigError, "the model is a LanguageModel and draft_model a str; expected language models"):
        TextGenerator(generator.model, generator.tokenizer, draft_model="path")
    with raises_line(ConfigError, "unknown argument 'draft_model'; use TextGenerator"):
        generator(["the"], draft_model=generator.model)


def test_a_path_of_a_draft_model(tmp_path):
    paths = [tmp_path / name for name in ("large", "small", "other")]
    for path in paths:
        path.mkdir()
        write_model(path, num_layers=1 + (path.name == "large"))
    prompt, settings = [[{"role": "user", "content": "two and"}]], {"max_new_tokens": 12}
    plain = TextGenerator.from_pretrained(paths[0])
    for draft_model in (paths[1], str(paths[1]), load_pretrained(paths[1])):
        generator = TextGenerator.from_pretrained(paths[0], draft_model=draft_model, dtype="float64")
        assert isinstance(generator.draft_model, LanguageModel)
        assert generator(prompt, **settings) == plain(prompt, **settings)
    text = (paths[2] / "tokenizer.json").read_text()
    (paths[2] / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|start|>"))
    with raises_line(ConfigError, "other and .*large have different tokens; expected the same vocabulary"):
        TextGenerator.from_pretrained(paths[0], draft_model=paths[2])
    with raises_line(CheckpointError, "nowhere does not exist; expected the directory of a run"):
        TextGenerator.from_pretrained(paths[0], draft_model="nowhere")
    with raises_line(ConfigError, "unknown argument 'draft'; did you mean 'draft_model'?"):
        TextGenerator.from_pretrained(paths[0], draft=paths[1])
