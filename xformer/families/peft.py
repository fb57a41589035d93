"""LoRA adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from xformer.backends import array_namespace, device, dtype_name, to_host
from xformer.errors import CheckpointError, ConfigError, nearest_hint
from xformer.families.family import FAMILIES, Family
from xformer.families.layouts import Layout
from xformer.families.tensor_files import read_header
from xformer.io import StrPath, check_path, file_errors, read_json, save_arrays, write_json
from xformer.layers.weights import LoraWeight, adapters_of, linear_maps, with_adapters
from xformer.models import LanguageModel, Transformer
from xformer.models.base import BaseModel
from xformer.ops.weights import InferenceWeight

AnyModel = TypeVar("AnyModel", bound=BaseModel)
PREFIX, ADAPTER_CONFIG = "base_model.model.", "adapter_config.json"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(A|B|magnitude_vector)(\.weight)?")
# Settings of PEFT that change what an adapter computes, and the only values that are supported.
_FIXED: dict[str, Any] = {
    "bias": "none",
    **dict.fromkeys(("lora_bias", "use_bdlora", "use_qalora"), False),
    **dict.fromkeys(("modules_to_save", "target_parameters", "alora_invocation_tokens", "trainable_token_indices")),
    **dict.fromkeys(("layer_replication", "arrow_config", "kasa_config", "monteclora_config")),
}
_MUTATED = ("pissa", "olora", "loftq", "corda", "lora_ga")  # initializations that change the weights of the base model


def save_lora(
    model: BaseModel, directory: StrPath, *, model_type: str | None = None, base_model: str | None = None
) -> None:
    """Write the adapters of a model as a PEFT directory, which `peft.PeftModel.from_pretrained` loads.

    Args:
        model: A model with adapters; see `xformer.lora`.
        directory: Directory to write to; created if necessary.
        model_type: Model type of the base model; default that of the checkpoint that it was loaded from.
        base_model: Name or path of the base model, where PEFT and servers look for it; None: not written.

    Raises:
        ConfigError: If the model has no adapters, or the model type is unknown.
        CheckpointError: If the directory cannot be written.
    """
    check_path(directory)
    tensors, settings = lora_tensors(model, _family(model, model_type))
    if len({*settings.values()}) > 1:
        raise ConfigError(f"adapters have the ranks and alphas {sorted({*settings.values()})}; expected one each")
    rank, alpha = next(iter(settings.values()))
    use_dora = any(name.endswith("magnitude_vector") for name in tensors)
    path = Path(directory)
    with file_errors(f"cannot create {path}"):
        path.mkdir(parents=True, exist_ok=True)
    save_arrays(path / "adapter_model.safetensors", tensors, {"format": "pt"})
    names = sorted(name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in tensors if ".lora_A." in name)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": names}
    task = {LanguageModel: "CAUSAL_LM", Transformer: "SEQ_2_SEQ_LM"}.get(type(model))
    values |= {"use_dora": use_dora, "lora_dropout": 0.0, "bias": "none", "task_type": task, "inference_mode": True}
    write_json(path / ADAPTER_CONFIG, values | {"base_model_name_or_path": base_model})


def lora_tensors(model: BaseModel, family: Family) -> tuple[dict[str, Any], dict[str, tuple[int, float]]]:
    """Return the tensors of the adapters of a model as PEFT names them, and the rank and alpha of each module.

    Raises:
        ConfigError: If the model has no adapters, or some that PEFT does not have.
    """
    adapters = adapters_of(model)
    for name, _ in model.named_trainable_parameters():
        if not name.endswith((".lora_a", ".lora_b", ".magnitude")):
            raise ConfigError(f"{name} is trainable, which adapters do not include; use merge_lora and save_pretrained")
    tensors: dict[str, Any] = {}
    settings: dict[str, tuple[int, float]] = {}
    use_dora = any(weight.magnitude is not None for weight in adapters.values())
    if plain := sorted(name for name, weight in adapters.items() if use_dora and weight.magnitude is None):
        raise ConfigError(f"the adapter of {plain[0]} has no magnitude, and others have one; expected all or none")
    table = _tensors(family, model, adapters)
    if missing := sorted(adapters.keys() - {name for _, names in table.values() for name in names}):
        received = f"{family.model_types[0]} has no separate module for the adapter of {missing[0]}"
        raise ConfigError(f"{received}; use merge_lora(model) and save_pretrained")
    for tensor, (layout, parameters) in table.items():
        parts = [adapters[name] for name in parameters]
        shapes = [part.shape for part in parts]
        first, *others = (to_host(part.lora_a).T for part in parts)
        if not all(np.array_equal(first, other) for other in others):
            received = f"{tensor} of {family.model_types[0]} is one matrix, and the adapters of {', '.join(parameters)}"
            raise ConfigError(f"{received} differ in lora_a; use merge_lora(model) and save_pretrained")
        a = np.empty_like(first)
        b = np.empty((sum(shape[1] for shape in shapes), len(a)), a.dtype)
        magnitude = np.empty(len(b), a.dtype)
        for part, (rows, columns) in zip(parts, _places(layout, shapes), strict=True):
            a[:, rows], b[columns] = first, to_host(part.lora_b).T
            if part.magnitude is not None:
                magnitude[columns] = to_host(part.magnitude)
        tensors |= {f"{PREFIX}{tensor}.lora_A.weight": a, f"{PREFIX}{tensor}.lora_B.weight": b}
        tensors |= {f"{PREFIX}{tensor}.lora_magnitude_vector": magnitude} if use_dora else {}
        settings[tensor] = len(a), parts[0].scaling * len(a)
    return tensors, settings


def load_lora(model: AnyModel, directory: StrPath, *, model_type: str | None = None) -> AnyModel:
    """Return a model with the adapters of a PEFT directory; everything else is frozen.

    Args:
        model: The base model, e.g. from `load_pretrained`; it may be quantized, and is not changed.
        directory: Directory with adapter_config.json and adapter_model.safetensors.
        model_type: As for `save_lora`.

    Raises:
        CheckpointError: If a file is missing or damaged, or has settings or tensors that the model does not support.
        ConfigError: If the model has adapters already, or the model type is unknown.
    """
    check_path(directory)
    path = Path(directory)
    config = read_json(path / ADAPTER_CONFIG, "adapter configuration")
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} has adapters of type {config.get('peft_type')!r}; expected 'LORA'")
    for name, expected in _FIXED.items():
        if config.get(name) and config[name] != expected:
            raise CheckpointError(f"{path} has {name} {config[name]!r}; expected {expected!r}")
    initialization = config.get("init_lora_weights")
    if str(initialization).lower().startswith(_MUTATED):
        raise CheckpointError(
            f"{path} has init_lora_weights {initialization!r}, which changes the weights of the base model; expected a "
            "plain adapter: convert it with save_pretrained(path, path_initial_model_for_weight_conversion=...) of "
            "PEFT, or save the model that its merge_and_unload returns"
        )
    found: dict[str, dict[str, Any]] = {}
    for key, entry in read_header(path / "adapter_model.safetensors").items():
        match = _KEY.fullmatch(key)
        if key.endswith(".base_layer.weight"):  # PEFT's copy of an adapted output layer
            continue
        if match is None:
            raise CheckpointError(f"{path} has the tensor {key}; expected {PREFIX}NAME.lora_A.weight and lora_B")
        found.setdefault(match[1], {})[match[2]] = entry.read()
    family, layers = _family(model, model_type), linear_maps(model)
    table = _tensors(family, model, layers)
    weights, kinds = {}, ["A", "B", "magnitude_vector"] if config.get("use_dora") else ["A", "B"]
    for tensor, matrices in found.items():
        name = family.canonical_name(f"{tensor}.weight", {f"{each}.weight" for each in table}).removesuffix(".weight")
        if name not in table:
            raise CheckpointError(f"{path} has an adapter of {tensor}, which the model does not have")
        if sorted(matrices) != kinds:
            names = (", ".join(f"lora_{kind}" for kind in each) for each in (sorted(matrices), kinds))
            raise CheckpointError("{}: the adapter of {} has the tensors {}; expected {}".format(path, tensor, *names))
        layout, parameters = table[name]
        shapes = [tuple(layers[parameter].weight.shape) for parameter in parameters]
        rank = _setting(path, config, "r", "rank_pattern", tensor)
        alpha = _setting(path, config, "lora_alpha", "alpha_pattern", tensor)
        scaling = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        parts, num_columns = [matrices[kind] for kind in kinds], sum(shape[1] for shape in shapes)
        sizes = [(rank, shapes[0][0]), (num_columns, rank), (num_columns,)][: len(kinds)]
        if [x.shape for x in parts] != sizes:
            received = f"{path}: the adapter of {tensor} has shapes {' and '.join(str(x.shape) for x in parts)}"
            raise CheckpointError(f"{received}; expected {' and '.join(map(str, sizes))}")
        a, b, *magnitude = parts
        for parameter, (rows, columns) in zip(parameters, _places(layout, shapes), strict=True):
            arrays = a[:, rows].T, b[columns, :].T, *(x[columns] for x in magnitude)
            weights[parameter] = _weight(layers[parameter].weight, scaling, *arrays)
    if not weights:
        raise CheckpointError(f"{path} has no adapters")
    return with_adapters(model, weights)


def _weight(base: Any, scaling: float, *arrays: Any) -> LoraWeight:
    like: Any = base.elements if isinstance(base, InferenceWeight) else base
    options: dict[str, Any] = {"dtype": dtype_name(base.dtype), "device": device(like)}
    a, b, *magnitude = (array_namespace(like).from_host(np.ascontiguousarray(x), **options) for x in arrays)
    return LoraWeight.make(base, a, b, scaling, *magnitude)


def _setting(path: Path, config: dict[str, Any], name: str, pattern: str, tensor: str) -> float:
    """Return the rank or alpha of a module: that of the first pattern that matches the end of its name, as in PEFT."""
    try:
        patterns = (config.get(pattern) or {}).items()
        found = (value for expression, value in patterns if re.fullmatch(rf"(.*\.)?({expression})", tensor))
        value = next(found, config.get(name, 8))
    except (AttributeError, re.error) as error:
        raise CheckpointError(f"{path} has {pattern} {config[pattern]!r}; expected regular expressions") from error
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if not is_number or (name == "r" and not isinstance(value, int)):
        raise CheckpointError(f"{path} has {name} {value!r}; expected a positive number")
    return value


def _family(model: BaseModel, model_type: str | None) -> Family:
    name = model.model_type if model_type is None else model_type
    if name not in FAMILIES:
        of_base = ", as the model was not loaded from a checkpoint; expected that of the base model"
        hint = of_base if name is None else f"; {nearest_hint(str(name), FAMILIES)}"
        raise ConfigError(f"model_type is {name!r}{hint}")
    return FAMILIES[name]


def _tensors(family: Family, model: BaseModel, layers: Any) -> dict[str, tuple[Layout, tuple[str, ...]]]:
    """Return {name of a torch module: (layout of its weight, names of its linear maps)} for some linear maps."""
    names = [f"{name}.weight" for name in layers]
    return {
        tensor.removesuffix(".weight"): (layout, tuple(name.removesuffix(".weight") for name in parameters))
        for tensor, (layout, parameters) in family.layouts_of(model, names, is_complete=False).items()
        if set(names).issuperset(parameters)
    }


def _places(layout: Layout, shapes: Any) -> list[tuple[Any, Any]]:
    """Return where the input and the output features of each linear map are among those of a tensor.

    Args:
        layout: Layout of the tensor, which may reorder the features.
        shapes: Shapes (in_features, out_features) of its linear maps.
    """
    ends = np.cumsum([shape[1] for shape in shapes])
    rows = [np.broadcast_to(np.arange(shape[0])[:, None], shape) for shape in shapes]
    columns = [np.broadcast_to(np.arange(end - shape[1], end), shape) for shape, end in zip(shapes, ends, strict=True)]
    inputs, outputs = layout.join(rows), layout.join(columns)
    is_torch = bool((inputs == inputs[:1]).all())  # (out_features, in_features), else as in GPT-2's Conv1D
    inputs, outputs = (inputs[0], outputs[:, 0]) if is_torch else (inputs[:, 0], outputs[0])
    return [(np.argsort(inputs), columns) for columns in np.split(np.argsort(outputs), ends[:-1])]
