"""Count kernels, bytes, copies and waits of a training step: `JIT=1 python bench/standin/run_train.py`."""

import os
import pathlib
import tempfile
import time

import fakecupy as F

F.start()

from workloads import training

B = int(os.environ.get("B", "512"))
s = {"length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": 32000, "dtype": "bfloat16", "batch": B}
w = training.workload(s)
jit = os.environ.get("JIT", "0") == "1"
c = training.build({**w.settings, "backend": "cupy", "jit": jit})
print("built", flush=True)
for i in range(3):
    c.step(i)
F.reset()
F.counting(True)
c.step(3)
F.counting(False)
F.report(f"train step {B}x32 jit={jit}")
pathlib.Path(tempfile.gettempdir(), f"train_log_{int(jit)}.txt").write_text("\n".join(F.LOG))
if os.environ.get("TIME", "1") == "1":
    t = []
    for i in range(4):
        t0 = time.perf_counter()
        c.step(4 + i)
        t.append(time.perf_counter() - t0)
    print("python ms per step:", [round(1e3 * x, 1) for x in t])
    import cProfile
    import pstats

    p = cProfile.Profile()
    p.enable()
    c.step(9)
    p.disable()
    st = pstats.Stats(p)
    print("frames per step", st.total_calls)
    st.sort_stats("tottime").print_stats(18)
