"""Shared by all torch baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from xformer.benchmarks import computation as ours
from xformer.benchmarks.computation import Computation
from xformer.benchmarks.interleaved import dtype_of


def torch_computation(
    forward: Callable[..., Any],
    arguments: Sequence[Any],
    gradient: Any = None,
    *,
    parameters: Iterable[Any] = (),
    fingerprint: Callable[[Any], list[list[float]]] = ours.fingerprint,
    metadata: dict[str, Any] | None = None,
) -> Computation:
    """Return the computation of a function of tensors: forward in inference mode, or forward and backward.

    Args:
        forward: Function of the arguments.
        arguments: Tensors, whose gradients follow those of the parameters in the result.
        gradient: Gradient of the output; None computes the forward pass only.
        parameters: Parameters whose gradients are computed.
        fingerprint: Fingerprint of the result.
        metadata: Further facts for the results.
    """
    facts, wait = metadata or {}, wait_for(arguments[0].device)
    if gradient is None:
        return Computation(lambda index: (forward(*arguments),), fingerprint, facts, torch.inference_mode, wait)
    weights = list(parameters)
    leaves = [argument.detach().requires_grad_() for argument in arguments]

    def step(index: int) -> tuple[Any, ...]:
        out = forward(*leaves)
        return (out.detach(), *torch.autograd.grad(out, [*weights, *leaves], gradient))

    return Computation(step, fingerprint, facts, wait=wait)


def compiled(function: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """Return a function compiled by torch if the settings say so; a break of its graph, which is slow, is an error.

    Setting `compiled`: True, or a mode of torch.compile, such as "reduce-overhead", which launches CUDA graphs.
    """
    mode = settings.get("compiled")
    return torch.compile(function, fullgraph=True, mode=mode if isinstance(mode, str) else None) if mode else function


def wait_for(device: Any) -> Callable[[Any], None] | None:
    """Return a function that waits for the results of a GPU; None on the CPU."""
    return (lambda result: torch.cuda.synchronize()) if torch.device(device).type == "cuda" else None


def tensor(array: Any) -> Any:
    """Copy a NumPy array to a contiguous tensor."""
    return torch.tensor(array)


def device_and_dtype(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `.to()` for settings["device"] (default "cpu") and settings["dtype"]."""
    return {"device": settings.get("device", "cpu"), "dtype": getattr(torch, dtype_of(settings))}
