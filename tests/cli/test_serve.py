"""`xformer serve`: its options, and a server in a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.cli.conftest import events, read_log
from xformer.cli.serve import _names, listen

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.mark.parametrize(("options", "message"), [
    (["--host", "0.0.0.0", "--token", "short"], "token has 5 characters; expected at least 8"),
    (["--port", "70000"], "--port is 70000; expected a number in [0, 65535]"),
    (["--host", "256.0.0.1", "--token", "long-enough"], "cannot listen on 256.0.0.1 port 8000"),
    (["--draft-model", "nowhere"], "nowhere does not exist; expected the directory of a run"),
    (["--draft-model", "."], "--draft-model is given without a model that continues texts; expected a language mod"),
])  # fmt: skip
def test_invalid_options_are_refused(xformer, trained, options, message):
    done = xformer("serve", "--model", trained, *options)
    assert done.code == 2
    assert message in done.err


def test_the_id_of_a_model_is_the_last_part_of_its_path(tmp_path, monkeypatch):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1f2e").touch()
    (tmp_path / "model.q8.gguf").symlink_to(tmp_path / "blobs" / "1f2e")
    (tmp_path / "latest").symlink_to(tmp_path / "blobs")
    paths = [tmp_path / "model.q8.gguf", tmp_path / "latest", tmp_path / "y" / "run-2", tmp_path / "y" / "run"]
    assert _names(paths) == ["model.q8", "latest", "run-2", "run"]
    monkeypatch.chdir(tmp_path)
    assert _names([Path("latest/"), Path()]) == ["latest", tmp_path.name]
    assert _names([Path("blobs/..")]) == [tmp_path.name]
    assert _names([tmp_path / "a" / "run", tmp_path / "b" / "run"], ["a", "Org/B"]) == ["a", "Org/B"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "{0}/."], "2 models have the id '{1}'; expected different ids: pass --name for each one"),
        (["--model", "{0}", "--name", "a", "--name", "a"], "2 models have the id 'a'; expected different ids"),
        (["--model", "{0}", "--name", "a"], "--name is given 1 times for 2 models; expected one for each --model"),
        (["--name", ""], "{0} has no id; expected one, which --name sets"),
    ],
)
def test_ids_that_name_no_model_are_refused(xformer, trained, options, message):
    done = xformer("serve", "--model", trained, *(option.format(trained) for option in options))
    assert done.code == 2
    assert message.format(trained, trained.name) in done.err


def test_answers_are_not_delayed():
    # asyncio turns off Nagle's algorithm only for sockets with an explicit protocol.
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_server_translates_shows_its_curves_and_stops(start_process, trained):
    process = start_process("serve", "--model", trained, "--name", "team/first", "--port", "0")
    address = None
    while address is None and (line := process.stderr.readline()):
        address = re.search(rb"open http://127\.0\.0\.1:(\d+)", line)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=60)) as connection:
        body = json.dumps({"model": "team/first", "text": "zwei", "max_new_tokens": 3})
        connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
        assert len(json.load(connection.getresponse())["outputs"]) == 1
        connection.request("GET", "/runs/team%2Ffirst")
        curves = json.load(connection.getresponse())
    log = read_log(trained)
    assert curves["steps"]["loss"] == [event["loss"] for event in log if event["event"] == "step"]
    assert [each["step"] for each in curves["validations"]] == [e["step"] for e in events(trained, "validation")]
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert b"Traceback" not in errors
    assert process.returncode in (0, -signal.SIGTERM)
