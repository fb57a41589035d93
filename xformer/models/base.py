"""The class of all models, which saves and loads them, and the factory of the layers that a configuration describes.

A file is one of safetensors: parameters by name, with the configuration in the metadata.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from xformer import hints, layers, native
from xformer.backends import Array, Device, DType, array_namespace, dtype_name, extra, is_floating, resolve
from xformer.errors import CheckpointError, ConfigError, ShapeError, check_arguments, describe_type
from xformer.io import StrPath, check_path, load_arrays, restorable_dtype, restore_like, save_arrays, takes_bfloat16
from xformer.layers.attention import PROJECTIONS
from xformer.layers.basic import NORMS, Norm, RMSNorm
from xformer.layers.positions import RelativePositions, position_terms
from xformer.layers.transformer import RESIDUALS, Residual, carried, total
from xformer.layers.weights import LoraWeight, check_no_adapters, dense_arrays, pack, quantize, unpack
from xformer.models.config import GATED, EncoderConfig, LanguageModelConfig, ModelConfig
from xformer.ops.attention import sharing_masks
from xformer.ops.blocks import BlockWeight
from xformer.ops.weights import inference_weights, named_weights, quantized_dtype
from xformer.random import Rng
from xformer.tracing import remat
from xformer.tracing.activations import is_observing
from xformer.tracing.grad import keep_for
from xformer.tree import Module, is_array, map_arrays, replace, walk, with_fields

_MODELS: dict[str, type[BaseModel]] = {}
_OTHERS = (
    " with xformer.load_pretrained(directory), and the parameters of another Module with "
    "xformer.load_parameters(module, path)"
)


def _begin_with_padding(positions: Array) -> bool:
    """Return whether rows may begin with padding: only distances matter to a rotation, except to its last bits."""
    xp, last = array_namespace(positions), positions.shape[1] - 1
    if not xp.is_host_accessible(positions):
        return native.is_reproducible()
    return bool(xp.any(positions[:, -1] != last))


class BaseModel(Module):
    """Base class of models: built from one configuration, and saved and loaded with it.

    A subclass sets `config_class` and defines `_build`, which makes the layers.

    Args:
        config: Configuration.
        xp: Array library, as a module or by name.
        seed: Seed of the parameters; the same seed gives the same parameters in every library. Or an `Initializer`,
            for a model that is a part of another; it has the library, dtype and device. None makes read-only zeros on
            NumPy, for parameters that are replaced afterwards.
        dtype: Floating dtype of the parameters; default float32.
        device: Device of the parameters, as the library names it.

    Attributes:
        config: Configuration.
        model_type: Type of the public checkpoint that the model was loaded from, e.g. "opt"; None for other models.
    """

    config_class: ClassVar[type[ModelConfig]]
    config: ModelConfig
    model_type: str | None = dataclasses.field(default=None, init=False)

    def __init__(
        self,
        config: Any,
        *,
        xp: Any = "numpy",
        seed: int | Rng | layers.Initializer | None = 0,
        dtype: DType | str | None = None,
        device: Device = None,
    ):
        if not isinstance(config, self.config_class):
            received, expected = describe_type(config), f"{self.config_class.__name__}(...)"
            raise ConfigError(f"{type(self).__name__} got {received} as config; expected {expected}")
        self.config = config
        if not isinstance(seed, layers.Initializer):
            seed = layers.Initializer(xp, seed=seed, dtype=dtype, device=device)
        self._build(LayerFactory(config, seed))

    def _build(self, make: LayerFactory) -> None:
        """Set the fields of the model."""
        raise NotImplementedError("BaseModel is abstract; use a subclass, e.g. Transformer")

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "__call__" in cls.__dict__:
            cls.__call__ = check_arguments(**hints.MODEL_CALL)(cls.__call__)  # type: ignore[method-assign]
        if hasattr(cls, "config_class"):  # others are bases of models
            _MODELS[cls.__name__] = cls

    def __repr__(self) -> str:
        rate = getattr(self.config, "dropout", None)
        note = "" if rate is None else f"  # dropout {rate:g}; model.with_config(dropout=0.1) sets another rate"
        return f"{super().__repr__()}{note}"

    @property
    def _parameter(self) -> Array:
        """A parameter of the library, floating dtype and device of the model."""
        return next(node for _, node in walk(self) if is_array(node) and is_floating(node.dtype))

    def parameter_count(self) -> int:
        """Return the number of elements in all parameters, also in those that `quantize` rounded to integers."""
        stored = {id(each.elements): math.prod(each.shape) for each in inference_weights(self)}
        arrays = (array for _, array in self.named_arrays() if is_floating(array.dtype) or id(array) in stored)
        return sum(stored.get(id(array), math.prod(array.shape)) for array in arrays)

    def quantize(self, dtype: str = "int8") -> Self:
        """Return the model for inference with weights in 8 or 16 bits; dtype and errors as for `layers.quantize`."""
        return quantize(self, dtype)

    def pack(self, inputs: str | None = None) -> Self:
        """Return the model for inference with packed weights, which decode faster; arguments of `layers.pack`.

        `save` and the exports write the weights of the original model.
        """
        return pack(self, inputs)

    def unpack(self) -> Self:
        """Return the model with the weights that `pack` got; those in the blocks of a GGUF file become float32."""
        return unpack(self)

    def to(self, xp: Any = None, *, dtype: DType | str | None = None, device: Device = None) -> Self:
        """Return the model with its arrays in another library, floating dtype or device; see `Module.to`.

        A model with weights in the blocks of a GGUF file is unpacked for another dtype than float32.
        """
        has_blocks = any(isinstance(weight, BlockWeight) for weight in inference_weights(self))
        model = self.unpack() if has_blocks and dtype is not None else self
        return super(BaseModel, model).to(xp, dtype=dtype, device=device)

    def _apply_layers(
        self,
        layers: Sequence[Module],
        x: Array,
        *args: Array,
        positions: Sequence[RelativePositions | None],
        at: Array | None = None,
        sizes: Array | None = None,
        rngs: Sequence[Rng | None],
        **options: Any,
    ) -> Any:
        """Apply layers in turn, and recompute them in the backward pass if the configuration says so.

        Args:
            layers: The layers.
            x: Input of the first one, (batch, length, d_model).
            *args: Further arguments of all layers.
            positions: Relative positions of each layer, or of all.
            at: Positions of the tokens, (batch, length): rows may begin with padding.
            sizes: As for `RelativePositions.terms`.
            rngs: Source of the dropout of each layer.
            **options: Keyword arguments of all layers.

        Returns:
            The output, for `final`: an array, or a Sum that waits for the final norm.
        """
        terms: dict[int, dict[str, Any]] = {id(None): {}}  # of the positions, which layers share
        length, like = x.shape[1], x
        options = map_arrays(functools.partial(keep_for, like), options)
        with sharing_masks():
            for layer, each, rng in zip(layers, itertools.cycle(positions), rngs, strict=False):
                if id(each) not in terms:
                    found = position_terms(each, length, length, like, sizes)
                    if at is not None and found.rotation is not None and _begin_with_padding(at):
                        found = found._replace(rotation=found.rotation.at(at))
                    terms[id(each)] = map_arrays(functools.partial(keep_for, like), found._asdict())
                function: Any = type(layer).__call__
                # A block sees the activations of the first computation, and those are kept.
                is_repeated = self.config.rematerialize and not is_observing()
                x, function = (total(x), remat(function)) if is_repeated else (carried(x), function)
                x = function(layer, x, *args, **options, **terms[id(each)], rng=rng)
        return x

    def _positions_of(
        self, num_layers: int, shared: RelativePositions | None, local: RelativePositions | None
    ) -> list[RelativePositions | None]:
        """Return the relative positions of each layer: the local ones, if there are any and the layer has a window."""
        local = shared if local is None else local
        return [shared if self.config.window_of(i) is None else local for i in range(num_layers)]

    def _logits_of(self: Any, x: Array, table: layers.Embedding) -> Array:
        """Return the logits of states after the final norm, by the output projection, or the table if it is tied."""
        c = self.config
        x = extra.cast_like(x * c.d_model**-0.5, x) if c.scale_output else x
        logits = table.unembed(x) if self.output is None else self.output(x)
        logits = logits if self.output_bias is None else logits + self.output_bias
        scale, cap = getattr(c, "logits_scale", 1.0), c.logits_softcap  # of Granite and Gemma 2
        logits = logits if scale == 1.0 else extra.cast_like(logits * scale, logits)
        return logits if cap is None else array_namespace(logits).tanh(logits * (1.0 / cap)) * cap

    def with_config(self, **changes: Any) -> Self:
        """Return the model with some fields of its configuration changed; the parameters are shared.

        Args:
            **changes: Fields that leave the names and shapes of the parameters as they are, e.g. dropout.

        Raises:
            ConfigError: If a value is invalid, or the changed model has other parameters.
            ShapeError: If the changed model has parameters of other shapes.
        """
        changed = type(self)(dataclasses.replace(self.config, **changes), seed=None)
        weights: Any = named_weights(self)
        return with_fields(replace(changed, dict(weights)), model_type=self.model_type)

    def save(self, path: StrPath) -> None:
        """Write parameters and configuration to one safetensors file, atomically.

        Args:
            path: File to write; its suffix is usually ".safetensors".

        Raises:
            ConfigError: If the model has adapters.
        """
        check_no_adapters(self)
        self._save_merged(path)

    def _save_merged(self, path: StrPath) -> None:
        """Write what `save` writes for `merge_lora(model)`, and compute a weight at a time, to save memory."""
        is_dense = any(isinstance(weight, LoraWeight | BlockWeight) for weight in inference_weights(self))
        config, dtype = json.dumps(self.config.to_dict()), dtype_name(self._parameter.dtype)
        metadata = {"format": "xformer", "model": type(self).__name__, "config": config, "dtype": dtype}
        if not is_dense and (quantized := quantized_dtype(self)):
            metadata["quantized"] = quantized
        save_arrays(path, dense_arrays(self) if is_dense else dict(unpack(self).named_arrays()), metadata)

    @classmethod
    def load(cls, path: StrPath, *, xp: Any = "numpy", dtype: DType | str | None = None, device: Device = None) -> Self:
        """Read a model that `save` wrote, into any library.

        Args:
            path: The file.
            xp: Array library, as a module or by name.
            dtype: Floating dtype of the parameters; default the saved one, or float32 if the library lacks it and for
                bfloat16 in NumPy. Not used for quantized models, which compute in float32.
            device: Device of the parameters, as the library names it.

        Raises:
            CheckpointError: If the file does not contain a model of this class.
            BackendError: If the library, dtype or device is not available.
        """
        check_path(path)
        if os.path.isdir(path):
            raise CheckpointError(f"{path} is a directory; load a public checkpoint or a run{_OTHERS}")
        arrays, metadata = load_arrays(path, keep=takes_bfloat16(xp))
        if metadata.get("format") != "xformer" or "config" not in metadata:
            received = f"{path} is a safetensors file without the configuration of an xformer model"
            raise CheckpointError(f"{received}; load a public checkpoint by its directory,{_OTHERS}")
        name = metadata.get("model", "Transformer")
        if name not in _MODELS:
            raise CheckpointError(f"{path} contains the model {name}, which is not defined; import its class first")
        if not issubclass(_MODELS[name], cls):
            raise CheckpointError(f"{path} contains the model {name}; use {name}.load(path)")
        if any(".feed_forward.expand." in key for key in arrays):
            raise CheckpointError(f"{path} is a model of xformer 0.1; convert it as docs/how-to/upgrade.md says")
        try:
            config = _MODELS[name].config_class.from_dict(json.loads(metadata["config"]), "configuration")
            if dtype is None:
                dtype = restorable_dtype(xp, metadata.get("dtype", "float32"))
            if quantized := metadata.get("quantized"):
                model: Any = _MODELS[name](config, seed=None).quantize(quantized)
                model = replace(model, restore_like(arrays, dict(model.named_arrays())))
                return model.to(xp, device=device)
            target = resolve(xp)
            floating = target.default_float(dtype)
            for key, array in arrays.items():
                own = floating if is_floating(array.dtype) else None
                arrays[key] = target.from_host(array, dtype=own, device=device)
            model = _MODELS[name](config, seed=None)  # takes no memory
            return replace(model, arrays)
        except (ConfigError, ShapeError, ValueError) as error:
            raise CheckpointError(f"{path} does not contain the model of its configuration: {error}") from error


def load(path: StrPath, *, xp: Any = "numpy", dtype: DType | str | None = None, device: Device = None) -> BaseModel:
    """Read a model of any class that `BaseModel.save` wrote; arguments and errors are those of `BaseModel.load`.

    The file records the class, which must be defined (imported) when it is read.
    """
    return BaseModel.load(path, xp=xp, dtype=dtype, device=device)


# --- The layers of a model, from its configuration --------------------------------------------------------------------


class LayerFactory:
    """Makes the layers of a model. Their parameters are drawn in the order of the calls.

    Args:
        config: Configuration of the model.
        init: Source of the parameters.
    """

    def __init__(self, config: ModelConfig, init: layers.Initializer) -> None:
        self.config = config
        self.init = init

    def norm(self, features: int | None = None, *, init: layers.Initializer | None = None) -> Norm:
        """Make a norm of a number of features, by default d_model."""
        c = self.config
        cls = NORMS[c.norm]
        options: dict[str, Any] = {} if cls is RMSNorm else {"bias": c.norm_bias}
        return cls(c.d_model if features is None else features, epsilon=c.norm_epsilon, **options, init=self.init)

    def final_norm(self) -> Norm | None:
        """Make the norm at the end of a stack, by default of a pre-norm stack: post-norm layers end with a norm."""
        c = self.config
        return self.norm() if (c.norm_position != "post" if c.final_norm is None else c.final_norm) else None

    def residual(self, *, norm: bool = True) -> Residual:
        """Make the residual connection of a sublayer, without `norm` one that normalizes nothing."""
        c = self.config
        options: dict[str, Any] = {"dropout": c.dropout, "scale": c.residual_scale}
        if c.layer_scale:
            options["layer_scale"] = self.init.ones((c.d_model,))
        if not norm:
            return layers.PreNorm(layers.Identity(), **options)
        norms = [self.norm() for _ in range(2 if c.norm_position == "sandwich" else 1)]
        return RESIDUALS[c.norm_position](*norms, **options)

    def attention(self, *, window: int | None = None, disentangled: bool = False) -> layers.MultiHeadAttention:
        """Make an attention layer, disentangled or not: that of the paper, unless a family of models needs another."""
        c = self.config
        biases = zip(PROJECTIONS, (None, c.key_bias, None, c.attention_output_bias), strict=True)
        bias = [name for name, bias in biases if (c.attention_bias if bias is None else bias)]
        options: dict[str, Any] = {"num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim, "bias": bias}
        options |= {"norm": self.norm if c.qk_norm else None, "scale": c.attention_scale, "window": window}
        options |= {"dropout": c.attention_dropout, "init": self.init}
        if not disentangled and not c.qk_norm_all_heads and not c.attention_sinks and c.attention_softcap is None:
            return layers.MultiHeadAttention(c.d_model, c.num_heads, **options)
        cls = layers.DisentangledAttention if disentangled else layers.FamilyAttention
        options |= {"norm_all_heads": c.qk_norm_all_heads, "softcap": c.attention_softcap, "sinks": c.attention_sinks}
        return cls(c.d_model, c.num_heads, **options)

    def feed_forward(self, index: int = 0) -> layers.FeedForward | layers.MixtureOfExperts:
        """Make the feed-forward network of a layer, or its mixture of experts; `index` counts from 0."""
        c = self.config
        if not c.has_experts(index):
            return self._network(c.d_ff)
        experts = [self._network(c.expert_d_ff or c.d_ff) for _ in range(c.num_experts)]
        shared = None if c.shared_expert_d_ff is None else self._network(c.shared_expert_d_ff)
        options: dict[str, Any] = {"normalize": c.normalize_expert_weights, "bias": c.router_bias, "init": self.init}
        count = c.num_experts_per_token
        return layers.MixtureOfExperts(experts, num_experts_per_token=count, shared=shared, **options)

    def _network(self, d_ff: int) -> layers.FeedForward:
        """Make a feed-forward network, gated if the activation is."""
        c: Any = self.config
        cls: type[layers.FeedForward] = layers.GatedFeedForward if c.activation in GATED else layers.FeedForward
        cls = layers.ClampedFeedForward if c.activation == "swiglu_clamped" else cls
        options: dict[str, Any] = {"bias": c.feed_forward_bias, "dropout": c.activation_dropout, "init": self.init}
        return cls(c.d_model, d_ff, activation=GATED.get(c.activation, c.activation), **options)

    def encoder_layer(
        self, index: int = 0, *, first_norm: bool = True
    ) -> layers.EncoderLayer | layers.SharedNormEncoderLayer:
        """Make a layer of an encoder or of a decoder-only model.

        Args:
            index: Number of the layer, from 0.
            first_norm: Normalize the input of self-attention.
        """
        c: Any = self.config
        attention = self.attention(window=c.window_of(index), disentangled=c.positions == "disentangled")
        options: dict[str, Any] = {"self_attention": attention, "feed_forward": self.feed_forward(index)}
        if c.shared_norm:
            return layers.SharedNormEncoderLayer(**options, residual=self.residual())
        cls: type[layers.EncoderLayer] = layers.ParallelEncoderLayer if c.parallel_residual else layers.EncoderLayer
        options["self_attention_residual"] = self.residual(norm=first_norm)
        options["feed_forward_residual"] = self.residual()
        if index == 0 and isinstance(c, EncoderConfig) and c.convolution_size:
            size, d_model = c.convolution_size, c.d_model
            cls = layers.ConvolutionEncoderLayer
            convolution = layers.Conv1d(d_model, d_model, kernel_size=size, padding=size // 2, init=self.init)
            options |= {"convolution": convolution, "convolution_norm": self.norm()}
            options["activation"] = c.convolution_activation
        return cls(**options)

    def decoder_layer(self, index: int = 0) -> layers.DecoderLayer:
        """Make a layer of the decoder of an encoder-decoder; `index` counts from 0."""
        return layers.DecoderLayer(
            self_attention=self.attention(window=self.config.window_of(index)),
            cross_attention=self.attention(),
            feed_forward=self.feed_forward(index),
            self_attention_residual=self.residual(),
            cross_attention_residual=self.residual(),
            feed_forward_residual=self.residual(),
        )

    def embedding(self, vocab_size: int, features: int | None = None) -> layers.Embedding:
        """Make a table of token vectors of a number of features, by default d_model."""
        c = self.config
        scale = c.scale_embeddings and not c.scale_positions
        return layers.Embedding(
            vocab_size, features or c.d_model, scale=scale, factor=c.embedding_scale, init=self.init
        )

    def input_embedding(
        self, max_positions: int | None = None, features: int | None = None, *, norm_first: bool = False
    ) -> layers.InputEmbedding:
        """Make the layer between token vectors and the first layer.

        Args:
            max_positions: Number of learned positions, by default that of the configuration.
            features: Features of token vectors, by default d_model; if given, the layer projects them to d_model.
            norm_first: Normalize before positions are added.
        """
        c = self.config
        positions: layers.Sinusoidal | layers.LearnedPositions | None = None
        if c.positions == "sinusoidal":
            positions = layers.Sinusoidal(features or c.d_model, layout=c.sinusoidal_layout)
        elif c.positions == "learned":
            positions = layers.LearnedPositions(max_positions or c.max_positions, features or c.d_model, init=self.init)
        norm = self.norm(features) if c.embedding_norm else None
        projection = None if features is None else layers.Linear(features, c.d_model, init=self.init)
        options: dict[str, Any] = {"norm_first": norm_first, "dropout": c.dropout, "projection": projection}
        scale = c.scale_embeddings and c.scale_positions
        return layers.InputEmbedding(positions=positions, scale=scale, norm=norm, **options)

    def relative_positions(self, *, bidirectional: bool) -> RelativePositions | None:
        """Make the relative positions of a stack's self-attention; None if the configuration has absolute ones.

        Args:
            bidirectional: True if tokens attend to later ones, as in an encoder.
        """
        c = self.config
        if c.positions == "rotary":
            return self._rotary(c.rope_theta, c.rope_scaling)
        if c.positions == "alibi":
            # The bias of a decoder falls with the position of the key, whether or not it comes after the query.
            return layers.ALiBi(
                c.num_heads, scale=c.alibi_scale, signed=isinstance(c, LanguageModelConfig) and not c.causal
            )
        return self.relative_bias(bidirectional=bidirectional) if c.positions == "relative" else None

    def relative_bias(self, *, bidirectional: bool) -> layers.RelativeBias:
        """Make the bias of relative positions of T5; arguments are those of `relative_positions`."""
        return layers.RelativeBias(self.config.num_heads, bidirectional=bidirectional, **self._buckets())

    def relative_embedding(self) -> layers.RelativeEmbedding | None:
        """Make the vectors of distances for disentangled attention; None if the configuration has other positions."""
        c: Any = self.config
        if c.positions != "disentangled":
            return None
        return layers.RelativeEmbedding(c.d_model, self.norm(), **self._buckets())

    def _buckets(self) -> dict[str, Any]:
        c = self.config
        return {"num_buckets": c.relative_buckets, "max_distance": c.relative_max_distance, "init": self.init}

    def local_positions(self) -> RelativePositions | None:
        """Make the rotary positions of layers with a window, if those have other wavelengths; else None."""
        theta = self.config.rope_local_theta
        return None if theta is None or self.config.positions != "rotary" else self._rotary(theta)

    def _rotary(self, base: float, scaling: dict[str, Any] | None = None) -> layers.Rotary:
        features = self.config.features_per_head
        return layers.Rotary(features, base=base, features=int(features * self.config.rotary_fraction), scaling=scaling)
