"""A captured function returns the bits of the function, whatever the values of its arguments."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import warnings
import weakref

import numpy as np
import pytest

import xformer as xf
from tests.conftest import library_or_skip
from tests.reference import raises_line
from xformer.backends import array_namespace, resolve
from xformer.backends.recording import RecordedArray
from xformer.errors import CaptureError
from xformer.ops import cross_entropy
from xformer.random import Rng
from xformer.replay.function import capture_if_repeated
from xformer.replay.recording import GraphRecording, Recording
from xformer.threads import parallel_map
from xformer.training import Adam
from xformer.training.step import train_step
from xformer.tree import flatten

SIZES = {"d_model": 16, "num_heads": 4, "d_ff": 24, "dropout": 0.0}
MODES = ["auto", "no-jit", "portable"]
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
        captured = xf.capture(function)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a replay that differs
            for batch in batches():
                assert equal_bits(captured(model, *batch), function(model, *batch))


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_dtypes(dtype):
    model = translator().to(dtype=dtype)
    captured = xf.capture(xf.value_and_grad(loss))
    for batch in batches():
        assert equal_bits(captured(model, *batch), xf.value_and_grad(loss)(model, *batch))


def test_a_replay_runs_no_python_code_of_the_function():
    calls = []

    def function(x):
        calls.append(x)
        return x + 1.0

    captured = xf.capture(function)
    outputs = [captured(np.full(3, float(value))) for value in range(5)]
    assert [output.tolist() for output in outputs] == [[value + 1.0] * 3 for value in range(5)]
    assert len(calls) == 2  # recorded, and compared


def test_each_signature_is_recorded():
    shapes = []

    def function(x, scale, *, axis):
        shapes.append(x.shape)
        return array_namespace(x).sum(x * scale, axis=axis)

    captured = xf.capture(function)
    for _ in range(3):
        for shape in ((2, 3), (3, 2)):
            x = np.arange(6.0).reshape(shape)
            for scale in (1.0, 2.0):
                for axis in (0, 1):
                    np.testing.assert_array_equal(captured(x, scale, axis=axis), (x * scale).sum(axis=axis))
    assert len(shapes) == 2 * 8


def test_a_module_is_read_in_place_and_another_one_is_recorded_again():
    model, other = translator(), translator(activation="gelu")
    captured, (source, target, _) = xf.capture(lambda model, *ids: model(*ids)), next(iter(batches()))
    for _ in range(3):
        assert equal_bits(captured(model, source, target), model(source, target))
        for _, array in model.named_parameters():
            array *= 1.25
    assert equal_bits(captured(other, source, target), other(source, target))


def test_a_model_and_its_methods():
    model = translator()
    forward, encode = xf.capture(model), xf.capture(model.encode)
    for source, target, _ in batches():
        assert equal_bits(forward(source, target), model(source, target))
        assert equal_bits(encode(source), model.encode(source))
        for _, array in model.named_parameters():
            array *= 1.25


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
    for function in (step, xf.capture(step, donate_argnums=(0, 1))):
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
        assert len(calls) == 6 + 2  # recorded, and compared
    assert len(set(results[0][0])) == 6
    assert equal_bits(results[0][1], results[1][1])


def test_results_are_not_overwritten():
    captured = xf.capture(lambda x: (x * 2.0, [x[1:] + 1.0]))
    first, (second,) = captured(np.asarray([1.0, 2.0]))
    captured(np.asarray([5.0, 6.0]))
    assert (first.tolist(), second.tolist()) == ([2.0, 4.0], [3.0])


def test_temporaries_share_memory():
    def function(x):
        for _ in range(50):
            x = x + 1.0
        return x

    recording = Recording(function, (np.zeros(1000),), {})
    assert recording.nbytes <= 3 * 8064
    assert recording.replay().tolist() == [50.0] * 1000


READS = {
    "format": lambda x: f"{x[0]:.1f}",
    "allclose": lambda x: np.allclose(x, x),
    "float": lambda x: x * float(x[0]),
    "bool": lambda x: -x if x[0] > 0 else x,
    "to_host": lambda x: x + xf.backends.to_host(x)[0],
    "tolist": lambda x: x + x.tolist()[0],
    "tobytes": lambda x: x + np.frombuffer(x.tobytes())[0],
    "asarray": lambda x: x + np.asarray(x)[0],
    "array": lambda x: x + np.array(x)[0],
    "ascontiguousarray": lambda x: x + np.ascontiguousarray(x)[0],
    "flat": lambda x: x + x.flat[1],
    "item": lambda x: x + x.item(0),
    "vectorize": lambda x: np.vectorize(lambda number: number + 1.0)(x),
    "int": lambda x: x + int(x[0]),
    "print": lambda x: print(x) or x,
    "repr": lambda x: np.array_repr(x) and x,
    "buffer": lambda x: filled(x),
    "fill": lambda x: x + (lambda buffer: buffer.fill(x[0]) or buffer)(np.zeros(2)),
    "index": lambda x: np.ones(2)[array_namespace(x).astype(x, np.int64)],
    "method": lambda x: np.ones(2).dot(x),
    "concatenate": lambda x: np.asarray([x[0], x[1]]),
}


def filled(x):
    buffer = np.zeros(2)
    for i in range(2):
        buffer[i] = x[i] * 2
    return x + buffer


@pytest.mark.parametrize("function", READS.values(), ids=READS)
def test_reading_values_is_an_error(function):
    with raises_line(CaptureError, "reads values of an array on the host"):
        xf.capture(function)(np.ones(2))


VIEWED = {
    "view": lambda x: x.view(np.ndarray) * 2.0,
    "xp.asarray": lambda x: array_namespace(x).asarray(x) * 2.0,
    "list": lambda x: array_namespace(x).stack([x[1], x[0]]),
    "iteration": lambda x: sum(row * 2.0 for row in x),
}


@pytest.mark.parametrize("function", VIEWED.values(), ids=VIEWED)
def test_views_of_arguments_are_recorded(function):
    captured = xf.capture(function)
    for value in (1.0, 1.0, 2.0, 3.0):
        np.testing.assert_array_equal(captured(np.full(2, value)), function(np.full(2, value)))


PLAIN_TARGETS = {
    "out": lambda x: np.multiply(x, 2.0, out=np.zeros(2)) + 1.0,
    "in place": lambda x: (lambda buffer: buffer.__iadd__(x))(np.zeros(2)),
    "at": lambda x: (lambda buffer: np.add.at(buffer, [0, 0], x) or buffer)(np.zeros(2)),
    "copyto": lambda x: (lambda buffer: np.copyto(buffer, x) or buffer)(np.zeros(2)),
    "take": lambda x: np.take(x, [1, 0], out=np.zeros(2)),
}


@pytest.mark.parametrize("function", PLAIN_TARGETS.values(), ids=PLAIN_TARGETS)
def test_writing_into_a_plain_array_is_an_error(function):
    with raises_line(CaptureError, "writes values of an argument into a plain array"):
        xf.capture(function)(np.ones(2))


def test_arrays_of_objects_are_an_error():
    for function in (lambda x: (x * 3.0).astype(object).astype(float), lambda x: np.frompyfunc(abs, 1, 1)(x)):
        with raises_line(CaptureError, "arrays of dtype object"):
            xf.capture(function)(np.arange(2000.0))
        optional = capture_if_repeated(function)
        for _ in range(4):
            np.testing.assert_array_equal(optional(np.arange(3.0)), function(np.arange(3.0)))


@pytest.mark.parametrize("function", [*READS.values(), *PLAIN_TARGETS.values()], ids=[*READS, *PLAIN_TARGETS])
def test_a_function_that_cannot_be_recorded_is_called_if_that_is_allowed(function):
    optional = capture_if_repeated(function)
    for value in (1, 1, 1, 0):
        np.testing.assert_array_equal(optional(np.full(2, float(value))), function(np.full(2, float(value))))


@pytest.mark.parametrize(("count", "most"), [(60, 60), (70, 64 + 3 * 70 // 16 + 1)])
def test_ever_new_signatures_are_not_recorded_again_and_again(monkeypatch, count, most):
    recordings = []

    def record(*args):
        recordings.append(1)
        return Recording(*args)

    monkeypatch.setattr("xformer.replay.function.recorder", lambda xp: record)
    captured = xf.capture(lambda x: x + 1.0)
    for _ in range(3):
        for size in range(1, count + 1):
            assert captured(np.zeros(size)).tolist() == [1.0] * size
    assert len(recordings) <= most


def test_shapes_that_depend_on_values_are_an_error():
    with raises_line(CaptureError, "indexes with a boolean array"):
        xf.capture(lambda x: x[x > 0])(np.ones(2))
    captured = xf.capture(lambda x: np.nonzero(x)[0] * 2)
    for _ in range(3):
        assert captured(np.asarray([1.0, 0.0, 3.0])).tolist() == [0, 4]
    with raises_line(CaptureError, "nonzero returned an array of shape"):
        captured(np.asarray([0.0, 0.0, 3.0]))
    optional = capture_if_repeated(lambda x: np.nonzero(x)[0] * 2)
    for _ in range(4):
        optional(np.asarray([1.0, 0.0, 3.0]))
    assert optional(np.asarray([0.0, 0.0, 3.0])).tolist() == [4]


REDUCTIONS = {
    "mean": lambda x: np.mean(x, axis=0, keepdims=True),
    "mean of some": lambda x: np.mean(x, axis=-1, where=np.asarray([True, False, True])),
    "mean of integers": lambda x: np.mean(np.astype(x, np.int64)),
    "mean in 16 bits": lambda x: np.mean(np.astype(x, np.float16), axis=(0, 1)),
    "sum": lambda x: np.sum(x) + x.sum(axis=1) + x.sum(0, keepdims=True)[:, :2].reshape(2),
    "dtype": lambda x: np.sum(np.astype(x, np.float16), axis=0, dtype=np.float64),
    "max": lambda x: np.max(x, axis=0, initial=1.0) + x.min(axis=0),
    "number": lambda x: np.linalg.norm(x) + np.vdot(x, x),
    "where": lambda x: np.where(x > 0.0)[0] + np.where(x > -10.0, x, 0.0)[0, 0],
}


@pytest.mark.parametrize("function", REDUCTIONS.values(), ids=REDUCTIONS)
def test_reductions(function):
    captured = xf.capture(function)
    for value in range(4):
        x = np.asarray([[1.1, 2.3, 3.7], [4.9, 6.1, 7.3]]) + value
        actual, expected = captured(x), function(x)
        assert (actual.dtype, actual.tolist()) == (expected.dtype, expected.tolist())


def test_functions_with_several_results():
    captured = xf.capture(lambda x: np.linalg.eigh(x).eigenvalues + 1.0)
    for value in range(4):
        assert captured(np.asarray([[float(value), 0.0], [0.0, 9.0]])).tolist() == [value + 1.0, 10.0]


def test_an_argument_without_hash_is_an_error():
    with raises_line(CaptureError, "has type set"):
        xf.capture(lambda x, names: x + 1.0)(np.ones(2), {"a"})


def test_a_function_that_differs_is_called():
    hidden = np.zeros(1)
    captured = xf.capture(lambda x: x + hidden * 2.0)  # computed once, before the replays
    assert captured(np.ones(1)).tolist() == [1.0]
    hidden += 1.0
    with pytest.warns(UserWarning, match="differs from the function") as caught:
        assert captured(np.ones(1)).tolist() == [3.0]
    assert caught[0].filename == __file__
    hidden += 1.0
    assert captured(np.ones(1)).tolist() == [5.0]


def test_donated_arrays_are_correct_after_a_replay_that_differs():
    hidden = np.zeros(1)

    def function(total, x):
        total[...] = total + x + hidden * 1.0
        return total

    captured, total = xf.capture(function, donate_argnums=(0,)), np.zeros(1)
    captured(total, np.ones(1))
    hidden += 10.0
    with pytest.warns(UserWarning, match="differs from the function"):
        captured(total, np.ones(1))
    assert total.tolist() == [12.0]


def test_an_array_that_is_passed_twice():
    captured = xf.capture(lambda x, y: x - 2.0 * y)
    x, y = np.ones(3), np.arange(3.0)
    for arguments in ((x, x), (x, x), (x, y), (y, x)):
        assert captured(*arguments).tolist() == (arguments[0] - 2.0 * arguments[1]).tolist()


def test_negative_indices_and_indices_out_of_range():
    captured, x = xf.capture(lambda x, indices: array_namespace(x).take(x, indices, axis=0)), np.arange(5.0)
    for indices in ([1, 2], [1, 2], [-1, 2], [4, -5]):
        assert captured(x, np.asarray(indices)).tolist() == x[indices].tolist()
    for indices in ([5, 0], [0, -6]):
        with pytest.raises(IndexError):
            captured(x, np.asarray(indices))


def _fill(x):
    y = x * 2.0
    np.fill_diagonal(y, 5.0)
    return y


def _take_into(x):
    y = x * 2.0
    np.take(x, np.asarray([1, 0]), axis=0, out=y)
    return y


WRITES = {"fill_diagonal": _fill, "take": _take_into, "reshape": lambda x: np.reshape(x, (4,), order="F") * 2.0}


@pytest.mark.parametrize("function", WRITES.values(), ids=WRITES)
def test_functions_that_write_into_an_array_or_in_another_order(function):
    captured = xf.capture(function)
    for value in range(4):
        x = np.arange(4.0).reshape(2, 2) * value
        assert captured(x).tolist() == function(x).tolist()


def test_scalars_memory_maps_and_orders_of_memory(tmp_path):
    np.arange(12.0).tofile(tmp_path / "numbers")
    mapped = np.memmap(tmp_path / "numbers", np.float64, "r").reshape(4, 3)
    captured = xf.capture(lambda x, factor: (array_namespace(x).exp(x) * factor, x.T))
    for row in range(3):
        for x in (mapped[row : row + 2], np.asfortranarray(mapped[row : row + 2])):
            y, transposed = captured(x, np.float64(row))
            assert y.tolist() == (np.exp(x) * row).tolist()
            assert transposed.flags.c_contiguous == x.T.flags.c_contiguous
    signed = xf.capture(lambda x, factor: x * factor)
    assert [str(signed(np.ones(()), factor)) for factor in (0.0, 0.0, -0.0)] == ["0.0", "0.0", "-0.0"]


def test_results_that_are_not_arrays_are_compared():
    for function in (lambda x, count: (x + 1.0, count), lambda x, count: [x + 1.0] * count):
        counts = itertools.count(1)
        captured = xf.capture(lambda x, function=function, counts=counts: function(x, next(counts)))
        first = captured(np.ones(1))
        with pytest.warns(UserWarning, match="differs from the function"):
            assert str(captured(np.ones(1))) != str(first)


def test_a_comparison_that_an_error_ends_is_made_later():
    hidden = np.zeros(1)
    captured = xf.capture(lambda x, indices: array_namespace(x).take(x, indices) + hidden * 1.0)
    captured(np.ones(2), np.asarray([0]))
    with pytest.raises(IndexError):
        captured(np.ones(2), np.asarray([7]))
    captured(np.ones(2), np.asarray([0]))
    hidden += 1.0
    with pytest.warns(UserWarning, match="differs from the function"):
        assert captured(np.ones(2), np.asarray([0])).tolist() == [2.0]


def test_a_captured_function_of_constants_inside_another_one():
    inner, constant = xf.capture(lambda x: x + 1.0), np.ones(1)
    outer = xf.capture(lambda x: x + inner(constant))
    assert [float(outer(np.asarray(value))[0]) for value in (1.0, 2.0, 3.0)] == [3.0, 4.0, 5.0]


def test_jax_draws_anew_for_each_counter():
    jnp = library_or_skip("jax")
    rng = Rng(2**70 + 5)
    captured = xf.capture(lambda x, rng: array_namespace(x).where(rng.bernoulli(0.5, x.shape, jnp)[0], x, 0.0))
    for counter in range(3):
        mask, _ = rng.with_counter(jnp.asarray(counter)).bernoulli(0.5, (64,), jnp)
        assert captured(jnp.ones(64), rng.with_counter(jnp.asarray(counter))).tolist() == mask.astype(float).tolist()
    with raises_line(CaptureError, "has type set"):
        captured(jnp.ones(64), {"a"})


def test_modules_that_no_longer_exist_are_not_recorded(monkeypatch):
    recordings = []
    monkeypatch.setattr(
        "xformer.replay.function.recorder", lambda xp: lambda *args: recordings.append(Recording(*args))
    )
    captured = capture_if_repeated(lambda model, x: model(x))
    for _ in range(20):  # new Modules often get the id of one that was deleted
        captured(xf.Linear(2, 2, init=0), np.ones((1, 2)))
    assert not recordings


def test_a_graph_of_a_training_step(monkeypatch):
    """The graph is replaced by the function, so that no GPU is needed."""
    graphs = []
    monkeypatch.setattr(
        "xformer.replay.function.recorder",
        lambda xp: functools.partial(GraphRecording, lambda function: graphs.append(function) or function),
    )
    results = []
    for transform in (functools.partial(xf.capture, donate_argnums=(0, 1)), lambda function: function):
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
    recording = GraphRecording(lambda function: function, lambda model, x: x + 1.0, (model, np.ones(1)), {})
    del model, first, results
    gc.collect()
    assert reference() is None
    assert recording.result.tolist() == [2.0]


def test_several_threads():
    model = translator()
    captured, results = xf.capture(model), {}

    def run(number):
        results[number] = [captured(source, target) for source, target, _ in batches(8)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [model(source, target) for source, target, _ in batches(8)]
    assert all(equal_bits(results[number], expected) for number in range(4))


def test_inside_a_derivative_and_inside_another_captured_function():
    inner = xf.capture(lambda x: x * x)
    outer = xf.capture(lambda x: array_namespace(x).sum(inner(x)))
    for value in range(4):
        x = np.asarray([float(value), 1.0])
        assert xf.grad(lambda x: array_namespace(x).sum(inner(x)))(x).tolist() == [2.0 * value, 2.0]
        assert float(outer(x)) == value**2 + 1.0


@pytest.mark.parametrize("name", ["torch", "jax", "array_api_strict"])
def test_other_libraries(name):
    xp = library_or_skip(name)
    model = translator().to(xp)
    captured = xf.capture(lambda model, source, target: model(source, target))
    for source, target, _ in batches(3):
        source, target = xp.asarray(source), xp.asarray(target)
        expected = model(source, target)
        np.testing.assert_allclose(
            xf.backends.to_host(captured(model, source, target)), xf.backends.to_host(expected), rtol=1e-4, atol=1e-5
        )


def test_ids_out_of_range_are_refused_by_every_call():
    model = translator()
    captured, (source, target, _) = xf.capture(model), next(iter(batches()))
    for _ in range(3):
        captured(source, target)
    with raises_line(xf.errors.DataError, "range from"):
        captured(source + 15, target)


def test_recorded_arrays_do_not_leave_the_function():
    kept = []
    captured = xf.capture(lambda x: kept.append(x) or x + 1.0)
    assert type(captured(np.ones(2))) is np.ndarray
    assert type(kept[0]) is RecordedArray
    assert type(kept[0] + 1.0) is np.ndarray
    assert repr(kept[0]) == "RecordedArray((2,), float64)"


def test_parallel_map_is_recorded(monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "2")
    captured = xf.capture(lambda x: sum(parallel_map(lambda factor: x * factor, [2.0, 3.0])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a replay that differs
        assert [float(captured(np.asarray(float(value)))) for value in range(4)] == [0.0, 5.0, 10.0, 15.0]


def test_fit_replays_batches_of_one_shape(tmp_path):
    xp = resolve("numpy")
    data = [tuple(xp.asarray(part) for part in batch) for batch in batches(8)]
    histories, models = [], []
    for capture in (True, False):
        calls = []

        def loss_fn(model, batch, rng, calls=calls):
            calls.append(1)
            return loss(model, *batch, rng=rng)

        model, history = xf.fit(translator(dropout=0.1), loss_fn, data, optimizer=Adam(), learning_rate=0.01,
                                steps=12, num_tokens=lambda batch: 12, capture=capture)  # fmt: skip
        histories.append([event.loss for event in history])
        models.append(model)
        assert len(calls) == (12 if not capture else len(calls))
        assert len(calls) < 12 or not capture
    assert histories[0] == histories[1]
    assert equal_bits(*models)
