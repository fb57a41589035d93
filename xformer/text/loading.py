"""`load_tokenizer`: the tokenizer of a checkpoint directory."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError
from xformer.io import read_json
from xformer.text.extras import library_errors, read_bytes, require
from xformer.text.pretrained import (
    TOKENIZER_FILE,
    Affixes,
    Languages,
    PretrainedTokenizer,
    additional_tokens,
    read_inner,
    read_settings,
)
from xformer.text.sentencepiece import build_tokenizer, read_sentencepiece
from xformer.text.tokenizer_models import PACKAGE, SPECIAL_TOKENS

_DEFAULTS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
_BERT_DEFAULTS = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")}
_GPT2_DEFAULTS = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_OUR_DEFAULTS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_FAIRSEQ_DEFAULTS = {**_DEFAULTS, "bos_token": "<s>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}

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
_CLASSES = {
    "mbart": "MBart",
    "xlm-roberta": "XLMRoberta",
    "t5": "T5",
    "mt5": "MT5",
    "pegasus": "Pegasus",
    "bert": "Bert",
    "distilbert": "DistilBert",
    "gpt2": "GPT2",
    "opt": "GPT2",
    "roberta": "Roberta",
    "bart": "Bart",
}
# Position of the language token by class (without "Fast") or model type; see `Languages`.
_LANGUAGE_POSITIONS = {"Nllb": "before", "MBart50": "before", "MBart": "after"}


def load_tokenizer(directory: str | os.PathLike[str]) -> PretrainedTokenizer:
    """Load the tokenizer of a checkpoint directory. Nothing is downloaded.

    The first of these files that the directory has determines the tokenizer:

    - `tokenizer.json`, of Hugging Face or of xformer; `source_tokenizer.json` and `target_tokenizer.json` of xformer.
    - `source.spm`, `target.spm` and `vocab.json` of Marian (OPUS-MT).
    - `sentencepiece.bpe.model` and `vocab.json` of M2M100; `sentencepiece.bpe.model` of XLM-RoBERTa, mBART and NLLB.
    - `spiece.model` of T5, mT5 and Pegasus.
    - `tokenizer.model` of Llama, Mistral and Gemma.
    - `vocab.txt` of BERT and DistilBERT.
    - `vocab.json` and `merges.txt` of GPT-2, OPT, RoBERTa and BART.

    Args:
        directory: Directory of the checkpoint.

    Raises:
        CheckpointError: If there is no such file, or a file is damaged or not supported.
        BackendError: If the package tokenizers is missing.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; expected one with {TOKENIZER_FILE}")
    settings = read_settings(directory)
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
    return _with_languages(PretrainedTokenizer(inner, settings or _our_settings(inner), directory))


