"""One model, called by several Python threads at once: the bits of one thread alone, and no deadlock."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import xformer
from tests.conftest import library_or_skip
from xformer import threads
from xformer.backends import to_host
from xformer.generation import generate
from xformer.kernels import numpy as tiled
from xformer.tree import flatten

CONFIG = xformer.TransformerConfig(source_vocab_size=40, target_vocab_size=40, d_model=16, num_heads=2, d_ff=32,
                                   num_encoder_layers=1, num_decoder_layers=1)  # fmt: skip
CALLERS, LENGTH = 5, 130


def at_once(functions):
    """The results of all functions, each called on a thread of its own."""
    start, found = threading.Barrier(len(functions), timeout=60), {}

    def call(number):
        start.wait()
        try:
            found[number] = functions[number]()
        except BaseException as error:  # noqa: BLE001 - it fails the comparison
            found[number] = error

    threads = [threading.Thread(target=call, args=[number], daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    return [found[number] for number in range(len(functions))]


@pytest.fixture
def three_threads(monkeypatch):
    """Spread over three threads, though there be fewer cores, in a pool that has fewer than the callers ask for."""
    monkeypatch.setattr(threads, "_requested", 3)
    monkeypatch.setattr(threads, "_pools", [])
    monkeypatch.setattr(threads, "_MAX_WORKERS", 2)
    with threads.blas_threads(2):
        yield
    for pool in threads._pools:
        pool.shutdown()


def work(model, number):
    """Everything that a caller may want of a model, as NumPy arrays and lists; each number has its own input."""
    rng = np.random.default_rng(number)
    source, target = rng.integers(3, 40, (2, 2, LENGTH))
    labels = model.target_ids(np.roll(target, -1, axis=1))

    def loss(model):
        losses = xformer.cross_entropy(model(source, target), labels)
        return xformer.array_namespace(losses).sum(losses)

    value, gradients = xformer.value_and_grad(loss)(model)
    short = source[:, : 5 + number]
    return [
        to_host(model(source, target)),
        to_host(value),
        *map(to_host, flatten(gradients)[0]),
        [[h.tokens for h in found] for found in generate(model, short, max_new_tokens=6)],
        [[h.score for h in found] for found in generate(model, short, num_beams=2, max_new_tokens=6)],
    ]


@pytest.mark.parametrize(("name", "kernels"), [("numpy", "no-native"), ("numpy", "auto"), ("torch", "auto")])
def test_many_threads_compute_the_same_as_one(three_threads, monkeypatch, name, kernels):
    monkeypatch.setenv("XFORMER_KERNELS", kernels)
    model = xformer.Transformer(CONFIG, xp=library_or_skip(name), seed=0)
    spread = []
    monkeypatch.setattr(
        tiled, "parallel_for", lambda *work: spread.append(threading.get_ident()) or threads.parallel_for(*work)
    )
    alone = [work(model, number) for number in range(CALLERS)]
    together = at_once([lambda number=number: work(model, number) for number in range(CALLERS)])
    for mine, expected in zip(together, alone, strict=True):
        assert len(mine) == len(expected)
        for got, reference in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(got, reference)
    if kernels == "no-native":
        assert len(set(spread)) == CALLERS + 1


def test_traces_of_threads_are_independent(xp):
    """All are open at once, each inside another of its own, which is where they would mix."""
    meet = threading.Barrier(CALLERS, timeout=60)

    def cube(x):
        meet.wait()
        return (x * x * x)[0]

    def second_derivative(number):
        x = xp.asarray([float(number)], dtype=xp.float32)
        return float(xformer.grad(lambda x: xformer.grad(cube)(x)[0])(x)[0])

    found = at_once([lambda number=number: second_derivative(number) for number in range(CALLERS)])
    assert found == [6.0 * number for number in range(CALLERS)]
