"""How far the logits of a language model move with batch, cache, threads and processor, in xformer and in others.

    python bench/reproducible_peers.py MODEL.gguf [--llama LIBRARY] [--out FILE.md]

MODEL is a Llama model such as SmolLM2-135M-Instruct.Q4_1.gguf. All libraries read the same weights: float32 from a
Hugging Face directory that this script writes, or the blocks of the file. LIBRARY is a shared library with the C
functions of llama.cpp for x86-64, such as libllama.so of llama-cpp-python. Each column is the largest difference of two
arrays of logits that are equal in exact arithmetic:

- batch: a full pass over 8 texts of one length, and over each of them alone;
- padding: the same for texts of different lengths;
- cache: a full pass over a text, and its tokens one by one with a cache;
- steps: tokens one by one, of 8 texts and of one;
- threads: the full pass with 1 and with 2 threads;
- AVX2: the full pass with the instructions of this processor, and with those of AVX2 only.

Every computation is a process of its own. An empty cell was not measured: the library has no such setting.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 8
TEXT = Path(__file__).parents[1] / "CONTRIBUTING.md"
REPRODUCIBLE = {"XFORMER_REPRODUCIBLE": "1"}
FLOAT32, BLOCKS = "float32", "blocks"
# {name in the table: (function of this file, weights, environment)}
ROWS: dict[str, tuple[str, str, dict[str, str]]] = {
    "transformers on torch": ("transformers", FLOAT32, {}),
    "the same, `use_deterministic_algorithms`": ("transformers", FLOAT32, {"DETERMINISTIC": "1"}),
    "xformer on torch": ("xformer", FLOAT32, {"LIBRARY": "torch"}),
    "xformer": ("xformer", FLOAT32, {}),
    "xformer, reproducible": ("xformer", FLOAT32, REPRODUCIBLE),
    "llama.cpp, Q4_1": ("llama.cpp", BLOCKS, {}),
    "xformer, Q4_1": ("xformer", BLOCKS, {}),
    "xformer, Q4_1, reproducible": ("xformer", BLOCKS, REPRODUCIBLE),
}
PASSIVE = {"OMP_WAIT_POLICY": "passive"}  # for busy machines
AVX2 = {
    "XFORMER_NATIVE": "avx2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
COLUMNS = {
    "batch": "8 texts, each alone",
    "padding": "8 padded texts, each alone",
    "cache": "full pass, steps with a cache",
    "steps": "steps of 8 texts, of one",
    "threads": "2 threads, 1 thread",
    "AVX2": "AVX-512, AVX2",
}
# Functions of token ids (rows, length): the logits of a full pass over so many tokens of each row, and those of all
# tokens, read one by one; and the versions.
Functions = tuple[Callable[[Any, list[int]], Any], Callable[[Any], Any], str]


def xformer_functions(path: str) -> Functions:
    import xformer as xf
    from xformer.backends import from_host, resolve, to_host

    xp = os.environ.get("LIBRARY", "numpy")
    model: Any = xf.load_pretrained(path, xp=xp, pack=path.endswith(".gguf"))

    def forward(ids: Any, lengths: list[int]) -> Any:
        mask = np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]
        return to_host(model(from_host(resolve(xp), ids), mask=from_host(resolve(xp), mask[:, None, None, :])))

    def one_by_one(ids: Any) -> Any:
        cache = model.init_cache(len(ids))
        steps = [from_host(resolve(xp), ids[:, i : i + 1]) for i in range(ids.shape[1])]
        return np.stack([to_host(model.decode_step(step, cache)) for step in steps], axis=1)

    return forward, one_by_one, f"{xp} {importlib.metadata.version(xp)}"


def transformers_functions(directory: str) -> Functions:
    import torch
    import transformers

    torch.use_deterministic_algorithms("DETERMINISTIC" in os.environ)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def forward(ids: Any, lengths: list[int]) -> Any:
        ids = torch.from_numpy(ids[:, : max(lengths)])
        mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
        return model(ids, attention_mask=mask.to(torch.int64)).logits.numpy()

    @torch.no_grad()
    def one_by_one(ids: Any) -> Any:
        cache = transformers.DynamicCache()
        steps = torch.from_numpy(ids).split(1, dim=1)
        return torch.cat([model(step, past_key_values=cache, use_cache=True).logits for step in steps], dim=1).numpy()

    return forward, one_by_one, f"transformers {transformers.__version__}, torch {torch.__version__}"


class Settings(ctypes.Structure):
    """Settings of a model or a context: the first fields of a context, and space for all others, which stay default."""

    _fields_ = [*((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max"))]
    _fields_ += [("others", ctypes.c_char * 1008)]


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def llama_functions(path: str) -> Functions:
    library = ctypes.CDLL(os.environ["LIBRARY"])
    for name in ("llama_model_default_params", "llama_context_default_params"):
        getattr(library, name).restype = Settings
    for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_get_memory", "llama_model_get_vocab"):
        getattr(library, name).restype = ctypes.c_void_p
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Settings]
    library.llama_init_from_model.argtypes = [ctypes.c_void_p, Settings]
    library.llama_get_memory.argtypes = library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    library.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
    library.llama_memory_clear.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    library.llama_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
    library.llama_batch_init.restype = Batch
    library.llama_decode.argtypes = [ctypes.c_void_p, Batch]
    library.llama_get_logits.argtypes = [ctypes.c_void_p]
    library.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
    library.llama_print_system_info.restype = ctypes.c_char_p
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    library.llama_log_set(silent, None)
    library.llama_backend_init()
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    settings = library.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = BATCH * 256, BATCH
    context = library.llama_init_from_model(model, settings)
    threads = int(os.environ["OMP_NUM_THREADS"])
    library.llama_set_n_threads(context, threads, threads)
    vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    if adapter := os.environ.get("ADAPTER"):
        library.llama_adapter_lora_init.restype = ctypes.c_void_p
        library.llama_adapter_lora_init.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        library.llama_set_adapters_lora.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        loaded = (ctypes.c_void_p * 1)(library.llama_adapter_lora_init(model, adapter.encode()))
        assert loaded[0]
        assert library.llama_set_adapters_lora(context, loaded, 1, (ctypes.c_float * 1)(1.0)) == 0
    batch = library.llama_batch_init(settings.n_batch, 0, 1)

    def decode(ids: Any, lengths: list[int], position: int = 0) -> Any:
        tokens = [(row, i) for row, length in enumerate(lengths) for i in range(length)]
        batch.n_tokens = len(tokens)
        for i, (row, column) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = ids[row, column], position + column, 1, 1
            batch.seq_id[i][0] = row
        assert library.llama_decode(context, batch) == 0
        logits = np.zeros((*ids.shape, vocab_size), np.float32)
        logits[*zip(*tokens, strict=True)] = np.ctypeslib.as_array(
            library.llama_get_logits(context), (len(tokens), vocab_size)
        )
        return logits

    def forward(ids: Any, lengths: list[int]) -> Any:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        return decode(ids, lengths)

    def one_by_one(ids: Any) -> Any:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        ones = [1] * len(ids)
        return np.concatenate([decode(ids[:, i : i + 1], ones, i) for i in range(ids.shape[1])], axis=1)

    library.ggml_version.restype = ctypes.c_char_p
    features = [
        part.split(" = ")[0].split()[-1]
        for part in library.llama_print_system_info().decode().split("|")
        if "=" in part
    ]
    forward.keep = silent  # the library calls it
    forward.model = model
    return forward, one_by_one, f"llama.cpp with ggml {library.ggml_version().decode()} ({', '.join(features)})"


FUNCTIONS = {"xformer": xformer_functions, "transformers": transformers_functions, "llama.cpp": llama_functions}


def worker(name: str, path: str, folder: Path, logits_file: str, differences: bool) -> None:
    """Write the logits of the batch to a file; print the version and the differences within this process."""
    forward, one_by_one, version = FUNCTIONS[name](path)
    ids = np.load(folder / "ids.npy")
    rows, length = ids.shape
    whole = [length] * rows
    logits = forward(ids, whole)
    np.save(folder / logits_file, logits)
    result: dict[str, Any] = {"version": version, "largest": float(abs(logits).max())}
    if differences:
        alone = [forward(ids[i : i + 1], [length])[0] for i in range(rows)]
        result["batch"] = largest(logits, np.stack(alone))
        lengths = [length - 2 * i for i in range(rows)]
        padded, single = forward(ids, lengths), [forward(ids[i : i + 1], [n])[0, :n] for i, n in enumerate(lengths)]
        result["padding"] = max(largest(padded[i, :n], single[i]) for i, n in enumerate(lengths))
        steps = one_by_one(ids[:1])[0]
        result["cache"] = largest(alone[0], steps)
        result["steps"] = largest(one_by_one(ids)[0], steps)
    print(json.dumps(result))


def largest(a: Any, b: Any) -> float:
    """Return the largest difference; 0 if the bits are equal."""
    if a.tobytes() == b.tobytes():
        return 0.0
    return float(abs(a - b).max()) or sys.float_info.min  # zeros of two signs


def run(row: str, paths: dict[str, Path], folder: Path, llama: str | None) -> dict[str, Any]:
    """Return the differences of a row of the table."""
    name, weights, environment = ROWS[row]
    if name == "llama.cpp":
        environment = {"LIBRARY": str(llama)}

    def start(threads: int, **changes: str) -> tuple[dict[str, Any], Any]:
        file = f"{threads}-{len(changes)}.npy"
        names = ("XFORMER_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        done = subprocess.run(
            [
                sys.executable,
                __file__,
                str(paths[weights]),
                "--worker",
                name,
                str(folder),
                file,
                str(threads == 2 and not changes),
            ],
            env={**PASSIVE, **os.environ, **dict.fromkeys(names, str(threads)), **environment, **changes},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1]), np.load(folder / file)

    result, logits = start(2)
    result["threads"] = largest(logits, start(1)[1])
    if name != "llama.cpp":
        result["AVX2"] = largest(logits, start(2, **AVX2)[1])
    return result


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return a table in Markdown."""
    head = "| | " + " | ".join(COLUMNS.values()) + " |\n" + "|---" * (1 + len(COLUMNS)) + "|\n"
    lines = []
    for row, result in results.items():
        cells = [f"{result[name]:.1e}" if result.get(name) else "0" if name in result else "" for name in COLUMNS]
        lines.append(f"| {row} | " + " | ".join(cells) + " |\n")
    return head + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--llama", metavar="LIBRARY")
    parser.add_argument("--length", type=int, default=32, help="tokens of the longest texts (default 32)")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--out", type=Path, metavar="FILE.md")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, folder, file, differences = arguments.worker
        worker(name, str(arguments.path), Path(folder), file, differences == "True")
        return
    import xformer as xf
    from xformer.benchmarks.machine import describe_machine
    from xformer.benchmarks.report import machine_line

    with tempfile.TemporaryDirectory() as folder:
        paths = {BLOCKS: arguments.path, FLOAT32: Path(folder) / "float32"}
        xf.save_pretrained(xf.load_pretrained(arguments.path), paths[FLOAT32])
        ids = xf.tokenizers.load_tokenizer(arguments.path).encode(TEXT.read_text(encoding="utf-8"))
        np.save(Path(folder) / "ids.npy", np.asarray(ids[: BATCH * arguments.length]).reshape(BATCH, -1))
        rows = [row for row in arguments.rows if arguments.llama or ROWS[row][0] != "llama.cpp"]
        results = {}
        for row in rows:
            results[row] = run(row, paths, Path(folder), arguments.llama)
            print(row, results[row], flush=True)
    machine = machine_line({"machine": {**describe_machine(2), "load": None}, "gemm_flops_per_second": None})
    versions = "; ".join(dict.fromkeys(result["version"] for result in results.values()))
    size = max(result["largest"] for result in results.values())
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = (
        f"# Differences of logits, {today}\n\nMeasured on {today}: {machine}; {versions}.\n\n"
        f"    python bench/reproducible_peers.py {arguments.path.name} --llama LIBRARY --length {arguments.length}\n\n"
        f"{BATCH} texts of up to {arguments.length} tokens (from `{TEXT.name}`); logits are at most {size:.0f}. A cell "
        f"is the largest difference of two arrays of logits that are equal in exact arithmetic; 0: all bits equal.\n\n"
    )
    text += table(results)
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
