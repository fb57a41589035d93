"""Kernels in a recording: their elementary calls if the kernel is recordable, else one call of the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from xformer.backends.recording import current_tape, paused, plain, recorded

if TYPE_CHECKING:
    from xformer.ops.operation import Kernel


def recorded_kernel(kernel: Kernel) -> dict[str, Any]:
    """Return the forward and the vjp of a kernel for recorded arrays."""
    forward, vjp = _by_calls(kernel) if kernel.is_recordable else _as_a_whole(kernel)
    return {"forward": forward, "vjp": vjp}


def _by_calls(kernel: Kernel) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    def forward(*arrays: Any, save: bool, **options: Any) -> tuple[Any, Any]:
        output, residuals = kernel.forward(*recorded(arrays), save=save, **options)
        return recorded(output), residuals

    def vjp(g: Any, residuals: Any, needs: Any, **options: Any) -> tuple[Any, ...]:
        return tuple(recorded(list(kernel.vjp(recorded(g), residuals, needs, **options))))  # type: ignore[misc]

    return forward, None if kernel.vjp is None else vjp


def _as_a_whole(kernel: Kernel) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    def forward(*arrays: Any, save: bool, **options: Any) -> tuple[Any, Any]:
        residuals: list[Any] = [None]

        def run(arrays: Any, options: Any) -> Any:
            output, residuals[0] = kernel.forward(*arrays, save=save, **options)
            return output

        return _repeat(run, arrays, options), residuals

    def vjp(g: Any, residuals: Any, needs: Any, **options: Any) -> tuple[Any, ...]:
        def run(g: Any, options: Any) -> Any:
            return kernel.vjp(g, residuals[0], needs, **options)  # type: ignore[misc]

        return _repeat(run, g, options)

    return forward, None if kernel.vjp is None else vjp


def _repeat(run: Callable[..., Any], *args: Any) -> Any:
    """Call `run` now and in each replay; results that are not in the memory of an argument are copied."""
    tape, args = current_tape(), plain(args)
    if tape is None:
        return run(*args)
    with paused():
        result = run(*args)
    results = result if isinstance(result, tuple) else (result,)
    inputs = list(_arrays(args))
    own = set(map(id, inputs))  # most arrays written in place; comparing all memory is quadratic
    fresh = [i for i, x in enumerate(results) if x is not None and id(x) not in own and not _is_in(x, inputs)]

    def call(targets: Any, *args: Any) -> None:
        new = run(*args)
        new = new if isinstance(new, tuple) else (new,)
        for index, target in zip(fresh, targets, strict=True):
            target[...] = new[index]

    targets = [np.array(results[index]) for index in fresh]  # a result may be a constant, or share memory with another
    tape.append(call, (targets, *args))
    outputs = list(recorded(list(results)))
    for index, target in zip(fresh, targets, strict=True):
        outputs[index] = tape.own(target)
    return tuple(outputs) if isinstance(result, tuple) else outputs[0]


def _is_in(x: Any, arrays: list[Any]) -> bool:
    return any(np.may_share_memory(x, array) for array in arrays)


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, np.ndarray):
        yield value
