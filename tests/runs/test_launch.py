"""`xformer.train`, `train_lm` and `resume`: what the command line does, from Python."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from xformer.cli.main import exit_code
from xformer.data.demo_tasks import numbers_task
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.families.run_directory import RunDirectory
from xformer.io import load_arrays
from xformer.runs import launch
from xformer.runs.recipe import TASKS, Recipe, make_recipe
from xformer.runs.tasks import held_out

TASK = numbers_task(num_train=300, num_valid=8, num_test=8, largest=999)
MODEL = {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1}
TRAINING = {"batch_tokens": 256, "max_steps": 4, "validate_every": 2}
TABLES = {"model": MODEL, "tokenizer": {"vocab_size": 100}, "training": TRAINING}
TEXTS = {
    "source": TASK.train.source,
    "target": TASK.train.target,
    "valid_source": TASK.valid.source,
    "valid_target": TASK.valid.target,
}
LM = {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_layers": 1, "context_length": 12, "max_steps": 3}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The texts as files, and the recipe."""
    directory = tmp_path_factory.mktemp("text")
    for name, lines in TEXTS.items():
        (directory / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = ["[model]", *(f"{name} = {value}" for name, value in MODEL.items()), "[tokenizer]", "vocab_size = 100"]
    settings += ["[training]", *(f"{name} = {value}" for name, value in TRAINING.items())]
    (directory / "recipe.toml").write_text("\n".join(settings))
    return directory


@pytest.fixture(scope="module")
def commanded(files, tmp_path_factory):
    """A run of the command line."""
    out = tmp_path_factory.mktemp("commanded") / "run"
    options = [option for name in TEXTS for option in (f"--{name.replace('_', '-')}", str(files / name))]
    assert exit_code(["train", *options, "--recipe", str(files / "recipe.toml"), "--out", str(out)]) == 0
    return out


def state(run):
    return {name: array.tobytes() for name, array in load_arrays(Path(run) / "last.safetensors")[0].items()}


def train(out, recipe=TABLES, **arguments):
    return xf.train(recipe, **{**TEXTS, "out": out, "progress": False, **arguments})


@pytest.mark.parametrize("form", ["path", "recipe", "keywords"])
def test_a_run_has_the_bits_of_the_command_line(files, commanded, tmp_path, form):
    recipes = {"path": files / "recipe.toml", "recipe": Recipe.from_dict(TABLES), "keywords": None}
    texts = {name: str(files / name) if form == "path" else iter(lines) for name, lines in TEXTS.items()}
    settings = {**MODEL, **TRAINING, "vocab_size": 100} if form == "keywords" else {}
    run = xf.train(recipes[form], **texts, **settings, out=str(tmp_path / "run"), progress=False)
    assert state(run.directory) == state(commanded)
    assert (run.directory / "tokenizer.json").read_bytes() == (commanded / "tokenizer.json").read_bytes()
    assert run.reason == "4 steps"
    assert [event["step"] for event in run.history if event["event"] == "validation"] == [2, 4]
    assert isinstance(run.pipeline, xf.Translator)
    assert len(run.pipeline(TASK.test.source[:3])) == 3
    assert run.pipeline is run.pipeline
    assert RunDirectory(run.directory).read_config()["example"] in TEXTS["valid_source"]


def test_several_files_are_one_text(files, commanded, tmp_path):
    parts = {}
    for name, lines in TEXTS.items():
        paths = [tmp_path / f"{name}{part}" for part in range(2)]
        for path, some in zip(paths, (lines[:5], lines[5:]), strict=True):
            path.write_text("\n".join(some) + "\n", encoding="utf-8")
        parts[name] = paths
    run = train(tmp_path / "run", **parts)
    assert state(run.directory) == state(commanded)
    assert len(RunDirectory(run.directory).read_config()["data"]) == 8
    assert xf.resume(run.directory, max_steps=5, progress=False).reason == "5 steps"


def test_a_run_in_memory_is_resumed_also_from_another_place(commanded, tmp_path):
    run = train(tmp_path / "run", max_steps=2)
    run.directory.rename(tmp_path / "moved")
    resumed = xf.resume(tmp_path / "moved", max_steps=4, progress=False)
    assert state(resumed.directory) == state(commanded)
    assert xf.resume(tmp_path / "moved", progress=False).reason == "nothing left to do: 4 steps"
    (tmp_path / "moved" / "data" / "source").write_text("changed\n")
    with pytest.raises(DataError, match="source has changed since the run started"):
        xf.resume(tmp_path / "moved", max_steps=6, progress=False)


def test_callbacks_see_events_and_end_a_run(tmp_path):
    run = train(tmp_path / "run", callbacks=[lambda event, loop: event.name == "step" and event.step == 3])
    assert run.reason.startswith("stopped by")
    assert max(event["step"] for event in run.history) == 3


def test_small_data_choose_what_is_not_given(tmp_path, capsys):
    """Pairs are held out without validation text, and a run ends when it becomes no better."""
    pairs = {"source": ["one", "", *TEXTS["source"]], "target": ["eins", "zwei", *TEXTS["target"]]}
    size = {name: value for name, value in TABLES.items() if name != "training"}
    stop = {"callbacks": [lambda event, loop: event.name == "step" and event.step >= 2]}
    run = xf.train(size, **pairs, out=tmp_path / "run", **stop)
    config, out = RunDirectory(run.directory).read_config(), capsys.readouterr().out
    chosen = {"validate_every": 100, "patience": 5, "max_minutes": 30.0, "max_steps": None}
    assert {name: config["recipe"]["training"][name] for name in chosen} == chosen
    for name, recipe in (
        ("read", Recipe.from_dict(size)),
        ("made", dataclasses.replace(Recipe.from_dict(size), given=None)),
    ):
        again = RunDirectory(xf.train(recipe, **pairs, out=tmp_path / name, **stop).directory).read_config()
        assert again["recipe"] == config["recipe"]
    assert "training: 271 sentence pairs (dropped: 1 with a blank side)\nvalidation: 30 sentence pairs\n" in out
    ends = "validation with held-out data (--valid-share) after every 100, until 5 in turn are no better (--patience);"
    assert f"steps: at most 30 minutes (--max-minutes), a {ends}" in out
    assert "note: the model has" not in out
    xf.resume(run.directory, progress=False, **stop)
    again = RunDirectory(run.directory).read_config()
    assert {**again, "data": None} == {**config, "data": None}
    for given in ({"validate_every": 500, "patience": 9}, {"max_minutes": 1}, {"max_steps": 2}):
        large = {**given, "d_model": 64, "num_heads": 2, "valid_share": 0.4}
        run = xf.train(**pairs, out=tmp_path / next(iter(given)), **large, **stop)
        config = RunDirectory(run.directory).read_config()
        training = config["recipe"]["training"]
        assert {name: training[name] for name in given} == given
        assert (training["validate_every"], config["counts"]["valid_pairs"]) == (500, 120)
        assert "tokens of training data; a smaller one, such as --set model.d_model=128" in capsys.readouterr().out


@pytest.mark.parametrize("given", [{"valid_source": "valid_target"}, {"valid_target": "valid_source"}])
def test_validation_text_has_two_sides(tmp_path, given):
    ((name, other),) = given.items()
    texts = {key: value for key, value in TEXTS.items() if key != other}
    with pytest.raises(ConfigError, match=f"{name} is given without {other}; expected both, or neither"):
        xf.train(TABLES, **texts, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="valid_source and valid_share are both given; expected only one of them"):
        train(tmp_path / "run", valid_share=0.2)


def test_examples_are_held_out_at_random():
    settings = Recipe().training
    mask = held_out(settings, 20_000, "pair")
    assert (mask.sum(), mask.dtype) == (1000, bool)
    assert 400 < mask[:10_000].sum() < 600
    assert held_out(dataclasses.replace(settings, valid_share=0.2), 20_000, "pair").sum() == 4000
    assert held_out(dataclasses.replace(settings, valid_share=0.9), 2, "pair").sum() == 1
    with pytest.raises(DataError, match="the training set has 1 pair; expected 1 to train on and 1 for validation"):
        held_out(settings, 1, "pair")


def test_adapters_of_a_run(tmp_path, capsys):
    base = xf.train_lm(text=TASK.train.source, out=tmp_path / "base", progress=False, **LM)
    training = {"context_length": 12, "max_steps": 6, "validate_every": 3, "progress": True}
    init = {"path": str(base.directory), "lora": 2}
    run = xf.train_lm(text=TASK.train.source, out=tmp_path / "run", init=init, **training)
    printed = capsys.readouterr().out
    assert " parameters, 448 of them trained, vocabulary of " in printed
    assert "learning rate: at most 0.0005, 1 step of warm-up\n" in printed
    before, after = (load_arrays(Path(path) / "model.safetensors")[0] for path in (base.directory, run.directory))
    assert before.keys() == after.keys()
    changed = {name for name, x in before.items() if not np.array_equal(x, after[name])}
    assert changed == {
        name for name in before if name.startswith("layers.") and name.endswith(".weight") and "norm" not in name
    }
    assert len(run.pipeline(["one"], max_new_tokens=3)) == 1
    halves = {**training, "progress": False}
    xf.train_lm(text=TASK.train.source, out=tmp_path / "half", init=init, **{**halves, "max_steps": 3})
    xf.resume(tmp_path / "half", max_steps=6, progress=False)
    assert state(tmp_path / "half") == state(run.directory)
    with pytest.raises(ConfigError, match=r"lora of .* is 2, which needs the path of a model; set path, or omit lora"):
        xf.train_lm(text=TASK.train.source, out=tmp_path / "none", init={"lora": 2}, **halves)


def test_a_language_model_has_the_bits_of_the_command_line(tmp_path):
    lines = TASK.train.source
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    run = xf.train_lm(text=lines, out=tmp_path / "a", progress=False, **LM)
    training = ("context_length", "max_steps")
    settings = [f"{'training' if name in training else 'model'}.{name}={value}" for name, value in LM.items()]
    options = [word for setting in settings for word in ("--set", setting)]
    assert exit_code(["train-lm", "--text", str(tmp_path / "text"), "--out", str(tmp_path / "b"), *options]) == 0
    assert state(tmp_path / "a") == state(tmp_path / "b")
    assert isinstance(run.pipeline, xf.TextGenerator)
    assert len(run.pipeline(["one"], max_new_tokens=3)) == 1
    assert xf.resume(run.directory, max_steps=4, progress=False).reason == "4 steps"
    whole = xf.train_lm(text=["\n".join(lines)], valid_text=tmp_path / "text", out=tmp_path / "c", progress=False, **LM)
    config = RunDirectory(whole.directory).read_config()
    assert config["counts"]["train_characters"] == len("\n".join(lines)) + 1
    assert " ".join(lines).startswith(config["example"])
    assert config["example"]


@pytest.mark.parametrize("task", ["translation", "language_modeling"])
def test_loggers_get_samples_and_figures_of_each_validation(tmp_path, monkeypatch, task):
    pytest.importorskip("matplotlib")
    written = []

    class Recorder(launch.TensorBoard):
        package = "math"  # always installed

        def ignore(self, *arguments):
            """Write nothing."""

        open = write_scalars = flush = end = ignore

        def write_table(self, step, name, rows):
            written.append((step, list(rows[0])))

        def write_figure(self, step, name, figure):
            written.append((step, name))

    monkeypatch.setattr(launch, "TensorBoard", Recorder)
    monkeypatch.setitem(launch.LOGGERS, "tensorboard", Recorder)
    options = {"out": tmp_path / "run", "loggers": ["tensorboard"], "progress": False}
    if task == "translation":
        xf.train(TABLES, **TEXTS, **options)
    else:
        xf.train_lm(text=TASK.train.source, **LM, validate_every=2, **options)
    columns = ["source" if task == "translation" else "prompt", "output", "reference"]
    steps = (2, 4) if task == "translation" else (2, 3)
    assert written == [(step, what) for step in steps for what in (columns, "attention/layer 0")]


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"source": "nowhere.de"}, DataError, "cannot read nowhere.de: No such file or directory; expected a UTF-8"),
        ({"source": None}, DataError, "source is None; expected the path of a text file"),
        ({"source": 3}, DataError, "source is an int; expected"),
        ({"source": np.zeros(3)}, DataError, "source has a float64 at index 0"),
        ({"source": ["a"]}, DataError, "source has 1 lines and target has 300; expected the same number"),
        ({"source": ["a\nb"] * 300}, DataError, "source has a line break inside the text at index 0"),
        ({"source": ["\ud800"] * 300}, DataError, "the text at index 0 of source is not valid Unicode"),
        ({"source": "a\nb"}, DataError, r"source is a text of 3 characters; expected .* pass \[text\]"),
        ({"source": [__file__] * 300}, DataError, "source is a list of strings, which are lines, but .* is a file"),
        ({"source": [Path(__file__)] * 2}, DataError, "got 2 source and 1 target files"),
        ({"valid_source": [" "] * 8}, DataError, "valid_source and valid_target have no line with text on both sides"),
        ({"max_step": 3}, ConfigError, "unknown key 'max_step' in the options; did you mean 'max_steps'"),
        ({"task": "language_modeling"}, ConfigError, "use: xformer train-lm"),
        ({"recipe": {"modle": {}}}, ConfigError, "unknown key 'modle' in the recipe; did you mean 'model'"),
        ({"recipe": 3}, ConfigError, "recipe is an int; expected a Recipe, a TOML file or a dictionary"),
        ({"init": "nowhere", "recipe": None}, CheckpointError, "nowhere does not exist"),
        ({"loggers": ["tensorbord"]}, ConfigError, r"loggers is \['tensorbord'\]; expected a list of 'tensorboard', "),
        ({"distributed": "mpy"}, ConfigError, "communicator is 'mpy'; expected 'mpi' or 'nccl'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, change, error, message):
    with pytest.raises(error, match=message) as caught:
        train(tmp_path / "run", **change)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_every_key_of_a_recipe_is_a_keyword():
    for task, spec in TASKS.items():
        recipe = Recipe.from_dict({"task": task})
        for table in ("tokenizer", "training"):
            values = json.loads(json.dumps(recipe.to_dict()[table]))
            values = {name: value for name, value in values.items() if name != "max_minutes"}
            made = make_recipe(None, {**values, "max_steps": 3, "task": task}, [task])
            assert made.to_dict()[table] == {
                **recipe.to_dict()[table],
                **({"max_steps": 3} if table == "training" else {}),
            }
        keys = [set(config.__dataclass_fields__) - spec.from_tokenizer for config in spec.tables.values()]
        assert not keys[0] & keys[2]
