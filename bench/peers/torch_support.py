"""What all torch peers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from xformer.benchmarks import Work
from xformer.benchmarks.work import digest


def torch_work(
    forward: Callable[..., Any],
    arguments: Sequence[Any],
    gradient: Any = None,
    *,
    parameters: Iterable[Any] = (),
    compiled: bool = False,
    digest: Callable[[Any], list[Any]] = digest,
    facts: dict[str, Any] | None = None,
) -> Work:
    """The work of calling a function of tensors, in inference mode; with a gradient of its output, also backward.

    arguments: tensors, which get gradients after the parameters. compiled: by torch.compile.
    """
    if compiled:
        forward = torch.compile(forward)
    if gradient is None:
        return Work(lambda number: (forward(*arguments),), digest, facts or {}, torch.inference_mode)
    weights = list(parameters)
    leaves = [argument.detach().requires_grad_() for argument in arguments]

    def step(number: int) -> tuple[Any, ...]:
        out = forward(*leaves)
        return (out.detach(), *torch.autograd.grad(out, [*weights, *leaves], gradient))

    return Work(step, digest, facts or {})


def tensor(array: Any) -> Any:
    """A NumPy array as a tensor in memory of its own, rows first."""
    return torch.tensor(array)
