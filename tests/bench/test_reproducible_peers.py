"""The libraries whose logits are compared read the same model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import reproducible_peers as peers

import xformer as xf

# Importing transformers runs deprecated code.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_peers_compute_the_same_logits(tmp_path, capsys):
    pytest.importorskip("transformers")
    sizes = {"d_model": 32, "num_heads": 2, "d_ff": 48, "num_layers": 2, "vocab_size": 60}
    layers = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "scale_embeddings": False}
    biases = dict.fromkeys(("attention_bias", "feed_forward_bias", "output_bias"), False)
    model = xf.LanguageModel(xf.LanguageModelConfig(**sizes, **layers, **biases), xp=np, seed=0)
    xf.save_pretrained(model, tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 60, (3, 9)))
    logits = []
    for name in ("xformer", "transformers"):
        peers.worker(name, str(tmp_path / "model"), tmp_path, f"{name}.npy", True)
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        logits.append(np.load(tmp_path / f"{name}.npy"))
        assert max(result[name] for name in ("batch", "padding", "cache", "steps")) < 1e-4
    np.testing.assert_allclose(*logits, atol=1e-5)
