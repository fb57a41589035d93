"""Loggers write what `fit` does; the files are read back with the tools."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import raises_line
from xformer.backends import Array
from xformer.errors import BackendError, ConfigError
from xformer.training import SGD, Step, TensorBoard, Validation, fit, mlflow, tensorboard, validate, wandb
from xformer.training.fit import TrainingLoop
from xformer.tree import Module


class Weight(Module):
    weight: Array

    def __init__(self):
        self.weight = np.zeros(2)


def loss_fn(model, batch, rng):
    return (model.weight - batch) @ (model.weight - batch)


def train(logger, steps=4, **options):
    data = [np.asarray([1.0, 2.0])]
    # In this order the logger hears of the end of training before the last validation.
    callbacks = [logger, validate(data, every=2)]
    return fit(Weight(), loss_fn, data, optimizer=SGD(), learning_rate=0.1, steps=steps, callbacks=callbacks, **options)


def options_of(**options):
    rows = [{"source": "a | b\nc", "output": "<b>", "reference": "d"}]
    return {"samples": lambda model: rows, "every": 1, **options}


def figures(model):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(1, 1))
    figure.subplots().plot(model.weight)
    return {"weights": figure}


def read_events(directory):
    """Return the accumulator of TensorBoard with everything it shows of a directory."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = module.EventAccumulator(str(directory), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    return accumulator.Reload()


@pytest.mark.filterwarnings("default")
def test_tensorboard_shows_scalars_samples_and_figures(tmp_path):
    pytest.importorskip("tensorboardX")
    _, history = train(tensorboard(tmp_path, **options_of(figures=figures)))
    events = read_events(tmp_path)
    losses = events.Scalars("step/loss")
    assert [event.step for event in losses] == [1, 2, 3, 4]
    np.testing.assert_allclose([event.value for event in losses], [step.loss for step in history], rtol=1e-6)
    assert [event.step for event in events.Scalars("validation/loss")] == [2, 4]
    assert {"step/learning_rate", "step/grad_norm", "step/tokens_per_second"} <= set(events.Tags()["scalars"])
    (text, last) = events.Tensors("samples/text_summary")
    table = text.tensor_proto.string_val[0].decode()
    assert table.splitlines()[2] == "| a &#124; b c | &lt;b&gt; | d |"
    assert (text.step, last.step) == (2, 4)
    assert [image.step for image in events.Images("weights")] == [2, 4]


@pytest.mark.filterwarnings("default")
def test_tensorboard_continues_a_resumed_run_without_repeating_steps(tmp_path):
    pytest.importorskip("tensorboardX")
    logs, run = tmp_path / "logs", tmp_path / "run"
    train(tensorboard(logs, every=1), run_dir=run)
    state = (run / "last.safetensors").read_bytes()
    train(tensorboard(logs, every=1), steps=7, run_dir=run)
    (run / "last.safetensors").write_bytes(state)  # killed after step 7, before the state was saved
    train(tensorboard(logs, every=1), steps=9, run_dir=run)
    events = read_events(logs)
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 10))
    assert [event.step for event in events.Scalars("validation/loss")] == [2, 4, 6, 8, 9]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow_continues_a_resumed_run_without_repeating_steps(tmp_path):
    module = pytest.importorskip("mlflow")
    uri, run = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "run"
    client = module.MlflowClient(uri)
    client.create_experiment("test", artifact_location=(tmp_path / "artifacts").as_uri())
    options = options_of(figures=figures, tracking_uri=uri, run_name="first")
    train(mlflow("test", **options), run_dir=run)
    state = (run / "last.safetensors").read_bytes()
    train(mlflow("test", **options), steps=7, run_dir=run)
    (run / "last.safetensors").write_bytes(state)
    train(mlflow("test", **options), steps=9, run_dir=run)
    (found,) = client.search_runs([client.get_experiment_by_name("test").experiment_id])
    assert (found.info.run_name, found.info.status) == ("first", "FINISHED")
    history = client.get_metric_history(found.info.run_id, "step/loss")
    assert sorted(metric.step for metric in history) == list(range(1, 10))
    assert {file.path for file in client.list_artifacts(found.info.run_id)} == {"samples", "weights"}
    assert len(client.list_artifacts(found.info.run_id, "weights")) == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    logger = wandb(directory=tmp_path, mode="offline", **options_of(figures=figures))
    train(logger)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert logger.run_id in path.name
    content = path.read_bytes()
    assert b"step/loss" in content
    assert b"validation/loss" in content
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json"))
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/weights_*.png"))


class Recorder(TensorBoard):
    """A logger that remembers what it is asked to write."""

    package = "math"  # always installed

    def __init__(self, **options):
        super().__init__("unused", **options)
        self.calls = []

    def open(self, step):
        self.calls.append(("open", step))

    def write_scalars(self, step, values):
        self.calls.append((step, *sorted(values)))

    def write_table(self, step, name, rows):
        self.calls.append((step, name))

    def flush(self):
        self.calls.append("flush")

    def end(self, event):
        self.calls.append(("end", None if event is None else event.reason))


def test_a_logger_is_opened_first_and_ended_last_also_by_an_error():
    logger = Recorder(every=3, samples=lambda model: [{"output": "x"}])
    train(logger)
    names = [f"step/{name}" for name in ("grad_norm", "learning_rate", "loss", "tokens_per_second")]
    validation = ("validation/loss", "validation/perplexity")
    assert logger.calls == [
        ("open", 0),
        (1, *names),
        (2, *validation),
        (2, "samples"),
        "flush",
        (3, *names),
        (4, *validation),
        (4, "samples"),
        "flush",
        ("end", "4 steps"),
    ]
    with raises_line(ConfigError, "every is 0; expected an integer of at least 1"):
        Recorder(every=0)
    logger = Recorder()

    def fail(event, loop):
        if isinstance(event, Step):
            raise KeyError("of the user")

    data = [np.ones(2)]
    with pytest.raises(KeyError, match="of the user"):
        fit(Weight(), loss_fn, data, optimizer=SGD(), learning_rate=0.1, steps=2, callbacks=[logger, fail])
    assert logger.calls[-1] == ("end", None)


def test_the_score_has_its_name():
    logger = Recorder()
    loop = TrainingLoop(Weight(), loss_fn, [np.ones(2)], optimizer=SGD(), learning_rate=0.1)
    logger(Validation(5, 0, None, None, 27.1, "BLEU", True, 0.1), loop)
    assert logger.calls[1:] == [(5, "validation/BLEU"), "flush"]


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(BackendError, match=r'run: pip install "array-transformers\[tensorboard\]"'):
        tensorboard(tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


def test_a_history_shows_curves_and_few_rows():
    _, history = train(Recorder(), steps=30)
    assert repr(history).startswith("History of steps 1 to 30: loss 5 to ")
    content = history._repr_html_()
    assert [each.step for each in history.validations] == [*range(2, 31, 2)]
    assert content.count("<polyline") == 2
    assert content.count("<tr>") == 11
    assert "<td>30</td>" in content
    assert "0 steps" in type(history)()._repr_html_()
