"""`ConfigReader`: reads config.json; a key that is neither read nor known to be harmless is an error."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError

REQUIRED: Any = object()
# Keys that do not change what a model computes: provenance, initialization, outputs of torch modules, generation
# defaults of old files (generation_config.json has them now), labels, tying (which the tensors show) and what pipelines
# read.
_HARMLESS = """
_attn_implementation_autoset _name_or_path _num_labels architectures chunk_size_feed_forward cross_attention_hidden_size
decoder do_sample dtype diversity_penalty early_stopping encoder encoder_no_repeat_ngram_size
exponential_decay_length_penalty finetuning_task gradient_checkpointing id2label init_std initializer_factor
initializer_range is_encoder_decoder keys_to_ignore_at_inference label2id length_penalty max_length
min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
output_attentions output_hidden_states output_past output_scores prefix pretraining_tp problem_type pruned_heads
remove_invalid_values repetition_penalty return_dict return_dict_in_generate sbert_ce_default_activation_function
sentence_transformers sep_token_id task_specific_params temperature tf_legacy_loss tie_word_embeddings tokenizer_class
top_k top_p torch_dtype torchscript transformers_version transformers.js_config typical_p use_bfloat16 use_cache
"""
# Keys that may change what a model computes, and whose default is false or 0 in transformers, also in older versions.
_FALSE = """
_flash_attn_2_enabled add_cross_attention is_decoder rope_interleaved tie_encoder_decoder use_mrope
_remove_final_layer_norm add_bias_logits add_final_layer_norm alibi apply_residual_connection_post_layernorm
do_blenderbot_90_layernorm extra_layer_norm flash_attn force_bos_token_to_be_generated is_composition is_llama_config
new_decoder_architecture normalize_before parallel_residual qk_layernorm replacing_rate reorder_and_upcast_attn
save_step scale_attn_by_inverse_layer_idx shared_input_output_embedding sinusoidal_pos_embds slow_but_exact
static_position_embeddings torch_compile use_flash_attn use_moe use_mup use_return_dict use_sliding_window
use_stable_embedding
"""
_MAX_COUNT, _MAX_NUMBER = 2**24, 1e30  # far above the values of any model


class ConfigReader:
    """The values of a config.json, and the names of the checkpoint's tensors.

    `count`, `counts`, `number`, `flag`, `choice`, `choices` and `section` return the value of the first of their keys
    that is present and not null, or the default. They raise CheckpointError if the value has another type or size, or
    is absent without a default.

    Args:
        values: The values by key.
        path: Path of the file, for errors.
        tensors: Names of the tensors of the checkpoint.
        tied: Names in `Family.tied` whose tensors are absent or equal the other one.
        prefix: Prefix of the keys in errors, e.g. "rope_parameters.".

    Attributes:
        generation: Reader of generation_config.json; the same as this one if there is no such file.
        classes: Fields of a classifier that the model gets in place of the heads of the checkpoint; None to keep them.
    """

    def __init__(
        self, values: dict[str, Any], path: Path, tensors: Collection[str], tied: Collection[str], prefix: str = ""
    ) -> None:
        self.path, self.tensors, self.tied = path, tensors, tied
        self.model_type = str(values.get("model_type"))
        self.values = dict(values)
        self.generation = self
        self.classes: dict[str, Any] | None = None
        self._prefix = prefix
        # Dropout changes the training only; loaded models have none.
        self._unread = {key for key in values if "drop" not in key} - set(_HARMLESS.split())

    def count(self, *keys: str, default: Any = REQUIRED, at_least: int = 1) -> Any:
        """Return an integer, e.g. a size or the id of a token."""
        expected = f"an integer from {at_least} to {_MAX_COUNT}"
        return self._read(keys, default, lambda value: _is_count(value, at_least), expected)

    def counts(self, *keys: str, default: Any = REQUIRED, at_least: int = 1) -> list[int]:
        """Return a list of integers; a single integer gives a list of length 1, and null an empty list."""

        def is_valid(value: Any) -> bool:
            return all(_is_count(item, at_least) for item in (value if isinstance(value, list) else [value]))

        value = self._read(keys, default, is_valid, f"integers from {at_least} to {_MAX_COUNT}")
        return value if isinstance(value, list) else [] if value is None else [value]

    def number(self, *keys: str, default: Any = REQUIRED) -> Any:
        """Return a positive float."""
        value = self._read(keys, default, _is_positive, f"a number above 0 and at most {_MAX_NUMBER:g}")
        return None if value is None else float(value)

    def flag(self, *keys: str, default: Any = REQUIRED) -> bool:
        """Return a boolean."""
        return bool(self._read(keys, default, lambda value: isinstance(value, bool), "true or false"))

    def choice(self, *keys: str, known: Collection[str], default: Any = REQUIRED) -> str:
        """Return one of the known strings."""
        expected = f"one of {', '.join(known)}"
        return str(self._read(keys, default, lambda value: isinstance(value, str) and value in known, expected))

    def choices(self, *keys: str, known: Collection[str], default: Any = REQUIRED) -> list[str]:
        """Return a list of known strings."""

        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(item, str) and item in known for item in value)

        return list(self._read(keys, default, is_valid, f"a list of {', '.join(known)}"))

    def section(self, *keys: str) -> ConfigReader:
        """Return a reader of a nested JSON object, empty if it is absent."""
        values = self._read(keys, {}, lambda value: isinstance(value, dict), "a JSON object")
        key = next((key for key in keys if self.values.get(key) is not None), keys[0])
        return ConfigReader(values, self.path, self.tensors, self.tied, f"{self._prefix}{key}.")

    def _read(self, keys: Collection[str], default: Any, is_valid: Callable[[Any], bool], expected: str) -> Any:
        self._unread -= set(keys)
        for key in keys:
            if (value := self.values.get(key)) is not None:
                if not is_valid(value):
                    raise CheckpointError(f"{self.path} has {self._prefix}{key} {value!r:.60}; expected {expected}")
                return value
        if default is REQUIRED:
            raise CheckpointError(f"{self.path} has no key {next(iter(keys))!r}")
        return default

    def require(self, key: str, *accepted: Any) -> None:
        """Raise CheckpointError if a key has a value other than the accepted ones; null is accepted."""
        value = self.values.get(key)
        self._unread.discard(key)
        if value is not None and value not in accepted:
            expected = " or ".join(map(repr, accepted))
            raise CheckpointError(f"{self.path} has {key} {value!r:.60}; expected {expected}")

    def skip(self, *keys: str) -> None:
        """Accept any value of keys that do not change what the model computes."""
        self._unread -= set(keys)

    def finish(self) -> None:
        """Raise CheckpointError for a key that was not read, unless it is null, or false where that is the default."""
        off = {key for key in _FALSE.split() if self.values.get(key) == 0}
        for key in sorted(key for key in self._unread - off if self.values[key] is not None):
            received = f"{self.path} has the key {key!r} ({self.values[key]!r:.60}), which xformer does not know"
            hint = "without it, the model could give wrong outputs"
            raise CheckpointError(f"{received} in models of type {self.model_type}; {hint}")


def _is_count(value: Any, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= _MAX_COUNT


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MAX_NUMBER
