"""The tokenizer in the metadata of a GGUF file, built with the package tokenizers.

Byte-level BPE ("gpt2") with the pre-tokenizer that the file names, and SentencePiece BPE ("llama") with merges that
follow from the scores. Texts are split as llama.cpp and the tokenizer.json of the model split them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.gguf_file import read_metadata
from xformer.text.extras import library_errors, require
from xformer.tokenizers.base import BaseTokenizer, add_affixes
from xformer.tokenizers.pretrained import PretrainedTokenizer
from xformer.tokenizers.sentencepiece import BPE, SentencePieceModel, build_tokenizer

# Types of tokens (tokenizer.ggml.token_type).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# Texts that tell tokenizers apart.
_PROBES = (
    "It's I'LL we'Ve 1 22 333 4444 20245 x5y\n \n\n  two  spaces\t\ttab \r\n CamelCase HTTPServer naïve e\u0301 ÀÉ "
    "你好 にほん 한국 हिन्दी ไทย العربية Ωμέγα ²③ ٣٤ \u00a0 🦙👩‍💻 a_b--c...! ?!\n/x/y //\n f(x):\n    return x  ",
    "", " a  b ", "e\u0301\n", "<s>a</s> b",
)  # fmt: skip

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_CAPITALIZED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = rf"{_CAPITALIZED}{_CONTRACTIONS}?|{_CAPITALS}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_PUNCTUATION}"
_TEKKEN = rf"{_CAPITALIZED}|{_CAPITALS}|\p{{N}}|{_PUNCTUATION}"

# Regular expressions of words, by tokenizer.ggml.pre; None is that of GPT-2.
_PATTERNS = {
    **dict.fromkeys(("gpt-2", "smollm", "starcoder", "refact"), None),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
# Pre-tokenizers that split off every digit first.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact")
# Pre-tokenizers of models that encode a word as one token if the vocabulary has it, and start texts with bos.
_IGNORE_MERGES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
# One of each kind, which are tried for a tokenizer of other files.
_CHOICES = ("gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "megrez", "gpt-4o", "tekken")
# Tokens that end a text or a turn; most files name only one of them.
_END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


def read_gguf(path: Path) -> PretrainedTokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
        CheckpointError: If the file is damaged, or has no tokenizer or one of an unknown type.
        BackendError: If the package tokenizers is missing.
    """
    return _tokenizer(read_metadata(path), path)


def tokenizer_metadata(tokenizer: BaseTokenizer, num_tokens: int, architecture: str) -> dict[str, Any]:
    """Return the metadata from which llama.cpp and `read_gguf` build a tokenizer that gives the same tokens.

    Args:
        tokenizer: The tokenizer.
        num_tokens: Number of rows of the embedding.
        architecture: Name of the architecture of the model.

    Raises:
        ConfigError: If there is no such metadata.
    """
    inner, model = tokenizer._inner, json.loads(tokenizer.to_json())["model"]
    is_byte_level, size = "ByteLevel" in tokenizer._decoder_types, tokenizer.vocab_size
    if model["type"] != "BPE" or not (is_byte_level or model["byte_fallback"]) or size > num_tokens:
        expected = f"byte-level BPE, or BPE with a token for each byte, of at most {num_tokens} tokens"
        raise ConfigError(f"the tokenizer is {tokenizer.model} of {size} tokens; GGUF files expect {expected}")
    tokens, types = [f"[PAD{i}]" for i in range(num_tokens)], [_UNUSED] * num_tokens
    for token, i in inner.get_vocab().items():
        tokens[i], types[i] = token, _BYTE if re.fullmatch("<0x[0-9A-F]{2}>", token) else _NORMAL
    for i, added in inner.get_added_tokens_decoder().items():
        types[i] = _CONTROL if added.special else _USER_DEFINED
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "padding": tokenizer.pad_id, "unknown": tokenizer.unk_id}
    ranks = {"".join(pair): i for i, pair in reversed([*enumerate(model["merges"])])}
    values: dict[str, Any] = {
        "model": "gpt2" if is_byte_level else "llama",
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "scores": [-float(ranks.get(token, len(ranks))) for token in tokens],
        "add_bos_token": tokenizer.encode("a")[0] == ids["bos"],
        "add_eos_token": tokenizer.encode("a")[-1] == ids["eos"],
        **{f"{role}_token_id": i for role, i in ids.items() if i is not None},
    }
    template = tokenizer.chat_templates.get("default")
    texts = [*_PROBES, *tokenizer.decode_batch([[i] for i in range(size)], skip_special_tokens=False)]

    def encoded(tokenizer: BaseTokenizer) -> Any:
        return [(each.ids, each.word_ids if is_byte_level else ()) for each in tokenizer._inner.encode_batch(texts)]

    for choice in _CHOICES if is_byte_level else (True, False):
        own = {**values, "pre" if is_byte_level else "add_space_prefix": choice}
        metadata = {"general.architecture": architecture, **{f"tokenizer.ggml.{key}": x for key, x in own.items()}}
        if encoded(_tokenizer(metadata, Path())) == encoded(tokenizer):
            return metadata | ({} if template is None else {"tokenizer.chat_template": template})
    raise ConfigError("the tokenizer divides texts in another way than those of GGUF files; expected one of llama.cpp")


