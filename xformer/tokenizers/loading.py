"""`load_tokenizer`: the tokenizer of a checkpoint."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError
from xformer.families.gguf_file import find_gguf
from xformer.io import StrPath, read_json
from xformer.text.extras import library_errors, read_bytes, require
from xformer.tokenizers.base import add_affixes
from xformer.tokenizers.gguf import read_gguf
from xformer.tokenizers.ours import SPECIAL_TOKENS
from xformer.tokenizers.pretrained import TOKENIZER_FILE, PretrainedTokenizer, read_inner
from xformer.tokenizers.sentencepiece import build_tokenizer, read_sentencepiece
from xformer.tokenizers.settings import add_to_vocabulary, apply_settings, extra_tokens, read_settings, warn_ignored

_DEFAULTS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
_GPT2_DEFAULTS = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_OUR_DEFAULTS = {**_DEFAULTS, "bos_token": "<s>"}

# Languages by M2M100Tokenizer's key "language_codes"; the ids of their tokens follow vocab.json in this order.
_M2M_LANGUAGES = {
    "m2m100": "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr "
    "ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps "
    "pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu",
    "wmt21": "en ha is ja cs ru zh de",
}
_MBART_LANGUAGES = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
# Class of the tokenizer by model type.
_CLASSES = {name.lower(): name for name in ("MBart", "T5", "MT5", "Pegasus", "Siglip", "GPT2")} | {"opt": "GPT2"}
# {class without "Fast": (position of the language token, default source language)}; see `PretrainedTokenizer`.
_LANGUAGES = {"Nllb": ("before", "eng_Latn"), "MBart50": ("before", "en_XX"), "MBart": ("after", "en_XX")}


def load_tokenizer(
    path: StrPath, source_language: str | None = None, target_language: str | None = None
) -> PretrainedTokenizer:
    """Load the tokenizer of a checkpoint directory or a GGUF file. Nothing is downloaded.

    The first of these files that a directory has determines the tokenizer:

    - A GGUF file, if there are no safetensors.
    - `tokenizer.json`, of Hugging Face or of xformer; `source_tokenizer.json` and `target_tokenizer.json` of xformer.
    - `source.spm`, `target.spm` and `vocab.json` of Marian (OPUS-MT).
    - `sentencepiece.bpe.model` of mBART, with `vocab.json` of M2M100.
    - `spiece.model` of T5, mT5, Pegasus and SigLIP.
    - `vocab.json` and `merges.txt` of GPT-2 and OPT.

    Args:
        path: Directory of the checkpoint, or a GGUF file.
        source_language: Code of the language of sources. Default: that of the files.
        target_language: Code of the language of targets. Default: that of the files, if any.

    Raises:
        CheckpointError: If there is no such file, or a file is damaged or not supported.
        ConfigError: If the tokenizer has no such language.
        BackendError: If the package tokenizers is missing.
    """
    return load_with_settings(Path(path), {}, source_language, target_language)


def load_with_settings(
    path: Path, overrides: Mapping[str, Any], source_language: str | None = None, target_language: str | None = None
) -> PretrainedTokenizer:
    """Load a tokenizer with values that replace those of its tokenizer_config.json; see `load_tokenizer`."""
    if gguf := find_gguf(path):
        tokenizer = read_gguf(gguf)
    elif not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; expected one with {TOKENIZER_FILE}")
    else:
        tokenizer = _load(path, read_settings(path, overrides))
        warn_ignored(tokenizer._inner, tokenizer._settings, path)
    tokenizer.set_languages(source_language, target_language)
    return tokenizer


def _load(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    for name, load in _LOADERS.items():
        if (directory / name).exists():
            with library_errors(f"the tokenizer of {directory} is not valid"):
                return load(directory, settings)
    raise CheckpointError(
        f"{directory} has no tokenizer that can be read; expected one of: {', '.join(_LOADERS)} "
        "(transformers writes tokenizer.json: AutoTokenizer.from_pretrained(directory).save_pretrained(directory))"
    )


def _load_tokenizer_json(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    inner = read_inner(directory / TOKENIZER_FILE)
    name = _class_name(directory, settings)
    apply_settings(inner, settings, name)
    if name not in _LANGUAGES:
        return PretrainedTokenizer(inner, _with_roles(settings, inner), directory)
    added = sorted(inner.get_added_tokens_decoder().items())
    ids = {token.content: index for index, token in added if _is_language(token.content)}
    return _with_languages(inner, settings, directory, name, ids)


def _with_roles(settings: dict[str, Any], inner: Any) -> dict[str, Any]:
    """Return settings without roles of special tokens with those of a tokenizer that xformer trained, if it is one."""
    is_ours = [inner.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    has_roles = any(key.endswith("_token") for key in settings)
    return {**_OUR_DEFAULTS, **settings} if is_ours and not has_roles else settings


def _load_ours(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    """Load the separate tokenizers of source and target of a run of xformer."""
    source, target = (read_inner(directory / f"{side}_tokenizer.json") for side in ("source", "target"))
    target_tokenizer = PretrainedTokenizer(target, _with_roles(settings, target), directory)
    return PretrainedTokenizer(source, _with_roles(settings, source), directory, target=target_tokenizer)


def _class_name(directory: Path, settings: Mapping[str, Any]) -> str:
    """Return the class of a tokenizer, such as "MBart50", or the model type of config.json."""
    name = str(settings.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    if name in ("", "PreTrained", "Tokenizers", "Tokenizersbackend") and (directory / "config.json").exists():
        model_type = read_json(directory / "config.json", "configuration").get("model_type")
        return _CLASSES.get(str(model_type), str(model_type))
    return name


def _require_class(directory: Path, settings: Mapping[str, Any], file: str, *known: str) -> str:
    """Return the class of a tokenizer; raise CheckpointError for a class that has no such file."""
    name = _class_name(directory, settings)
    if name not in known:
        expected = " or ".join(f"{each}Tokenizer" for each in known)
        raise CheckpointError(
            f"{directory} has {file} of {name or 'an unknown class'}; expected tokenizer_class {expected}"
        )
    return name


def _with_languages(
    inner: Any, settings: dict[str, Any], directory: Path, name: str, ids: dict[str, int]
) -> PretrainedTokenizer:
    """Return the tokenizer of NLLB or mBART."""
    position, language = _LANGUAGES[name]
    if name == "Nllb" and settings.get("legacy_behaviour"):
        position = "after"
    settings = {**settings, "src_lang": settings.get("src_lang") or language}
    return PretrainedTokenizer(inner, settings, directory, language_ids=ids, language_position=position)


def _is_language(token: str) -> bool:
    """Return whether a token has the form of a language of NLLB or mBART: "deu_Latn", "de_DE"."""
    language, _, region = token.partition("_")
    return language.isalpha() and language.islower() and len(language) in (2, 3) and region.isalpha()


# --- Marian and M2M100: pieces of SentencePiece, ids of vocab.json ----------------------------------------------------


def _load_marian(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    settings = {**_DEFAULTS, **settings}
    separate = bool(settings.get("separate_vocabs"))
    vocab = _read_vocab(directory / "vocab.json", settings)
    target_vocab = _read_vocab(directory / "target_vocab.json", settings) if separate else vocab
    add_to_vocabulary(vocab, settings, len(vocab))
    ids = {token[2:-2]: index for token, index in vocab.items() if token.startswith(">>") and token.endswith("<<")}
    special = [*_specials(settings, vocab), *(f">>{code}<<" for code in ids)]

    def load(name: str, vocab: dict[str, int], **options: Any) -> PretrainedTokenizer:
        inner = build_tokenizer(read_sentencepiece(directory / name), after=special)
        add_affixes(inner, [], [settings["eos_token"]])
        return PretrainedTokenizer(inner, settings, directory, vocab=vocab, **options)

    target = load("target.spm", target_vocab)
    return load("source.spm", vocab, language_ids=ids, language_position="target", target=target)


def _load_m2m100(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    settings = {**_DEFAULTS, "bos_token": "<s>", "sep_token": "</s>", **settings}
    settings["src_lang"] = settings.get("src_lang") or "en"
    vocab = _read_vocab(directory / "vocab.json", settings)
    name = settings.get("language_codes") or "m2m100"
    if name not in _M2M_LANGUAGES:
        received = f"tokenizer_config.json of {directory} has language_codes {name!r}"
        raise CheckpointError(f"{received}; expected one of: {', '.join(_M2M_LANGUAGES)}")
    ids = {code: len(vocab) + index for index, code in enumerate(_M2M_LANGUAGES[name].split())}
    vocab |= {f"__{code}__": index for code, index in ids.items()}
    add_to_vocabulary(vocab, settings, len(vocab) + _count(settings, "num_madeup_words", 8, directory))
    special = [*_specials(settings, vocab), *(f"__{code}__" for code in ids)]
    inner = build_tokenizer(read_sentencepiece(directory / "sentencepiece.bpe.model"), after=special)
    return PretrainedTokenizer(inner, settings, directory, vocab=vocab, language_ids=ids)


def _read_vocab(path: Path, settings: dict[str, Any]) -> dict[str, int]:
    vocab = read_json(path, "vocabulary")
    ids = set(vocab.values()) if all(type(index) is int for index in vocab.values()) else set()
    if len(ids) != len(vocab) or not vocab or not 0 <= min(ids) <= max(ids) < 2**31:
        raise CheckpointError(f"{path} does not have a distinct id for each token")
    for role in ("unk_token", "eos_token"):
        if not isinstance(settings[role], str) or settings[role] not in vocab:
            raise CheckpointError(f"{path} lacks the {role} {settings[role]!r}")
    return vocab


def _specials(settings: dict[str, Any], vocab: dict[str, int]) -> list[str]:
    """Return the special tokens of the settings that are in the vocabulary."""
    tokens = [value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str)]
    return [token for token in dict.fromkeys([*tokens, *extra_tokens(settings)]) if token in vocab]


# --- A SentencePiece model alone --------------------------------------------------------------------------------------


def _load_mbart(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    """Load mBART: the first pieces are in fairseq's order, and languages are at the end."""
    if _class_name(directory, settings) in ("M2M100", "m2m_100") and (directory / "vocab.json").exists():
        return _load_m2m100(directory, settings)
    name = _require_class(directory, settings, "sentencepiece.bpe.model", "MBart", "MBart50")
    settings = {**_OUR_DEFAULTS, "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>", **settings}
    languages = [token for token in extra_tokens(settings) if _is_language(token)]
    if not languages and name == "MBart50":
        raise CheckpointError(f"{directory} has neither {TOKENIZER_FILE} nor additional_special_tokens, its languages")
    languages = languages or _MBART_LANGUAGES.split()
    model = read_sentencepiece(directory / "sentencepiece.bpe.model")
    if model.pieces[:3] != ["<unk>", "<s>", "</s>"]:
        raise CheckpointError(f"{directory / 'sentencepiece.bpe.model'} does not begin with <unk>, <s> and </s>")
    inner = build_tokenizer(model, before=["<s>", "<pad>", "</s>", "<unk>"], start=3, after=[*languages, "<mask>"])
    ids = {language: inner.token_to_id(language) for language in languages}
    return _with_languages(inner, settings, directory, name, ids)


