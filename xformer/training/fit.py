"""The training loop: `fit` trains any Module with any loss."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

import numpy as np

from xformer.backends import array_namespace, device, to_host_together
from xformer.backends.array_types import S, T
from xformer.config import check_count, with_fields, with_parameters_of
from xformer.distributed import Communicator, ShardedOptimizer, SingleProcess, abort_on_error, broadcast
from xformer.errors import CheckpointError, ConfigError, TrainingError, check_arguments, out_of_memory
from xformer.native import is_reproducible, use_reproducible_on
from xformer.random import Rng
from xformer.threads import blas_threads, num_threads
from xformer.training.checkpoint import TrainingFiles, load_parameters, nonfinite_parameter, restore_states, states_of
from xformer.training.data_parallel import can_split, default_num_workers
from xformer.training.data_parallel import data_parallel as parallel_value_and_grad
from xformer.training.events import Checkpoint, End, Event, History, Skip, Start, Step, Validation
from xformer.training.inputs import Batches, BatchStream, FitConfig, check_inputs, count_steps, is_validated, tokens_of
from xformer.training.interrupt import Stopped, stop_on_signals
from xformer.training.jitted_step import JittedStep, is_slower
from xformer.training.optimizers import Optimizer
from xformer.training.precision import GradScaler, autocast, check_precision
from xformer.training.schedules import Schedule, as_schedule, rate_of
from xformer.training.step import Loss, train_step
from xformer.tree import first_array, flatten_parameters

_LOG = logging.getLogger("xformer")
LOG_EVERY = 10  # steps between lines of the log


class Callback(Protocol):
    """A function, or an object with `__call__`, that receives every event of a training run.

    If it also has the methods `state_dict() -> dict` and `load_state_dict(dict)`, its state (JSON values) is saved and
    restored with the run. A method `close()` is called when training has ended, also by an error.
    """

    def __call__(self, event: Event, loop: TrainingLoop, /) -> bool | str | None:
        """Handle an event.

        Args:
            event: `Start`, `Step`, `Skip`, `Validation`, `Checkpoint`, `Plan` or `End`; callbacks ignore those they do
                not know.
            loop: The training loop. `loop.model` is the current model, safe to keep.

        Returns:
            True, or the reason as a string, to end training; else None or False.
        """


class TrainingLoop:
    """The loop behind `fit`, which describes the arguments.

    Attributes:
        config: The options that are numbers and strings.
        loss_fn: The loss, as it was passed.
        max_steps: Number of steps after which training ends, or math.inf; `time_limit` lowers it.
        num_workers: Number of shards of each batch.
        files: The files in `run_dir`, or None; of several ranks, rank 0 has them.
        communicator: The ranks that train together.
        jitted_step: What makes steps with jit, or None.
        step: Number of steps made.
        epoch: Number of completed passes over the data.
        num_tokens: Number of tokens seen.
        history: The `Step` events since the loop was made or resumed.
        saved_step: Step of the last saved state, or None.
        best_step: Step of the best validated model, or None if it is not kept, or before the first validation.
        save_best: Writes the best model to `run_dir`.
        is_incomplete: A signal, or the end of the batches, ended training before its last step.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: Loss[Any, Any],
        batches: Batches[Any],
        *,
        optimizer: Optimizer,
        learning_rate: float | Schedule,
        steps: float | None = None,
        callbacks: Sequence[Callback] = (),
        keep_best: bool = False,
        run_dir: Any = None,
        communicator: Communicator | None = None,
        num_tokens: Callable[[Any], int] | None = None,
        jit: bool | None = None,
        **options: Any,
    ) -> None:
        check_inputs(model, loss_fn, batches, optimizer, learning_rate, num_tokens, run_dir)
        self._is_validated = is_validated(callbacks, keep_best)
        self.config = config = FitConfig(**options)
        check_precision(config.precision, model)
        if config.reproducible:
            use_reproducible_on(array_namespace(first_array(model)).name, config.precision)
        self._sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        if self._sharded is not None and self._sharded.communicator is not communicator:
            raise ConfigError("optimizer is divided among other ranks than communicator; expected the same")
        self.loss_fn, self.optimizer, self.callbacks = loss_fn, optimizer, list(callbacks)
        self.learning_rate = as_schedule(learning_rate if callable(learning_rate) else lambda step: learning_rate)
        self.count_tokens = num_tokens or (lambda batch: getattr(batch, "num_tokens", 1))
        self._batches, self._is_one_pass = batches, steps is None
        self.max_steps = count_steps(batches, config.grad_accumulation) if steps is None else steps
        if self.max_steps != math.inf:
            check_count("steps", self.max_steps)
        elif self.learning_rate is learning_rate and not any(hasattr(each, "fixes_steps") for each in callbacks):
            raise ConfigError("learning_rate follows steps, which is inf; pass steps, total_steps or a time_limit")
        self.communicator = communicator or SingleProcess()
        self.keep_best, self._has_directory = keep_best, run_dir is not None
        self.files = TrainingFiles(run_dir) if run_dir is not None and self.communicator.rank == 0 else None
        self.num_workers = config.data_parallel or default_num_workers(model, communicator)
        self.step, self.epoch, self.num_tokens = 0, 0, 0
        self.history = History()
        self.saved_step: int | None = None
        self.best_step: int | None = None
        self._best: Any = None  # without `run_dir`, which has it otherwise
        self.save_best: Callable[[Any], None] = self.files.save_model if self.files is not None else lambda model: None
        self.is_incomplete = False
        self._model, self._is_shared = model, True  # by the caller: the first step must not overwrite it
        self._copy: Any = None  # of the model
        self._optimizer_name = type(self._sharded.optimizer if self._sharded else optimizer).__name__
        with out_of_memory("the optimizer state", "use a smaller model, or an optimizer with a smaller state"):
            self.state = self.optimizer.init(model)
        self._autocast_loss, self._scaler = autocast(config.precision, loss_fn), GradScaler.init(config.precision)
        uses_jit = array_namespace(first_array(model)).graph_capture() is not None if jit is None else jit
        ranks = self.num_workers, self.communicator
        self.jitted_step = JittedStep(*ranks, is_default=jit is None) if uses_jit and not is_slower(model) else None
        value_and_grad = parallel_value_and_grad(self.num_workers, communicator=communicator)
        make_step = self.jitted_step or partial(train_step, donate=True, value_and_grad=value_and_grad)
        self._train_step = partial(make_step, loss_fn=self._autocast_loss, optimizer=optimizer)
        self._rng = Rng(config.seed).fold_in("training", "dropout")
        self._minutes, self._start_time, self._save_time = 0.0, time.monotonic(), time.monotonic()
        self._signals: list[str] = []
        self._stop_reason: str | None = None

    @property
    def model(self) -> Any:
        """The current model, safe to keep: a copy during training, as steps overwrite the parameters."""
        if self._is_shared:
            return self._model
        if self._copy is None:
            self._copy = _with_own_parameters(self._model)
        return self._copy

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
            self._start()
            for callback in self.callbacks:
                if hasattr(callback, "close"):
                    stack.callback(callback.close)
            # Overflow shows in the loss, which is checked; a warning would interrupt the output of a progress bar.
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                self.emit(Start(self.step))
                if self.files is not None:
                    states_of(self.callbacks, is_early=True)
                reason = self._train(stack)
                self._is_shared = True
                self.emit(End(self.step, reason))
                self.save()
                if not self._is_validated:
                    name = "keep_best" if self.keep_best else "early_stopping"
                    _LOG.warning("%s got no validation; expected validate(data, every) in callbacks, too", name)
            except Stopped as stopped:
                reason, self.is_incomplete, self._is_shared = str(stopped), True, True
                self.save()
                self.emit(End(self.step, reason, is_interrupted=True))
        self._minutes = self.minutes
        return reason

    def _start(self) -> None:
        """Load a state that the directory holds, give all ranks the same model, and start the clock."""
        state = self._whole_state()
        if self.files is not None:  # before the steps, what `save` would refuse after them
            self.files.check_state(self._model, state)
        has_state = self.files is not None and self.files.state.exists()
        if self.step == 0 and self.communicator.all_gather(has_state)[0]:
            self.resume()
        elif self.step == 0:
            self._model = broadcast(self.communicator, self._model)
        if self.files is not None:
            self.files.rewind_log(self.step)
        self._save_time = time.monotonic()
        self._start_time = self._save_time - 60.0 * self._minutes

    def resume(self) -> None:
        """Load the state that an earlier run saved in the directory.

        Raises:
            CheckpointError: If it is damaged, or the state of another model, optimizer or version.
        """
        model, state, progress = self._model, self._whole_state(), None
        if self.files is not None:
            model, state, progress = self.files.load_state(model, state, self._optimizer_name)
            progress = {**progress, "updates": state.step, "path": str(self.files.state)}
        elif self.communicator.rank == 0:
            raise ConfigError("run_dir is None; there is no state to resume from")
        progress = self.communicator.all_gather(progress)[0]
        self._model, state = broadcast(self.communicator, (model, state._replace(step=progress["updates"])))
        self.state = state if self._sharded is None else self._sharded.shard_state(self._model, state)
        self._is_shared, self._copy = False, None
        try:
            self.step, self.epoch, self.num_tokens = (progress[name] for name in ("step", "epoch", "num_tokens"))
            scaler, self._minutes = GradScaler(**progress["grad_scaler"]), progress["minutes"]
            callbacks, self.best_step = progress["callbacks"], progress.get("best_step")
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{progress['path']} was written by another version of xformer ({error})") from error
        if (was := progress.get("reproducible", False)) != is_reproducible():
            raise CheckpointError(f"{progress['path']} has reproducible={was}; call use_reproducible_algorithms({was})")
        if (was := progress.get("keep_best", self.keep_best)) != self.keep_best:
            raise CheckpointError(f"{progress['path']} has keep_best={was}; pass keep_best={was}, as before")
        if (scaler.scale == 1.0) == (self._scaler.scale == 1.0):  # else the precision has changed
            self._scaler = scaler
        self.saved_step, self._start_time = self.step, time.monotonic() - 60.0 * self._minutes
        restore_states(self.callbacks, callbacks)

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
        names = ("step", "epoch", "num_tokens", "minutes", "keep_best", "best_step")
        progress = {name: getattr(self, name) for name in names} | {"grad_scaler": asdict(self._scaler)}
        progress |= {"reproducible": is_reproducible(), "callbacks": states_of(self.callbacks)}
        self.files.save_state(self._model, state, self._optimizer_name, progress)
        self.saved_step = self.step
        self.emit(Checkpoint(self.step, str(self.files.state)))

    def emit(self, event: Event) -> None:
        """Log an event and pass it to every callback; training ends if one of them requests it."""
        is_due = not isinstance(event, Step) or event.step == 1 or event.step % LOG_EVERY == 0
        if self.files is not None and event.is_logged and is_due:
            self.files.append_log(event.to_dict())
        if type(event) is Validation:  # not the average of checkpoints
            self._is_validated = True
            self.history.validations.append(event)
            if event.best and self.keep_best:
                self.best_step, self._best = event.step, None if self._has_directory else self.model
                self.save_best(self.model)
        for callback in self.callbacks:
            outcome = callback(event, self)
            if outcome:
                name = getattr(callback, "__name__", type(callback).__name__)
                self._stop_reason = outcome if isinstance(outcome, str) else f"stopped by {name}"

    def result(self) -> Any:
        """Return the best model, if it was kept, else the current one, which `run_dir` then gets."""
        if self.best_step is None:
            self.save_best(self.model)
        elif self._has_directory:
            best = self.model if self.files is None else load_parameters(self.model, self.files.directory)
            return broadcast(self.communicator, best)
        return self.model if self._best is None else self._best

    def stop_reason(self) -> str | None:
        """Return the reason why training is complete, or None."""
        return self._stop_reason or (f"{self.max_steps} steps" if self.step >= self.max_steps else None)

    def diverged(self, description: str) -> TrainingError:
        """Return the error for a loss, gradient or parameter that is not finite."""
        saved = "no state was saved" if self.saved_step is None else f"the state of step {self.saved_step} is kept"
        saved = "" if self.files is None else f" ({saved})"
        return TrainingError(f"{description}; lower the learning rate or use a longer warm-up{saved}")

    def _train(self, stack: contextlib.ExitStack) -> str:
        """Make steps until there is a reason to stop; raise Stopped after a signal."""
        batches: Iterator[Any] | None = None
        self._upcoming: list[Callable[[], tuple[list[Any], int]]] = []  # the batches of the next step, and their epoch
        accumulation = self.config.grad_accumulation
        stream = BatchStream(self._batches, self.step * accumulation, is_one_pass=self._is_one_pass)
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
                first = [*itertools.islice(iterator := iter(stream), 1)]
                batches = itertools.chain(first, iterator)
                # One BLAS thread for each shard. The limit holds for the whole run, as bits depend on it.
                sharded = self.num_workers > 1 and any(map(can_split, first))
                stack.enter_context(blas_threads(1 if sharded else num_threads()))
            fetch = partial(_fetch, batches, accumulation, stream)
            accumulated, self.epoch = (self._upcoming.pop() if self._upcoming else fetch)()
            if not accumulated:
                self.is_incomplete = self.max_steps != math.inf
                return "the batches are exhausted"
            with out_of_memory(f"step {self.step + 1}", "use smaller batches or a smaller model"):
                event = self._make_step(accumulated, started, fetch)
            self.emit(event)

    def _agree(self) -> tuple[str | None, str | None, bool]:
        """Return the reason to end, the signal and whether to save that any rank has: all must do the same."""
        is_due = time.monotonic() - self._save_time >= 60.0 * self.config.save_every_minutes
        signal = self._signals[-1] if self._signals else None
        reasons, signals, dues = zip(*self.communicator.all_gather([self.stop_reason(), signal, is_due]), strict=True)
        return next(filter(None, reasons), None), next(filter(None, signals), None), any(dues)

    def _whole_state(self) -> Any:
        """Return the optimizer state of all parameters; all ranks must call it."""
        return self.state if self._sharded is None else self._sharded.gather_state(self._model, self.state)

    def _make_step(self, batches: Sequence[Any], started: float, fetch: Callable[[], Any]) -> Step | Skip:
        step, loss_scale, self._copy = self.step + 1, self._scaler.scale, None
        learning_rate = rate_of(self.learning_rate, step, self.max_steps)
        num_tokens = tokens_of(batches, self.count_tokens, step)
        if self._is_shared:  # and nobody else may need the other arrays
            self._model, self._is_shared = _with_own_parameters(self._model), False
        like = first_array(self._model)
        xp: Any = array_namespace(like)
        counter: Any = np.asarray(step)
        if xp.reads_counters_on_device:
            counter = xp.from_host(counter, device=device(like))
        numbers = {"learning_rate": learning_rate, "loss_scale": loss_scale, "num_tokens": num_tokens}
        inputs = self._model, self.state, batches, self._rng.with_counter(counter)
        result = self._train_step(*inputs, max_grad_norm=self.config.max_grad_norm, **numbers)
        if not xp.is_host_accessible(result.loss) and step < self.max_steps:
            self._upcoming.append(_attempt(fetch))  # while the GPU computes
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
        self._model, self.state, self._scaler = result.model, state, scaler
        self.step, self.num_tokens = step, self.num_tokens + num_tokens
        if not is_finite:
            return Skip(step, loss_scale)
        speed = num_tokens / (time.monotonic() - started)
        update = step, self.epoch, loss, grad_norm, learning_rate, num_tokens
        self.history.append(event := Step(*update, speed, self.minutes, loss_scale))
        return event


