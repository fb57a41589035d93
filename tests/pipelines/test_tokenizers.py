import dataclasses

import numpy as np
import pytest

from xformer.errors import CheckpointError
from xformer.families.run_directory import RunDirectory
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


def test_encode():
    tokenizers = Tokenizers.train(CORPUS, vocab_size=60, joint=False)
    pairs = tokenizers.encode(CORPUS)
    assert [tokenizers.source.decode(ids) for ids in pairs.source] == CORPUS.source
    assert [tokenizers.target.decode(ids) for ids in pairs.target] == CORPUS.target


@pytest.mark.parametrize("joint", [True, False])
def test_tokenizers_of_a_run_can_be_loaded(tmp_path, joint):
    tokenizers = Tokenizers.train(CORPUS, vocab_size=60, joint=joint)
    run = RunDirectory(tmp_path / "run")
    run.start({}, tokenizers.by_side())
    loaded = Tokenizers.load(run)
    assert (loaded.source is loaded.target) == joint
    assert loaded.encode(CORPUS) == tokenizers.encode(CORPUS)
    next(path for path in run.path.iterdir() if "tokenizer" in path.name).unlink()
    with pytest.raises(CheckpointError):
        Tokenizers.load(run)


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
