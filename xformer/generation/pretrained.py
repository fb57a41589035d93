"""Generation settings of public checkpoints: generation_config.json."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.generation.config import GenerationConfig
from xformer.io import read_json

GENERATION_FILE = "generation_config.json"
# Keys of generation_config.json that only record how it was made or what a call returns.
_HARMLESS = {
    *("_from_model_config", "cache_implementation", "output_attentions", "output_hidden_states", "output_logits"),
    *("output_scores", "remove_invalid_values", "return_dict", "return_dict_in_generate", "transformers_version"),
    "use_cache",
}


@dataclass(frozen=True)
class PretrainedGeneration:
    """Generation settings of a checkpoint.

    Attributes:
        options: Fields of `GenerationConfig`: num_beams, length_penalty, max_new_tokens, suppress_tokens, ...
        eos_ids: Tokens that end an output.
        pad_id: Padding.
        bos_id: Start of a text.
        start_id: First input of the decoder.
        forced_bos_id: First token of each output.
        forced_eos_id: Last token of an output of the maximum length.
        forced_ids: First tokens of each output, by position from 1 (Whisper).
        begin_suppress_tokens: Tokens that an output does not begin with.
        max_length: Maximum length of prompt and output of a language model; None if not stated.
        notes: Sentences about settings that are ignored.
    """

    options: dict[str, Any] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    bos_id: int | None = None
    start_id: int | None = None
    forced_bos_id: int | None = None
    forced_eos_id: int | None = None
    forced_ids: dict[int, int] = field(default_factory=dict)
    begin_suppress_tokens: tuple[int, ...] = ()
    max_length: int | None = None
    notes: tuple[str, ...] = ()

    def config(self, eos_id: int) -> GenerationConfig:
        """Return the settings as a `GenerationConfig`, for a model that ends outputs with `eos_id`."""
        return GenerationConfig(
            **self.options,
            length_penalty_base="length",
            begin_suppress_tokens=self.begin_suppress_tokens,
            stop_token_ids=tuple(token for token in self.eos_ids if token != eos_id),
        )


def read_generation(directory: str | os.PathLike[str], *, encoder_decoder: bool) -> PretrainedGeneration:
    """Read generation_config.json of a checkpoint; without one, the generation settings of config.json.

    Args:
        directory: Directory of the checkpoint.
        encoder_decoder: The model has an encoder, so that max_length counts the decoder's tokens only.

    Raises:
        CheckpointError: If a file is damaged, a value is invalid, or settings contradict each other.
    """
    path = Path(directory) / GENERATION_FILE
    if path.exists():
        return parse_generation(read_json(path, "generation settings"), path, encoder_decoder=encoder_decoder)
    path = Path(directory) / "config.json"
    values = read_json(path, "configuration") if path.exists() else {}
    old = {key: value for key, value in values.items() if key in _READERS}  # all other keys are those of the model
    return parse_generation(old, path, encoder_decoder=encoder_decoder)


def parse_generation(values: Mapping[str, Any], path: Path, *, encoder_decoder: bool) -> PretrainedGeneration:
    """Return the settings in the contents of generation_config.json.

    Args:
        values: Contents of the file.
        path: Path of the file, for errors.
        encoder_decoder: See `read_generation`.

    Raises:
        CheckpointError: If a value is invalid, or settings contradict each other.
    """
    read: dict[str, Any] = {}
    notes = []
    for key, value in values.items():
        if value is None or value is False or key in _HARMLESS:
            continue
        if key not in _READERS:
            notes.append(f"{path}: {key} {str(value)[:40]!r} is not supported and ignored")
            continue
        try:
            read[key] = _READERS[key](value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path} has {key} {str(value)[:60]!r}; expected {error}") from error
    options = {key: read[key] for key in _OPTIONS if key in read and read[key] != _NEUTRAL.get(key)}
    if options.pop("do_sample", False) and read.get("temperature") != 0:
        # transformers draws from the 50 most probable tokens unless the file states another number.
        options = {"do_sample": True, "top_k": 50, **options}
        if read.get("top_k") == 0:
            del options["top_k"]
        if options.pop("num_beams", 1) > 1:
            notes.append(f"{path}: sampling with beams is not supported; num_beams is ignored")
    else:
        for key in _SAMPLING:
            options.pop(key, None)
    if "num_beams" in options:
        options.setdefault("length_penalty", 1.0)  # the default of transformers
    single = [ids[0] for ids in read.get("bad_words_ids", ()) if len(ids) == 1]
    if len(single) < len(read.get("bad_words_ids", ())):
        notes.append(f"{path}: bad_words_ids of several tokens are not supported and ignored")
    suppressed = sorted({*single, *read.get("suppress_tokens", ())})
    if suppressed:
        options["suppress_tokens"] = tuple(suppressed)
    max_length, min_length = read.get("max_length"), read.get("min_length")
    if encoder_decoder:  # they count the start of the decoder
        if max_length is not None:
            options.setdefault("max_new_tokens", max(1, max_length - 1))
        if min_length:
            options.setdefault("min_new_tokens", max(0, min_length - 1))
            if options["min_new_tokens"] > options.get("max_new_tokens", options["min_new_tokens"]):
                options["min_new_tokens"] = options["max_new_tokens"]
    elif min_length:
        notes.append(f"{path}: min_length {min_length} depends on the prompt and is ignored")
    try:
        GenerationConfig(**options)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return PretrainedGeneration(
        options=options,
        eos_ids=read.get("eos_token_id", ()),
        pad_id=read.get("pad_token_id"),
        bos_id=read.get("bos_token_id"),
        start_id=read.get("decoder_start_token_id"),
        forced_bos_id=read.get("forced_bos_token_id"),
        forced_eos_id=read.get("forced_eos_token_id"),
        forced_ids=read.get("forced_decoder_ids", {}),
        begin_suppress_tokens=read.get("begin_suppress_tokens", ()),
        max_length=None if encoder_decoder else max_length,
        notes=tuple(notes),
    )


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
    return tuple(dict.fromkeys(_id(each) for each in values if each != -1))


def _sequences(value: Any) -> list[tuple[int, ...]]:
    if not isinstance(value, list):
        raise ValueError("a list of lists of token ids")
    return [_ids(each) for each in value if each != []]


def _pairs(value: Any) -> dict[int, int]:
    is_list = isinstance(value, list) and all(isinstance(each, list) and len(each) == 2 for each in value)
    if not is_list:
        raise ValueError("a list of pairs of a position and a token id")
    return {_id(position): _id(token) for position, token in value if token is not None}


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**31 or value != int(value):
        raise ValueError("an integer of at least 0")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e9 < value < 1e9:
        raise ValueError("a number")
    return float(value)


_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_OPTIONS = (
    *("num_beams", "num_return_sequences", "num_beam_groups", "diversity_penalty", "length_penalty"),
    *("max_new_tokens", "min_new_tokens", "no_repeat_ngram_size", "repetition_penalty", "do_sample"),
    *_SAMPLING,
)
# Values with which a setting has no effect.
_NEUTRAL = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups", "temperature", "top_p"), 1),
    **dict.fromkeys(("diversity_penalty", "min_new_tokens", "no_repeat_ngram_size", "min_p", "top_k"), 0),
    "repetition_penalty": 1.0,
}
_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("bos_token_id", "pad_token_id", "decoder_start_token_id"), _id),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), _id),
    **dict.fromkeys(("eos_token_id", "suppress_tokens", "begin_suppress_tokens"), _ids),
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups", "no_repeat_ngram_size"), _integer),
    **dict.fromkeys(("max_length", "min_length", "max_new_tokens", "min_new_tokens", "top_k"), _integer),
    **dict.fromkeys(("length_penalty", "diversity_penalty", "repetition_penalty"), _number),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _number),
    "bad_words_ids": _sequences,
    "do_sample": _boolean,
    "forced_decoder_ids": _pairs,
}
