"""Write a layer: a squared-ReLU feed-forward network (So et al., 2021)."""

import numpy as np

import xformer as xf


class SquaredReLU(xf.Module):
    """Compute `relu(x @ up)^2 @ down`."""

    up: xf.Linear
    down: xf.Linear
    dropout: xf.Dropout

    def __init__(
        self, d_model: int, d_ff: int, *, dropout: float = 0.0, init: xf.Initializer
    ):
        self.up = xf.Linear(d_model, d_ff, init=init)
        self.down = xf.Linear(d_ff, d_model, init=init)
        self.dropout = xf.Dropout(dropout)

    def __call__(self, x, rng=None):  # x and the result: (batch, length, d_model)
        hidden = self.up(x, activation="relu")
        return self.down(self.dropout(hidden * hidden, rng))


layer = SquaredReLU(8, 32, dropout=0.1, init=xf.Initializer(np, seed=0))
x = np.ones((2, 5, 8), dtype=np.float32)
print(layer)
print(layer(x).shape)  # without an rng there is no dropout


def loss(layer, x):
    y = layer(x, rng=xf.Rng(1))
    return xf.array_namespace(y).sum(y**2)


value, gradients = xf.value_and_grad(loss)(layer, x)
print({name: gradient.shape for name, gradient in gradients.named_parameters()})
