import dataclasses
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.text.test_metrics import CHINESE
from xformer.errors import ConfigError, DataError
from xformer.models import Transformer, TransformerConfig
from xformer.pipelines import Tokenizers
from xformer.pipelines.seq2seq import Output, Result, TextToText
from xformer.runs.config import TrainingConfig
from xformer.runs.pairs import EncodedCorpus, PairsTask
from xformer.runs.recipe import Recipe
from xformer.text import ParallelCorpus, bleu, rouge
from xformer.training.interrupt import Stopped, stop_on_signals
from xformer.tree import replace

CORPUS = ParallelCorpus(["a b", "a b c d", "b", "c"], ["A", "B", "A B C D E", "C"], line_numbers=[1, 3, 4, 6])
WORDS = {"vocab_size": 30, "model": "words"}


def encode(corpus, tokenizers, **options):
    return EncodedCorpus.encode([corpus], tokenizers, Path(tempfile.gettempdir()), **options)


@pytest.fixture(scope="module")
def tokenizers():
    return Tokenizers.train(CORPUS, **WORDS)


def test_pairs_within_the_limit_are_encoded(tokenizers):
    encoded = encode(CORPUS, tokenizers, max_length=5)
    assert (encoded.text.source, encoded.text.target) == (CORPUS.source, CORPUS.target)
    assert encoded.counts == {
        "pairs": 4,
        "pairs_dropped_blank": 0,
        "pairs_dropped_long": 0,
        "source_tokens": 8,
        "target_tokens": 8,
        "target_words": 8,
    }
    assert [*encoded.pairs.source] == tokenizers.encode(CORPUS).source
    assert [*encoded.pairs.target] == tokenizers.encode(CORPUS).target


def test_chunks_are_encoded_like_a_whole(tokenizers):
    chunks = [CORPUS.select([0, 2]), CORPUS.select([]), CORPUS.select([1, 3])]
    encoded = EncodedCorpus.encode(chunks, tokenizers, Path(tempfile.gettempdir()), max_length=5, keep_text=False)
    whole = encode(CORPUS, tokenizers, max_length=5)
    assert [*encoded.pairs.source] == [whole.pairs.source[row] for row in (0, 2, 1, 3)]
    assert [*encoded.pairs.target] == [whole.pairs.target[row] for row in (0, 2, 1, 3)]
    assert (len(encoded.text), encoded.counts["pairs_dropped_blank"]) == (0, 8)


def test_a_long_sentence_is_reported_with_its_file(tokenizers):
    corpus = dataclasses.replace(CORPUS, names=("train.en", "train.de"))
    with pytest.raises(DataError, match=r"line 3 of train.en has 4 tokens; expected at most 3; raise max_length, or"):
        encode(corpus, tokenizers, max_length=3)
    with pytest.raises(DataError, match=r"line 4 of train.de has 5 tokens; expected at most 4"):
        encode(corpus, tokenizers, max_length=4)


def test_long_sentences_can_be_dropped_with_their_partners(tokenizers):
    encoded = encode(CORPUS, tokenizers, max_length=3, truncation="drop")
    assert (encoded.text.source, encoded.text.target) == (["a b", "c"], ["A", "C"])
    assert encoded.counts["pairs_dropped_long"] == 2
    assert [*encoded.pairs.source] == tokenizers.encode(encoded.text).source
    assert encode(CORPUS, tokenizers, max_length=5, truncation="drop").counts["pairs_dropped_long"] == 0


def test_long_sources_can_be_cut(tokenizers):
    corpus = ParallelCorpus(["a b c d", "b"], ["A", "B"])
    encoded = encode(corpus, tokenizers, max_length=3, truncation="cut")
    assert (encoded.counts["sources_cut"], encoded.counts["pairs_dropped_long"]) == (1, 0)
    assert [len(ids) for ids in encoded.pairs.source] == [3, 1]
    assert encoded.text == corpus
    with pytest.raises(DataError, match="line 4 of target has 5 tokens"):
        encode(CORPUS, tokenizers, max_length=3, truncation="cut")


def test_documents_are_split_into_sentences():
    corpus = ParallelCorpus(["We try. It works.", "One more."], ["it works", "more"])
    tokenizers = Tokenizers.train(corpus, vocab_size=60, documents=True, lowercase=True)
    first, second = tokenizers.encode(corpus).source
    assert first.count(tokenizers.source.sep_id) == 1
    assert tokenizers.source.sep_id not in second
    assert tokenizers.source.decode(first) == "we try. it works."


