"""`xf.train_lm(chats=...)`: fine-tuning on the answers of conversations."""

from __future__ import annotations

import json

import numpy as np
import pytest

import xformer as xf
from tests.pipelines.chat_model import CHATS, write_model
from tests.reference import raises_line
from xformer.errors import ConfigError, DataError
from xformer.families.run_directory import RunDirectory
from xformer.io import load_arrays
from xformer.pipelines import encode_conversation
from xformer.random import Rng
from xformer.runs.chats import ChatTask
from xformer.runs.config import ChatTrainingConfig
from xformer.runs.recipe import Recipe, make_recipe
from xformer.training import Documents

pytest.importorskip("jinja2")
NUMBERS = ["one", "two", "three", "four"]
LINES = [
    [{"role": "user", "content": f"what is {a} ?"}, {"role": "assistant", "content": f"{b} and {a}"}]
    for a in NUMBERS
    for b in NUMBERS[:2]
]
OPTIONS = {"context_length": 64, "batch_size": 2, "validate_every": 2, "learning_rate": 3e-3, "warmup_steps": 1}


def tune(base, out, chats=LINES, max_steps=2, **options):
    return xf.train_lm(
        chats=chats, init=base, out=out, max_steps=max_steps, **{**OPTIONS, "progress": False, **options}
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base"))


def documents(lengths):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, 13, length).tolist() for length in lengths]
    return Documents(tokens, [[0] + [1] * (length - 1) for length in lengths])


def chat_task(model, train, valid, length):
    settings = ChatTrainingConfig(context_length=length, batch_size=2)
    return ChatTask(Recipe("chat", training=settings), model, train, valid)


def test_an_epoch_has_each_document_once_and_batches_can_be_skipped():
    model = xf.LanguageModel(xf.LanguageModelConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=8, num_layers=1))
    train = documents([3, 9, 5, 7, 2, 6, 8, 4])
    task = chat_task(model, train, documents([4, 11]), 10)
    batches = task.batches(Rng(1), skip=0)
    seen = [next(batches) for _ in range(9)]
    per_epoch = sum(epoch == 0 for epoch, _ in seen)
    assert [epoch for epoch, _ in seen] == [n // per_epoch for n in range(9)]
    for epoch in range(2):
        labels = [batch.labels for number, batch in seen if number == epoch]
        found = np.concatenate([each[each >= 0] for each in labels])
        assert sorted(found) == sorted(token for ids in train.tokens for token in ids[1:])
    assert {batch.tokens.shape[1] for _, batch in seen} == {10}
    assert not np.array_equal(seen[0][1].tokens, seen[per_epoch][1].tokens)
    for skip in (1, per_epoch, per_epoch + 1):
        _, batch = next(task.batches(Rng(1), skip=skip))
        np.testing.assert_array_equal(batch.tokens, seen[skip][1].tokens)
    assert sum(batch.num_tokens for batch in task.validation_batches()) == 13
    with raises_line(DataError, "the validation set has no documents of at least two tokens"):
        chat_task(model, train, documents([1]), 10)
    with raises_line(DataError, "document 1 takes 8 tokens; expected at most 7"):
        chat_task(model, train, train, 7)


def test_a_tuned_model_answers(base, tmp_path):
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]
    run = tune(base, tmp_path / "run", [chat] * 4, 30)
    losses = [event["loss"] for event in run.history if event["event"] == "validation"]
    assert losses[-1] < 0.2 * losses[0]
    assert run.pipeline([chat[:1]], do_sample=False, max_new_tokens=8) == ["two three"]
    assert run.pipeline.has_chat


