"""Derivatives and programs of functions."""

from __future__ import annotations

from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import xformer as xf
from forecast.model import Forecaster, Window, error_and_outputs, squared_error


def energy(x: xf.Array, scale: float = 1.0) -> xf.Array:
    return xf.array_namespace(x).sum(scale * x**3)


def of_numpy(x: NDArray[np.float64]) -> np.float64:
    return np.sum(x * x)


def of_tree(parameters: dict[str, xf.Array], x: xf.Array) -> xf.Array:
    return xf.array_namespace(x).sum(parameters["weight"] * x + parameters["bias"])


def derivatives(model: Forecaster, batch: Window) -> Forecaster:
    """Return the gradient of a model; the types are those of what is differentiated."""
    value, gradient = xf.value_and_grad(squared_error)(model, batch, rng=xf.Rng(0))
    assert_type(value, xf.Array)
    assert_type(gradient, Forecaster)
    (value, extra), gradient = xf.value_and_grad(error_and_outputs, has_aux=True)(model, batch)
    assert_type(extra, dict[str, xf.Array])
    assert_type(gradient, Forecaster)
    assert_type(xf.grad(squared_error)(model, batch), Forecaster)
    assert_type(xf.grad(error_and_outputs, has_aux=True)(model, batch), tuple[Forecaster, dict[str, xf.Array]])
    both = xf.value_and_grad(squared_error, (0, 1))(model, batch)
    assert_type(both[0], xf.Array)
    return gradient


def arrays(x: xf.Array) -> xf.Array:
    """Return what functions of arrays compute."""
    assert_type(xf.grad(energy)(x, scale=2.0), xf.Array)
    assert_type(xf.grad(of_numpy)(np.ones(2)), NDArray[np.float64])
    assert_type(xf.grad(of_tree)({"weight": x, "bias": x}, x), dict[str, xf.Array])
    assert_type(xf.jit(energy)(x, scale=2.0), xf.Array)
    assert_type(xf.vmap(energy)(x), xf.Array)
    assert_type(xf.remat(energy)(x), xf.Array)
    assert_type(xf.stop_gradient(x), xf.Array)
    assert_type(xf.jvp(energy, (x,), (x,)), tuple[xf.Array, xf.Array])
    output, pull = xf.vjp(of_tree, {"weight": x, "bias": x}, x)
    assert_type(output, xf.Array)
    assert_type(pull(output), tuple[dict[str, xf.Array], xf.Array])
    hessian: xf.Array = xf.hessian(energy)(x, 2.0)
    jacobian: xf.Array = xf.jacobian(energy)(x)
    total, totals = xf.scan(add, 0.0, x)
    assert_type(total, xf.Array)
    assert_type(totals, xf.Array)
    squares = xf.grad(lambda y: xf.array_namespace(y).sum(y * y))(x)
    result: xf.Array = hessian @ (jacobian + squares) + total
    return result


def add(total: xf.Array, x: xf.Array) -> tuple[xf.Array, xf.Array]:
    return total + x, total


@xf.jit
def step(model: Forecaster, batch: Window) -> xf.Array:
    """Return the error of a batch by a program."""
    return squared_error(model, batch)


def losses(model: Forecaster, batches: list[Window]) -> list[float]:
    """Return the errors of batches."""
    compiled = xf.jit(model)
    assert_type(compiled(batches[0].values, rng=None), xf.Array)
    assert_type(step(model, batches[0]), xf.Array)
    return [float(step(model, batch)) for batch in batches]
