"""Operations with arrays of any shape, dtype and layout: each call raises one line, or returns the right result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from xformer import ops
from xformer.environment import clear_cache
from xformer.errors import XformerError
from xformer.ops.weights import PackedWeight, QuantizedWeight
from xformer.tracing import vjp


def adam(parameter, gradient, exp_avg, exp_avg_sq):
    exp_avg_sq = exp_avg_sq * exp_avg_sq if isinstance(exp_avg_sq, np.ndarray) else exp_avg_sq
    settings = {"learning_rate": 0.1, "step": 2, "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9}
    (updated,) = ops.adam([(parameter, gradient, exp_avg, exp_avg_sq)], **settings)
    return updated


def quantized(x, weight, bias):
    return ops.linear(x, QuantizedWeight.quantize(weight, "int8").T, bias)


def packed(x, weight, bias):
    floating = np.issubdtype(getattr(weight, "dtype", None), np.floating) and np.ndim(weight) == 2
    return ops.linear(x, PackedWeight.pack(weight) if floating else weight, bias)


# For each operation, a function of arrays and, for each array, its axes and its kind.
OPERATIONS = {
    "linear": (ops.linear, ["bli float", "io float", "o float?"]),
    "linear with relu": (lambda *arrays: ops.linear(*arrays, activation="relu"), ["bli float", "io float", "o float?"]),
    "quantized": (quantized, ["bli float", "oi float", "o float?"]),
    "packed": (packed, ["bli float", "io float", "o float?"]),
    "project_heads": (
        lambda x, w, b: ops.project_heads(x, (w, b, 1), (w, None, 1))[0],
        ["bli float", "io float", "o float?"],
    ),
    "attention": (ops.attention, ["bhqd float", "bhkd float", "bhke float", "b11k bool?", "hqk float?"]),
    "causal attention": (
        lambda *arrays: ops.attention(*arrays, causal=True),
        ["bhqd float", "bhkd float", "bhke float"],
    ),
    "attention with softcap": (
        lambda *arrays: ops.attention(*arrays, softcap=2.0),
        ["bhqd float", "bhkd float", "bhke float", "b11k bool?", "hqk float?"],
    ),
    "attention_weights": (ops.attention_weights, ["bhqd float", "bhkd float", "b1qk bool?"]),
    "softmax": (ops.softmax, ["bli float", "li bool?"]),
    "layer_norm": (ops.layer_norm, ["bli float", "i float", "i float?"]),
    "rms_norm": (ops.rms_norm, ["bli float", "i float"]),
    "cross_entropy": (ops.cross_entropy, ["bli float", "bl ids:i"]),
    "padded cross_entropy": (lambda x, ids: ops.cross_entropy(x, ids, pad_id=-100), ["bli float", "bl ids:i"]),
    "embedding": (ops.embedding, ["io float", "bl ids:i"]),
    "dropout": (lambda x, mask: ops.dropout(x, mask, 0.5), ["bli float", "bli bool"]),
    "rotate": (ops.rotate, ["bhqd float", "qf float", "qf float"]),
    "relu": (ops.relu, ["bli float"]),
    "gelu": (ops.gelu, ["bli float"]),
    "gelu_tanh": (ops.gelu_tanh, ["bli float"]),
    "silu": (ops.silu, ["bli float"]),
    "squared_norm": (ops.squared_norm, ["bli float", "io float"]),
    "cast": (lambda *arrays: ops.cast(*arrays, dtype="float32")[1], ["bli float", "io float"]),
    "adam": (adam, ["io float"] * 4),
}
NO_DERIVATIVE = {"adam", "packed", "quantized"}


def reshaped(array, axis, size):
    """Return an array with another size along an axis, or with an axis more or less."""
    if size is None:
        return array[0] if array.ndim and array.shape[0] else array[None]
    shape = list(array.shape)
    if shape:
        shape[axis % len(shape)] = size
    return np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)


def unaligned(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)[1 : array.nbytes + 1]
    copy = memory.view(array.dtype).reshape(array.shape) if array.size else array
    copy[...] = array
    return copy


def read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


LAYOUTS = {
    "as it is": lambda x: x,
    "columns first": np.asfortranarray,
    "reversed": lambda x: x[..., ::-1].copy()[..., ::-1] if x.ndim else x,
    "every other": lambda x: np.repeat(x, 2, axis=-1)[..., ::2] if x.ndim else x,
    "broadcast": lambda x: np.broadcast_to(x[..., :1], x.shape) if x.ndim and x.shape[-1] else x,
    "read-only": read_only,
    "unaligned": unaligned,
}
DTYPES = ["float32", "float64", "float16", ">f4", "int64", "uint8", "bool", "complex64"]
NOT_ARRAYS = [lambda x: x.tolist(), lambda x: 1.5, lambda x: None, lambda x: "x"]


@st.composite
def calls(draw):
    """Draw an operation and its arrays, with at most two changes that make most of the calls invalid."""
    name = draw(st.sampled_from(sorted(OPERATIONS)))
    sizes = {axis: draw(st.sampled_from([0, 1, 2, 3, 5, 33])) for axis in "bhqdkeliof"} | {"1": 1}
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    dtype, arrays = draw(st.sampled_from(["float32", "float32", "float64", "float16"])), []
    for spec in OPERATIONS[name][1]:
        axes, kind = spec.split()
        shape = [sizes[axis] for axis in axes]
        if kind.endswith("?") and draw(st.booleans()):
            arrays.append(None)
        elif kind.startswith("bool"):
            arrays.append(rng.random(shape) < 0.7)
        elif kind.startswith("ids"):
            arrays.append(rng.integers(0, max(1, sizes[kind[-1]]), shape))
        else:
            arrays.append(rng.normal(size=shape).astype(dtype))
    for index, array in enumerate(arrays):
        if array is not None:
            arrays[index] = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](array)
    for _ in range(draw(st.integers(0, 2))):
        index = draw(st.integers(0, len(arrays) - 1))
        if not isinstance(arrays[index], np.ndarray):
            continue
        change = draw(st.sampled_from(["size", "size", "axes", "dtype", "value", "no array"]))
        if change == "size":
            arrays[index] = reshaped(arrays[index], draw(st.integers(0, 3)), draw(st.sampled_from([0, 1, 2, 4, 34])))
        elif change == "axes":
            arrays[index] = reshaped(arrays[index], 0, None)
        elif change == "dtype":
            with np.errstate(all="ignore"):
                arrays[index] = np.abs(arrays[index]).astype(draw(st.sampled_from(DTYPES)))
        elif change == "value" and arrays[index].size and arrays[index].dtype.kind in "iu":
            arrays[index] = arrays[index].copy()
            value = np.asarray(draw(st.sampled_from([-1, -100, 4, 10**9])))
            arrays[index].flat[0] = value.astype(arrays[index].dtype)  # may wrap around
        elif change == "no array":
            arrays[index] = draw(st.sampled_from(NOT_ARRAYS))(arrays[index])
    return name, arrays


def attempt(name, arrays, mode):
    """Return the output and, for operations with a derivative, the cotangents of the floating arrays; or the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XFORMER_KERNELS", mode)
        clear_cache()
        result = run(name, arrays)
    clear_cache()
    return result


