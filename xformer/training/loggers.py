"""Loggers for `fit`: callbacks that write a training run to TensorBoard, MLflow or Weights & Biases.

A `Logger` turns events into scalars, tables and figures; a subclass writes them to one tool.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from html import escape
from typing import Any, ClassVar

from xformer.config import check_count
from xformer.html import table
from xformer.io import StrPath
from xformer.text.extras import library_errors, require
from xformer.training.events import Checkpoint, End, Event, Step, Validation
from xformer.training.fit import LOG_EVERY, TrainingLoop

Rows = Sequence[Mapping[str, str]]  # a table: for each row the texts by column name


@dataclass(eq=False, kw_only=True)
class Logger(ABC):
    """A callback that writes the scalars of a run, and at each validation samples and figures.

    Scalars are "step/loss", "step/learning_rate", "step/grad_norm", "step/tokens_per_second", "validation/loss",
    "validation/perplexity" and the score, e.g. "validation/BLEU". A resumed run continues the log, and no step occurs
    twice. A subclass defines `open`, `write_scalars`, `write_table`, `write_figure` and `end`.

    Args:
        samples: (model) -> a table of texts, e.g. `[{"source": ..., "output": ..., "reference": ...}]`.
        figures: (model) -> matplotlib figures by name, e.g. `xformer.show_attention(...).plot()`.
        every: Number of steps between scalars of training; the first step is always written.

    Raises:
        BackendError: If the package of the tool is not installed.
        ConfigError: For an invalid number of steps.
    """

    package: ClassVar[str]  # its import name

    samples: Callable[[Any], Rows] | None = None
    figures: Callable[[Any], Mapping[str, Any]] | None = None
    every: int = LOG_EVERY

    def __post_init__(self) -> None:
        check_count("every", self.every)
        self._module: Any = require(self.package)
        self._is_open = False
        self._end: End | None = None

    def __call__(self, event: Event, loop: TrainingLoop) -> None:
        """Write an event."""
        if not self._is_open:
            with library_errors(f"{self.package} cannot start"):
                self.open(event.step)
            self._is_open, self._end = True, None
        if isinstance(event, Step) and (event.step == 1 or event.step % self.every == 0):
            names = ("loss", "learning_rate", "grad_norm", "tokens_per_second")
            self.write_scalars(event.step, {f"{event.name}/{name}": getattr(event, name) for name in names})
        elif isinstance(event, Validation):
            self._write_validation(event, loop)
            self.flush()
        elif isinstance(event, Checkpoint):
            self.flush()
        elif isinstance(event, End):
            self._end = event

    def close(self) -> None:
        """End the log; a resumed run continues it."""
        if self._is_open:
            self.end(self._end)
            self._is_open = False

    def _write_validation(self, event: Validation, loop: TrainingLoop) -> None:
        scalars = {"loss": event.loss, "perplexity": event.perplexity, event.metric or "score": event.score}
        values = {f"{event.name}/{name}": value for name, value in scalars.items() if value is not None}
        self.write_scalars(event.step, values)
        if type(event) is not Validation:  # the average of checkpoints, which is not the model of the loop
            return
        if self.samples is not None and (rows := self.samples(loop.model)):
            self.write_table(event.step, "samples", rows)
        if self.figures is not None:
            for name, figure in self.figures(loop.model).items():
                self.write_figure(event.step, name, figure)

    @abstractmethod
    def open(self, step: int) -> None:
        """Start to log, or continue after `step` steps; no later step may occur twice in the log."""

    @abstractmethod
    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars by name."""

    @abstractmethod
    def write_table(self, step: int, name: str, rows: Rows) -> None:
        """Write a table of texts with at least one row."""

    @abstractmethod
    def write_figure(self, step: int, name: str, figure: Any) -> None:
        """Write a matplotlib figure as an image."""

    def flush(self) -> None:  # noqa: B027
        """Write what is buffered; nothing unless a subclass defines it."""

    @abstractmethod
    def end(self, event: End | None) -> None:
        """End the log; without an event, an error ended training."""


@dataclass(eq=False)
class TensorBoard(Logger):
    """A callback that writes event files of TensorBoard; watch them with `tensorboard --logdir DIRECTORY`.

    A new run in the same directory replaces an earlier one.

    Args:
        directory: Directory of the event files; created if necessary.
        samples: As for `Logger`, with `figures` and `every`.

    Raises:
        BackendError: If tensorboardX is not installed.
    """

    package = "tensorboardX"

    directory: StrPath

    def __post_init__(self) -> None:
        super().__post_init__()
        self._writer: Any = None

    def open(self, step: int) -> None:
        """Open a new event file; TensorBoard discards events of earlier files after `step`."""
        # Names of event files have the time in seconds; the suffix keeps sessions of the same second apart.
        options = {"purge_step": step + 1 if step else 0, "filename_suffix": f".{step}"}
        self._writer = self._module.SummaryWriter(os.fspath(self.directory), **options)

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars by name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def write_table(self, step: int, name: str, rows: Rows) -> None:
        """Write a Markdown table, which TensorBoard shows as text."""
        columns = list(rows[0])
        lines = [columns, ["---"] * len(columns), *([_cell(row[column]) for column in columns] for row in rows)]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def write_figure(self, step: int, name: str, figure: Any) -> None:
        """Write a matplotlib figure as an image."""
        self._writer.add_figure(name, figure, step)

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()

    def end(self, event: End | None) -> None:
        """Close the event file."""
        self._writer.close()