def test_the_loss_is_that_of_the_answers(base, tmp_path):
    run = tune(base, tmp_path / "run", valid_chats=CHATS[:1])
    tuned = xf.load(tmp_path / "run" / "model.safetensors")
    ids, mask = encode_conversation(run.pipeline.tokenizer, CHATS[0])
    losses = xf.cross_entropy(tuned([ids[:-1]]), [ids[1:]])[0]
    expected = sum(loss for loss, weight in zip(losses, mask[1:], strict=True) if weight) / sum(mask[1:])
    first, event = [event for event in run.history if event["event"] == "validation"]
    assert (first["step"], event["step"]) == (0, 2)
    assert event["loss"] < first["loss"]
    assert event["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_runs_are_resumed_to_the_same_bits_and_keep_conversations_of_memory(base, tmp_path):
    init = {"path": str(base), "lora": 2}
    full, half = (tune(init, tmp_path / name, max_steps=steps) for name, steps in (("full", 4), ("half", 2)))
    xf.resume(half.directory, max_steps=4, progress=False)
    one, other = (load_arrays(RunDirectory(run.directory).last)[0] for run in (full, half))
    assert all(one[key].tobytes() == other[key].tobytes() for key in one)
    assert len((half.directory / "data" / "chats").read_text().splitlines()) == len(LINES)
    counts = RunDirectory(half.directory).read_config()["counts"]
    assert (counts["train_conversations"], counts["valid_conversations"]) == (7, 1)


def test_a_run_without_a_number_of_steps_ends_when_it_becomes_no_better(base, tmp_path, capsys):
    """Steps, validations and rows suit the data, and the best adapters are kept."""
    chats = [
        [{"role": "user", "content": "one"}, {"role": "assistant", "content": word}] for word in (*NUMBERS * 2, "three")
    ]
    settings = {"learning_rate": 0.05, "max_minutes": 5, "data_parallel": 1}
    run = xf.train_lm(chats=chats, init={"path": str(base), "lora": 4}, out=tmp_path / "run", **settings)
    out = capsys.readouterr().out
    assert "1 in a step, 1 row at a time" in out
    losses = [event["loss"] for event in run.history if event["event"] == "validation"]
    best = losses.index(min(losses))
    assert len(losses) == min(best + 3, 11)
    assert f"validation loss {min(losses):.4f}, {losses[0]:.4f} before training" in out
    assert "until 2 in turn are no better (--patience); the best model is kept" in out
    training = RunDirectory(run.directory).read_config()["recipe"]["training"]
    assert (training["max_steps"], training["validate_every"], training["patience"]) == (10, 1, 2)
    assert (training["batch_size"], training["grad_accumulation"], training["context_length"]) == (1, 1, 192)
    again = xf.train_lm(chats=chats, init={"path": str(base), "lora": 4}, out=tmp_path / "b", max_steps=3, batch_size=2)
    training = RunDirectory(again.directory).read_config()["recipe"]["training"]
    assert (training["max_steps"], training["patience"], training["batch_size"]) == (3, None, 2)


ANSWER = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": TEXT}]}'


@pytest.mark.parametrize(("lines", "message"), [
    ([json.dumps({"messages": LINES[0]}), "{"], r"chats line 2 is not JSON \(.*\); expected {\"messages\": "),
    ([json.dumps({"messages": LINES[0]}), "", "[]"], "chats line 3 has a list; expected"),
    (['{"prompt": 1, "answer": 2}'], "chats line 1 has the keys prompt, answer; expected"),
    (['{"messages": "hello"}'], "chats line 1 has messages 'hello'; expected a list of at least one message"),
    ([ANSWER.replace("TEXT", '""')], "chats line 1 has no content in the answer, message 2; expected a text"),
    ([json.dumps({"messages": LINES[0], "tools": "x"})], "chats line 1 has tools 'x'; expected a list of functions"),
    ([json.dumps({"messages": LINES[0]})], "the training set has 1 conversation; expected 1 to train on and 1 for"),
    ([json.dumps({"messages": LINES[0][:1]})] * 2, "chats line 1: the conversation has no answer to learn"),
    ([json.dumps({"messages": [{"role": "user", "text": "x"}]})] * 2, "chats line 1: a message is"),
    ([json.dumps({"messages": LINES[0]})] * 2 + [json.dumps({"messages": LINES[0] * 4})],
     "chats line 3 has 92 tokens; expected at most 65, one more than context_length; raise context_length, or"),
])  # fmt: skip
def test_bad_files_are_refused_with_the_line(lines, message, base, tmp_path):
    (tmp_path / "chats").write_text("\n".join(lines) + "\n")
    with raises_line(DataError, message):
        tune(base, tmp_path / "run", tmp_path / "chats")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("truncation", ["drop", "cut"])
def test_long_conversations_are_dropped_or_cut_on_request(truncation, base, tmp_path, capsys):
    chats = [LINES[0], LINES[0] * 4, LINES[1]]
    tune(base, tmp_path / "run", chats, truncation=truncation, progress=True)
    counts = RunDirectory(tmp_path / "run").read_config()["counts"]
    assert counts["train_conversations"] == {"drop": 1, "cut": 2}[truncation]
    out = capsys.readouterr().out
    assert "training: " in out
    assert ("dropped: 1 conversation longer than context_length" in out) == (truncation == "drop")


def test_arguments_that_conflict(base, tmp_path):
    out = tmp_path / "run"
    for arguments, message in [
        ({}, "neither text nor chats is given; expected one"),
        ({"text": ["a"], "chats": LINES}, "text and chats are both given; expected one"),
        ({"valid_chats": LINES}, "neither text nor chats is given"),
        ({"text": ["a"], "valid_chats": LINES}, "valid_chats is given without chats; expected both, or neither"),
        ({"chats": LINES, "valid_text": ["a"]}, "valid_text is given without text"),
        ({"chats": LINES, "valid_chats": LINES, "valid_share": 0.2}, "valid_chats and valid_share are both given"),
        ({"chats": LINES}, "chats are given without init; expected a model to start from, with a chat template"),
        ({"chats": LINES, "init": base, "d_model": 8}, "d_model .* cannot be changed"),
        ({"chats": LINES, "init": base, "max_length": 8}, "unknown key 'max_length' in the options"),
        ({"chats": LINES, "task": "language_modeling"}, "task is 'language_modeling' .*; expected chat"),
    ]:
        with raises_line(ConfigError, message):
            xf.train_lm(out=out, **arguments)
    for chats, message in [
        (LINES[0], "chats line 1 has the keys role, content; expected"),
        ([3], "chats has an int at index 0; expected"),
        ({"messages": LINES[0]}, "chats is a dict; expected"),
        ([[{"role": "user", "content": {1}}]], "a conversation has a value that is not JSON"),
        ([], "chats is empty"),
        (str(tmp_path / "none"), "cannot read .*none"),
    ]:
        with raises_line(DataError, message):
            xf.train_lm(chats=chats, init=base, out=out)
    plain = write_model(tmp_path / "plain")
    (plain / "tokenizer_config.json").write_text("{}")
    with raises_line(ConfigError, ".*plain has no chat template; expected a model that answers chats"):
        xf.train_lm(chats=LINES, init=plain, out=out)
    assert not out.exists()


def test_outputs_for_loggers(base, tmp_path):
    (tmp_path / "chats").write_text("".join(json.dumps({"messages": each}) + "\n" for each in (LINES[0], CHATS[1])))
    recipe = make_recipe(None, {"init": base, **OPTIONS, "context_length": 90}, ["chat"])
    task = ChatTask.prepare(recipe, np, {"chats": tmp_path / "chats"}, tmp_path)
    (sample,) = task.samples(task.model)
    assert sample["prompt"] == "system\none and two\nuser\nwhat is one and four ?\nassistant\n"
    assert sample["reference"] == CHATS[1][2]["content"]
    assert isinstance(sample["output"], str)
    assert next(iter(task.attention(task.model).maps.values())).weights[0].shape[-1] == 30
