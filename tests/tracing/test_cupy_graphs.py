"""Functions for jit on a stand-in for CuPy, in a process of its own: which calls are graphs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if not shutil.which("gcc"):
    pytest.skip("the stand-in compiles a library", allow_module_level=True)
pytest.importorskip("array_api_compat")
ROOT = Path(__file__).parents[2]
SETUP = """
import sys, tempfile, warnings
import numpy as np
sys.path.insert(0, "bench/standin")
import fakecupy as F
F.install()
import xformer as xf
from xformer.ops import checks
checks.Checks._compared = lambda *args, **options: ("", True)
checks._write = lambda *args: None
xp = xf.backends.resolve("cupy")
F.counting(True)
launches = lambda: F.COUNT["#graph.launch"]
"""
SCRIPTS = {
    "ids of NumPy": """
embedding = xf.Embedding(7, 4, init=xf.Initializer(xp, seed=0))
forward = xf.jit(lambda layer, ids: layer(ids))
for _ in range(8):
    forward(embedding, np.asarray([1, 2]))
assert launches() == 6, F.COUNT
""",
    "only NumPy's are taken": """
def add(x, ids):
    if type(ids) is not np.ndarray:  # the stand-in's arrays are converted by np.asarray
        raise TypeError("Implicit conversion")
    return x + float(np.asarray(ids).sum())
jitted, x = xf.jit(add), xp.ones(2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    for number in range(4):
        assert jitted(x, np.asarray([number])).tolist() == [1.0 + number] * 2
[warning] = caught
assert "takes no arrays of CuPy in place of NumPy's, and is called without a CUDA graph: Impl" in str(warning.message)
assert launches() == 0
""",
    "a donated array of NumPy": """
def write(x, host):
    host[...] = host + 1.0
    return x + 1.0
jitted, host = xf.jit(write, donate_argnums=1), np.zeros(2)
for number in range(4):
    jitted(xp.ones(2), host)
assert host.tolist() == [4.0, 4.0]
assert launches() == 0
""",
    "fit with many shapes": """
from xformer.data.pairs import TokenPairs, epochs
from xformer.data.token_rows import bucket_size

rng = np.random.default_rng(0)
sides = [[[4] * n for n in np.clip(rng.lognormal(2.5, 0.35, 29_000) + shift, 3, 38).astype(int)] for shift in (0, 1)]
pairs, shapes = TokenPairs(*sides), []
for epoch, rows in epochs(pairs, 32_768, xf.Rng(0), skip=0):
    if epoch == 30:
        break
    longest = [max(len(side[row]) for row in rows) + 1 for side in sides]
    shapes.append((bucket_size(len(rows)), *(bucket_size(length, 8) for length in longest)))

class Scale(xf.Module):
    weight: object

    def __init__(self):
        self.weight = xp.ones(1)

def loss_fn(model, batch, rng):
    products = batch * model.weight
    return xf.array_namespace(products).sum(products)

kinds = sorted(set(shapes))
batches = [xp.ones(1 + kinds.index(shape)) for shape in shapes]
counts = []
callback = lambda event, loop: counts.append(launches()) if event.step % 50 or loop.model else None
for jit in (None, False):
    before = launches()
    model, history = xf.fit(Scale(), loss_fn, batches, optimizer=xf.training.Adam(), learning_rate=0.1, jit=jit,
                            num_tokens=lambda batch: 1, callbacks=[callback])
    assert len(history) == len(shapes)
    share = (launches() - before) / len(shapes)
    assert share > 0.85 if jit is None else share == 0.0
""",
    "fit with what cannot be traced": """
import logging
from dataclasses import dataclass

@dataclass
class Pair:  # without a hash
    inputs: object

messages = []
logging.getLogger("xformer").addHandler(handler := logging.Handler())
handler.emit = lambda record: messages.append(record.getMessage())
options = {"optimizer": xf.training.Adam(), "learning_rate": 0.1, "num_tokens": lambda batch: 1}
layer = xf.LayerNorm(4, init=xf.Initializer(xp, seed=0))

def loss_fn(model, batch, rng):
    x = model(batch.inputs)
    return xf.array_namespace(x).sum(x)

batches = [Pair(xp.ones((2, 4))) for _ in range(4)]
assert len(xf.fit(layer, loss_fn, batches, **options)[1]) == 4
[message] = messages
assert message.startswith("jit, the default on CuPy, had no effect: an argument of a function for jit has type Pair")
try:
    xf.fit(layer, loss_fn, batches, jit=True, **options)
except xf.errors.JitError:
    pass
else:
    raise AssertionError
""",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_which_calls_are_graphs(script, tmp_path):
    folder = str(tmp_path)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": folder, "TMPDIR": folder}
    command = [sys.executable, "-c", SETUP + script]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
