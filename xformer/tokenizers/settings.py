"""The JSON files beside a tokenizer: special tokens, and settings that change what the tokenizer does.

tokenizer_config.json, special_tokens_map.json and added_tokens.json mean what they mean in transformers. A warning
names the settings that are not followed; keys that transformers does not read have no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError
from xformer.io import read_json
from xformer.text.extras import require

CONFIG_FILE = "tokenizer_config.json"
SETTINGS_FILES = (CONFIG_FILE, "special_tokens_map.json", "added_tokens.json")
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_ROLE_KEYS = tuple(f"{role}_token" for role in ROLES)
# Names of the classes of transformers that use a tokenizer.json as it is; others change it, see `apply_settings`.
_GENERIC = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "PythonBackend")
_BERT_KEYS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
# Settings that cannot change a tokenizer, with the classes that read them; `_actual` says what its file has.
_DECIDED = {"add_bos_token": "", "add_eos_token": "", "keep_accents": "Albert", "split_by_punct": "DebertaV2"}
_LOWER_CASING = ("albert", "debertav2")
# Classes that read add_prefix_space if words begin with "▁", with the scheme for false.
_PREFIXES = {**dict.fromkeys(("albert", "barthez", "camembert", "xlmroberta"), "never"), "debertav2": "first"}


def read_settings(directory: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json, with the special tokens of all three files.

    The tokens of roles are strings. "added_tokens_decoder" has the attributes of added tokens by id, "attributes" those
    of special tokens. "unread" has the roles and tokens of the other two files that added_tokens_decoder of
    tokenizer_config.json replaces.

    Args:
        directory: Directory of the files.
        overrides: Values that replace those of tokenizer_config.json.
    """
    paths = [directory / name for name in SETTINGS_FILES]
    if not overrides and not any(path.exists() for path in paths):
        return {}
    config, named, added = (read_json(path, "tokenizer configuration") if path.exists() else {} for path in paths)
    settings = _with_new_names({**config, **overrides})
    if "added_tokens_decoder" in settings:
        decoder = settings["added_tokens_decoder"]
        roles = [key for key, value in named.items() if key in _ROLE_KEYS and value and key not in settings]
        settings["unread"] = [*roles, *added, *extra_tokens(_with_new_names(named))]
    else:
        extra = settings.get("extra_special_tokens")
        settings = _with_new_names({**settings, **named, **overrides})
        if isinstance(extra, list) and isinstance(settings["extra_special_tokens"], list):
            settings["extra_special_tokens"] = [*extra, *settings["extra_special_tokens"]]
        special = {token["content"] for token in _named_tokens(settings)}
        decoder = {
            index: {"content": token, "special": token in special, "normalized": token not in special}
            for token, index in added.items()
        }
    try:
        settings["added_tokens_decoder"] = {int(i): _attributes(decoder[i]) for i in sorted(decoder, key=int)}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory} has added tokens that are not tokens by id ({error!r})") from error
    # The tokens of roles are strings, or objects with the string as "content".
    settings["attributes"] = {token["content"]: token for token in _named_tokens(settings)}
    return {key: _content(value) if key.endswith("_token") else value for key, value in settings.items()}


