"""Simulate a planet from its energy, and aim it by the derivative of the simulation."""

import importlib.util

import numpy as np

import xformer as xf
from xformer.backends import from_host, resolve, to_host


def energy(position):
    """Return the potential energy of a planet at (x, y) around a star at the origin."""
    xp = xf.array_namespace(position)
    return -1 / xp.sqrt(xp.sum(position**2))


force = xf.grad(lambda position: -energy(position))


def simulate(velocity, position, steps=12, dt=0.1):
    """Return the position after some steps of the leapfrog method."""
    for _ in range(steps):
        velocity = velocity + dt / 2 * force(position)
        position = velocity * dt + position
        velocity = velocity + dt / 2 * force(position)
    return position


jacobian = xf.jit(xf.jacobian(simulate))  # of the final position by the velocity

start, target = np.asarray([1.0, 0.0]), np.asarray([0.2, 1.1])
for name in ("numpy", "torch", "array_api_strict", "jax", "mlx"):
    if importlib.util.find_spec(name) is None:
        continue
    xp = resolve(name)
    position, velocity = (
        from_host(xp, array, dtype="float32")
        for array in (start, np.asarray([0.0, 1.0]))
    )
    for _ in range(5):  # Newton's method: which velocity reaches the target?
        miss = target - to_host(simulate(velocity, position))
        change = np.linalg.solve(to_host(jacobian(velocity, position)), miss)
        velocity = velocity + from_host(xp, change, dtype="float32")
    distance = np.abs(to_host(simulate(velocity, position)) - target).max()
    print(f"{name:16} velocity {to_host(velocity).round(4)}, misses by {distance:.0e}")
    assert distance < 1e-5
