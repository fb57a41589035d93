"""Fused attention equals the portable definition, on a fake cuDNN that sees only addresses, shapes and strides."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import threading
import types
import warnings

import numpy as np
import pytest

from tests.conftest import library_or_skip
from tests.ops._cupy import fake_cudnn
from tests.ops.attention.test_cupy import MASKS, assert_same, heads, make_mask, normal, pulled, serve_numpy
from tests.reference import raises_line
from xformer import ops, vjp
from xformer.backends import array_namespace, to_host
from xformer.backends.numpy import NumpyLibrary
from xformer.errors import ShapeError
from xformer.kernels.cupy import attention as cupy_attention
from xformer.kernels.cupy import cublas, cudnn_plans, launch
from xformer.kernels.cupy import cudnn as cupy_cudnn
from xformer.ops import attention
from xformer.ops.attention import _shared, sharing_masks
from xformer.tracing.grad import keep_for

PLAIN = {"causal": False, "scale": 0.3, "keep_probability": 1.0}


@pytest.fixture
def cudnn(monkeypatch, launcher):
    """Have NumPy arrays served by fused attention, and by batched products where it declines."""
    serve_numpy(monkeypatch, [*cupy_cudnn.KERNELS, cupy_attention.KERNELS[0]])
    monkeypatch.setattr(cupy_cudnn, "_empty", functools.partial(unwritten, cupy_cudnn._empty))
    module = fake_cudnn.Module()
    monkeypatch.setattr(cudnn_plans, "frontend", lambda: (module, None))
    monkeypatch.setattr(cudnn_plans, "current", lambda: (0, fake_cudnn.STREAM))
    monkeypatch.setattr(cudnn_plans, "device_properties", lambda device: ("NVIDIA H200", 90))
    monkeypatch.setattr(cudnn_plans, "workspace", lambda size: aligned(np.empty(max(size, 1), np.uint8)))
    monkeypatch.setattr(cudnn_plans, "_failures", launch.Failures())
    monkeypatch.setattr(cupy_cudnn, "_MIN_SCORES", 1)
    monkeypatch.setattr(cupy_cudnn, "_MIN_KEYS", 1)
    monkeypatch.setattr(cudnn_plans, "cache_directory", no_directory)
    monkeypatch.setattr(launch, "identity", lambda: "NVIDIA H200, cuDNN 9.19")
    monkeypatch.setattr(launch, "launch", launcher.launch)
    launcher.launched.clear()
    forget(monkeypatch)
    return module


def unwritten(make, *like):
    """Return an array of NaN, which must not be read."""
    array = make(*like)
    array[...] = np.nan
    return array


def no_directory():
    raise RuntimeError("Could not determine home directory.")


def forget(monkeypatch):
    """Be a thread that has no plans yet."""
    monkeypatch.setattr(cudnn_plans, "_thread_data", threading.local())
    monkeypatch.setattr(cudnn_plans, "_plans", launch.Plans(256))


def aligned(x):
    """A copy at an address that is a multiple of 16 bytes, as all of CuPy's are."""
    memory = np.empty(x.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    place = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    place[...] = x
    return place


def qkv(queries, keys, features=8, width=16, dtype="bfloat16", batch=2, count=3):
    shapes = (queries, features), (keys, features), (keys, width)
    return [heads(batch, count, *shape, seed, dtype) for seed, shape in enumerate(shapes)]


def explained(*arrays, **static):
    return ops.explain("attention", *arrays, *[None] * (6 - len(arrays)), **{**PLAIN, **static})


@pytest.mark.parametrize("lengths", [(5, 5), (4, 7), (7, 4), (2, 1), (16, 16)], ids=str)
@pytest.mark.parametrize(("causal", "kind"), list(itertools.product([False, True], MASKS)))
def test_masks(monkeypatch, cudnn, lengths, causal, kind):
    (queries, keys), dtype = lengths, "bfloat16" if lengths[0] > 4 else "float16"
    arrays, mask = qkv(*lengths, dtype=dtype), make_mask(kind, 2, 3, *lengths)
    assert_same(monkeypatch, lambda *qkv: attention(*qkv, mask, causal=causal), *arrays, tolerance=0.03)
    fused = not causal or queries == keys or (queries < keys and kind is None)
    assert cudnn.executed == ([("forward", "private")] * 2 + [("backward", "private")]) * fused
    assert (": cudnn.attention" in explained(*arrays, mask, causal=causal)) == fused


def test_padding_is_passed_as_lengths(monkeypatch, cudnn):
    """So that no tile of keys beyond them is computed; a sentence may have holes, too, or be empty."""
    lengths, forward = [], fake_cudnn._forward

    def noted(node, arrays):
        lengths.append(arrays["seq_len_kv"].flatten())
        forward(node, arrays)

    monkeypatch.setattr(fake_cudnn, "_forward", noted)
    monkeypatch.setattr(cupy_cudnn, "_TILE", 4)  # fewer keys are not skipped
    mask = np.ones((4, 1, 1, 6), bool)
    mask[1, ..., 4:], mask[2, ..., [1, 5]], mask[3] = False, False, False
    assert_same(monkeypatch, lambda *qkv: attention(*qkv, mask), *qkv(6, 6, batch=4), tolerance=0.03)
    np.testing.assert_array_equal(lengths, [[6, 4, 5, 1]] * 2)


@pytest.mark.parametrize("lengths", [(9, 9), (5, 9)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_windows(monkeypatch, cudnn, lengths, causal):
    """Bounds of cuDNN; with a mask, products mask the scores."""
    monkeypatch.setattr(NumpyLibrary, "has_windows", True)
    arrays = qkv(*lengths)
    assert_same(monkeypatch, functools.partial(attention, causal=causal, window=3), *arrays, tolerance=0.03)
    assert cudnn.executed == [("forward", "private")] * 2 + [("backward", "private")]
    masked = explained(*arrays, np.ones(lengths[1], bool), causal=causal, window=3)
    assert "a mask, a bias or dropout" in masked


@pytest.mark.parametrize("kind", [None, "padding", "heads"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dropout(monkeypatch, cudnn, kind, dtype):
    arrays, mask = qkv(5, 7, dtype=dtype), make_mask(kind, 2, 3, 5, 7)
    keep = np.random.default_rng(3).random((2, 3, 5, 7)) < 0.7
    dropped = functools.partial(attention, mask=mask, dropout_mask=keep, keep_probability=0.7)
    assert_same(monkeypatch, lambda *qkv: dropped(*qkv), *arrays, tolerance=0.03)
    assert ("backward", "private") in cudnn.executed


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize(("causal", "kind"), [(True, None), (False, "padding"), (False, "heads")])
def test_heads_that_share_keys(monkeypatch, cudnn, shared, causal, kind):
    query, mask = qkv(6, 6, count=4)[0], make_mask(kind, 2, 4, 6, 6)
    arrays = query, *qkv(6, 6, count=shared)[1:]
    assert_same(monkeypatch, lambda *qkv: attention(*qkv, mask, causal=causal), *arrays, tolerance=0.04)
    assert cudnn.executed == [("forward", "private")] * 2 + [("backward", "private")]
    cudnn.refuses = "not today"
    forget(monkeypatch)
    with pytest.warns(RuntimeWarning, match="cuDNN failed for attention"):
        assert_same(monkeypatch, lambda *qkv: attention(*qkv, mask, causal=causal, scale=0.3), *arrays, tolerance=0.04)


@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (1, 3, 6, 6), (3, 1, 6), (1, 6), (2, 1, 1, 6), ()], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [None, "padding", "heads"])
def test_a_bias(monkeypatch, cudnn, shape, causal, kind):
    arrays, mask = qkv(6, 6), make_mask(kind, 2, 3, 6, 6)
    bias = np.asarray(normal(*shape, seed=4, dtype="bfloat16"))
    assert_same(monkeypatch, lambda *qkv: attention(*qkv, mask, bias, causal=causal), *arrays)
    assert ("backward", "private") in cudnn.executed


def test_the_gradient_of_a_bias_comes_from_batched_products(monkeypatch, cudnn):
    bias = normal(1, 3, 6, 6, seed=4, dtype="bfloat16")
    assert_same(monkeypatch, lambda *all_: attention(*all_[:3], None, all_[3]), *qkv(6, 6), bias)
    assert {which for which, _ in cudnn.executed} == {"forward"}


@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_that_masks_rows(cudnn, causal):
    arrays, bias = qkv(6, 6), normal(1, 1, 6, 6, seed=4, dtype="bfloat16")
    bias[:, :, 2] = -np.inf
    output, dquery, *others = pulled(lambda *qkv: attention(*qkv, None, bias, causal=causal), *arrays)
    assert not output[:, :, 2].any()
    assert not dquery[:, :, 2].any()
    assert all(np.isfinite(array.astype("float32")).all() for array in (output, dquery, *others))
    assert cudnn.executed == [("forward", "private"), ("backward", "private")]


@pytest.mark.parametrize("causal", [False, True])
def test_the_bias_of_fully_masked_rows_is_zero(cudnn, causal):
    """Only what forbids something is low: with a row of low scores, the derivative's exponents would be rounded."""
    query, mask = qkv(5, 5)[0], make_mask("heads", 2, 3, 5, 5)
    mask[0, 1, 3, :4] = False  # what is left of this row, a causal mask closes
    layout = cupy_cudnn._bias_layout(mask.shape, None, query.shape, query.shape)
    spec = types.SimpleNamespace(bias=layout, padded=False)
    added = cupy_cudnn._mask_inputs(mask, None, query, spec, causal=causal, has_lengths=False)["bias"]
    seen = mask & np.tril(np.ones((5, 5), bool)) if causal else mask
    closed = ~seen.any(axis=-1, keepdims=True)
    assert closed.sum() >= 6 + causal
    np.testing.assert_array_equal(added < 0, ~mask & ~closed)
    assert layout == (added.shape, tuple(stride // added.itemsize for stride in added.strides))


def test_one_mask_for_all_sentences_with_a_bias_of_heads(monkeypatch, cudnn):
    bias, mask = normal(3, 6, 6, seed=4, dtype="bfloat16"), np.arange(6) < 4
    bias[:, 0, 1:], bias[0, 2] = -np.inf, -np.inf  # shorter than the mask, and closed
    monkeypatch.setattr(cupy_attention, "forward", None)  # which would compute it instead
    arrays = qkv(6, 6)
    output, pull = vjp(lambda *qkv: attention(*qkv, mask, bias), *arrays)
    monkeypatch.setenv("XFORMER_KERNELS", "portable")
    exact, exact_pull = vjp(
        lambda *qkv: attention(*qkv, mask, bias.astype("float64")), *(x.astype("float64") for x in arrays)
    )
    for actual, expected in zip([output, *pull(output)], [exact, *exact_pull(exact)], strict=True):
        np.testing.assert_allclose(actual.astype("float64"), expected, rtol=0, atol=0.03)
    assert not output[:, 0, 2].any()


def launches_of_masks(launcher):
    names = [name.removeprefix("masking.").partition("<")[0] for name in launcher.launched]
    launcher.launched.clear()
    return names


@pytest.mark.parametrize("keys", [40, 136])
def test_masks_take_three_launches(cudnn, launcher, keys):
    """One before cuDNN, one after it for rows without keys, and one in the derivative for keys that cuDNN skips."""
    for kind, launches in ((None, []), ("queries", ["inputs", "clear_rows"]), ("padding", ["inputs", "clear_rows"])):
        output, pull = vjp(functools.partial(attention, mask=make_mask(kind, 2, 3, 40, keys)), *qkv(40, keys))
        pull(output)
        assert launches_of_masks(launcher) == launches + ["clear_beyond"] * (kind == "padding" and keys > 128)


@pytest.mark.parametrize("causal", [False, True])
def test_layers_share_what_is_made_of_a_mask(cudnn, launcher, causal):
    """In the layers of a model only: elsewhere, the mask may have been written to between two calls."""
    arrays, mask = qkv(40, 40), make_mask("padding", 2, 3, 40, 40)

    def layers(query, key, value, share):
        kept, other = keep_for(query, mask), keep_for(query, mask.copy())  # as models keep them for all layers
        with sharing_masks() if share else contextlib.nullcontext():
            outputs = [attention(query, key, value, kept, causal=causal) for _ in range(3)]
            outputs.append(attention(query, key, value, kept, causal=not causal))
            outputs.append(attention(query, key, value, other, causal=causal))
        return array_namespace(query, *outputs).stack(outputs)

    alone, together = (pulled(functools.partial(layers, share=share), *arrays) for share in (False, True))
    assert launches_of_masks(launcher).count("inputs") == 5 + 3
    for actual, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert _shared.masks is None  # nothing is kept


@pytest.mark.parametrize("length", [64, 128, 130])
def test_scores_far_below_zero_keep_gradients_finite(monkeypatch, cudnn, length):
    """cuDNN returns NaN here unless lengths are passed."""
    arrays, mask = qkv(length, length, batch=1, count=1), np.arange(length) < length - 3
    low = np.asarray(normal(1, 1, 1, 1, dtype="bfloat16") * 0 - 120).astype(arrays[0].dtype)
    assert_same(monkeypatch, lambda *qkv: attention(*qkv, mask, low), *arrays)
    assert ("backward", "private") in cudnn.executed


MEMORY = {
    "packed by heads": lambda x: aligned(np.ascontiguousarray(x)),
    "beside others": lambda x: aligned(np.concatenate([x, x, x], axis=-1))[..., :8],
    "in a longer cache": lambda x: aligned(np.concatenate([x, x], axis=2))[:, :, : x.shape[2]],
    "off the grid": lambda x: aligned(np.concatenate([x[..., :1], x, x[..., :7]], axis=-1))[..., 1:9],
    "rows off the grid": lambda x: aligned(np.concatenate([x, x[..., :4]], axis=-1))[..., :8],
    "every other feature": lambda x: aligned(np.repeat(x, 2, axis=-1))[..., ::2],
    "backwards": lambda x: aligned(np.ascontiguousarray(x[:, :, ::-1]))[:, :, ::-1],
    "one sentence for all": lambda x: np.broadcast_to(aligned(np.ascontiguousarray(x[:1])), x.shape),
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("batch", [1, 2])
def test_any_memory(monkeypatch, cudnn, memory, batch):
    arrays = [MEMORY[memory](x) for x in qkv(6, 6, width=8, batch=batch)]
    copies = memory in ("off the grid", "rows off the grid", "every other feature", "backwards")
    assert [cupy_cudnn._readable(x) is x for x in arrays] == [not (copies or (batch == 2 and "one" in memory))] * 3
    assert_same(monkeypatch, attention, *arrays)
    assert ("backward", "private") in cudnn.executed


@pytest.mark.parametrize("memory", MEMORY)
def test_a_cotangent_of_any_memory_is_copied_only_if_cudnn_cannot_read_it(monkeypatch, cudnn, memory):
    (output, pull), (_, pull_again) = (vjp(attention, *qkv(6, 6, width=8)) for _ in range(2))
    g, copies, copy = MEMORY[memory](output), [], cupy_cudnn._packed_copy
    monkeypatch.setattr(cupy_cudnn, "_packed_copy", lambda x: copies.append(x) or copy(x))
    cotangents = pull(g)
    assert len(copies) == (memory not in ("packed by heads", "beside others", "in a longer cache"))
    for cotangent, expected in zip(cotangents, pull_again(copy(g)), strict=True):
        np.testing.assert_array_equal(cotangent, expected)


def test_results_have_the_layout_that_merging_heads_needs(cudnn):
    output, pull = vjp(attention, *qkv(6, 5, width=24))
    for array in (output, *pull(output)):
        assert cupy_cudnn._layout(*cupy_cudnn._memory(array)) == cupy_cudnn.packed(*array.shape)


def test_the_number_of_all_scores_decides(monkeypatch):
    monkeypatch.setattr(cublas, "pointer", lambda array: 0)
    monkeypatch.setattr(launch, "is_current_device", lambda array: True)
    monkeypatch.setattr(cudnn_plans, "unsupported_reason", lambda *specs: None)
    few, enough = (qkv(64, 64, batch=batch, count=8)[:1] * 3 for batch in (127, 128))
    static = {"causal": False, "scale": 1.0, "keep_probability": 1.0}
    assert cupy_cudnn.why_not(*enough, None, None, None, **static, save=False) is None
    reason = cupy_cudnn.why_not(*few, None, None, None, **static, save=False)
    assert reason == "4161536 scores; expected at least 4194304 for a plan to pay off"


KEEP = np.random.default_rng(5).random((2, 3, 4, 4)) < 0.5


@pytest.mark.parametrize(
    ("arrays", "static", "reason"),
    [
        (qkv(4, 4, dtype="float32"), {}, "dtype float32 (the kernel takes float16 or bfloat16)"),
        ([x[:0] for x in qkv(4, 4, dtype="float16")], {}, "an empty array"),
        (qkv(4, 4, 12, 16, dtype="float16"), {}, "heads of 12 and 16 features"),
        (qkv(4, 4, 264, 16, dtype="float16"), {}, "heads of 264 and 16 features"),
        (qkv(1, 4, dtype="float16"), {}, "a single query"),
        (qkv(5, 4, dtype="float16"), {"causal": True}, "causal, or a window, with fewer keys than queries"),
        ([*qkv(3, 4, dtype="float16"), np.ones(4, bool)], {"causal": True}, "causal with more keys than queries and"),
        ([*qkv(3, 4, dtype="float16"), None, None, KEEP[:, :, :3, :4]], {"causal": True}, "causal with more keys than"),
        (
            [*qkv(4, 4, dtype="float16"), None, np.ones(4, "float32")],
            {},
            "mixed dtypes (the kernel takes float16 or bfloat16)",
        ),
        ([*qkv(4, 4, dtype="float16"), None, None, np.ones((2, 1, 4, 4), bool)], {}, "the dropout mask is broadcast"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_explain_gives_the_reason(monkeypatch, cudnn, arrays, static, reason):
    assert f"not cudnn.attention: {reason}" in explained(*arrays, **static)
    if "mixed" not in reason and "broadcast" not in reason:
        given = dict(zip(("mask", "bias", "dropout_mask"), arrays[3:], strict=False))
        given = {name: value for name, value in given.items() if value is not None}
        assert_same(monkeypatch, functools.partial(attention, **given, **static), *arrays[:3])
    assert not cudnn.executed


def test_arrays_of_three_axes(monkeypatch, cudnn):
    """The function adds an axis, which the operation expects."""
    arrays = [x[0] for x in qkv(4, 4, dtype="float16")]
    assert_same(monkeypatch, attention, *arrays, tolerance=0.03)
    assert ("backward", "private") in cudnn.executed
    with raises_line(ShapeError, r"attention got query of shape \(3, 4, 8\); expected \(batch, heads, "):
        explained(*arrays)


def test_keys_and_values_of_different_batches(cudnn):
    query, key, value = qkv(4, 4, dtype="float16")
    for call in (explained, attention):
        with raises_line(ShapeError, "with one value of batch$"):
            call(query, key, value[:1])


def test_a_missing_frontend_is_reported_with_the_install_command(monkeypatch, cudnn):
    reason = 'the cuDNN frontend is not installed; run: pip install "array-transformers[cudnn]"'
    monkeypatch.setattr(cudnn_plans, "frontend", lambda: (None, reason))
    assert f"not cudnn.attention: {reason}" in explained(*qkv(4, 4))
    assert_same(monkeypatch, attention, *qkv(4, 4))


def test_libraries_are_loaded_before_the_frontend(monkeypatch, caplog):
    """The real function, on modules that say in which order they were used."""
    caplog.set_level("INFO")
    used, version = [], [91900]

    def load(name):
        used.append(name)
        if name == "cudart":  # it may be the system's
            raise RuntimeError("not found among the wheels")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert 'run: pip install "array-transformers[cudnn]"' in cudnn_plans.frontend.__wrapped__()[1]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    module = types.SimpleNamespace(
        backend_version=lambda: used.append("cudnn") or version[0], __version__=cudnn_plans._PRIVATE_VERSION
    )
    modules = {"cuda.pathfinder": types.SimpleNamespace(load_nvidia_dynamic_lib=load), "cudnn": module}
    monkeypatch.setattr(cudnn_plans.importlib, "import_module", modules.__getitem__)
    assert cudnn_plans.frontend.__wrapped__() == (module, None)
    assert used == ["cudart", "nvrtc", "cudnn"]
    assert not caplog.messages
    module.__version__ = "1.33.0"
    assert cudnn_plans.frontend.__wrapped__() == (module, None)
    assert caplog.messages == [
        "calls of cuDNN take 20 us longer with version 1.33.0 of its frontend; install nvidia-cudnn-frontend==1.32.*"
    ]
    version[0] = 91801
    assert cudnn_plans.frontend.__wrapped__()[1] == "cuDNN 91801 is older than 91900"
    del module.backend_version  # half installed
    assert "cannot be used: " in cudnn_plans.frontend.__wrapped__()[1]


def test_an_old_gpu_is_not_supported(monkeypatch, cudnn):
    monkeypatch.setattr(cudnn_plans, "device_properties", lambda device: ("Tesla V100", 70))
    assert "not cudnn.attention: Tesla V100 has compute capability 7.0; expected at least 8.0" in explained(*qkv(4, 4))


# --- plans -----------------------------------------------------------------------------------------------------------


def test_plans_are_built_once_per_shape_and_layout(monkeypatch, cudnn):
    for _ in range(2):
        assert_same(monkeypatch, attention, *qkv(6, 6))
    # Forward, forward with what the derivative needs, derivative with a cotangent as layers make it and as it is here.
    assert cudnn.built == 4
    attention(*(np.ascontiguousarray(x) for x in qkv(6, 6)))
    attention(*qkv(6, 6), causal=True)
    attention(*qkv(6, 6), scale=0.1)
    attention(*qkv(6, 6, dtype="float16"))
    assert cudnn.built == 8
    # In what has one element, strides make no difference.
    attention(*qkv(6, 6, batch=1))
    attention(*(np.lib.stride_tricks.as_strided(x, strides=(2048, *x.strides[1:])) for x in qkv(6, 6, batch=1)))
    assert cudnn.built == 9
    assert len(cudnn.handles) == 1


def test_the_least_recently_used_plans_are_dropped(monkeypatch, cudnn):
    cudnn_plans._plans.max_plans = 2
    for length in (2, 3, 2, 4, 2):
        attention(*qkv(length, length))
    assert cudnn.built == 3
    attention(*qkv(3, 3))
    assert cudnn.built == 4


def test_every_thread_has_its_own_plans_and_handle(cudnn):
    arrays, actual = qkv(6, 6), []
    for _ in range(2):
        thread = threading.Thread(target=lambda: actual.append(attention(*arrays)))
        thread.start()
        thread.join()
    np.testing.assert_array_equal(actual[0], actual[1])
    assert len(cudnn.handles) == 2
    assert cudnn.built == 2


def test_plans_are_read_from_files(monkeypatch, cudnn, tmp_path):
    """Unless the files are damaged, or of another GPU or version."""
    monkeypatch.setattr(cudnn_plans, "cache_directory", lambda: tmp_path / "cache")

    def built():
        forget(monkeypatch)
        before = cudnn.built
        assert_same(monkeypatch, attention, *qkv(6, 6), tolerance=0.03)
        return cudnn.built - before

    assert [built(), built()] == [4, 0]
    files = sorted((tmp_path / "cache" / "cudnn").iterdir())
    assert [file.suffix for file in files] == [".plan"] * 4
    for file, content in zip(files[:3], (b"", b"junk", files[2].read_bytes()[:-1] + b"?"), strict=True):
        file.write_bytes(content)
    assert [built(), built()] == [3, 0]
    monkeypatch.setattr(fake_cudnn.Graph, "deserialize", lambda *_: no_directory())
    assert built() == 4


def test_plans_of_another_gpu_or_version_are_not_read(monkeypatch, cudnn, tmp_path):
    monkeypatch.setattr(cudnn_plans, "cache_directory", lambda: tmp_path)
    for identity in ("NVIDIA H100, cuDNN 9.19", "NVIDIA H100, cuDNN 9.20"):
        monkeypatch.setattr(launch, "identity", lambda identity=identity: identity)
        forget(monkeypatch)
        attention(*qkv(6, 6))
    assert cudnn.built == 2
    cudnn.engine = "an engine in Python"  # of which the file would have the kernels, too
    attention(*qkv(7, 7))
    assert len([*(tmp_path / "cudnn").iterdir()]) == 2


def test_a_plan_that_cannot_be_built_warns_once_and_falls_back(monkeypatch, cudnn):
    cudnn.refuses = "No valid engine configs"
    with pytest.warns(RuntimeWarning, match="cuDNN failed for attention backward .*No valid engine configs"):
        vjp(attention, *qkv(6, 6))
    cudnn.refuses = None
    assert_same(monkeypatch, attention, *qkv(6, 6))
    assert "not cudnn.attention: cuDNN does not support this call: No valid engine configs" in explained(
        *qkv(6, 6), scale=1.0 / math.sqrt(8)
    )
    assert not cudnn.executed


@pytest.mark.parametrize("error", [RuntimeError, TypeError, KeyError, AttributeError])
@pytest.mark.parametrize("when", ["build", "_backward"])
def test_other_errors_are_raised_and_not_taken_for_a_missing_plan(monkeypatch, cudnn, error, when):
    arrays = qkv(6, 6)
    output, pull = vjp(attention, *arrays)

    def fail(*_):
        raise error("CUDNN_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr(fake_cudnn.Graph if when == "build" else fake_cudnn, when, fail)
    if when == "build":
        forget(monkeypatch)
    with pytest.raises(error, match="CUDNN_STATUS_EXECUTION_FAILED"):
        pull(output)
    assert not cudnn_plans._failures


@pytest.mark.parametrize("reason", ["other version", "an engine in Python"])
def test_the_public_function_runs_if_the_private_one_is_unknown(monkeypatch, cudnn, reason):
    if reason == "other version":
        monkeypatch.setattr(cudnn, "__version__", "1.33.0")
    else:
        cudnn.engine = reason
    assert_same(monkeypatch, attention, *qkv(6, 6))
    assert cudnn.executed == [("forward", "public"), ("forward", "public"), ("backward", "public")]


def test_deterministic_mode_builds_plans_that_sum_in_order(cudnn):
    pulled(attention, *qkv(6, 6))
    assert {spec.backward: spec.deterministic for spec, _ in cudnn_plans._plans} == {False: False, True: True}


def test_supported_calls_do_not_warn(cudnn):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pulled(attention, *qkv(6, 6))
    assert [direction for direction, _ in cudnn.executed] == ["forward", "backward"]


def agree_on_the_gpu(monkeypatch, *arrays, **given):
    """Compare output and cotangents on a GPU with those of batched products in float32, by norms.

    Elements of long sequences are small, so that zeros would be within any tolerance for single elements.
    """
    cupy = library_or_skip("cupy")
    if cudnn_plans.frontend()[1] is not None:
        pytest.skip(cudnn_plans.frontend()[1])
    monkeypatch.setattr(cupy_cudnn, "_MIN_SCORES", 1)
    monkeypatch.setattr(cupy_cudnn, "_MIN_KEYS", 1)
    given = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    rounded = [cupy.asarray(array) for array in arrays]
    masks = [given.get(name) for name in ("mask", "bias", "dropout_mask")]
    static = {**PLAIN, **{name: given[name] for name in ("causal", "keep_probability") if name in given}}
    lines = ops.explain("attention", *rounded, *masks, **static)
    assert ": cudnn.attention" in lines
    results = []
    for inputs in (rounded, [x.astype("float32") for x in rounded]):
        output, pull = vjp(functools.partial(attention, **given), *inputs)
        g = cupy.asarray(normal(*output.shape, seed=9).astype(arrays[0].dtype)).astype(output.dtype)
        results.append([to_host(x).astype("float64") for x in (output, *pull(g))])
    for actual, expected in zip(*results, strict=True):
        assert np.linalg.norm(actual - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 100, 128])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_on_the_gpu(monkeypatch, length, kind, causal):
    mask = make_mask(kind, 2, 3, length, length)
    agree_on_the_gpu(monkeypatch, *qkv(length, length, 64, 64), mask=mask, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "padding"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sizes", [(1, 4, 4, 2048, 128), (2, 8, 2, 1000, 64), (64, 8, 8, 32, 64)], ids=str)
def test_long_sequences_and_large_batches_on_the_gpu(monkeypatch, sizes, dtype, causal, kind):
    batch, count, shared, length, features = sizes
    settings = {"features": features, "width": features, "dtype": dtype, "batch": batch}
    arrays = qkv(length, length, count=count, **settings)[0], *qkv(length, length, count=shared, **settings)[1:]
    lengths = np.random.default_rng(6).integers(length // 2, length, size=(batch, 1, 1, 1))
    mask = np.arange(length) < lengths if kind else None
    agree_on_the_gpu(monkeypatch, *arrays, mask=mask, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(64, 64), (100, 77), (128, 256)], ids=str)
@pytest.mark.parametrize("kind", [None, "padding"])
def test_dropout_on_the_gpu(monkeypatch, lengths, kind):
    keep, mask = np.random.default_rng(3).random((2, 3, *lengths)) < 0.8, make_mask(kind, 2, 3, *lengths)
    agree_on_the_gpu(monkeypatch, *qkv(*lengths, 64, 64), mask=mask, dropout_mask=keep, keep_probability=0.8)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("kind", [None, "padding"])
def test_shared_keys_on_the_gpu(monkeypatch, shared, kind):
    arrays = qkv(100, 100, 64, 64, count=4)[0], *qkv(100, 100, 64, 64, count=shared)[1:]
    mask = make_mask(kind, 2, 4, 100, 100)
    agree_on_the_gpu(monkeypatch, *arrays, mask=mask, causal=True)
