"""Mixed training, generation and serving for a minute, or an hour: outputs, memory, threads and files stay the same."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xformer as xf
from tests.stress.test_files import make_run
from xformer import LanguageModel, LanguageModelConfig, Translator
from xformer.text import read_lines

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
NUM_THREADS, NUM_CLIENTS = 8, 64
MAX_NEW_TOKENS = 12
TIMEOUT = 600  # seconds of a request, while other processes take most of the processor
GROWTH = 1.05, 16 << 20  # of the memory: factor, and bytes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("soak")
    make_run(path)
    return path / "run"


@pytest.fixture(scope="module")
def texts(run: Path) -> list[str]:
    return read_lines(run.parent / "train.source")[:60]


def resources(pid: int) -> dict[str, int]:
    """Return the resident bytes, threads and open files of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"memory": int(status["VmRSS"].split()[0]) << 10, "threads": int(status["Threads"]), "files": files}


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


class Soak:
    """Threads that work until the time is over; the first error ends all of them."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.counts: dict[str, int] = {}
        self.errors: list[BaseException] = []
        self.lock = threading.Lock()

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.deadline and not self.errors

    def repeat(self, name: str, work: Any, number: int) -> None:
        draw = random.Random(number)
        try:
            while self.goes_on:
                work(draw)
                with self.lock:
                    self.counts[name] = self.counts.get(name, 0) + 1
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.errors.append(error)


def train(draw: random.Random, expected: dict[int, float]) -> None:
    """Train a small model; the same seed ends with the same loss."""
    seed = draw.randrange(3)
    config = xf.TransformerConfig(source_vocab_size=20, target_vocab_size=20, d_model=16, num_heads=2, d_ff=32,
                                  num_encoder_layers=1, num_decoder_layers=1)  # fmt: skip
    model, rows = xf.Transformer(config, seed=seed), np.random.default_rng(seed)
    pairs = [(rows.integers(3, 20, (4, 6)), rows.integers(3, 20, (4, 5))) for _ in range(4)]

    def loss(model: Any, batch: Any, rng: Any) -> Any:
        logits = model(batch[0], batch[1][:, :-1], rng=rng)
        xp = xf.array_namespace(logits)
        return xp.sum(xf.cross_entropy(logits, batch[1][:, 1:]))

    _, history = xf.fit(
        model, loss, pairs, optimizer=xf.Adam(), learning_rate=1e-3, steps=12, seed=seed,
        num_tokens=lambda batch: batch[1].size,
    )  # fmt: skip
    assert expected.setdefault(seed, history[-1].loss) == history[-1].loss


def observe(draw: random.Random, model: Any, expected: dict[float, bytes]) -> None:
    """Change and record activations of a model that other threads use; the same change has the same bits."""
    factor = draw.choice((0.0, 0.5, 2.0))
    change = {"decoder.0.cross_attention.output": lambda x: factor * x}
    with xf.intervene(model, change), xf.record(model, "*residual_out") as found:
        model([[3, 4, 5]], [[1, 6, 7, 8]])
    assert expected.setdefault(factor, (bits := b"".join(x.tobytes() for x in found.values()))) == bits


def explore(port: int, draw: random.Random, expected: dict[str, Any]) -> None:
    """Ask for the probabilities and layers of a model with parts switched off; the same request has the same answer."""
    ablations = [{"kind": draw.choice(("encoder", "decoder", "cross")), "layer": 0}] * draw.randrange(2)
    body = {"text": "one two three", "output_ids": [5, 6, 7], "lens": draw.random() < 0.5, "ablations": ablations}
    status, answer = request(port, body, "/layers")
    assert status in (200, 429), answer
    if status == 200:
        assert expected.setdefault(json.dumps(body), answer) == answer


def request(port: int, body: Any, path: str = "/translate") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, content, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def misbehave(port: int, draw: random.Random) -> None:
    """Send half a request, an oversized or malformed one, or leave before the answer."""
    kind = draw.randrange(4)
    if kind == 0:
        assert request(port, b"{" * draw.randrange(1, 200))[0] in (400, 429)
    elif kind == 1:
        with contextlib.suppress(ConnectionError):  # the server need not read the rest
            assert request(port, b'{"text": "' + b"a" * 1_200_000 + b'"}')[0] in (413, 429)
    else:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as connection:
            body = json.dumps({"text": "one two three", "max_new_tokens": 200}).encode()
            headers = f"Host: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            content = f"POST /translate HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body
            for byte in content if kind == 2 else [content]:
                if kind == 2 and draw.random() < 0.01:
                    break  # in the middle of the request
                connection.sendall(bytes([byte]) if kind == 2 else byte)
            time.sleep(0.05 * draw.random())


def test_mixed_use_keeps_outputs_memory_threads_and_files(run, texts, scale, capsys):
    seconds = 60.0 if scale == 1 else 3600.0
    translator = Translator.from_pretrained(run)
    groups = [texts[start : start + size] for start, size in zip(range(0, 50, 5), (1, 2, 3, 4, 5) * 2, strict=True)]
    options = [{}, {"num_beams": 3}, {"do_sample": True, "seed": 5, "top_k": 4}]
    cases = [(group, {**each, "max_new_tokens": MAX_NEW_TOKENS}) for group in groups for each in options]
    expected = [translator(group, **each) for group, each in cases]
    alone = {text: translator([text], max_new_tokens=MAX_NEW_TOKENS)[0] for text in texts}
    small = {"vocab_size": 99, "d_model": 16, "num_heads": 2, "d_ff": 32}
    models = [LanguageModel(LanguageModelConfig(num_layers=number, **small), seed=1) for number in (2, 1)]
    prompts = [[[5 + index] * 3, [7, 8, 7, 8, 9 + index]] for index in range(10)]
    assisted = [[row[0].tokens for row in xf.generate(models[0], rows, max_new_tokens=20)] for rows in prompts]
    losses: dict[int, float] = {}
    observed: dict[float, bytes] = {}
    explored: dict[str, Any] = {}

    def draft(draw: random.Random) -> None:
        index = draw.randrange(len(prompts))
        results = xf.generate(models[0], prompts[index], max_new_tokens=20, draft_model=models[1])
        assert [row[0].tokens for row in results] == assisted[index]

    def translate(draw: random.Random) -> None:
        index = draw.randrange(len(cases))
        group, each = cases[index]
        assert translator(group, **each) == expected[index]

    different = []

    def ask(draw: random.Random) -> None:
        text = draw.choice(texts)
        status, answer = request(port, {"text": text, "max_new_tokens": MAX_NEW_TOKENS})
        assert status in (200, 429), answer
        if status == 429:  # as the server has enough to do
            time.sleep(0.1)
        if status == 200 and answer["outputs"][0][0]["text"] != alone[text]:
            different.append(text)

    command = [sys.executable, "-m", "xformer", "serve", "--model", run, "--port", "0", "--max-batch", "8"]
    command += ["--timeout", str(TIMEOUT)]
    server = subprocess.Popen(list(map(str, command)), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server.stderr if "http://" in line)
        port = int(line.split("http://")[1].split(":")[1].split("/")[0].split()[0])
        soak, samples = Soak(seconds), []
        jobs = [("translate", translate)] * NUM_THREADS + [("train", lambda draw: train(draw, losses))]
        jobs += [("observe", lambda draw: observe(draw, translator.model, observed)), ("draft", draft)]
        jobs += [("explore", lambda draw: explore(port, draw, explored))] * 2
        jobs += [("request", ask)] * NUM_CLIENTS + [("misuse", lambda draw: misbehave(port, draw))] * 4
        with ThreadPoolExecutor(len(jobs)) as pool:
            for number, (name, work) in enumerate(jobs):
                pool.submit(soak.repeat, name, work, number)
            while soak.goes_on:
                time.sleep(seconds / 60)
                gc.collect()
                samples.append((resources(os.getpid()), resources(server.pid)))
        if soak.errors:
            raise soak.errors[0]
        with capsys.disabled():
            print(f"\n{seconds:.0f} s: {soak.counts}, {len(different)} answers differ")
            for index, name in enumerate(("this process", "server")):
                for part, quarter in (("second", samples[15:30]), ("last", samples[-15:])):
                    values = {key: statistics.median(each[index][key] for each in quarter) for key in quarter[0][index]}
                    print(f"  {name}, {part} quarter: {values}")
        for index in range(2):
            early, late = ([each[index] for each in part] for part in (samples[15:30], samples[-15:]))
            before, after = (statistics.median(each["memory"] for each in part) for part in (early, late))
            assert after <= GROWTH[0] * before + GROWTH[1]
            assert max(each["threads"] for each in late) <= max(each["threads"] for each in early) + 2
            assert max(each["files"] for each in late) <= max(each["files"] for each in early) + NUM_CLIENTS
        assert not different
        assert set(soak.counts) == {name for name, _ in jobs}
        assert request(port, {"text": texts[0], "max_new_tokens": MAX_NEW_TOKENS})[0] == 200
        idle = resources(server.pid)
        assert idle["files"] < 30
        assert children(server.pid) == []
    finally:
        server.terminate()
        server.communicate(timeout=60)
