"""Training and decoding with other numbers of threads, and on other processors, which OpenBLAS is told to assume."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import RECIPE
from xformer.data.demo_tasks import numbers_task

ROOT = Path(__file__).parents[2]
INSTRUCTIONS = {"Nehalem": "sse4_2", "Sandybridge": "avx", "Haswell": "avx2", "Zen": "avx2", "SkylakeX": "avx512f"}
CPU_INFO = Path("/proc/cpuinfo")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("machine")
    task = numbers_task(num_train=400, num_valid=40, num_test=4, largest=999)
    for name, corpus in (("train", task.train), ("valid", task.valid)):
        for side in ("source", "target"):
            (path / f"{name}.{side}").write_text("\n".join(getattr(corpus, side)) + "\n", encoding="utf-8")
    (path / "recipe.toml").write_text(RECIPE)
    return path


def xformer(*arguments: object, **variables: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "xformer", *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def train_and_translate(files: Path, out: Path, **variables: str) -> tuple[list[str], list[float]]:
    """Return the digests of the model and of translations, and the losses of training."""
    names = {"source": "train.source", "target": "train.target"}
    names |= {"valid-source": "valid.source", "valid-target": "valid.target"}
    sides = [(f"--{option}", files / name) for option, name in names.items()]
    settings = ("training.data_parallel=2", "model.d_model=64", "model.num_heads=4", "model.d_ff=128")
    options = [part for pair in [*sides, *(("--set", each) for each in settings)] for part in pair]
    xformer(
        "train", *options, "--recipe", files / "recipe.toml", "--out", out, "--max-steps", 20, "--seed", 1, **variables
    )
    hypothesis = out / "valid.hyp"
    xformer(
        "translate", "--model", out, "--input", files / "valid.source", "--output", hypothesis, "--num-beams", 3,
        **variables,
    )  # fmt: skip
    events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (out / "model.safetensors", hypothesis)]
    return digests, [event["loss"] for event in events if "loss" in event]


@pytest.mark.parametrize("kernels", ["auto", "no-native"])
def test_the_number_of_threads_does_not_change_a_bit(files, tmp_path, kernels):
    results = [
        train_and_translate(files, tmp_path / str(count), XFORMER_KERNELS=kernels, XFORMER_NUM_THREADS=str(count))
        for count in (1, 2, 3, 4)
    ]
    assert results[0][1]
    assert all(result == results[0] for result in results)


@pytest.mark.skipif(platform.machine() != "x86_64" or not CPU_INFO.exists(), reason="needs an x86 processor and Linux")
def test_other_processors_train_nearly_the_same(files, tmp_path):
    """Sums in another order differ in rounding, so bits are promised for one kind of processor only."""
    available = CPU_INFO.read_text().split()
    names = [name for name, instructions in INSTRUCTIONS.items() if instructions in available]
    losses = {
        name: train_and_translate(files, tmp_path / name, XFORMER_KERNELS="no-native", OPENBLAS_CORETYPE=name)[1]
        for name in names
    }
    assert len(names) > 1
    for name in names:
        assert losses[name] == pytest.approx(losses["Nehalem"], rel=1e-3)
