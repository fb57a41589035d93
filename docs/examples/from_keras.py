"""Train a model of your own on arrays, with the habits of Keras."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import xformer as xf

mpl.use("agg")  # draws files


class Residual(xf.Module):
    """A layer: no `build`; sizes are arguments, and fields are annotated."""

    dense: xf.Linear
    norm: xf.LayerNorm

    def __init__(self, width, init):
        self.dense = xf.Linear(width, width, init=init)
        self.norm = xf.LayerNorm(width, init=init)

    def __call__(self, x):  # not `call`
        return x + self.dense(self.norm(x), activation="relu")


class Regressor(xf.Module):
    """A model is a layer, too."""

    inputs: xf.Linear
    layers: list[Residual]
    dropout: xf.Dropout
    output: xf.Linear

    def __init__(self, features=3, width=32, seed=0):
        init = xf.Initializer(np, seed=seed)  # or torch, jax.numpy, cupy
        self.inputs = xf.Linear(features, width, init=init)
        self.layers = [Residual(width, init) for _ in range(2)]
        self.dropout = xf.Dropout(0.1)
        self.output = xf.Linear(width, 1, init=init)

    def __call__(self, x, rng=None):  # with an rng, dropout is on: training=True
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.dropout(x, rng))[:, 0]


def mse(model, batch, rng):
    """Return the mean over a batch."""
    x, y = batch
    errors = model(x, rng) - y
    return xf.array_namespace(errors).mean(errors**2)


def batches(x, y, size, epochs=1, seed=0):
    """Shuffle the rows in each epoch, and cut them into batches."""
    orders = np.random.default_rng(seed).permuted([np.arange(len(x))] * epochs, axis=1)
    starts = range(0, len(x), size)
    return [(x[r], y[r]) for o in orders for s in starts if len(r := o[s : s + size])]


generator = np.random.default_rng(0)
x = generator.normal(size=(1000, 3)).astype(np.float32)
y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2]
model = Regressor()
print(model)  # model.summary()
print(model.parameter_count(), "parameters")

train = batches(x[:800], y[:800], size=32, epochs=40)
model, history = xf.fit(
    model,
    mse,
    train,
    optimizer=xf.Adam(),
    learning_rate=xf.schedules.cosine(5e-3, warmup_steps=50, total_steps=len(train)),
    callbacks=[
        xf.validate(batches(x[800:], y[800:], size=100), every=len(train) // 40),
        xf.early_stopping(patience=5),
    ],
    keep_best=True,  # restore_best_weights
)
best = min(history.validations, key=lambda each: each.loss)
print(f"{len(history)} of {len(train)} steps; the best is that of step {best.step}")
print(f"validation loss {best.loss:.3f}")

figure, axis = plt.subplots()
axis.semilogy([each.step for each in history], [each.loss for each in history])
valid = history.validations
axis.semilogy([each.step for each in valid], [each.loss for each in valid])
axis.set(xlabel="step", ylabel="loss")
figure.savefig("curve.png")

xf.save_parameters(model, "model.safetensors")
loaded = xf.load_parameters(Regressor(), "model.safetensors")
assert np.array_equal(loaded(x), model(x))
