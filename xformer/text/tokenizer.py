"""A line of text to token ids and back, by the Hugging Face `tokenizers` library."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.files import atomic_write, read_json
from xformer.text.extras import require

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")

_PACKAGE = "tokenizers"


class Tokenizer:
    """Splits lines into tokens that were learned from text; made by `Tokenizer.train` or `Tokenizer.load`.

    Ids 0 to 3 are `<pad>`, `<s>`, `</s>` and `<unk>`. `encode` never returns the first three, whatever the
    text says: adding them is the business of whoever makes batches.
    """

    def __init__(self, inner: Any) -> None:
        """Wrap a `tokenizers.Tokenizer` that has our special tokens."""
        # Text that spells a special token is text, not a command. The library does not save this switch.
        inner.encode_special_tokens = True
        # A foreign file may bring these; they would cut lines silently.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        content = json.loads(inner.to_str())
        self._model = _model_name(content)
        self._lowercase = _lowers(content["normalizer"])

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int, *, lowercase: bool = False, model: str = "bpe") -> Tokenizer:
        """Learn a tokenizer from text; the same text gives the same tokenizer, to the byte.

        vocab_size: at most this many tokens, the four special ones included; a small text gives fewer.
        model: "bpe", byte-pair encoding over characters (Sennrich et al., 2016), spaces kept as "▁";
            "words", split at white space, rare words unknown; "characters", one token each, spaces included.

        Raises ConfigError for an unknown model and when `vocab_size` cannot hold the special tokens and (but
        for "words") every character of the text; DataError without text; BackendError without tokenizers.
        """
        if model not in _MODELS:
            raise ConfigError(f"tokenizer model is {model!r}; expected one of: {', '.join(_MODELS)}")
        if vocab_size <= len(SPECIAL_TOKENS):
            raise ConfigError(
                f"vocab_size is {vocab_size}; expected more than the {len(SPECIAL_TOKENS)} special tokens"
            )
        if isinstance(lines, str):
            raise DataError("lines is one string; expected a list of lines, such as read_lines(path) gives")
        lines = list(lines)
        package = require(_PACKAGE)
        steps = [package.normalizers.NFC()] + ([package.normalizers.Lowercase()] if lowercase else [])
        normalizer = package.normalizers.Sequence(steps)
        try:
            inner = _MODELS[model](package, lines, normalizer, vocab_size)
        except (TypeError, UnicodeError) as error:
            _raise_not_text(error)
        learned = inner.get_vocab_size()
        if learned == len(SPECIAL_TOKENS):
            raise DataError(f"cannot learn a tokenizer from {len(lines)} lines without text; expected sentences")
        if learned > vocab_size:
            raise ConfigError(
                f"vocab_size is {vocab_size}; expected at least {learned}, for {len(SPECIAL_TOKENS)} special "
                f"tokens and {learned - len(SPECIAL_TOKENS)} distinct characters of the text"
            )
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, special ones included; ids are 0 to vocab_size - 1."""
        return int(self._inner.get_vocab_size())

    @property
    def model(self) -> str:
        """What kind of tokens these are: "bpe", "words" or "characters"."""
        return self._model

    @property
    def lowercase(self) -> bool:
        """Whether text is lower-cased before it is split; what `decode` gives then is lower-case too."""
        return self._lowercase

    def normalize(self, line: str) -> str:
        """Return the line as the tokenizer sees it: Unicode NFC, lower-cased where `lowercase` is on."""
        normalizer = self._inner.normalizer  # a foreign tokenizer may have none
        return line if normalizer is None else str(normalizer.normalize_str(line))

    def encode(self, line: str) -> list[int]:
        """Return the token ids of a line, without special ids but `<unk>`; no ids for an empty line.

        Raises DataError for what is not text.
        """
        return self.encode_batch([line])[0]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each line; several times faster than one `encode` a line.

        Raises DataError for what is not text.
        """
        try:
            encodings = self._inner.encode_batch(lines, add_special_tokens=False)
        except TypeError as error:
            _raise_not_text(error)
        return [_without_control(encoding.ids) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, special ids skipped but `<unk>`.

        For an ordinary line, `decode(encode(line)) == normalize(line)` as long as every character is known.
        White space may change: "bpe" drops one leading space, "words" makes every gap a single space.

        Raises DataError for an id outside the vocabulary.
        """
        return self.decode_batch([ids])[0]

    def decode_batch(self, batch: Iterable[Iterable[int]]) -> list[str]:
        """Return the text of each row of token ids, special ids skipped but `<unk>`.

        Raises DataError for an id outside the vocabulary.
        """
        rows = [[token for token in self._checked(ids) if token > EOS_ID] for ids in batch]
        return list(self._inner.decode_batch(rows, skip_special_tokens=False))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the name of each id, special ones included, such as "▁two" or "</s>": labels for a plot.

        Raises DataError for an id outside the vocabulary.
        """
        return [self._inner.id_to_token(token) for token in self._checked(ids)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as one JSON file, atomically, in the library's own format.

        Raises CheckpointError when the place cannot be written.
        """
        with atomic_write(path) as file:
            file.write(self._inner.to_str().encode("utf-8"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a tokenizer that `save` wrote.

        Raises CheckpointError for a missing, truncated, corrupted or foreign file, BackendError without the
        tokenizers package.
        """
        inner_class = require(_PACKAGE).Tokenizer
        content = read_json(path, "tokenizer")
        try:
            inner = inner_class.from_str(json.dumps(content))
        except Exception as error:  # the library raises no narrower class
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"tokenizer {path} is corrupted or foreign ({reason}); restore the file or train again"
            ) from error
        fault = _find_fault(inner, content)
        if fault:
            raise CheckpointError(f"tokenizer {path} is foreign: {fault}; expected a file that xformer saved")
        return cls(inner)

    def __repr__(self) -> str:
        return f"Tokenizer(model={self.model!r}, vocab_size={self.vocab_size}, lowercase={self.lowercase})"

    def _checked(self, ids: Iterable[int]) -> list[int]:
        # The library skips unknown ids without a word.
        ids, size = list(ids), self.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise DataError(
                    f"token id {token} is outside the vocabulary; expected 0 to {size - 1}; "
                    "use the tokenizer that the model was trained with"
                )
        return ids


# --- The three models ---------------------------------------------------------------------------------------


def _train_bpe(package: Any, lines: list[str], normalizer: Any, vocab_size: int) -> Any:
    inner = package.Tokenizer(package.models.BPE(unk_token=SPECIAL_TOKENS[UNK_ID]))
    inner.normalizer = normalizer
    inner.pre_tokenizer = package.pre_tokenizers.Metaspace()
    inner.decoder = package.decoders.Metaspace()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    inner.train_from_iterator(lines, trainer, length=len(lines))
    return inner


def _train_words(package: Any, lines: list[str], normalizer: Any, vocab_size: int) -> Any:
    splitter = package.pre_tokenizers.WhitespaceSplit()
    counts = Counter(word for line in lines for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(line)))
    inner = _word_level(package, counts, vocab_size)
    inner.normalizer = normalizer
    inner.pre_tokenizer = splitter
    return inner


def _train_characters(package: Any, lines: list[str], normalizer: Any, vocab_size: int) -> Any:
    counts = Counter(character for line in lines for character in normalizer.normalize_str(line))
    # All of them, even if they are too many: `train` complains, where cutting would lose the rare ones.
    inner = _word_level(package, counts, len(SPECIAL_TOKENS) + len(counts))
    inner.normalizer = normalizer
    inner.pre_tokenizer = package.pre_tokenizers.Split(package.Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = package.decoders.Fuse()
    return inner


def _word_level(package: Any, counts: Counter[str], vocab_size: int) -> Any:
    """Make a tokenizer that looks pieces up: the most frequent ones, equals in alphabetical order.

    The library's own trainer would give a special token that stands in the text a second id, and lose the first.
    """
    pieces = sorted(counts.keys() - set(SPECIAL_TOKENS), key=lambda piece: (-counts[piece], piece))
    vocabulary = [*SPECIAL_TOKENS, *pieces[: vocab_size - len(SPECIAL_TOKENS)]]
    model = package.models.WordLevel(
        {token: index for index, token in enumerate(vocabulary)}, unk_token=SPECIAL_TOKENS[UNK_ID]
    )
    inner = package.Tokenizer(model)
    inner.add_special_tokens(list(SPECIAL_TOKENS))
    return inner


_MODELS: dict[str, Callable[[Any, list[str], Any, int], Any]] = {
    "bpe": _train_bpe,
    "characters": _train_characters,
    "words": _train_words,
}


def _model_name(content: dict[str, Any]) -> str:
    kind = str(content["model"]["type"])
    if kind == "WordLevel":
        return "words" if content["decoder"] is None else "characters"
    return kind.lower()


# --- Checks -------------------------------------------------------------------------------------------------


def _without_control(ids: list[int]) -> list[int]:
    """Turn `<pad>`, `<s>` and `</s>` that text spelled out into `<unk>`: inside a line they would mislead."""
    if not ids or min(ids) > EOS_ID:
        return ids
    return [token if token > EOS_ID else UNK_ID for token in ids]


def _find_fault(inner: Any, content: dict[str, Any]) -> str | None:
    """Say what makes a readable tokenizer one that `Tokenizer` cannot use."""
    for expected, token in enumerate(SPECIAL_TOKENS):
        if inner.token_to_id(token) != expected:
            return f"{token} has id {inner.token_to_id(token)}, not {expected}"
    if content["model"].get("unk_token") != SPECIAL_TOKENS[UNK_ID]:
        return f"its model does not turn unknown tokens into {SPECIAL_TOKENS[UNK_ID]}"
    size = inner.get_vocab_size()
    if sorted(inner.get_vocab().values()) != list(range(size)):
        return f"the ids of its {size} tokens are not 0 to {size - 1}"
    return None


def _lowers(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return False
    return normalizer["type"] == "Lowercase" or any(map(_lowers, normalizer.get("normalizers", ())))


def _raise_not_text(error: Exception) -> NoReturn:
    # A str with lone surrogates gets here too: it is not valid Unicode.
    raise DataError(f"got something that is not text ({error}); expected a list of str, each valid Unicode") from error