def run(name, arrays):
    function = OPERATIONS[name][0]
    places = [i for i, x in enumerate(arrays) if isinstance(x, np.ndarray) and x.dtype.kind == "f"]

    def of_floats(*floats):
        own = dict(zip(places, floats, strict=True))
        return function(*(own.get(index, array) for index, array in enumerate(arrays)))

    try:
        with np.errstate(all="ignore"):
            output = function(*arrays)
            if name in NO_DERIVATIVE or not places:
                return [output] if not isinstance(output, tuple) else list(output)
            _, pull = vjp(of_floats, *(arrays[place] for place in places))
            return [output, *pull(np.cos(np.arange(output.size)).reshape(output.shape).astype(output.dtype))]
    except XformerError as error:
        return type(error) if "\n" not in str(error) else error


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@example(call=("rotate", [np.ones((1, 4, 5, 4), "f"), np.ones((5, 4), "f"), np.ones((5, 4), "f")]))
@example(call=("linear", [np.ones((64, 128), "f"), np.ones((128, 512), "f"), np.ones(1, "f")]))
@example(call=("linear", [np.ones((64, 128), "f"), np.ones((128, 512), "f"), np.ones(600, "f")]))
@example(call=("cross_entropy", [np.ones((4, 7), "f"), np.full(4, -100)]))
@example(call=("cross_entropy", [np.ones((4, 7), "f"), np.full(4, 10**9)]))
@example(call=("attention with softcap", [*np.ones((2, 1, 2, 3, 4), "f"), np.ones((1, 2, 2, 4), "f")]))
@example(call=("layer_norm", [np.ones((4, 7), "f"), np.ones(1, "f"), None]))
@example(call=("linear with relu", [np.broadcast_to(np.float32(1), (0, 5)), np.ones((5, 2), "f"), np.ones(2, "f")]))
@example(call=("linear with relu", [np.broadcast_to(np.float16(1), (0, 5)), np.ones((5, 2), "e"), np.ones(2, "e")]))
@given(call=calls())
def test_a_call_raises_one_line_or_returns_the_right_result(call):
    name, arrays = call
    actual = attempt(name, arrays, "auto")
    expected = attempt(name, arrays, "portable")
    if isinstance(actual, type) or isinstance(expected, type):
        assert actual == expected
        return
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        tolerance = {"float16": 2e-2, "float32": 2e-4}.get(one.dtype.name, 1e-9)
        if name == "layer_norm":  # of rows of one value: rounding errors are divided by sqrt(epsilon) and summed
            tolerance *= 10.0
        with np.errstate(all="ignore"):
            scale = np.max(np.abs(other[np.isfinite(other)]), initial=1.0)
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale, equal_nan=True)


def labels_as_leaves(labels):
    logits = np.ones((4, 7), "f")
    return vjp(lambda logits, labels: ops.cross_entropy(logits, labels), logits, labels)


@pytest.mark.parametrize("label", [-100, -1, 7, 10**9])
def test_labels_that_are_leaves_of_a_derivative_are_checked(label):
    with pytest.raises(XformerError, match=f"labels from .*{label}"):
        labels_as_leaves(np.asarray([0, 1, label, 2]))
