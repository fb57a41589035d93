"""Inputs of `fit`: checks of the model, the loss and the rest, and the batches of all passes as one stream."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from xformer.backends import is_floating
from xformer.backends.array_types import S
from xformer.config import Config, check_bool, option
from xformer.errors import ConfigError, DataError, describe_type
from xformer.ops.blocks import PackedBlocks
from xformer.ops.weights import PackedWeight, inference_weights, quantized_dtype
from xformer.training.precision import PRECISIONS
from xformer.tree import Module, flatten, flatten_parameters, is_array, is_frozen

Batches = Iterable[S] | Callable[[int], Iterable[S]]


class FitConfig(Config):
    """The options of `fit` that a recipe has, too.

    Args:
        max_grad_norm: Largest norm of the gradient; inf turns clipping off.
        grad_accumulation: Batches per step, computed one after the other.
        save_every_minutes: Minutes between saves of the state.
        seed: Seed of all random numbers.
        precision: Precision of forward and backward; float32 turns mixed precision off.
        data_parallel: Shards of each batch that are computed in parallel (default: on NumPy one per core, or 8 with
            several ranks or reproducible); changes the last bits.
        reproducible: Give float32 on NumPy the same bits in any batch, for any number of threads and processor.
    """

    max_grad_norm: float = option(default=1.0, above=0.0, at_most=math.inf)
    grad_accumulation: int = option(default=1, at_least=1)
    save_every_minutes: float = option(default=5.0, at_least=0.0, at_most=math.inf, panel="Validation and checkpoints")
    seed: int = option(default=0, at_least=0, panel="Computing")
    precision: str = option(default="float32", choices=PRECISIONS)
    data_parallel: int | None = option(default=None, at_least=0)
    reproducible: bool = option(default=False)


class BatchStream:
    """The batches of one or any number of passes, from number `start` on.

    Attributes:
        epoch: Number of completed passes.
    """

    def __init__(self, batches: Batches[Any], start: int, *, is_one_pass: bool) -> None:
        self.epoch = 0
        self._batches, self._start, self._is_one_pass = batches, start, is_one_pass

    def __iter__(self) -> Iterator[Any]:
        if callable(self._batches):
            source = self._batches(self._start)
            for batch in source:
                self.epoch = getattr(source, "epoch", 0)
                yield batch
            return
        count = 0
        while True:
            before = count
            for batch in self._batches:
                count += 1
                if count > self._start:
                    yield batch
            if count == 0:
                raise DataError("batches is empty; expected at least one batch")
            if count == before:
                return  # an iterator, which cannot be iterated again
            self.epoch += 1
            if self._is_one_pass:
                return


def count_steps(batches: Any, grad_accumulation: int) -> int:
    """Return the number of steps of one pass; raise ConfigError for batches without a length."""
    try:
        count = len(batches)
    except TypeError:
        hint = "or math.inf to train until the batches, a callback or a signal end training"
        received = f"steps is None, and batches is {describe_type(batches)} without a length"
        raise ConfigError(f"{received}; pass the number of steps, {hint}") from None
    if not count:
        raise DataError("batches is empty; expected at least one batch")
    return math.ceil(count / grad_accumulation)


def tokens_of(batches: Sequence[Any], count_tokens: Callable[[Any], int], step: int) -> int:
    """Return the number of tokens of the batches of a step; raise DataError unless there is one."""
    counts = [count_tokens(batch) for batch in batches]
    try:
        num_tokens = sum(counts)
    except TypeError as error:
        received = f"num_tokens returned {counts} for the batches of step {step}"
        raise DataError(f"{received}; expected numbers, such as math.prod(x.shape)") from error
    if not num_tokens > 0:
        raise DataError(f"the batches of step {step} have {counts} tokens; expected at least 1")
    return num_tokens


def check_inputs(
    model: Any, loss_fn: Any, batches: Any, optimizer: Any, learning_rate: Any, num_tokens: Any, run_dir: Any
) -> None:
    """Raise ConfigError for arguments of `fit` that are not what they should be."""
    _check_model(model)
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn is {loss_fn!r}; expected a function (model, batch, rng)")
    try:
        inspect.signature(loss_fn, follow_wrapped=False).bind(model, None, None)
    except ValueError:  # a function without a signature
        pass
    except TypeError as error:
        raise ConfigError(f"loss_fn cannot be called as loss_fn(model, batch, rng): {error}") from error
    check_batches("batches", batches, "the number of a batch")
    if isinstance(optimizer, type) or not hasattr(optimizer, "init"):
        library = type(optimizer).__module__.split(".")[0]
        received = describe_type(optimizer) + ("" if library in ("builtins", "xformer") else f" of {library}")
        raise ConfigError(f"optimizer is {received}; expected an optimizer of xformer, e.g. xf.AdamW()")
    if not callable(learning_rate) and (not isinstance(learning_rate, int | float) or isinstance(learning_rate, bool)):
        raise ConfigError(f"learning_rate is {learning_rate!r}; expected a number or a schedule")
    if num_tokens is not None and not callable(num_tokens):
        raise ConfigError(f"num_tokens is {num_tokens!r}; expected a function of the batch")
    if run_dir is not None and (not isinstance(run_dir, str | os.PathLike) or "\0" in os.fspath(run_dir)):
        raise ConfigError(f"run_dir is {run_dir!r}; expected the path of a directory")
    if run_dir is not None and not isinstance(model, Module):
        raise ConfigError(f"model is {describe_type(model)}; run_dir requires a Module")


def is_validated(callbacks: Any, keep_best: Any) -> bool:
    """Return False if validations are needed, and only a callback of the user may make them.

    Raises:
        ConfigError: For arguments of `fit` that are not callbacks, or do not fit together.
    """
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ConfigError("callbacks is not a list of functions (event, loop); put a single callback in brackets")
    count = sum(hasattr(each, "validates") for each in callbacks)
    stops_early = any(hasattr(each, "stops_early") for each in callbacks)
    if check_bool("keep_best", keep_best) and count > 1:
        received = f"keep_best got {count} callbacks validate(data, every)"
        raise ConfigError(f"{received}; expected one, which says what is best")
    if not keep_best and not stops_early:
        return True
    if not count and all(str(getattr(each, "__module__", None)).startswith("xformer.") for each in callbacks):
        name = "keep_best" if keep_best else "early_stopping"
        raise ConfigError(f"{name} needs validations; expected validate(data, every) in callbacks, too")
    return count > 0


def _check_model(model: Any) -> None:
    leaves = flatten(model)[0]
    if isinstance(model, type) or not leaves:
        raise ConfigError(f"model is {describe_type(model)}; expected an instance of a Module with at least one array")
    if dtype := quantized_dtype([weight for weight in inference_weights(model) if not is_frozen(weight)]):
        hint = "train before quantize(), or train adapters with xformer.lora(model)"
        raise ConfigError(f"the model is quantized to {dtype}; expected floating weights: {hint}")
    if not flatten_parameters(model)[0]:
        is_frozen_model = any(is_floating(array.dtype) for array in leaves)
        problem = "are frozen: use xformer.unfreeze" if is_frozen_model else "have dtypes of integers or booleans"
        raise ConfigError(f"all arrays of the model {problem}; expected at least one parameter, a floating array")
    packed = [weight for weight in inference_weights(model) if weight.is_packed]  # blocks have a derivative of inputs
    if any(isinstance(weight, PackedWeight | PackedBlocks) or not is_frozen(weight) for weight in packed):
        raise ConfigError("the model is packed for inference; train model.unpack()")


def check_batches(name: str, batches: Any, argument: str) -> None:
    """Raise ConfigError unless an argument is an iterable of batches, rather than one batch, or a function."""
    if isinstance(batches, str | bytes | bytearray | Mapping):
        raise ConfigError(f"{name} is {describe_type(batches)}; expected an iterable of batches: pass [batch] for one")
    if isinstance(batches, tuple) and all(map(is_array, batches)) and len({tuple(x.shape) for x in batches}) > 1:
        raise ConfigError(f"{name} is a tuple of arrays of different shapes; pass [(x, y)] if they are one batch")
    if not callable(batches) and not isinstance(batches, Iterable):
        raise ConfigError(f"{name} is {batches!r}; expected an iterable, or a function of {argument}")
