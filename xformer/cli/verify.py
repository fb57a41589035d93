r"""`xformer verify`: check that this machine computes the numbers of every other one.

Train two small models in reproducible mode, decode with them in every way, and compare all numbers to the bit.

The hash on stdout is that of the weights, the logits, the outputs and their log-probabilities. README.md states the
expected one, for NumPy with the native library on any processor with AVX2, AVX-512 or NEON, and any number of threads.
The exit code is 1 if a number depends on the way in which it was computed; the last line names both ways.

\b
  xformer verify
  XFORMER_NUM_THREADS=1 xformer verify
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import typer

import xformer as xf
from xformer.cli._options import flag
from xformer.cli.demo import demo_recipe
from xformer.data.demo_tasks import numbers_task
from xformer.data.packing import TextChunks
from xformer.data.pairs import Batch, TokenPairs
from xformer.generation.batch import GenerationBatch
from xformer.generation.engine import Engine, run_task
from xformer.generation.generate import search, searches_of
from xformer.generation.prefix_cache import PrefixCache
from xformer.models.token_ids import pad
from xformer.ops import cross_entropy
from xformer.ops.decoding import log_softmax
from xformer.runs.console import progress_bar
from xformer.training import schedules

# The name of a computation, the way of computing, and an array or a list of hypotheses for each input.
Numbers = tuple[str, str, Iterable[Any]]

_STEPS, _ROWS = 10, 16
_METHODS: dict[str, dict[str, Any]] = {"greedy search": {}, "sampling": {"top_k": 20, "temperature": 0.9}}
_METHODS["beam search"] = {"num_beams": 4}
_NUM_NUMBERS = 70  # of `_numbers`


def verify(as_json: Annotated[bool, flag("--json", "Print the hash of each part, too, as JSON.")] = False) -> int:
    """Check that this machine computes the numbers of every other one."""
    xf.use_reproducible_algorithms()
    known: dict[str, tuple[str, list[bytes]]] = {}
    with progress_bar("training", total=_NUM_NUMBERS) as update:
        for what, way, values in _numbers():
            update(description=what, advance=1)
            data = [x.tobytes() if isinstance(x, np.ndarray) else repr(x).encode() for x in values]
            first_way, expected = known.setdefault(what, (way, data))
            if data != expected:
                row = [a == b for a, b in zip(data, expected, strict=True)].index(False)
                typer.echo(f"different: {what} {row + 1} is not the same {first_way} and {way}", err=True)
                return 1
    parts = {what: hashlib.sha256(b"".join(data)).hexdigest() for what, (_, data) in known.items()}
    total = hashlib.sha256("".join(parts.values()).encode()).hexdigest()
    typer.echo(json.dumps({"hash": total, "parts": parts}, indent=2) if as_json else total)
    return 0


def _numbers() -> Iterator[Numbers]:
    """Train a translator and a language model of number words, and compute everything in every way."""
    task, sizes = numbers_task(num_train=2000, num_valid=1, num_test=5), demo_recipe(60.0, 0).model | {"dropout": 0.1}
    characters = sorted({*"".join(task.train.source + task.train.target), "\n"})
    source, target, tests = (
        [[4 + characters.index(character) for character in line] for line in lines]
        for lines in (task.train.source, task.train.target, task.test.source)
    )
    size, order = 4 + len(characters), xf.Rng(0).permutation(len(source))

    config: Any = xf.TransformerConfig(source_vocab_size=size, target_vocab_size=size, **sizes)
    pairs, rows = TokenPairs(source, target), [order[i : i + _ROWS] for i in range(0, _STEPS * _ROWS, _ROWS)]
    batches = [Batch.make(pairs, each, xp=np) for each in rows]
    loss = functools.partial(xf.translation_loss, label_smoothing=0.1)
    translator = _trained(xf.Transformer(config), loss, batches, xf.Adam())
    columns = [[*ids, 2] for ids in tests], [[1, *ids] for ids in target[: len(tests)]]
    yield from _of_model("the translator", translator, *columns)

    layers = {"num_layers": sizes.pop("num_encoder_layers"), "norm": "rms", "activation": "swiglu"}
    del sizes["num_decoder_layers"]
    config = xf.LanguageModelConfig(vocab_size=size, positions="rotary", num_key_value_heads=2, **sizes, **layers)
    text = [token for pair in zip(source, target, strict=True) for line in pair for token in (*line, size - 1)]
    chunks = [TextChunks.make(text, [64 * row for row in each], 64, xp=np) for each in rows]
    model = _trained(xf.LanguageModel(config), xf.language_model_loss, chunks, xf.Muon())
    yield from _of_model("the language model", model, [text[-200 * n : n - 200 * n] for n in (1, 17, 30, 70, 131)])


def _trained(model: Any, loss: Any, batches: list[Any], optimizer: xf.Optimizer) -> Any:
    """Train a model for a step on each batch."""
    rate = schedules.cosine(3e-3, warmup_steps=3, total_steps=_STEPS)
    model, history = xf.fit(model, loss, batches, optimizer=optimizer, learning_rate=rate, data_parallel=2)
    if len(history) < len(batches):  # Ctrl-C ends training after the current step
        raise KeyboardInterrupt
    return model


def _of_model(name: str, model: Any, *columns: Any) -> Iterator[Numbers]:
    """Compute the weights of a model, its logits for rows of ids, and its outputs for those of the first column."""
    yield f"weights of {name}", "trained", [array for _, array in model.named_arrays()]
    for kind, each, methods in (name, model, _METHODS), (f"{name} in int8", model.quantize().pack(), ["sampling"]):
        yield from _logits(kind, each, columns, is_trainable=each is model)
        for method in methods:
            yield from _outputs(f"{method} of {kind}", each, columns[0], _METHODS[method])


def _logits(name: str, model: Any, columns: Sequence[Any], *, is_trainable: bool) -> Iterator[Numbers]:
    """Compute logits by passes over whole rows, alone and padded, by one that is differentiated, and in chunks."""

    def of_rows(rows: slice, apply: Any = model) -> list[Any]:
        logits = apply(*(pad(column[rows], 0) for column in columns))
        return [logits[row, : len(ids)] for row, ids in enumerate(columns[-1][rows])]

    def in_chunks(size: int, *column: Any, ids: Any) -> Any:
        cache = model.prefill(column) if column else model.init_cache(1)
        chunks = (np.asarray([ids[i : i + size]]) for i in range(0, len(ids), size))
        return np.concatenate([model.decode_step(chunk, cache, all_logits=True)[0] for chunk in chunks])

    def log_probabilities(*ids: Any) -> Any:
        return -xf.vjp(lambda model: cross_entropy(model(*ids), ids[-1]), model)[0]

    what, count = f"logits of {name}", len(columns[0])
    alone = [of_rows(slice(row, row + 1))[0] for row in range(count)]
    yield what, "alone", alone
    yield what, "padded", of_rows(slice(count))
    if is_trainable:
        yield what, "differentiated", of_rows(slice(count), lambda *ids: xf.vjp(lambda model: model(*ids), model)[0])
        chosen = [log_softmax(x)[range(len(x)), ids] for x, ids in zip(alone, columns[-1], strict=True)]
        yield f"log-probabilities of {name}", "chosen", chosen
        yield f"log-probabilities of {name}", "differentiated", of_rows(slice(count), log_probabilities)
    for size in (1, 13):
        rows = zip(*columns, strict=True)
        yield what, f"in chunks of {size}", [in_chunks(size, *source, ids=ids) for *source, ids in rows]


def _outputs(what: str, model: Any, inputs: list[list[int]], options: dict[str, Any]) -> Iterator[Numbers]:
    """Decode alone, in batches, in an engine where inputs join and leave, with a prefix cache and draft tokens."""

    def batches(size: int, **more: Any) -> list[GenerationBatch]:
        rows = [range(len(inputs))[start : start + size] for start in range(0, len(inputs), size)]
        common = options | more | {"rng": xf.Rng(0), "max_new_tokens": 12, "max_length_ratio": 0.8}
        return [GenerationBatch(model, inputs[each.start : each.stop], indices=each, **common) for each in rows]

    def run(size: int, **more: Any) -> list[Any]:
        return [output for batch in batches(size, **more) for output in run_task(search(batch))]

    yield what, "alone", run(1)
    for size in (2, len(inputs)):
        yield what, f"in batches of {size}", run(size)
    engine, searches = Engine(is_shared=True), []
    for batch in batches(1):
        searches += searches_of(batch)
        engine.add(searches[-1:])
        engine.step()
    while not engine.is_idle:
        engine.step()
    yield what, "joining others", [output for each in searches for output in each.result()]
    if isinstance(model, xf.LanguageModel):
        cache = PrefixCache()
        for way in ("with an empty prefix cache", "with a prefix cache"):
            yield what, way, run(1, prefix_cache=cache)
        if "num_beams" not in options:
            yield what, "with a draft model", run(len(inputs), draft_model=model)
            yield what, "with draft tokens of the prompt", run(1, prompt_lookup_num_tokens=4)
