"""Decoding by CTranslate2, in float32 or with weights in int8, from the weights of ours."""

from __future__ import annotations

import math
import os
import tempfile
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.converters import Converter
from ctranslate2.specs import common_spec, transformer_spec
from works.language_model_decoding import language_model

from xformer.backends import resolve
from xformer.benchmarks import Work, decoding
from xformer.layers.positions import sinusoidal

_LONGEST = 512
_ACTIVATIONS = {"relu": common_spec.Activation.RELU, "gelu_tanh": common_spec.Activation.GELUTanh}


def work(settings: dict[str, Any]) -> Work:
    """Translating. settings: those of xformer.benchmarks.decoding.work, and compute_type ("float32" or "int8")."""
    ours = decoding.translator(settings, "numpy")
    translator = _load(ctranslate2.Translator, _Sequences(ours), settings)
    names = token_names(settings["vocabulary"])
    ids = {name: place for place, name in enumerate(names)}
    sources = [[names[token] for token in source] for source in decoding.sources(settings)]
    how = {"beam_size": settings["beam"], "max_decoding_length": decoding.TOKENS, "length_penalty": 0.0}

    def step(number: int) -> list[list[int]]:
        return [[ids[name] for name in found.hypotheses[0]] for found in translator.translate_batch(sources, **how)]

    return Work(step, decoding.digest)


def continuing(settings: dict[str, Any]) -> Work:
    """Going on from prompts."""
    ours = language_model(settings, "numpy")
    generator = _load(ctranslate2.Generator, _Continuations(ours), settings)
    names = token_names(settings["vocabulary"])
    prompts = [[names[token] for token in prompt] for prompt in decoding.sources(settings)]
    # No sentence ends: no output begins an end token that is not in the vocabulary.
    how = {"max_length": decoding.TOKENS, "include_prompt_in_result": False, "end_token": []}

    def step(number: int) -> list[list[int]]:
        return [found.sequences_ids[0] for found in generator.generate_batch(prompts, **how)]

    return Work(step, decoding.digest)


def token_names(vocabulary: int) -> list[str]:
    """What its vocabulary calls the ids."""
    return ["<blank>", "<s>", "</s>", "<unk>", *(f"t{number}" for number in range(4, vocabulary))]


def _load(kind: Any, converter: Converter, settings: dict[str, Any]) -> Any:
    """Write the model in its format, and read it back."""
    compute_type = settings["compute_type"]
    threads = {"inter_threads": 1, "intra_threads": int(os.environ["XFORMER_NUM_THREADS"])}
    with tempfile.TemporaryDirectory() as folder:
        place = os.path.join(folder, "model")
        converter.convert(place, quantization=None if compute_type == "float32" else compute_type)
        return kind(place, device="cpu", compute_type=compute_type, **threads)


class _Sequences(Converter):
    """Our encoder-decoder as its specification."""

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
        table = sinusoidal(_LONGEST, config.d_model, xp=resolve("numpy"), dtype=np.float32)
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


class _Continuations(Converter):
    """Our language model as its specification."""

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
        own = layer.self_attention
        _set_fused(spec.self_attention.linear[0], own.query, own.key, own.value)
        _set_linear(spec.self_attention.linear[1], own.output)
        _set_norm(spec.self_attention.layer_norm, layer.self_attention_residual.norm)
        if hasattr(layer, "cross_attention"):
            cross = layer.cross_attention
            _set_fused(spec.attention.linear[0], cross.query)
            _set_fused(spec.attention.linear[1], cross.key, cross.value)
            _set_linear(spec.attention.linear[2], cross.output)
            _set_norm(spec.attention.layer_norm, layer.cross_attention_residual.norm)
        _set_linear(spec.ffn.linear_0, layer.feed_forward.expand)
        _set_linear(spec.ffn.linear_1, layer.feed_forward.contract)
        _set_norm(spec.ffn.layer_norm, layer.feed_forward_residual.norm)


def _set_fused(spec: Any, *parts: Any) -> None:
    """Its weights are (out_features, in_features), ours the other way round."""
    spec.weight = np.ascontiguousarray(np.concatenate([part.weight for part in parts], axis=1).T)
    if parts[0].bias is not None:
        spec.bias = np.concatenate([part.bias for part in parts])


def _set_linear(spec: Any, ours: Any) -> None:
    _set_fused(spec, ours)


def _set_norm(spec: Any, ours: Any) -> None:
    spec.gamma, spec.beta = ours.weight, ours.bias
