"""A jitted function returns the bits of the function, whatever the values of its arguments."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import tracemalloc
import weakref

import numpy as np
import pytest

import xformer as xf
from tests.conftest import library_or_skip
from tests.reference import for_each, raises_line
from xformer.backends import array_namespace, resolve
from xformer.backends.numpy import NumpyLibrary
from xformer.errors import BackendError, ConfigError, DataError, JitError
from xformer.layers import Linear
from xformer.ops import cross_entropy
from xformer.random import Rng
from xformer.threads import parallel_map
from xformer.tracing.jit import jit_repeated
from xformer.tracing.program import CudaProgram, Program
from xformer.tracing.tracer import Tracer
from xformer.training import Adam
from xformer.training.step import train_step
from xformer.tree import flatten, with_fields

JIT = sys.modules["xformer.tracing.jit"]
SIZES = {"d_model": 16, "num_heads": 4, "d_ff": 24, "dropout": 0.0}
MODES = ["auto", "no-native", "portable"]
MODELS = {
    "post_norm": {"norm_position": "post"},
    "gated": {"activation": "swiglu", "norm": "rms", "positions": "rotary", "num_key_value_heads": 2},
    "gelu": {"activation": "gelu", "positions": "alibi", "attention_bias": False},
    "relative": {"activation": "gelu_tanh", "positions": "relative"},
}


def equal_bits(actual, expected):
    pairs = zip(flatten(actual)[0], flatten(expected)[0], strict=True)
    return all(x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


def translator(**settings):
    config = xf.TransformerConfig(
        source_vocab_size=19, target_vocab_size=17, num_encoder_layers=1, num_decoder_layers=2, **SIZES | settings
    )
    return xf.Transformer(config, seed=3)


def batches(count=4, rows=3, length=7):
    rng = np.random.default_rng(0)
    for _ in range(count):
        source, target, labels = rng.integers(3, 17, (3, rows, length))
        source[0, -2:] = labels[1, -3:] = 0
        yield source, target, labels


def loss(model, source, target, labels, rng=None):
    logits = model(source, target, rng=rng)
    losses = cross_entropy(logits, labels, pad_id=0, label_smoothing=0.1, z_loss=0.01)
    return array_namespace(losses).sum(losses)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_forward_and_gradients(monkeypatch, settings, mode):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    model = translator(**settings)
    for function in (loss, xf.value_and_grad(loss)):
        jitted = xf.jit(function)
        for batch in batches():
            assert equal_bits(jitted(model, *batch), function(model, *batch))


@for_each("dtype", ["float64", "float16"])
def test_other_dtypes(dtype):
    model = translator().to(dtype=dtype)
    jitted = xf.jit(xf.value_and_grad(loss))
    for batch in batches():
        assert equal_bits(jitted(model, *batch), xf.value_and_grad(loss)(model, *batch))


def test_a_replay_runs_no_python_code_of_the_function():
    calls = []

    def function(x):
        calls.append(x)
        return x + 1.0

    jitted = xf.jit(function)
    outputs = [jitted(np.full(3, float(value))) for value in range(5)]
    assert [output.tolist() for output in outputs] == [[value + 1.0] * 3 for value in range(5)]
    assert len(calls) == 1


def test_each_signature_is_recorded():
    shapes = []

    def function(x, scale, *, axis):
        shapes.append(x.shape)
        return array_namespace(x).sum(x * scale, axis=axis)

    jitted = xf.jit(function)
    for _ in range(3):
        for shape in ((2, 3), (3, 2)):
            x = np.arange(6.0).reshape(shape)
            for scale in (1.0, 2.0):
                for axis in (0, 1):
                    np.testing.assert_array_equal(jitted(x, scale, axis=axis), (x * scale).sum(axis=axis))
    assert len(shapes) == 8


def test_arrays_may_be_passed_by_keyword():
    jitted = xf.jit(lambda x, *, scale, shift: x * scale + shift["by"])
    for value in (1.0, 2.0, 3.0):
        result = jitted(np.ones(2), shift={"by": np.asarray(value)}, scale=np.full(2, value))
        assert result.tolist() == [2.0 * value] * 2


def test_a_module_is_read_in_place_and_another_one_is_recorded_again():
    model, other = translator(), translator(activation="gelu")
    jitted, (source, target, _) = xf.jit(lambda model, *ids: model(*ids)), next(iter(batches()))
    for _ in range(3):
        assert equal_bits(jitted(model, source, target), model(source, target))
        for _, array in model.named_parameters():
            array *= 1.25
    assert equal_bits(jitted(other, source, target), other(source, target))


@pytest.mark.parametrize("mode", MODES)
def test_a_training_step(monkeypatch, mode):
    monkeypatch.setenv("XFORMER_KERNELS", mode)

    calls = []

    def step(model, state, batch, rng, learning_rate):
        calls.append(1)
        return train_step(model, state, [batch], rng, loss_fn=lambda model, batch, rng: loss(model, *batch, rng=rng),
                          optimizer=Adam(), learning_rate=learning_rate, num_tokens=12, max_grad_norm=1.0,
                          donate=True)  # fmt: skip

    results = []
    for function in (step, xf.jit(step, donate_argnums=(0, 1))):
        model = translator(dropout=0.2)
        state = Adam().init(model)._replace(step=np.asarray(0.0))
        losses = []
        for number, batch in enumerate(batches(6)):
            rng = xf.Rng(0).with_counter(np.asarray(number))
            model, state, value, _ = function(model, state, batch, rng, np.asarray(0.01 / (number + 1)))
            losses.append(float(value))
        results.append((losses, [model, state]))
    assert results[0][0] == results[1][0]
    if mode != "portable":  # which returns new arrays
        assert len(calls) == 6 + 1
    assert len(set(results[0][0])) == 6
    assert equal_bits(results[0][1], results[1][1])


def test_results_are_not_overwritten():
    jitted = xf.jit(lambda x: (x * 2.0, [x[1:] + 1.0]))
    first, (second,) = jitted(np.asarray([1.0, 2.0]))
    jitted(np.asarray([5.0, 6.0]))
    assert (first.tolist(), second.tolist()) == ([2.0, 4.0], [3.0])


def test_temporaries_share_memory():
    def function(x):
        for _ in range(50):
            x = x + 1.0
        return x

    recording = Program(function, (np.zeros(1000),), {})
    assert 8000 <= recording.nbytes <= 3 * 8064
    assert recording.run().tolist() == [50.0] * 1000


def filled(x):
    buffer = np.zeros(2)
    for i in range(2):
        buffer[i] = x[i] * 2
    return x + buffer


READS = {
    "format": lambda x: f"{float(x[0]):.1f}",
    "float": lambda x: x * float(x[0]),
    "int": lambda x: x + int(x[0]),
    "complex": lambda x: x + complex(x[0]).real,
    "bool": lambda x: -x if x[0] > 0 else x,
    "to_host": lambda x: x + xf.backends.to_host(x)[0],
    "asarray": lambda x: x + np.asarray(x)[0],
    "array": lambda x: x + np.array(x)[0],
    "ascontiguousarray": lambda x: x + np.ascontiguousarray(x)[0],
    "vectorize": lambda x: np.vectorize(lambda number: number + 1.0)(x),
    "range": lambda x: x + sum(range(array_namespace(x).astype(x, np.int64)[0])),
    "slice": lambda x: x[: array_namespace(x).astype(x, np.int64)[0]],
    "shape": lambda x: array_namespace(x).reshape(x, (array_namespace(x).astype(x, np.int64)[0], 2)),
    "arange": lambda x: array_namespace(x).arange(array_namespace(x).astype(x, np.int64)[0]),
    "size": lambda x: array_namespace(x).zeros(array_namespace(x).astype(x, np.int64)[0]),
    "buffer": filled,
    "fill": lambda x: x + (lambda buffer: buffer.fill(x[0]) or buffer)(np.zeros(2)),
    "list": lambda x: np.asarray([x[0], x[1]]),
    "copyto": lambda x: np.copyto(np.zeros(2), x),
}


@for_each("function", READS.values())
def test_reading_values_is_an_error(function):
    with raises_line(JitError, "reads values of a traced array on the host"):
        xf.jit(function)(np.ones(2))


FOREIGN = {
    "method": (lambda x: x.tolist(), AttributeError, "traced arrays have no method 'tolist'"),
    "function": (np.histogram, JitError, "np.histogram reads values of a traced array"),
}


@for_each("function, kind, message", FOREIGN.values())
def test_methods_and_functions_of_numpy_are_refused(function, kind, message):
    with pytest.raises(kind, match=message):
        xf.jit(function)(np.ones(2))


def test_arrays_of_objects_are_an_error():
    with raises_line(JitError, "arrays of dtype object"):
        xf.jit(lambda x: array_namespace(x).astype(x, np.dtype(object)))(np.arange(2000.0))


@for_each("donated", [(), (0,)])
def test_what_a_function_writes_into_an_argument_is_there_afterwards(donated):
    def function(x, y):
        x[0] = y[1]
        x += y
        return x * 2.0

    jitted, total, expected = xf.jit(function, donate_argnums=donated), np.zeros(2), np.zeros(2)
    for value in range(4):
        y = np.full(2, float(value))
        np.testing.assert_array_equal(jitted(total, y), function(expected, y))
        np.testing.assert_array_equal(total, expected)
    if donated:  # the function is called
        expected = total.copy()
        np.testing.assert_array_equal(jitted(total, total[::-1]), function(expected, expected[::-1]))
        np.testing.assert_array_equal(total, expected)
    else:
        with raises_line(JitError, "shares memory with another array"):
            jitted(total, total[::-1])
    with raises_line(JitError, "an argument that is read-only"):
        xf.jit(function)(np.broadcast_to(1.0, (2,)), np.zeros(2))


def test_arrays_that_the_function_makes_are_made_anew_in_each_call():
    def function(x):
        xp = array_namespace(x)
        total, ones = xp.zeros(3), xp.full((2,), 1.0)
        for i in range(2):
            total[i] = total[i] + x[i]
        view = total[1:]
        view[...] = view + ones
        return total

    jitted = xf.jit(function)
    for value in range(4):
        assert jitted(np.full(2, float(value))).tolist() == [value, value + 1.0, 1.0]


@for_each("count, most", [(60, 60), (70, 64 + 3 * 70 // 16 + 1)])
def test_ever_new_signatures_are_not_traced_again_and_again(count, most):
    shapes = []

    def function(x):
        if type(x) is Tracer:
            shapes.append(x.shape)
        return x + 1.0

    jitted = xf.jit(function)
    for _ in range(3):
        for size in range(1, count + 1):
            assert jitted(np.zeros(size)).tolist() == [1.0] * size
    assert min(count, 65) <= len(shapes) <= most  # calls allow for further ones


@pytest.mark.parametrize(("memory", "count"), [(2**30, 32), (2**33, 2)])
def test_the_memory_of_the_device_limits_what_programs_keep(monkeypatch, memory, count):
    """Two programs of 2 GiB for shapes that take turns; each graph is the function itself."""
    monkeypatch.setattr(NumpyLibrary, "program_bytes", lambda self, default: memory)
    monkeypatch.setattr(CudaProgram, "nbytes", 2**31)
    graphs = []
    capture_graph = lambda function: graphs.append(function) or function  # noqa: E731
    monkeypatch.setattr(JIT, "compiler", lambda xp: functools.partial(CudaProgram, capture_graph))
    jitted = xf.jit(lambda x: x + 1.0)
    for number in range(32):
        assert jitted(np.zeros(1 + number % 2)).tolist() == [1.0] * (1 + number % 2)
    assert len(graphs) == count


def test_shapes_that_depend_on_values_are_an_error():
    with raises_line(JitError, "indexes with a boolean array"):
        xf.jit(lambda x: x[x > 0])(np.ones(2))
    with raises_line(JitError, "the shape of xp.nonzero"):
        xf.jit(lambda x: array_namespace(x).nonzero(x)[0])(np.ones(2))
    repeat = xf.jit(lambda x, count: array_namespace(x).repeat(x, count))
    assert repeat(np.ones(2), np.asarray([1, 2])).tolist() == [1.0] * 3
    with raises_line(JitError, "repeat returned shape"):
        repeat(np.ones(2), np.asarray([2, 2]))


# Zeros of either sign, infinities, NaN, halves that are rounded, the largest and smallest numbers.
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -1.5, 2.5, 127.0, np.inf, -np.inf, np.nan]
UNARY = ["abs", "all", "any", "argmax", "argmin", "ceil", "cos", "cumulative_sum", "exp", "expm1", "floor", "isfinite"]
UNARY += ["isinf", "isnan", "log", "log1p", "max", "mean", "min", "negative", "positive", "prod", "reciprocal", "round"]
UNARY += ["sign", "sin", "sqrt", "square", "std", "sum", "tanh", "trunc", "var"]
BINARY = ["add", "divide", "equal", "floor_divide", "greater", "greater_equal", "less", "less_equal", "maximum"]
BINARY += ["minimum", "multiply", "not_equal", "pow", "remainder", "subtract"]


def specials(dtype):
    """Return all pairs of special values as two arrays, in which vectors and the elements behind them have each."""
    limits = [np.finfo(dtype).max, -np.finfo(dtype).max, np.finfo(dtype).tiny, -np.finfo(dtype).smallest_subnormal]
    values = np.asarray([*SPECIAL, *limits], dtype)
    return np.tile(np.stack(np.meshgrid(values, values)).reshape(2, -1), 3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@for_each("dtype", [np.float32, np.float64])
def test_special_values(dtype):
    """A NaN may have another sign: which of two it is depends on the processor, also for NumPy."""
    x, y = specials(dtype)
    tables = {name: lambda xp, x, y, name=name: getattr(xp, name)(x) for name in UNARY}
    for name in BINARY:
        tables[name] = lambda xp, x, y, name=name: getattr(xp, name)(x, y)
        for number in (0, -0.0, 0.5, -1.0, 2, np.inf, np.nan):
            tables[name, number] = lambda xp, x, y, name=name, number=number: [
                getattr(xp, name)(x, number),
                getattr(xp, name)(number, x),
            ]
    for bounds in ((0, 1), (0.0, None), (None, -0.0), (-0.0, 0.0), (1, 0), (None, np.nan)):
        tables["clip", *bounds] = lambda xp, x, y, bounds=bounds: xp.clip(x, *bounds)
    tables["clip by arrays"] = lambda xp, x, y: [xp.clip(x, y), xp.clip(x, None, y)]
    tables["where"] = lambda xp, x, y: [xp.where(x < y, x, y), xp.where(x == y, x, 0.0)]
    # The largest zero of arrays in which there is nothing larger, and along either axis.
    for name in ("max", "min"):
        tables[name, "zeros"] = lambda xp, x, y, name=name: [
            getattr(xp, name)(xp.reshape(xp.where(x == 0, x, zero), (25, -1)), axis=axis)
            for zero in (0.0, -0.0)
            for axis in (None, 0, 1)
        ]
    xp, different = resolve("numpy"), set()
    for name, function in tables.items():
        jitted = xf.jit(lambda x, y: function(array_namespace(x), x, y))  # noqa: B023
        for _ in range(2):
            for actual, expected in zip(flatten(jitted(x, y))[0], flatten(function(xp, x, y))[0], strict=True):
                numbers = expected == expected
                if not np.array_equal(actual == actual, numbers) or not equal_bits(actual[numbers], expected[numbers]):
                    different.add(name)
    assert different == set()


REDUCTIONS = {
    "mean": lambda xp, x: xp.mean(x, axis=0, keepdims=True),
    "mean in 16 bits": lambda xp, x: xp.mean(xp.astype(x, xp.float16), axis=(0, 1)),
    "sum": lambda xp, x: xp.sum(x) + xp.sum(x, axis=1),
    "dtype": lambda xp, x: xp.sum(xp.astype(x, xp.float16), axis=0, dtype=xp.float64),
    "max": lambda xp, x: xp.max(x, axis=0) + xp.min(x, axis=0),
    "norm": lambda xp, x: xp.linalg.vector_norm(x),
    "where": lambda xp, x: xp.where(x > 2.5, x, 0.0)[0, 0],
    "cumulative": lambda xp, x: xp.cumulative_sum(x, axis=1),
    "argmax": lambda xp, x: xp.argmax(-x, axis=1),
    "clip": lambda xp, x: xp.clip(x, 2.0, x[1, 0]),
}


@for_each("dtype", [np.float32, np.float64])
@for_each("function", REDUCTIONS.values())
def test_functions_of_the_standard(function, dtype):
    jitted = xf.jit(lambda x: function(array_namespace(x), x))
    for value in range(4):
        x = np.asarray([[1.1, 2.3, 3.7], [4.9, 6.1, 7.3]], dtype) + dtype(value)
        actual, expected = jitted(x), function(resolve("numpy"), x)
        assert (actual.dtype, actual.tolist()) == (expected.dtype, expected.tolist())


LENIENT = {
    "max": lambda xp, x: xp.max(xp.max(x), axis=-1),
    "flip": lambda xp, x: xp.flip(xp.min(x)),
    "repeat": lambda xp, x: xp.repeat(xp.min(x), 2, axis=0),
    "take": lambda xp, x: xp.take(xp.min(x), xp.asarray([0]), axis=0),
    "triangles": lambda xp, x: xp.tril(x) + xp.triu(x),
}


@for_each("function", LENIENT.values())
def test_numpy_takes_fewer_axes_than_the_standard(function):
    jitted = xf.jit(lambda x: function(array_namespace(x), x))
    for value in range(2):
        x = np.arange(3.0) + value
        np.testing.assert_array_equal(jitted(x), function(resolve("numpy"), x))


def test_keys_that_add_axes():
    def function(x):
        y = array_namespace(x).zeros(x.shape)
        y[None] = x
        return y

    x = np.ones((2,) * 6)
    assert xf.jit(function)(x).tolist() == x.tolist()


class Plain:
    """An object that is hashed by its identity."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class PlainSlots:
    __slots__ = ("y",)

    def __init__(self, y):
        self.y = y


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float = 2.0


