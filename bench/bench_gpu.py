"""xformer on CuPy against torch on the same GPU, in bfloat16, decoding in float32.

    pytest bench/bench_gpu.py --benchmark-only -s        # or nox -s gpu_bench -- DIR

Every case says why it is skipped where there is no GPU; what matters most comes first. torch runs each of its attention
kernels as a contender of its own, so the best of them counts; models run eagerly and by torch.compile. All contenders
of a case stay in memory: for the largest, together, some 40 GB.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from gpu import no_gpu
from race import Recorder, peer
from works import norms

from xformer.benchmarks import Entry, attention, decoding, stacks, training

TURNS = 9
DTYPE = "bfloat16"
BYTES_PER_SECOND = 4.3e12  # of an H200's memory, as measured by copying
TOKENS = 16_384  # in a batch
WIDE = {"heads": 16, "head_dim": 64}
MODEL = {"length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": 8000}


@pytest.fixture(autouse=True)
def on_a_gpu(recorder: Recorder) -> None:
    """Skip where CuPy finds no GPU, or is not there; compare with matrix products on it."""
    reason = no_gpu()
    if reason:
        pytest.skip(reason)
    recorder.product = ("cupy", None, DTYPE)


def ours(factory: str, *, repeatable: bool = False) -> Entry:
    """Ours, adding as it comes, as torch does; repeatable: by default, the same bits for the same calls."""
    name, setting = ("xformer cupy, repeatable", "1") if repeatable else ("xformer cupy", "0")
    return Entry(name, factory, {"backend": "cupy"}, environment={"XFORMER_DETERMINISTIC": setting})


def on_torch(name: str, factory: str, *, checked: bool = True, **settings: Any) -> Entry:
    """A peer on the GPU."""
    return peer(name, factory, checked=checked, device="cuda", **settings)


def train_tokens() -> int:
    """As many as all contenders have room for beside each other: 65,536 on a GPU of more than 120 GB."""
    total = importlib.import_module("cupy").cuda.runtime.memGetInfo()[1]
    return 4 * TOKENS if total > 120e9 else TOKENS


def torch_twice(factory: str) -> list[Entry]:
    """torch's module, eager and compiled."""
    return [on_torch("torch", factory), on_torch("torch.compile", factory, compiled=True)]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward-and-backward"])
def test_multi_head_attention(benchmark: Any, recorder: Recorder, backward: bool) -> None:
    flags = {"causal": False, "padded": False, "backward": backward, "layer": True, "dtype": DTYPE}
    case = attention.case({"batch": 8, "length": TOKENS // 8, **WIDE, **flags})
    entries = [ours("xformer.benchmarks.attention:work"), *torch_twice("peers.torch_attention:layer")]
    recorder.race(benchmark, "multi-head-attention", case, entries, TURNS)


def test_encoder(benchmark: Any, recorder: Recorder) -> None:
    case = stacks.encoder_case({"batch": 8, "length": TOKENS // 8, **WIDE, "layers": 6, "dtype": DTYPE})
    entries = [ours("xformer.benchmarks.stacks:encoder"), *torch_twice("peers.torch_models:encoder")]
    recorder.race(benchmark, "encoder", case, entries, TURNS)


def test_train_step(benchmark: Any, recorder: Recorder) -> None:
    """In mixed precision; torch by autocast."""
    case = training.case({**MODEL, "batch": train_tokens() // MODEL["length"], "vocabulary": 32_000, "dtype": DTYPE})
    factory = "xformer.benchmarks.training:work"
    entries = [ours(factory), *torch_twice("peers.torch_training:work")]
    recorder.race(benchmark, "train-step", case, entries, TURNS)


@pytest.mark.parametrize("batch", [1, 32], ids=lambda batch: f"batch-{batch}")
def test_greedy_decoding(benchmark: Any, recorder: Recorder, batch: int) -> None:
    """In float32, where both write the same tokens, but where rounding decides between two."""
    theirs = on_torch("Hugging Face", "peers.huggingface_decoding:work", checked=False)
    entries = [ours("xformer.benchmarks.decoding:work"), theirs]
    recorder.race(benchmark, "decoding", decoding.case({**MODEL, "batch": batch, "beam": 1}), entries, TURNS)


@pytest.mark.parametrize("features", [1024, 4096])
def test_layer_norm(benchmark: Any, recorder: Recorder, features: int) -> None:
    settings = {"rows": 4 * TOKENS, "features": features, "dtype": DTYPE}
    entries = [ours("works.norms:work"), on_torch("torch", "peers.torch_norms:work")]
    result = recorder.race(benchmark, "layer-norm", norms.case(settings), entries, TURNS)
    reached = norms.bytes_moved(settings) / result["contenders"][0]["seconds"]
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
    entries = [
        ours("xformer.benchmarks.attention:work"),
        *([ours("xformer.benchmarks.attention:work", repeatable=True)] if backward else []),
        *(on_torch(f"torch SDPA, {name}", "peers.torch_attention:core", kernel=kernels[name]) for name in kernels),
    ]
    recorder.race(benchmark, "attention", attention.case({**sizes, **flags}), entries, TURNS)
