"""Generation settings of public checkpoints: generation_config.json."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xformer.config import check_value, options_of
from xformer.errors import ConfigError
from xformer.generation.config import GenerationConfig
from xformer.io import StrPath, read_json
from xformer.models import ModelConfig

GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class PretrainedGeneration:
    """Generation settings of a checkpoint.

    Attributes:
        options: Fields of `GenerationConfig`: num_beams, length_penalty, max_new_tokens, suppress_tokens, ...
        eos_ids: Tokens that end an output.
        forced_bos_id: First token of each output.
        ignored: Settings that change the outputs of transformers and that xformer does not have, and invalid ones.
        path: The file with the settings; None if the checkpoint has no such file.
    """

    options: dict[str, Any] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    forced_bos_id: int | None = None
    ignored: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def config(self, model: ModelConfig) -> GenerationConfig:
        """Return the settings as a `GenerationConfig` for a model, and log a warning that names ignored settings."""
        if self.ignored:
            settings = ", ".join(f"{key} {str(value)[:40]}" for key, value in self.ignored.items())
            logging.getLogger("xformer").warning(
                f"{self.path}: settings that are invalid or not supported are ignored: {settings}"
            )
        ends = tuple(token for token in self.eos_ids if token != model.eos_id)
        return GenerationConfig(**{"length_penalty_base": "length", **self.options}, stop_token_ids=ends)


def read_generation(directory: StrPath, *, encoder_decoder: bool) -> PretrainedGeneration:
    """Read generation_config.json of a checkpoint; without one, the generation settings of config.json.

    Args:
        directory: Directory of the checkpoint.
        encoder_decoder: The model has an encoder, so that max_length counts the decoder's tokens only.

    Raises:
        CheckpointError: If a file is damaged.
    """
    path = Path(directory) / GENERATION_FILE
    if path.exists():
        return parse_generation(read_json(path, "generation settings"), path, encoder_decoder=encoder_decoder)
    path = Path(directory) / "config.json"
    values = read_json(path, "configuration") if path.exists() else {}
    old = {key: value for key, value in values.items() if key in {*_READERS, *_OPTIONS, *_UNSUPPORTED}}
    return parse_generation(old, path, encoder_decoder=encoder_decoder)


def parse_generation(values: Mapping[str, Any], path: Path, *, encoder_decoder: bool) -> PretrainedGeneration:
    """Return the settings in the contents of generation_config.json.

    Args:
        values: Contents of the file.
        path: Path of the file, for errors.
        encoder_decoder: See `read_generation`.
    """
    read: dict[str, Any] = {}
    ignored: dict[str, Any] = {}
    for key, value in values.items():
        if value is None or value is False or value in ([], "never") or key in _WITHOUT_EFFECT.split():
            continue
        try:
            if key in _READERS:
                read[key] = _READERS[key](value)
            elif key in _OPTIONS:
                check_value(_FIELDS[key], value)
                read[key] = value
            elif _forces_language(value) if key == "forced_decoder_ids" else value != _UNSUPPORTED.get(key):
                ignored[key] = value
        except (TypeError, ValueError):
            ignored[key] = value
    options = {key: read[key] for key in _OPTIONS if key in read and read[key] != _NEUTRAL.get(key)}
    if read.get("do_sample"):
        # transformers draws from the 50 most probable tokens unless the file states another number.
        options = {"do_sample": True, "top_k": 50, **options}
        if read.get("top_k") == 0:
            del options["top_k"]
        if options.pop("num_beams", 1) > 1:  # sampling with beams
            ignored["num_beams"] = read["num_beams"]
    else:
        ignored = {key: value for key, value in ignored.items() if key not in _SAMPLING}
        if options.keys() & _SAMPLING:  # for calls that ask for sampling
            options = {"do_sample": False, **options}
    if "num_beams" in options:
        options.setdefault("length_penalty", 1.0)  # the default of transformers
    else:  # has an effect on beams only
        ignored.pop("renormalize_logits", None)
    single = [ids[0] for ids in read.get("bad_words_ids", ()) if len(ids) == 1]
    if len(single) < len(read.get("bad_words_ids", ())):
        ignored["bad_words_ids"] = [list(ids) for ids in read["bad_words_ids"] if len(ids) > 1]
    if suppressed := (*read.get("suppress_tokens", ()), *single):
        options["suppress_tokens"] = suppressed
    _read_lengths(read, options, ignored, encoder_decoder=encoder_decoder)
    valid: dict[str, Any] = {}
    for key, value in options.items():
        try:
            GenerationConfig(**valid, **{key: value})
            valid[key] = value
        except ConfigError:
            ignored[key] = value
    ends, forced_bos_id = read.get("eos_token_id", ()), read.get("forced_bos_token_id")
    return PretrainedGeneration(valid, ends, forced_bos_id, ignored, path)


def _read_lengths(
    read: Mapping[str, Any], options: dict[str, Any], ignored: dict[str, Any], *, encoder_decoder: bool
) -> None:
    """Add the limits of the length to the options, or to the ignored settings if they depend on the prompt."""
    if encoder_decoder:  # the limits include the start of the decoder
        if "max_length" in read:
            options.setdefault("max_new_tokens", max(1, read["max_length"] - 1))
        if "min_length" in read:
            options.setdefault("min_new_tokens", max(0, read["min_length"] - 1))
    else:
        keys = [key for key in ("max_length", "min_length") if key.replace("length", "new_tokens") not in read]
        ignored |= {key: read[key] for key in (*keys, "forced_bos_token_id") if read.get(key)}
    if "max_new_tokens" in options:
        if "forced_eos_token_id" in read:  # in place of the last token of an output of the maximum length
            options["max_new_tokens"] = max(1, options["max_new_tokens"] - 1)
        if "min_new_tokens" in options:
            options["min_new_tokens"] = min(options["min_new_tokens"], options["max_new_tokens"])


# --- Values -----------------------------------------------------------------------------------------------------------


def _id(value: Any) -> int:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError("a token id")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    # Lists of suppressed tokens of old Whisper files hold -1 for "none".
    values = value if isinstance(value, list) else [value]
    return tuple(_id(each) for each in values if each != -1)


def _sequences(value: Any) -> list[tuple[int, ...]]:
    if not isinstance(value, list):
        raise ValueError("a list of lists of token ids")
    return [_ids(each) for each in value if each != []]


def _forces_language(value: Any) -> bool:
    # Whisper: the language has position 1, the task 2. Models for English have one entry; null is a detected language.
    return not isinstance(value, list) or (len(value) > 1 and value[0] != [1, None])


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("an integer of at least 0")
    return value


# Keys that do not change what xformer generates: they concern the speed or the values that a call returns, or repeat
# what the model, its tokenizer or its pipeline states; xformer writes suppress_special, and the last two lines are of
# Whisper.
_WITHOUT_EFFECT = """
_from_model_config assistant_confidence_threshold assistant_early_exit assistant_lookbehind bos_token_id cache_config
cache_implementation compile_config continuous_batching_config disable_compile is_assistant low_memory max_cache_len
max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule output_attentions output_hidden_states
output_logits output_scores pad_token_id prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values return_dict
return_dict_in_generate speculation_type suppress_special target_lookbehind transformers_version use_cache use_mtp
alignment_heads is_multilingual lang_to_id max_initial_timestamp_index median_filter_width no_timestamps_token_id
prev_sot_token_id task_to_id
"""
# Keys that are not supported, with the values that have no effect.
_UNSUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "typical_p"), 1),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), 0),
    **dict.fromkeys(("constraints", "dola_layers", "exponential_decay_length_penalty", "force_words_ids")),
    **dict.fromkeys(("assistant_ensemble_weight", "renormalize_logits", "token_healing")),
    **dict.fromkeys(("max_time", "sequence_bias", "stop_strings", "top_h", "watermarking_config")),
    "forced_decoder_ids": None,
    "task": "transcribe",
}
_FIELDS = {name: field for name, _, _, field in options_of(GenerationConfig)}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_OPTIONS = (
    *("num_beams", "num_return_sequences", "num_beam_groups", "diversity_penalty", "length_penalty"),
    *("max_new_tokens", "min_new_tokens", "no_repeat_ngram_size", "repetition_penalty", "do_sample"),
    *("begin_suppress_tokens", "length_penalty_base", "early_stopping"),
    *_SAMPLING[:4],
)
# Values with which a setting has no effect.
_NEUTRAL = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups", "temperature", "top_p"), 1),
    **dict.fromkeys(("diversity_penalty", "min_new_tokens", "no_repeat_ngram_size", "min_p", "top_k"), 0),
    "repetition_penalty": 1.0,
}
_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"), _id),
    **dict.fromkeys(("eos_token_id", "suppress_tokens", "begin_suppress_tokens"), _ids),
    **dict.fromkeys(("max_length", "min_length"), _count),
    "bad_words_ids": _sequences,
}
