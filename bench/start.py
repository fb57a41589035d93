"""From the start of a process to the first token of a GGUF file, by xformer and by llama.cpp.

    python bench/start.py MODEL.gguf [--llama LIBRARY] [--rounds 7]

Each process continues a prompt by one token; they take turns. LIBRARY is a shared library with the functions of
llama.cpp, such as libllama.so of llama-cpp-python; it is called from a Python without other packages, with a context
of 512 tokens. The table has medians of processor time and of the time on the clock, and the peak of resident memory.
The first token of xformer is timed on a terminal, where it is printed at once; the others are of the whole process.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pty
import statistics
import sys
import time

PROMPT = "The capital of France is"
IDS = (504, 3575, 282, 4649, 314)  # of SmolLM2


class Settings(ctypes.Structure):
    """Settings of a model or a context: the first fields of a context, and space for all others, which stay default."""

    _fields_ = (("n_ctx", ctypes.c_uint32), ("others", ctypes.c_char * 1020))


class Batch(ctypes.Structure):
    _fields_ = (("n_tokens", ctypes.c_int32), ("pointers", ctypes.c_void_p * 6))


def llama(library_path: str, path: str) -> None:
    """Load a model, and print the id of the token after the prompt."""
    library = ctypes.CDLL(library_path)
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    library.llama_log_set(silent, None)
    for name in ("llama_model_default_params", "llama_context_default_params"):
        getattr(library, name).restype = Settings
    for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_model_get_vocab"):
        getattr(library, name).restype = ctypes.c_void_p
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Settings]
    library.llama_init_from_model.argtypes = [ctypes.c_void_p, Settings]
    library.llama_model_get_vocab.argtypes = library.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
    library.llama_batch_get_one.restype = Batch
    library.llama_decode.argtypes = [ctypes.c_void_p, Batch]
    library.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    library.llama_backend_init()
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    settings = library.llama_context_default_params()
    settings.n_ctx = 512
    context = library.llama_init_from_model(model, settings)
    library.llama_set_n_threads(ctypes.c_void_p(context), *[len(os.sched_getaffinity(0))] * 2)
    ids = (ctypes.c_int32 * len(IDS))(*IDS)
    assert library.llama_decode(context, library.llama_batch_get_one(ids, len(IDS))) == 0
    size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    logits = library.llama_get_logits_ith(context, -1)
    print(max(range(size), key=logits.__getitem__))


def measure(command: list[str]) -> tuple[float, float, float, float]:
    """Run a process on a terminal; return processor time, wall time, wall time to the first output, and peak in MiB."""
    master, slave = pty.openpty()
    start, first = time.perf_counter(), None
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, slave, 1)])
    os.close(slave)
    shown = b""
    while True:
        try:
            shown += os.read(master, 1024)
        except OSError:  # the process has closed its end
            break
        if first is None and not PROMPT.encode().startswith(shown):
            first = time.perf_counter() - start
    os.close(master)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0, command
    assert first is not None, shown
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start, first, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--llama")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    xformer = [sys.executable, "-m", "xformer", "generate", "--model", arguments.model, "--prompt", PROMPT]
    commands = {"xformer": [*xformer, "--max-new-tokens", "1"]}
    if arguments.llama:
        commands["llama.cpp"] = [sys.executable, __file__, "--child", arguments.llama, arguments.model]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as in an installed package
    results: dict[str, list[tuple[float, ...]]] = {name: [] for name in commands}
    for number in range(arguments.rounds + 1):
        for name, command in commands.items():
            result = measure(command)
            if number:  # the first one reads files from the disk
                results[name].append(result)
    print("| | CPU s | wall s | first token, wall s | peak MiB |\n|---|---|---|---|---|")
    for name, rows in results.items():
        cpu, wall, first, peak = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {name} | {cpu:.2f} | {wall:.2f} | {first:.2f} | {peak:.0f} |")


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        llama(*sys.argv[2:])
    else:
        main()
