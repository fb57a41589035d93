"""The training loop: `fit` trains any Module with any loss."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from numbers import Real
from typing import Any, Protocol

import numpy as np

from xformer.backends import array_namespace, backend_of, device, from_host, is_floating, to_host_together
from xformer.config import check_count
from xformer.distributed import Communicator, ShardedOptimizer, SingleProcess, abort_on_error, broadcast
from xformer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    TrainingError,
    check_arguments,
    describe_type,
    out_of_memory,
)
from xformer.layers.quantization import is_packed
from xformer.ops.inference_weight import inference_weights
from xformer.ops.quantized import quantized_dtype
from xformer.random import Rng
from xformer.threads import blas_threads, num_threads
from xformer.training.checkpoint import TrainingFiles, check_settings, save_parameters, settings_of, to_json
from xformer.training.data_parallel import can_split, default_num_workers
from xformer.training.data_parallel import data_parallel as parallel_value_and_grad
from xformer.training.events import Checkpoint, End, Event, History, Skip, Start, Step
from xformer.training.interrupt import Stopped, stop_on_signals
from xformer.training.jitted_step import JittedStep
from xformer.training.optimizers import Optimizer
from xformer.training.precision import GradScaler, autocast, check_precision
from xformer.training.schedules import Schedule
from xformer.training.step import Loss, train_step
from xformer.tree import Module, flatten, flatten_parameters, is_array, is_frozen

_LOG = logging.getLogger("xformer")
LOG_EVERY = 10  # steps between lines of the log
Batches = Iterable[Any] | Callable[[int], Iterable[Any]]


class Callback(Protocol):
    """A function, or an object with `__call__`, that receives every event of a training run.

    If it also has the methods `state_dict() -> dict` and `load_state_dict(dict)`, its state (JSON values) is saved and
    restored with the run. A method `close()` is called when training has ended, also by an error.
    """

    def __call__(self, event: Event, loop: TrainingLoop, /) -> bool | str | None:
        """Handle an event.

        Args:
            event: `Start`, `Step`, `Skip`, `Validation`, `Checkpoint` or `End`; callbacks ignore those they do not
                know.
            loop: The training loop. `loop.model` is the current model, safe to keep.

        Returns:
            True, or the reason as a string, to end training; else None or False.
        """


@check_arguments(epochs="pass steps, the number of updates; the default is one pass over batches")
def fit(
    model: Any,
    loss_fn: Loss,
    batches: Batches,
    *,
    optimizer: Optimizer,
    learning_rate: float | Schedule,
    max_grad_norm: float = 1.0,
    steps: float | None = None,
    callbacks: Sequence[Callback] = (),
    run_dir: Any = None,
    seed: int = 0,
    grad_accumulation: int = 1,
    precision: str = "float32",
    data_parallel: int | None = None,
    communicator: Communicator | None = None,
    num_tokens: Callable[[Any], int] | None = None,
    jit: bool = False,
    save_every_minutes: float = 5.0,
) -> tuple[Any, History]:
    """Train a model.

    Ctrl-C, SIGTERM and SIGHUP end training after the current step; a second Ctrl-C interrupts at once.

    Args:
        model: Any Module; it is not changed.
        loss_fn: (model, batch, rng) -> the sum of the losses of a batch's tokens, a scalar array. Validation passes
            None for the rng: no dropout.
        batches: An iterable, which is iterated again until all steps are made; or a function of a number n that returns
            an iterator over the batches from number n on, counted from 0. A resumed run skips the batches of an
            iterable that it has seen, and calls the function with their number.
        optimizer: For example `AdamW(weight_decay=0.1)`.
        learning_rate: A number, or a function of the step, counted from 1; see `xformer.training.schedules`.
        max_grad_norm: Largest norm of the gradient (clipping by global norm); math.inf is no clipping.
        steps: Number of steps, including those before it was resumed; math.inf is no limit. Default one pass over
            `batches`, which must have a length, like a list or a DataLoader of torch.
        callbacks: Called with every event in this order; each may end training (see `Callback`).
        run_dir: Directory for the training state, the log and the model; created if necessary. If it holds the state
            of an earlier run, training resumes from there and matches an uninterrupted run exactly. The model must have
            the same settings, such as its activation.
        seed: Seed of dropout.
        grad_accumulation: Number of batches per step, computed one after the other.
        precision: "float32", or "bfloat16" or "float16" for mixed precision.
        data_parallel: Number of shards of each batch that are computed on threads (see `data_parallel`), of all ranks
            together; default one for each core on NumPy, or 8 with a communicator; one for each rank on other backends.
        communicator: The ranks that train together, e.g. `xformer.distributed.connect("mpi")`, each of which calls
            `fit` with the same arguments and the same batches, of which it computes a part. Every rank calls its
            callbacks; rank 0 alone writes to `run_dir`, and only its callbacks get `Checkpoint` events. An error on one
            rank is printed and ends all of them; it cannot be caught. Default: this process alone.
        num_tokens: A function that counts the tokens, or samples, of a batch, by which the sum of losses is divided;
            default `batch.num_tokens`, or 1 for batches without it, whose loss should be a mean.
        jit: Whether to trace `loss_fn` by `xformer.jit` for batches whose shapes repeat, which makes small models
            faster on NumPy. It must then be pure, since later batches run none of its Python code. If it has no effect,
            a warning says so.
        save_every_minutes: Minutes between saves of the state.

    Returns:
        The trained model, and the `Step` events of this call, a list that notebooks show as a curve and a table.

    Raises:
        ConfigError: If an argument is invalid, `batches` has no length and `steps` is None, or `run_dir` cannot hold
            the model, the optimizer's state or that of a callback.
        TrainingError: If the loss or the gradient is not finite. The last state saved stays in `run_dir`.
        OutOfMemoryError: If memory runs out.
        CheckpointError: If `run_dir` cannot be written, or holds the state of another model or optimizer.
    """
    loop = TrainingLoop(
        model, loss_fn, batches, optimizer=optimizer, learning_rate=learning_rate, max_grad_norm=max_grad_norm,
        steps=steps, callbacks=callbacks, run_dir=run_dir, seed=seed, grad_accumulation=grad_accumulation,
        precision=precision, data_parallel=data_parallel, communicator=communicator, num_tokens=num_tokens,
        jit=jit, save_every_minutes=save_every_minutes,
    )  # fmt: skip
    with _warning_without_programs(loop):
        reason = loop.run()
    if loop.files is not None:
        save_parameters(loop.model, loop.files.directory / "model.safetensors")
    if loop.is_incomplete:
        limit = "" if loop.max_steps == math.inf else f" of {loop.max_steps}"
        _LOG.warning("training ended after step %d%s: %s", loop.step, limit, reason)
    elif run_dir is not None and not loop.history and loop.step >= loop.max_steps:
        message = "the training in %s had already ended after step %d; pass a larger number of steps to continue it"
        _LOG.warning(message, run_dir, loop.step)
    return loop.model, loop.history


@contextlib.contextmanager
def _warning_without_programs(loop: TrainingLoop) -> Iterator[None]:
    """Warn once if jit has no effect on the steps that are made inside the block."""
    jitted = loop.jitted_step if loop.communicator.rank == 0 else None
    obstacle = None if jitted is None else jitted.obstacle(loop.model)
    if obstacle is not None:
        _LOG.warning("jit=True has no effect: %s", obstacle)
    yield
    if jitted is not None and jitted.refusal is not None:
        _LOG.warning("jit=True had no effect: %s", jitted.refusal)
    elif jitted is not None and obstacle is None and loop.history and not jitted.num_runs:
        message = "jit=True had no effect in %d steps: a program serves the third and later batches of the same shapes "
        message += "and other values, if no callback reads loop.model in each step"
        _LOG.warning(message, len(loop.history))


class TrainingLoop:
    """The loop behind `fit`, which describes the arguments.

    Attributes:
        loss_fn: The loss, as it was passed.
        max_steps: Number of steps after which training ends, or math.inf.
        num_workers: Number of shards of each batch.
        files: The files in `run_dir`, or None; of several ranks, rank 0 has them.
        communicator: The ranks that train together.
        jitted_step: What makes steps with jit, or None.
        step: Number of steps made.
        epoch: Number of completed passes over the data.
        num_tokens: Number of tokens seen.
        history: The `Step` events since the loop was made or resumed.
        saved_step: Step of the last saved state, or None.
        is_incomplete: A signal, or the end of the batches, ended training before its last step.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: Loss,
        batches: Batches,
        *,
        optimizer: Optimizer,
        learning_rate: float | Schedule,
        max_grad_norm: float = 1.0,
        steps: float | None = None,
        callbacks: Sequence[Callback] = (),
        run_dir: Any = None,
        seed: int = 0,
        grad_accumulation: int = 1,
        precision: str = "float32",
        data_parallel: int | None = None,
        communicator: Communicator | None = None,
        num_tokens: Callable[[Any], int] | None = None,
        jit: bool = False,
        save_every_minutes: float = 5.0,
    ) -> None:
        _check_arguments(model, loss_fn, batches, optimizer, learning_rate, max_grad_norm, callbacks, num_tokens)
        check_precision(precision, model)
        check_count("grad_accumulation", grad_accumulation)
        if data_parallel is not None:
            check_count("data_parallel", data_parallel)
        if not isinstance(save_every_minutes, int | float) or not save_every_minutes >= 0:
            raise ConfigError(f"save_every_minutes is {save_every_minutes!r}; expected a number of at least 0")
        if run_dir is not None and (not isinstance(run_dir, str | os.PathLike) or "\0" in os.fspath(run_dir)):
            raise ConfigError(f"run_dir is {run_dir!r}; expected the path of a directory")
        if run_dir is not None and not isinstance(model, Module):
            raise ConfigError(f"model is {describe_type(model)}; run_dir requires a Module")
        if isinstance(optimizer, ShardedOptimizer) and optimizer.communicator is not communicator:
            raise ConfigError(
                "optimizer is divided among other ranks than communicator; expected the same communicator"
            )
        self.loss_fn, self.optimizer, self.max_grad_norm = loss_fn, optimizer, float(max_grad_norm)
        self.learning_rate = learning_rate if callable(learning_rate) else lambda step: learning_rate
        self.callbacks = list(callbacks)
        self._batches, self._grad_accumulation, self._is_one_pass = batches, grad_accumulation, steps is None
        self.max_steps = _steps_of_one_pass(batches, grad_accumulation) if steps is None else steps
        if not isinstance(self.max_steps, float) or self.max_steps != math.inf:
            check_count("steps", self.max_steps)
        self.communicator = communicator or SingleProcess()
        self.files = TrainingFiles(run_dir) if run_dir is not None and self.communicator.rank == 0 else None
        self.num_workers = data_parallel or default_num_workers(model, communicator)
        self.step, self.epoch, self.num_tokens = 0, 0, 0
        self.history = History()
        self._signals: list[str] = []
        self.saved_step: int | None = None
        self._model, self._is_shared = model, True  # by the caller: the first step must not overwrite it
        with out_of_memory("the optimizer state", "use a smaller model, or an optimizer with a smaller state"):
            self.state = self.optimizer.init(model)
        self.count_tokens = num_tokens or (lambda batch: getattr(batch, "num_tokens", 1))
        self._autocast_loss = autocast(precision, loss_fn)
        self.jitted_step = JittedStep(self.num_workers, self.communicator) if jit else None
        self._train_step = self.jitted_step or partial(
            train_step, donate=True, value_and_grad=parallel_value_and_grad(self.num_workers, communicator=communicator)
        )
        self._scaler = GradScaler.init(precision)
        self._rng = Rng(seed).fold_in("training", "dropout")
        self._minutes, self._start_time = 0.0, time.monotonic()
        self._save_interval, self._save_time = 60.0 * save_every_minutes, time.monotonic()
        self._stop_reason: str | None = None
        self.is_incomplete = False

    @property
    def model(self) -> Any:
        """The current model, safe to keep: the next step copies it instead of reusing its memory."""
        self._is_shared = True
        return self._model

    @property
    def minutes(self) -> float:
        """Wall time of training so far, in minutes, including those before it was resumed."""
        return (time.monotonic() - self._start_time) / 60.0

    def run(self) -> str:
        """Train until the last step, a callback or a signal ends it, and save the state; return the reason.

        If the directory holds a state and no step was made yet, training resumes from there.

        Raises:
            TrainingError: If the loss is not finite; the last state stays on disk.
        """
        is_alone = self.communicator.size == 1
        with contextlib.ExitStack() as stack, abort_on_error(self.communicator), warnings.catch_warnings():
            self._signals = stack.enter_context(stop_on_signals(raises=is_alone))
            if self.files is not None:
                stack.enter_context(self.files.open())
            self._check_savable()
            has_state = self.files is not None and self.files.state.exists()
            if self.step == 0 and self.communicator.all_gather(has_state)[0]:
                self.resume()
            elif self.step == 0:
                self._model = broadcast(self.communicator, self._model)
            if self.files is not None:
                self.files.rewind_log(self.step)
            for callback in self.callbacks:
                if hasattr(callback, "close"):
                    stack.callback(callback.close)
            self._start_time = self._save_time = time.monotonic()
            self._start_time -= 60.0 * self._minutes
            # Overflow shows in the loss, which is checked; a warning would interrupt the output of a progress bar.
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                self.emit(Start(self.step))
                if self.files is not None:
                    self._callback_states(is_early=True)
                reason = self._train(stack)
                self.emit(End(self.step, reason))
                self.save()
            except Stopped as stopped:
                reason, self.is_incomplete = str(stopped), True
                self.save()
                self.emit(End(self.step, reason, is_interrupted=True))
        self._minutes = self.minutes
        return reason

    def resume(self) -> None:
        """Load the state that an earlier run saved in the directory.

        Raises:
            CheckpointError: If it is damaged, or the state of another model, optimizer or version.
        """
        model, state, progress = self._model, self._whole_state(), None
        if self.files is not None:
            model, state, progress = self.files.load_state(model, state)
            progress = {**progress, "updates": state.step, "path": str(self.files.state)}
        elif self.communicator.rank == 0:
            raise ConfigError("run_dir is None; there is no state to resume from")
        progress = self.communicator.all_gather(progress)[0]
        self._model, state = broadcast(self.communicator, (model, state._replace(step=progress["updates"])))
        sharded = self._sharded_optimizer
        self.state = sharded.shard_state(self._model, state) if sharded else state
        self._is_shared, path = False, progress["path"]
        try:
            self.step, self.epoch, self.num_tokens = (progress[name] for name in ("step", "epoch", "num_tokens"))
            self._minutes, scaler = progress["minutes"], GradScaler(**progress["grad_scaler"])
            callbacks, optimizer = progress["callbacks"], progress["optimizer"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path} was written by another version of xformer ({error})") from error
        if optimizer != self._optimizer_name:
            raise CheckpointError(
                f"{path} is the state of {optimizer}; expected {self._optimizer_name}; "
                "use the same optimizer, or another directory"
            )
        check_settings(path, self._model, progress.get("settings", {}))
        if (scaler.scale == 1.0) == (self._scaler.scale == 1.0):  # else the precision has changed
            self._scaler = scaler
        self.saved_step, self._start_time = self.step, time.monotonic() - 60.0 * self._minutes
        for name, callback in self._stateful_callbacks():
            if name in callbacks:
                callback.load_state_dict(callbacks[name])

    def save(self) -> None:
        """Save the training state, if there is a directory; all ranks must call it.

        Raises:
            TrainingError: If a parameter is not finite; the last state is kept.
        """
        state = self._whole_state()
        self._save_time = time.monotonic()
        if self.files is None:
            return
        if name := nonfinite_parameter(self._model):
            raise self.diverged(f"{name} is not finite after step {self.step}")
        progress = {
            "optimizer": self._optimizer_name,
            "settings": settings_of(self._model),
            "step": self.step,
            "epoch": self.epoch,
            "num_tokens": self.num_tokens,
            "minutes": self.minutes,
            "grad_scaler": asdict(self._scaler),
            "callbacks": self._callback_states(),
        }
        self.files.save_state(self._model, state, progress)
        self.saved_step = self.step
        self.emit(Checkpoint(self.step, str(self.files.state)))

    def _check_savable(self) -> None:
        """Raise ConfigError for what `save` would refuse after the steps; all ranks must call it."""
        state = self._whole_state()
        if self.files is None:
            return
        if name := nonfinite_parameter(self._model):
            raise ConfigError(f"{name} is not finite, and run_dir keeps finite parameters only; freeze it or change it")
        self.files.check_state(self._model, state)

    def emit(self, event: Event) -> None:
        """Log an event and pass it to every callback; training ends if one of them requests it."""
        is_due = not isinstance(event, Step) or event.step == 1 or event.step % LOG_EVERY == 0
        if self.files is not None and event.is_logged and is_due:
            self.files.append_log(event.to_dict())
        for callback in self.callbacks:
            outcome = callback(event, self)
            if outcome:
                name = getattr(callback, "__name__", type(callback).__name__)
                self._stop_reason = outcome if isinstance(outcome, str) else f"stopped by {name}"

    def stop_reason(self) -> str | None:
        """Return the reason why training is complete, or None."""
        if self.step >= self.max_steps:
            return f"{self.max_steps} steps"
        return self._stop_reason

    def diverged(self, description: str) -> TrainingError:
        """Return the error for a loss, gradient or parameter that is not finite."""
        saved = "no state was saved" if self.saved_step is None else f"the state of step {self.saved_step} is kept"
        saved = "" if self.files is None else f" ({saved})"
        return TrainingError(f"{description}; lower the learning rate or use a longer warm-up{saved}")

    def _train(self, stack: contextlib.ExitStack) -> str:
        """Make steps until there is a reason to stop; raise Stopped after a signal."""
        batches: Iterator[Any] | None = None
        while True:
            reason, signal, is_save_due = self._agree()
            if reason is not None:
                return reason
            if signal is not None:
                raise Stopped(f"stopped by {signal}")
            if is_save_due:
                self.save()
            started = time.monotonic()
            if batches is None:
                batches = self._iterate(self.step * self._grad_accumulation)
                first = [*itertools.islice(batches, 1)]
                batches = itertools.chain(first, batches)
                # One BLAS thread for each shard. The limit holds for the whole run, as bits depend on it.
                sharded = self.num_workers > 1 and any(map(can_split, first))
                stack.enter_context(blas_threads(1 if sharded else num_threads()))
            accumulated = list(itertools.islice(batches, self._grad_accumulation))
            if not accumulated:
                self.is_incomplete = self.max_steps != math.inf
                return "the batches are exhausted"
            with out_of_memory(f"step {self.step + 1}", "use smaller batches or a smaller model"):
                event = self._make_step(accumulated, started)
            self.emit(event)

    def _agree(self) -> tuple[str | None, str | None, bool]:
        """Return the reason to end, the signal and whether to save that any rank has: all must do the same."""
        is_save_due = time.monotonic() - self._save_time >= self._save_interval
        signal = self._signals[-1] if self._signals else None
        reasons, signals, dues = zip(
            *self.communicator.all_gather([self.stop_reason(), signal, is_save_due]), strict=True
        )
        return next(filter(None, reasons), None), next(filter(None, signals), None), any(dues)

    @property
    def _sharded_optimizer(self) -> ShardedOptimizer | None:
        return self.optimizer if isinstance(self.optimizer, ShardedOptimizer) else None

    @property
    def _optimizer_name(self) -> str:
        sharded = self._sharded_optimizer
        return type(sharded.optimizer if sharded else self.optimizer).__name__

    def _whole_state(self) -> Any:
        """Return the optimizer state of all parameters; all ranks must call it."""
        sharded = self._sharded_optimizer
        return sharded.gather_state(self._model, self.state) if sharded else self.state

    def _make_step(self, batches: Sequence[Any], started: float) -> Step | Skip:
        step, loss_scale = self.step + 1, self._scaler.scale
        received = self.learning_rate(step)
        try:
            learning_rate = float(received)
        except (TypeError, ValueError):  # e.g. a schedule that returns None
            learning_rate = math.nan
        if not math.isfinite(learning_rate):
            raise ConfigError(f"learning_rate is {received!r} at step {step}; expected a finite number")
        counts = [self.count_tokens(batch) for batch in batches]
        try:
            num_tokens = sum(counts)
        except TypeError as error:
            raise DataError(
                f"num_tokens returned {counts} for the batches of step {step}; expected numbers, such as "
                "math.prod(x.shape)"
            ) from error
        if not num_tokens > 0:
            raise DataError(f"the batches of step {step} have {counts} tokens; expected at least 1")
        like = flatten(self._model)[0][0]
        xp = array_namespace(like)
        counter: Any = np.asarray(step)
        if backend_of(xp).reads_counters_on_device:
            counter = from_host(xp, counter, device=device(like))
        result = self._train_step(
            _with_own_parameters(self._model) if self._is_shared else self._model,
            self.state,
            batches,
            self._rng.with_counter(counter),
            loss_fn=self._autocast_loss,
            optimizer=self.optimizer,
            learning_rate=learning_rate,
            max_grad_norm=self.max_grad_norm,
            loss_scale=loss_scale,
            num_tokens=num_tokens,
        )
        # Reading the loss waits for the GPU; by now the whole step has been launched.
        loss, grad_norm = map(float, to_host_together(result.loss, result.grad_norm))
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        scaler = self._scaler.growth() if is_finite else self._scaler.backoff()
        if scaler is None:
            description = f"step {step}: the loss is {loss} and the norm of the gradient {grad_norm}"
            if not self.history and self.saved_step is None:
                raise TrainingError(f"{description}; nothing was updated yet: look for NaN in the data and the loss")
            raise self.diverged(description)
        state = result.state if is_finite else result.state._replace(step=self.state.step)
        self._model, self._is_shared, self.state, self._scaler = result.model, False, state, scaler
        self.step, self.num_tokens = step, self.num_tokens + num_tokens
        if not is_finite:
            return Skip(step, loss_scale)
        event = Step(
            step=step,
            epoch=self.epoch,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_tokens=num_tokens,
            tokens_per_second=num_tokens / (time.monotonic() - started),
            minutes=self.minutes,
            loss_scale=loss_scale,
        )
        self.history.append(event)
        return event

    def _iterate(self, start: int) -> Iterator[Any]:
        """Yield the batches of one or any number of passes, from number `start` on, and count the epochs."""
        if callable(self._batches):
            source = self._batches(start)
            for batch in source:
                self.epoch = getattr(source, "epoch", 0)
                yield batch
            return
        self.epoch = 0
        count = 0
        while True:
            before = count
            for batch in self._batches:
                count += 1
                if count > start:
                    yield batch
            if count == before:
                if count == 0:
                    raise DataError("batches is empty; expected at least one batch")
                return  # an iterator, which cannot be iterated again
            self.epoch += 1
            if self._is_one_pass:
                return

    def _callback_states(self, *, is_early: bool = False) -> dict[str, Any]:
        """Return the states of the callbacks; raise ConfigError unless they are JSON values.

        Before the first step, a callback whose state does not exist yet is left out.
        """
        states = {}
        for name, callback in self._stateful_callbacks():
            try:
                states[name] = callback.state_dict()
            except Exception:
                if not is_early:
                    raise
                continue
            try:
                to_json(states[name])
            except (TypeError, ValueError) as error:
                message = f"state_dict() of the callback {name} cannot be saved in run_dir: {error}"
                raise ConfigError(f"{message}; expected numbers, strings, lists and dicts") from error
        return states

    def _stateful_callbacks(self) -> Iterator[tuple[str, Any]]:
        """Yield the callbacks that have a state, under names that a resumed run has again."""
        names: dict[str, int] = {}
        for callback in self.callbacks:
            if hasattr(callback, "state_dict"):
                name = type(callback).__name__
                names[name] = names.get(name, 0) + 1
                yield f"{name} {names[name]}", callback


