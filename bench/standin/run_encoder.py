"""Count kernels, bytes, copies and waits of the forward pass of an encoder: `python bench/standin/run_encoder.py`."""

import os
import sys

import fakecupy as F
import numpy as np

F.start()
from workloads import stacks

from xformer.benchmarks.computation import Backend
from xformer.ops import checks

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
root = os.path.dirname(os.path.dirname(os.path.abspath(checks.__file__)))


def frames(call):
    """Count the calls of functions of the package."""
    found = []

    def profile(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            found.append(frame.f_code.co_name)

    call()
    call()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(found), found


from xformer import ops


def zeros(*shape):
    return b.array(np.zeros(shape, np.float32))


w, w2, d, d2 = zeros(1024, 1024), zeros(1024, 1024), zeros(1024), zeros(1024)
q, k, v = (zeros(8, 16, 2048, 64) for _ in range(3))
for name, call in {
    "linear": lambda: ops.linear(x, w, d),
    "linear without bias": lambda: ops.linear(x, w),
    "project_heads, two": lambda: ops.project_heads(x, (w, d, 16), (w2, d2, 16)),
    "layer_norm": lambda: ops.layer_norm(x, d, d2),
    "rms_norm": lambda: ops.rms_norm(x, d),
    "attention": lambda: ops.attention(q, k, v),
    "add": lambda: b.xp.add(x, x),
    "layer": lambda: layers[0](x),
}.items():
    count, names = frames(call)
    print(f"{name:20} {count:4} frames of the package{': ' + ' '.join(names) if count < 40 else ''}")
print("forward of 6 layers:", frames(fwd)[0], "frames of the package")
