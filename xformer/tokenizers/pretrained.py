"""Tokenizers that are loaded from public checkpoints."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from xformer.config import integers
from xformer.errors import CheckpointError, ConfigError, DataError, nearest_hint
from xformer.io import StrPath, read_json, write_bytes, write_json
from xformer.text.extras import library_errors, read_bytes, require
from xformer.text.normalize import check_texts
from xformer.tokenizers.base import BaseTokenizer, Messages, add_affixes, raise_not_text
from xformer.tokenizers.chat import CHAT_TEMPLATE_FILE, read_chat_templates, render_chat_template, template_files
from xformer.tokenizers.settings import CONFIG_FILE, ROLES, SETTINGS_FILES, add_tokens, extra_tokens

TOKENIZER_FILE = "tokenizer.json"
_UNLIMITED = 10**9  # files spell "no limit" as 10**30
# What clean_up_tokenization_spaces replaces in a decoded text, in this order.
_CLEANED = (
    {f" {mark}": mark for mark in ".?!,"} | {" ' ": "'"} | {f" {end}": end for end in ("n't", "'m", "'s", "'ve", "'re")}
)
_FILES = (
    *(TOKENIZER_FILE, *SETTINGS_FILES, CHAT_TEMPLATE_FILE),
    *("vocab.json", "target_vocab.json", "vocab.txt", "merges.txt", "source.spm", "target.spm"),
    *("sentencepiece.bpe.model", "spiece.model", "tokenizer.model", "source_tokenizer.json", "target_tokenizer.json"),
)


def _id_of(role: str, description: str) -> Any:
    """Return a property of `PretrainedTokenizer`: the id of a special token."""
    documentation = f"Id of {description}; None if the files do not name it."
    return property(lambda tokenizer: tokenizer.token_to_id(tokenizer._special.get(role)), doc=documentation)


class PretrainedTokenizer(BaseTokenizer):
    """Tokenizer of a public checkpoint. Use `load_tokenizer` to make one.

    Encoding adds the special tokens of the checkpoint, such as `[CLS]` or `</s>`, unless `special_tokens=False`.
    A special token that is spelled out in a text becomes that token; chat templates rely on this.

    Args:
        inner: A `tokenizers.Tokenizer`.
        settings: Contents of the JSON files; see `read_settings`.
        directory: Directory of the files, or the GGUF file.
        vocab: Ids by token if they differ from those of `inner`.
        language_ids: Ids of the tokens of languages by their codes; see `set_languages`.
        language_position: Position of the language token: "before" is `[language] x [eos]`, "after"
            `x [eos] [language]`, "target" puts the token of the target language before the source.
        target: Tokenizer of target texts if it is another one.
        eos_ids: Ids that end a text or a turn; empty if generation_config.json has them.
        vocab_size: Highest id plus 1, if it is known.

    Attributes:
        cleans_up_spaces: Whether `decode` removes spaces before punctuation and contractions.
        truncation_side: Side that texts lose tokens from if they are too long, "right" or "left".
        language_ids: Ids of the tokens of languages by their codes; empty without such tokens.
        target: Tokenizer of the outputs of a translation model.
        source_language: Code of the language of sources; None if the files do not state it.
        forced_bos_id: Id of the target language, which outputs begin with; None for models without such a token.
    """

    directory: Path

    def __init__(
        self,
        inner: Any,
        settings: Mapping[str, Any],
        directory: Path,
        *,
        vocab: dict[str, int] | None = None,
        language_ids: Mapping[str, int] | None = None,
        language_position: str = "before",
        target: PretrainedTokenizer | None = None,
        eos_ids: tuple[int, ...] = (),
        vocab_size: int | None = None,
    ) -> None:
        # A tokenizer.json that truncates texts says from which side, too.
        side = settings.get("truncation_side") or (inner.truncation or {}).get("direction", "right")
        if side not in ("left", "right"):
            raise CheckpointError(f"{directory} has truncation_side {side!r}; expected 'left' or 'right'")
        super().__init__(inner)
        add_tokens(inner, settings, is_raw=vocab is not None)
        self.truncation_side: str = side
        self._splits_special = bool(settings.get("split_special_tokens"))
        inner.encode_special_tokens = self._splits_special
        is_bpe = type(inner.model).__name__ == "BPE"
        key = "clean_up_tokenization_spaces" + ("_for_bpe_even_though_it_will_corrupt_output" if is_bpe else "")
        self.cleans_up_spaces: bool = bool(settings.get("clean_up_tokenization_spaces") and settings.get(key))
        self._settings, self.directory, self._vocab, self.eos_ids = settings, directory, vocab, eos_ids
        if vocab_size is not None:
            self.vocab_size = vocab_size
        self.model = f"{'byte-level ' if 'ByteLevel' in self._decoder_types else ''}{type(inner.model).__name__}"
        self._tokens = None if vocab is None else {index: token for token, index in vocab.items()}
        self._special = {name: token for name in ROLES if isinstance(token := settings.get(f"{name}_token"), str)}
        named = {*self._special.values(), *extra_tokens(settings)}
        added = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
        ids = {index for token in named | added if (index := self.token_to_id(token)) is not None}
        self.language_ids, self._language_position = dict(language_ids or {}), language_position
        self.special_ids = frozenset(ids.union(self.language_ids.values()))
        self.target: PretrainedTokenizer = self if target is None else target
        self.forced_bos_id: int | None = None
        self.source_language: str | None = None

    # --- Vocabulary ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def vocab_size(self) -> int:
        """Highest id plus 1. The embedding of the model may have more rows."""
        ids = self._inner.get_vocab() if self._vocab is None else self._vocab
        return 1 + max(ids.values(), default=-1)

    @property
    def model_max_length(self) -> int | None:
        """Maximum number of tokens of an input; None if the files do not state it."""
        value = self._settings.get("model_max_length", self._settings.get("max_len"))
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return int(value) if is_number and 0 < value < _UNLIMITED else None

    @property
    def model_input_names(self) -> list[str] | None:
        """Inputs that transformers makes, e.g. "attention_mask"; None if the files do not state them."""
        names = self._settings.get("model_input_names")
        return [str(name) for name in names] if isinstance(names, list) else None

    def token_to_id(self, token: str | None) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks it."""
        if token is None:
            return None
        return self._inner.token_to_id(token) if self._vocab is None else self._vocab.get(token)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the token of each id; an unused id is shown in angle brackets."""
        return [self.id_to_token(index) or f"<{index}>" for index in ids]

    def id_to_token(self, index: int) -> str | None:
        """Return the token of an id, or None if the vocabulary lacks it."""
        return super().id_to_token(index) if self._tokens is None else self._tokens.get(index)

    @property
    def added_tokens(self) -> list[str]:
        """Tokens that are found in a text before it is split, in the order of their ids."""
        return [token.content for _, token in sorted(self._inner.get_added_tokens_decoder().items())]

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by role: "bos_token", "eos_token", "pad_token", ..."""
        return {f"{name}_token": token for name, token in self._special.items()}

    bos_id: int | None = _id_of("bos", "the token at the start of a text")
    eos_id: int | None = _id_of("eos", "the token at the end of a text")
    pad_id: int | None = _id_of("pad", "the padding token")
    unk_id: int | None = _id_of("unk", "the unknown token")
    sep_id: int | None = _id_of("sep", "the token between two texts")
    cls_id: int | None = _id_of("cls", "the token for the whole text")
    mask_id: int | None = _id_of("mask", "the masked token")

    # --- Text to ids and back -----------------------------------------------------------------------------------------

    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text, without padding; see `encode`."""
        check_texts(texts)
        return [self._ids(encoding) for encoding in self._encode(texts, special_tokens)]

    def encode_truncated(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """Return the token ids of each text, special ones included, of at most max_length tokens; see `truncated`."""
        check_texts(texts)
        return [self._cut(self._ids(each), each.special_tokens_mask, max_length) for each in self._encode(texts, True)]

    def _cut(self, ids: list[int], is_special: Sequence[int], max_length: int) -> list[int]:
        if len(ids) <= max_length:
            return ids
        content = [position for position, special in enumerate(is_special) if not special]
        count = max(0, max_length - (len(ids) - len(content)))
        kept = set(content[len(content) - count :] if self.truncation_side == "left" else content[:count])
        return [index for position, index in enumerate(ids) if position in kept or is_special[position]]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a text without special tokens, and the (start, end) offsets of each token."""
        (encoding,) = self._encode([text], False)
        return self._ids(encoding), list(encoding.offsets)

    def encode_pairs(self, texts: Sequence[str], pairs: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Return the token ids and the token types of each pair of texts that a model reads together.

        Args:
            texts: First texts.
            pairs: Second texts.

        Raises:
            DataError: If an input is not valid text, the numbers of texts differ, or the model reads single texts only.
        """
        check_texts(texts)
        check_texts(pairs)
        if len(pairs) != len(texts):
            raise DataError(f"got {len(texts)} texts and {len(pairs)} second texts; expected one for each")
        if self.language_ids or self._vocab:
            raise DataError("the tokenizer of this model accepts single texts only")
        return [(each.ids, each.type_ids) for each in self._encode(list(zip(texts, pairs, strict=True)), True)]

    def _ids(self, encoding: Any) -> list[int]:
        if self._vocab is None:
            return list(encoding.ids)
        # An unknown piece of one language may be a token of the other.
        unknown = self._vocab[self._special["unk"]]
        return [self._vocab.get(token, unknown) for token in encoding.tokens]

    def _encode(self, rows: Sequence[Any], special_tokens: bool) -> list[Any]:
        with library_errors(f"the tokenizer of {self.directory} failed"):
            try:
                return list(self._inner.encode_batch(rows, add_special_tokens=special_tokens))
            except (TypeError, UnicodeError) as error:
                raise_not_text(error)

    def phrase_ids(self, phrase: str) -> list[list[int]]:
        """Return the spellings of a word or phrase after a space: as it is, then with a capital first letter."""
        text = " ".join(phrase.split())
        if not text:
            raise DataError(f"phrase is {phrase!r}; expected a word or a phrase")
        before = "a"  # tokenizers treat the start of a text in different ways
        rows = [before, f"{before} {text}", f"{before} {text[0].title()}{text[1:]}"]
        start, *spellings = self.encode_batch(rows, special_tokens=False)
        spellings = [ids[len(start) :] for ids in spellings if ids[: len(start)] == start]
        known = [list(ids) for ids in dict.fromkeys(map(tuple, spellings)) if ids and self.special_ids.isdisjoint(ids)]
        if not known:
            raise DataError(f"phrase {phrase!r} has characters that the tokenizer does not know")
        return known

    def decode_batch(self, batch: Iterable[Iterable[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each row of token ids. Ids above the vocabulary, of unused embeddings, have no text."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        rows = [[index for index in integers("ids", ids) if index not in skipped] for ids in batch]
        lowest = min((min(row) for row in rows if row), default=0)
        if lowest < 0:
            raise DataError(f"token id is {lowest}; expected at least 0")
        with library_errors(f"the tokenizer of {self.directory} failed"):
            if self._tokens is None:
                rows = [[index for index in row if index < 1 << 31] for row in rows]
                texts = list(self._inner.decode_batch(rows, skip_special_tokens=False))
            else:
                known, decoder = self._tokens, self._inner.decoder
                texts = [decoder.decode([known[index] for index in row if index in known]).strip() for row in rows]
        for old, new in _CLEANED.items() if self.cleans_up_spaces else ():
            texts = [text.replace(old, new) for text in texts]
        return texts

    def lower_cased(self) -> Self:
        """Return the tokenizer with texts in lower case; tokens that are spelled out in a text keep their case."""
        normalizers, tokenizer = require("tokenizers").normalizers, self._copied()
        old = [] if self._inner.normalizer is None else [self._inner.normalizer]
        tokenizer._inner.normalizer = normalizers.Sequence([normalizers.Lowercase(), *old])
        return tokenizer

    def truncated(self, max_length: int) -> Self:
        """Return the tokenizer with texts, or pairs, of at most max_length tokens; the longer of a pair is cut.

        The files say whether it loses its end or its start.
        """
        tokenizer = self._copied()
        tokenizer._inner.enable_truncation(max_length, direction=self.truncation_side)
        return tokenizer

    def _copied(self) -> Self:
        tokenizer = copy.copy(self)
        tokenizer._inner = copy.deepcopy(self._inner)
        tokenizer._inner.encode_special_tokens = self._splits_special  # which a copy loses
        return tokenizer

    # --- Languages ----------------------------------------------------------------------------------------------------

    def set_languages(self, source: str | None = None, target: str | None = None) -> None:
        """Set the languages of a translation model: sources, and `forced_bos_id`, get the tokens that it expects.

        Args:
            source: Code of the source language. Default: that of the files.
            target: Code of the target language. Default: that of the files, if any.

        Raises:
            ConfigError: If the tokenizer has no such language.
            CheckpointError: If it does not have the source language that the files name.
        """
        self.source_language = source or self._settings.get("src_lang") or self._settings.get("source_lang")
        before_source = self._language_position == "target"
        for language in [target] if before_source else [source, target]:
            if language is not None and not self.language_ids:
                raise ConfigError(f"language is {language!r}, but the tokenizer has no language tokens; omit it")
            if language is not None and language not in self.language_ids:
                raise ConfigError(f"language is {language!r}; {nearest_hint(language, sorted(self.language_ids))}")
        if not self.language_ids:
            return
        eos = [token for token in [self._special.get("eos")] if token is not None]
        if before_source:
            add_affixes(self._inner, [] if target is None else [self._language_token(target)], eos)
            return
        source, target = source or self._settings.get("src_lang"), target or self._settings.get("tgt_lang")
        if not isinstance(source, str) or source not in self.language_ids:
            raise CheckpointError(f"{CONFIG_FILE} of {self.directory} has src_lang {source!r}, which is not a language")
        token = self._language_token(source)
        add_affixes(self._inner, *(([token], eos) if self._language_position == "before" else ([], [*eos, token])))
        self.forced_bos_id = self.language_ids.get(target) if isinstance(target, str) else None

    def _language_token(self, language: str) -> str:
        return self.tokens([self.language_ids[language]])[0]

    # --- Chats --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name; the main one is "default". Empty for a checkpoint without templates."""
        return read_chat_templates(self.directory, self._settings)

    def apply_chat_template(
        self, messages: Messages, *, add_generation_prompt: bool = True, template: str = "default", **variables: Any
    ) -> str:
        """Return the prompt of a chat. Encode it with `special_tokens=False`.

        Args:
            messages: Messages, each with "role" and "content". The template gets all keys, such as "name" or
                "tool_calls"; the content None is an empty text.
            add_generation_prompt: End with the start of an answer.
            template: Name of the template if there are several.
            **variables: Further variables of the template, such as `tools` or `documents`.

        Raises:
            ConfigError: For token ids or arrays in place of a text, as `return_tensors` of Hugging Face asks.
            CheckpointError: If the checkpoint has no such template, or it is invalid.
            DataError: If the template rejects the messages.
            BackendError: If the package jinja2 is missing.
        """
        if any(variables.get(name) for name in ("tokenize", "return_dict", "return_tensors")):
            raise ConfigError("apply_chat_template returns a text; use tokenizer.encode(text, special_tokens=False)")
        templates = self.chat_templates
        if template not in templates:
            known = f"; expected one of: {', '.join(sorted(templates))}" if templates else ""
            raise CheckpointError(f"{self.directory} has no chat template {template!r}{known}")
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise DataError('messages is not a list of messages; expected [{"role": "user", "content": "..."}]')
        for message in messages:
            role, content = message.get("role"), message.get("content")
            is_empty = message.keys().isdisjoint(("content", "tool_calls"))
            if not isinstance(role, str) or not isinstance(content, str | list | None) or is_empty:
                raise DataError(f'a message is {dict(message)!r}; expected {{"role": "user", "content": "..."}}')
        variables = {"tools": None, "documents": None, **self.special_tokens, **variables}
        return render_chat_template(
            templates[template],
            messages=[{**each, "content": ""} if each.get("content", "") is None else dict(each) for each in messages],
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    # --- Files --------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the contents of a tokenizer.json that encodes and decodes the same, for other programs.

        Raises:
            CheckpointError: If the ids are not those of the tokenizer alone, as in SentencePiece files of Marian.
        """
        if self._vocab is not None:
            raise CheckpointError(f"the tokenizer of {self.directory} has a vocab.json; expected a tokenizer.json")
        return super().to_json()

    def save(self, path: StrPath) -> None:
        """Copy the files of the tokenizer as they are; write that of a GGUF file in the Hugging Face format.

        Call it after `save_pretrained`: generation_config.json, if present, gets all `eos_ids`.

        Raises:
            CheckpointError: If a file cannot be read or written.
        """
        output = Path(path)
        if self.directory.is_file():
            files = {TOKENIZER_FILE: self._inner.to_str().encode()}
            write_json(output / CONFIG_FILE, {"tokenizer_class": "PreTrainedTokenizerFast", **self._settings})
        else:
            names = [name for name in _FILES if (self.directory / name).is_file()]
            names += [path.relative_to(self.directory).as_posix() for path in template_files(self.directory)]
            if not names:
                raise CheckpointError(f"{self.directory} no longer has the files of its tokenizer")
            files = {name: read_bytes(self.directory / name) for name in names}
        for name, content in files.items():
            write_bytes(output / name, content)
        generation = output / "generation_config.json"
        if self.eos_ids and generation.exists():
            values = read_json(generation, "generation settings")
            write_json(generation, {**values, "eos_token_id": list(self.eos_ids)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size}, directory={str(self.directory)!r})"


# --- Reading of files -------------------------------------------------------------------------------------------------


def read_inner(path: Path) -> Any:
    """Read tokenizer.json; raise CheckpointError if it is missing or damaged."""
    library = require("tokenizers")
    content = read_bytes(path)
    with library_errors(f"{path} is not a valid tokenizer"):
        return library.Tokenizer.from_str(str(content, "utf-8-sig"))
