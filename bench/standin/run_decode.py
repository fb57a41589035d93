"""Count kernels, bytes, copies and waits of a search: `python bench/standin/run_decode.py BATCH [BEAM | sample]`."""

import collections
import functools
import sys
import time

import fakecupy as F

F.start()

from workloads import decoding

import xformer as xf

batch = int(sys.argv[1]) if len(sys.argv) > 1 else 32
search = sys.argv[2] if len(sys.argv) > 2 else "1"
if search == "sample":
    options = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
    decoding.GenerationConfig = functools.partial(decoding.GenerationConfig, **options)
    decoding.generate = functools.partial(decoding.generate, rng=xf.Rng(0))
s = {
    "length": 32,
    "heads": 8,
    "head_dim": 64,
    "layers": 6,
    "vocabulary": 8000,
    "batch": batch,
    "beam": 1 if search == "sample" else int(search),
    "backend": "cupy",
}
c = decoding.build(s)
import xformer.generation.engine as en

oc = en.choose


def ch(c):
    t, l = oc(c)
    return en.Chosen(0 * t + 5, 0 * l - 1.0)


en.choose = ch
# mark steps
import xformer.generation.steps as st

orig = st.DecodingSteps.step


def step(self, *a, **k):
    F.LOG.append("STEP")
    return orig(self, *a, **k)


st.DecodingSteps.step = step
F.counting(True)
c.step(0)
F.counting(False)
log = F.LOG[:]
print("first call: captures", F.COUNT["#captures"])
while "BEGIN" in log:  # the nodes of each graph
    start, end = log.index("BEGIN"), log.index("END")
    nodes, log = log[start + 1 : end], log[end + 1 :]
    print("graph of", len(nodes), "nodes:", dict(collections.Counter(nodes).most_common()))
F.reset()
F.counting(True)
out = c.step(1)
F.counting(False)
log = F.LOG[:]
print("tokens", len(out), len(out[0]))
F.report(f"decode batch {batch}, whole call (second call)")
# split
parts = [[]]
for l in log:
    if l == "STEP":
        parts.append([])
    else:
        parts[-1].append(l)
print("prefill events:", len(parts[0]), " steps:", len(parts) - 1)

for i in (1, 2, 3, 4, 5, 20):
    if i < len(parts):
        print("step", i, len(parts[i]), dict(collections.Counter(parts[i])))
print("prefill:", dict(collections.Counter(parts[0])))
t = []
for i in range(3):
    t0 = time.perf_counter()
    c.step(2 + i)
    t.append(time.perf_counter() - t0)
print("python ms per call:", [round(1e3 * x, 1) for x in t])
