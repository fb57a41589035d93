"""Our namespace of CuPy: bfloat16 stays bfloat16 and can be multiplied in stacks, also under differentiation."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import library_or_skip
from tests.reference import for_each, raises_line
from xformer import (
    LanguageModel,
    LanguageModelConfig,
    Transformer,
    TransformerConfig,
    backends,
    cross_entropy,
    load_pretrained,
    save_pretrained,
    tree,
    value_and_grad,
    vjp,
)
from xformer.backends import array_namespace, dtype_name, from_host, is_floating, resolve, to_host
from xformer.backends import library as libraries
from xformer.backends.cupy import CupyLibrary
from xformer.backends.numpy import NumpyLibrary
from xformer.errors import BackendError
from xformer.kernels.cupy import elementwise as cupy_elementwise
from xformer.ops import attention, dropout, gelu, linear, relu
from xformer.ops.operation import Operation

SOURCE = Path(backends.__file__).with_name("cupy_namespace.py")


# --- a stand-in that does to bfloat16 what CuPy does -----------------------------------------------------------------


class Array(np.ndarray):
    """On the host, where CuPy's are not; a bfloat16 times a number is a float32 to NumPy, too."""

    def get(self):
        return np.asarray(self)

    def __matmul__(self, other):
        """CuPy's: stacks may be of float16, and of all that is wider, and have that dtype."""
        dtype = np.promote_types(self.dtype, other.dtype)
        if dtype.name == "bfloat16" and max(self.ndim, other.ndim) > 2:
            raise TypeError("a stack of bfloat16")
        wide = np.result_type(dtype, np.float32)
        return np.matmul(self.astype(wide), other.astype(wide)).astype(dtype)


def _where(condition, x1, x2):
    """CuPy's has no loop for bfloat16 and takes the next, of float32."""
    chosen = np.where(condition, x1, x2)
    return chosen.astype(np.float32) if dtype_name(chosen.dtype) == "bfloat16" else chosen


def _viewed(function):
    @functools.wraps(function)
    def call(*arguments, **keywords):
        y = function(*arguments, **keywords)
        return np.asarray(y).view(Array) if isinstance(y, np.ndarray | np.generic) else y

    return call


def stand_in(monkeypatch, count_devices=lambda: 1):
    """Our namespace on top of one of such arrays."""
    names = vars(library_or_skip("numpy")) | {"where": _where, "matmul": lambda a, b: a @ b}
    below = types.ModuleType("array_api_compat.cupy")
    functions = {name: _viewed(x) for name, x in names.items() if callable(x) and not isinstance(x, type)}
    below.__dict__.update(names | functions)
    below.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=count_devices))
    monkeypatch.setitem(sys.modules, "array_api_compat.cupy", below)
    monkeypatch.setattr(importlib.import_module("array_api_compat"), "cupy", below, raising=False)
    spec = importlib.util.spec_from_file_location("xformer.backends.cupy_namespace", SOURCE)
    ours = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ours)
    library = CupyLibrary("cupy", ours)
    monkeypatch.setitem(libraries.NAMESPACE_OF_TYPE, Array, library)
    for name in ("apply", "erf", "other_device", "rows_of_table"):  # which import CuPy
        monkeypatch.setattr(CupyLibrary, name, getattr(NumpyLibrary, name))
    monkeypatch.setitem(sys.modules, "xformer.backends.cupy_namespace", ours)
    return library


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def xp(request, monkeypatch):
    pytest.importorskip("ml_dtypes", reason="bfloat16 on the host")
    monkeypatch.setenv("XFORMER_KERNELS", "portable")
    return library_or_skip("cupy") if request.param == "gpu" else stand_in(monkeypatch)


# --- tests -----------------------------------------------------------------------------------------------------------

DTYPES = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-20}


def normal(xp, *shape, seed=0, dtype="bfloat16"):
    return from_host(xp, np.random.default_rng(seed).normal(size=shape).astype("float32"), dtype=dtype)


def exact(x):
    return to_host(x).astype("float64")


def assert_near(actual, expected, dtype, roundings=1.0):
    assert dtype_name(actual.dtype) == dtype
    assert array_namespace(actual).name == "cupy"
    error = np.abs(exact(actual) - expected).max(initial=0.0)
    assert error <= roundings * DTYPES[dtype] * max(1.0, np.abs(expected).max(initial=0.0))


@for_each("dtype", DTYPES)
@for_each("shapes", [((3, 4, 5), (3, 5, 6)), ((2, 3, 4, 5), (5, 6)), ((4, 5), (5, 6)), ((2, 4, 5), (5,))])
def test_products_of_stacks_and_their_derivatives(xp, shapes, dtype):
    a, b = (normal(xp, *shape, seed=len(shape), dtype=dtype) for shape in shapes)
    y, pull = vjp(lambda a, b: a @ b, a, b)
    expected, expected_pull = vjp(lambda a, b: a @ b, exact(a), exact(b))
    for actual in (y, xp.matmul(a, b)):
        assert_near(actual, expected, dtype)
    for actual, slope in zip(pull(y), expected_pull(exact(y)), strict=True):
        assert_near(actual, slope, dtype, 2.0)


