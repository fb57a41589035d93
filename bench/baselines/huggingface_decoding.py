"""Decoding by Hugging Face on torch with the weights of xformer's models; Marian is the post-norm translator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MarianConfig, MarianMTModel
from transformers.utils import logging
from workloads import decoding
from workloads.language_model_decoding import language_model

from baselines.torch_attention import load_linear
from baselines.torch_models import load_norm
from baselines.torch_support import device_and_dtype, tensor
from xformer.backends import resolve
from xformer.benchmarks.computation import Computation
from xformer.layers.positions import sinusoidal

_MAX_LENGTH = 512

logging.set_verbosity_error()


def build(settings: dict[str, Any]) -> Computation:
    """Build translation; settings as in workloads.decoding.build."""
    model = marian(decoding.make_model(settings, "numpy")).eval().to(**device_and_dtype(settings))
    ids = torch.tensor(decoding.make_sources(settings)).to(model.device)
    options = {"num_beams": settings["beam"], "length_penalty": 0.0}
    if settings["beam"] == 1:
        del options["length_penalty"]  # Hugging Face warns that greedy search ignores it

    def step(index: int) -> list[list[int]]:
        outputs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=decoding.NUM_TOKENS, **options
        )
        return outputs[:, 1:].tolist()  # without the start token

    return Computation(step, decoding.fingerprint, context=torch.inference_mode)


def build_language_model(settings: dict[str, Any]) -> Computation:
    """Build the continuation of prompts by a language model."""
    model = gpt2(language_model(settings, "numpy")).eval().to(**device_and_dtype(settings))
    ids = torch.tensor(decoding.make_sources(settings)).to(model.device)

    def step(index: int) -> list[list[int]]:
        outputs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=decoding.NUM_TOKENS)
        return outputs[:, ids.shape[1] :].tolist()

    return Computation(step, decoding.fingerprint, context=torch.inference_mode)


def marian(ours: Any) -> Any:
    """Return a MarianMTModel with the weights of xformer's Transformer."""
    config = ours.config
    model = MarianMTModel(
        MarianConfig(
            vocab_size=config.source_vocab_size,
            d_model=config.d_model,
            encoder_layers=config.num_encoder_layers,
            decoder_layers=config.num_decoder_layers,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            activation_function=config.activation,
            scale_embedding=True,
            max_position_embeddings=_MAX_LENGTH,
            tie_word_embeddings=False,
            decoder_start_token_id=config.bos_id,
            pad_token_id=config.pad_id,
            eos_token_id=config.eos_id,
            forced_eos_token_id=None,
            dropout=0.0,
        )
    )
    table = torch.tensor(sinusoidal(_MAX_LENGTH, config.d_model, xp=resolve("numpy"), dtype=np.float32))
    with torch.no_grad():
        for stack, layers in ((model.model.encoder, ours.encoder), (model.model.decoder, ours.decoder)):
            stack.embed_tokens.weight.copy_(tensor(ours.source_embedding.weight))
            stack.embed_positions.weight.copy_(table)
            for theirs, layer in zip(stack.layers, layers, strict=True):
                _load_layer(theirs, layer)
        load_linear(model.lm_head, ours.output)
        model.final_logits_bias.copy_(tensor(ours.output_bias)[None])
    return model


def _load_layer(theirs: Any, ours: Any) -> None:
    _load_attention(theirs.self_attn, ours.self_attention)
    load_norm(theirs.self_attn_layer_norm, ours.self_attention_residual.norm)
    if hasattr(theirs, "encoder_attn"):
        _load_attention(theirs.encoder_attn, ours.cross_attention)
        load_norm(theirs.encoder_attn_layer_norm, ours.cross_attention_residual.norm)
    load_linear(theirs.fc1, ours.feed_forward.up)
    load_linear(theirs.fc2, ours.feed_forward.down)
    load_norm(theirs.final_layer_norm, ours.feed_forward_residual.norm)


def _load_attention(theirs: Any, ours: Any) -> None:
    for name, part in (("q", ours.query), ("k", ours.key), ("v", ours.value), ("out", ours.output)):
        load_linear(getattr(theirs, f"{name}_proj"), part)


def gpt2(ours: Any) -> Any:
    """Return a GPT2LMHeadModel with the weights of xformer's LanguageModel, in the same layout."""
    config = ours.config
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_positions,
            n_embd=config.d_model,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.d_ff,
            activation_function="gelu_new",  # tanh approximation
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    with torch.no_grad():
        model.transformer.wte.weight.copy_(tensor(ours.embedding.weight))
        model.transformer.wpe.weight.copy_(tensor(ours.input.positions.weight))
        for theirs, layer in zip(model.transformer.h, ours.layers, strict=True):
            attention = layer.self_attention
            load_norm(theirs.ln_1, layer.self_attention_residual.norm)
            _load_rows(theirs.attn.c_attn, attention.query, attention.key, attention.value)
            _load_rows(theirs.attn.c_proj, attention.output)
            load_norm(theirs.ln_2, layer.feed_forward_residual.norm)
            _load_rows(theirs.mlp.c_fc, layer.feed_forward.up)
            _load_rows(theirs.mlp.c_proj, layer.feed_forward.down)
        load_norm(model.transformer.ln_f, ours.norm)
        load_linear(model.lm_head, ours.output)
    return model


def _load_rows(theirs: Any, *parts: Any) -> None:
    theirs.weight.copy_(torch.cat([tensor(part.weight) for part in parts], dim=1))
    theirs.bias.copy_(torch.cat([tensor(part.bias) for part in parts]))
