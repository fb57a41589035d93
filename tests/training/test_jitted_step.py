"""Jitted steps of `fit` make the bits of steps that are not jitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.reference import raises_line
from xformer import Linear, Transformer, TransformerConfig, fit, schedules
from xformer.backends import array_namespace
from xformer.errors import JitError, TrainingError
from xformer.ops import cross_entropy
from xformer.training import SGD, Adafactor, Adam, AdamW, Muon
from xformer.tree import flatten

CONFIG = TransformerConfig(source_vocab_size=13, target_vocab_size=11, d_model=8, num_heads=2, d_ff=12,
                           num_encoder_layers=1, num_decoder_layers=1, dropout=0.1)  # fmt: skip
RNG = np.random.default_rng(0)
BATCHES = [tuple(RNG.integers(3, 11, (3, 2, 5))) for _ in range(4)]


class Mine(Adam):
    """An optimizer of the user."""


def train(jit, steps=8, optimizer=None, scale=1.0, **options):
    """Return the bytes of all results, and the number of calls of the loss."""
    calls = []

    def loss_fn(model, batch, rng):
        calls.append(1)
        source, target, labels = batch
        losses = cross_entropy(model(source, target, rng=rng), labels)
        return array_namespace(losses).sum(losses) * scale

    model, history = fit(
        Transformer(CONFIG, seed=1), loss_fn, BATCHES, optimizer=optimizer or Adam(), steps=steps, jit=jit,
        learning_rate=schedules.cosine(0.01, warmup_steps=3, total_steps=12), max_grad_norm=0.5,
        num_tokens=lambda batch: int(batch[0][0].sum()), **{"data_parallel": 1} | options,
    )  # fmt: skip
    numbers = [(event.loss, event.grad_norm, event.learning_rate, event.loss_scale) for event in history]
    return (numbers, [leaf.tobytes() for leaf in flatten(model)[0]]), len(calls)


@pytest.mark.parametrize("mode", ["auto", "no-native", "portable"])
@pytest.mark.parametrize("optimizer", [Adam(), AdamW(weight_decay=0.1), SGD(), SGD(momentum=0.0)], ids=repr)
def test_one_program_serves_all_steps(monkeypatch, optimizer, mode):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    expected, _ = train(False, optimizer=optimizer)
    updates, update = [], type(optimizer).update
    monkeypatch.setattr(
        type(optimizer), "update", lambda *args, **options: updates.append(1) or update(*args, **options)
    )
    actual, num_calls = train(True, optimizer=optimizer)
    assert actual == expected
    assert num_calls == len(updates) == 2  # called, traced


@pytest.mark.parametrize(
    "options",
    [{"optimizer": Adafactor()}, {"optimizer": Muon()}, {"optimizer": Mine()}],
    ids=["adafactor", "muon", "mine"],
)
def test_the_update_of_other_optimizers_is_called(options):
    assert train(True, **options)[0] == train(False, **options)[0]


OPTIONS = {
    "float16": {"precision": "float16"},
    "overflow": {"precision": "float16", "scale": 10.0},
    "accumulation": {"grad_accumulation": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_precision_and_accumulation(options):
    assert train(True, **options)[0] == train(False, **options)[0]


def test_a_resumed_run_makes_the_same_bits(tmp_path):
    expected = train(False)[0]
    numbers, _ = train(True, steps=4, run_dir=tmp_path)[0]
    assert numbers == expected[0][:4]
    assert train(True, run_dir=tmp_path)[0][1] == expected[1]


def test_a_loss_that_is_not_finite_ends_training():
    with pytest.raises(TrainingError, match="the loss is nan"):
        train(True, scale=np.nan)


def test_a_loss_with_a_state_is_called_in_each_step_by_default():
    calls = []

    def loss_fn(model, batch, rng):
        calls.append(1)
        total = array_namespace(model.weight).sum(model(batch))
        return total * 0.0 + 1.0 + 2.0 * (len(calls) > 5)

    history = fit(Linear(3, 2, init=0), loss_fn, [np.ones((4, 3), np.float32)], optimizer=Adam(), learning_rate=0.1,
                  steps=8)[1]  # fmt: skip
    assert [event.loss for event in history] == [1.0] * 5 + [3.0] * 3
    assert len(calls) == 8


class Splittable(tuple):
    """A batch of the user that is split into shards."""

    def split(self, count):
        return [Splittable(part[i : i + 1] for part in self) for i in range(count)]


def test_shards_are_traced_once_whatever_the_number_of_tokens(monkeypatch):
    monkeypatch.setitem(globals(), "BATCHES", list(map(Splittable, BATCHES)))
    (actual, num_calls), (expected, _) = (train(jit, data_parallel=2) for jit in (True, False))
    assert actual == expected
    assert num_calls < 2 * 8


@dataclass
class Pair:
    """A batch without a hash."""

    inputs: Any
    outputs: Any


@dataclass
class SquaredError:
    """A loss without a hash."""

    scale: float = 1.0

    def __call__(self, model, batch, rng):
        errors = model(batch.inputs) - batch.outputs
        return array_namespace(errors).sum(errors * errors) * self.scale


def test_batches_without_a_hash_are_refused():
    data = [Pair(RNG.standard_normal((4, 3), np.float32), np.ones((4, 2), np.float32)) for _ in range(2)]
    with raises_line(JitError, "has type Pair; expected Modules, arrays"):
        fit(Linear(3, 2, init=0), SquaredError(), data, optimizer=Adam(), learning_rate=0.1, steps=4,
            num_tokens=lambda batch: 4, jit=True)  # fmt: skip
