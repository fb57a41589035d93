"""Kernels of a library that checks itself are compared at their first use; those that fail are switched off."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from tests.ops.replace_kernels import replace_kernels
from xformer import environment, ops, vjp
from xformer.backends.numpy import NumpyLibrary
from xformer.ops import attention, checks, cross_entropy, embedding, layer_norm, linear, project_heads, relu
from xformer.ops.operation import OPERATIONS, Kernel


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Have NumPy check its kernels, of which there are none yet, and return the path of the verdicts."""
    monkeypatch.delenv("XFORMER_CHECK_KERNELS", raising=False)
    monkeypatch.setenv("XFORMER_KERNELS", "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(NumpyLibrary, "kernel_identity", lambda self: "GPU 1", raising=False)
    replace_kernels(monkeypatch, "numpy", {})
    environment.clear_cache()
    yield tmp_path / "xformer" / "kernel_checks.json"
    monkeypatch.undo()
    environment.clear_cache()


def use(monkeypatch, operation, forward=None, pull=None, **fields):
    """Register a kernel that calls the definition, but for what is given; return the list of its calls."""
    definition, calls = OPERATIONS[operation].definition, []

    def counted(*arrays, save, **options):
        calls.append(arrays[0].shape)
        return (forward or definition.forward)(*arrays, save=save, **options)

    kernel = Kernel(f"test.{operation}", operation, "numpy", counted, pull or definition.vjp, **fields)
    replace_kernels(monkeypatch, "numpy", {operation: [kernel]})
    return calls


X = np.random.default_rng(0).normal(size=(3, 5)).astype("float32")


def test_a_kernel_that_agrees_is_compared_once(monkeypatch, cache):
    calls = use(monkeypatch, "relu")
    for _ in range(3):
        relu(X)
    assert len(calls) == 1 + 3
    assert json.loads(cache.read_text())["GPU 1"].popitem()[1] == ""
    environment.clear_cache()  # as in another process
    calls = use(monkeypatch, "relu")
    relu(X)
    assert len(calls) == 1
    monkeypatch.setattr(NumpyLibrary, "kernel_identity", lambda self: "GPU 2")
    environment.clear_cache()
    calls = use(monkeypatch, "relu")
    relu(X)
    assert len(calls) == 2
    assert set(json.loads(cache.read_text())) == {"GPU 1", "GPU 2"}


def fail(*arrays, save):
    raise RuntimeError("nvrtc: error: invalid value for\n --gpu-architecture")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"forward": fail}, "RuntimeError: nvrtc: error: invalid value for --gpu-architecture"),
        ({"forward": lambda x, *, save: (x, x > 0)}, r"test\.relu differs from the portable relu by"),
        ({"forward": lambda x, *, save: (np.full_like(x, np.nan), x > 0)}, "differs from the portable relu by nan"),
        ({"forward": lambda x, *, save: (x[:1], x > 0)}, r"returned shape \(1, 5\)"),
    ],
    ids=["fails to build", "differs", "NaN", "shape"],
)
def test_a_kernel_that_fails_is_switched_off(monkeypatch, cache, options, reason):
    use(monkeypatch, "relu", **options)
    with pytest.warns(RuntimeWarning, match=rf"^kernel test\.relu is switched off, and relu may be slower: .*{reason}"):
        np.testing.assert_array_equal(relu(X), np.maximum(X, 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(relu(X), np.maximum(X, 0.0))
    assert ops.explain(lambda: relu(X)).startswith("relu on numpy: portable definition")
    environment.clear_cache()
    calls = use(monkeypatch, "relu", **options)
    with pytest.warns(RuntimeWarning, match=r"please report this, and delete .*kernel_checks\.json to compare again$"):
        relu(X)  # in each process
    assert not calls or options["forward"] is fail  # which another process may build


def test_the_derivative_is_compared_where_it_is_needed(monkeypatch, cache):
    use(monkeypatch, "relu", pull=lambda g, residuals, needs: (0.0 * g,))
    relu(X)
    with pytest.warns(RuntimeWarning, match="differs from the derivative of the portable relu"):
        _, pull = vjp(relu, X)
    np.testing.assert_array_equal(pull(np.ones_like(X))[0], X > 0)


def test_the_kind_of_mask_is_compared_by_itself(monkeypatch, cache):
    """A derivative that is wrong only for masks that all queries share."""
    definition = OPERATIONS["attention"].definition

    def pull(g, residuals, needs, **options):
        cotangents = definition.vjp(g, residuals, needs, **options)
        mask = residuals_mask[-1]
        is_wrong = mask is not None and mask.shape[-2] == 1
        return tuple(None if x is None else x * (0.0 if is_wrong else 1.0) for x in cotangents)

    residuals_mask = []

    def forward(*arrays, **options):
        residuals_mask.append(arrays[3])
        return definition.forward(*arrays, **options)

    use(monkeypatch, "attention", forward, pull)
    query = np.random.default_rng(0).normal(size=(2, 3, 7, 8)).astype("float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vjp(lambda x: attention(x, x, x), query)
        vjp(lambda x: attention(x, x, x, np.ones((7, 7), bool)), query)
    with pytest.warns(RuntimeWarning, match="derivative of the portable attention"):
        _, gradients = vjp(lambda x: attention(x, x, x, np.ones((2, 1, 1, 7), bool)), query)
    assert np.abs(gradients(query)[0]).max() > 0.1


def test_large_arrays_are_compared_at_smaller_sizes(monkeypatch, cache):
    calls = use(monkeypatch, "linear")
    linear(np.ones((300, 1000), "float32"), np.ones((1000, 130), "float32"))
    assert calls == [(12, 1000), (300, 1000)]
    calls = use(monkeypatch, "attention")
    query = np.ones((1, 2, 700, 8), "float32")
    attention(query, query, query)
    assert calls == [(1, 2, 572, 8), (1, 2, 700, 8)]


def test_all_kinds_of_arguments(monkeypatch, cache):
    ids, x = np.asarray([[1, 2, 0]]), np.ones((3, 8), "float32")
    for operation, call in {
        "embedding": lambda: embedding(x, ids),
        "cross_entropy": lambda: cross_entropy(x, ids[0], label_smoothing=0.1),
        "layer_norm": lambda: layer_norm(x.T, x[:, 0], None),
        "project_heads": lambda: project_heads(np.ones((2, 3, 8), "float32"), (np.ones((8, 768), "float32"), None, 12)),
    }.items():
        calls = use(monkeypatch, operation)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
        assert len(calls) in (2, 3), operation  # once more if it does not fit reduced sizes


@pytest.mark.parametrize("text", ["", "[]", '{"GPU 1": 3}', '{"GPU 1": {"x": 3}}'])
def test_a_damaged_file_is_ignored(monkeypatch, cache, text):
    cache.parent.mkdir()
    cache.write_text(text)
    use(monkeypatch, "relu")
    np.testing.assert_array_equal(relu(X), np.maximum(X, 0.0))


def test_out_of_memory_is_no_verdict(monkeypatch, cache):
    def forward(x, *, save):
        if len(x) != 20:
            raise MemoryError
        return np.maximum(x, 0.0), None

    use(monkeypatch, "relu", forward)
    relu(np.ones((20, 5), "float32"))
    assert not cache.exists()


def test_the_check_can_be_switched_off(monkeypatch, cache):
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "0")
    environment.clear_cache()
    calls = use(monkeypatch, "relu")
    relu(X)
    assert len(calls) == 1
    assert not checks._GUARDED
