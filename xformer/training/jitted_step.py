"""The whole training step on NumPy and CuPy, traced by jit once for each shape of batches."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xformer.backends import array_namespace, device
from xformer.distributed import Communicator
from xformer.errors import JitError
from xformer.random import Rng
from xformer.tracing.activations import is_observing
from xformer.tracing.arguments import has_identity_hash, hides_arrays
from xformer.tracing.jit import has_effect, jit_repeated
from xformer.tracing.program import compiler
from xformer.tracing.tracer import value_of
from xformer.training.data_parallel import can_split, data_parallel, differentiate, is_numpy, sharded
from xformer.training.optimizers import SGD, Adam, AdamW
from xformer.training.step import StepResult, train_step
from xformer.tree import Module, first_array, flatten, flatten_parameters

_MAX_PARAMETERS = 2**24


def is_slower(model: Any) -> bool:
    """Return whether the steps of a model are no faster as programs, and need more memory: large ones on NumPy."""
    return is_numpy(model) and sum(leaf.size for leaf in flatten_parameters(model)[0]) > _MAX_PARAMETERS


class JittedStep:
    """A replacement of `train_step` that runs the steps of a model by `jit`, with bit-identical results.

    On CuPy a step is one CUDA graph, launched without host overhead. On NumPy, it helps small models.

    The model and the state are updated in place, and the numbers that change are arrays, so that one program serves
    all steps whose batches have the same shapes. For batches that are split, other libraries, and other optimizers than
    Adam, AdamW and SGD, only the loss and its gradient are a program.

    Args:
        num_workers: Number of shards of a batch.
        communicator: The ranks, see `data_parallel`.
        is_default: Whether nobody asked for it: what cannot be traced is then no error.

    Attributes:
        refusal: Why steps were made without jit, or None.
    """

    def __init__(self, num_workers: int, communicator: Communicator | None = None, *, is_default: bool = False) -> None:
        self._is_default = is_default
        self._num_workers, self._communicator, self._value_and_grad = num_workers, communicator, data_parallel(1)
        self.refusal: str | None = None
        self._state: Any = None  # its arrays, of that step
        self._step = jit_repeated(_step_in_place, donate_argnums=(0, 1))
        self._gradient = jit_repeated(differentiate)
        self._sharded = sharded(self._gradient, num_workers, communicator)

    @property
    def num_runs(self) -> int:
        """Number of runs of programs so far, one or more in a step."""
        return self._step.num_runs + self._gradient.num_runs

    def obstacle(self, model: Any) -> str | None:
        """Return why no step can be a program, or None."""
        xp = array_namespace(first_array(model))
        if not has_effect(xp):
            return f"{xp.name} has no programs; use NumPy, JAX or CuPy"
        if self._communicator is not None and self._communicator.size > 1 and self._communicator.overlaps:
            return "gradients are exchanged during the backward pass; set overlaps=False on the communicator"
        return "activations are recorded or replaced, which needs the Python code" if is_observing() else None

    @contextlib.contextmanager
    def warnings(self, model: Any, history: Sequence[Any]) -> Iterator[None]:
        """Warn once, on rank 0, if jit has no effect on the steps that are made inside the block."""
        obstacle = self.obstacle(model)
        if obstacle is not None:
            self._warn(f"has no effect: {obstacle}")
        yield
        if self.refusal is not None:
            self._warn(f"had no effect: {self.refusal}")
        elif obstacle is None and history and not self.num_runs:
            message = "a program serves the later batches of the same shapes and other values"
            self._warn(f"had no effect in {len(history)} steps: {message}")

    def _warn(self, message: str) -> None:
        if self._communicator is None or self._communicator.rank == 0:
            name = "jit, the default on CuPy," if self._is_default else "jit=True"
            logging.getLogger("xformer").warning("%s %s", name, message)

    def __call__(
        self, model: Any, state: Any, batches: Sequence[Any], rng: Rng | None, *, loss_fn: Any, **options: Any
    ) -> StepResult[Any]:
        """Make one update; see `train_step`. The model and the state must be donated."""
        is_object = has_identity_hash(loss_fn) and not isinstance(loss_fn, Module)
        code = loss_fn.__call__ if is_object else loss_fn  # the arrays of a loss are constants, as those of a function
        try:
            return self._make(model, state, batches, rng, loss_fn=code, **options)
        except JitError as error:
            if not self._is_default and not hides_arrays(batches):
                raise
            self.refusal = str(error)
        options["value_and_grad"] = data_parallel(self._num_workers, communicator=self._communicator)
        return train_step(model, state, batches, rng, loss_fn=loss_fn, donate=True, **options)

    def _make(self, model: Any, state: Any, batches: Sequence[Any], rng: Rng | None, **options: Any) -> StepResult[Any]:
        like = first_array(model)
        xp = array_namespace(like)
        is_sharded = self._num_workers > 1 and any(map(can_split, batches))
        can_trace = xp.name == "numpy" or xp.graph_capture() is not None
        if is_sharded or type(options["optimizer"]) not in (Adam, AdamW, SGD) or not can_trace:
            result = train_step(model, state, batches, rng, donate=True, value_and_grad=self._sharded, **options)
            if compiler(xp) is None:
                return result
            _write(model, result.model)  # a program belongs to the arrays of a model
            return result._replace(model=model)
        changing = np.asarray([state.step, options.pop("learning_rate"), options.pop("num_tokens")], np.float64)
        numbers = xp.from_host(changing, device=device(like))
        arrays = state._replace(step=None)
        if self._state is None or not all(map(operator.is_, arrays, self._state)):
            self._state = arrays  # the same tuple in each step, which jit then knows
        options["value_and_grad"] = self._value_and_grad
        loss, grad_norm = self._step(model, self._state, batches, rng, numbers, **options)
        return StepResult(model, state._replace(step=state.step + 1), loss, grad_norm)


def _step_in_place(model: Any, state: Any, batches: Any, rng: Any, numbers: Any, **options: Any) -> tuple[Any, Any]:
    """Write the update into the arrays of the model and the state; return the loss and the norm of the gradient.

    The numbers are the step, the learning rate and the number of tokens: one array, which is copied at once.
    """
    step, learning_rate, num_tokens = (numbers[index, ...] for index in range(3))
    # A copy, since the optimizer counts it up in place.
    counted = state._replace(step=array_namespace(step).asarray(step, copy=True))
    result = train_step(
        model, counted, batches, rng, learning_rate=learning_rate, num_tokens=num_tokens, donate=True, **options
    )
    _write((model, state), (result.model, result.state[1:]))
    return result.loss, result.grad_norm


def _write(target: Any, tree: Any) -> None:
    """Write the arrays of a tree into those of another one, except those that are the same."""
    for old, new in zip(flatten(target)[0], flatten(tree)[0], strict=True):
        if value_of(new) is not value_of(old):  # an update in place returns the same one in another `Tracer`
            old[...] = new
