"""Tokenizer: lines of text to token ids and back, with the Hugging Face `tokenizers` library."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from xformer.config import integers
from xformer.errors import CheckpointError, ConfigError, DataError, check_choice, describe_type
from xformer.io import StrPath, read_json, write_bytes
from xformer.text.extras import library_errors, require
from xformer.text.normalize import check_form, check_texts
from xformer.text.sentences import split_sentences
from xformer.tokenizers.base import BaseTokenizer, raise_not_text

# Special tokens and their ids, the same in every tokenizer.
PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")

# Separates the sentences of a document; optional, so its id is read from the file.
SEPARATOR = "<sep>"

_MAX_TOKENS = 10_000_000  # the library reserves memory for all of them, and aborts the process if it is short
_MODELS = "bpe", "characters", "words"


class Tokenizer(BaseTokenizer):
    """Split lines into tokens learned from text. Use `Tokenizer.train` or `Tokenizer.load` to make one.

    Ids 0 to 3 are `<pad>`, `<s>`, `</s>` and `<unk>`; a tokenizer for documents also has `<sep>` between sentences.
    Encoding adds no special ids except `<unk>`, even if the text spells them; batches and `encode_documents` do.
    """

    adds_special_tokens = False
    pad_id, bos_id, eos_id, unk_id = PAD_ID, BOS_ID, EOS_ID, UNK_ID

    def __init__(self, inner: Any) -> None:
        """Wrap a `tokenizers.Tokenizer` that has these special tokens."""
        super().__init__(inner)
        # Text that spells a special token stays text. The library does not save this setting.
        inner.encode_special_tokens = True
        content = json.loads(inner.to_str())
        name = str(content["model"]["type"])
        lookup = "words" if content["decoder"] is None else "characters"
        self.model = lookup if name == "WordLevel" else name.lower()
        self.lowercase = _is_lowercasing(content["normalizer"])
        # Text may contain an ordinary token of this name.
        separators = (each for each in content["added_tokens"] if each["content"] == SEPARATOR and each["special"])
        self.sep_id = next((int(each["id"]) for each in separators), None)
        self.suppressed_ids = () if self.sep_id is None else (self.sep_id,)
        self.special_ids = frozenset((PAD_ID, BOS_ID, EOS_ID, *self.suppressed_ids))  # `decode` shows <unk>
        self._character_ids: dict[str, int] = {}

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        vocab_size: int,
        *,
        lowercase: bool = False,
        model: str = "bpe",
        unicode_form: str = "NFC",
        separator: bool = False,
    ) -> Tokenizer:
        """Learn a tokenizer from text. The same text gives the same tokenizer, byte for byte.

        Args:
            lines: Lines of text.
            vocab_size: Largest number of tokens, special ones included; a small text gives fewer.
            lowercase: Lower-case all text.
            model: "bpe" is byte-pair encoding over characters (Sennrich et al., 2016), with spaces as "▁". "words"
                splits at white space; rare words are unknown. "characters" has one token per character, including
                spaces and the line ends of texts with several lines.
            unicode_form: "NFC", or "NFKC", which also unifies variants such as ligatures and full width letters. It is
                saved with the tokenizer and applied to all text.
            separator: Add a token `<sep>`, id 4, for the boundaries of sentences in a document.

        Raises:
            ConfigError: For an unknown model or form, or if `vocab_size` is too small for the special tokens and
                (except for "words") every character of the text.
            DataError: If there is no text.
            BackendError: If the package tokenizers is missing.
        """
        special = (*SPECIAL_TOKENS, SEPARATOR) if separator else SPECIAL_TOKENS
        check_choice("tokenizer model", model, _MODELS)
        check_form(unicode_form)
        if not isinstance(vocab_size, Integral) or vocab_size <= len(special):
            raise ConfigError(f"vocab_size is {vocab_size}; expected more than the {len(special)} special tokens")
        if vocab_size > _MAX_TOKENS:
            raise ConfigError(f"vocab_size is {vocab_size}; expected at most {_MAX_TOKENS}; 4000 to 50000 are usual")
        if isinstance(lines, str) or not isinstance(lines, Iterable):
            received = "one string" if isinstance(lines, str) else describe_type(lines)
            raise DataError(f"lines is {received}; expected a list of lines, such as read_lines(path) gives")
        package = require("tokenizers")
        steps = [getattr(package.normalizers, unicode_form)()]
        steps += [package.normalizers.Lowercase()] if lowercase else []
        normalizer = package.normalizers.Sequence(steps)
        try:
            inner = (_learn_bpe if model == "bpe" else _learn_lookup)(lines, vocab_size, special, normalizer, model)
        except (TypeError, UnicodeError) as error:
            raise_not_text(error)
        learned = inner.get_vocab_size()
        if learned == len(special):
            raise DataError("cannot learn a tokenizer from lines without text; expected sentences")
        if learned > vocab_size:
            parts = f"{len(special)} special tokens and {learned - len(special)} distinct characters of the text"
            raise ConfigError(f"vocab_size is {vocab_size}; expected at least {learned}, for {parts}")
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included; ids are 0 to vocab_size - 1."""
        return int(self._inner.get_vocab_size())

    def normalize(self, line: str) -> str:
        """Return the line in the tokenizer's Unicode form, lower-cased if `lowercase` is set.

        Raises:
            DataError: If `line` is not valid text.
        """
        normalizer = self._inner.normalizer  # None in some files of other programs
        try:
            return line if normalizer is None else str(normalizer.normalize_str(line))
        except (TypeError, UnicodeError) as error:
            raise_not_text(error)

    def encode_batch(self, lines: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each line, without special ids except `<unk>`; none for an empty line.

        `special_tokens` has no effect, since `<s>` and `</s>` are added to batches.
        """
        check_texts(lines)
        try:
            encodings = self._inner.encode_batch(lines, add_special_tokens=False)
        except TypeError as error:
            raise_not_text(error)
        return [self._without_control(encoding.ids) for encoding in encodings]

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a whole text, line ends included, as one list, for language models.

        With "characters", `decode` returns `normalize(text)` exactly if every character is known. The other models
        treat the text as one line.
        """
        if self.model != "characters":
            return self.encode(text)
        if not self._character_ids:
            self._character_ids = {token: i for token, i in self._inner.get_vocab().items() if len(token) == 1}
        known = self._character_ids
        return [known.get(character, UNK_ID) for character in self.normalize(text)]

    def encode_prompt(self, text: str, name: str = "prompt") -> list[int]:
        """Return the token ids of a text that a language model continues; an empty one is treated as a line break.

        Raises:
            DataError: For unknown characters.
        """
        ids = self.encode_text(text or "\n")
        if UNK_ID in ids and not text:
            raise DataError(f"{name} is empty and the tokenizer has no line end; expected some text")
        if UNK_ID in ids:
            characters = dict.fromkeys(self.normalize(text))
            unknown = ", ".join(repr(each) for each in characters if UNK_ID in self.encode_text(each))
            raise DataError(f"{name} has characters that the tokenizer does not know: {unknown}")
        return ids

    def encode_source(self, texts: Sequence[str], language: str = "en") -> list[list[int]]:
        """Return the token ids of texts, with `<sep>` between their sentences if the tokenizer has it."""
        if self.sep_id is None:
            return self.encode_batch(texts)
        return self.encode_documents([split_sentences(text, language) for text in texts])

    def encode_documents(self, documents: Sequence[Sequence[str]]) -> list[list[int]]:
        """Return the token ids of documents, with `<sep>` between sentences. Blank sentences are left out.

        Args:
            documents: Documents, each a list of sentences.

        Raises:
            ConfigError: If the tokenizer has no `<sep>`.
            DataError: If a document is not a list of text.
        """
        if self.sep_id is None:
            raise ConfigError("the tokenizer has no <sep>; expected one trained with separator=True; train it again")
        for sentences in [[], *documents] if hasattr(documents, "__len__") else [documents]:
            if isinstance(documents, str) or isinstance(sentences, str) or not hasattr(sentences, "__len__"):
                raise DataError("a document is no list of sentences; expected one, such as split_sentences(text)")
        rows = iter(self.encode_batch([sentence for sentences in documents for sentence in sentences]))
        encoded = []
        for sentences in documents:
            ids: list[int] = []
            for sentence, row in zip(sentences, rows, strict=False):
                if row and not sentence.isspace():
                    ids += [self.sep_id, *row] if ids else row
            encoded.append(ids)
        return encoded

    def phrase_ids(self, phrase: str) -> list[list[int]]:
        """Return the spellings of a word or phrase as whole words, e.g. to bias generation toward it.

        At the start of a line the first letter may also be a capital. "bpe" and "words" spell a phrase the same at the
        start and after a space; "characters" includes the space, so that "art" does not match "start". The spelling
        inside a line comes first.
        """
        words = self.normalize(phrase).split()
        if not words:
            raise DataError(f"phrase is {phrase!r}; expected a word or a phrase")
        unknown = [word for word in words if UNK_ID in self.encode(word)]
        if unknown:
            received = f"phrase {phrase!r} has words with unknown characters: {', '.join(map(repr, unknown))}"
            raise DataError(f"{received}; expected words, or spellings, of the training text")
        text = " ".join(words)
        inside = f" {text}" if self.model == "characters" else text
        spellings = map(self.encode, (inside, text, self.normalize(text[0].title() + text[1:])))
        return [list(ids) for ids in dict.fromkeys(map(tuple, spellings)) if UNK_ID not in ids]

    def decode_batch(self, batch: Iterable[Iterable[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each row of token ids.

        `decode(encode(line)) == normalize(line)` for ordinary lines if every character is known. White space may
        change: "bpe" drops one leading space, "words" replaces every run by one space. `<unk>` is never left out.
        """
        skipped = self.special_ids if skip_special_tokens else ()
        rows = [[token for token in self._checked(ids) if token not in skipped] for ids in batch]
        return list(self._inner.decode_batch(rows, skip_special_tokens=False))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the token of each id, special ones included, such as "▁two" or "</s>"."""
        return [self._inner.id_to_token(token) for token in self._checked(ids)]

    def to_json(self) -> str:
        """Return the contents of a tokenizer.json for other programs: special tokens in a text are text, as here."""
        return json.dumps({**json.loads(super().to_json()), "added_tokens": []}, ensure_ascii=False)

    def save(self, path: StrPath) -> None:
        """Write the tokenizer as one JSON file (tokenizer.json of Hugging Face), atomically.

        Raises:
            CheckpointError: If the file cannot be written.
        """
        write_bytes(path, self._inner.to_str().encode())

    @classmethod
    def load(cls, path: StrPath) -> Tokenizer:
        """Read a tokenizer that `save` wrote.

        Raises:
            CheckpointError: For a missing, truncated or corrupted file, or one of another program.
            BackendError: If the package tokenizers is missing.
        """
        inner_class = require("tokenizers").Tokenizer
        content = read_json(path, "tokenizer")
        with library_errors(f"tokenizer {path} is corrupted or of another program; restore it or train again"):
            inner = inner_class.from_str(json.dumps(content))
        if problem := _find_incompatibility(inner, content):
            raise CheckpointError(f"tokenizer {path} is incompatible: {problem}; expected a file that xformer saved")
        return cls(inner)

    def __repr__(self) -> str:
        return f"Tokenizer(model={self.model!r}, vocab_size={self.vocab_size}, lowercase={self.lowercase})"

    def _without_control(self, ids: list[int]) -> list[int]:
        """Replace special tokens that the text spells by `<unk>`."""
        control = self.special_ids
        return ids if control.isdisjoint(ids) else [UNK_ID if token in control else token for token in ids]

    def _checked(self, ids: Iterable[int]) -> list[int]:
        # The library skips unknown ids silently.
        ids, size = integers("ids", ids), self.vocab_size
        for token in ids:
            if not 0 <= token < size:
                received = f"token id {token} is outside the vocabulary; expected 0 to {size - 1}"
                raise DataError(f"{received}; use the tokenizer that the model was trained with")
        return ids


# --- training and inspection ------------------------------------------------------------------------------------------


def _learn_bpe(lines: Iterable[str], vocab_size: int, special: Sequence[str], normalizer: Any, model: str) -> Any:
    package = require("tokenizers")
    inner = package.Tokenizer(package.models.BPE(unk_token=SPECIAL_TOKENS[UNK_ID]))
    inner.normalizer = normalizer
    inner.pre_tokenizer = package.pre_tokenizers.Metaspace()
    inner.decoder = package.decoders.Metaspace()
    trainer = package.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(special), show_progress=False)
    inner.train_from_iterator(lines, trainer)
    return inner


def _learn_lookup(lines: Iterable[str], vocab_size: int, special: Sequence[str], normalizer: Any, model: str) -> Any:
    """Look up the most frequent words, or all characters; ties are in alphabetical order.

    The library's trainer would give a special token that occurs in the text a second id, and lose the first.
    """
    package = require("tokenizers")
    normalized = map(normalizer.normalize_str, lines)
    if model == "words":
        splitter = package.pre_tokenizers.WhitespaceSplit()
        counts = Counter(word for line in normalized for word, _ in splitter.pre_tokenize_str(line))
    else:
        splitter = package.pre_tokenizers.Split(package.Regex(r"[\s\S]"), behavior="isolated")
        counts = Counter(itertools.chain.from_iterable(normalized))
        vocab_size = len(special) + len(counts)  # `train` raises if they are too many; none may be lost
    tokens = sorted(counts.keys() - set(special), key=lambda token: (-counts[token], token))
    vocabulary = [*special, *tokens[: vocab_size - len(special)]]
    ids = {token: index for index, token in enumerate(vocabulary)}
    inner = package.Tokenizer(package.models.WordLevel(ids, unk_token=SPECIAL_TOKENS[UNK_ID]))
    inner.add_special_tokens(list(special))
    inner.normalizer, inner.pre_tokenizer = normalizer, splitter
    if model == "characters":
        inner.decoder = package.decoders.Fuse()
    return inner


def _is_lowercasing(normalizer: dict[str, Any] | None) -> bool:
    """Return whether a normalizer lower-cases."""
    if normalizer is None:
        return False
    return normalizer["type"] == "Lowercase" or any(map(_is_lowercasing, normalizer.get("normalizers", ())))


def _find_incompatibility(inner: Any, content: dict[str, Any]) -> str | None:
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
