"""What attention is compared with computes the same, gradients included."""

from __future__ import annotations

import importlib
import itertools

import numpy as np
import pytest

from xformer.benchmarks import attention

SIZES = {"batch": 3, "heads": 2, "length": 6, "head_dim": 4}
FLAGS = [
    dict(zip(("causal", "padded", "backward"), values, strict=True))
    for values in itertools.product((False, True), repeat=3)
]
PEERS = [
    ("baselines.naive_attention", "work", False),
    ("peers.torch_attention", "core", False),
    ("peers.torch_attention", "layer", True),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(name for name in flags if flags[name]) or "plain")
@pytest.mark.parametrize(("module", "function", "layer"), PEERS, ids=lambda value: str(value))
def test_a_peer_computes_the_same(module, function, layer, flags):
    if module.startswith("peers"):
        pytest.importorskip("torch")
    settings = {**SIZES, **flags, "layer": layer}
    ours = attention.work({**settings, "backend": "numpy"})
    theirs = getattr(importlib.import_module(module), function)(settings)
    with theirs.around():
        found = theirs.digest(theirs.step(0))
    np.testing.assert_allclose(found, ours.digest(ours.step(0)), atol=1e-5)
