"""Greedy decoding of a language model with the architecture of GPT-2."""

from __future__ import annotations

import functools
from typing import Any

import xformer as xf
from workloads.decoding import NUM_TOKENS, fingerprint, for_inference, make_sources
from xformer.benchmarks.computation import Backend, Computation
from xformer.benchmarks.interleaved import Workload
from xformer.generation import generate


def workload(settings: dict[str, Any]) -> Workload:
    """Return the workload of a batch of prompts.

    Args:
        settings: batch, length (of the prompts), heads, head_dim, layers, vocabulary.
    """
    d_model = settings["heads"] * settings["head_dim"]
    name = (
        f"language model, batch {settings['batch']}, {NUM_TOKENS} tokens after {settings['length']}, "
        f"{settings['layers']} layers, d_model {d_model}"
    )
    return Workload(name, settings, (settings["batch"] * NUM_TOKENS,), warmup_steps=1)


def language_model(settings: dict[str, Any], xp: Any) -> xf.LanguageModel:
    """Return a pre-norm model with learned positions and GELU; tied random weights would repeat one token."""
    d_model = settings["heads"] * settings["head_dim"]
    config = xf.LanguageModelConfig(
        vocab_size=settings["vocabulary"],
        num_layers=settings["layers"],
        d_model=d_model,
        num_heads=settings["heads"],
        d_ff=4 * d_model,
        activation="gelu_tanh",
        positions="learned",
        max_positions=settings["length"] + NUM_TOKENS + 1,
        scale_embeddings=False,
        tie_output=False,
        dropout=0.0,
    )
    return xf.LanguageModel(config, xp=xp, seed=0)


def build(settings: dict[str, Any]) -> Computation:
    """Build decoding by xformer on settings["backend"], with quantized weights if settings has "quantize"."""
    model = for_inference(language_model(settings, Backend(settings["backend"]).xp), settings)
    # Without special tokens, every continuation has the maximum length.
    search = functools.partial(generate, model, make_sources(settings), max_new_tokens=NUM_TOKENS, special_tokens=False)

    def step(index: int) -> list[list[int]]:
        return [hypotheses[0].tokens for hypotheses in search()]

    return Computation(step, fingerprint, {"parameters": model.parameter_count()})
