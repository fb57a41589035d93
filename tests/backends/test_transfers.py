"""How often training and decoding read from a device and copy to it, on libraries whose device is not the host.

array_api_strict simulates devices; `device1` stands for one whose memory the host cannot read. dpnp, if installed, has
such memory. Each step gets other data, so that an array that is copied twice with the same values does not depend on
the step.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from typing import Any

import array_api_strict
import numpy as np
import pytest

import xformer as xf
from tests.reference import for_each
from xformer.backends import Library, from_host, resolve, to_host, to_host_together
from xformer.backends import library as libraries

READS = ("__array__", "__bool__", "__complex__", "__dlpack__", "__float__", "__index__", "__int__", "asnumpy", "item")
ONE_API = 14  # DLPack's number of a kind of device


class Transfers:
    """A library and a device of it, the lines of xformer that read from it, and the arrays that are copied to it."""

    def __init__(self, xp: Any, device: Any) -> None:
        self.xp, self.device = xp, device
        self.reads: list[str] = []
        self.copies: list[tuple[str, Any]] = []

    def transformer(self, **options: Any) -> Any:
        config = xf.TransformerConfig(
            source_vocab_size=11, target_vocab_size=11, num_encoder_layers=1, num_decoder_layers=1, **SIZES, **options
        )
        return xf.Transformer(config, xp=self.xp, device=self.device, seed=0)

    def language_model(self, **options: Any) -> Any:
        config = xf.LanguageModelConfig(vocab_size=11, num_layers=1, **SIZES, **options)
        return xf.LanguageModel(config, xp=self.xp, device=self.device, seed=0)


def line_of_xformer() -> str:
    """Return the line that asks the modules of array libraries for a transfer."""
    frames = [frame for frame in traceback.extract_stack()[::-1] if "/backends/" not in frame.filename]
    return f"{frames[0].filename}:{frames[0].lineno}"


@pytest.fixture(params=["array_api_strict", "dpnp"])
def transfers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Transfers:
    """Count the transfers of a library about which xformer knows nothing."""
    xp = pytest.importorskip(request.param)
    resolve(request.param)  # loads what xformer knows, before it is replaced
    array = xp.zeros(())
    cls = type(array)
    counted = Transfers(xp, xp.Device("device1") if xp is array_api_strict else array.device)
    is_inside = False  # a method of dpnp that reads calls others

    def counting(method: Any) -> Any:
        def read(self: Any, *args: Any, **keywords: Any) -> Any:
            nonlocal is_inside
            if is_inside or self.device != counted.device:
                return method(self, *args, **keywords)
            counted.reads.append(line_of_xformer())
            is_inside = True
            try:
                return method(self, *args, **keywords)
            finally:
                is_inside = False

        return read

    for name in READS:
        if hasattr(cls, name):
            monkeypatch.setattr(cls, name, counting(getattr(cls, name)))
    if xp is array_api_strict:
        place = cls.__dlpack_device__
        monkeypatch.setattr(
            cls, "__dlpack_device__", lambda self: (ONE_API, 0) if self.device == counted.device else place(self)
        )
    asarray = xp.asarray

    def copy(data: Any, *, device: Any = None, **keywords: Any) -> Any:
        if (array.device if device is None else device) == counted.device and not isinstance(data, cls):
            counted.copies.append((line_of_xformer(), np.asarray(data)))
        return asarray(data, device=device, **keywords)

    monkeypatch.setattr(xp, "asarray", copy)
    library = Library(request.param, xp)
    monkeypatch.setitem(libraries._LIBRARIES, request.param, library)
    monkeypatch.setitem(libraries.NAMESPACE_OF_TYPE, cls, library)
    counted.xp = library
    return counted


SIZES: dict[str, Any] = {"d_model": 8, "num_heads": 2, "d_ff": 8}


def loss_fn(model: Any, batch: Any, rng: Any) -> Any:
    losses = xf.cross_entropy(model(batch[0], batch[1], rng=rng), batch[2], pad_id=0)
    return xf.array_namespace(losses).sum(losses)


def batches(count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(3, 11, (2, 5)) for _ in range(3)) for _ in range(count)]


def in_steps(transfers: Transfers, run: Any, first: int, last: int) -> tuple[Counter[str], list[str]]:
    """Return the reads of the steps between two numbers of steps, and what these copy that was copied before."""
    transfers.reads.clear()  # of other rows
    transfers.copies.clear()
    run(first)
    reads, num_copies = Counter(transfers.reads), len(transfers.copies)
    assert num_copies, "no copy was counted"
    transfers.reads.clear()
    transfers.copies.clear()
    run(last)
    values = [(array.shape, array.dtype, array.tobytes()) for _, array in transfers.copies]
    again = [
        f"{line} {array.dtype}{array.shape}"
        for (line, array), value in list(zip(transfers.copies, values, strict=True))[num_copies:]
        if values.count(value) > 1
    ]
    return Counter(transfers.reads) - reads, again


@for_each(
    "optimizer, positions",
    [("SGD", "sinusoidal"), ("Adam", "rotary"), ("AdamW", "alibi"), ("Adafactor", "relative"), ("Muon", "sinusoidal")],
)
def test_a_step_of_training_reads_once(transfers, optimizer, positions):
    def train(steps):
        model = transfers.transformer(dropout=0.1, positions=positions)
        options = {"optimizer": getattr(xf, optimizer)(), "steps": steps, "num_tokens": lambda batch: batch[2].size}
        xf.fit(model, loss_fn, batches(steps), learning_rate=xf.schedules.cosine(1e-2, total_steps=20), **options)

    reads, copied_again = in_steps(transfers, train, 2, 5)
    assert reads.total() == 3, reads
    assert not copied_again


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7, "rng": xf.Rng(0)},
    "processors": {
        "repetition_penalty": 1.2,
        "suppress_tokens": [5],
        "logit_bias": {6: 1.0},
        "no_repeat_ngram_size": 3,
    },
}


@for_each("mode", MODES)
@for_each("model", ["transformer", "language_model"])
def test_a_step_of_decoding_reads_once(transfers, model, mode):
    model = getattr(transfers, model)()

    def decode(steps):
        options = {"min_new_tokens": steps, "max_new_tokens": steps, **MODES[mode]}
        xf.generate(model, [[3, 4, 5, 6], [7, 8, 9, 10]], **options)

    reads, copied_again = in_steps(transfers, decode, 4, 8)
    assert reads.total() == 4, reads
    assert not [copy for copy in copied_again if "int64" not in copy]  # a token or a beam may be chosen again


def test_arrays_are_read_together(transfers):
    xp, device = transfers.xp, transfers.device
    tokens = from_host(xp, [[1], [2**24 - 1]], device=device)
    for dtype in ("float32", "float64"):
        scores = from_host(xp, [0.1, -math.inf], dtype=dtype, device=device)
        scalar = from_host(xp, 0.1, dtype="float64", device=device)
        transfers.reads.clear()
        read = to_host_together(tokens, scores, scalar)
        assert [x.tolist() for x in read] == [[[1], [2**24 - 1]], [np.asarray(0.1, dtype).item(), -math.inf], 0.1]
        assert read[0].dtype == "int64"
        assert len(transfers.reads) == 1


def test_few_tables_stay_on_the_device():
    library = Library("array_api_strict", array_api_strict)
    for rows in range(1, 50):
        table = np.arange, (rows,)
        part = library.rows_of_table(table, slice(0, 1), library.float32, None)
        assert to_host(part).tolist() == [0.0]
    assert len(library._tables) == 32
