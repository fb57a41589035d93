"""Tasks other than translation, by the same loop. (That of translation is tested with the trainer.)"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import raises_line, small_language_model, small_model
from xformer.backends import resolve
from xformer.backends.cupy import CupyLibrary
from xformer.errors import DataError
from xformer.families.run_directory import RunDirectory
from xformer.models import LanguageModel
from xformer.random import Rng
from xformer.runs.config import LanguageModelTrainingConfig, TrainingConfig
from xformer.runs.pairs import PairsTask
from xformer.runs.recipe import Recipe
from xformer.runs.tasks import TextTask
from xformer.runs.trainer import Trainer
from xformer.training import TokenPairs, translation_loss

TEXT = np.asarray([1, 2, 3, 4, 5, 6, 7, 8] * 40)
TRAINING = LanguageModelTrainingConfig(
    context_length=6, batch_size=4,
    optimizer="adamw", schedule="cosine", learning_rate=0.03, min_learning_rate=0.003, warmup_steps=5, max_steps=60,
    validate_every=30, label_smoothing=0.0, metric_for_best="loss", data_parallel=2,
)  # fmt: skip


def make(path, config=TRAINING, xp="numpy"):
    model = small_language_model(xp, dtype="float32", dropout=0.0)
    return Trainer(text_task(model, TEXT, TEXT[:50], **config.to_dict()), RunDirectory(path))


def text_task(model, train, valid, **options):
    return TextTask(Recipe("language_modeling", training=LanguageModelTrainingConfig(**options)), model, train, valid)


def pairs_task(model, pairs, **options):
    return PairsTask(Recipe(training=TrainingConfig(**options)), model, pairs, pairs)


def test_a_language_model_learns_its_text(tmp_path):
    trainer = make(tmp_path)
    before = trainer.validation_loss(trainer.model)
    assert trainer.run() == "60 steps"
    assert before > 2.0
    assert -trainer.validator.best[0] < 0.5
    kept = LanguageModel.load(tmp_path / "model.safetensors", xp=np)
    assert kept([[1, 2, 3]])[0].argmax(axis=-1).tolist() == [2, 3, 4]


def test_the_loss_of_translation_has_r_drop():
    model, pairs = small_model(dropout=0.5), TokenPairs([[4, 5], [6]], [[5], [4, 6]])
    task = pairs_task(model, pairs, batch_tokens=100, r_drop=2.0)
    _, batch = next(task.batches(Rng(0), skip=0))
    assert task.loss(model, batch, Rng(1)) == translation_loss(model, batch, Rng(1), r_drop=2.0)
    assert task.loss(model, batch, Rng(1)) != translation_loss(model, batch, Rng(1))


def test_the_validation_loss_is_the_mean_over_the_whole_text(tmp_path):
    trainer = make(tmp_path)
    model, text = trainer.model.to(dtype="float64"), TEXT[:50]
    total = 0.0
    for start in range(0, 49, 6):
        window = text[start : start + 7]
        logits = model(window[None, :-1])[0]
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        total -= sum(log[label] for log, label in zip(logs, window[1:], strict=True))
    assert trainer.validation_loss(model) == pytest.approx(total / 49, rel=1e-12)


def test_an_epoch_has_as_many_tokens_as_the_text():
    task = text_task(small_language_model(), TEXT, TEXT, context_length=8, batch_size=4)
    assert [epoch for epoch, _ in itertools.islice(task.batches(Rng(0), skip=0), 21)] == [0] * 10 + [1] * 10 + [2]
    assert next(task.batches(Rng(0), skip=20))[0] == 2


def test_shards_are_parts_of_the_batch():
    model = small_language_model()
    tasks = [
        text_task(model, TEXT, TEXT, context_length=8, batch_size=5),
        pairs_task(small_model(), TokenPairs([[3]] * 5, [[4, 5]] * 5), batch_tokens=15),
    ]
    for task in tasks:
        _, complete = next(task.batches(Rng(0), skip=3))
        shards = complete.split(3)
        assert [len(shard[0]) for shard in shards] == [1, 2, 2]
        for one, others in zip(complete[:2], zip(*(shard[:2] for shard in shards), strict=True), strict=True):
            np.testing.assert_array_equal(one, np.concatenate(others))
        assert sum(shard.num_tokens for shard in shards) == complete.num_tokens


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_batches_have_few_shapes_where_kernels_are_built_for_one(monkeypatch, positions):
    lengths = {"sinusoidal": (8, 16), "learned": (8, 10)}[positions]
    pairs = TokenPairs([[3] * 4] * 17, [[4] * 8] * 17)
    for is_bucketed in (False, True):
        monkeypatch.setattr(resolve("numpy"), "builds_per_shape", is_bucketed)
        task = pairs_task(small_model(positions=positions, max_positions=10), pairs, batch_tokens=153)
        for batch in (next(task.batches(Rng(0), skip=0))[1], task.validation_batches()[0]):
            shapes = batch.source.shape, batch.target.shape
            assert shapes == (((18, lengths[0]), (18, lengths[1])) if is_bucketed else ((17, 5), (17, 9)))
    assert CupyLibrary.builds_per_shape


def short_batches(task, rng, count, skip=0):
    return [batch for _, batch in itertools.islice(task.batches(rng, skip=skip), count)]


def test_random_chunks_reach_both_ends_and_depend_on_the_number_of_the_batch():
    text = np.arange(10, 20)
    task = text_task(small_language_model(), text, text, context_length=4, batch_size=7)
    batches = short_batches(task, Rng(0), 40)
    assert {int(first) for batch in batches for first in batch.tokens[:, 0]} == set(range(10, 16))
    assert all((batch.labels == batch.tokens + 1).all() for batch in batches)
    for batch, other in zip(short_batches(task, Rng(0), 4, skip=5), batches[5:9], strict=True):
        np.testing.assert_array_equal(batch.tokens, other.tokens)
    assert not np.array_equal(short_batches(task, Rng(1), 1)[0].tokens, batches[0].tokens)


@given(st.integers(2, 50), st.integers(1, 12), st.integers(1, 5))
def test_consecutive_chunks_predict_each_token_once(size, length, batch_size):
    text = np.arange(size)
    task = text_task(small_language_model(), np.arange(99), text, context_length=length, batch_size=batch_size)
    batches = task.validation_batches()
    assert np.concatenate([batch.labels.reshape(-1) for batch in batches]).tolist() == list(range(1, size))
    assert all(batch.tokens.shape[0] <= batch_size and batch.tokens.shape[1] <= length for batch in batches)


def test_a_text_that_is_too_short_is_refused():
    with raises_line(DataError, "the training text has 1 tokens; expected at least 2"):
        text_task(small_language_model(), TEXT[:1], TEXT, context_length=8, batch_size=4)
    with raises_line(DataError, "the validation text has 1 tokens"):
        text_task(small_language_model(), TEXT, TEXT[:1], context_length=8, batch_size=4)
