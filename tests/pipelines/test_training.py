import numpy as np
import pytest

from xformer.errors import DataError
from xformer.models import Transformer, TransformerConfig
from xformer.pipelines import EncodedCorpus, Tokenizers, Translator, ValidationBleu
from xformer.text import ParallelCorpus, bleu
from xformer.training import TokenizerSettings

CORPUS = ParallelCorpus(["a b", "a b c d", "b", "c"], ["A", "B", "A B C D E", "C"], line_numbers=[1, 3, 4, 6])
WORDS = TokenizerSettings(vocab_size=30, model="words")


@pytest.fixture(scope="module")
def tokenizers():
    return Tokenizers.train(CORPUS, WORDS)


def test_what_fits_is_encoded(tokenizers):
    encoded = EncodedCorpus.encode(CORPUS, tokenizers, max_length=5, drop=False)
    assert encoded.text == CORPUS
    assert encoded.num_long == 0
    assert encoded.num_tokens == (8, 8)
    assert encoded.pairs == tokenizers.encode(CORPUS)


def test_long_sentences_are_reported_with_their_file(tokenizers):
    with pytest.raises(DataError, match=r"train.en has 1 line of more than 3 tokens, the first on line 3 \(4 tokens\)"):
        EncodedCorpus.encode(CORPUS, tokenizers, max_length=3, drop=False, names=("train.en", "train.de"))
    with pytest.raises(DataError, match=r"train.de has 1 line of more than 4 tokens, the first on line 4"):
        EncodedCorpus.encode(CORPUS, tokenizers, max_length=4, drop=False, names=("train.en", "train.de"))


def test_long_sentences_can_be_dropped_with_their_partners(tokenizers):
    encoded = EncodedCorpus.encode(CORPUS, tokenizers, max_length=3, drop=True)
    assert (encoded.text.source, encoded.text.target) == (["a b", "c"], ["A", "C"])
    assert encoded.text.line_numbers == [1, 6]
    assert (encoded.num_long, encoded.text.num_dropped) == (2, 2)
    assert encoded.pairs == tokenizers.encode(encoded.text)
    assert EncodedCorpus.encode(CORPUS, tokenizers, max_length=5, drop=True).num_long == 0


def test_dropping_everything_is_an_error(tokenizers):
    corpus = ParallelCorpus(["a b c d"], ["A"])
    with pytest.raises(DataError, match="all 1 lines have more than 3 tokens"):
        EncodedCorpus.encode(corpus, tokenizers, max_length=3, drop=True)


@pytest.mark.parametrize("lowercase", [True, False])
def test_validation_bleu_is_that_of_the_translations(lowercase, monkeypatch):
    corpus = ParallelCorpus(["a b c d e"], ["The dog runs across the field"])
    tokenizers = Tokenizers.train(corpus, TokenizerSettings(vocab_size=30, model="words", lowercase=lowercase))
    size = tokenizers.source.vocab_size
    config = TransformerConfig(size, size, d_model=8, num_heads=2, d_ff=8, num_encoder_layers=1, num_decoder_layers=1)
    translated = ["the dog runs across a field"]
    monkeypatch.setattr(Translator, "__call__", lambda self, sentences, **limits: translated)
    measure = ValidationBleu(corpus, tokenizers)
    expected = bleu(translated, corpus.target, lowercase=lowercase).value
    assert measure(Transformer(config, xp=np)) == expected
    assert measure.translations == translated
    other = ValidationBleu(corpus, tokenizers, lambda translations, references: float(len(translations[0])))
    assert other(Transformer(config, xp=np)) == len(translated[0])


def test_validation_takes_sentences_of_any_length():
    """Whether they are too long was decided when the corpus was read."""
    corpus = ParallelCorpus(["a " * 1100], ["A"])
    tokenizers = Tokenizers.train(corpus, WORDS)
    size = tokenizers.source.vocab_size
    config = TransformerConfig(size, size, d_model=8, num_heads=2, d_ff=8, num_encoder_layers=1, num_decoder_layers=0)
    measure = ValidationBleu(corpus, tokenizers, lambda translations, references: 1.0)
    assert measure(Transformer(config, xp=np)) == 1.0