HIDING = {
    "attribute": Plain(y=np.ones(3)),
    "slot": PlainSlots(np.ones(3)),
    "nested": Plain(items=[{"y": (np.ones(3),)}]),
    "object": Plain(inner=Plain(y=np.ones(3))),
    "module": Plain(inner=Linear(3, 2, init=0)),
}


@pytest.mark.parametrize("library", ["numpy", "jax"])
@for_each("value", HIDING.values())
def test_an_object_with_arrays_in_its_attributes_is_an_error(library, value):
    xp = library_or_skip(library)
    for keywords in ({"o": value}, {"o": [value]}):
        with raises_line(JitError, "is a Plain.* with arrays in its attributes; pass its arrays"):
            xf.jit(lambda x, o: x + 1.0)(xp.ones(3), **keywords)


@for_each("value", [Plain(n=2, text="a"), Settings(), sys, len, Plain, Rng(0), xf.jit(Linear(3, 2, init=0))])
def test_objects_without_arrays_are_part_of_the_signature(value):
    jitted = xf.jit(lambda x, o: x + 1.0)
    assert [jitted(np.ones(1), value).tolist() for _ in range(3)] == [[2.0]] * 3


def test_an_argument_without_hash_is_an_error():
    with raises_line(JitError, "has type set"):
        xf.jit(lambda x, names: x + 1.0)(np.ones(2), {"a"})