def nonfinite_parameter(model: Any) -> str | None:
    """Return the name of a trainable parameter that holds NaN or infinity, or None."""
    for name, array in model.named_trainable_parameters():
        xp = array_namespace(array)
        if not bool(xp.all(xp.isfinite(array))):
            return str(name)
    return None


def _steps_of_one_pass(batches: Any, grad_accumulation: int) -> int:
    try:
        count = len(batches)
    except TypeError:
        raise ConfigError(
            f"steps is None, and batches is {describe_type(batches)} without a length; pass the number of steps, or "
            "math.inf to train until the batches, a callback or a signal end training"
        ) from None
    if not count:
        raise DataError("batches is empty; expected at least one batch")
    return math.ceil(count / grad_accumulation)


def _check_arguments(
    model: Any,
    loss_fn: Any,
    batches: Any,
    optimizer: Any,
    learning_rate: Any,
    max_grad_norm: Any,
    callbacks: Any,
    num_tokens: Any,
) -> None:
    if isinstance(model, type) or not flatten(model)[0]:
        raise ConfigError(f"model is {describe_type(model)}; expected an instance of a Module with at least one array")
    if dtype := quantized_dtype([weight for weight in inference_weights(model) if not is_frozen(weight)]):
        raise ConfigError(
            f"the model is quantized to {dtype}; expected floating weights: train before quantize(), or train adapters "
            "with xformer.lora(model)"
        )
    if not flatten_parameters(model)[0]:
        is_frozen_model = any(is_floating(array.dtype) for array in flatten(model)[0])
        problem = "are frozen: use xformer.unfreeze" if is_frozen_model else "have dtypes of integers or booleans"
        raise ConfigError(f"all arrays of the model {problem}; expected at least one parameter, a floating array")
    if is_packed(model):
        raise ConfigError("the model is packed for inference; train model.unpack()")
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn is {loss_fn!r}; expected a function (model, batch, rng)")
    try:
        inspect.signature(loss_fn, follow_wrapped=False).bind(model, None, None)
    except ValueError:  # a function without a signature
        pass
    except TypeError as error:
        raise ConfigError(f"loss_fn cannot be called as loss_fn(model, batch, rng): {error}") from error
    if isinstance(batches, tuple) and all(map(is_array, batches)) and len({tuple(x.shape) for x in batches}) > 1:
        raise ConfigError("batches is a tuple of arrays of different shapes; pass [(x, y)] if they are one batch")
    check_batches("batches", batches, "the number of a batch")
    if isinstance(optimizer, type) or not hasattr(optimizer, "init"):
        library = type(optimizer).__module__.split(".")[0]
        received = describe_type(optimizer) + ("" if library in ("builtins", "xformer") else f" of {library}")
        raise ConfigError(f"optimizer is {received}; expected an optimizer of xformer, e.g. xf.AdamW()")
    if not callable(learning_rate) and (not isinstance(learning_rate, int | float) or isinstance(learning_rate, bool)):
        raise ConfigError(f"learning_rate is {learning_rate!r}; expected a number or a schedule")
    if not isinstance(max_grad_norm, Real) or not float(max_grad_norm) > 0.0:
        raise ConfigError(f"max_grad_norm is {max_grad_norm!r}; expected a number above 0 (math.inf: no clipping)")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ConfigError("callbacks is not a list of functions (event, loop); put a single callback in brackets")
    if num_tokens is not None and not callable(num_tokens):
        raise ConfigError(f"num_tokens is {num_tokens!r}; expected a function of the batch")


def check_batches(name: str, batches: Any, argument: str) -> None:
    """Raise ConfigError unless an argument is an iterable of batches, rather than one batch, or a function."""
    if isinstance(batches, str | bytes | bytearray | Mapping):
        raise ConfigError(f"{name} is {describe_type(batches)}; expected an iterable of batches: pass [batch] for one")
    if not callable(batches) and not isinstance(batches, Iterable):
        raise ConfigError(f"{name} is {batches!r}; expected an iterable, or a function of {argument}")


def _with_own_parameters(model: Any) -> Any:
    """Return the model with copies of its parameters, which steps may overwrite; other arrays are shared."""
    leaves, rebuild = flatten_parameters(model)
    return rebuild([array_namespace(leaf).asarray(leaf, copy=True) for leaf in leaves])
