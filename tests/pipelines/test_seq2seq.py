"""Arguments and results of translators and summarizers."""

from __future__ import annotations

import numpy as np
import pytest

from xformer.data.demo_tasks import numbers_task
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.families.run_directory import RunDirectory
from xformer.generation import GenerationConfig, generate
from xformer.generation.batch import GenerationBatch
from xformer.models import Transformer, TransformerConfig
from xformer.pipelines import Embedder, Summarizer, Tokenizers, Transcriber, Translator, seq2seq
from xformer.tokenizers import Tokenizer
from xformer.tree import map_arrays

TASK = numbers_task(num_train=400, num_valid=10, num_test=12, largest=9999)
LINES = TASK.test.source[:5]


def make(pipeline_type=Translator, *, separator=False, tokens_per_word=None, mean_length=None, **changes):
    tokenizer = Tokenizer.train([*TASK.train.source, *TASK.train.target], 100, separator=separator)
    size = tokenizer.vocab_size
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = TransformerConfig(source_vocab_size=size, target_vocab_size=size, **{**sizes, **changes})
    model = map_arrays(lambda array: array * 1.5, Transformer(config, xp=np, seed=3, dtype="float64"))
    tokenizers = Tokenizers(tokenizer, tokenizer)
    return pipeline_type(model, tokenizers, tokens_per_word=tokens_per_word, mean_length=mean_length)


@pytest.fixture(scope="module")
def translator():
    return make(tokens_per_word=2.0)


def test_settings_of_the_search_reach_it(translator):
    found = translator.outputs(LINES[:1], num_beams=4, num_return_sequences=3, length_penalty=0.6, max_new_tokens=12)[0]
    source = [[*translator.tokenizers.source.encode(LINES[0]), 2]]
    options = GenerationConfig(num_beams=4, num_return_sequences=3, length_penalty=0.6, max_new_tokens=12)
    expected = generate(translator.model, source, options)[0]
    assert [output.tokens for output in found] == [hypothesis.tokens for hypothesis in expected]
    assert [output.score for output in found] == [hypothesis.score for hypothesis in expected]


def test_outputs_begin_with_their_prefix(translator):
    prefixes = ["zwei", "drei", "eins", "zwei", "vier"]
    tokenizer = translator.tokenizers.target
    for num_beams in (1, 3):
        outputs = translator.outputs(LINES, prefix=prefixes, num_beams=num_beams, max_new_tokens=12)
        for (output, *_), prefix in zip(outputs, prefixes, strict=True):
            ids = tokenizer.encode(prefix)
            assert output.tokens[: len(ids)] == ids
    assert translator(LINES, prefix="zwei", max_new_tokens=12)[1].startswith(tokenizer.decode(tokenizer.encode("zwei")))


def test_outputs_reach_their_target_length(translator):
    lengths = [4, 6, 8, 10, 12]
    outputs = translator.outputs(LINES, target_length=lengths, num_beams=4)
    for (output, *_), length in zip(outputs, lengths, strict=True):
        assert abs(len(output.tokens) - length) <= 0.1 * length


@pytest.mark.parametrize("words", [3])
def test_outputs_reach_their_target_length_in_words(translator, words):
    settings = {"target_length": words, "length_unit": "words"}
    exact = translator.outputs(LINES, **settings, num_beams=4, num_return_sequences=4)
    looser = translator.outputs(LINES, **settings, num_beams=4, num_return_sequences=4, length_tolerance=0.5)
    for outputs, tolerance in ((exact, 0.1), (looser, 0.5)):
        # An untrained model may generate one endless word, which never reaches the target length.
        finished = [output for found in outputs for output in found if output.finished]
        assert finished
        assert all(abs(len(output.text.split()) - words) <= tolerance * words for output in finished)
    sampled = translator.outputs(LINES, **settings, temperature=1.0)
    assert all(len(output.text.split()) <= words for output, *_ in sampled)


def test_a_length_encoding_needs_tokens_per_word():
    with pytest.raises(ConfigError, match="tokens_per_word of this model is unknown; expected target_length in tokens"):
        make(length_encoding=True, mean_length=6.4)(LINES, target_length=3, length_unit="words")


def test_the_length_condition_defaults_to_the_mean_length(monkeypatch):
    conditions, prefill = [], Transformer.prefill
    monkeypatch.setattr(
        Transformer,
        "prefill",
        lambda self, source, lengths: (conditions.extend(lengths), prefill(self, source, lengths=lengths))[1],
    )
    make(length_encoding=True, mean_length=6.4)(LINES)
    assert conditions == [7] * 5  # the usual length and the end
    with pytest.raises(ConfigError, match="this model has a length encoding; expected a target_length"):
        make(length_encoding=True)(LINES)


