"""Jitted steps of `fit` make the bits of steps that are not jitted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.reference import raises_line
from xformer import Linear, Transformer, TransformerConfig, fit, native, record, schedules
from xformer.backends import array_namespace, from_host, to_host
from xformer.errors import JitError
from xformer.ops import cross_entropy
from xformer.training import SGD, Adafactor, Adam, AdamW, Muon, jitted_step
from xformer.tree import flatten

CONFIG = TransformerConfig(source_vocab_size=13, target_vocab_size=11, d_model=8, num_heads=2, d_ff=12,
                           num_encoder_layers=1, num_decoder_layers=1, dropout=0.1)  # fmt: skip
RNG = np.random.default_rng(0)
BATCHES = [tuple(RNG.integers(3, 11, (3, 2, 5))) for _ in range(4)]


class Mine(Adam):
    """An optimizer of the user."""


class Copying(Adam):
    """One whose updates make new arrays."""

    def update(self, *args, donate=False):
        return super().update(*args)


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


@pytest.mark.parametrize("optimizer", [Adafactor(), Muon(), Mine(), Copying()], ids=repr)
def test_the_gradient_for_other_optimizers_is_a_program(optimizer):
    actual, num_calls = train(True, optimizer=optimizer)
    assert actual == train(False, optimizer=optimizer)[0]
    assert num_calls == 2  # called, traced


@pytest.mark.parametrize(("limit", "expected"), [(10, 8), (10**6, 2)])
def test_large_models_are_no_programs_on_numpy(monkeypatch, caplog, limit, expected):
    monkeypatch.setattr(jitted_step, "_MAX_PARAMETERS", limit)
    actual, num_calls = train(True)
    assert (actual, num_calls, caplog.messages) == (train(False)[0], expected, [])


@pytest.mark.skipif(not native.is_available(), reason="updates in place require the native library")
def test_arrays_that_an_update_overwrites_are_not_copied(monkeypatch):
    names, program = [], native.Program

    def record(calls):
        calls = list(calls)
        names.extend(call[0] for call in calls)
        return program(calls)

    monkeypatch.setattr(native, "Program", record)
    train(True, optimizer=AdamW())
    assert 0 < names.count("copy") < len(flatten(Transformer(CONFIG, seed=1))[0])
    assert names.count("adam") == len(flatten(Transformer(CONFIG))[0])


def mean_square(model, batch, rng):
    """Return the loss of a batch, an array or a dict with one."""
    errors = model(batch["x"] if isinstance(batch, dict) else batch) - 1.0
    return array_namespace(errors).sum(errors * errors)


ROWS = [RNG.standard_normal((4, 3), np.float32) for _ in range(6)]
REASONS = {
    "torch": ("torch", ROWS, {}, "jit=True has no effect: torch has no programs; use NumPy, JAX or CuPy"),
    "shapes": (
        "numpy",
        [x[: i + 1] for i, x in enumerate(ROWS[:4])],
        {},
        "jit=True had no effect in 4 steps: a program",
    ),
    "numbers": ("numpy", [{"x": x, "number": i} for i, x in enumerate(ROWS)], {}, "jit=True had no effect in 6 steps"),
    "model": ("numpy", ROWS, {"callbacks": [lambda event, loop: loop.model and None]}, None),
    "programs": ("numpy", ROWS, {}, None),
    "compiled": ("jax", ROWS, {}, None),
}


@pytest.mark.parametrize(("library", "batches", "options", "message"), REASONS.values(), ids=REASONS)
def test_jit_says_once_that_it_has_no_effect(caplog, library, batches, options, message):
    pytest.importorskip(library)
    model = Linear(3, 2, init=0).to(library)
    batches = batches if library == "numpy" else [from_host(array_namespace(model.weight), x) for x in batches]
    fit(model, mean_square, batches, optimizer=AdamW(), learning_rate=0.1, jit=True, **options)
    assert len(caplog.messages) == (message is not None)
    assert (message or "") in caplog.text


def test_jit_says_that_activations_are_recorded(caplog):
    with record(Transformer(CONFIG, seed=1)):
        train(True)
    assert caplog.messages == [
        "jit=True has no effect: activations are recorded or replaced, which needs the Python code"
    ]


def test_jax_compiles_a_step_once_whatever_the_number_of_tokens(caplog):
    pytest.importorskip("jax")
    calls, counts, model = [], itertools.count(3), Linear(3, 2, init=0).to("jax")

    def loss_fn(*args):
        calls.append(1)
        return mean_square(*args)

    batches = [from_host(array_namespace(model.weight), x) for x in ROWS]
    fit(model, loss_fn, batches, optimizer=AdamW(), learning_rate=0.1, jit=True, num_tokens=lambda batch: next(counts))
    assert len(calls) == 1


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


class Plain:
    """An object with attributes that may be replaced."""


class PlainSlots:
    __slots__ = ("x",)


@pytest.mark.parametrize("library", ["numpy", "jax"])
@pytest.mark.parametrize("make", [Plain, PlainSlots])
def test_a_batch_that_is_filled_anew_is_trained_without_jit(caplog, library, make):
    pytest.importorskip(library)
    model = Linear(3, 2, init=0).to(library)

    def batches(start):
        batch = make()
        for x in ROWS:
            batch.x = from_host(array_namespace(model.weight), x)
            yield batch

    def loss_fn(model, batch, rng):
        return mean_square(model, batch.x, rng)

    models = [
        fit(model, loss_fn, batches, optimizer=AdamW(), learning_rate=0.1, steps=6, jit=jit)[0] for jit in (True, False)
    ]
    assert to_host(models[0].weight).tobytes() == to_host(models[1].weight).tobytes()
    assert len(caplog.messages) == 1
    assert f"jit=True had no effect: an argument of a function for jit is a {make.__name__} with arrays" in caplog.text