def test_arrays_that_are_not_arguments_are_constants():
    hidden = np.zeros(1)
    jitted = xf.jit(lambda x: x + hidden * 2.0)  # the product is computed by the trace
    assert jitted(np.ones(1)).tolist() == [1.0]
    hidden += 1.0
    assert jitted(np.ones(1)).tolist() == [1.0]


def test_an_array_that_is_passed_twice():
    jitted = xf.jit(lambda x, y: x - 2.0 * y)
    x, y = np.ones(3), np.arange(3.0)
    for arguments in ((x, x), (x, x), (x, y), (y, x)):
        assert jitted(*arguments).tolist() == (arguments[0] - 2.0 * arguments[1]).tolist()


def test_negative_indices_and_indices_out_of_range():
    jitted, x = xf.jit(lambda x, indices: array_namespace(x).take(x, indices, axis=0)), np.arange(5.0)
    for indices in ([1, 2], [1, 2], [-1, 2], [4, -5]):
        assert jitted(x, np.asarray(indices)).tolist() == x[indices].tolist()
    for indices in ([5, 0], [0, -6]):
        with pytest.raises(IndexError):
            jitted(x, np.asarray(indices))


def test_scalars_memory_maps_and_orders_of_memory(tmp_path):
    np.arange(12.0).tofile(tmp_path / "numbers")
    mapped = np.memmap(tmp_path / "numbers", np.float64, "r").reshape(4, 3)
    jitted = xf.jit(lambda x, factor: (array_namespace(x).exp(x) * factor, x.T))
    for row in range(3):
        for x in (mapped[row : row + 2], np.asfortranarray(mapped[row : row + 2])):
            y, transposed = jitted(x, np.float64(row))
            assert y.tolist() == (np.exp(x) * row).tolist()
            assert transposed.flags.c_contiguous == x.T.flags.c_contiguous
    assert xf.grad(lambda x: array_namespace(x).sum(x * x))(mapped).tolist() == (2.0 * mapped).tolist()
    signed = xf.jit(lambda x, factor: x * factor)
    assert [str(signed(np.ones(()), factor)) for factor in (0.0, 0.0, -0.0)] == ["0.0", "0.0", "-0.0"]


