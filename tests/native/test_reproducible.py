"""With reproducible algorithms, training has the same bits in any environment, and resumed or not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import needs_fused_products
from tests.reference import native_levels
from xformer import native

ROOT = Path(__file__).parents[2]
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
NUMPY_AVX2 = {"NPY_DISABLE_CPU_FEATURES": "X86_V4"}  # names of NumPy 2.4
OLD_BLAS = {"OPENBLAS_CORETYPE": "Nehalem"}
# The lowest level with fused products; the only one, unless every level was compiled.
OLD_LEVEL = {"XFORMER_NATIVE": next((level for level in native_levels() if level != "baseline"), "auto")}
PRODUCTS = {"large", "one_large_shard", "own", "lm_softcap", "translation_copy"}  # some of those that use NumPy's BLAS

pytestmark = needs_fused_products


INFERENCE = """
import json
import numpy as np
from tests.native.test_bits_decoding import WEIGHTS, in_parts, model_with, padded, texts
from tests.native.variants import digest
from xformer.data.audio import resample
from xformer.pipelines.encoders import predictions

rows, normal, hashes = texts([40, 70, 9, 130], 1), np.random.default_rng(0).standard_normal(70_000, np.float32), {}
for weights in WEIGHTS:
    model = model_with(weights=weights, d_model=64, d_ff=96, positions="rotary", activation="swiglu", head_dim=16)
    hashes[weights] = digest([model(padded(rows)), in_parts(model, rows[1], model.init_cache(1), [1], None)])
hashes["audio"] = digest([resample(normal, 44_100)])
for function in ("sigmoid", "softmax", "tanh"):
    found = predictions(4 * normal.reshape(-1, 7), [*"abcdefg"], function)
    hashes[function] = digest([np.asarray([*each.probabilities.values()]) for each in found])
print(json.dumps(hashes))
"""


def run(*arguments, launcher=(), **environment):
    """Return the hashes that Python prints in another process."""
    environment = {"XFORMER_REPRODUCIBLE": "1", "XFORMER_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    command = [*launcher, sys.executable, *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def train(*options, **environment):
    """Return the hashes of the variants, trained in other processes."""
    return run("-m", "tests.native.variants", *options, **environment)


def names_of_differences(hashes, expected):
    return {name for name in hashes if hashes[name] != expected[name]}


@pytest.fixture(scope="module")
def expected():
    return train()


def test_variants_differ(expected):
    others = {name: value for name, value in expected.items() if name != "rematerialized"}
    assert len(set(others.values())) == len(others)
    assert expected["rematerialized"] == expected["translation_paper"]


@pytest.mark.parametrize(
    "environment",
    [
        {"XFORMER_NUM_THREADS": "3", **OLD_LEVEL},
        {"XFORMER_NUM_THREADS": "4", **NUMPY_AVX2, **OLD_BLAS},
        pytest.param({"XFORMER_NUM_THREADS": "2", **OLD_LEVEL, **NUMPY_AVX2, **OLD_BLAS}, marks=pytest.mark.slow),
    ],
    ids=lambda environment: " ".join(f"{name}={value}" for name, value in environment.items()),
)
def test_bits_do_not_depend_on_the_environment(expected, environment):
    assert not names_of_differences(train(**environment), expected)


def test_inference_with_any_weights_does_not_depend_on_the_environment():
    assert run("-c", INFERENCE) == run("-c", INFERENCE, **OLD_LEVEL, **NUMPY_AVX2, **OLD_BLAS)


def test_bits_do_not_depend_on_interruptions(expected):
    assert not names_of_differences(train("--interrupted"), expected)


@pytest.mark.slow
@pytest.mark.skipif(MPIEXEC is None, reason="mpiexec is not installed")
@pytest.mark.parametrize("count", [2, 4])
def test_bits_do_not_depend_on_the_number_of_ranks(expected, count):
    pytest.importorskip("mpi4py")
    names = [name for name in expected if not name.startswith("one_")]  # which ranks cannot share
    hashes = train("--ranks", *names, launcher=(MPIEXEC, "-n", str(count)), XFORMER_NUM_THREADS="2")
    assert not names_of_differences(hashes, expected)


def test_bits_depend_on_the_library_without_the_mode(expected):
    hashes = train(*PRODUCTS, XFORMER_REPRODUCIBLE="0", **OLD_BLAS)
    # With AVX-512, only NumPy's own products use the BLAS library.
    without = {"one_large_shard"} if native.level() == "avx512" else set()
    assert names_of_differences(hashes, expected) == PRODUCTS - without
