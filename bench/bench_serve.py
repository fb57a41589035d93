"""Load of `xformer serve`: requests per second and latency with 1, 8 and 64 clients, against a plain server.

    python bench/bench_serve.py                         # a random translator of the size of the Multi30k recipe
    python bench/bench_serve.py --model RUN --texts FILE --seconds 30 --output result.json

Needs the extras cli and serve. Every client sends its next request when it has the answer to the last one. The plain
server is Python's http.server, one request at a time, with the same pipeline and settings. Each server is a process of
its own; the clients are threads of this one. Every answer is compared with that of the pipeline for the same text:
`lost` counts requests without an answer, `different` answers with another text. A text whose best tokens are nearly
equally probable may differ by rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import http.server
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xformer.benchmarks.machine import describe_machine
from xformer.data.demo_tasks import numbers_task
from xformer.pipelines import Translator

SIZES = {"d_model": 256, "num_heads": 8, "d_ff": 512, "num_encoder_layers": 3, "num_decoder_layers": 3}
MAX_NEW_TOKENS = 24
CLIENTS = (1, 8, 64)
WARM_UP = 3.0  # seconds


def make_run(directory: Path, sizes: dict[str, int] = SIZES) -> list[str]:
    """Write a run with a random model, which generates up to the maximum length, and return texts for it."""
    from xformer.families.run_directory import RunDirectory
    from xformer.models import Transformer, TransformerConfig
    from xformer.tokenizers import Tokenizer

    task = numbers_task(num_train=2000, num_valid=1, num_test=500, largest=999_999)
    tokenizer = Tokenizer.train([*task.train.source, *task.train.target], 5000)
    vocab = {"source_vocab_size": tokenizer.vocab_size, "target_vocab_size": tokenizer.vocab_size}
    run = RunDirectory(directory)
    run.start({}, {"joint": tokenizer})
    Transformer(TransformerConfig(**vocab, **sizes)).save(run.model)
    return list(task.test.source)


def serve_plain(directory: Path, connection: Any) -> None:
    """Serve a translator with http.server, one request at a time."""
    translator = Translator.from_pretrained(directory)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # a connection that stays open would keep the others out

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            ((output,),) = translator.outputs([body["text"]], max_new_tokens=body["max_new_tokens"])
            answer = json.dumps({"outputs": [[{"text": output.text}]]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(http.server.HTTPServer):
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Handler)
    connection.send(server.server_port)
    server.serve_forever()


def serve_xformer(directory: Path, connection: Any) -> None:
    """Serve a translator with xformer."""
    import uvicorn

    from xformer.cli.serve import listen
    from xformer.serve.app import create_app
    from xformer.serve.models import ServedModel

    model = ServedModel("model", Translator.from_pretrained(directory))
    listener = listen("127.0.0.1", 0)
    listener.listen(256)
    connection.send(listener.getsockname()[1])
    config = uvicorn.Config(create_app([model]), log_level="error", access_log=False, ws="none")
    uvicorn.Server(config).run(sockets=[listener])


@contextlib.contextmanager
def server(serve: Any, directory: Path) -> Iterator[int]:
    """Run a server in a process and yield its port."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(directory, sending), daemon=True)
    process.start()
    try:
        yield receiving.recv()
    finally:
        process.terminate()
        process.join()


def translate(port: int, text: str, connection: http.client.HTTPConnection | None) -> tuple[str, Any]:
    """Send a request and return the translation, and the connection if it stays open."""
    if connection is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"text": text, "max_new_tokens": MAX_NEW_TOKENS})
    connection.request("POST", "/translate", body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.will_close:
        connection.close()
    return answer["outputs"][0][0]["text"], None if response.will_close else connection


def load(port: int, texts: list[str], expected: list[str], num_clients: int, seconds: float) -> dict[str, Any]:
    """Send requests from several clients for some seconds and return the figures."""
    latencies: list[list[float]] = [[] for _ in range(num_clients)]
    counts = {"lost": 0, "different": 0}
    lock = threading.Lock()
    start = time.perf_counter() + WARM_UP

    def client(number: int) -> None:
        connection, index = None, number
        while (begin := time.perf_counter()) < start + seconds:
            try:
                text, connection = translate(port, texts[index % len(texts)], connection)
                result = "" if text == expected[index % len(texts)] else "different"
            except (OSError, http.client.HTTPException, KeyError):
                connection, result = None, "lost"
            if result:
                with lock:
                    counts[result] += 1
            if result != "lost" and begin >= start:
                latencies[number].append(time.perf_counter() - begin)
            index += num_clients

    threads = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    values = sorted(latency for each in latencies for latency in each)
    quantiles = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {
        "clients": num_clients,
        "requests": len(values),
        "requests_per_second": len(values) / elapsed,
        **{f"p{percent}_ms": 1e3 * quantiles[percent - 1] for percent in (50, 95, 99) if quantiles},
        **counts,
    }


def main() -> None:
    """Measure both servers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help="run of a translator")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="source texts, with --model")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each measurement, after a warm-up")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.texts is None):
        parser.error("expected both --model and --texts, or neither")
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.model or Path(temporary) / "run"
        texts = make_run(directory) if arguments.model is None else arguments.texts.read_text("utf-8").splitlines()
        texts = [text for text in texts if text.strip()][:500]
        outputs = Translator.from_pretrained(directory).outputs(texts, max_new_tokens=MAX_NEW_TOKENS)
        expected = [each[0].text for each in outputs]
        columns = [f"{name:>8}" for name in ("p50 ms", "p95 ms", "p99 ms")]
        print(f"{'server':<8} {'clients':>7} {'requests/s':>10}", *columns, "lost different")
        for name, serve in (("plain", serve_plain), ("xformer", serve_xformer)):
            with server(serve, directory) as port:
                for num_clients in arguments.clients:
                    result = {"server": name, **load(port, texts, expected, num_clients, arguments.seconds)}
                    results.append(result)
                    times = " ".join(f"{result.get(f'p{percent}_ms', 0.0):8.1f}" for percent in (50, 95, 99))
                    print(
                        f"{name:<8} {num_clients:>7} {result['requests_per_second']:>10.1f} {times} "
                        f"{result['lost']:>4} {result['different']:>9}",
                        flush=True,
                    )
    if arguments.output is not None:
        report = {"machine": describe_machine(), "threads": os.environ.get("OMP_NUM_THREADS"), "results": results}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
