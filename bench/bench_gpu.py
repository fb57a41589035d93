"""xformer on CuPy against torch on the same GPU, in bfloat16, decoding in float32.

    pytest bench/bench_gpu.py --benchmark-only -s        # or nox -s gpu_bench -- DIR

All tests are skipped without a GPU; the most important ones come first. Each of torch's attention kernels is an
implementation of its own, so that the best one counts; models run eagerly and compiled. All implementations of a
workload stay in GPU memory: the largest ones need about 40 GB together.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from gpu import no_gpu
from recorder import Recorder, baseline
from workloads import norms

from xformer.benchmarks import Spec, attention, decoding, stacks, training

ROUNDS = 9
DTYPE = "bfloat16"
BYTES_PER_SECOND = 4.3e12  # memory bandwidth of an H200, measured by copying
TOKENS = 16_384  # in a batch
WIDE = {"heads": 16, "head_dim": 64}
MODEL = {"length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": 8000}


@pytest.fixture(autouse=True)
def on_a_gpu(recorder: Recorder) -> None:
    """Skip without CuPy or a GPU; relate results to matrix products on the GPU."""
    reason = no_gpu()
    if reason:
        pytest.skip(reason)
    recorder.gemm = ("cupy", None, DTYPE)


def ours(factory: str, *, deterministic: bool = False) -> Spec:
    """Return xformer on CuPy; deterministic (the default of xformer) or, like torch, in any order of summation."""
    name, setting = ("xformer cupy, deterministic", "1") if deterministic else ("xformer cupy", "0")
    return Spec(name, factory, {"backend": "cupy"}, environment={"XFORMER_DETERMINISTIC": setting})


def on_torch(name: str, factory: str, *, checked: bool = True, **settings: Any) -> Spec:
    """Return a baseline on the GPU."""
    return baseline(name, factory, checked=checked, device="cuda", **settings)


def train_tokens() -> int:
    """Return the tokens of a training batch: 65,536 on a GPU with more than 120 GB, where all implementations fit."""
    total = importlib.import_module("cupy").cuda.runtime.memGetInfo()[1]
    return 4 * TOKENS if total > 120e9 else TOKENS


def torch_specs(factory: str) -> list[Spec]:
    """Return torch's module, eager and compiled."""
    return [on_torch("torch", factory), on_torch("torch.compile", factory, compiled=True)]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward-and-backward"])
def test_multi_head_attention(benchmark: Any, recorder: Recorder, backward: bool) -> None:
    flags = {"causal": False, "padded": False, "backward": backward, "layer": True, "dtype": DTYPE}
    workload = attention.workload({"batch": 8, "length": TOKENS // 8, **WIDE, **flags})
    specs = [ours("xformer.benchmarks.attention:build"), *torch_specs("baselines.torch_attention:build_layer")]
    recorder.measure(benchmark, "multi-head-attention", workload, specs, ROUNDS)


def test_encoder(benchmark: Any, recorder: Recorder) -> None:
    workload = stacks.encoder_workload({"batch": 8, "length": TOKENS // 8, **WIDE, "layers": 6, "dtype": DTYPE})
    specs = [ours("xformer.benchmarks.stacks:build_encoder"), *torch_specs("baselines.torch_models:build_encoder")]
    recorder.measure(benchmark, "encoder", workload, specs, ROUNDS)


def test_train_step(benchmark: Any, recorder: Recorder) -> None:
    """Compare training steps in mixed precision; torch uses autocast."""
    workload = training.workload(
        {**MODEL, "batch": train_tokens() // MODEL["length"], "vocabulary": 32_000, "dtype": DTYPE}
    )
    factory = "xformer.benchmarks.training:build"
    specs = [ours(factory), *torch_specs("baselines.torch_training:build")]
    recorder.measure(benchmark, "train-step", workload, specs, ROUNDS)


@pytest.mark.parametrize("batch", [1, 32], ids=lambda batch: f"batch-{batch}")
def test_greedy_decoding(benchmark: Any, recorder: Recorder, batch: int) -> None:
    """Compare in float32, where tokens differ only if rounding decides between two of them."""
    hugging_face = on_torch("Hugging Face", "baselines.huggingface_decoding:build", checked=False)
    specs = [ours("xformer.benchmarks.decoding:build"), hugging_face]
    recorder.measure(benchmark, "decoding", decoding.workload({**MODEL, "batch": batch, "beam": 1}), specs, ROUNDS)


@pytest.mark.parametrize("features", [1024, 4096])
def test_layer_norm(benchmark: Any, recorder: Recorder, features: int) -> None:
    settings = {"rows": 4 * TOKENS, "features": features, "dtype": DTYPE}
    specs = [ours("workloads.norms:build"), on_torch("torch", "baselines.torch_norms:build")]
    result = recorder.measure(benchmark, "layer-norm", norms.workload(settings), specs, ROUNDS)
    reached = norms.bytes_moved(settings) / result["implementations"][0]["seconds"]
    share = reached / BYTES_PER_SECOND
    recorder.note("layer-norm", f"{features} features: {reached / 1e12:.2f} TB/s, {share:.0%} of an H200's 4.3")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward-and-backward"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("length", [4096, 16_384, 2048, 8192])
def test_attention(
    benchmark: Any, recorder: Recorder, head_dim: int, length: int, causal: bool, backward: bool
) -> None:
    sizes = {"batch": TOKENS // length, "heads": 2048 // head_dim, "length": length, "head_dim": head_dim}
    flags = {"causal": causal, "padded": False, "backward": backward, "layer": False, "dtype": DTYPE}
    kernels = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
    specs = [
        ours("xformer.benchmarks.attention:build"),
        *([ours("xformer.benchmarks.attention:build", deterministic=True)] if backward else []),
        *(
            on_torch(f"torch SDPA, {name}", "baselines.torch_attention:build_attention", kernel=kernels[name])
            for name in kernels
        ),
    ]
    recorder.measure(benchmark, "attention", attention.workload({**sizes, **flags}), specs, ROUNDS)
