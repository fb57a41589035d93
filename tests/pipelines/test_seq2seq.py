"""What can be asked of a translator or a summarizer besides the output itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.generation import DecodingOptions, decode
from xformer.models import Transformer, TransformerConfig
from xformer.pipelines import GenerationRequest, Summarizer, Tokenizers, Translator
from xformer.text import Tokenizer, numbers_task
from xformer.training import RunDirectory
from xformer.tree import map_arrays

TASK = numbers_task(num_train=400, num_valid=10, num_test=12, largest=9999)
LINES = TASK.test.source[:5]


def make(kind=Translator, *, separator=False, tokens_per_word=None, mean_length=None, **changes):
    tokenizer = Tokenizer.train([*TASK.train.source, *TASK.train.target], 100, separator=separator)
    size = tokenizer.vocab_size
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = TransformerConfig(source_vocab_size=size, target_vocab_size=size, **{**sizes, **changes})
    model = map_arrays(lambda array: array * 1.5, Transformer(config, xp=np, seed=3, dtype="float64"))
    tokenizers = Tokenizers(tokenizer, tokenizer)
    return kind(model, tokenizers, tokens_per_word=tokens_per_word, mean_length=mean_length)


@pytest.fixture(scope="module")
def translator():
    return make(tokens_per_word=2.0)


def test_settings_of_the_search_reach_it(translator):
    found = translator.outputs(LINES[:1], num_beams=4, num_return_sequences=3, length_penalty=0.6, max_length=12)[0]
    source = [[*translator.tokenizers.source.encode(LINES[0]), 2]]
    options = DecodingOptions(num_beams=4, num_return_sequences=3, length_penalty=0.6, max_length=12)
    expected = decode(translator.model, source, options)[0]
    assert [output.tokens for output in found] == [hypothesis.tokens for hypothesis in expected]
    assert [output.score for output in found] == [hypothesis.score for hypothesis in expected]


def test_several_outputs_come_as_lists(translator):
    lists = translator([LINES[0], " ", LINES[1]], num_beams=3, num_return_sequences=2, max_length=10)
    assert [len(texts) for texts in lists] == [2, 1, 2]
    assert lists[1] == [""]
    best = translator([LINES[0], " ", LINES[1]], num_beams=3, max_length=10)
    assert [texts[0] for texts in lists] == best


def test_outputs_begin_with_their_prefix(translator):
    prefixes = ["zwei", "drei", "eins", "zwei", "vier"]
    tokenizer = translator.tokenizers.target
    for num_beams in (1, 3):
        outputs = translator.outputs(LINES, prefix=prefixes, num_beams=num_beams, max_length=12)
        for (output, *_), prefix in zip(outputs, prefixes, strict=True):
            ids = tokenizer.encode(prefix)
            assert output.tokens[: len(ids)] == ids
    assert translator(LINES, prefix="zwei", max_length=12)[1].startswith(tokenizer.decode(tokenizer.encode("zwei")))


def test_topics_are_favoured(translator):
    plain = " ".join(translator(LINES, max_length=12))
    steered = translator(LINES, topics=["tausend"], topic_strength=20.0, max_length=12)
    assert sum("tausend" in line for line in steered) > plain.count("tausend")
    each = translator(LINES, topics=[["tausend"], [], [], [], ["hundert"]], topic_strength=20.0, max_length=12)
    assert each[0] == steered[0]
    assert each[1] == translator(LINES, max_length=12)[1]


def test_a_desired_length_is_kept_to(translator):
    lengths = [4, 6, 8, 10, 12]
    outputs = translator.outputs(LINES, desired_length=lengths, num_beams=4)
    for (output, *_), length in zip(outputs, lengths, strict=True):
        assert abs(len(output.tokens) - length) <= 0.1 * length


@pytest.mark.parametrize("words", [1, 3, 7])
def test_a_desired_length_in_words_is_kept_to(translator, words):
    settings = {"desired_length": words, "length_unit": "words"}
    exact = translator.outputs(LINES, **settings, num_beams=4, num_return_sequences=4)
    looser = translator.outputs(LINES, **settings, num_beams=4, num_return_sequences=4, length_tolerance=0.5)
    for outputs, tolerance in ((exact, 0.1), (looser, 0.5)):
        # A model that knows nothing may write one word without an end, which never gets as long as is wanted.
        finished = [output for found in outputs for output in found if output.finished]
        assert finished
        assert all(abs(len(output.text.split()) - words) <= tolerance * words for output in finished)
    sampled = translator.outputs(LINES, **settings, temperature=1.0)
    assert all(len(output.text.split()) <= words for output, *_ in sampled)


def test_a_length_encoding_needs_to_know_how_long_words_are():
    with pytest.raises(
        ConfigError, match="how many tokens a word has is not known here; give desired_length in tokens"
    ):
        make(length_encoding=True, mean_length=6.4)(LINES, desired_length=3, length_unit="words")


def test_a_model_that_sees_lengths_is_told_one_anyway(monkeypatch):
    told, prefill = [], Transformer.prefill
    monkeypatch.setattr(
        Transformer,
        "prefill",
        lambda self, source, lengths: (told.extend(lengths), prefill(self, source, lengths=lengths))[1],
    )
    make(length_encoding=True, mean_length=6.4)(LINES)
    assert told == [7] * 5  # the usual length and the end
    with pytest.raises(ConfigError, match="this model writes to a length; give desired_length"):
        make(length_encoding=True)(LINES)


def test_a_summary_has_a_limit_of_its_own():
    lengths = [len(output.tokens) for (output,) in make(Summarizer, separator=True, mean_length=1.0).outputs(LINES)]
    assert max(lengths) == 24  # four times the mean and twenty
    longer = make(Summarizer, separator=True, mean_length=1.0).outputs(LINES, min_length=30)
    assert {len(output.tokens) for (output,) in longer} == {30}
    free = make(Summarizer, separator=True).outputs(LINES)
    assert max(len(output.tokens) for (output,) in free) > 24


def test_a_desired_length_takes_a_beam():
    assert GenerationRequest.of(desired_length=5).decoding.num_beams == 4
    assert GenerationRequest.of(desired_length=5, num_beams=2).decoding.num_beams == 2
    assert GenerationRequest.of(desired_length=5, temperature=1.0).decoding.method == "sampling"
    assert GenerationRequest.of().decoding.num_beams == 1


def test_whole_numbers_of_any_kind_will_do(translator):
    assert translator(LINES, desired_length=np.int64(5)) == translator(LINES, desired_length=5)


def test_several_outputs_near_a_length_in_words_are_sorted_by_score(translator):
    for outputs in translator.outputs(
        LINES, desired_length=3, length_unit="words", num_beams=4, num_return_sequences=3
    ):
        scores = [output.score for output in outputs if output.finished]
        assert scores == sorted(scores, reverse=True)


def test_one_text_is_no_list(translator):
    with pytest.raises(DataError, match="got one text; expected a list of texts"):
        translator("one two")


def test_invisible_characters_are_blank(translator):
    assert translator(["\u200b", "\ufeff ", "\x00"]) == ["", "", ""]


def test_a_prefix_is_written_with_known_characters(translator):
    with pytest.raises(DataError, match="the prefix '東' has characters that the tokenizer does not know"):
        translator(LINES, prefix="東")


def test_a_prefix_that_is_too_long_is_named_by_its_text(translator):
    """Whichever batch it comes in, and wherever there: the shortest texts are written first."""
    long, short = "twelve thousand three hundred", "one"
    for texts, number in (([long, short], 1), ([short, long], 2)):
        prefix = ["eins zwei drei vier fünf sechs" if text == long else "" for text in texts]
        for batch_tokens in (1, 4096):
            with pytest.raises(ConfigError, match=rf"^prefix {number} has \d+ tokens, the output at most 5;"):
                translator(texts, prefix=prefix, max_length=5, batch_tokens=batch_tokens)
    request = GenerationRequest.of(prefix=["eins zwei drei vier fünf sechs"], max_length=5)
    with pytest.raises(ConfigError, match=r"^prefix 8 has"):
        list(translator.batches_of_ids(translator.encode([long]), request, first_number=7))


def test_separators_are_not_written():
    summarizer = make(Summarizer, separator=True)
    outputs = summarizer.outputs(LINES, temperature=5.0, max_length=40)
    assert all(summarizer.tokenizers.target.sep_id not in output.tokens for (output,) in outputs)


def test_samples_of_a_longer_list_may_come_in_parts(translator):
    request = GenerationRequest.of(temperature=1.5, max_length=10)
    encoded = translator.encode(LINES)
    whole = {row: outputs for batch in translator.batches_of_ids(encoded, request) for row, outputs in batch}
    rest = translator.batches_of_ids(encoded[2:], request, first_number=2)
    assert {row + 2: outputs for batch in rest for row, outputs in batch} == {row: whole[row] for row in (2, 3, 4)}


def test_documents_are_cut_as_in_training():
    whole = make(Summarizer, separator=True)
    summarizer = Summarizer(whole.model, whole.tokenizers, cut_length=5)
    long = "one two three four five six seven eight"
    encoded, num_cut = summarizer.cut(summarizer.encode([long, "one"]))
    assert (num_cut, len(encoded[0])) == (1, 5)
    ((_, outputs),) = next(whole.batches_of_ids([encoded[0]], GenerationRequest.of(max_length=5)))
    assert summarizer([long], max_length=5) == [outputs[0].text]


def test_german_documents_have_their_own_rules():
    tokenizer = Tokenizer.train(["Am 3. Mai kam z. B. Frau Dr. Ott. Sie blieb."], 60, separator=True)
    text = ["Am 3. Mai kam z. B. Frau Dr. Ott. Sie blieb."]
    german, english = (Tokenizers(tokenizer, tokenizer, language).encode_source(text)[0] for language in ("de", "en"))
    assert german.count(tokenizer.sep_id) == 1
    assert english.count(tokenizer.sep_id) > 1


def test_samples_depend_on_the_seed_and_on_nothing_else(translator):
    settings = {"temperature": 1.5, "max_length": 10}
    samples = translator(LINES, seed=1, **settings)
    assert samples == translator(LINES, seed=1, batch_tokens=1, **settings)
    assert samples != translator(LINES, seed=2, **settings)


def test_unknown_settings_are_refused_with_the_nearest(translator):
    with pytest.raises(ConfigError, match=r"unknown key 'beamsize' in the request; did you mean .num_beams."):
        translator(LINES, beamsize=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_tokens": 0}, "batch_tokens is 0; expected a whole number of at least 1"),
        ({"max_source_length": 0}, "max_source_length is 0; expected a whole number of at least 1"),
        ({"length_unit": "letters"}, "length_unit is 'letters'; expected 'tokens' or 'words'"),
        ({"desired_length": 0}, "desired_length is 0; expected a whole number of at least 1, in tokens"),
        (
            {"desired_length": [3, 0], "length_unit": "words"},
            "desired_length is 0; expected a whole number of at least 1, in words",
        ),
        ({"desired_length": 2.5}, r"desired_length is 2\.5; expected a whole number"),
        ({"desired_length": True}, "desired_length is True; expected a whole number"),
        ({"batch_tokens": "5"}, "batch_tokens is '5'; expected a whole number"),
        ({"topics": "word"}, "topics is the text 'word'; expected a list"),
        ({"num_beams": 4, "num_beam_groups": 3}, "num_beam_groups 3 does not divide num_beams 4"),
        ({"min_length": 9, "max_length": 8}, "min_length 9 is above max_length 8"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GenerationRequest.of(**settings)


@pytest.mark.parametrize("settings", [{"prefix": ["a"]}, {"desired_length": [3]}, {"topics": [["a"]]}])
def test_lists_have_one_entry_a_text(translator, settings):
    with pytest.raises(DataError, match=r"has 1 entries for 5 texts; expected one for each, or one for all"):
        translator(LINES, **settings)


def test_unknown_topic_words_are_named(translator):
    with pytest.raises(DataError, match="unknown topic words: '東京'"):
        translator(LINES, topics=["東京"])


def test_fields_have_one_owner():
    own = {field.name for field in dataclasses.fields(GenerationRequest)} - {"decoding"}
    assert not own & {field.name for field in dataclasses.fields(DecodingOptions)}


def test_a_document_is_seen_as_its_sentences():
    summarizer = make(Summarizer, separator=True)
    (ids,) = summarizer.encode(["One two. Three four."])
    assert ids.count(summarizer.tokenizers.source.sep_id) == 1
    assert isinstance(summarizer(["One two. Three four."], max_length=5)[0], str)


def test_a_model_without_a_decoder_writes_nothing():
    with pytest.raises(ConfigError, match="the model has no decoder"):
        make(num_decoder_layers=0)


def test_a_run_of_another_task_is_refused(tmp_path):
    summarizer = make(Summarizer, separator=True)
    run = RunDirectory(tmp_path / "run")
    counts = {"train_pairs": 10, "train_target_tokens": 60, "train_target_words": 30}
    run.start({"task": "summarization", "counts": counts}, {"joint": summarizer.tokenizers.source})
    summarizer.model.save(run.model)
    loaded = Summarizer.from_pretrained(run.path)
    assert (loaded.mean_length, loaded.tokens_per_word) == (6.0, 2.0)
    with pytest.raises(ConfigError, match="holds a model for summarization; expected one for translation"):
        Translator.from_pretrained(run.path)
    run.model.unlink()
    with pytest.raises(CheckpointError, match="has no model yet; go on with: xformer train --out"):
        Summarizer.from_pretrained(run.path)