class Doubling(np.ndarray):
    """An array whose functions compute something else, as those of arrays with units do."""

    def __array_ufunc__(self, function, method, *inputs, **options):
        inputs = [x.view(np.ndarray) if isinstance(x, Doubling) else x for x in inputs]
        return (2.0 * getattr(function, method)(*inputs, **options)).view(Doubling)


SQUARE = np.arange(4.0).reshape(2, 2)
SUBCLASSES = {
    "matrix": SQUARE.view(np.matrix),
    "masked": np.ma.masked_array(SQUARE, SQUARE == 1.0),
    "recarray": SQUARE.view(np.recarray),
    "ufunc": SQUARE.view(Doubling),
}
USES = {
    "without a trace": lambda x: xf.ops.gelu(x),
    "argument": lambda x: xf.jit(lambda x: x * x)(x),
    "keyword": lambda x: xf.jit(lambda x: x * x)(x=x),
    "donated": lambda x: xf.jit(lambda x: x * x, donate_argnums=0)(x),
    "layer": lambda x: xf.jit(lambda layer, x: x + layer.bias)(with_fields(xf.Linear(2, 2, init=0), bias=x), SQUARE),
    "constant": lambda x: xf.jit(lambda y: y * x)(SQUARE),
    "constant of a kernel": lambda x: xf.jit(lambda y: xf.ops.linear(y, x))(SQUARE),
    "grad": lambda x: xf.grad(lambda x: array_namespace(x).sum(x * x))(x),
    "vjp": lambda x: xf.vjp(lambda x: x * x, x),
    "constant of grad": lambda x: xf.grad(lambda y: array_namespace(y).sum(y * x))(SQUARE),
    "cotangent": lambda x: xf.vjp(lambda y: y * y, np.zeros(x.shape))[1](x),
}


