import dataclasses

import numpy as np
import pytest

from xformer.pipelines import Tokenizers
from xformer.runs.pairs import build_model
from xformer.runs.recipe import Recipe
from xformer.text import ParallelCorpus

CORPUS = ParallelCorpus(["One two", "two three"], ["eins zwei", "zwei drei"])


def test_a_joint_vocabulary_is_one_object():
    tokenizers = Tokenizers.train(CORPUS, vocab_size=60)
    assert tokenizers.source is tokenizers.target
    assert tokenizers.by_side() == {"joint": tokenizers.source}
    assert 3 not in tokenizers.source.encode("zwei two")


def test_separate_vocabularies_know_their_own_side():
    tokenizers = Tokenizers.train(CORPUS, vocab_size=60, joint=False)
    assert list(tokenizers.by_side()) == ["source", "target"]
    assert 3 in tokenizers.source.encode("zwei")
    assert 3 not in tokenizers.target.encode("zwei")


@pytest.mark.parametrize("joint", [True, False])
def test_a_model_for_them(joint):
    tables = {
        "model": {"d_model": 16, "num_heads": 2, "d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1},
        "tokenizer": {"vocab_size": 60, "joint": joint},
        "training": {"seed": 5, "dtype": "float64"},
    }
    recipe = Recipe.from_dict(tables)
    tokenizers = Tokenizers.train(CORPUS, **dataclasses.asdict(recipe.tokenizer))
    model = build_model(recipe, tokenizers, np)
    assert model.config.share_embeddings == joint
    assert model.config.source_vocab_size == tokenizers.source.vocab_size
    assert model.config.target_vocab_size == tokenizers.target.vocab_size
    assert model.config.d_model == 16
    assert model.source_embedding.weight.dtype == np.float64
    other = build_model(recipe.with_training(seed=6), tokenizers, np)
    assert not np.array_equal(model.source_embedding.weight, other.source_embedding.weight)
