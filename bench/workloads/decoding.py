"""Decoding: translations of a fixed number of tokens by greedy or beam search.

The weights are random, but the output layer never ends a sentence, so every implementation writes the same number of
tokens and the tokens can be compared one by one. xformer computes one step more than the others: at the limit it checks
whether the sentence ends.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from workloads import stacks
from xformer.benchmarks.computation import Backend, Computation
from xformer.benchmarks.interleaved import Workload, name_with_dtype
from xformer.generation import GenerationConfig, generate
from xformer.models import Transformer
from xformer.tree import replace

NUM_TOKENS = 48  # of each output
_SUPPRESSED_LOGIT = -1e4  # added to the logits of padding, start and end
_NUM_SPECIAL_TOKENS = 3  # the first ids


def workload(settings: dict[str, Any]) -> Workload:
    """Return the workload of translating a batch.

    Args:
        settings: batch, length (of the sources), heads, head_dim, layers (of each stack), vocabulary, beam.
    """
    d_model = settings["heads"] * settings["head_dim"]
    search = "greedy" if settings["beam"] == 1 else f"beam {settings['beam']}"
    name = (
        f"{search}, batch {settings['batch']}, {NUM_TOKENS} tokens from {settings['length']}, "
        f"{settings['layers']}+{settings['layers']} layers, d_model {d_model}"
    )
    tokens = settings["batch"] * NUM_TOKENS
    return Workload(name_with_dtype(name, settings), settings, (tokens,), warmup_steps=1)


def make_model(settings: dict[str, Any], xp: Any, dtype: str = "float32") -> Transformer:
    """Return a post-norm model whose output layer never ends a sentence.

    The output layer is not tied to the embedding: with random weights, a tied one would repeat a single token.
    """
    config = stacks.config(settings, norm_position="post", tie_output=False, output_bias=True)
    model = Transformer(config, xp="numpy", seed=0)
    bias = np.zeros(settings["vocabulary"], dtype="float32")
    bias[:_NUM_SPECIAL_TOKENS] = _SUPPRESSED_LOGIT
    suppressed: Transformer = replace(model, {**dict(model.named_arrays()), "output_bias": bias})
    return suppressed.to(xp, dtype=dtype)


def for_inference(model: Any, settings: dict[str, Any]) -> Any:
    """Return the model packed, as pipelines do, with weights in settings["quantize"] if given."""
    return (model.quantize(settings["quantize"]) if "quantize" in settings else model).pack()


def make_sources(settings: dict[str, Any]) -> list[list[int]]:
    """Return the sentences to translate."""
    return stacks.sentences(settings["batch"], settings["length"], settings["vocabulary"])


def fingerprint(outputs: list[list[int]]) -> list[list[int]]:
    """Return every token of every output, in one list."""
    return [list(itertools.chain.from_iterable(outputs))]


def build(settings: dict[str, Any]) -> Computation:
    """Build translation by xformer on settings["backend"], with quantized weights if settings has "quantize"."""
    backend = Backend.from_settings(settings)
    model = for_inference(make_model(settings, backend.xp, backend.dtype), settings)
    config = GenerationConfig(num_beams=settings["beam"], max_new_tokens=NUM_TOKENS, keep_greedy=False)
    search = functools.partial(generate, model, make_sources(settings), config)

    def step(index: int) -> list[list[int]]:
        return [hypotheses[0].tokens for hypotheses in search()]

    return Computation(step, fingerprint, {"parameters": model.parameter_count()})
