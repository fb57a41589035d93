"""torch.compile traces layers and models into one graph, whose outputs equal those without it."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from xformer.backends import resolve
from xformer.ops import operation

torch = pytest.importorskip("torch", reason="torch.compile")
# array_api_compat caches by functools.lru_cache, which torch.compile ignores.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")

SIZES = {"vocab_size": 11, "d_model": 8, "num_heads": 4, "d_ff": 12}
TOKENS = torch.tensor([[5, 6, 7, 0], [3, 4, 5, 6]])


class Graphs:
    """A backend of torch.compile that runs graphs as they are, and counts them."""

    def __init__(self):
        self.count = 0

    def __call__(self, module, inputs):
        self.count += 1
        return module.forward


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    operation.load_with_library(resolve("torch"))  # reads the settings again, which conftest.py has cleared
    yield Graphs()
    torch._dynamo.reset()


def encoder(**options):
    return xf.Encoder(xf.EncoderConfig(num_layers=1, **SIZES, **options), xp=torch)


def with_experts():
    config = {"num_layers": 1, "positions": "rotary", "activation": "swiglu", "num_experts": 3, "attention_sinks": True}
    model = xf.LanguageModel(xf.LanguageModelConfig(**config, **SIZES), xp=torch)
    model(TOKENS)  # the signature of so many arrays is kept, which would be another graph
    return model


MODELS = {
    "experts": with_experts,
    "encoder": lambda: encoder(positions="relative"),
    "language model": lambda: xf.LanguageModel(
        xf.LanguageModelConfig(num_layers=1, positions="rotary", norm="rms", num_key_value_heads=2, **SIZES), xp=torch
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_one_graph_for_each_shape(graphs, name):
    model = MODELS[name]()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for _ in range(2):
        torch.testing.assert_close(compiled(TOKENS), model(TOKENS))
    assert graphs.count == 1
    longer = torch.cat([TOKENS] * 20, dim=1)  # the table of positions grows
    torch.testing.assert_close(compiled(longer), model(longer))


@pytest.mark.slow
def test_torch_differentiates_a_compiled_model(graphs):
    model = encoder()
    names, arrays = zip(*model.named_parameters(), strict=True)
    for array in arrays:
        array.requires_grad_()
    compiled = torch.compile(lambda tokens: model(tokens), fullgraph=True, backend="aot_eager")
    gradients = torch.autograd.grad(compiled(TOKENS).square().mean(), arrays)
    expected = torch.autograd.grad(model(TOKENS).square().mean(), arrays)
    for name, gradient, reference in zip(names, gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_kernels_are_explained_and_attention_is_recorded_in_a_compiled_function(graphs):
    attention = xf.MultiHeadAttention(8, 2, init=xf.Initializer(torch))
    compiled = torch.compile(attention, backend=graphs)
    x = torch.ones((1, 3, 8))
    compiled(x)
    assert graphs.count == 1
    assert "attention on torch: torch.attention" in xf.ops.explain(lambda: compiled(x))
    with xf.record(attention, "weights") as recorded:
        compiled(x)
    np.testing.assert_allclose(recorded["weights"], attention.weights(x), rtol=1e-6)


def test_a_layer_is_compiled_once_for_all_arrays_of_a_shape():
    layer, graphs = xf.MultiHeadAttention(16, 2, init=xf.Initializer("torch", seed=0)), Graphs()
    compiled = torch.compile(lambda x: layer(x, causal=True), backend=graphs)
    counts = []
    for _ in range(5):
        compiled(torch.randn(2, 5, 16))
        counts.append(graphs.count)
    assert counts[1:] == counts[1:2] * 4, counts  # the first call may change what it depends on, such as caches


def test_a_language_model_is_compiled_for_sequences_of_several_lengths():
    model = xf.LanguageModel(xf.LanguageModelConfig(**SIZES, num_layers=1), xp="torch", seed=0)
    compiled = torch.compile(lambda tokens: model(tokens), backend=Graphs(), fullgraph=True)
    for length in (5, 6, 8, 9):
        tokens = torch.full((2, length), 3)
        torch.testing.assert_close(compiled(tokens), model(tokens))