@for_each("dtype", DTYPES)
def test_where_keeps_the_dtype(xp, dtype):
    x = normal(xp, 3, 4, dtype=dtype)
    host, zero = exact(x), xp.zeros_like(x)
    for actual, expected in (
        (xp.where(x > 0, x, zero), np.maximum(host, 0.0)),
        (xp.where(x > 0, 0.0, x), np.minimum(host, 0.0)),
        (xp.where(x > 0, x, 1.0), np.where(host > 0, host, 1.0)),
        (vjp(lambda x: array_namespace(x).where(x > 0, x, zero), x)[0], np.maximum(host, 0.0)),
    ):
        assert_near(actual, expected, dtype, 0.0)


@for_each("dtype", DTYPES)
@for_each("operation", ["relu", "gelu", "dropout", "attention", "grouped attention", "linear"])
def test_portable_operations(xp, operation, dtype):
    keep = np.random.default_rng(3).random((2, 2, 5, 4)) < 0.8

    def apply(x, y):
        retained = from_host(array_namespace(x), keep)
        if operation == "linear":
            return linear(x, y[0, 0, :4, :], y[0, 0, 4, :], activation="relu")
        if operation == "grouped attention":
            return attention(x, y[:, :1, ...], y[:, :1, ...], retained[..., :1])
        if operation == "attention":
            return attention(x, y, y, retained[..., :1], causal=True)
        return dropout(x, retained, 0.8) if operation == "dropout" else {"relu": relu, "gelu": gelu}[operation](x)

    x, y = normal(xp, 2, 2, 5, 4, dtype=dtype), normal(xp, 2, 2, 5, 4, seed=1, dtype=dtype)
    actual, pull = vjp(apply, x, y)
    expected, expected_pull = vjp(apply, exact(x), exact(y))
    assert_near(actual, expected, dtype)
    for slope, exact_slope in zip(pull(actual), expected_pull(exact(actual)), strict=True):
        assert_near(slope, exact_slope, dtype, 2.0)


@for_each("dtype", [*DTYPES, "int64"])
@for_each("bounds", [{"min": -1}, {"max": 1}, {"min": -1, "max": 1}, {}])
def test_clip_keeps_the_dtype_and_uses_no_mask(xp, dtype, bounds):
    x = from_host(xp, np.asarray([-3.0, -1.0, 0.0, 2.0, 5.0]), dtype=dtype)
    expected = np.clip(exact(x), bounds.get("min", -np.inf), bounds.get("max", np.inf))
    actual = xp.clip(x, **bounds)
    assert dtype_name(actual.dtype) == dtype
    np.testing.assert_array_equal(exact(actual), expected)
    if dtype != "int64":
        assert np.isnan(exact(xp.clip(from_host(xp, np.asarray([np.nan]), dtype=dtype), **bounds))).all()


@pytest.mark.parametrize("large", [True, False])
def test_large_arrays_are_added_by_a_kernel(monkeypatch, large):
    """Also the sums of cotangents."""
    xp, sums = stand_in(monkeypatch), []
    monkeypatch.setattr(cupy_elementwise, "add", lambda a, b: sums.append(1) or np.add(a, b))
    monkeypatch.setattr(xp.module, "_MIN_LARGE", 6 if large else 7)
    x, y = (from_host(xp, np.full((2, 3), value)).view(Array) for value in (1.0, 2.0))
    total, pull = vjp(lambda x, y: (x + y) + x, x, y)
    np.testing.assert_array_equal(total, np.full((2, 3), 4.0))
    np.testing.assert_array_equal(pull(total)[0], np.full((2, 3), 8.0))
    assert len(sums) == (3 if large else 0)
    np.testing.assert_array_equal(xp.add(x, 1.0), np.full((2, 3), 2.0))
    np.testing.assert_array_equal(xp.add(x, y[0]), np.full((2, 3), 3.0))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_a_model_with_a_copy_head_is_bfloat16_throughout(xp, activation, monkeypatch):
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = TransformerConfig(
        source_vocab_size=9, target_vocab_size=9, share_embeddings=True, copy=True, activation=activation, **sizes
    )
    source, target = np.asarray([[4, 5, 4, 2, 0], [6, 7, 2, 0, 0]]), np.asarray([[1, 4, 5], [1, 6, 0]])
    model = Transformer(config, xp="numpy", seed=0, dtype="bfloat16")

    mixed, select = [], Operation.select

    def recording_select(self, xp, arrays, *rest, save):
        actual = {dtype_name(array.dtype) for array in arrays if array is not None and is_floating(array.dtype)}
        mixed.extend([(self.name, actual)] if len(actual) > 1 else [])
        return select(self, xp, arrays, *rest, save=save)

    monkeypatch.setattr(Operation, "select", recording_select)

    def loss(model, xp):
        logits = model(from_host(xp, source), from_host(xp, target))
        assert dtype_name(logits.dtype) in ("bfloat16", "float64")
        return array_namespace(logits).mean(cross_entropy(logits, from_host(xp, target)))

    value, gradients = value_and_grad(loss)(model.to(xp), xp)
    assert not mixed
    numpy = library_or_skip("numpy")
    expected, exact_gradients = value_and_grad(loss)(model.to(numpy, dtype="float64"), numpy)
    np.testing.assert_allclose(exact(value), expected, rtol=0.02)
    exact_slopes = dict(exact_gradients.named_parameters())
    largest = max(np.abs(slope).max() for slope in exact_slopes.values())
    for name, slope in gradients.named_parameters():
        assert dtype_name(slope.dtype) == "bfloat16", name
        np.testing.assert_allclose(exact(slope), exact_slopes[name], atol=0.05 * largest, err_msg=name)


