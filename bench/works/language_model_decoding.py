"""A language model of GPT-2's architecture goes on from prompts, greedily."""

from __future__ import annotations

import functools
from typing import Any

import xformer as xf
from xformer.benchmarks import Case, Library, Work
from xformer.benchmarks.decoding import TOKENS, digest, sources
from xformer.generation import DecodingOptions, generate


def case(settings: dict[str, Any]) -> Case:
    """The case of a batch of prompts. settings: batch, length (of prompts), heads, head_dim, layers, vocabulary."""
    d_model = settings["heads"] * settings["head_dim"]
    name = (
        f"language model, batch {settings['batch']}, {TOKENS} tokens after {settings['length']}, "
        f"{settings['layers']} layers, d_model {d_model}"
    )
    return Case(name, settings, (settings["batch"] * TOKENS,), warm_up=1)


def language_model(settings: dict[str, Any], xp: Any) -> xf.LanguageModel:
    """The model: pre-norm, learned positions, GELU; untied, since random weights would repeat one token otherwise."""
    d_model = settings["heads"] * settings["head_dim"]
    config = xf.LanguageModelConfig(
        vocab_size=settings["vocabulary"],
        num_layers=settings["layers"],
        d_model=d_model,
        num_heads=settings["heads"],
        d_ff=4 * d_model,
        activation="gelu_tanh",
        positions="learned",
        max_positions=settings["length"] + TOKENS + 1,
        scale_embeddings=False,
        tie_output=False,
        dropout=0.0,
    )
    return xf.LanguageModel(config, xp=xp, seed=0)


def work(settings: dict[str, Any]) -> Work:
    """By xformer, on the library that settings["backend"] names."""
    model = language_model(settings, Library(settings["backend"]).xp)
    # No token is special, so every continuation has the most tokens allowed.
    search = functools.partial(
        generate, model, sources(settings), DecodingOptions(max_length=TOKENS), special_tokens=False
    )
    return Work(lambda number: [found[0].tokens for found in search()], digest, {"parameters": model.parameter_count()})
