"""Steps that choose their own tokens: the program of a step and of that choice, which the host reads later."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from xformer.backends import array_namespace, assign, device
from xformer.ops.decoding import GREEDY, kernel_settings


class Choices:
    """A program of a step and of the choice of its tokens, which are the input of the next one, and its arrays.

    Args:
        cache: Cache of fixed shape.
        num_tokens: Size of the vocabulary.

    Attributes:
        program: The program; None until a step was made.
    """

    def __init__(self, cache: Any, num_tokens: int) -> None:
        like, rows, steps = cache.lengths, len(cache.lengths), cache.capacity
        integers, reals = ((rows, 1), (rows,)), ((steps, rows), (4,), (steps, rows, 2))
        shapes = *((x, "int64") for x in integers), ((num_tokens,), "bool"), *((x, "float64") for x in reals)
        xp = array_namespace(like)
        # Those that the kernel takes, in this order.
        self._arrays = [xp.zeros(shape, dtype=xp.dtype_named(name), device=device(like)) for shape, name in shapes]
        name = "native" if xp.graph_capture() is None else "cupy.decoding"
        self._kernels = importlib.import_module(f"xformer.kernels.{name}")
        self.program: Any = None

    @property
    def nbytes(self) -> int:
        """Size of its arrays, and of the memory of its program."""
        return sum(each.nbytes for each in (*self._arrays, self.program) if each is not None)

    def start(self, tokens: Any, mask: Any, uniforms: Any, settings: dict[str, Any]) -> None:
        """Set what the next steps read; see `DecodingSteps.look_ahead`."""
        padded = np.zeros(self._arrays[3].shape)
        padded[: len(uniforms)] = uniforms[: len(padded)]
        hosts = tokens, np.zeros(len(tokens)), mask, padded, kernel_settings(**settings or GREEDY)
        for array, host in zip(self._arrays, hosts, strict=False):
            assign(array, array_namespace(array).from_host(host, dtype=array.dtype, device=device(array)))

    def trace(self, new_program: Callable[..., Any], model: Any, cache: Any) -> Any:
        """Make the first step, and return its program."""
        return new_program(functools.partial(_step, self._kernels.choose_into), (model, cache, *self._arrays), {})

    def read_later(self, first: int, count: int) -> Callable[[], Any]:
        """Return a function that returns what steps chose, (steps, rows, 2), and waits for no later ones."""
        return self._kernels.read_later(self._arrays[-1][first : first + count])


def _step(choose_into: Callable[..., None], model: Any, cache: Any, tokens: Any, *arrays: Any) -> None:
    choose_into(model.decode_step(tokens, cache), tokens, *arrays)