def test_bfloat16_of_files_is_copied_as_16_bits(monkeypatch, tmp_path):
    """No float32 copy of a parameter is made on the host or sent to the GPU."""
    pytest.importorskip("ml_dtypes", reason="bfloat16 on the host")
    sizes = {"vocab_size": 13, "d_model": 16, "num_heads": 2, "d_ff": 24, "num_layers": 1, "norm": "rms"}
    sizes |= dict.fromkeys(("attention_bias", "attention_output_bias", "feed_forward_bias", "scale_embeddings"), False)
    config = LanguageModelConfig(**sizes, activation="swiglu", positions="rotary", dropout=0.0)
    model = LanguageModel(config, seed=1).to(dtype="bfloat16")
    model.save(tmp_path / "own.safetensors")
    save_pretrained(model, tmp_path / "public", model_type="llama")
    library, copied, place = stand_in(monkeypatch), [], libraries.Library._place

    def noted(library, data, dtype, device):
        copied.append(data.dtype.name)
        return place(library, data, dtype, device)

    monkeypatch.setattr(libraries.Library, "_place", noted)
    expected = dict(model.named_arrays())
    for loaded in (
        LanguageModel.load(tmp_path / "own.safetensors", xp=library),
        load_pretrained(tmp_path / "public", xp=library),
    ):
        assert "uint16" in copied
        assert "float32" not in copied
        for name, array in loaded.named_arrays():
            assert (type(array), dtype_name(array.dtype)) == (Array, "bfloat16")
            np.testing.assert_array_equal(to_host(array), to_host(expected[name]))
    wide = from_host(library, np.asarray(model.embedding.weight), dtype="float32")
    assert (dtype_name(wide.dtype), copied[-1]) == ("float32", "uint16")


def test_all_else_is_that_of_array_api_compat():
    pytest.importorskip("cupy", reason="its functions are compared; that needs no GPU")
    ours, theirs = resolve("cupy"), importlib.import_module("array_api_compat.cupy")
    assert {name for name in theirs.__all__ if getattr(ours, name) is not getattr(theirs, name)} == {
        "add",
        "clip",
        "empty",
        "matmul",
        "where",
    }
    assert resolve(theirs) is resolve(importlib.import_module("cupy")) is ours


def test_without_a_driver_one_line_says_so(monkeypatch):
    def count_devices():
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")

    with raises_line(BackendError, r"no NVIDIA GPU or driver was found \(cuda.*\); use xp=numpy"):
        stand_in(monkeypatch, count_devices)


class OnGPU:
    """A tensor of torch whose memory is said to be that of a GPU."""

    def __init__(self, tensor):
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, tensor.shape

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__()

    def detach(self):
        return OnGPU(self.tensor.detach())

    def view(self, dtype):
        return OnGPU(self.tensor.view(dtype))


def test_arrays_of_torch_on_a_gpu_are_copied_without_the_host(monkeypatch):
    """CuPy's reader is that of NumPy here, which reads no bfloat16 either."""
    torch, library = pytest.importorskip("torch"), stand_in(monkeypatch)

    class Shared(Array):
        device = contextlib.nullcontext()

    def from_dlpack(tensor):
        return np.from_dlpack(tensor.tensor).view(Shared)

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(from_dlpack=from_dlpack))
    monkeypatch.setitem(libraries.NAMESPACE_OF_TYPE, OnGPU, library_or_skip("torch"))
    monkeypatch.setattr("xformer.tree.to_host", None)
    for dtype in ("float32", "float16", "bfloat16", "int64"):
        own = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype)).requires_grad_(dtype == "float32")
        moved = tree._move(OnGPU(own), library, None, None)
        assert dtype_name(moved.dtype) == dtype
        np.testing.assert_array_equal(moved.astype("float64"), own.detach().double().numpy())
        own.detach().zero_()
        assert moved[0, 1] == 1
    assert tree._move(OnGPU(torch.ones(2, dtype=torch.bfloat16)), library, "float32", None).dtype == np.float32
    assert library.copy_from_gpu(torch.ones(2)) is None
