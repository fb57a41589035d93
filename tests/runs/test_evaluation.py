import os
import signal

import numpy as np
import pytest

from tests.text.test_metrics import CHINESE
from xformer.errors import ConfigError, DataError
from xformer.models import Transformer, TransformerConfig
from xformer.pipelines import Tokenizers
from xformer.pipelines.seq2seq import Output, Result, TextToText
from xformer.runs.evaluation import EncodedCorpus, ValidationScore
from xformer.text import ParallelCorpus, bleu, rouge
from xformer.training.interrupt import Stopped, check_stop, stop_on_signals
from xformer.tree import replace

CORPUS = ParallelCorpus(["a b", "a b c d", "b", "c"], ["A", "B", "A B C D E", "C"], line_numbers=[1, 3, 4, 6])
WORDS = {"vocab_size": 30, "model": "words"}


@pytest.fixture(scope="module")
def tokenizers():
    return Tokenizers.train(CORPUS, **WORDS)


def test_pairs_within_the_limit_are_encoded(tokenizers):
    encoded = EncodedCorpus.encode(CORPUS, tokenizers, max_length=5)
    assert encoded.text == CORPUS
    assert encoded.num_long == 0
    assert encoded.num_tokens == (8, 8)
    assert encoded.pairs == tokenizers.encode(CORPUS)


def test_long_sentences_are_reported_with_their_file(tokenizers):
    with pytest.raises(DataError, match=r"train.en has 1 line of more than 3 tokens, the first on line 3 \(4 tokens\)"):
        EncodedCorpus.encode(CORPUS, tokenizers, max_length=3, names=("train.en", "train.de"))
    with pytest.raises(DataError, match=r"train.de has 1 line of more than 4 tokens, the first on line 4"):
        EncodedCorpus.encode(CORPUS, tokenizers, max_length=4, names=("train.en", "train.de"))


def test_long_sentences_can_be_dropped_with_their_partners(tokenizers):
    encoded = EncodedCorpus.encode(CORPUS, tokenizers, max_length=3, truncation="drop")
    assert (encoded.text.source, encoded.text.target) == (["a b", "c"], ["A", "C"])
    assert encoded.text.line_numbers == [1, 6]
    assert (encoded.num_long, encoded.text.num_dropped) == (2, 2)
    assert encoded.pairs == tokenizers.encode(encoded.text)
    assert EncodedCorpus.encode(CORPUS, tokenizers, max_length=5, truncation="drop").num_long == 0


def test_long_sources_can_be_cut(tokenizers):
    corpus = ParallelCorpus(["a b c d", "b"], ["A", "B"])
    encoded = EncodedCorpus.encode(corpus, tokenizers, max_length=3, truncation="cut")
    assert (encoded.num_cut, encoded.num_long) == (1, 0)
    assert [len(ids) for ids in encoded.pairs.source] == [3, 1]
    assert encoded.text == corpus
    with pytest.raises(DataError, match="target has 1 line of more than 3 tokens"):
        EncodedCorpus.encode(CORPUS, tokenizers, max_length=3, truncation="cut")


def test_documents_are_split_into_sentences():
    corpus = ParallelCorpus(["We try. It works.", "One more."], ["it works", "more"])
    tokenizers = Tokenizers.train(corpus, vocab_size=60, documents=True, lowercase=True)
    first, second = tokenizers.encode(corpus).source
    assert first.count(tokenizers.source.sep_id) == 1
    assert tokenizers.source.sep_id not in second
    assert tokenizers.source.decode(first) == "we try. it works."


def test_dropping_everything_is_an_error(tokenizers):
    corpus = ParallelCorpus(["a b c d"], ["A"])
    with pytest.raises(DataError, match="all 1 lines have more than 3 tokens"):
        EncodedCorpus.encode(corpus, tokenizers, max_length=3, truncation="drop")


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


@pytest.mark.parametrize("lowercase", [True, False])
def test_validation_scores_the_outputs_of_the_model(lowercase, monkeypatch):
    corpus = ParallelCorpus(["a b c d e"], ["The dog runs across the field"])
    tokenizers = Tokenizers.train(corpus, vocab_size=30, model="words", lowercase=lowercase)
    encoded, text = EncodedCorpus.encode(corpus, tokenizers, max_length=9), "the dog runs across a field"
    write_always(monkeypatch, text)
    score = ValidationScore(encoded, tokenizers)
    assert score(make_model(tokenizers)) == bleu([text], corpus.target, lowercase=lowercase).value
    assert (score.name, score.outputs) == ("BLEU", [text])
    score = ValidationScore(encoded, tokenizers, "summarization")
    values = [each.value for each in rouge([text], corpus.target)]
    assert score(make_model(tokenizers)) == pytest.approx(sum(values) / 3)
    assert score.name == "ROUGE"
    score = ValidationScore(encoded, tokenizers, measure=lambda outputs, references: float(len(outputs[0])))
    assert score(make_model(tokenizers)) == len(text)


def test_validation_has_the_tokenizer_of_the_language(monkeypatch):
    (output, _), (reference, _) = CHINESE
    corpus = ParallelCorpus(["a"], [reference])
    tokenizers = Tokenizers.train(corpus, vocab_size=60, model="characters")
    encoded = EncodedCorpus.encode(corpus, tokenizers, max_length=50)
    write_always(monkeypatch, output)
    score = ValidationScore(encoded, tokenizers, bleu_tokenize="zh")
    assert score(make_model(tokenizers)) == bleu([output], [reference], tokenize="zh").value > 50
    with pytest.raises(ConfigError, match="tokenize is 'moses'"):
        ValidationScore(encoded, tokenizers, bleu_tokenize="moses")


def test_validation_takes_texts_of_any_length():
    """The maximum length applies when the corpus is read."""
    corpus = ParallelCorpus(["a " * 1100], ["A"])
    tokenizers = Tokenizers.train(corpus, **WORDS)
    encoded = EncodedCorpus.encode(corpus, tokenizers, max_length=1200)
    score = ValidationScore(encoded, tokenizers, measure=lambda outputs, references: 1.0)
    model = make_model(tokenizers, output_bias=True)
    ends = np.where(np.arange(model.vocab_size) == model.config.eos_id, 1e3, 0.0).astype("float32")
    assert score(replace(model, {**dict(model.named_parameters()), "output_bias": ends})) == 1.0


def test_a_validation_can_be_stopped_after_the_current_batch():
    corpus = ParallelCorpus(["a b"] * 300, ["A B"] * 300)
    tokenizers = Tokenizers.train(corpus, **WORDS)
    measured = []
    score = ValidationScore(
        EncodedCorpus.encode(corpus, tokenizers, max_length=9), tokenizers, measure=measured.append, on_batch=check_stop
    )
    with stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped):
            score(make_model(tokenizers))
    assert measured == []
    assert score.outputs == []  # the others were not generated
