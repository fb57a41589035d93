"""Running a model on several batches, and arguments that may differ between texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from xformer.backends import array_namespace
from xformer.errors import DataError
from xformer.text.normalize import check_texts
from xformer.threads import blas_threads, num_threads, parallel_map

Batch = TypeVar("Batch")
Result = TypeVar("Result")


def run_batches(function: Callable[[Batch], Result], batches: Iterable[Batch], model: Any) -> Iterator[Result]:
    """Yield function(batch) for each batch, in order; a NumPy model works on several batches in parallel threads."""
    allowed = num_threads()
    parameter = next(array for _, array in model.named_parameters())
    threads = allowed if array_namespace(parameter).name == "numpy" else 1
    remaining = iter(batches)
    while group := list(itertools.islice(remaining, threads)):
        # The matrix products of generation are small: threads inside them cost more than they gain, above all on a busy
        # machine, where one of them waits for another at every token.
        with blas_threads(allowed // len(group)):
            results = parallel_map(function, group)
        yield from results


def one_per_text(name: str, values: Sequence[Any], count: int) -> list[Any]:
    """Return the values as a list; raise DataError for a wrong number of them."""
    if not hasattr(values, "__len__") or len(values) != count:
        received = f"{len(values)} entries" if hasattr(values, "__len__") else f"type {type(values).__name__}"
        raise DataError(f"{name} has {received} for {count} texts; expected one for each, or one for all")
    return list(values)


def encode_phrases(
    sequence_bias: Sequence[str] | Sequence[Sequence[str]] | None, tokenizer: Any, count: int
) -> list[list[list[list[int]]]] | None:
    """Return the favored phrases of each text as token ids, for `generate`; None without any."""
    if isinstance(sequence_bias, str):
        raise DataError(f"sequence_bias is the text {sequence_bias!r}; expected a list of words or phrases")
    if not sequence_bias:
        return None
    if isinstance(sequence_bias, Iterable) and all(isinstance(phrase, str) for phrase in sequence_bias):
        return [[tokenizer.phrase_ids(phrase) for phrase in sequence_bias]] * count
    rows = one_per_text("sequence_bias", sequence_bias, count)
    for phrases in rows:
        check_texts(phrases, "sequence_bias")
    return [[tokenizer.phrase_ids(phrase) for phrase in phrases] for phrases in rows]
