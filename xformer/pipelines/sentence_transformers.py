"""The settings of sentence-transformers for the model and the tokenizer: sentence_bert_config.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError
from xformer.io import read_json

MIN_LENGTH = 3  # two special tokens and one of the text
_FILES = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
)
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
