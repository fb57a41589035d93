"""Peak memory of training steps by xformer and by torch: `python bench/peak_memory.py [CASE ...]` prints a table.

Each figure is of a process of its own that makes three steps of AdamW on one batch, with clipping: the largest resident
memory beyond that of the process with its libraries. Parameters, gradients and moments are part of it. `jit` includes
the trace. torch runs eagerly, with nn.Transformer, nanoGPT's model, and transformers with peft.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from xformer.benchmarks.worker import reset_peak_memory, resident_memory

SEQ2SEQ = {"source_vocab_size": 8000, "target_vocab_size": 8000, "share_embeddings": True, "dropout": 0.1}
SMALL = {"d_model": 256, "num_heads": 4, "d_ff": 1024, "num_encoder_layers": 3, "num_decoder_layers": 3}
BASE = {"d_model": 512, "num_heads": 8, "d_ff": 2048, "num_encoder_layers": 6, "num_decoder_layers": 6}
GPT2: dict[str, Any] = {
    "vocab_size": 50257, "d_model": 768, "num_heads": 12, "d_ff": 3072, "num_layers": 12, "max_positions": 1024,
    "activation": "gelu", "attention_bias": True, "feed_forward_bias": True, "norm_bias": True,
}  # fmt: skip
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152, "d_model": 576, "num_heads": 9, "num_key_value_heads": 3, "d_ff": 1536, "num_layers": 30,
    "activation": "swiglu", "norm": "rms", "positions": "rotary",
}  # fmt: skip
# Name, kind, model, sequences and tokens of each.
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "3+3 layers, d 256": ("seq2seq", {**SEQ2SEQ, **SMALL}, 64, 32),
    "6+6 layers, d 512": ("seq2seq", {**SEQ2SEQ, **BASE}, 16, 32),
    "GPT-2 small": ("language model", GPT2, 1, 256),
    "LoRA (8) on SmolLM2-135M": ("lora", SMOLLM2, 1, 256),
}
COLUMNS = ("torch", "eager", "jit", "eager, rematerialize", "jit, rematerialize")


def xformer_steps(kind: str, sizes: dict[str, Any], rows: int, length: int, column: str) -> Callable[[], float]:
    import numpy as np

    import xformer as xf
    from xformer.training.fit import TrainingLoop

    before = reset_peak_memory()
    width = length - 1 if kind == "seq2seq" else length + 1  # the batch has `length` columns
    ids = np.random.default_rng(0).integers(4, 8000, (rows, width)).tolist()
    sizes = {**sizes, "rematerialize": "rematerialize" in column}
    batch: Any
    if kind == "seq2seq":
        model: Any = xf.Transformer(xf.TransformerConfig(**sizes), xp=np, seed=0)
        special: dict[str, Any] = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "xp": np}
        batch, loss = xf.training.Batch.make(xf.training.TokenPairs(ids, ids), range(rows), **special), "translation"
    else:
        model = xf.LanguageModel(xf.LanguageModelConfig(**sizes), xp=np, seed=0)
        model = xf.lora(model, 8) if kind == "lora" else model
        batch = xf.training.TextChunks.make(
            np.ravel(ids), [(length - 1) * row for row in range(rows)], length - 1, xp=np
        )
        loss = "language_model"
    loop = TrainingLoop(
        model, getattr(xf.training, f"{loss}_loss"), [batch], optimizer=xf.AdamW(), learning_rate=1e-3, steps=3,
        data_parallel=1, jit="jit" in column,
    )  # fmt: skip
    del model

    def run() -> float:
        loop.run()
        return before

    return run


def torch_steps(kind: str, sizes: dict[str, Any], rows: int, length: int, column: str) -> Callable[[], float]:
    import torch
    from torch import nn

    import xformer as xf

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if kind == "seq2seq":
        from baselines.torch_models import Translator
    elif kind == "language model":
        from baselines.language_model import TorchLanguageModel
    else:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM
    before = reset_peak_memory()
    ids = torch.randint(4, 8000, (rows, length))
    if kind == "seq2seq":
        model: Any = Translator(xf.Transformer(xf.TransformerConfig(**sizes), xp="numpy", seed=0))
    elif kind == "language model":
        model = TorchLanguageModel(sizes)
    else:
        config = LlamaConfig(
            vocab_size=sizes["vocab_size"], hidden_size=sizes["d_model"], intermediate_size=sizes["d_ff"],
            num_hidden_layers=sizes["num_layers"], num_attention_heads=sizes["num_heads"],
            num_key_value_heads=sizes["num_key_value_heads"], tie_word_embeddings=True,
        )  # fmt: skip
        model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules="all-linear"))
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-3)

    def run() -> float:
        for _ in range(3):
            if kind == "seq2seq":
                logits = model(ids, ids)
            else:
                logits = model(ids) if kind == "language model" else model(input_ids=ids).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            del logits, loss
        return before

    return run


def measure(case: str, column: str) -> float:
    """Return the peak of a process that runs steps, in MiB."""
    command = [sys.executable, __file__, "--one", case, column]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main(cases: list[str]) -> None:
    print(f"| MiB | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    for case in cases or CASES:
        peaks = [measure(case, column) for column in COLUMNS]
        shares = [f"{peak:,.0f} ({peak / peaks[0]:.2f})" for peak in peaks]
        print(f"| {case}, {CASES[case][2]}x{CASES[case][3]} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _, _, case, column = sys.argv
        steps = (torch_steps if column == "torch" else xformer_steps)(*CASES[case], column)
        before = steps()
        print((resident_memory("VmHWM") - before) / 2**20)
    else:
        main(sys.argv[1:])
