"""Training in reproducible mode gives the same bits for any number of threads, BLAS kernel and instruction set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from xformer import native

# Products of 1,024 rows are large enough for the BLAS library.
PROGRAM = """
import functools
import hashlib
import numpy as np
import xformer as xf
from xformer.data.pairs import Batch, TokenPairs

sizes = {"d_model": 256, "num_heads": 8, "d_ff": 512, "num_encoder_layers": 1, "num_decoder_layers": 1}
config = xf.TransformerConfig(source_vocab_size=300, target_vocab_size=300, dropout=0.1, **sizes)
ids = np.random.default_rng(0).integers(4, 300, (64, 17)).tolist()
batch = Batch.make(TokenPairs(ids, ids), range(64), xp=np)
for optimizer in (xf.Adam(), xf.Muon()):
    model, _ = xf.fit(
        xf.Transformer(config), functools.partial(xf.translation_loss, label_smoothing=0.1), [batch] * 2,
        optimizer=optimizer, learning_rate=1e-3, data_parallel=2
    )
    digest = hashlib.sha256()
    for name, array in model.named_arrays():
        digest.update(array.tobytes())
    print(digest.hexdigest())
"""


def train(**environment):
    """Return the hashes of the models that two optimizers train in another process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    hashes = done.stdout.split()
    assert len(set(hashes)) == 2
    return hashes


@pytest.mark.slow
@pytest.mark.skipif(native.level() in ("", "baseline"), reason="needs the library for AVX2 or AVX-512")
def test_training_has_one_hash():
    expected = train(XFORMER_REPRODUCIBLE="1", XFORMER_NUM_THREADS="1")
    others = [
        {"XFORMER_NUM_THREADS": "2"},
        {"OPENBLAS_CORETYPE": "Nehalem"},
        {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4"},  # the names of NumPy 2.4
        {"XFORMER_NATIVE": "avx2"},
    ]
    for environment in others:
        assert train(XFORMER_REPRODUCIBLE="1", **environment) == expected, environment