def _load_spiece(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    """Load T5, mT5, Pegasus or SigLIP."""
    name = _require_class(directory, settings, "spiece.model", "T5", "MT5", "Pegasus", "Siglip")
    settings = {**_DEFAULTS, **({"pad_token": "</s>"} if name == "Siglip" else {}), **settings}
    model = read_sentencepiece(directory / "spiece.model")
    if name == "Siglip":
        inner = build_tokenizer(model)
        inner.normalizer = _without_punctuation(inner.normalizer, lowercase=settings.get("do_lower_case") is not False)
    elif name != "Pegasus":
        count = _count(settings, "extra_ids", 100, directory)
        inner = build_tokenizer(model, after=[f"<extra_id_{index}>" for index in reversed(range(count))])
    else:
        unused = [f"<unk_{index}>" for index in range(2, _count(settings, "offset", 103, directory))]
        inner = build_tokenizer(model, before=["<pad>", "</s>", "<mask_1>", "<mask_2>", *unused], start=2)
        settings = {"mask_token": "<mask_2>", **settings}
    if inner.token_to_id(settings["eos_token"]) is None:
        raise CheckpointError(f"the vocabulary of {directory} lacks the eos_token {settings['eos_token']!r}")
    add_affixes(inner, [], [settings["eos_token"]])
    return PretrainedTokenizer(inner, settings, directory)


def _without_punctuation(normalizer: Any, *, lowercase: bool) -> Any:
    """Return a normalizer that first removes ASCII punctuation, and upper case and repeated spaces."""
    package = require("tokenizers")
    normalizers, punctuation = package.normalizers, f"[{re.escape(string.punctuation)}]"
    steps = [normalizers.Lowercase()] if lowercase else []
    steps += [normalizers.Replace(package.Regex(pattern), by) for pattern, by in ((punctuation, ""), (r"\s+", " "))]
    return normalizers.Sequence([*steps, normalizers.Strip(), normalizer])


def _count(settings: dict[str, Any], key: str, default: int, directory: Path) -> int:
    value = settings.get(key, default)
    if type(value) is not int or not 0 <= value <= 10_000:
        raise CheckpointError(f"tokenizer_config.json of {directory} has {key} {value!r}; expected 0 to 10000")
    return value


# --- Byte-level BPE ---------------------------------------------------------------------------------------------------


def _load_byte_level(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    """Load GPT-2 or OPT."""
    package = require("tokenizers")
    _require_class(directory, settings, "merges.txt", "GPT2")
    settings = {**_GPT2_DEFAULTS, **settings}
    vocab = _read_vocab(directory / "vocab.json", settings)
    lines = str(read_bytes(directory / "merges.txt"), "utf-8-sig").replace("\r\n", "\n").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    inner = package.Tokenizer(package.models.BPE(vocab, merges))
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
    inner.decoder = package.decoders.ByteLevel()
    inner.add_special_tokens([package.AddedToken(token, normalized=False) for token in _specials(settings, vocab)])
    add_affixes(
        inner, *([settings[f"{role}_token"]] if settings.get(f"add_{role}_token") else [] for role in ("bos", "eos"))
    )
    return PretrainedTokenizer(inner, settings, directory)


_LOADERS: dict[str, Callable[[Path, dict[str, Any]], PretrainedTokenizer]] = {
    TOKENIZER_FILE: _load_tokenizer_json,
    "source_tokenizer.json": _load_ours,
    "source.spm": _load_marian,
    "sentencepiece.bpe.model": _load_mbart,
    "spiece.model": _load_spiece,
    "merges.txt": _load_byte_level,
}
