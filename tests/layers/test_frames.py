"""The number of Python calls of a layer: what a reader has to follow, and what a small call costs."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

import xformer as xf
from xformer import native

ROOT = os.path.dirname(xf.__file__)


@pytest.mark.skipif(not native.is_available(), reason=native.WHY_NOT)
def test_attention_calls_few_functions_in_few_files():
    attention = xf.MultiHeadAttention(64, 4, init=0)
    x = np.random.default_rng(0).standard_normal((2, 20, 64), dtype="float32")
    attention(x, causal=True)
    files = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        attention(x, causal=True)
    finally:
        sys.setprofile(before)
    assert len(files) <= 90
    assert len(set(files)) <= 12