@for_each("use", USES.values())
@for_each("x", SUBCLASSES.values())
def test_subclasses_of_arrays_are_refused(x, use):
    with raises_line(BackendError, r"an array is a \S+, .* pass np\.asarray\(x\)"):
        use(x)


def test_a_program_of_plain_arrays_takes_no_subclass():
    jitted = xf.jit(lambda x: x * x)
    for _ in range(2):
        jitted(SQUARE)
    for x in SUBCLASSES.values():
        with raises_line(BackendError, "an array is a"):
            jitted(x)


def test_jax_draws_anew_for_each_counter():
    jnp = library_or_skip("jax")
    rng = Rng(2**70 + 5)
    jitted = xf.jit(lambda x, rng: array_namespace(x).where(rng.bernoulli(0.5, x.shape, jnp)[0], x, 0.0))
    for counter in range(3):
        mask, _ = rng.with_counter(jnp.asarray(counter)).bernoulli(0.5, (64,), jnp)
        assert jitted(jnp.ones(64), rng.with_counter(jnp.asarray(counter))).tolist() == mask.astype(float).tolist()
    with raises_line(JitError, "has type set"):
        jitted(jnp.ones(64), {"a"})


def test_modules_that_no_longer_exist_are_not_recorded(monkeypatch):
    recordings = []
    monkeypatch.setattr(JIT, "compiler", lambda xp: lambda *args: recordings.append(Program(*args)))
    jitted = jit_repeated(lambda model, x: model(x))
    for _ in range(20):  # new Modules often get the id of one that was deleted
        jitted(xf.Linear(2, 2, init=0), np.ones((1, 2)))
    assert not recordings


