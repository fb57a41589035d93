"""Linear maps on CuPy equal the portable definitions."""

from __future__ import annotations

import itertools

import numpy as np

from tests.ops._cupy.cuda_cases import DTYPES, LAYOUTS, normal
from tests.reference import for_each, raises_line
from xformer import ops, vjp
from xformer.backends import array_namespace, to_host
from xformer.errors import ShapeError
from xformer.ops import linear, project_heads

SHAPES = [(3, 5, 7), (7,), (4, 7), (0, 5, 7), (2, 40, 7), (3, 0)]


@for_each("dtype", DTYPES)
@for_each("shape, width", [*((shape, 9) for shape in SHAPES), ((4, 7), 16)])
def test_linear(cuda, dtype, shape, width):
    x, weight, bias = normal(*shape), normal(shape[-1], width, seed=1), normal(width, seed=2)
    assert cuda.served("linear", *(cuda.array(array, dtype) for array in (x, weight, bias)))
    cuda.agree(linear, x, weight, bias, dtype=dtype)
    cuda.agree(linear, x, weight, dtype=dtype)


@for_each("dtype", DTYPES)
@for_each("shape", [(3, 5, 7), (0, 5, 7), (2, 40, 7)])
def test_linear_with_relu(cuda, dtype, shape):
    x, weight, bias = normal(*shape), normal(shape[-1], 16, seed=1), normal(16, seed=2)
    cuda.agree(lambda *arrays: linear(*arrays, activation="relu"), x, weight, bias, dtype=dtype)
    cuda.agree(lambda *arrays: linear(*arrays, activation="relu"), x, weight, dtype=dtype)


@for_each("layout", LAYOUTS)
@for_each("dtype", ["float32", "bfloat16"])
def test_layouts(cuda, layout, dtype):
    x, weight, bias = normal(6, 16), normal(16, 8, seed=1), normal(8, seed=2)
    cuda.agree(linear, x, weight, bias, dtype=dtype, layout=LAYOUTS[layout])
    cuda.agree(lambda weight, x: linear(x, weight), weight, x, dtype=dtype, layout=LAYOUTS[layout])
    cuda.agree(lambda bias, x, weight: linear(x, weight, bias), bias, x, weight, dtype=dtype, layout=LAYOUTS[layout])


def test_the_gradient_of_a_transposed_weight_has_its_memory_order(cuda):
    table, x = cuda.array(normal(9, 7)), cuda.array(normal(5, 7))
    (dtable,) = vjp(lambda table: linear(x, array_namespace(table).matrix_transpose(table)), table)[1](
        cuda.array(normal(5, 9, seed=3))
    )
    assert dtable.flags.c_contiguous
    np.testing.assert_allclose(to_host(dtable), normal(5, 9, seed=3).T @ normal(5, 7), rtol=1e-12)


@for_each("dtype", DTYPES)
@for_each("biases", [(True, True, True), (False, False, False), (True, False, True)])
@for_each("rows", [(3, 17), (0, 5), (3, 0)])
def test_project_heads(cuda, dtype, biases, rows):
    heads, widths = (2, 1, 2), (8, 4, 6)
    x = normal(*rows, 5)
    weights = [normal(5, width, seed=place) for place, width in enumerate(widths)]
    own_biases = [normal(width, seed=width) for width, has in zip(widths, biases, strict=True) if has]

    def function(x, *maps):
        rest = iter(maps[3:])
        maps = [(maps[i], next(rest) if biases[i] else None, heads[i]) for i in range(3)]
        xp = array_namespace(x)
        return xp.concat([xp.reshape(each, (-1,)) for each in project_heads(x, *maps)])

    padded = iter(own_biases)
    pairs = [(weight, next(padded) if has else None) for weight, has in zip(weights, biases, strict=True)]
    on_device = [None if array is None else cuda.array(array, dtype) for array in (x, *itertools.chain(*pairs))]
    assert cuda.served("project_heads", *on_device, heads=heads)
    cuda.agree(function, x, *weights, *own_biases, dtype=dtype)


def test_project_heads_with_an_unused_output(cuda):
    cuda.agree(
        lambda x, v, w: project_heads(x, (v, None, 2), (w, None, 3))[1],
        normal(2, 20, 4),
        normal(4, 6, seed=1),
        normal(4, 6, seed=2),
        dtype="float32",
    )


def test_gradients_of_some_inputs(cuda):
    x, weight, bias = (cuda.array(array) for array in (normal(2, 3, 4), normal(4, 6, seed=1), normal(6, seed=2)))
    whole = vjp(lambda *arrays: project_heads(arrays[0], (*arrays[1:], 2))[0], x, weight, bias)
    g = cuda.xp.ones_like(whole[0])
    parts = [
        vjp(lambda x: project_heads(x, (weight, bias, 2))[0], x),
        vjp(lambda weight: project_heads(x, (weight, bias, 2))[0], weight),
        vjp(lambda bias: project_heads(x, (weight, bias, 2))[0], bias),
    ]
    for (_, pull), expected in zip(parts, whole[1](g), strict=True):
        np.testing.assert_array_equal(to_host(pull(g)[0]), to_host(expected))


def test_explain_gives_the_reason(cuda):
    x, weight = cuda.array(np.ones((2, 3)), "float32"), cuda.array(np.ones((3, 4)), "float16")
    assert "  not cupy.linear: mixed dtypes (the kernel takes float16 or bfloat16 or" in ops.explain(
        "linear", x, weight, None
    )


def test_a_bias_is_not_broadcast(cuda):
    x, one = cuda.array(np.ones((2, 3))), cuda.array(np.ones(1))
    with raises_line(ShapeError, r"linear got weight of shape \(3, 2\) and bias of shape \(1,\)"):
        ops.explain("linear", x, x.T, one)
    with raises_line(ShapeError, r"project_heads got weight\[0\] of shape \(3, 2\) and bias\[0\] of shape \(1,\)"):
        ops.explain("project_heads", cuda.xp.stack([x]), x.T, one, heads=(1,))
