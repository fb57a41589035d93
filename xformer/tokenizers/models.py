"""Training of the three tokenizer models, and inspection of saved tokenizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

from xformer.errors import ConfigError, DataError, describe_type
from xformer.text.extras import require
from xformer.text.normalize import check_form
from xformer.tokenizers.base import PACKAGE, raise_not_text

# Special tokens and their ids, the same in every tokenizer.
PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")

# Separates the sentences of a document; optional, so its id is read from the file.
SEPARATOR = "<sep>"

_MAX_TOKENS = 10_000_000  # the library reserves memory for all of them, and aborts the process if it is short


def learn(
    lines: Iterable[str], vocab_size: int, *, lowercase: bool, model: str, unicode_form: str, separator: bool
) -> Any:
    """Learn a `tokenizers.Tokenizer`; the arguments and errors are those of `Tokenizer.train`."""
    special = (*SPECIAL_TOKENS, SEPARATOR) if separator else SPECIAL_TOKENS
    if model not in _MODELS:
        raise ConfigError(f"tokenizer model is {model!r}; expected one of: {', '.join(_MODELS)}")
    check_form(unicode_form)
    if not isinstance(vocab_size, Integral) or vocab_size <= len(special):
        raise ConfigError(f"vocab_size is {vocab_size}; expected more than the {len(special)} special tokens")
    if vocab_size > _MAX_TOKENS:
        raise ConfigError(f"vocab_size is {vocab_size}; expected at most {_MAX_TOKENS}; 4000 to 50000 are usual")
    if isinstance(lines, str) or not isinstance(lines, Iterable):
        received = "one string" if isinstance(lines, str) else describe_type(lines)
        raise DataError(f"lines is {received}; expected a list of lines, such as read_lines(path) gives")
    package = require(PACKAGE)
    steps = [getattr(package.normalizers, unicode_form)()]
    steps += [package.normalizers.Lowercase()] if lowercase else []
    try:
        inner = _MODELS[model](package, lines, package.normalizers.Sequence(steps), vocab_size, special)
    except (TypeError, UnicodeError) as error:
        raise_not_text(error)
    learned = inner.get_vocab_size()
    if learned == len(special):
        raise DataError("cannot learn a tokenizer from lines without text; expected sentences")
    if learned > vocab_size:
        raise ConfigError(
            f"vocab_size is {vocab_size}; expected at least {learned}, for {len(special)} special "
            f"tokens and {learned - len(special)} distinct characters of the text"
        )
    return inner


# --- The three models ---------------------------------------------------------------------------------------


def _learn_bpe(package: Any, lines: Iterable[str], normalizer: Any, vocab_size: int, special: Sequence[str]) -> Any:
    inner = package.Tokenizer(package.models.BPE(unk_token=SPECIAL_TOKENS[UNK_ID]))
    inner.normalizer = normalizer
    inner.pre_tokenizer = package.pre_tokenizers.Metaspace()
    inner.decoder = package.decoders.Metaspace()
    trainer = package.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(special), show_progress=False)
    inner.train_from_iterator(lines, trainer)
    return inner


def _learn_words(package: Any, lines: Iterable[str], normalizer: Any, vocab_size: int, special: Sequence[str]) -> Any:
    splitter = package.pre_tokenizers.WhitespaceSplit()
    counts = Counter(word for line in lines for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(line)))
    inner = _word_level(package, counts, vocab_size, special)
    inner.normalizer = normalizer
    inner.pre_tokenizer = splitter
    return inner


def _learn_characters(
    package: Any, lines: Iterable[str], normalizer: Any, vocab_size: int, special: Sequence[str]
) -> Any:
    counts = Counter(character for line in lines for character in normalizer.normalize_str(line))
    # Keep all of them: `learn` raises if they are too many, while truncation would lose the rare ones.
    inner = _word_level(package, counts, len(special) + len(counts), special)
    inner.normalizer = normalizer
    inner.pre_tokenizer = package.pre_tokenizers.Split(package.Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = package.decoders.Fuse()
    return inner


def _word_level(package: Any, counts: Counter[str], vocab_size: int, special: Sequence[str]) -> Any:
    """Make a lookup tokenizer of the most frequent tokens; ties are in alphabetical order.

    The library's trainer would give a special token that occurs in the text a second id, and lose the first.
    """
    tokens = sorted(counts.keys() - set(special), key=lambda token: (-counts[token], token))
    vocabulary = [*special, *tokens[: vocab_size - len(special)]]
    model = package.models.WordLevel(
        {token: index for index, token in enumerate(vocabulary)}, unk_token=SPECIAL_TOKENS[UNK_ID]
    )
    inner = package.Tokenizer(model)
    inner.add_special_tokens(list(special))
    return inner


_MODELS: dict[str, Callable[[Any, Iterable[str], Any, int, Sequence[str]], Any]] = {
    "bpe": _learn_bpe,
    "characters": _learn_characters,
    "words": _learn_words,
}

# --- Inspection of saved tokenizers ---------------------------------------------------------------------------


def model_name(content: dict[str, Any]) -> str:
    """Return the model, "bpe", "words" or "characters", or the library's name for any other."""
    model_type = str(content["model"]["type"])
    if model_type == "WordLevel":
        return "words" if content["decoder"] is None else "characters"
    return model_type.lower()


def is_lowercasing(normalizer: dict[str, Any] | None) -> bool:
    """Return whether a normalizer lower-cases."""
    if normalizer is None:
        return False
    return normalizer["type"] == "Lowercase" or any(map(is_lowercasing, normalizer.get("normalizers", ())))


def separator_id(content: dict[str, Any]) -> int | None:
    """Return the id of `<sep>` if it is a special token; text may contain an ordinary token of that name."""
    for token in content["added_tokens"]:
        if token["content"] == SEPARATOR and token["special"]:
            return int(token["id"])
    return None


def find_incompatibility(inner: Any, content: dict[str, Any]) -> str | None:
    """Describe why `Tokenizer` cannot use a tokenizer; None if it can."""
    for expected, token in enumerate(SPECIAL_TOKENS):
        if inner.token_to_id(token) != expected:
            return f"{token} has id {inner.token_to_id(token)}, not {expected}"
    if content["model"].get("unk_token") != SPECIAL_TOKENS[UNK_ID]:
        return f"its model does not turn unknown tokens into {SPECIAL_TOKENS[UNK_ID]}"
    size = inner.get_vocab_size()
    if sorted(inner.get_vocab().values()) != list(range(size)):
        return f"the ids of its {size} tokens are not 0 to {size - 1}"
    return None