def _tokenizer(metadata: dict[str, Any], path: Path) -> PretrainedTokenizer:
    """Build the tokenizer of metadata; see `read_gguf`."""
    prefix = "tokenizer.ggml."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    model, pre = values.get("model"), values.get("pre")
    if model not in ("gpt2", "llama"):
        raise CheckpointError(f"{path} has the tokenizer {model!r}; expected 'gpt2' or 'llama'")
    if model == "gpt2" and pre not in _PATTERNS:
        raise CheckpointError(f"{path} has the pre-tokenizer {pre!r}; expected one of {', '.join(sorted(_PATTERNS))}")
    required = ("tokens", "merges" if model == "gpt2" else "scores")
    if missing := [f"tokenizer.ggml.{key}" for key in required if key not in values]:
        raise CheckpointError(f"{path} has no {missing[0]}, which its tokenizer {model!r} needs")
    if len(set(values["tokens"])) < (size := len(values["tokens"])):
        raise CheckpointError(f"{path} has {size} tokens, some of them twice; expected distinct tokens")
    with library_errors(f"{path} has a tokenizer that is not valid"):
        tokenizer = (_byte_level if model == "gpt2" else _sentencepiece)(values)
    _add_tokens(tokenizer, values, strips_right=metadata.get("general.architecture") == "phi3")
    keys = ("bos", "eos", "eot", "eom", "padding", "unknown")
    ids: dict[str, int | None] = {key: values.get(f"{key}_token_id") for key in keys}
    adds_bos = values.get("add_bos_token", model == "llama" or pre in _IGNORE_MERGES)
    adds_eos = values.get("add_eos_token")
    affixes = ids["bos"] if adds_bos else None, ids["eos"] if adds_eos else None
    if affixes != (None, None):
        add_affixes(tokenizer, *([] if i is None else [values["tokens"][i]] for i in affixes))
    end_ids = [ids[key] for key in ("eos", "eot", "eom")] + [tokenizer.token_to_id(token) for token in _END_TOKENS]
    eos_ids = tuple(dict.fromkeys(i for i in end_ids if i is not None))
    roles = {"bos": ids["bos"], "eos": next(iter(eos_ids), None), "pad": ids["padding"], "unk": ids["unknown"]}
    settings = {f"{role}_token": tokenizer.id_to_token(i) for role, i in roles.items() if i is not None}
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return PretrainedTokenizer(tokenizer, settings, path, eos_ids=eos_ids, vocab_size=size)


def _byte_level(values: dict[str, Any]) -> Any:
    """Return a byte-level BPE tokenizer with the merges that the file lists."""
    package, pre = require("tokenizers"), values["pre"]
    ids = {token: i for i, token in enumerate(values["tokens"])}
    merges = [(merge[:end], merge[end + 1 :]) for merge in values["merges"] for end in [merge.index(" ", 1)]]
    model = package.models.BPE(vocab=ids, merges=merges, ignore_merges=pre in _IGNORE_MERGES)
    tokenizer = package.Tokenizer(model)
    pre_tokenizers = package.pre_tokenizers
    steps = [pre_tokenizers.Digits(individual_digits=True)] if pre in _SINGLE_DIGITS else []
    if _PATTERNS[pre] is not None:
        steps.append(pre_tokenizers.Split(package.Regex(_PATTERNS[pre]), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_PATTERNS[pre] is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        tokenizer.normalizer = package.normalizers.NFC()
    tokenizer.decoder = package.decoders.ByteLevel()
    return tokenizer


def _sentencepiece(values: dict[str, Any]) -> Any:
    """Return a BPE tokenizer of whole texts; characters that the vocabulary lacks become bytes."""
    types = [*values.get("token_type", [_NORMAL] * len(values["tokens"]))]
    types[values.get("unknown_token_id") or 0] = _UNKNOWN
    options = {"add_dummy_prefix": values.get("add_space_prefix", True), "remove_extra_whitespaces": False}
    model = SentencePieceModel(values["tokens"], values["scores"], types, BPE, byte_fallback=True, **options)
    return build_tokenizer(model)


def _add_tokens(tokenizer: Any, values: dict[str, Any], *, strips_right: bool) -> None:
    """Make the tokenizer find control and user-defined tokens in a text before it splits the rest.

    With `strips_right`, all but three include the spaces to their right, as in Phi-3.
    """
    added, special, plain = require("tokenizers").AddedToken, [], []
    for token, token_type in zip(values["tokens"], values.get("token_type", ()), strict=False):
        rstrip = strips_right and token not in ("<unk>", "<s>", "<|endoftext|>")
        if token_type in (_UNKNOWN, _CONTROL):
            special.append(added(token, special=True, normalized=False, rstrip=rstrip))
        elif token_type == _USER_DEFINED:
            plain.append(added(token, normalized=False, rstrip=rstrip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