def _fetch(batches: Iterator[Any], count: int, stream: BatchStream) -> tuple[list[Any], int]:
    """Return the batches of a step, and their epoch."""
    return list(itertools.islice(batches, count)), stream.epoch


def _attempt(function: Callable[[], Any]) -> Callable[[], Any]:
    """Call a function; return one that returns its result or raises its error."""
    future: Future[Any] = Future()
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - raised once the step before has ended
        future.set_exception(error)
    return future.result


def _with_own_parameters(model: Any) -> Any:
    """Return the model with copies of its parameters, which steps may overwrite; other arrays are shared."""
    leaves, rebuild = flatten_parameters(model)
    return rebuild([array_namespace(leaf).asarray(leaf, copy=True) for leaf in leaves])


TrainingLoop.__signature__ = with_fields(TrainingLoop.__init__, FitConfig)  # type: ignore[attr-defined]


@check_arguments(
    epochs="pass steps, the number of updates; the default is one pass over batches",
    validation_data="pass callbacks=[xformer.validate(batches, every=100)]",
    **dict.fromkeys(("batch_size", "shuffle"), "pass batches, an iterable that cuts and shuffles the data"),
)
@with_parameters_of(TrainingLoop)
def fit(model: T, loss_fn: Loss[T, S], batches: Batches[S], **options: Any) -> tuple[T, History]:  # noqa: D417
    """Train a model.

    Ctrl-C, SIGTERM and SIGHUP end training after the current step; a second Ctrl-C interrupts at once.

    Args:
        model: Any Module; it is not changed.
        loss_fn: (model, batch, rng) -> the sum of the losses of a batch's tokens, a scalar array. Validation passes
            None for the rng: no dropout.
        batches: An iterable, which is iterated again until all steps are made; or a function of a number n that returns
            an iterator over the batches from number n on, counted from 0. A resumed run skips the batches of an
            iterable that it has seen, and calls the function with their number. On a GPU the next batch is made while
            a step is computed, before callbacks get its event.
        optimizer: For example `AdamW(weight_decay=0.1)`.
        learning_rate: A number, or a function of the step, counted from 1, and if it has an argument `total_steps`, of
            the number of steps of the run; see `xformer.training.schedules`.
        max_grad_norm: Largest norm of the gradient (clipping by global norm); math.inf is no clipping.
        steps: Number of steps, including those before it was resumed; math.inf is no limit. Default one pass over
            `batches`, which must have a length, like a list or a DataLoader of torch.
        callbacks: Called in this order with every event; each may end training (see `Callback`).
        keep_best: Whether to return the best of the models that the callback `validate` has evaluated, in place of the
            last one: that of the smallest loss, or of the largest score. Before the first validation, as after Ctrl-C,
            it is the last one, too.
        run_dir: Directory for the training state, the log and the model; created if necessary. If it holds the state
            of an earlier run, training resumes from there and matches an uninterrupted run exactly. The model must have
            the same settings, such as its activation. Its model.safetensors is the model that `fit` returns.
        seed: Seed of dropout.
        grad_accumulation: Number of batches per step, computed one after the other.
        precision: "float32", or "bfloat16" or "float16" for mixed precision.
        data_parallel: Number of shards of each batch that are computed on threads (see `data_parallel`), of all ranks
            together; default one for each core on NumPy, or 8 with a communicator; one for each rank on other backends.
        communicator: The ranks that train together, e.g. `xformer.distributed.connect("mpi")`. Each rank calls `fit`
            with the same arguments and batches, computes a part of each batch, and calls its callbacks. Rank 0 alone
            writes to `run_dir`, and only its callbacks get `Checkpoint` events. An error on one rank is printed and
            ends all of them; it cannot be caught. Default: this process alone.
        num_tokens: A function that counts the tokens, or samples, of a batch, by which the sum of losses is divided;
            default `batch.num_tokens`, or 1 for batches without it, whose loss should be a mean.
        jit: Whether to trace `loss_fn` by `xformer.jit` for batches whose shapes repeat, which makes small models
            faster on NumPy, and all on CuPy, whose steps become CUDA graphs. It must then be pure, since later batches
            run none of its Python code. If it has no effect, a warning says so; on NumPy, models of more than 16
            million trainable parameters are faster without it, and run so. Default: on CuPy, unless the loss cannot be
            traced.
        save_every_minutes: Minutes between saves of the state.

    Returns:
        The trained model (see `keep_best`), and the `Step` events of this call, a list that notebooks show as a curve
        and a table.

    Raises:
        ConfigError: If an argument is invalid, `batches` has no length and `steps` is None, `keep_best` has no
            validation, or `run_dir` cannot hold the model, the optimizer's state or that of a callback.
        TrainingError: If the loss or the gradient is not finite. The last state saved stays in `run_dir`.
        OutOfMemoryError: If memory runs out.
        CheckpointError: If `run_dir` cannot be written, or holds the state of another model or optimizer.
    """
    try:
        inspect.signature(fit).bind(model, loss_fn, batches, **options)  # refuses unknown names
    except TypeError as error:
        raise TypeError(f"fit() {error}") from None
    loop = TrainingLoop(model, loss_fn, batches, **options)
    with loop.jitted_step.warnings(loop.model, loop.history) if loop.jitted_step else contextlib.nullcontext():
        reason = loop.run()
    model = loop.result()
    if loop.is_incomplete:
        limit = "" if loop.max_steps == math.inf else f" of {loop.max_steps}"
        _LOG.warning("training ended after step %d%s: %s", loop.step, limit, reason)
    elif loop.files is not None and not loop.history and loop.step >= loop.max_steps:
        message = "the training in %s had already ended after step %d; pass a larger number of steps to continue it"
        _LOG.warning(message, loop.files.directory, loop.step)
    return model, loop.history
