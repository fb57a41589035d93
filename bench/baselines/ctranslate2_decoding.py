"""Decoding by CTranslate2 with the weights of xformer's models, in float32 or int8."""

from __future__ import annotations

import math
import os
import tempfile
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.converters import Converter
from ctranslate2.specs import common_spec, transformer_spec
from workloads.language_model_decoding import language_model

from xformer.backends import resolve
from xformer.benchmarks import Computation, decoding
from xformer.layers.positions import sinusoidal

_MAX_LENGTH = 512
_ACTIVATIONS = {"relu": common_spec.Activation.RELU, "gelu_tanh": common_spec.Activation.GELUTanh}


def build(settings: dict[str, Any]) -> Computation:
    """Build translation; settings as in xformer.benchmarks.decoding.build, and compute_type ("float32" or "int8")."""
    ours = decoding.make_model(settings, "numpy")
    translator = _load(ctranslate2.Translator, _TransformerConverter(ours), settings)
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
    generator = _load(ctranslate2.Generator, _LanguageModelConverter(ours), settings)
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


def _load(model_class: Any, converter: Converter, settings: dict[str, Any]) -> Any:
    """Write a model in CTranslate2's format and load it."""
    compute_type = settings["compute_type"]
    threads = {"inter_threads": 1, "intra_threads": int(os.environ["XFORMER_NUM_THREADS"])}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model")
        converter.convert(path, quantization=None if compute_type == "float32" else compute_type)
        return model_class(path, device="cpu", compute_type=compute_type, **threads)


class _TransformerConverter(Converter):
    """Converts xformer's Transformer."""

    def __init__(self, ours: Any) -> None:
        self.ours = ours

    def _load(self) -> Any:
        ours, config = self.ours, self.ours.config
        spec = transformer_spec.TransformerSpec.from_config(
            (config.num_encoder_layers, config.num_decoder_layers),
            config.num_heads,
            pre_norm=config.norm_position == "pre",
            activation=_ACTIVATIONS[config.activation],
        )
        table = sinusoidal(_MAX_LENGTH, config.d_model, xp=resolve("numpy"), dtype=np.float32)
        for stack, layers in ((spec.encoder, ours.encoder), (spec.decoder, ours.decoder)):
            embeddings = stack.embeddings[0] if isinstance(stack.embeddings, list) else stack.embeddings
            embeddings.weight = ours.source_embedding.weight
            stack.scale_embeddings = math.sqrt(config.d_model)
            stack.position_encodings.encodings = np.array(table)
            _set_layers(stack, layers)
        _set_linear(spec.decoder.projection, ours.output)
        spec.decoder.projection.bias = ours.output_bias
        names = token_names(config.source_vocab_size)
        spec.register_source_vocabulary(names)
        spec.register_target_vocabulary(names)
        return spec


class _LanguageModelConverter(Converter):
    """Converts xformer's LanguageModel."""

    def __init__(self, ours: Any) -> None:
        self.ours = ours

    def _load(self) -> Any:
        ours, config = self.ours, self.ours.config
        spec = transformer_spec.TransformerDecoderModelSpec.from_config(
            config.num_layers, config.num_heads, pre_norm=True, activation=_ACTIVATIONS[config.activation]
        )
        spec.decoder.embeddings.weight = ours.embedding.weight
        spec.decoder.scale_embeddings = False
        spec.decoder.position_encodings.encodings = ours.input.positions.weight
        _set_layers(spec.decoder, ours.layers)
        _set_norm(spec.decoder.layer_norm, ours.norm)
        _set_linear(spec.decoder.projection, ours.output)
        spec.register_vocabulary(token_names(config.vocab_size))
        return spec


def _set_layers(stack: Any, layers: Any) -> None:
    for spec, layer in zip(stack.layer, layers, strict=True):
        attention = layer.self_attention
        _set_fused(spec.self_attention.linear[0], attention.query, attention.key, attention.value)
        _set_linear(spec.self_attention.linear[1], attention.output)
        _set_norm(spec.self_attention.layer_norm, layer.self_attention_residual.norm)
        if hasattr(layer, "cross_attention"):
            cross = layer.cross_attention
            _set_fused(spec.attention.linear[0], cross.query)
            _set_fused(spec.attention.linear[1], cross.key, cross.value)
            _set_linear(spec.attention.linear[2], cross.output)
            _set_norm(spec.attention.layer_norm, layer.cross_attention_residual.norm)
        _set_linear(spec.ffn.linear_0, layer.feed_forward.up)
        _set_linear(spec.ffn.linear_1, layer.feed_forward.down)
        _set_norm(spec.ffn.layer_norm, layer.feed_forward_residual.norm)


def _set_fused(spec: Any, *parts: Any) -> None:
    """Set a linear layer, possibly of fused projections; its weights are (out_features, in_features)."""
    spec.weight = np.ascontiguousarray(np.concatenate([part.weight for part in parts], axis=1).T)
    if parts[0].bias is not None:
        spec.bias = np.concatenate([part.bias for part in parts])


def _set_linear(spec: Any, ours: Any) -> None:
    _set_fused(spec, ours)


def _set_norm(spec: Any, ours: Any) -> None:
    spec.gamma, spec.beta = ours.weight, ours.bias
