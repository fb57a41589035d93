"""The files of sentence-transformers: settings of the model and the tokenizer, and the modules after the model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, device
from xformer.errors import CheckpointError
from xformer.families.tensor_files import TensorFiles
from xformer.io import read_json
from xformer.layers import Linear
from xformer.models.encoder import apply_activation
from xformer.tree import Module, replace

MIN_LENGTH = 3  # two special tokens and one of the text
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
_FILES = tuple(f"sentence_{name}_config.json" for name in _KINDS)
_OLD_NAMES = {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}
# Arguments of loading, of speed and of the layout of batches.
_WITHOUT_EFFECT = {
    *("attn_implementation", "cache_dir", "device_map", "local_files_only", "low_cpu_mem_usage", "padding_side"),
    *("revision", "subfolder", "token", "trust_remote_code", "use_fast", "use_safetensors", "add_pooling_layer"),
    *("dtype", "torch_dtype", "unpad_inputs"),
}
_OUTPUTS = {"feature-extraction": "last_hidden_state", "sequence-classification": "logits"}
_KNOWN = {
    *("max_seq_length", "do_lower_case", "processor_kwargs", "model_kwargs", "config_kwargs", "processing_kwargs"),
    *("transformer_task", "modality_config", "module_output_name", "query_length", "document_length"),
    *("query_expansion", "tokenizer_name_or_path", "unpad_inputs", "backend"),
}
SCORES = ("identity", "sigmoid", "tanh")  # activations of cross-encoders
POOLINGS = {"mean_tokens": "mean", "cls_token": "cls", "mean": "mean", "cls": "cls", "lasttoken": "lasttoken"}
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Identity": "identity"}


class Dense(Module):
    """Dense layer for pooled vectors, `activation(linear(x))`, as in sentence-transformers.

    Attributes:
        linear: The map.
        activation: "tanh", "identity" or the name of another activation.
    """

    linear: Linear
    activation: str

    def __call__(self, x: Array) -> Array:
        """Return the vectors (batch, out_features) of vectors (batch, in_features)."""
        return apply_activation(self.activation, self.linear(x))


def read_embedder(directory: Path, model: Any) -> dict[str, Any]:
    """Return the arguments of an `Embedder`; without such files, vectors are means and normalized.

    "tokenizer" has the settings that replace those of the tokenizer. Arguments and errors are those of
    `read_transformer_module`; dense layers have parameters like those of the model.
    """
    settings = read_transformer_module(directory, "feature-extraction")
    if (path := directory / "config_sentence_transformers.json").exists():
        values = read_json(path, "configuration")
        prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
        is_valid = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
        if not is_valid or default not in (None, *prompts):
            received = f"{path} has prompts {prompts!r:.80} and default_prompt_name {default!r:.40}"
            raise CheckpointError(f"{received}; expected a text by name, and one of the names or null")
        settings |= {"prompts": prompts, "default_prompt_name": default}
    modules = _read_modules(directory)
    if not modules:
        return settings
    pooling_path = _module_directory(directory, modules[1]) / "config.json"
    values = read_json(pooling_path, "configuration of pooling")
    # From version 6 on, one key holds the mode, or a list of modes.
    prefix = "pooling_mode_"
    modes = [key.removeprefix(prefix) for key in values if key.startswith(prefix) and values[key] is True]
    mode = values.get("pooling_mode", modes)
    mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
    if (pooling := POOLINGS.get(str(mode))) is None:
        raise CheckpointError(f"{pooling_path} has the pooling {mode!r:.80}; expected mean, cls or lasttoken")
    return {
        **settings,
        "pooling": pooling,
        "dense": [_read_dense(_module_directory(directory, each), model) for each in modules if _kind(each) == "Dense"],
        "normalize": _kind(modules[-1]) == "Normalize",
        "include_prompt": values.get("include_prompt") is not False,
    }


def read_reranker(directory: Path) -> dict[str, Any]:
    """Return the settings of a cross-encoder: those of `read_transformer_module`, and "activation"."""
    settings = read_transformer_module(directory, "sequence-classification")
    values: dict[str, Any] = {}  # each version of sentence-transformers writes the activation elsewhere
    for path in (directory / "config.json", directory / "config_sentence_transformers.json"):
        values |= read_json(path, "configuration") if path.exists() else {}
    nested = values.get("sentence_transformers")
    names = (nested or {}).get("activation_fn"), values.get("sbert_ce_default_activation_function")
    name = next((str(name) for name in (*names, values.get("activation_fn")) if name is not None), "Identity")
    activation = name.rpartition(".")[2].lower()
    if activation not in SCORES:
        raise CheckpointError(f"{directory} has the activation {name!r:.80}; expected one of {', '.join(SCORES)}")
    return settings | {"activation": activation}


def read_transformer_module(directory: Path, task: str) -> dict[str, Any]:
    """Return what sentence_bert_config.json says: "max_length", "lower_case", and "tokenizer", settings of its files.

    Args:
        directory: Directory of the checkpoint.
        task: The transformer_task that the pipeline computes.

    Raises:
        CheckpointError: For settings that would change the results and are not supported.
    """
    path = next((path for name in _FILES if (path := directory / name).exists()), None)
    if path is None:
        return {"tokenizer": {}}
    values = {_OLD_NAMES.get(key, key): value for key, value in read_json(path, "configuration").items()}
    length, tokenizer = values.get("max_seq_length"), _effective(values.get("processor_kwargs"))
    if length is not None and (type(length) is not int or length < MIN_LENGTH):
        raise CheckpointError(f"{path} has max_seq_length {length!r}; expected at least {MIN_LENGTH}")
    if length is not None and "model_max_length" not in tokenizer:
        tokenizer["model_max_length"] = length
    forward = {"method": "forward", "method_output_name": _OUTPUTS[task]}
    modalities = values.get("modality_config") or {"text": forward}
    refused = {
        "transformer_task": values.get("transformer_task") not in (None, task),
        "config_kwargs": bool(_effective(values.get("config_kwargs"))),
        "processing_kwargs": any((values.get("processing_kwargs") or {}).values()),
        "modality_config": modalities.get("text") != forward,
        "query_expansion": values.get("query_expansion") is not None,
        "tokenizer_name_or_path": values.get("tokenizer_name_or_path") is not None,
    }
    for key in (key for key, is_refused in refused.items() if is_refused):
        raise CheckpointError(f"{path} has {key} {values[key]!r:.80}, which changes the results and is not supported")
    ignored = [key for key in ("query_length", "document_length") if values.get(key) is not None]
    ignored += [f"model_kwargs {key}" for key in _effective(values.get("model_kwargs"))]
    ignored += [key for key in values if key not in _KNOWN]
    if ignored:
        logging.getLogger("xformer").warning(f"{path}: settings that are not followed: {', '.join(ignored)}")
    return {"lower_case": bool(values.get("do_lower_case")), "tokenizer": tokenizer}


def _effective(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a loader that can change results."""
    known = arguments.items() if isinstance(arguments, Mapping) else ()
    return {key: value for key, value in known if key not in _WITHOUT_EFFECT and value is not None}


