"""GGUF files that `xformer export` writes: what llama.cpp computes with them, and how exact their types are.

    python bench/gguf_round_trips.py MODEL.gguf --llama LIBRARY [--lora RUN] [--out FILE.md]

MODEL is a file such as SmolLM2-135M-Instruct.Q4_1.gguf; LIBRARY a shared library with the C functions of llama.cpp;
RUN a run with --lora that started from MODEL. llama.cpp and xformer continue two prompts greedily from each file.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import datetime
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

PROMPTS = ("The capital of France is", "def add(a, b):\n    # 12345 naïve 你好\n")
LENGTH = 12
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q6_K", "Q4_K")


EXPLANATION = f"""LIBRARY is that of the wheel xllamacpp. llama.cpp reads each file, encodes two prompts and continues
them by {LENGTH} tokens; the last column counts those that are the same from the start as in xformer, which reads the
file in float32 (in the first row, as in llama.cpp with the source). llama.cpp rounds the inputs of products with
quantized weights to 8 bits, and its cache to float16, which can change a token. Error: root mean square of the
difference from the matrices in F32, relative to them; that of llama.cpp: of its own quantization
(`ggml_quantize_chunk`) to the same types. Time: processor seconds of `xformer export`.
"""


def llama_answers(path: str, library: str, adapter: str = "") -> list[tuple[list[int], list[int]]]:
    """Return the ids of each prompt by the tokenizer of llama.cpp, and its greedy continuation."""
    from reproducible_peers import llama_functions

    os.environ |= {"LIBRARY": library, "OMP_NUM_THREADS": "1", "ADAPTER": adapter}
    forward: Any = llama_functions(path)[0]
    functions, results = ctypes.CDLL(library), []
    functions.llama_tokenize.argtypes = [
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32),
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
    ]
    functions.llama_model_get_vocab.restype = ctypes.c_void_p
    functions.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    for prompt in PROMPTS:
        ids, text = np.zeros(256, np.int32), prompt.encode()
        vocabulary = functions.llama_model_get_vocab(forward.model)
        count = functions.llama_tokenize(vocabulary, text, len(text), ids.ctypes.data, 256, True, True)
        row = ids[:count].tolist()
        for _ in range(LENGTH):
            row.append(int(forward(np.asarray([row]), [len(row)])[0, -1].argmax()))
        results.append((row[:count], row[count:]))
    return results


def xformer_answers(path: str) -> list[tuple[list[int], list[int]]]:
    """Return the same of xformer, with float32 weights."""
    import xformer as xf

    model, tokenizer, results = xf.load_pretrained(path), xf.tokenizers.load_tokenizer(path), []
    for prompt in PROMPTS:
        row = tokenizer.encode(prompt)
        count = len(row)
        for _ in range(LENGTH):
            row.append(int(np.asarray(model([row]))[0, -1].argmax()))
        results.append((row[:count], row[count:]))
    return results


def in_process(function: Any, *args: Any) -> Any:
    """Call a function in a process of its own, as the memory of models is not freed."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def agreement(first: Any, second: Any) -> str:
    """Return how many greedy tokens of all prompts agree from the start, and whether the prompts have the same ids."""
    pairs = [*zip(first, second, strict=True)]
    same = sum(next((i for i in range(LENGTH) if a[i] != b[i]), LENGTH) for (_, a), (_, b) in pairs)
    ids = "" if all(a == b for (a, _), (b, _) in pairs) else ", prompts differ"
    return f"{same} of {LENGTH * len(PROMPTS)}{ids}"


def errors(source: Path, path: Path, code: str, library: str) -> tuple[str, str]:
    """Return the relative error of the matrices in a file, and that of llama.cpp's own quantization to their types."""
    import gguf

    from xformer.families.gguf_file import TYPES as NUMBERS
    from xformer.families.gguf_file import read_header

    functions = ctypes.CDLL(library)
    functions.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    functions.ggml_quantize_chunk.restype = ctypes.c_size_t
    numbers = {name: number for number, (name, *_) in NUMBERS.items()}
    total, own, theirs = 0.0, 0.0, 0.0
    _, floats, _ = read_header(source)
    for key, entry in read_header(path)[1].items():
        if len(entry.shape) < 2:
            continue
        x = np.ascontiguousarray(floats[key].read(), np.float32)
        total += float(np.sum(np.square(x, dtype=np.float64)))
        own += float(np.sum(np.square(entry.read() - x, dtype=np.float64)))
        out = np.empty(entry.stored().size, np.uint8)
        kind = numbers[entry.code]
        functions.ggml_quantize_chunk(kind, x.ctypes.data, out.ctypes.data, 0, *x.shape, None)
        values = gguf.dequantize(out, gguf.GGMLQuantizationType(kind)).reshape(x.shape)
        theirs += float(np.sum(np.square(values - x, dtype=np.float64)))
    return f"{(own / total) ** 0.5:.2e}", f"{(theirs / total) ** 0.5:.2e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--llama", required=True, metavar="LIBRARY")
    parser.add_argument("--lora", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="FILE.md")
    arguments = parser.parse_args()
    from xformer.pipelines.export import export_run

    source, library, lines = arguments.path, arguments.llama, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def row(title: str, path: Path, expected: Any, *cells: str, adapter: str = "") -> Any:
            answers = in_process(llama_answers, str(path), library, adapter)
            size = f"{Path(adapter or path).stat().st_size / 1e6:.0f} MB"
            lines.append(f"| {title} | {size} | " + " | ".join([*cells, agreement(answers, expected)]) + " |\n")
            print(lines[-1], end="", flush=True)
            return answers

        export_run(source, folder / "same.gguf", "gguf")
        is_equal = source.read_bytes() == (folder / "same.gguf").read_bytes()
        original = in_process(llama_answers, str(source), library)
        row(
            "the types of the source",
            folder / "same.gguf",
            original,
            "all bytes equal" if is_equal else "differs",
            "",
            "",
        )
        for code in TYPES:
            path, start = folder / f"{code}.gguf", time.process_time()
            export_run(source, path, "gguf", quantization=code)
            seconds = f"{time.process_time() - start:.1f} s"
            row(
                code,
                path,
                in_process(xformer_answers, str(path)),
                seconds,
                *errors(folder / "F32.gguf", path, code, library),
            )
        expected = in_process(xformer_answers, str(folder / "F32.gguf"))
        export_run(source, folder / "directory")
        export_run(folder / "directory", folder / "again.gguf", "gguf")
        row("F32, from a directory in the Hugging Face format", folder / "again.gguf", expected, "", "", "")
        if arguments.lora is not None:
            export_run(arguments.lora, folder / "merged.gguf", "gguf", quantization="F32")
            export_run(arguments.lora, folder / "adapter.gguf", "gguf-lora")
            merged = in_process(xformer_answers, str(folder / "merged.gguf"))
            row("F32, a run with --lora, merged", folder / "merged.gguf", merged, "", "", "")
            row(
                "its adapters, added to F32",
                folder / "F32.gguf",
                merged,
                "",
                "",
                "",
                adapter=str(folder / "adapter.gguf"),
            )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = (
        f"# GGUF files written by xformer, {today}\n\n"
        f"    python bench/gguf_round_trips.py {source.name} --llama LIBRARY --lora RUN\n\n"
        f"Source: {source.name}. {EXPLANATION}\n"
        "| File | Size | Time | Error | Error of llama.cpp | Greedy tokens |\n|---|---|---|---|---|---|\n"
    ) + "".join(lines)  # fmt: skip
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
