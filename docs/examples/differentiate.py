"""Fit a logistic regression on every array library that is installed."""

import importlib.util

import xformer as xf
from xformer.backends import from_host, resolve, to_host

# Explicit keys: no hidden state, the same numbers in every run.
draws, start = xf.Rng(0).split(2)
x_host = draws.fold_in("x").normal((400, 3), 1.0)
chance = draws.fold_in("y").uniform((400,))
y_host = 1.0 * (x_host @ [1.5, -2.0, 0.5] + 0.3 > chance * 2 - 1)


def loss(parameters, x, y):
    """Return the mean cross-entropy of a logistic regression."""
    # The library of the array, or in a derivative a namespace that records.
    xp = xf.array_namespace(parameters["weight"])
    logits = xp.matmul(x, parameters["weight"]) + parameters["bias"]
    return xp.mean(xp.logaddexp(logits, 0 * logits) - logits * y)


@xf.jit
def step(parameters, x, y):
    """Return the loss and the parameters after a step of gradient descent."""
    # Gradients are a dict, as the parameters.
    value, gradients = xf.value_and_grad(loss)(parameters, x, y)
    return value, {
        name: parameters[name] - 2.0 * gradients[name] for name in parameters
    }


results = {}
for name in ("numpy", "torch", "array_api_strict", "jax", "mlx"):
    if importlib.util.find_spec(name) is None:
        continue
    xp = resolve(name)
    x, y = (from_host(xp, array, dtype="float32") for array in (x_host, y_host))
    parameters = {
        "weight": from_host(xp, start.normal((3,), 0.1), dtype="float32"),
        "bias": xp.zeros((), dtype=xp.float32),
    }
    for _ in range(60):
        value, parameters = step(parameters, x, y)
    results[name] = to_host(parameters["weight"])
    print(f"{name:16} loss {float(value):.4f}, weight {results[name].round(2)}")

assert all(abs(weight - results["numpy"]).max() < 1e-4 for weight in results.values())