class _RunLogger(Logger):
    """A logger of a tool whose runs have ids.

    Attributes:
        run_id: Id of the run, which a resumed run continues; None before the start.
    """

    run_id: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.run_id = state["run_id"]


@dataclass(eq=False)
class MLflow(_RunLogger):
    """A callback that writes a run to MLflow: scalars as metrics, samples and figures as artifacts.

    Args:
        experiment: Name of the experiment; created if necessary.
        run_name: Name of the run. Default: MLflow chooses one.
        tracking_uri: Server, directory or database. Default: that of MLflow, MLFLOW_TRACKING_URI.
        samples: As for `Logger`, with `figures` and `every`.

    Raises:
        BackendError: If mlflow is not installed.
    """

    package = "mlflow"

    experiment: str = "xformer"
    _: KW_ONLY
    run_name: str | None = None
    tracking_uri: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._client: Any = self._module.MlflowClient(self.tracking_uri)
        self._last_steps: dict[str, int] = {}

    def open(self, step: int) -> None:
        """Create the run, or continue it: metrics cannot be removed, so steps that it has are not written again."""
        client = self._client
        if self.run_id is not None:
            client.update_run(self.run_id, status="RUNNING")
            for name in client.get_run(self.run_id).data.metrics:
                self._last_steps[name] = max(each.step for each in client.get_metric_history(self.run_id, name))
            return
        experiment = client.get_experiment_by_name(self.experiment)
        experiment_id = client.create_experiment(self.experiment) if experiment is None else experiment.experiment_id
        self.run_id = client.create_run(experiment_id, run_name=self.run_name).info.run_id

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write metrics, except those that the run has for this step."""
        for name, value in values.items():
            if step > self._last_steps.get(name, -1):
                self._client.log_metric(self.run_id, name, value, step=step, synchronous=True)

    def write_table(self, step: int, name: str, rows: Rows) -> None:
        """Write a table as an HTML artifact."""
        columns = list(rows[0])
        content = table(columns, ([row[column] for column in columns] for row in rows))
        self._client.log_text(self.run_id, f'<meta charset="utf-8">\n{content}\n', f"{name}/{step}.html")

    def write_figure(self, step: int, name: str, figure: Any) -> None:
        """Write a figure as a PNG artifact."""
        self._client.log_figure(self.run_id, figure, f"{name}/{step}.png")

    def end(self, event: End | None) -> None:
        """End the run as FINISHED, KILLED or FAILED."""
        status = "FAILED" if event is None else "KILLED" if event.is_interrupted else "FINISHED"
        self._client.set_terminated(self.run_id, status)


@dataclass(eq=False)
class WeightsAndBiases(_RunLogger):
    """A callback that writes a run to Weights & Biases.

    Args:
        project: Name of the project.
        run_name: Name of the run. Default: the service chooses one.
        directory: Directory of local files. Default: that of wandb.
        mode: "online", "offline" or "disabled". Default: that of wandb, WANDB_MODE.
        samples: As for `Logger`, with `figures` and `every`.

    Raises:
        BackendError: If wandb is not installed.
    """

    package = "wandb"

    project: str = "xformer"
    _: KW_ONLY
    run_name: str | None = None
    directory: StrPath | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last_step = 0
        self._run: Any = None

    def open(self, step: int) -> None:
        """Create the run, or continue it: steps that it has are not written again."""
        directory = None if self.directory is None else os.fspath(self.directory)
        self._run = self._module.init(
            project=self.project, name=self.run_name, dir=directory, mode=self.mode, id=self.run_id, resume="allow"
        )
        self.run_id = self._run.id
        self._last_step = max(self._last_step, step, self._run.step - 1)

    def write_scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Write values by name, except those of steps that the run has."""
        if step > self._last_step:
            self._run.log(dict(values), step=step)

    def write_table(self, step: int, name: str, rows: Rows) -> None:
        """Write a table."""
        columns = list(rows[0])
        data = [[row[column] for column in columns] for row in rows]
        self.write_scalars(step, {name: self._module.Table(columns=columns, data=data)})

    def write_figure(self, step: int, name: str, figure: Any) -> None:
        """Write a figure as an image."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        image = require("PIL.Image").open(buffer)  # Image(figure) needs pyplot
        self.write_scalars(step, {name: self._module.Image(image)})

    def end(self, event: End | None) -> None:
        """End the session of the run."""
        self._run.finish(exit_code=1 if event is None or event.is_interrupted else 0)


tensorboard, mlflow, wandb = TensorBoard, MLflow, WeightsAndBiases


def _cell(text: str) -> str:
    """Format a text as a cell of a Markdown table."""
    return " ".join(escape(text).replace("|", "&#124;").split())