def make_model(tokenizers, **settings):
    size = tokenizers.source.vocab_size
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
    return Transformer(TransformerConfig(source_vocab_size=size, target_vocab_size=size, **sizes, **settings), xp=np)


def write_always(monkeypatch, text):
    """Let models write this text, whatever they are asked."""
    monkeypatch.setattr(
        TextToText,
        "batches_of_ids",
        lambda self, encoded, **options: iter(
            [[Result(r, [Output(text, [], 0.0, 0.0, True)]) for r in range(len(encoded))]]
        ),
    )


def pairs_task(corpus, tokenizers, task="translation", max_length=9, model=None, **settings):
    encoded, recipe = (
        encode(corpus, tokenizers, max_length=max_length),
        Recipe(task, training=TrainingConfig(**settings)),
    )
    model = model or make_model(tokenizers)
    return PairsTask(recipe, model, encoded.pairs, encoded.pairs, tokenizers, valid_text=encoded.text)


@pytest.mark.parametrize("lowercase", [True, False])
def test_validation_scores_the_outputs_of_the_model(lowercase, monkeypatch):
    corpus = ParallelCorpus(["a b c d e"], ["The dog runs across the field"])
    tokenizers = Tokenizers.train(corpus, vocab_size=30, model="words", lowercase=lowercase)
    text = "the dog runs across a field"
    write_always(monkeypatch, text)
    task = pairs_task(corpus, tokenizers)
    assert task.score(task.model) == bleu([text], corpus.target, lowercase=lowercase).value
    assert (task.metric, task.outputs) == ("BLEU", [text])
    task = pairs_task(corpus, tokenizers, "summarization")
    values = [each.value for each in rouge([text], corpus.target)]
    assert task.score(task.model) == pytest.approx(sum(values) / 3)
    assert task.metric == "ROUGE"


def test_a_trial_of_a_model_that_does_not_end_takes_no_longer_than_the_references():
    corpus = ParallelCorpus(["a b c d", "a b c d e f"], ["A B", "A B C"])
    tokenizers = Tokenizers.train(corpus, **WORDS)
    model = make_model(tokenizers, output_bias=True)
    never = np.where(np.arange(model.vocab_size) == model.config.eos_id, -1e3, 0.0).astype("float32")
    model = replace(model, {**dict(model.named_parameters()), "output_bias": never})
    task = pairs_task(corpus, tokenizers, model=model)
    task.score(model)
    lengths = [len(text.split()) for text in task.outputs]
    task.score(model, is_trial=True)
    assert [len(text.split()) for text in task.outputs] == [2, 3] < lengths


def test_validation_has_the_tokenizer_of_the_language(monkeypatch):
    (output, _), (reference, _) = CHINESE
    corpus = ParallelCorpus(["a"], [reference])
    tokenizers = Tokenizers.train(corpus, vocab_size=60, model="characters")
    write_always(monkeypatch, output)
    task = pairs_task(corpus, tokenizers, max_length=50, bleu_tokenize="zh")
    assert task.score(task.model) == bleu([output], [reference], tokenize="zh").value > 50
    with pytest.raises(ConfigError, match="tokenize is 'moses'"):
        pairs_task(corpus, tokenizers, max_length=50, bleu_tokenize="moses")


def test_validation_takes_texts_of_any_length():
    """The maximum length applies when the corpus is read."""
    corpus = ParallelCorpus(["a " * 1100], ["A"])
    tokenizers = Tokenizers.train(corpus, **WORDS)
    model = make_model(tokenizers, output_bias=True)
    ends = np.where(np.arange(model.vocab_size) == model.config.eos_id, 1e3, 0.0).astype("float32")
    model = replace(model, {**dict(model.named_parameters()), "output_bias": ends})
    task = pairs_task(corpus, tokenizers, max_length=1200, model=model)
    assert (task.score(model), task.outputs) == (0.0, [""])


def test_a_validation_can_be_stopped_after_the_current_batch():
    corpus = ParallelCorpus(["a b"] * 300, ["A B"] * 300)
    task = pairs_task(corpus, Tokenizers.train(corpus, **WORDS))
    with stop_on_signals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            task.score(task.model)
    assert task.outputs == []  # the others were not generated
