"""Count kernels, bytes, copies and waits of single operations: `python bench/standin/run_ops.py`."""

import fakecupy as F
import ml_dtypes
import numpy as np

import xformer as xf

F.start()

from xformer import ops
from xformer.backends import array_namespace
from xformer.tracing.grad import vjp_in

G = F.ndarray


def A(*s, dt=ml_dtypes.bfloat16):
    return np.ones(s, dt).view(G)


def show(name, f, unit):
    f()
    F.reset()
    F.counting(True)
    f()
    F.counting(False)
    n = sum(v for k, v in F.COUNT.items() if not k.startswith("#"))
    b = sum(F.BYTES.values())
    print(f"{name:46s} {n:3d} kernels, {b / unit:6.1f} x the bytes of x; {dict(F.COUNT.most_common(12))}")


def both_ways(f, *arrays):
    """Compute a function and its derivative as in training, where nobody else writes to the arrays."""
    output, pull = vjp_in(array_namespace(*arrays), lambda arrays: f(*arrays), list(arrays))
    pull([output])


x = A(512, 1024)
for name in ("relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "relu_squared"):
    f = ops.activation(name)
    show(name + " forward bf16", lambda: f(x), x.nbytes)
    show(name + " fwd+bwd bf16", lambda: both_ways(f, x), x.nbytes)
xf32 = A(512, 1024, dt=np.float32)
f = ops.activation("silu")
show("silu forward float32", lambda: f(xf32), xf32.nbytes)
# rotary

from xformer.layers.positions import Rotary, position_terms
from xformer.ops.activations import gated

r = Rotary(64)
q = A(4, 8, 128, 64)


def turned(q):
    return position_terms(r, 128, 128, q).rotation(q)


show("rotary of queries, fwd bf16", lambda: turned(q), q.nbytes)
show("rotary of queries, fwd+bwd bf16", lambda: both_ways(turned, q), q.nbytes)
for name in ("silu", "gelu", "relu"):
    show(f"gated unit of {name}, fwd bf16", lambda: gated(x, x, name), x.nbytes)
    show(f"gated unit of {name}, fwd+bwd bf16", lambda: both_ways(lambda a, b: gated(a, b, name), x, x), x.nbytes)
# quantized
from xformer.ops.weights import QuantizedWeight

w = A(1024, 1024, dt=np.float32)
qw = QuantizedWeight.quantize(w.T, "int8").T
x1 = A(1, 1024, dt=np.float32)
show("int8 linear 1x1024 (x = weight int8)", lambda: ops.linear(x1, qw), qw.elements.nbytes)
qb = QuantizedWeight.quantize(w.T, "bfloat16").T
show("bfloat16-quantized linear (x = weight bf16)", lambda: ops.linear(x1, qb), qb.elements.nbytes)
x32 = A(512, 1024, dt=np.float32)
show("int8 linear 512x1024", lambda: ops.linear(x32, qw), qw.elements.nbytes)
show("int8 linear 512x1024 fwd+bwd", lambda: both_ways(lambda x: ops.linear(x, qw), x32), qw.elements.nbytes)
# experts
from xformer.layers import Initializer, Linear
from xformer.tree import flatten


def routed(x, *arrays):
    return ops.apply_experts(x, indices, rebuild(arrays))


for count in (8, 64):
    maps = [Linear(256, 512, init=Initializer("cupy", seed=i, dtype="bfloat16")) for i in range(count)]
    arrays, rebuild = flatten(maps)
    rows, indices = A(1024, 256), np.sort(np.arange(1024) % count).view(G)
    show(f"{count} experts, 1024 rows, forward bf16", lambda: routed(rows, *arrays), rows.nbytes)
    show(f"{count} experts, 1024 rows, fwd+bwd bf16", lambda: both_ways(routed, rows, *arrays), rows.nbytes)
# masks
q = A(64, 8, 32, 64)
m = (np.arange(32) < 20)[None, None, None, :].repeat(64, 0).view(G)
show("attention 64x8x32x64 padded, products, fwd", lambda: ops.attention(q, q, q, m), q.nbytes)
q2 = A(512, 8, 32, 64)
m2 = (np.arange(32) < 20)[None, None, None, :].repeat(512, 0).view(G)
show("attention 512x8x32x64 padded, cudnn fwd", lambda: ops.attention(q2, q2, q2, m2), q2.nbytes)
show(
    "attention 512x8x32x64 padded, cudnn fwd+bwd",
    lambda: both_ways(lambda a, b, c: ops.attention(a, b, c, m2), q2, q2, q2),
    q2.nbytes,
)
q3 = A(1, 12, 384, 64)
show("attention 1x12x384x64 causal (1.8M scores) fwd", lambda: ops.attention(q3, q3, q3, causal=True), q3.nbytes)
qh = A(1, 384, 12, 64).transpose(0, 2, 1, 3)
show(" same, heads after rows as layers make them", lambda: ops.attention(qh, qh, qh, causal=True), q3.nbytes)
show(
    " same fwd+bwd",
    lambda: both_ways(lambda a, b, c: ops.attention(a, b, c, causal=True), qh, qh, qh),
    q3.nbytes,
)
qf = A(2, 12, 512, 64, dt=np.float32)
show("attention 2x12x512x64 float32 causal fwd", lambda: ops.attention(qf, qf, qf, causal=True), qf.nbytes)
from xformer import Rng

show("dropout rate .1 fwd", lambda: xf.Dropout(0.1)(x, Rng(0)), x.nbytes)
from xformer.ops import decoding

show("logsumexp", lambda: decoding.logsumexp(xf32), xf32.nbytes)
try:
    show("top_k 50", lambda: decoding.top_k(xf32, 50), xf32.nbytes)
except Exception as e:
    print("top_k", e)
