"""`BaseTokenizer`: the methods of every tokenizer, and functions that its subclasses share."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from xformer.errors import ConfigError, DataError
from xformer.io import StrPath
from xformer.text.extras import require

Messages = Sequence[Mapping[str, Any]]  # of a chat, or the functions that its answers may call

# The characters that stand for bytes in the tokens of byte-level tokenizers: printable ones stand for themselves.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(each for each in range(256) if each not in _PRINTABLE)}


class BaseTokenizer(ABC):
    """Text to token ids and back, with a `tokenizers.Tokenizer`.

    Attributes:
        model: Type of the tokens: "bpe", "words" or "characters"; for a public checkpoint e.g. "byte-level BPE".
        directory: Directory of the public checkpoint that the tokenizer belongs to, or its GGUF file; None for a
            tokenizer that xformer trained.
        adds_special_tokens: True if `encode` adds special tokens such as eos.
        lowercase: True if the tokenizer lower-cases all text.
        eos_ids: Further ids that end a text or a turn, if the file of the tokenizer names them.
        special_ids: Ids of the special tokens, which `decode` skips.
        suppressed_ids: Ids that outputs never have.
    """

    model: str
    directory: Path | None = None
    adds_special_tokens: ClassVar[bool] = True
    lowercase: bool = False
    eos_ids: tuple[int, ...] = ()
    special_ids: frozenset[int]
    suppressed_ids: tuple[int, ...] = ()
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    unk_id: int | None
    sep_id: int | None

    def __init__(self, inner: Any) -> None:
        # The file may contain the truncation and padding of the program that wrote it.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Highest id plus 1."""

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Chat templates by name; the main one is "default". Empty for a tokenizer without templates."""
        return {}

    def __call__(self, *texts: Any, **options: Any) -> Any:
        """Raise ConfigError, which names `encode`: only tokenizers of Hugging Face can be called."""
        raise ConfigError("a tokenizer cannot be called; use tokenizer.encode(text) or tokenizer.encode_batch(texts)")

    # --- Text to ids --------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: The text.
            special_tokens: Add the special tokens of the tokenizer, if it has any.

        Raises:
            DataError: If the input is not valid text.
        """
        return self.encode_batch([text], special_tokens=special_tokens)[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text, without padding; several times faster than one by one. See `encode`."""

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a whole text, line ends included, on which a language model is trained."""
        return self.encode(text, special_tokens=False)

    def encode_prompt(self, text: str, name: str = "prompt") -> list[int]:
        """Return the token ids of a text that a language model continues; errors call it by the name."""
        return self.encode(text)

    def encode_source(self, texts: Sequence[str], language: str = "en") -> list[list[int]]:
        """Return the token ids of the sources of an encoder-decoder; the language is that of documents."""
        return self.encode_batch(texts)

    @abstractmethod
    def phrase_ids(self, phrase: str) -> list[list[int]]:
        """Return the token ids of each spelling of a word or phrase, e.g. to bias generation toward it.

        Args:
            phrase: Word or phrase.

        Raises:
            DataError: For a blank phrase, or one with unknown characters.
        """

    def apply_chat_template(self, messages: Messages, **options: Any) -> str:
        """Return the prompt of a chat; see `PretrainedTokenizer.apply_chat_template`."""
        raise ConfigError("got a chat, but this model has no chat template; expected a text")

    # --- Ids to text --------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Args:
            ids: Token ids.
            skip_special_tokens: Leave out special tokens.

        Raises:
            DataError: For an id out of range.
        """
        return self.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    @abstractmethod
    def decode_batch(self, batch: Iterable[Iterable[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each row of token ids; see `decode`."""

    @abstractmethod
    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the token of each id as the vocabulary spells it, e.g. "▁two"; ids are checked as by `decode`."""

    def id_to_token(self, index: int) -> str | None:
        """Return the token of an id, or None if the vocabulary lacks it."""
        return None if index < 0 else self._inner.id_to_token(index)

    def token_bytes(self, index: int) -> bytes:
        """Return the bytes that a token adds to a text, e.g. b" two"; for a special token its name.

        An unused id has none. Unlike the texts of single tokens, the bytes of successive tokens always concatenate to
        the whole text, except for a space that `decode` drops at its start.
        """
        token = self.id_to_token(index)
        if token is None:
            return b""
        if index in self.special_ids:
            return token.encode()
        if "ByteLevel" in self._decoder_types:
            return bytes(_BYTES[each] for each in token) if set(token) <= _BYTES.keys() else token.encode()
        if "ByteFallback" in self._decoder_types and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes.fromhex(token[3:5])
        decoder = self._inner.decoder
        text = f"a {token}" if decoder is None else str(decoder.decode(["a", token]))
        return text.removeprefix("a").encode()

    def to_json(self) -> str:
        """Return the contents of a tokenizer.json that encodes and decodes the same, for other programs."""
        return str(self._inner.to_str())

    @abstractmethod
    def save(self, path: StrPath) -> None:
        """Write the tokenizer: as one file if xformer trained it, else as a directory of files."""

    @functools.cached_property
    def _decoder_types(self) -> str:
        decoder = self._inner.decoder
        return "" if decoder is None else str(decoder.__getstate__())


def raise_not_text(error: Exception) -> NoReturn:
    """Raise DataError for input that the library rejects as text."""
    # A str with lone surrogates gets here too: it is not valid Unicode.
    raise DataError(f"got something that is not text ({error}); expected a list of str, each valid Unicode") from error


def add_affixes(inner: Any, prefix: Sequence[str], suffix: Sequence[str]) -> None:
    """Make encoding with special tokens put tokens before and after each text."""
    inner.post_processor = require("tokenizers").processors.TemplateProcessing(
        single=[*prefix, "$A", *suffix],
        pair=[*prefix, "$A", *suffix, *prefix, "$B:1", *suffix],
        special_tokens=[(token, inner.token_to_id(token)) for token in dict.fromkeys((*prefix, *suffix))],
    )