def extra_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Return the special tokens without a role, in the order of the files."""
    return [token["content"] for token in _named_tokens({**settings, **dict.fromkeys(_ROLE_KEYS)})]


def add_tokens(inner: Any, settings: Mapping[str, Any], *, is_raw: bool = False) -> None:
    """Make a `tokenizers.Tokenizer` find the tokens that the files name; those that it lacks get the next ids.

    With `is_raw` it finds them before it normalizes the text, whatever the files say.
    """
    if "added_tokens_decoder" not in settings:  # there are no files
        return
    make, known = require("tokenizers").AddedToken, inner.get_added_tokens_decoder().values()
    named, found = {token["content"]: token for token in _named_tokens(settings)}, {repr(token) for token in known}
    new, fixed = {}, {"normalized": False} if is_raw else {}
    for token in settings["added_tokens_decoder"].values():
        added = make(**{**token, **({"special": True} if token["content"] in named else {}), **fixed})
        if repr(added) not in found:
            new[added.content] = added
    names = {token.content for token in known}
    new |= {name: make(**token) for name, token in named.items() if name not in names and name not in new}
    inner.add_tokens(list(new.values()))


def add_to_vocabulary(vocab: dict[str, int], settings: Mapping[str, Any], first: int) -> None:
    """Add the tokens that the files name to a vocabulary; those without an id get the ids from `first` on."""
    if "added_tokens_decoder" not in settings:
        return
    for index, token in settings["added_tokens_decoder"].items():
        vocab.setdefault(token["content"], index)
    for token in _named_tokens(settings):
        if token["content"] not in vocab:
            vocab[token["content"]], first = first, first + 1


def apply_settings(inner: Any, settings: Mapping[str, Any], name: str) -> None:
    """Change a tokenizer.json as its class in transformers does, where the files state a setting.

    Args:
        inner: The `tokenizers.Tokenizer`.
        settings: Contents of the files.
        name: Class of the tokenizer, or the type of the model.
    """
    if not name or settings.get("tokenizer_class") in _GENERIC:
        return
    name = name.lower().replace("-", "").replace("_", "")
    package, normalizers = require("tokenizers"), [*_parts(inner.normalizer)]
    for each in normalizers:
        for key, attribute in _BERT_KEYS.items() if isinstance(each, package.normalizers.BertNormalizer) else ():
            if isinstance(value := settings.get(key), bool):
                setattr(each, attribute, value)
    lower, prefix = settings.get("do_lower_case"), settings.get("add_prefix_space")
    if name in _LOWER_CASING and isinstance(lower, bool):
        kept = [each for each in normalizers if not isinstance(each, package.normalizers.Lowercase)]
        inner.normalizer = package.normalizers.Sequence([*([package.normalizers.Lowercase()] if lower else []), *kept])
    pre_tokenizers = package.pre_tokenizers
    prepends = package.normalizers.Prepend, pre_tokenizers.Metaspace
    if name == "llama":
        if any(isinstance(each, prepends) for each in (*normalizers, *_parts(inner.pre_tokenizer))):
            scheme = "never" if prefix is False else "always" if settings.get("legacy") else "first"
            inner.normalizer, inner.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
            decoders = package.decoders
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            inner.decoder = decoders.Sequence([*steps, *([] if prefix is False else [decoders.Strip(" ", 1, 0)])])
        return
    for each in _parts(inner.pre_tokenizer) if isinstance(prefix, bool) else ():
        if isinstance(each, pre_tokenizers.ByteLevel):
            each.add_prefix_space = prefix
        elif isinstance(each, pre_tokenizers.Metaspace) and name in _PREFIXES:
            is_off = each.prepend_scheme == _PREFIXES[name]
            each.prepend_scheme = _PREFIXES[name] if not prefix else "always" if is_off else each.prepend_scheme


def warn_ignored(inner: Any, settings: Mapping[str, Any], directory: Path) -> None:
    """Log a warning that names the settings of the files that the tokenizer does not follow."""
    added = {token.content for token in inner.get_added_tokens_decoder().values()}
    ignored = [name for name in settings.get("unread", ()) if name not in added]
    differs = {key: True for key in ("fast_tokenizer_files", "sp_model_kwargs") if settings.get(key)}
    name = str(settings.get("tokenizer_class") or "")
    stated = {
        key for key in _DECIDED if isinstance(settings.get(key), bool) and (not name or name.startswith(_DECIDED[key]))
    }
    if stated:
        differs |= {key: settings[key] != value for key, value in _actual(inner, settings).items() if key in stated}
    ignored += [f"{key} {str(settings[key])[:40]}" for key, is_other in differs.items() if is_other]
    if ignored:
        names = ", ".join(dict.fromkeys(ignored))
        logging.getLogger("xformer").warning(f"{directory}: settings of the tokenizer that are not followed: {names}")


def _actual(inner: Any, settings: Mapping[str, Any]) -> dict[str, bool]:
    """Return the values of the settings for which the file of the tokenizer decides."""
    encoding, steps = inner.encode("a"), [*_parts(inner.normalizer), *_parts(inner.pre_tokenizer)]
    is_special, types = encoding.special_tokens_mask, {type(step).__name__ for step in steps}
    tokens = encoding.tokens
    bos, cls, eos, sep = (settings.get(f"{role}_token") for role in ("bos", "cls", "eos", "sep"))
    # Encoders add their first and last token as cls and sep.
    ends = {} if bos == cls else {"add_bos_token": is_special[:1] == [1] and tokens[0] == bos}
    ends |= {} if eos == sep else {"add_eos_token": is_special[-1:] == [1] and tokens[-1] == eos}
    return ends | {"keep_accents": "StripAccents" not in types, "split_by_punct": "Punctuation" in types}


def _with_new_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with additional_special_tokens as extra_special_tokens, unless both have tokens."""
    additional = settings.pop("additional_special_tokens", None)
    return {**settings, "extra_special_tokens": settings.get("extra_special_tokens") or additional or []}


def _named_tokens(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the attributes of special tokens: those of roles, of other keys such as "image_token", and further ones."""
    custom = [key for key in settings if key.endswith("_token") and key not in _ROLE_KEYS]
    values = [settings.get(key) for key in (*_ROLE_KEYS, *custom)]
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        tokens = settings.get(key)
        values += tokens.values() if isinstance(tokens, Mapping) else tokens if isinstance(tokens, list) else []
    known = settings.get("attributes", {})
    named = (value for value in values if isinstance(_content(value), str))
    return ({**known.get(_content(value), _attributes(value)), "special": True} for value in named)


def _attributes(token: Any) -> dict[str, Any]:
    """Return the arguments of an AddedToken."""
    if isinstance(token, str):
        return {"content": token}
    known = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return {"content": token["content"], **{key: token[key] for key in known if key in token}}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _parts(step: Any) -> Iterator[Any]:
    """Yield the parts of a normalizer or pre-tokenizer, which changes with them."""
    if type(step).__name__ == "Sequence":
        for part in step:
            yield from _parts(part)
    elif step is not None:
        yield step
