"""Compare a public language model in xformer and in a peer: loading, prompt processing and decoding.

    python bench/checkpoints.py DIR [--threads 2] [--python PYTHON] [--json FILE]
    python bench/checkpoints.py MODEL.gguf --peer llama.cpp [--python PYTHON] [--quantize int8_inputs]

DIR has the model in the Hugging Face format, e.g. SmolLM2-135M; the peer is transformers on torch, in float32. Of a
GGUF file, both xformer and llama.cpp multiply the quantized blocks. PYTHON is an interpreter with the peer (torch and
transformers, or llama-cpp-python); default: the one that runs the script. Each library runs in its own process;
measurements alternate. Of a prompt, each computes the logits of the last token. The table shows the medians and the
median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

PROMPT, NEW_TOKENS = 32, 64
Cases = dict[str, tuple[int, int]]
# {case: (number of rounds, batch size, or 0 for the forward pass of a prompt)}
CASES: Cases = {"decode, batch 1": (5, 1), "decode, batch 8": (4, 8), "prompt of 512 tokens": (5, 0)}


def xformer_functions(path: str):
    import xformer as xf

    model = xf.load_pretrained(path, pack=True, quantize=os.environ.get("QUANTIZE"))

    def decode(prompts):
        xf.generate(model, prompts.tolist(), max_new_tokens=NEW_TOKENS, special_tokens=False)

    return lambda ids: xf.generate(model, ids.tolist(), max_new_tokens=1, special_tokens=False), decode


def transformers_functions(directory: str):
    import torch
    import transformers

    torch.set_grad_enabled(False)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def decode(prompts):
        ids = torch.tensor(prompts)
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)

    return lambda ids: model(torch.tensor(ids), logits_to_keep=1), decode


def llama_functions(path: str):
    import itertools

    import llama_cpp

    threads = int(os.environ["OMP_NUM_THREADS"])
    model = llama_cpp.Llama(path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)

    def forward(ids):
        model.reset()
        model.eval(ids[0].tolist())

    def decode(prompts):
        model.reset()
        for _ in itertools.islice(model.generate(prompts[0].tolist(), temp=0.0), NEW_TOKENS):
            pass

    return forward, decode


FUNCTIONS = {"xformer": xformer_functions, "transformers": transformers_functions, "llama.cpp": llama_functions}


def worker(library: str, path: str, cases: Cases) -> None:
    """Load the model; then, for each batch size read from standard input (0: a prompt), print tokens per second."""
    start = time.perf_counter()
    forward, decode = FUNCTIONS[library](path)
    loading = time.perf_counter() - start
    tokens = np.random.default_rng(0).integers(100, 20_000, (8, 512))

    def measure(batch: int) -> float:
        start = time.perf_counter()
        if batch:
            decode(tokens[:batch, :PROMPT])
        else:
            forward(tokens[:1])
        return (batch * NEW_TOKENS or tokens.shape[1]) / (time.perf_counter() - start)

    for _, batch in cases.values():
        measure(batch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB, after use: loaded files may be mapped
    print(json.dumps({"loading": loading, "peak": peak}), flush=True)
    for line in sys.stdin:
        print(measure(int(line)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="DIR")
    parser.add_argument("--peer", choices=[name for name in FUNCTIONS if name != "xformer"], default="transformers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantize", choices=["int8", "bfloat16", "int8_inputs"])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = CASES
    if arguments.peer == "llama.cpp":  # its Python interface decodes a single sequence
        cases = {name: case for name, case in CASES.items() if case[1] <= 1}
    if arguments.worker:
        worker(arguments.worker, str(arguments.path), cases)
        return
    threads = str(arguments.threads)
    environment = os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    environment |= {"QUANTIZE": arguments.quantize} if arguments.quantize else {}
    processes, startup = {}, {}
    for library, python in (("xformer", sys.executable), (arguments.peer, arguments.python)):
        processes[library] = subprocess.Popen(
            [python, __file__, str(arguments.path), "--peer", arguments.peer, "--worker", library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        startup[library] = json.loads(processes[library].stdout.readline())
    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads, {arguments.path.name}\n")
    print(f"{'':24}{'xformer':>14}{arguments.peer:>14}{'ratio':>8}")
    for name, unit in (("loading", "s"), ("peak", "MiB")):
        ours, theirs = (startup[library][name] for library in processes)
        print(f"{name:24}{f'{ours:.1f} {unit}':>14}{f'{theirs:.1f} {unit}':>14}{theirs / ours:8.2f}")
    results: dict[str, object] = {"startup": startup}
    for case, (rounds, batch) in cases.items():
        speeds: dict[str, list[float]] = {library: [] for library in processes}
        for _ in range(rounds):
            for library, process in processes.items():
                process.stdin.write(f"{batch}\n")
                process.stdin.flush()
                speeds[library].append(float(process.stdout.readline()))
        ratio = statistics.median(a / b for a, b in zip(*speeds.values(), strict=True))
        ours, theirs = (f"{statistics.median(values):.1f} tok/s" for values in speeds.values())
        print(f"{case:24}{ours:>14}{theirs:>14}{ratio:8.2f}")
        results[case] = speeds
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
