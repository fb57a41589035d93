"""llama.cpp computes from GGUF files of all architectures what xformer computes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.export.test_gguf import CASES, checkpoint
from xformer import load_lora, load_pretrained, lora, save_lora
from xformer.export import export_gguf
from xformer.pipelines.export import export_run

library = pytest.importorskip("xllamacpp.xllamacpp", exc_type=ImportError).__file__


@pytest.fixture
def llama(monkeypatch):
    """Return a function (file, token ids, file of adapters) -> logits of llama.cpp."""
    from reproducible_peers import llama_functions

    def forward(path, ids, adapter=""):
        for name, value in {"LIBRARY": library, "OMP_NUM_THREADS": "1", "ADAPTER": str(adapter)}.items():
            monkeypatch.setenv(name, value)
        return llama_functions(str(path))[0](ids, [ids.shape[1]])

    return forward


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same_logits(case, llama, tmp_path):
    model = load_pretrained(checkpoint(case, tmp_path))
    export_gguf(model, tmp_path / "model.gguf")
    # Longer than the context to which Phi-3 was extended, if it has learned fewer positions.
    ids = np.random.default_rng(0).integers(3, 61, (1, 32 if case == "gpt2" else 40))
    logits = model(ids)
    # The cache of llama.cpp has float16 numbers.
    np.testing.assert_allclose(llama(tmp_path / "model.gguf", ids), logits, rtol=0, atol=1e-2 * np.abs(logits).max())


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_adds_adapters(case, llama, tmp_path):
    base, rng = load_pretrained(checkpoint(case, tmp_path)), np.random.default_rng(0)
    targets = ["self_attention.output", *([] if base.config.num_experts else ["feed_forward.down"])]
    model = lora(base, 2, alpha=3.0, targets=targets)
    for name, x in model.named_trainable_parameters():
        if name.endswith("lora_b"):
            x[...] = rng.normal(size=x.shape)
    save_lora(model, tmp_path / "adapters")
    export_gguf(base, tmp_path / "base.gguf")
    export_run(tmp_path / "adapters", tmp_path / "lora.gguf", "gguf", base=tmp_path / case)
    ids = rng.integers(3, 61, (1, 32 if case == "gpt2" else 40))
    logits, before = (each(ids) for each in (load_lora(base, tmp_path / "adapters"), base))
    assert np.abs(logits - before).max() > 0.1 * np.abs(logits).max()
    actual = llama(tmp_path / "base.gguf", ids, tmp_path / "lora.gguf")
    np.testing.assert_allclose(actual, logits, rtol=0, atol=2e-2 * np.abs(logits).max())
