"""Reading of config.json: every key is used, known to be harmless, or refused."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError

_REQUIRED: Any = object()
# Keys that do not change what a model computes: provenance, initialization, outputs of torch modules, generation
# defaults of old files (generation_config.json has them now) and labels.
_HARMLESS = """
_name_or_path _num_labels architectures chunk_size_feed_forward cross_attention_hidden_size
decoder do_sample dtype diversity_penalty early_stopping encoder encoder_no_repeat_ngram_size
exponential_decay_length_penalty finetuning_task gradient_checkpointing id2label init_std initializer_factor
initializer_range is_encoder_decoder keys_to_ignore_at_inference label2id length_penalty max_length
min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
output_attentions output_hidden_states output_past output_scores prefix pretraining_tp problem_type pruned_heads
remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id task_specific_params
temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers_version
transformers.js_config typical_p use_bfloat16 use_cache
"""


class ConfigReader:
    """The values of a config.json, and the names of the checkpoint's tensors.

    Args:
        values: The values by key.
        path: Path of the file, for errors.
        tensors: Names of the tensors of the checkpoint.
        tied: Names of `Family.tied` whose tensors are absent or repeat the other one.
    """

    def __init__(self, values: dict[str, Any], path: Path, tensors: Collection[str], tied: Collection[str]) -> None:
        self.path, self.tensors, self.tied = path, tensors, tied
        self.model_type = str(values.get("model_type"))
        self._values = dict(values)
        self._unread = set(values) - set(_HARMLESS.split())

    def take(self, *keys: str, default: Any = _REQUIRED) -> Any:
        """Return the value of the first key that is present and not null.

        Raises:
            CheckpointError: If all keys are absent or null and there is no default, or for more layers than tensors.
        """
        self._unread -= set(keys)
        for key in keys:
            if (value := self._values.get(key)) is not None:
                # A model cannot have more layers than tensors; making billions of them would take forever.
                if "layer" in key and isinstance(value, int) and value > len(self.tensors):
                    raise CheckpointError(f"{self.path} has {key} {value}, but only {len(self.tensors)} tensors")
                return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self.path} has no key {keys[0]!r}")
        return default

    def require(self, key: str, *accepted: Any) -> None:
        """Raise CheckpointError if a key is present with a value that the model does not compute."""
        value = self._values.get(key)
        self._unread.discard(key)
        if value is not None and value not in accepted:
            expected = " or ".join(map(repr, accepted))
            raise CheckpointError(f"{self.path} has {key} {value!r}; xformer computes {expected} only")

    def skip(self, *keys: str) -> None:
        """Accept any value of keys that do not matter to the family."""
        self._unread -= set(keys)

    def finish(self) -> None:
        """Raise CheckpointError for a key that was not read and is neither null nor false."""
        unknown = sorted(key for key in self._unread if self._values[key] not in (None, False))
        if unknown:
            key = unknown[0]
            raise CheckpointError(
                f"{self.path} has the key {key!r} ({self._values[key]!r:.60}), which the family {self.model_type} "
                "does not know; a model loaded without it could be wrong"
            )