def _kind(module: dict[str, Any]) -> str:
    """Return the class of a module of sentence-transformers."""
    return str(module.get("type")).rpartition(".")[2]


def _module_directory(directory: Path, module: dict[str, Any]) -> Path:
    """Return the directory with the files of a module."""
    name = str(module.get("path", "1_Pooling"))
    if Path(name).name != name:
        raise CheckpointError(
            f"{directory}/modules.json has the path {name!r:.80}; expected a name without a directory"
        )
    return directory / name


def _read_dense(directory: Path, model: Any) -> Dense:
    """Return a dense layer for pooled vectors, with parameters like those of the model."""
    values = read_json(directory / "config.json", "configuration of a map")
    name = str(values.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"{directory} has the activation {name!r}; expected one of {', '.join(_ACTIVATIONS)}")
    tensors, like = TensorFiles(directory), model._parameter
    if not {*tensors} <= {"linear.weight", "linear.bias"} or "linear.weight" not in tensors:
        raise CheckpointError(f"{directory} has the tensors {', '.join(tensors)}; expected linear.weight, linear.bias")
    host = {key.removeprefix("linear."): np.ascontiguousarray(tensors[key].read().T) for key in tensors}
    xp, options = array_namespace(like), {"dtype": like.dtype, "device": device(like)}
    arrays = {key: xp.from_host(x, **options) for key, x in host.items()}
    linear = Linear(*arrays["weight"].shape, bias="bias" in arrays, init=0)
    return Dense(replace(linear, arrays), _ACTIVATIONS[name])


def _read_modules(directory: Path) -> list[dict[str, Any]]:
    """Return the modules of sentence-transformers; none if there is no such file."""
    path = directory / "modules.json"
    if not path.exists():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path} is not a list of modules")
    kinds = [_kind(module) for module in modules]
    if modules and not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)):
        raise CheckpointError(f"{path} has {', '.join(kinds)}; expected {', '.join(_MODULES)}, in this order")
    return modules