def test_a_graph_of_a_training_step(monkeypatch):
    """The graph is replaced by the function, so that no GPU is needed."""
    graphs = []
    monkeypatch.setattr(
        JIT, "compiler", lambda xp: functools.partial(CudaProgram, lambda function: graphs.append(function) or function)
    )
    results = []
    for transform in (functools.partial(xf.jit, donate_argnums=(0, 1)), lambda function: function):
        optimizer, model = Adam(), translator()

        @transform
        def step(model, state, batch, learning_rate, optimizer=optimizer):
            return train_step(model, state, [batch], None, loss_fn=lambda model, batch, rng: loss(model, *batch),
                              optimizer=optimizer, learning_rate=learning_rate, num_tokens=21, donate=True)  # fmt: skip

        state, first, losses = optimizer.init(model)._replace(step=np.asarray(0.0)), model, []
        for number, batch in enumerate(batches()):
            model, state, value, _ = step(model, state, batch, np.asarray(0.01 / (1 + number)))
            losses.append(float(value))
        assert model is first
        results.append((losses, model))
    assert len(graphs) == 1
    assert results[0][0] == results[1][0]
    assert equal_bits(results[0][1], results[1][1])
    reference = weakref.ref(model)
    recording = CudaProgram(lambda function: function, lambda model, x: x + 1.0, (model, np.ones(1)), {})
    del model, first, results
    gc.collect()
    assert reference() is None
    assert recording.result.tolist() == [2.0]


