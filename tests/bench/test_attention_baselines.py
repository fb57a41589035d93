"""The baselines of attention compute the same outputs and gradients."""

from __future__ import annotations

import importlib
import itertools

import pytest

from xformer.benchmarks import parts
from xformer.benchmarks.interleaved import difference

SIZES = {"batch": 3, "heads": 2, "length": 6, "head_dim": 4}
FLAGS = [
    dict(zip(("causal", "padded", "backward"), values, strict=True))
    for values in itertools.product((False, True), repeat=3)
]
BASELINES = [
    ("baselines.naive_attention", "build", {"part": "attention"}),
    ("baselines.torch_attention", "build_attention", {"part": "attention"}),
    ("baselines.torch_attention", "build_layer", {"part": "layer", "fast_path": False}),
    ("baselines.torch_attention", "build_layer", {"part": "layer"}),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "flags", FLAGS[1::2], ids=lambda flags: "-".join(name for name in flags if flags[name]) or "plain"
)
@pytest.mark.parametrize(("module", "function", "options"), BASELINES, ids=lambda value: str(value))
def test_a_baseline_computes_the_same(module, function, options, flags):
    if module.startswith("baselines.torch"):
        pytest.importorskip("torch")
    settings = {**SIZES, **flags, **options}
    ours = parts.build({**settings, "backend": "numpy"})
    theirs = getattr(importlib.import_module(module), function)(settings)
    with theirs.context():
        actual = theirs.fingerprint(theirs.step(0))
    assert difference(ours.fingerprint(ours.step(0)), actual) < 1e-5
