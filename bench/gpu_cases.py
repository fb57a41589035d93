"""The cases of `python bench/gpu.py bench DIR`, xformer on CuPy against torch on a GPU; the most important come first.

All implementations of a case are in GPU memory together; the training step needs about 60 GB. torch's attention kernels
are implementations of their own, so that the best one counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from recorder import baseline
from workloads import decoding, norms, stacks, training

from xformer.benchmarks import parts
from xformer.benchmarks.interleaved import Spec, Workload

DTYPE = "bfloat16"
TOKENS = 16_384  # in a batch
WIDE = {"heads": 16, "head_dim": 64}
MODEL = {"length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": 8000}


class Case(NamedTuple):
    """A workload and its implementations.

    estimate: Times and ratios expected before the first run, of steps that are waited for.
    seconds: Time limit.
    moved: Bytes that a step must move, where memory bandwidth is the limit.
    """

    workload: Workload
    specs: list[Spec]
    estimate: str = ""
    seconds: float = 60.0
    moved: int = 0


def ours(factory: str, *, deterministic: bool = False, **settings: Any) -> Spec:
    """Return xformer on CuPy; deterministic (the default of xformer) or, like torch, in any order of summation."""
    name, setting = ("xformer, deterministic", "1") if deterministic else ("xformer", "0")
    name += ", eager" if settings.get("jit") is False else ""
    return Spec(name, factory, {"backend": "cupy", **settings}, environment={"XFORMER_DETERMINISTIC": setting})


def on_torch(name: str, factory: str, **settings: Any) -> Spec:
    """Return a baseline on the GPU."""
    return baseline(name, factory, device="cuda", **settings)


def all_of_torch(factory: str) -> list[Spec]:
    """Return torch as it is, compiled in its default mode, and compiled with CUDA graphs."""
    modes = {"torch": False, "torch.compile": True, "torch reduce-overhead": "reduce-overhead"}
    return [on_torch(name, factory, compiled=mode) for name, mode in modes.items()]


def attention_case(head_dim: int, length: int, backward: bool, estimate: str = "") -> Case:
    """Return causal attention, forward or forward and backward."""
    sizes = {"batch": TOKENS // length, "heads": 2048 // head_dim, "length": length, "head_dim": head_dim}
    flags = {"causal": True, "padded": False, "backward": backward, "part": "attention", "dtype": DTYPE}
    factory, theirs = "xformer.benchmarks.parts:build", "baselines.torch_attention:build_attention"
    specs = [ours(factory), *([ours(factory, deterministic=True)] if backward else [])]
    specs += [on_torch(f"torch {name}", theirs, kernel=name) for name in ("cudnn", "flash")]
    return Case(parts.workload({**sizes, **flags}), specs, estimate)


def layer_case() -> Case:
    """Return the multi-head layer, forward."""
    flags = {"causal": False, "padded": False, "backward": False, "part": "layer", "dtype": DTYPE}
    specs = [ours("xformer.benchmarks.parts:build"), on_torch("torch", "baselines.torch_attention:build_layer")]
    workload = parts.workload({"batch": 8, "length": TOKENS // 8, **WIDE, **flags})
    return Case(workload, specs, "0.55-0.6 ms, torch 0.5-0.55")


def encoder_case() -> Case:
    """Return an encoder stack, forward."""
    specs = [ours("workloads.stacks:build_encoder"), *all_of_torch("baselines.torch_models:build_encoder")]
    workload = stacks.encoder_workload({"batch": 8, "length": TOKENS // 8, **WIDE, "layers": 6, "dtype": DTYPE})
    return Case(workload, specs, "6.5-8 ms, torch 6-7.5")


def training_case() -> Case:
    """Return a training step in mixed precision; torch uses autocast."""
    sizes = {**MODEL, "batch": 2 * TOKENS // MODEL["length"], "vocabulary": 32_000, "dtype": DTYPE}
    specs = [ours("workloads.training:build", jit=True), ours("workloads.training:build", jit=False)]
    specs += all_of_torch("baselines.torch_training:build")
    return Case(training.workload(sizes), specs, "45-58 ms, torch 70-90, compiled 48-63", seconds=200.0)


def decoding_case(batch: int, estimate: str) -> Case:
    """Return greedy search in float32, where tokens differ only if rounding decides between two of them."""
    specs = [ours("workloads.decoding:build")]
    specs.append(on_torch("Hugging Face", "baselines.huggingface_decoding:build"))
    return Case(decoding.workload({**MODEL, "batch": batch, "beam": 1}), specs, estimate)


def norm_case(features: int, estimate: str) -> Case:
    """Return layer normalization."""
    settings = {"rows": 4 * TOKENS, "features": features, "dtype": DTYPE}
    specs = [ours("workloads.norms:build"), on_torch("torch", "baselines.torch_norms:build")]
    return Case(norms.workload(settings), specs, estimate, moved=norms.bytes_moved(settings))


CASES = [
    attention_case(128, 4096, False, "ratio 0.95"),
    attention_case(128, 4096, True, "ratio 0.94"),
    attention_case(128, 16_384, False, "ratio 0.98"),
    attention_case(128, 16_384, True, "ratio 0.98"),
    *(attention_case(64, length, backward) for length in (4096, 16_384) for backward in (False, True)),
    layer_case(),
    encoder_case(),
    training_case(),
    decoding_case(1, "50-60 ms, Hugging Face 300-400"),
    decoding_case(32, "60-80 ms, Hugging Face 320-420"),
    norm_case(1024, "above 45%, torch 60%"),
    norm_case(4096, "above 47%, torch 75-80%"),
]