def test_the_default_limit_of_a_summary():
    lengths = [len(output.tokens) for (output,) in make(Summarizer, separator=True, mean_length=1.0).outputs(LINES)]
    assert max(lengths) == 24  # four times the mean and twenty
    longer = make(Summarizer, separator=True, mean_length=1.0).outputs(LINES, min_new_tokens=30)
    assert {len(output.tokens) for (output,) in longer} == {30}
    free = make(Summarizer, separator=True).outputs(LINES)
    assert max(len(output.tokens) for (output,) in free) > 24


@pytest.mark.parametrize(
    ("settings", "num_beams"),
    [
        ({}, 1),
        ({"target_length": 5}, 4),
        ({"target_length": 5, "num_beams": 2}, 2),
        ({"target_length": 5, "top_k": 3}, 1),
    ],
)
def test_a_target_length_selects_beam_search(translator, monkeypatch, settings, num_beams):
    configs = []
    monkeypatch.setattr(
        seq2seq,
        "GenerationBatch",
        lambda *args, **options: configs.append(args[2]) or GenerationBatch(*args, **options),
    )
    translator(LINES[:1], **settings)
    assert [config.num_beams for config in configs] == [num_beams]


def test_a_single_text_or_an_iterator_is_refused(translator):
    with pytest.raises(DataError, match="texts is a single text; expected a list of texts"):
        translator("one two")
    with pytest.raises(DataError, match="texts has type generator; expected a list of texts"):
        translator(line for line in LINES)


def test_a_prefix_that_is_too_long_is_named_by_its_text(translator):
    """Whichever batch it comes in, and wherever there: the shortest texts are written first."""
    long, short = "twelve thousand three hundred", "one"
    for texts, number in (([long, short], 1), ([short, long], 2)):
        prefix = ["eins zwei drei vier fünf sechs" if text == long else "" for text in texts]
        for batch_tokens in (1, 4096):
            with pytest.raises(ConfigError, match=rf"^prefix {number} has length \d+; expected at most 5,"):
                translator(texts, prefix=prefix, max_new_tokens=5, batch_tokens=batch_tokens)
    batches = translator.batches_of_ids(
        translator.token_ids([long]), prefix=["eins zwei drei vier fünf sechs"], max_new_tokens=5, first_index=7
    )
    with pytest.raises(ConfigError, match=r"^prefix 8 has"):
        list(batches)


def test_separators_are_never_generated():
    summarizer = make(Summarizer, separator=True)
    outputs = summarizer.outputs(LINES, temperature=5.0, max_new_tokens=40)
    assert all(summarizer.tokenizers.target.sep_id not in output.tokens for (output,) in outputs)


def test_documents_are_truncated_as_in_training():
    full = make(Summarizer, separator=True)
    summarizer = Summarizer(full.model, full.tokenizers, max_source_tokens=5)
    long = "one two three four five six seven eight"
    encoded, num_cut = summarizer.truncate(summarizer.token_ids([long, "one"]))
    assert (num_cut, len(encoded[0])) == (1, 5)
    ((_, outputs),) = next(full.batches_of_ids([encoded[0]], max_new_tokens=5))
    assert summarizer([long], max_new_tokens=5) == [outputs[0].text]


def test_invalid_settings_raise(translator):
    for settings, message in (
        ({"batch_tokens": 0}, "batch_tokens is 0; expected an integer of at least 1"),
        ({"length_unit": "letters"}, "length_unit is 'letters'; expected one of 'tokens', 'words'"),
        ({"target_length": [3, 0], "length_unit": "words"},
         "target_length in words is 0; expected an integer of at least 1"),
        ({"target_length": 2.5}, r"target_length in tokens is 2\.5; expected an integer"),
        ({"sequence_bias": "word"}, "sequence_bias is the text 'word'; expected a list"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens 9 is above max_new_tokens 8"),
    ):  # fmt: skip
        with pytest.raises((ConfigError, DataError), match=message):
            translator(LINES, **settings)


def test_lists_have_one_entry_a_text(translator):
    for settings in ({"prefix": ["a"]}, {"target_length": [3]}, {"sequence_bias": [["a"]]}):
        with pytest.raises(DataError, match=r"has 1 entries for 5 texts; expected one for each, or one for all"):
            translator(LINES, **settings)


def test_a_run_of_another_task_is_refused(tmp_path):
    summarizer = make(Summarizer, separator=True)
    run = RunDirectory(tmp_path / "run")
    counts = {"train_pairs": 10, "train_target_tokens": 60, "train_target_words": 30}
    run.start({"task": "summarization", "counts": counts}, {"joint": summarizer.tokenizers.source})
    summarizer.model.save(run.model)
    loaded = Summarizer.from_pretrained(run.path)
    assert (loaded.mean_length, loaded.tokens_per_word) == (6.0, 2.0)
    for pipeline, task in ((Translator, "translation"), (Embedder, "embedding"), (Transcriber, "transcription")):
        with pytest.raises(ConfigError, match=f"holds a model for summarization; expected one for {task}"):
            pipeline.from_pretrained(run.path)
    run.model.unlink()
    with pytest.raises(CheckpointError, match=r"has no model yet: .* continue with: xformer resume"):
        Summarizer.from_pretrained(run.path)
