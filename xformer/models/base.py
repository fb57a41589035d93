"""Saving and loading of models: safetensors files of parameters by name, with the configuration in the metadata."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from xformer import hints, native
from xformer.backends import Array, Device, DType, array_namespace, dtype_name, extra, is_floating
from xformer.errors import CheckpointError, ConfigError, ShapeError, check_arguments, describe_type
from xformer.io import check_path, load_arrays, restorable_dtype, restore_like, save_arrays, takes_bfloat16
from xformer.layers import Embedding, Initializer
from xformer.layers.adapters import LoraWeight, check_no_adapters, dense_arrays
from xformer.layers.positions import RelativePositions, position_terms
from xformer.layers.quantization import pack, quantize, unpack
from xformer.layers.transformer import carried, total
from xformer.models.builder import LayerFactory
from xformer.models.config import ModelConfig
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
        seed: int | Rng | Initializer | None = 0,
        dtype: DType | str | None = None,
        device: Device = None,
    ):
        if not isinstance(config, self.config_class):
            received, expected = describe_type(config), f"{self.config_class.__name__}(...)"
            raise ConfigError(f"{type(self).__name__} got {received} as config; expected {expected}")
        self.config = config
        init = seed if isinstance(seed, Initializer) else Initializer(xp, seed=seed, dtype=dtype, device=device)
        self._build(LayerFactory(config, init))

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

    def _logits_of(self: Any, x: Array, table: Embedding) -> Array:
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write parameters and configuration to one safetensors file, atomically.

        Args:
            path: File to write; its suffix is usually ".safetensors".

        Raises:
            ConfigError: If the model has adapters.
        """
        check_no_adapters(self)
        self._save_merged(path)

    def _save_merged(self, path: str | os.PathLike[str]) -> None:
        """Write what `save` writes for `merge_lora(model)`, and compute a weight at a time, to save memory."""
        is_dense = any(isinstance(weight, LoraWeight | BlockWeight) for weight in inference_weights(self))
        config, dtype = json.dumps(self.config.to_dict()), dtype_name(self._parameter.dtype)
        metadata = {"format": "xformer", "model": type(self).__name__, "config": config, "dtype": dtype}
        if not is_dense and (quantized := quantized_dtype(self)):
            metadata["quantized"] = quantized
        save_arrays(path, dense_arrays(self) if is_dense else dict(unpack(self).named_arrays()), metadata)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, xp: Any = "numpy", dtype: DType | str | None = None, device: Device = None
    ) -> Self:
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
            model = _MODELS[name](config, xp=xp, dtype=dtype, device=device)
            return replace(model, restore_like(arrays, dict(model.named_arrays())))
        except (ConfigError, ShapeError, ValueError) as error:
            raise CheckpointError(f"{path} does not contain the model of its configuration: {error}") from error


def load(
    path: str | os.PathLike[str], *, xp: Any = "numpy", dtype: DType | str | None = None, device: Device = None
) -> BaseModel:
    """Read a model of any class that `BaseModel.save` wrote; arguments and errors are those of `BaseModel.load`.

    The file records the class, which must be defined (imported) when it is read.
    """
    return BaseModel.load(path, xp=xp, dtype=dtype, device=device)
