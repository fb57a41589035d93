"""Register a kernel: a replacement of one operation for one array library."""

import numpy as np

import xformer as xf
from xformer.ops import Kernel, explain, register


def why_not(x, *, save):
    """Return None if the kernel can compute this call, else the reason in words."""
    return None if x.size < 2**20 else "more than a million elements"


def forward(x, *, save):
    """Return the output, and the residuals that `vjp` needs (if `save`)."""
    output = np.maximum(x, np.float32(0.0))
    return output, output if save else None


def vjp(g, output, needs):
    """Map the cotangent of the output to one cotangent for each input."""
    return (np.where(output > 0.0, g, np.float32(0.0)),)


kernel = Kernel("example.relu", "relu", "numpy", forward, vjp, ("float32",), why_not)
register(kernel)

x = np.asarray([[-1.0, 2.0]], dtype=np.float32)
print(explain("relu", x))
assert "example.relu" in explain("relu", x).splitlines()[0]
print(xf.value_and_grad(lambda x: xf.array_namespace(x).sum(xf.ops.relu(x)))(x))