def test_inside_a_derivative_and_inside_another_jitted_function():
    inner = xf.jit(lambda x: x * x)
    outer = xf.jit(lambda x: array_namespace(x).sum(inner(x)))
    for value in range(4):
        x = np.asarray([float(value), 1.0])
        assert xf.grad(lambda x: array_namespace(x).sum(inner(x)))(x).tolist() == [2.0 * value, 2.0]
        assert float(outer(x)) == value**2 + 1.0

    def gradient(x):
        xp = array_namespace(x)  # also serves the arrays of the derivative
        return xf.grad(lambda y: xp.sum(xp.sin(y) * x))(x)

    jitted, x = xf.jit(gradient), np.asarray([0.5, 2.0])
    for _ in range(3):
        np.testing.assert_allclose(jitted(x), np.cos(x) * x)
    at_a_constant = xf.jit(lambda x: xf.grad(lambda y: array_namespace(y).sum(y * y * x))(np.ones(2)))
    for value in (1.0, 2.0, 3.0):
        assert at_a_constant(np.full(2, value)).tolist() == [2.0 * value] * 2


@pytest.mark.parametrize("derivative", ["grad", "jvp", "vmap"])
def test_plain_arrays_inside_a_derivative(derivative):
    """The function may close over arrays of the derivative, or differentiate."""
    x, slope = np.asarray([1.0, 2.0, 3.0]), xf.jit(xf.grad(lambda x: np.sum(x**3)))

    def compute(jit):
        def f(y):
            closure = jit(lambda x: x * y)
            return sum(np.sum(closure(x) + slope(x) * y) for _ in range(4))

        return xf.jvp(f, (x,), (x,)) if derivative == "jvp" else getattr(xf, derivative)(f)(x)

    np.testing.assert_array_equal(compute(xf.jit), compute(lambda function: function))


@for_each("name", ["torch", "jax", "array_api_strict"])
def test_other_libraries(name):
    xp = library_or_skip(name)
    model = translator().to(xp)
    jitted = xf.jit(lambda model, source, target: model(source, target))
    for source, target, _ in batches(3):
        source, target = xp.asarray(source), xp.asarray(target)
        expected = model(source, target)
        np.testing.assert_allclose(
            xf.backends.to_host(jitted(model, source, target)), xf.backends.to_host(expected), rtol=1e-4, atol=1e-5
        )


def test_torch_compiles_a_function_once_if_it_is_told_to(monkeypatch):
    torch, compiled = pytest.importorskip("torch"), []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    for torch_compile, count in ((False, 0), (True, 1)):
        jitted = xf.jit(lambda x: x + 1.0, torch_compile=torch_compile)
        assert [jitted(torch.ones(2) * value).tolist() for value in (1.0, 2.0)] == [[2.0] * 2, [3.0] * 2]
        assert jitted(np.ones(2)).tolist() == [2.0] * 2
        assert len(compiled) == count


def test_ids_out_of_range_are_refused_by_every_call():
    model = translator()
    jitted, (source, target, _) = xf.jit(model), next(iter(batches()))
    for _ in range(3):
        jitted(source, target)
    with raises_line(xf.errors.DataError, "range from"):
        jitted(source + 15, target)


def test_traced_arrays_do_not_leave_the_function():
    kept = []
    jitted = xf.jit(lambda x: kept.append(x) or x + 1.0)
    assert type(jitted(np.ones(2))) is np.ndarray
    assert repr(kept[0]) == "Tracer(float64, (2,))"
    for use in (lambda x: x + 1.0, float, np.asarray, lambda x: array_namespace(x).sin(x)):
        with raises_line(JitError, "after its function had ended"):
            use(kept[0])


def test_parallel_map_is_recorded(monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "2")
    jitted = xf.jit(lambda x: sum(parallel_map(lambda factor: x * factor, [2.0, 3.0])))
    assert [float(jitted(np.asarray(float(value)))) for value in range(4)] == [0.0, 5.0, 10.0, 15.0]


