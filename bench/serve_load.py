"""GuideLLM's load of 1, 8 and 64 clients on a GGUF file: `xformer serve` against servers of llama.cpp.

    python bench/serve_load.py MODEL.gguf TOKENIZER --guidellm BIN/guidellm --llama PYTHON --xllama PYTHON

TOKENIZER is a directory with the tokenizer in Hugging Face's format (`xformer export MODEL.gguf DIR` writes one).
`--llama` is an interpreter with llama-cpp-python[server], which answers one request at a time; `--xllama` is one with
xllamacpp, whose server is llama-server with as many slots as clients. Each server is a process of its own and runs
alone. Prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

PORT = 8765
LLAMA_SERVER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.n_ctx, params.cpuparams.n_threads, params.cpuparams_batch.n_threads = 256 * params.n_parallel, 2, 2
server = xllamacpp.Server(params)
time.sleep(3600)
"""


@contextlib.contextmanager
def server(command: list[str]) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(300):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models", timeout=5).close()
                    break
                if process.poll() is not None:
                    raise SystemExit(f"{command[0]} ended with {process.returncode}")
                time.sleep(0.2)
            yield
        finally:
            process.kill()


def load(guidellm: str, tokenizer: str, clients: int, seconds: float) -> tuple[float, float, float, int]:
    """Return output tokens per second, median and 99th percentile of the time to the first token, and requests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [guidellm, "run", "--profile", f"kind=concurrent,streams={clients}", "--disable-console"]
        command += [
            "--backend",
            f"kind=openai_http,target=http://127.0.0.1:{PORT},model=model,validate_backend=false,request_format=/v1/completions",
        ]
        command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--output", f"kind=json,path={report}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"]
        command += ["--constraint", f"kind=max_duration,seconds={seconds}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        done = json.loads(report.read_text())["benchmarks"][0]["requests"]["successful"]
    if not done:
        return 0.0, float("nan"), float("nan"), 0
    first = sorted(request["time_to_first_token_ms"] for request in done)
    tokens = sum(request["output_metrics"]["text_tokens"] for request in done)
    elapsed = max(each["request_end_time"] for each in done) - min(each["request_start_time"] for each in done)
    return tokens / elapsed, first[len(first) // 2], first[min(len(first) - 1, int(len(first) * 0.99))], len(done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokenizer")
    parser.add_argument("--guidellm", default="guidellm")
    parser.add_argument("--llama")
    parser.add_argument("--xllama")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--servers", nargs="+", help="parts of the names of servers; default all")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    options = parser.parse_args()
    print("| clients | server | tokens/s | first token, median (ms) | 99th percentile | requests |")
    print("|---|---|---|---|---|---|")
    for clients in options.clients:
        servers = {"xformer": [sys.executable, "-m", "xformer", "serve", "--model", options.model, "--name", "model"]}
        servers["xformer"] += ["--port", str(PORT)]
        servers["xformer, int8_inputs"] = [*servers["xformer"], "--quantize", "int8_inputs"]
        if options.llama:
            threads = ["--n_threads", str(os.cpu_count()), "--n_ctx", "512", "--model_alias", "model"]
            threads += ["--interrupt_requests", "false"]  # a new request would end the one before
            command = [options.llama, "-m", "llama_cpp.server", "--model", options.model, "--port", str(PORT)]
            servers["llama-cpp-python"] = [*command, *threads]
        if options.xllama:
            command = [options.xllama, "-c", LLAMA_SERVER, options.model, str(PORT), str(clients)]
            servers[f"llama-server, {clients} slots"] = command
        for name, command in servers.items():
            if options.servers and not any(each in name for each in options.servers):
                continue
            with server(command):
                speed, median, late, number = load(options.guidellm, options.tokenizer, clients, options.seconds)
            print(f"| {clients} | {name} | {speed:.0f} | {median:.0f} | {late:.0f} | {number} |", flush=True)


if __name__ == "__main__":
    main()
