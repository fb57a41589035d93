"""A line of text to token ids and back, by the Hugging Face `tokenizers` library."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.io import atomic_write, read_json
from xformer.text.extras import require
from xformer.text.tokenizer_models import (
    EOS_ID,
    PACKAGE,
    UNK_ID,
    find_fault,
    learn,
    lowers,
    model_name,
    raise_not_text,
    separator_id,
)


class PhraseIds(NamedTuple):
    """The ways to write a phrase as token ids: after a space inside a line; as the start of a line."""

    inside: list[list[int]]
    beginning: list[list[int]]

    @property
    def anywhere(self) -> list[list[int]]:
        """All of them, once each."""
        return [*self.inside, *(ids for ids in self.beginning if ids not in self.inside)]


class Tokenizer:
    """Splits lines into tokens that were learned from text; made by `Tokenizer.train` or `Tokenizer.load`.

    Ids 0 to 3 are `<pad>`, `<s>`, `</s>` and `<unk>`; a tokenizer for documents also has `<sep>`, which stands between
    sentences. Encoding text returns none of them but `<unk>`, whatever the text says: adding them is the business of
    whoever makes batches, and of `encode_documents`.
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
        self._model = model_name(content)
        self._lowercase = lowers(content["normalizer"])
        self._sep_id = separator_id(content)
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
        """Learn a tokenizer from text; the same text gives the same tokenizer, to the byte.

        vocab_size: at most this many tokens, the special ones included; a small text gives fewer.
        model: "bpe", byte-pair encoding over characters (Sennrich et al., 2016), spaces kept as "▁";
            "words", split at white space, rare words unknown; "characters", one token each, spaces included, and
            line ends too where a line is a whole text with several lines.
        unicode_form: "NFC", or "NFKC", which also makes one of variants: the ligature "fi" and its letters, full
            width and ASCII. It is kept in the file and holds for all text, so `normalize_text` need not repeat it.
        separator: with a token `<sep>`, id 4, for the ends of sentences inside a document.

        Raises ConfigError for an unknown model or form and when `vocab_size` cannot hold the special tokens and (but
        for "words") every character of the text; DataError without text; BackendError without tokenizers.
        """
        settings: dict[str, Any] = {"lowercase": lowercase, "unicode_form": unicode_form, "separator": separator}
        return cls(learn(lines, vocab_size, model=model, **settings))

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

    @property
    def sep_id(self) -> int | None:
        """The id of `<sep>`; None when the tokenizer was made without it."""
        return self._sep_id

    def normalize(self, line: str) -> str:
        """Return the line as the tokenizer sees it: in its Unicode form, lower-cased where `lowercase` is on.

        Raises DataError for what is not text.
        """
        normalizer = self._inner.normalizer  # a foreign tokenizer may have none
        try:
            return line if normalizer is None else str(normalizer.normalize_str(line))
        except (TypeError, UnicodeError) as error:
            raise_not_text(error)

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
            raise_not_text(error)
        return [self._without_control(encoding.ids) for encoding in encodings]

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a whole text, line ends included, as one list: what a language model reads.

        With "characters" that is one id for each, quickly, and `decode` gives `normalize(text)` back exactly as long
        as every character is known; the other models treat the text as one line.

        Raises DataError for what is not text.
        """
        if self._model != "characters":
            return self.encode(text)
        if not self._character_ids:
            self._character_ids = {token: i for token, i in self._inner.get_vocab().items() if len(token) == 1}
        known = self._character_ids
        return [known.get(character, UNK_ID) for character in self.normalize(text)]

    def encode_documents(self, documents: Sequence[Sequence[str]]) -> list[list[int]]:
        """Return the token ids of documents, each a list of sentences, with `<sep>` between the sentences.

        Blank sentences are left out.

        Raises ConfigError when the tokenizer has no `<sep>`, DataError for what is not lists of text.
        """
        if self._sep_id is None:
            raise ConfigError("the tokenizer has no <sep>; expected one trained with separator=True; train it again")
        if any(isinstance(sentences, str) for sentences in [documents, *documents]):
            raise DataError("a document is one string; expected a list of sentences, such as split_sentences(text)")
        rows = iter(self.encode_batch([sentence for sentences in documents for sentence in sentences]))
        encoded = []
        for sentences in documents:
            ids: list[int] = []
            for sentence, row in zip(sentences, rows, strict=False):
                if row and not sentence.isspace():
                    ids += [self._sep_id, *row] if ids else row
            encoded.append(ids)
        return encoded

    def phrase_ids(self, phrase: str) -> PhraseIds:
        """Return the ways to write a word or phrase as whole words, for favouring it in what a model writes.

        At the beginning of a line its first letter may also be a capital. "bpe" and "words" write it alike at the
        beginning and after a space; with "characters" the space belongs to it, so that "art" is not found in "start".

        Raises DataError for a blank phrase, and naming the words that hold characters the tokenizer does not know.
        """
        words = self.normalize(phrase).split()
        if not words:
            raise DataError(f"the topic is {phrase!r}; expected a word or a phrase")
        unknown = [word for word in words if UNK_ID in self.encode(word)]
        if unknown:
            raise DataError(
                f"unknown topic words: {', '.join(map(repr, unknown))}; expected words that the tokenizer can write; "
                "choose words, or spellings, of the training text"
            )
        text = " ".join(words)
        inside = f" {text}" if self._model == "characters" else text
        capital = self.normalize(text[0].title() + text[1:])
        return PhraseIds(self._known([inside]), self._known(dict.fromkeys([text, capital])))

    def tokens_per_word(self, lines: Sequence[str]) -> float:
        """Return the mean number of tokens a word (what stands between white space) of some lines.

        It turns a length in words into one in tokens.

        Raises DataError when the lines hold no word.
        """
        words = sum(len(line.split()) for line in lines)
        if not words:
            raise DataError(f"{len(lines)} lines hold no word; expected lines of text")
        return sum(map(len, self.encode_batch(lines))) / words

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
        separator = self._sep_id
        rows = [[token for token in self._checked(ids) if token > EOS_ID and token != separator] for ids in batch]
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
        inner_class = require(PACKAGE).Tokenizer
        content = read_json(path, "tokenizer")
        try:
            inner = inner_class.from_str(json.dumps(content))
        except Exception as error:  # the library raises no narrower class
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"tokenizer {path} is corrupted or foreign ({reason}); restore the file or train again"
            ) from error
        fault = find_fault(inner, content)
        if fault:
            raise CheckpointError(f"tokenizer {path} is foreign: {fault}; expected a file that xformer saved")
        return cls(inner)

    def __repr__(self) -> str:
        return f"Tokenizer(model={self.model!r}, vocab_size={self.vocab_size}, lowercase={self.lowercase})"

    def _without_control(self, ids: list[int]) -> list[int]:
        """Turn special tokens that text spelled out into `<unk>`: inside a line they would mislead."""
        separator = self._sep_id
        if not ids or (min(ids) > EOS_ID and separator not in ids):
            return ids
        return [token if token > EOS_ID and token != separator else UNK_ID for token in ids]

    def _known(self, texts: Iterable[str]) -> list[list[int]]:
        """The token ids of those texts that have no unknown token."""
        return [ids for ids in map(self.encode, texts) if UNK_ID not in ids]

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