def test_static_arguments():
    jitted = xf.jit(lambda x, power, names: x**power + len(names), static_argnums=(1, 2))
    for power in (1, 2, 1):
        assert jitted(np.asarray([3.0]), power, ("a", "b")).tolist() == [3.0**power + 2.0]
    with raises_line(JitError, "argument 1 is static but contains arrays"):
        jitted(np.asarray([3.0]), np.asarray(2.0), ())
    with raises_line(JitError, "has type list"):
        xf.jit(lambda x, names: x, static_argnums=1)(np.ones(1), ["a"])
    with raises_line(ConfigError, "overlap"):
        xf.jit(lambda x: x, static_argnums=0, donate_argnums=0)


def test_an_array_that_is_the_index_of_its_own_elements():
    def function(x):
        k = array_namespace(x).astype(x, np.int64)
        k[k] = 3
        return k * 2

    jitted = xf.jit(function)
    for values in ([1.0, 2.0, 0.0], [2.0, 2.0, 2.0], [0.0, 1.0, 1.0]):
        assert jitted(np.asarray(values)).tolist() == function(np.asarray(values)).tolist()


def test_arguments_that_the_last_call_had_too():
    @xf.jit
    def function(layer, pair, scale, *, power=1):
        xp = xf.array_namespace(*pair)
        return layer(pair[0]) * scale + xp.sum(pair[1]) ** power

    layers = [xf.Linear(3, 3, init=seed) for seed in (0, 1)]
    x, y = np.ones((2, 3), np.float32), np.arange(3.0, dtype=np.float32)
    pair = [x, y]
    for layer, change, scale, power in (
        (0, 0, 2.0, 1),
        (0, 1, 2.0, 1),
        (1, 2, 2.0, 1),
        (1, 2, -0.0, 1),
        (1, 3, 0.0, 2),
        (0, 3, 2.0, 2),
    ):
        pair[1] = y + np.float32(change)  # in the same list
        expected = layers[layer](x) * scale + pair[1].sum() ** power
        np.testing.assert_allclose(function(layers[layer], pair, scale, power=power), expected, rtol=1e-6)

    with pytest.raises(JitError, match="reads values"):  # of another library than the last call, and of a trace
        xf.jit(lambda module, x: float(function(module, [x, x], 2.0)[0, 0]))(layers[0], x)
    torch = pytest.importorskip("torch")
    moved, ones = layers[0].to(torch), torch.ones(2, 3)
    np.testing.assert_allclose(function(moved, [ones, ones], 2.0), moved(ones) * 2.0 + 6.0, rtol=1e-6)


def test_ids_that_are_not_contiguous_are_checked_in_each_call():
    embed = xf.jit(xf.Embedding(7, 2, init=0))
    ids = np.arange(12).reshape(3, 4) % 7
    for _ in range(2):
        assert embed(ids[:, 1:3]).shape == (3, 2, 2)
    with pytest.raises(DataError, match="to 9; expected 0 to 6"):
        embed(np.where(ids == 5, 9, ids)[:, 1:3])


def test_a_trace_keeps_no_memory_of_arrays_that_nobody_uses_any_more():
    def chain(x):
        xp = xf.array_namespace(x)
        for _ in range(20):
            x = xp.tanh(x) + xp.sin(x)[..., ::-1]
        return xp.sum(x * x)

    x = np.random.default_rng(0).normal(size=(500, 500))  # 2 MB
    jitted, values, peaks = xf.jit(chain), [], []
    for function in (chain, jitted, jitted):
        tracemalloc.start()
        values.append(float(function(x)))
        peaks.append(tracemalloc.get_traced_memory()[1] / x.nbytes)
        tracemalloc.stop()
    assert values[0] == values[1] == values[2]
    assert peaks[1] < peaks[0] + 6  # the copy of x, and the memory of the program


def test_an_object_that_gets_an_array_later_is_an_error():
    class Settings:
        scale = 2.0

    settings, function = Settings(), xf.jit(lambda x, settings: x * settings.scale)
    assert [float(function(np.ones(1), settings)[0]) for _ in range(2)] == [2.0, 2.0]
    settings.scale = np.asarray(5.0)
    with pytest.raises(JitError, match="arrays in its attributes"):
        function(np.ones(1), settings)
