"""Decoding by CTranslate2 with the weights of xformer's models, in float32 or int8."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import ctranslate2
from workloads import decoding
from workloads.language_model_decoding import language_model

from xformer.benchmarks.computation import Computation
from xformer.export import export_ctranslate2


def build(settings: dict[str, Any]) -> Computation:
    """Build translation; settings as in workloads.decoding.build, and compute_type ("float32" or "int8")."""
    ours = decoding.make_model(settings, "numpy")
    translator = _load(ctranslate2.Translator, ours, settings)
    names = token_names(settings["vocabulary"])
    ids = {name: index for index, name in enumerate(names)}
    sources = [[names[token] for token in source] for source in decoding.make_sources(settings)]
    options = {"beam_size": settings["beam"], "max_decoding_length": decoding.NUM_TOKENS, "length_penalty": 0.0}

    def step(index: int) -> list[list[int]]:
        return [
            [ids[name] for name in result.hypotheses[0]] for result in translator.translate_batch(sources, **options)
        ]

    return Computation(step, decoding.fingerprint)


def build_language_model(settings: dict[str, Any]) -> Computation:
    """Build the continuation of prompts by a language model."""
    ours = language_model(settings, "numpy")
    generator = _load(ctranslate2.Generator, ours, settings)
    names = token_names(settings["vocabulary"])
    prompts = [[names[token] for token in prompt] for prompt in decoding.make_sources(settings)]
    # Without an end token, every continuation has the maximum length.
    options = {"max_length": decoding.NUM_TOKENS, "include_prompt_in_result": False, "end_token": []}

    def step(index: int) -> list[list[int]]:
        return [result.sequences_ids[0] for result in generator.generate_batch(prompts, **options)]

    return Computation(step, decoding.fingerprint)


def token_names(vocabulary: int) -> list[str]:
    """Return the tokens of CTranslate2's vocabulary."""
    return ["<blank>", "<s>", "</s>", "<unk>", *(f"t{number}" for number in range(4, vocabulary))]


def _load(model_class: Any, ours: Any, settings: dict[str, Any]) -> Any:
    """Export a model and load it."""
    compute_type = settings["compute_type"]
    threads = {"inter_threads": 1, "intra_threads": int(os.environ["XFORMER_NUM_THREADS"])}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model")
        export_ctranslate2(ours, path, source_tokens=token_names(settings["vocabulary"]), quantization=compute_type)
        return model_class(path, device="cpu", compute_type=compute_type, **threads)
