"""Decoding: translations of so many tokens, greedily or by a beam.

The weights are random, but the output layer never lets a sentence end, so every contender writes exactly the tokens
that it is asked for, and they can be compared one by one. xformer computes one step more: at the limit it looks whether
the sentence would end there.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from typing import Any

from xformer.benchmarks import stacks
from xformer.benchmarks.interleaved import Case, in_dtype
from xformer.benchmarks.workload import Library, Work
from xformer.generation import DecodingOptions, decode
from xformer.models import Transformer
from xformer.tree import replace

TOKENS = 48  # of each output
_NEVER = -1e4  # added to the logits of padding, start and end
_SPECIAL = 3  # the first ids


def case(settings: dict[str, Any]) -> Case:
    """The case of translating a batch.

    settings: batch, length (of the sources), heads, head_dim, layers (of each stack), vocabulary, beam.
    """
    d_model = settings["heads"] * settings["head_dim"]
    search = "greedy" if settings["beam"] == 1 else f"beam {settings['beam']}"
    name = (
        f"{search}, batch {settings['batch']}, {TOKENS} tokens from {settings['length']}, "
        f"{settings['layers']}+{settings['layers']} layers, d_model {d_model}"
    )
    return Case(in_dtype(name, settings), settings, (settings["batch"] * TOKENS,), warm_up=1)


def translator(settings: dict[str, Any], xp: Any, dtype: str = "float32") -> Transformer:
    """The model, post-norm as in the paper, with an output layer of its own that never ends a sentence.

    With an output layer tied to the embedding, random weights would repeat one token, which proves nothing.
    """
    config = stacks.config(settings, norm_position="post", tie_output=False, output_bias=True)
    model = Transformer(config, xp="numpy", seed=0)
    bias = importlib.import_module("numpy").zeros(settings["vocabulary"], dtype="float32")
    bias[:_SPECIAL] = _NEVER
    made: Transformer = replace(model, {**dict(model.named_parameters()), "output_bias": bias}).to(xp, dtype=dtype)
    return made


def sources(settings: dict[str, Any]) -> list[list[int]]:
    """The sentences to translate."""
    return stacks.sentences(settings["batch"], settings["length"], settings["vocabulary"])


def digest(outputs: list[list[int]]) -> list[int]:
    """Every token of every output."""
    return list(itertools.chain.from_iterable(outputs))


def work(settings: dict[str, Any]) -> Work:
    """Translating by xformer, on the library that settings["backend"] names."""
    library = Library.of(settings)
    model = translator(settings, library.xp, library.dtype)
    options = DecodingOptions(num_beams=settings["beam"], max_length=TOKENS, keep_greedy=False)
    search = functools.partial(decode, model, sources(settings), options)
    return Work(lambda number: [found[0].tokens for found in search()], digest, {"parameters": model.parameter_count()})
