"""Calls of operations whose kernels for CuPy and torch equal the definition."""

from __future__ import annotations

import numpy as np

from tests.ops.numpy_cases import normal
from xformer.backends import array_namespace
from xformer.ops import (
    cross_entropy,
    dropout,
    embedding,
    gelu,
    gelu_tanh,
    layer_norm,
    linear,
    project_heads,
    quick_gelu,
    relu,
    rms_norm,
    silu,
    softmax,
    squared_norm,
)
from xformer.ops.norms import add_norm

SHAPES = [(3, 5, 7), (1,), (), (0, 4), (2, 3000), (64,)]
# Odd lengths, one row, one feature, no rows, several vectors per thread, several warps, several chunks of rows.
ROWS = [(3, 5, 7), (7,), (4, 16), (0, 5, 7), (3, 1), (2, 1029), (2, 1040), (130, 40), (7, 520)]
MASKS = [(2, 1, 1, 11), (5, 11), (1, 1, 5, 1), (2, 3, 5, 11), (3, 1, 11), (1,)]
IDS = [[[3, 1, 3], [0, 3, 10]], [[5]], [10] * 20, np.zeros((0, 3)), np.zeros((2, 0)), np.arange(130) % 11]
IDS += [np.where(np.arange(150) % 3 == 0, np.arange(150) % 11, 4)]
LABELS = [[[3, 0, 12, 5], [1, 7, 0, 0]], [[0] * 4] * 2, [[3, 1, 12, 5], [1, 7, 1, 2]]]
SETTINGS = [(0.0, 0.0, 300.0), (0.1, 0.0, 1.0), (0.1, 0.01, 1.0)]  # label_smoothing, z_loss, scale of logits


def random_bools(*shape):
    return np.asarray(np.random.default_rng(5).random(shape) < 0.6)


def features(shape, count):
    """Return x and `count` vectors of its features."""
    return 3.0 + normal(*shape), *(normal(shape[-1], seed=seed) for seed in range(1, count + 1))


def joined_add_norm(*arrays, keep_sum, **options):
    """Return the norm and, with keep_sum, the sum, as one array."""
    results = add_norm(*arrays, keep_sum=keep_sum, **options)
    return array_namespace(*arrays).stack(results) if keep_sum else results


def maps(shape, width):
    return normal(*shape), normal(shape[-1], width, seed=1), normal(width, seed=2)


def heads(*biases):
    """Return a function of x, weights and biases that projects three times and joins the results."""

    def function(x, *maps):
        rest = iter(maps[3:])
        projections = [(maps[i], next(rest) if biases[i] else None, (2, 1, 2)[i]) for i in range(3)]
        xp = array_namespace(x)
        return xp.concat([xp.reshape(each, (-1,)) for each in project_heads(x, *projections)])

    return function


def head_arrays(shape, *biases):
    weights = [normal(5, width, seed=width) for width in (8, 4, 6)]
    return normal(*shape, 5), *weights, *(normal(w.shape[1]) for w, has in zip(weights, biases, strict=True) if has)


# By operation: functions and their arrays. The first row has the arrays and options of the operation itself.
TABLE = {
    "relu": [(relu, {}, normal(*shape)) for shape in SHAPES],
    **{
        function.__name__: [(function, {}, 3.0 * normal(*shape)) for shape in SHAPES]
        for function in (gelu, gelu_tanh, silu, quick_gelu)
    },
    "dropout": [
        (dropout, {"keep_probability": 0.7}, np.asarray(normal(*shape)), random_bools(*shape)) for shape in SHAPES
    ],
    "embedding": [
        (embedding, {"scale": scale}, normal(11, 12), np.asarray(ids, "int64")) for ids in IDS for scale in (1.0, 1.7)
    ],
    "softmax": [
        *((softmax, {}, normal(2, 3, 5, 11), random_bools(*shape)) for shape in MASKS),
        *((softmax, {}, 30.0 * normal(*shape)) for shape in [(7,), (3, 1), (4, 700), (2, 5001), (0, 5), (2,) * 6]),
    ],
    "layer_norm": [
        *((layer_norm, {"epsilon": 1e-5}, *features(shape, 2)) for shape in ROWS),
        *((lambda x, w: layer_norm(x, w, None, epsilon=0.1), {}, *features(shape, 1)) for shape in ROWS[:6]),
    ],
    "rms_norm": [(rms_norm, {"epsilon": 1e-5}, *features(shape, 1)) for shape in ROWS],
    "add_norm": [
        *((joined_add_norm, {"epsilon": 1e-5, "centered": same, "keep_sum": same}, x, normal(*x.shape, seed=7), w, b)
          for shape in ROWS for same in (True, False) for x, w, b in [features(shape, 2)]),
        (lambda x, y, w: add_norm(x, y, w, None, epsilon=0.1, centered=False)[0], {}, *[normal(4, 9)] * 2, normal(9)),
        (lambda x, y, w: add_norm(x, y, w, None, epsilon=0.1, centered=False)[1], {}, *[normal(4, 9)] * 2, normal(9)),
    ],
    "cross_entropy": [
        *((cross_entropy, {"pad_id": pad_id, "label_smoothing": smoothing, "z_loss": z_loss}, scale * normal(2, 4, 13),
           np.where(np.asarray(labels) == 0, pad_id, labels))
          for labels in LABELS for smoothing, z_loss, scale in SETTINGS for pad_id in (0, -100)),
        (cross_entropy, {"label_smoothing": 0.1, "z_loss": 0.1}, normal(6, 3001), np.arange(0, 3000, 500)),
        (cross_entropy, {}, normal(0, 5, 7), np.zeros((0, 5), int)),
    ],
    "linear": [
        *((linear, {}, *maps(shape, 9)) for shape in [(3, 5, 7), (7,), (4, 7), (0, 5, 7), (2, 40, 7), (3, 0)]),
        *((linear, {}, *maps(shape, 16)[:count]) for shape in [(4, 7), (0, 5, 7), (2, 40, 7)] for count in (2, 3)),
        *((linear, {"activation": "relu"}, *maps((2, 40, 7), 16)[:count]) for count in (2, 3)),
    ],
    "project_heads": [
        *((heads(*biases), {}, *head_arrays(shape, *biases))
          for biases in [(True, True, True), (False, False, False), (True, False, True)]
          for shape in [(3, 17), (0, 5), (3, 0)]),
        (lambda x, v, w: project_heads(x, (v, None, 2), (w, None, 3))[1], {}, normal(2, 20, 4), *[normal(4, 6)] * 2),
    ],
    "squared_norm": [
        (squared_norm, {}, *(np.asarray(normal(*shape)) for shape in [*SHAPES, (9000,)])),
        (squared_norm, {}, normal(0, 3)),
    ],
}  # fmt: skip
