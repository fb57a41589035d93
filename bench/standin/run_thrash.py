"""Count traces, captures and launches of SHAPES shapes that take turns: `python bench/standin/run_thrash.py GIB`.

Each program keeps this many GiB of arguments and results.
"""

import os
import sys

import fakecupy as F
import numpy as np

import xformer as xf

F.start()
GB = float(sys.argv[1])

from xformer.benchmarks.computation import Backend

b = Backend("cupy", "float32")
import importlib

import xformer.tracing.program as P


def ac(a, xp=None):
    return a.copy(order="K")


P.array_copy = ac
P.CudaProgram.nbytes = property(lambda self: int(GB * 2**30))  # of what it keeps
J = importlib.import_module("xformer.tracing.jit")
J.array_copy = ac
traces = [0]
o = P.CudaProgram.__init__


def init(self, *a, **k):
    traces[0] += 1
    return o(self, *a, **k)


P.CudaProgram.__init__ = init
layer = xf.LayerNorm(64, init=xf.Initializer(b.xp, seed=0))
f = J.jit_repeated(lambda l, x: l(x)) if len(sys.argv) > 2 else xf.jit(lambda l, x: l(x))
xs = [np.ones((n, 64), np.float32).view(F.ndarray) for n in range(8, 8 + int(os.environ.get("SHAPES", "2")))]
F.counting(True)
for i in range(200):
    f(layer, xs[i % len(xs)])
print(
    f"program size {GB} GiB, {len(xs)} shapes, 200 calls: "
    f"traced {traces[0]}, captured {F.COUNT['#captures']}, graph launches {F.COUNT['#graph.launch']}"
)
