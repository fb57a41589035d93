from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.conftest import library_or_skip
from xformer.benchmarks import WORKS, attention
from xformer.benchmarks.workload import digest

SETTINGS = {"batch": 3, "heads": 2, "length": 6, "head_dim": 4, "backend": "numpy"}
FLAGS = [
    dict(zip(("causal", "padded", "backward", "layer"), values, strict=True))
    for values in itertools.product((False, True), repeat=4)
]


def answer(settings):
    work = attention.work(settings)
    with work.around():
        return work.digest(work.step(0))


def test_operations_are_those_of_the_products():
    core = {**SETTINGS, **FLAGS[0]}
    assert attention.flops(core) == 2 * (2 * 3 * 2 * 6 * 6 * 4)
    assert attention.flops({**core, "causal": True}) == 2 * (2 * 3 * 2 * 21 * 4)
    assert attention.flops({**core, "backward": True}) == 3 * attention.flops(core)
    assert attention.flops({**core, "layer": True}) - attention.flops(core) == 4 * (2 * 18 * 8 * 8)


def test_names_tell_cases_apart():
    cases = [attention.case({**SETTINGS, **flags}) for flags in FLAGS]
    assert len({case.name for case in cases}) == len(cases)
    assert cases[-1].name == "multi-head attention 3x2x6x4 causal padded forward + backward"
    assert cases[0].tokens == (18,)


def test_padding_leaves_half_of_every_sentence():
    mask = attention.inputs({**SETTINGS, "batch": 64, "padded": True, "layer": False})["mask"]
    kept = mask.sum(axis=-1)
    assert (mask.shape, kept.min(), kept.max()) == ((64, 1, 1, 6), 3, 6)
    assert attention.inputs({**SETTINGS, "padded": False, "layer": True})["mask"] is None


@pytest.mark.parametrize("flags", FLAGS[1::3], ids=lambda flags: "-".join(name for name in flags if flags[name]))
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_libraries_compute_the_same(backend, flags):
    library_or_skip(backend)
    settings = {**SETTINGS, **flags}
    np.testing.assert_allclose(answer({**settings, "backend": backend}), answer(settings), atol=1e-5)


def test_a_digest_tells_arrays_apart():
    x = np.arange(24.0).reshape(2, 3, 4)
    assert digest((x,)) != digest((x[::-1],))
    assert digest((x,)) == digest((x + 0.0,))
    assert digest((-x,))[0] == digest((x,))[0] == pytest.approx(11.5)


def test_the_grid_has_every_combination():
    kind = WORKS["attention"]
    cases = kind.cases(kind.sizes)
    assert len(cases) == len(kind.sizes.batch) * len(kind.sizes.length)
    assert {case.settings["heads"] for case in cases} == {8}
