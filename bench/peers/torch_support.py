"""What all torch peers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from xformer.benchmarks import Work
from xformer.benchmarks import workload as ours
from xformer.benchmarks.interleaved import dtype_of


def torch_work(
    forward: Callable[..., Any],
    arguments: Sequence[Any],
    gradient: Any = None,
    *,
    parameters: Iterable[Any] = (),
    compiled: bool = False,
    digest: Callable[[Any], list[Any]] = ours.digest,
    facts: dict[str, Any] | None = None,
) -> Work:
    """The work of calling a function of tensors, in inference mode; with a gradient of its output, also backward.

    arguments: tensors, which get gradients after the parameters. compiled: by torch.compile.
    """
    if compiled:
        forward = torch.compile(forward)
    if gradient is None:
        return Work(lambda number: waited_for((forward(*arguments),)), digest, facts or {}, torch.inference_mode)
    weights = list(parameters)
    leaves = [argument.detach().requires_grad_() for argument in arguments]

    def step(number: int) -> tuple[Any, ...]:
        out = forward(*leaves)
        return waited_for((out.detach(), *torch.autograd.grad(out, [*weights, *leaves], gradient)))

    return Work(step, digest, facts or {})


def waited_for(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The result, when the GPU has made it."""
    if result[0].is_cuda:
        torch.cuda.synchronize()
    return result


def tensor(array: Any) -> Any:
    """A NumPy array as a tensor in memory of its own, rows first."""
    return torch.tensor(array)


def position_terms(settings: dict[str, Any]) -> dict[str, Any]:
    """Where tensors and modules go, and in which dtype: `.to(**position_terms(settings))`.

    settings: device ("cuda", or nothing for the CPU), dtype.
    """
    return {"device": settings.get("device", "cpu"), "dtype": getattr(torch, dtype_of(settings))}
