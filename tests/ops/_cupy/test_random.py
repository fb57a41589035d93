"""Dropout masks on CuPy: Philox with one counter per position, independent of the threads that draw."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import library_or_skip
from xformer import Rng
from xformer.backends import resolve, to_host
from xformer.backends.cupy import CupyLibrary

LIBRARY = CupyLibrary("cupy", resolve("numpy").module)
KEY = 0x0123456789ABCDEF_FEDCBA9876543210


def philox(counter, key):
    """Four 32-bit words for each row of counters; as the paper has it, in section 3.3."""
    c = [np.asarray(word, np.uint64) for word in np.asarray(counter).T]
    first, second = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(first),
            b & low,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(second),
            a & low,
        ]
        first, second = (first + 0x9E3779B9) & 0xFFFFFFFF, (second + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=-1)


def expected(key, size, accepted):
    words = [key >> 32 * place & 0xFFFFFFFF for place in range(4)]
    counters = [(place, 0, words[2], words[3]) for place in range(-(-size // 8))]
    drawn = philox(counters, words[:2]) if size else np.zeros((0, 4), np.uint64)
    bits = np.stack([drawn & np.uint64(0xFFFF), drawn >> np.uint64(16)], axis=-1).reshape(-1)
    return bits[:size] < accepted


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_reference_gives_the_published_values(counter, key, words):
    """Those that the authors of Philox publish with it."""
    assert " ".join(f"{word:08x}" for word in philox([counter], key)[0]) == words


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("shape", [(), (7,), (8,), (3, 5, 7), (0, 4), (64, 300)], ids=str)
def test_masks_are_those_of_philox(cuda_host, shape, backwards):
    cuda_host.launcher.backwards = backwards
    try:
        mask = LIBRARY.random_mask(KEY, 45875, shape, None)
    finally:
        cuda_host.launcher.backwards = False
    np.testing.assert_array_equal(mask, expected(KEY, mask.size, 45875).reshape(shape))


def test_the_kernel_reads_the_counter(cuda_host):
    """A counter draws what the key `key ^ counter` draws, as on other libraries."""
    for counter in (0, 5, 3 << 40):
        mask = LIBRARY.counted_random_mask(KEY, np.asarray(counter), 30000, (500,), None)
        np.testing.assert_array_equal(mask, expected(KEY ^ counter, 500, 30000))


def test_fewer_blocks_draw_the_same_mask(cuda_host, monkeypatch):
    monkeypatch.setattr("xformer.backends.cupy._MAX_BLOCKS", 1)
    mask = LIBRARY.random_mask(KEY, 30000, (5000,), None)
    np.testing.assert_array_equal(mask, expected(KEY, 5000, 30000))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(7,), (3, 5, 7), (300, 1000)], ids=str)
def test_on_a_gpu(shape):
    mask, exact = Rng(KEY).bernoulli(0.7, shape, library_or_skip("cupy"))
    np.testing.assert_array_equal(to_host(mask), expected(KEY, mask.size, round(exact * 65536)).reshape(shape))
