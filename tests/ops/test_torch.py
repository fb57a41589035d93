"""torch kernels: values and derivatives, by us and by torch, equal those of the portable definitions."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.conftest import TOLERANCES, assert_close
from tests.ops.cases import TABLE
from tests.ops.numpy_cases import HEAD_DIM, LABELS, LENGTHS, MASKS, heads, make_mask, normal
from tests.reference import for_each
from xformer import ops, vjp
from xformer.backends import dtype_name, from_host, is_floating, resolve
from xformer.ops.optimizers import adam

torch = pytest.importorskip("torch", reason="these are its kernels")
XP = resolve("torch")


def run(function, arrays, differentiate):
    """Return the output of a function and its cotangents with respect to the floating arrays."""
    floating = [index for index, array in enumerate(arrays) if is_floating(array.dtype)]

    def of_floats(*floats):
        replaced = dict(zip(floating, floats, strict=True))
        return function(*(replaced.get(index, array) for index, array in enumerate(arrays)))

    return differentiate(of_floats, [arrays[index] for index in floating])


def by_us(function, arrays):
    output, pull = vjp(function, *arrays)
    return [output, *pull(cotangent(output))]


def by_torch(function, arrays):
    leaves = [array.detach().requires_grad_() for array in arrays]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, cotangent(output), materialize_grads=True)]


def by_torch_func(function, arrays):
    output, pull = torch.func.vjp(function, *arrays)
    return [output, *pull(cotangent(output))]


def cotangent(output):
    return torch.cos(torch.arange(output.numel(), dtype=torch.float64)).reshape(output.shape).to(output.dtype)


def assert_same(monkeypatch, operation, function, *hosts, dtype="float64"):
    """Compare all ways to differentiate a kernel with the portable definition in float64."""
    floats = {"dtype": getattr(XP, dtype)}
    arrays = [from_host(XP, host, **(floats if host.dtype.kind == "f" else {})) for host in map(np.asarray, hosts)]
    assert f"{operation} on torch: torch.{operation}" in ops.explain(lambda: function(*arrays))
    with monkeypatch.context() as context:
        context.setenv("XFORMER_KERNELS", "portable")
        expected = run(function, [a.double() if is_floating(a.dtype) else a for a in arrays], by_us)
    for differentiate in (by_us, by_torch, by_torch_func):
        for actual, reference in zip(run(function, arrays, differentiate), expected, strict=True):
            assert_close(actual, reference, dtype=dtype_name(actual.dtype), tolerance=TOLERANCES[dtype])
    with torch.inference_mode():
        actual = function(*arrays)
    assert_close(actual, expected[0], dtype=dtype_name(actual.dtype), tolerance=TOLERANCES[dtype])
    assert dtype_name(actual.dtype) == dtype or operation == "cross_entropy"  # losses are float32 or wider


@pytest.mark.parametrize("operation", [name for name in TABLE if name not in ("softmax", "add_norm")])
def test_values_and_derivatives(monkeypatch, operation):
    for function, options, *hosts in TABLE[operation]:
        assert_same(monkeypatch, operation, functools.partial(function, **options), *hosts)


@for_each("name", ["relu", "gelu", "gelu_tanh", "silu", "quick_gelu"])
@for_each("dtype", ["float64", "bfloat16"])
def test_activations(monkeypatch, name, dtype):
    assert_same(monkeypatch, name, ops.activation(name), normal(3, 5, 7), dtype=dtype)


@for_each("labels", LABELS)
@for_each("pad_id", [0, None])
def test_losses_of_bfloat16(monkeypatch, labels, pad_id):
    loss = functools.partial(ops.cross_entropy, pad_id=pad_id, label_smoothing=0.1, z_loss=0.01)
    assert_same(monkeypatch, "cross_entropy", loss, normal(2, 4, 13), np.asarray(LABELS[labels]), dtype="bfloat16")


def test_a_transposed_weight(monkeypatch):
    assert_same(monkeypatch, "linear", lambda x, w: ops.linear(x, w.mT), normal(3, 5, 7), normal(9, 7, seed=1))


def test_gelu_at_infinity():
    output, slope = by_us(ops.gelu, [torch.tensor([-torch.inf, torch.inf])])
    assert output[0] == 0.0  # the other is infinity or NaN: processors differ
    assert torch.isfinite(slope).all()


def test_dropped_elements_are_zero_even_if_they_are_not_finite():
    assert ops.dropout(torch.tensor([torch.nan, 2.0]), torch.tensor([False, True]), 0.5).tolist() == [0.0, 4.0]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(monkeypatch, lengths, mask, causal):
    queries, keys = lengths
    arrays = [heads(length, HEAD_DIM, "float64", seed) for seed, length in enumerate((queries, keys, keys))]
    mask_array = make_mask(mask, queries, keys)
    mask_array = None if mask_array is None else from_host(XP, mask_array)
    attend = functools.partial(ops.attention, mask=mask_array, causal=causal, scale=0.5)
    assert_same(monkeypatch, "attention", attend, *arrays)


@pytest.mark.parametrize("shape", [(2, 4, 6), (1, 2, 1, 6), (4, 1)], ids=str)
def test_attention_with_a_bias(monkeypatch, shape):
    arrays = [heads(length, HEAD_DIM, "float64", seed) for seed, length in enumerate((4, 6, 6))]
    mask = from_host(XP, make_mask("some rows masked", 4, 6))
    for options in ({}, {"mask": mask}, {"mask": mask, "causal": True}):
        attend = functools.partial(ops.attention, **options)
        assert_same(monkeypatch, "attention", lambda q, k, v, b, f=attend: f(q, k, v, bias=b), *arrays,
                    normal(*shape, seed=4))  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS[:3], ids=str)  # a single query is one of fewer heads with more queries
@pytest.mark.parametrize("mask", MASKS)
def test_grouped_attention(monkeypatch, lengths, mask):
    queries, keys = lengths
    arrays = [heads(length, HEAD_DIM, "float64", seed) for seed, length in enumerate((queries, keys, keys))]
    arrays = [arrays[0], *(array[:, :1] for array in arrays[1:])]
    mask_array = make_mask(mask, queries, keys)
    mask_array = None if mask_array is None else from_host(XP, mask_array)
    attend = functools.partial(ops.attention, mask=mask_array, causal=True)
    assert_same(monkeypatch, "attention", attend, *arrays)


def test_attention_in_bfloat16_and_of_strided_arrays(monkeypatch):
    arrays = [heads(length, 8, "float64", seed) for seed, length in enumerate((4, 6, 6))]
    assert_same(monkeypatch, "attention", functools.partial(ops.attention, causal=True), *arrays, dtype="bfloat16")
    arrays = [array.swapaxes(2, 3).copy().swapaxes(2, 3) for array in arrays]
    assert_same(monkeypatch, "attention", ops.attention, *arrays)


def test_explain_names_the_portable_definition_where_torch_has_no_derivative():
    arrays = [from_host(XP, heads(4, HEAD_DIM, "float64", seed)) for seed in range(3)]
    attend, leaves = ops.attention, [array.clone().requires_grad_() for array in arrays]
    calls = {
        "torch has no derivative of a bias": lambda: vjp(
            lambda q: attend(q, *arrays[1:], bias=torch.ones(4, 4).double()), arrays[0]
        ),
        "torch differentiates the derivative": lambda: vjp(attend, *leaves),
        "torch has its derivative for some devices only": lambda: vjp(
            ops.rms_norm, arrays[0], torch.ones(HEAD_DIM).double()
        ),
    }
    for reason, call in calls.items():
        first, *others = ops.explain(call).splitlines()
        assert first.endswith(": portable definition")
        assert any(line.endswith(f": {reason}") for line in others)
    assert ops.explain(lambda: vjp(attend, *arrays)) == "attention on torch: torch.attention"
    assert "some devices" in ops.explain("rms_norm", arrays[0], torch.ones(HEAD_DIM).double(), epsilon=1e-5, save=True)


def test_torch_differentiates_our_derivative_of_attention():
    arrays = [from_host(XP, heads(4, HEAD_DIM, "float64", seed)).requires_grad_() for seed in range(3)]

    def derivative(*arrays):
        output, pull = vjp(ops.attention, *arrays)
        return pull(cotangent(output))

    assert torch.autograd.gradcheck(derivative, arrays)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("grad_scale", [None, 0.625, 1.0, np.nan])
@pytest.mark.parametrize("donate", [False, True])
def test_adam(monkeypatch, weight_decay, grad_scale, donate):
    ends = []
    for mode in ("auto", "portable"):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        slots = [tuple(from_host(XP, x) for x in (normal(*s), np.zeros(s), np.zeros(s))) for s in ((4, 3), (5,), (0,))]
        for step in range(1, 6):
            gradients = [torch.sin(step * slot[0]).mT.contiguous().mT for slot in slots if slot[0].ndim > 1]
            gradients += [torch.sin(step * slot[0]) for slot in slots if slot[0].ndim == 1]
            copies = [gradient.clone() for gradient in gradients]
            arguments = [(p, g, *moments) for (p, *moments), g in zip(slots, gradients, strict=True)]
            settings = {"learning_rate": 0.01, "step": step, "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9}
            scale = None if grad_scale is None else torch.tensor(grad_scale, dtype=torch.float64)
            call = functools.partial(adam, arguments, weight_decay=[weight_decay, 0.0, 0.1], grad_scale=scale,
                                     donate=donate, **settings)  # fmt: skip
            if mode == "auto" and step == 1 and not donate:
                assert "adam on torch: torch.adam" in ops.explain(call)
            slots = call()
            for gradient, copy in zip(gradients, copies, strict=True):
                assert torch.equal(gradient, copy)
        ends.append(slots)
    for actual, expected in zip(*ends, strict=True):
        for a, b in zip(actual, expected, strict=True):
            assert_close(a, b)


ONES, HALF = torch.ones((1, 1, 2, 3)), torch.ones((2, 3), dtype=torch.float16)
ATTENTION = {"causal": False, "scale": 1.0, "keep_probability": 1.0}
UNSUPPORTED = {
    "linear mixed": ("linear", (HALF, torch.ones((3, 2)), None), {}, "mixed dtypes"),
    "layer_norm float16": ("layer_norm", (HALF, HALF[0], None), {"epsilon": 1e-5}, "dtype float16"),
    "embedding uint8": ("embedding", (ONES[0, 0], torch.ones(2).byte()), {"scale": 1.0}, "ids of dtype torch.uint8"),
    "attention dropout": ("attention", (ONES,) * 3 + (None, None, ONES[..., :2] > 0), ATTENTION, "a dropout mask"),
    "attention values": ("attention", (ONES, ONES, ONES[..., :2], None, None, None), ATTENTION, "different features"),
    "adam strided": ("adam", (None, *(torch.zeros((3, 4)).mT,) * 4), {}, "not contiguous"),
}  # fmt: skip


@for_each("case", UNSUPPORTED)
def test_explain_gives_the_reason(case):
    operation, arrays, static, reason = UNSUPPORTED[case]
    first, *lines = ops.explain(operation, *arrays, **static).splitlines()
    assert first == f"{operation} on torch: portable definition"
    assert any(line.startswith(f"  not torch.{operation}: ") and reason in line for line in lines)


def test_adam_with_a_learning_rate_of_zero(monkeypatch):
    """Schedules such as cosine end at zero, and the last step still moves the moments."""
    ends = []
    for mode in ("auto", "portable"):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        slot = [torch.ones(3), torch.full((3,), 0.5), torch.zeros(3), torch.zeros(3)]
        settings = {"step": 3, "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9, "weight_decay": [0.1]}
        ends.append(adam([slot], learning_rate=0.0, **settings)[0])
    for actual, expected in zip(*ends, strict=True):
        assert_close(actual, expected)
    assert torch.equal(ends[0][0], torch.ones(3))
