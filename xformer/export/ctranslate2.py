"""Models in the format of CTranslate2, an inference engine for CPUs and GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.errors import BackendError, ConfigError, check_choice, describe_type
from xformer.io import StrPath, atomic_directory
from xformer.layers.weights import check_no_adapters
from xformer.models import BaseModel, LanguageModel, Transformer
from xformer.models.config import GATED
from xformer.ops.decoding import log_softmax
from xformer.ops.weights import quantized_dtype
from xformer.text.extras import require

QUANTIZATIONS = ("float32", "int8", "int16", "float16", "bfloat16")
# Largest difference of a log-probability from the model's in float32, and mean difference in other types.
TOLERANCE, MEAN_TOLERANCE = 1e-3, 1.0
_MAX_LENGTH = 2048  # rows of the table of positions, for models without a maximum
_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
# Values of fields that CTranslate2 computes; it has no counterpart of others.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation": (*_ACTIVATIONS, "swiglu", "geglu", "geglu_tanh"),
    "norm": ("layer", "rms"),
    "norm_position": ("pre", "post"),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logits_scale", "alibi_scale"), (1.0,)),
    **dict.fromkeys(("layer_scale", "parallel_residual", "qk_norm", "attention_sinks"), (False,)),
    **dict.fromkeys(("scale_positions", "decoder_norm_before_positions", "copy", "length_encoding"), (False,)),
    **dict.fromkeys(("window", "attention_softcap", "logits_softcap", "rope_scaling"), (None,)),
    "layers_without_positions": ((),),
    "num_experts": (0,),
}


class CTranslate2Export(NamedTuple):
    """A model that was exported to CTranslate2.

    Attributes:
        directory: The directory.
        difference: Mean difference from the log-probabilities of the model on random tokens.
    """

    directory: Path
    difference: float


def export_ctranslate2(
    model: BaseModel,
    directory: StrPath,
    *,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str] | None = None,
    quantization: str = "float32",
) -> CTranslate2Export:
    """Write an encoder-decoder or a language model for `ctranslate2.Translator` or `ctranslate2.Generator`.

    Outputs begin with `bos_id` of the model, and end with `eos_id`. Sources are tokens as the model gets them: if it
    was trained on sources with eos, pass eos. Before anything is written, the log-probabilities that CTranslate2
    computes for random tokens are compared with those of the model.

    Args:
        model: The model, of any array library.
        directory: Directory to write; new or empty.
        source_tokens: Text of each token by id, unique; for language models the only vocabulary.
        target_tokens: Text of each target token; default: the source tokens.
        quantization: Type of the stored weights: "float32", "int8", "int16", "float16" or "bfloat16".

    Returns:
        The directory, and the mean difference from the model.

    Raises:
        ConfigError: If CTranslate2 has no model that computes the same (the error names the field), a vocabulary is
            invalid, or the directory is not empty.
        BackendError: If ctranslate2 is not installed, or computes something else than the model.
        CheckpointError: If the directory cannot be written.
    """
    ctranslate2 = require("ctranslate2")
    check_choice("quantization", quantization, QUANTIZATIONS)
    _check_supported(model)
    c: Any = model.config
    sizes = [c.source_vocab_size, c.target_vocab_size] if isinstance(model, Transformer) else [c.vocab_size]
    vocabularies = [list(source_tokens), list(source_tokens if target_tokens is None else target_tokens)][: len(sizes)]
    for tokens, size in zip(vocabularies, sizes, strict=True):
        if len(tokens) != size or len(set(tokens)) != size:
            raise ConfigError(f"got {len(tokens)} tokens, {len(set(tokens))} of them different; expected {size}")
    with atomic_directory(directory) as temporary:
        host = model.unpack().to("numpy", dtype="float32")
        spec = _specification(host, vocabularies)
        spec.validate()
        spec.optimize(quantization=None if quantization == "float32" else quantization)
        spec.save(str(temporary))
        difference = _verify(ctranslate2, host, str(temporary), vocabularies, quantization)
    return CTranslate2Export(Path(directory), difference)


def _check_supported(model: BaseModel) -> None:
    """Raise ConfigError for models that CTranslate2 does not compute."""
    if type(model) not in (Transformer, LanguageModel):
        raise ConfigError(f"the model is {describe_type(model)}; expected a Transformer or a LanguageModel")
    check_no_adapters(model)
    if dtype := quantized_dtype(model):
        raise ConfigError(f"the model is quantized to {dtype}; export the original model with a quantization")
    config: Any = model.config
    if isinstance(model, Transformer) and not (model.encoder and model.decoder):
        raise ConfigError("the model has no encoder or no decoder; expected layers in both")
    for name, supported in _SUPPORTED.items():
        if (value := getattr(config, name, supported[0])) not in supported:
            expected = " or ".join(map(repr, supported))
            raise ConfigError(f"{name} is {value!r}; CTranslate2 supports {expected}")
    # Its language models lose the offset of relative positions after a prompt.
    refused, others = ("alibi", "language models") if isinstance(model, Transformer) else ("relative", "translators")
    if config.positions == refused:
        raise ConfigError(f"positions is {refused!r}; CTranslate2 supports it in {others}")
    has_pre_norm = config.norm_position == "pre"
    if config.final_norm not in (None, has_pre_norm):
        expected = f"{has_pre_norm!r} if norm_position is {config.norm_position!r}"
        raise ConfigError(f"final_norm is {config.final_norm!r}; CTranslate2 supports {expected}")


def _specification(model: Any, vocabularies: list[list[str]]) -> Any:
    """Return the specification of a NumPy model, with its vocabularies.

    The arrays are copies: CTranslate2 quantizes in place.
    """
    specs, c = require("ctranslate2.specs.transformer_spec"), model.config
    if isinstance(model, LanguageModel):
        model.check_generates()
        decoder = _stack(model, specs.TransformerDecoderSpec, model.layers, "", model.embedding)
        spec = specs.TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(vocabularies[0])
        names = vocabularies[0]
    else:
        source = model.source_embedding
        target = source if model.target_embedding is None else model.target_embedding
        encoder = _stack(model, specs.TransformerEncoderSpec, model.encoder, "encoder_", source)
        decoder = _stack(model, specs.TransformerDecoderSpec, model.decoder, "decoder_", target)
        spec = specs.TransformerSpec(encoder, decoder)
        spec.register_source_vocabulary(vocabularies[0])
        spec.register_target_vocabulary(vocabularies[1])
        names = vocabularies[1]
        spec.config.decoder_start_token = names[c.bos_id]
    if c.eos_id is None:
        raise ConfigError("eos_id is None; CTranslate2 expects the id of a token that ends outputs")
    config = spec.config
    config.bos_token = names[c.eos_id if c.bos_id is None else c.bos_id]
    config.eos_token, config.layer_norm_epsilon = names[c.eos_id], c.norm_epsilon
    if "<unk>" in names:
        config.unk_token = "<unk>"
    return spec


def _stack(model: Any, cls: Any, layers: Any, prefix: str, embedding: Any) -> Any:
    """Return the specification of an encoder or a decoder, by the prefix of the names of its other parts."""
    c, is_encoder = model.config, prefix == "encoder_"
    norm, inputs, positions = (getattr(model, f"{prefix}{part}") for part in ("norm", "input", "positions"))
    common = require("ctranslate2.specs.common_spec")
    options: dict[str, Any] = {
        "pre_norm": c.norm_position == "pre",
        "activation": common.Activation[_ACTIVATIONS[GATED.get(c.activation, c.activation)]],
        "ffn_glu": c.activation in GATED,
        "rms_norm": c.norm == "rms",
        "layernorm_embedding": c.embedding_norm,
        "relative_attention_bias": c.positions == "relative",
        "num_heads_kv": None if c.num_key_value_heads == c.num_heads else c.num_key_value_heads,
        "head_dim": c.head_dim,
    }
    if c.positions == "rotary":
        options |= {"rotary_dim": positions.features, "rotary_interleave": False, "rotary_base": c.rope_theta}
    if not is_encoder:
        options |= {"with_encoder_attention": bool(prefix), "alibi": c.positions == "alibi"}
    spec = cls(len(layers), c.num_heads, **options)
    embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
    embeddings.weight = np.array(embedding.weight)
    spec.scale_embeddings = np.float32(math.sqrt(c.d_model)) if c.scale_embeddings else False
    if hasattr(spec, "position_encodings"):
        length = c.max_positions if c.positions == "learned" else _MAX_LENGTH
        table = inputs.position_embeddings(length, next(iter(model.named_parameters()))[1])
        table = np.zeros((length, c.d_model), np.float32) if table is None else np.array(table)
        spec.position_encodings.encodings = table
    if c.embedding_norm:
        _set_norm(spec.layernorm_embedding, inputs.norm)
    if norm is not None:
        _set_norm(spec.layer_norm, norm)
    each = positions if isinstance(positions, tuple) else [positions] * len(layers)
    for layer_spec, layer, own in zip(spec.layer, layers, each, strict=True):
        _set_layer(c, layer_spec, layer, own)
    if not is_encoder:
        output, bias = model.output, model.output_bias
        spec.projection.weight = np.array(embedding.weight if output is None else output.weight.T)
        if bias is not None:
            spec.projection.bias = np.array(bias)
        if c.scale_output:
            spec.scale_outputs = np.float32(c.d_model**-0.5)
    return spec


def _set_layer(c: Any, spec: Any, layer: Any, positions: Any) -> None:
    own = layer.self_attention
    _set_attention(spec.self_attention, own, layer.self_attention_residual, (own.query, own.key, own.value))
    if c.positions == "relative":  # in every layer, as no other layer hands it on
        spec.self_attention.relative_attention_bias = np.array(positions.weight)
        spec.self_attention.relative_attention_max_distance = np.int32(c.relative_max_distance)
    if hasattr(layer, "cross_attention"):
        cross = layer.cross_attention
        parts = (cross.query,), (cross.key, cross.value)
        _set_attention(spec.attention, cross, layer.cross_attention_residual, *parts)
    feed_forward = layer.feed_forward
    _set_linear(spec.ffn.linear_0, getattr(feed_forward, "gate", feed_forward.up))
    if hasattr(feed_forward, "gate"):
        _set_linear(spec.ffn.linear_0_noact, feed_forward.up)
    _set_linear(spec.ffn.linear_1, feed_forward.down)
    _set_norm(spec.ffn.layer_norm, layer.feed_forward_residual.norm)


def _set_attention(spec: Any, attention: Any, residual: Any, *projections: tuple[Any, ...]) -> None:
    for linear, parts in zip(spec.linear, (*projections, (attention.output,)), strict=True):
        _set_linear(linear, *parts)
    _set_norm(spec.layer_norm, residual.norm)
    if attention.scale is not None:
        spec.queries_scale = np.float32(attention.scale)


def _set_linear(spec: Any, *parts: Any) -> None:
    """Set a linear map of one or several projections; its weight has the shape (out_features, in_features)."""
    spec.weight = np.ascontiguousarray(np.concatenate([part.weight for part in parts], axis=1).T)
    if any(part.bias is not None for part in parts):
        zeros = [np.zeros(part.weight.shape[1], np.float32) for part in parts]
        biases = zip(parts, zeros, strict=True)
        spec.bias = np.concatenate([zero if part.bias is None else part.bias for part, zero in biases])


def _set_norm(spec: Any, norm: Any) -> None:
    spec.gamma = np.array(norm.weight)
    if hasattr(spec, "beta"):
        spec.beta = np.zeros_like(norm.weight) if norm.bias is None else np.array(norm.bias)


def _verify(ctranslate2: Any, model: Any, directory: str, vocabularies: list[list[str]], quantization: str) -> float:
    """Return the mean difference of log-probabilities; raise BackendError if it is too large."""
    rng, c = np.random.default_rng(0), model.config
    lengths = 7, 12
    choices = [[token for token in range(len(names)) if token not in (c.pad_id, c.bos_id)] for names in vocabularies]
    ids = [rng.choice(choices[-1], length).tolist() for length in lengths]
    texts = [[vocabularies[-1][token] for token in row] for row in ids]
    options = {"device": "cpu", "compute_type": "float32" if "float" in quantization else "default"}
    differences: list[Any] = []
    if isinstance(model, LanguageModel):
        scores = ctranslate2.Generator(directory, **options).score_batch(texts)
        for row, score in zip(ids, scores, strict=True):
            log_probs = log_softmax(model(np.asarray([row])))[0]
            differences.append(log_probs[np.arange(len(row) - 1), row[1:]] - score.log_probs)
    else:
        sources = [rng.choice(choices[0], length).tolist() for length in lengths[::-1]]
        names = [[vocabularies[0][token] for token in source] for source in sources]
        scores = ctranslate2.Translator(directory, **options).score_batch(names, texts)
        for source, row, score in zip(sources, ids, scores, strict=True):
            log_probs = log_softmax(model(np.asarray([source]), np.asarray([[c.bos_id, *row]])))[0]
            differences.append(log_probs[np.arange(len(row) + 1), [*row, c.eos_id]] - score.log_probs)
    errors = np.abs(np.concatenate(differences))
    if not (errors.max() <= TOLERANCE if quantization == "float32" else errors.mean() <= MEAN_TOLERANCE):
        received = f"CTranslate2 {ctranslate2.__version__} computes log-probabilities that differ by {errors.max():.1e}"
        raise BackendError(f"{received} from the model; expected the same")
    return float(errors.mean())
