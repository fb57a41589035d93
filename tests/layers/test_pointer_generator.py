"""The copy head: a distribution over the vocabulary with probability for the source tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import normal, weighted_sum
from xformer import Initializer, masks, value_and_grad
from xformer.layers import CopyHead
from xformer.layers.pointer_generator import scatter_to_vocabulary
from xformer.tree import map_arrays

SOURCE = np.asarray([[4, 5, 4, 2, 0], [6, 7, 2, 0, 0]])


def head(xp):
    return CopyHead(8, init=Initializer(xp, dtype="float64"))


def arrays(xp, rows=2):
    shapes = ((rows, 3, 8), (rows, 3, 11), (2, 5, 8))
    return [xp.asarray(normal(seed, *shape)) for seed, shape in enumerate(shapes)]


def test_weights_of_equal_tokens_are_summed(xp):
    weights = np.asarray(normal(0, 2, 3, 5))
    actual = scatter_to_vocabulary(xp.asarray(weights), xp.asarray(SOURCE), 9)
    expected = np.zeros((2, 3, 9))
    for sentence in range(2):
        for key, token in enumerate(SOURCE[sentence]):
            expected[sentence, :, token] += weights[sentence, :, key]
    assert_close(actual, expected, xp=xp, tolerance=1e-14)


def test_probabilities_sum_to_one_and_padding_gets_zero(xp):
    x, logits, memory = arrays(xp)
    source = xp.asarray(SOURCE)
    log_probabilities = head(xp)(x, logits, memory, source, masks.padding(source, 0))
    assert_close(xp.sum(xp.exp(log_probabilities), axis=-1), np.ones((2, 3)), xp=xp, tolerance=1e-8)
    # All to copying: what is not in the source has (almost) no probability.
    copying = map_arrays(lambda array: array * 0.0 - 40.0 if array.shape == (1,) else array, head(xp))
    shares = xp.exp(copying(x, logits, memory, source, masks.padding(source, 0)))
    assert_close(xp.sum(shares[0, :, :], axis=0) > 1e-6, np.isin(np.arange(11), [4, 5, 2]), xp=xp)


def test_hypotheses_of_a_sentence_share_its_source(xp):
    x, logits, memory = arrays(xp, rows=6)
    source = xp.asarray(SOURCE)
    shared = head(xp)(x, logits, memory, source, masks.padding(source, 0))
    for row in range(6):
        one = slice(row // 3, row // 3 + 1)
        alone = head(xp)(
            x[row : row + 1, ...],
            logits[row : row + 1, ...],
            memory[one, ...],
            source[one, ...],
            masks.padding(source[one, ...], 0),
        )
        assert_close(shared[row, ...], alone[0, ...])


def test_the_gradient_of_the_copy_head_equals_that_of_torch(xp):
    torch = pytest.importorskip("torch", reason="torch differentiates the same code by itself")
    from xformer.backends import resolve

    g = normal(9, 2, 3, 11)

    def loss(inputs, namespace):
        layer, x, logits, memory = inputs
        source = namespace.asarray(SOURCE)
        y = layer(x, logits, memory, source, masks.padding(source, 0))
        return weighted_sum(y, namespace.asarray(g))

    _, actual = value_and_grad(lambda inputs: loss(inputs, xp))((head(xp), *arrays(xp)))
    theirs = map_arrays(lambda array: array.requires_grad_(), (head(resolve("torch")), *arrays(torch)))
    loss(theirs, torch).backward()
    map_arrays(
        lambda ours, parameter: assert_close(ours, parameter.grad.numpy(), xp=xp, tolerance=1e-9), actual, theirs
    )