def _our_settings(inner: Any) -> dict[str, Any]:
    """Return the roles of the special tokens of a tokenizer that xformer trained; no roles for any other."""
    is_ours = [inner.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    return dict(_OUR_DEFAULTS) if is_ours else {}


def _load_ours(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    """Load the separate tokenizers of source and target of a run of xformer."""
    source, target = (read_inner(directory / f"{side}_tokenizer.json") for side in ("source", "target"))
    target_tokenizer = PretrainedTokenizer(target, settings or _our_settings(target), directory)
    return PretrainedTokenizer(source, settings or _our_settings(source), directory, target=target_tokenizer)


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


def _with_languages(tokenizer: PretrainedTokenizer) -> PretrainedTokenizer:
    """Return the tokenizer with the language tokens of NLLB or mBART."""
    settings, directory = tokenizer.settings, tokenizer.directory
    name = _class_name(directory, settings)
    position = _LANGUAGE_POSITIONS.get(name)
    if position is None:
        return tokenizer
    if name == "Nllb" and settings.get("legacy_behaviour"):
        position = "after"
    codes = [token for token in tokenizer.added_tokens if _is_language(token)]
    ids = {code: index for code in codes if (index := tokenizer.token_to_id(code)) is not None}
    default = "eng_Latn" if name == "Nllb" else "en_XX"
    source, target = settings.get("src_lang") or default, settings.get("tgt_lang")
    source, target = (each if each in ids else None for each in (source, target))
    return tokenizer.with_languages(Languages(ids, position, source, target))


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
    ids = {token[2:-2]: index for token, index in vocab.items() if token.startswith(">>") and token.endswith("<<")}
    languages = Languages(ids, "target") if ids else None
    special = [*_specials(settings, vocab), *(f">>{code}<<" for code in ids)]

    def load(name: str, vocab: dict[str, int], **options: Any) -> PretrainedTokenizer:
        inner = build_tokenizer(read_sentencepiece(directory / name), after=special)
        affixes = Affixes([], [vocab[settings["eos_token"]]])
        return PretrainedTokenizer(inner, settings, directory, vocab=vocab, affixes=affixes, **options)

    return load("source.spm", vocab, languages=languages, target=load("target.spm", target_vocab))


def _load_m2m100(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    settings = {**_DEFAULTS, "bos_token": "<s>", "sep_token": "</s>", **settings}
    vocab = _read_vocab(directory / "vocab.json", settings)
    name = settings.get("language_codes") or "m2m100"
    if name not in _M2M_LANGUAGES:
        raise CheckpointError(
            f"tokenizer_config.json of {directory} has language_codes {name!r}; expected one of: "
            f"{', '.join(_M2M_LANGUAGES)}"
        )
    ids = {code: len(vocab) + index for index, code in enumerate(_M2M_LANGUAGES[name].split())}
    vocab |= {f"__{code}__": index for code, index in ids.items()}
    special = [*_specials(settings, vocab), *(f"__{code}__" for code in ids)]
    inner = build_tokenizer(read_sentencepiece(directory / "sentencepiece.bpe.model"), after=special)
    source = settings.get("src_lang") or "en"
    if not isinstance(source, str) or source not in ids:
        raise CheckpointError(f"tokenizer_config.json of {directory} has src_lang {source!r}, which is not a language")
    target = settings.get("tgt_lang")
    return PretrainedTokenizer(
        inner,
        settings,
        directory,
        vocab=vocab,
        affixes=Affixes([ids[source]], [vocab[settings["eos_token"]]]),
        languages=Languages(ids, "before", source, target if target in ids else None),
    )


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
    return [token for token in dict.fromkeys([*tokens, *additional_tokens(settings)]) if token in vocab]


# --- A SentencePiece model alone --------------------------------------------------------------------------------------


def _load_fairseq(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    """Load XLM-RoBERTa, mBART or NLLB: the first pieces are in fairseq's order, and languages are at the end."""
    if _class_name(directory, settings) in ("M2M100", "m2m_100") and (directory / "vocab.json").exists():
        return _load_m2m100(directory, settings)
    name = _require_class(directory, settings, "sentencepiece.bpe.model", "XLMRoberta", *_LANGUAGE_POSITIONS)
    settings = {**_FAIRSEQ_DEFAULTS, **settings}
    languages = [token for token in additional_tokens(settings) if _is_language(token)]
    if name == "MBart":
        languages = languages or _MBART_LANGUAGES.split()
    elif name in _LANGUAGE_POSITIONS and not languages:
        raise CheckpointError(
            f"{directory} has neither {TOKENIZER_FILE} nor additional_special_tokens, the languages of {name}"
        )
    model = read_sentencepiece(directory / "sentencepiece.bpe.model")
    if model.pieces[:3] != ["<unk>", "<s>", "</s>"]:
        raise CheckpointError(f"{directory / 'sentencepiece.bpe.model'} does not begin with <unk>, <s> and </s>")
    fairseq = ("<s>", "<pad>", "</s>", "<unk>")
    inner = build_tokenizer(model, before=fairseq, start=3, after=[*languages, "<mask>"])
    affixes = Affixes([0], [2])
    if name != "XLMRoberta":
        source = settings.get("src_lang") or ("eng_Latn" if name == "Nllb" else "en_XX")
        language = inner.token_to_id(source) if source in languages else None
        if language is None:
            raise CheckpointError(
                f"tokenizer_config.json of {directory} has src_lang {source!r}; expected one of its languages"
            )
        is_after = name == "MBart" or bool(settings.get("legacy_behaviour"))
        affixes = Affixes([], [2, language]) if is_after else Affixes([language], [2])
    return _with_languages(PretrainedTokenizer(inner, settings, directory, affixes=affixes))


def _load_spiece(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    """Load T5, mT5 or Pegasus."""
    name = _require_class(directory, settings, "spiece.model", "T5", "MT5", "Pegasus")
    settings = {**_DEFAULTS, **settings}
    model = read_sentencepiece(directory / "spiece.model")
    if name != "Pegasus":
        count = _count(settings, "extra_ids", 100, directory)
        inner = build_tokenizer(model, after=[f"<extra_id_{index}>" for index in reversed(range(count))])
    else:
        unused = [f"<unk_{index}>" for index in range(2, _count(settings, "offset", 103, directory))]
        inner = build_tokenizer(model, before=["<pad>", "</s>", "<mask_1>", "<mask_2>", *unused], start=2)
        settings = {"mask_token": "<mask_2>", **settings}
    eos = inner.token_to_id(settings["eos_token"])
    if eos is None:
        raise CheckpointError(f"the vocabulary of {directory} lacks the eos_token {settings['eos_token']!r}")
    return PretrainedTokenizer(inner, settings, directory, affixes=Affixes([], [eos]))


def _load_llama(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    settings = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", **settings}
    inner = build_tokenizer(read_sentencepiece(directory / "tokenizer.model"))
    tokenizer = PretrainedTokenizer(inner, settings, directory)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    prefix = [bos] if settings.get("add_bos_token", True) and bos is not None else []
    suffix = [eos] if settings.get("add_eos_token", False) and eos is not None else []
    return PretrainedTokenizer(inner, settings, directory, affixes=Affixes(prefix, suffix))


def _count(settings: dict[str, Any], key: str, default: int, directory: Path) -> int:
    value = settings.get(key, default)
    if type(value) is not int or not 0 <= value <= 10_000:
        raise CheckpointError(f"tokenizer_config.json of {directory} has {key} {value!r}; expected 0 to 10000")
    return value


# --- WordPiece and byte-level BPE -------------------------------------------------------------------------------------


def _load_bert(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    package = require(PACKAGE)
    _require_class(directory, settings, "vocab.txt", "Bert", "DistilBert")
    settings = {**_BERT_DEFAULTS, **settings}
    vocab = {token: index for index, token in enumerate(_read_lines(directory / "vocab.txt"))}
    if missing := [settings[role] for role in _BERT_DEFAULTS if settings[role] not in vocab]:
        raise CheckpointError(f"{directory / 'vocab.txt'} lacks the token {missing[0]!r}")
    inner = package.Tokenizer(package.models.WordPiece(vocab, unk_token=settings["unk_token"]))
    inner.normalizer = package.normalizers.BertNormalizer(
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    inner.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    inner.decoder = package.decoders.WordPiece()
    cls, sep = ((settings[role], vocab[settings[role]]) for role in ("cls_token", "sep_token"))
    inner.post_processor = package.processors.BertProcessing(sep, cls)
    _add_tokens(inner, settings, directory)
    return PretrainedTokenizer(inner, settings, directory)


def _load_byte_level(directory: Path, settings: dict[str, Any]) -> PretrainedTokenizer:
    package, name = require(PACKAGE), _require_class(directory, settings, "merges.txt", "GPT2", "Roberta", "Bart")
    settings = {**(_GPT2_DEFAULTS if name == "GPT2" else _FAIRSEQ_DEFAULTS), **settings}
    vocab = _read_vocab(directory / "vocab.json", settings)
    lines = [line for line in _read_lines(directory / "merges.txt") if line and not line.startswith("#version")]
    inner = package.Tokenizer(package.models.BPE(vocab, [tuple(line.split(" ")) for line in lines]))
    add_prefix_space = bool(settings.get("add_prefix_space", False))
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    inner.decoder = package.decoders.ByteLevel()
    _add_tokens(inner, settings, directory, strips_left=None if name == "GPT2" else settings["mask_token"])
    if name != "GPT2":
        cls, sep = ((settings[role], inner.token_to_id(settings[role])) for role in ("cls_token", "sep_token"))
        inner.post_processor = package.processors.RobertaProcessing(sep, cls, add_prefix_space=add_prefix_space)
    tokenizer = PretrainedTokenizer(inner, settings, directory)
    if name == "GPT2" and settings.get("add_bos_token") and tokenizer.bos_id is not None:  # OPT
        return PretrainedTokenizer(inner, settings, directory, affixes=Affixes([tokenizer.bos_id], []))
    return tokenizer


def _add_tokens(inner: Any, settings: dict[str, Any], directory: Path, *, strips_left: str | None = None) -> None:
    """Make the tokenizer find special and added tokens in a text before it splits the rest.

    The token `strips_left` includes the spaces before it.
    """
    path, added = directory / "added_tokens.json", require(PACKAGE).AddedToken
    ids = read_json(path, "added tokens") if path.exists() else {}
    roles = [value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str)]
    special = list(dict.fromkeys([*roles, *additional_tokens(settings)]))
    for token in [*sorted(ids, key=ids.__getitem__), *special]:
        is_special, lstrip = token in special, token == strips_left
        inner.add_tokens([added(token, special=is_special, normalized=not is_special, lstrip=lstrip)])
        if inner.token_to_id(token) != ids.get(token, inner.token_to_id(token)):
            raise CheckpointError(
                f"{path} has the id {ids[token]!r} for {token!r}; expected {inner.token_to_id(token)}"
            )


def _read_lines(path: Path) -> list[str]:
    return [line.rstrip("\n") for line in io.StringIO(str(read_bytes(path), "utf-8"), newline=None)]


_LOADERS: dict[str, Callable[[Path, dict[str, Any]], PretrainedTokenizer]] = {
    TOKENIZER_FILE: _load_tokenizer_json,
    "source_tokenizer.json": _load_ours,
    "source.spm": _load_marian,
    "sentencepiece.bpe.model": _load_fairseq,
    "spiece.model": _load_spiece,
    "tokenizer.model": _load_llama,
    "vocab.txt": _load_bert,
    "merges.txt": _load_byte_level,
}
