"""Structured output: a logits processor that leaves only tokens that a grammar allows.

The package llguidance compiles JSON schemas, regular expressions and Lark grammars, and computes the allowed tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, device
from xformer.config import integers
from xformer.errors import ConfigError, DataError
from xformer.generation.json_schema import closed_schema
from xformer.generation.processors import Rows
from xformer.text.extras import require
from xformer.tokenizers import BaseTokenizer

# As json.dumps writes JSON: one line, so that no model can go on with white space forever.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_VOCABULARIES = 8  # that are kept for further grammars


class Grammar:
    """A logits processor: outputs are complete texts of a grammar, unless they reach the maximum length.

    An output ends once the grammar allows nothing else, or where the model ends it. Works with samples and beams; one
    object may serve several searches at a time. Give exactly one of json_schema, regex and lark.

    Args:
        tokens: Bytes of each token, in the order of the ids; empty for special tokens. See `token_bytes`.
        eos_id: Id of the token that ends an output, or a list of ids.
        json_schema: JSON schema, as a dictionary or a string; {} allows any JSON. Output is written as by `json.dumps`.
            Objects have no other properties than those of `properties`, unless there are `additionalProperties`.
        regex: Regular expression that matches the whole output, in the syntax of Rust's regex.
        lark: Grammar in the syntax of Lark, with the rule `start`.
        encode: Function that splits a text that the grammar requires into ids, as the model expects it. Default: the
            longest tokens that fit.

    Raises:
        ConfigError: For none or several grammars, and an invalid one or keywords that llguidance does not support.
        DataError: For an eos_id outside the vocabulary.
        MissingPackageError: If the package llguidance is missing.

    Examples:
        >>> from xformer import LanguageModel, LanguageModelConfig, generate
        >>> tokens = [b"", b"", b"", *(bytes([byte]) for byte in range(256))]
        >>> config = LanguageModelConfig(vocab_size=259, d_model=8, num_heads=2, d_ff=16, num_layers=1)
        >>> grammar = Grammar(tokens, eos_id=2, regex="yes|no")
        >>> ((output,),) = generate(LanguageModel(config), [[5, 4]], logits_processors=[grammar])
        >>> b"".join(tokens[token] for token in output.tokens) in (b"yes", b"no")
        True
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos_id: int | Sequence[int],
        *,
        json_schema: Mapping[str, Any] | bool | str | None = None,
        regex: str | None = None,
        lark: str | None = None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        given = {"json_schema": json_schema, "regex": regex, "lark": lark}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            received = f"a grammar has {', '.join(names) or 'none'} of json_schema, regex and lark"
            raise ConfigError(f"{received}; expected one")
        guidance = require("llguidance")
        ends = integers("eos_id", [eos_id] if np.isscalar(eos_id) else eos_id)
        if not ends or not all(0 <= end < len(tokens) for end in ends):
            raise DataError(f"eos_id is {eos_id!r}; expected ids from 0 to {len(tokens) - 1}")
        tokenizer = _tokenizer(tuple(tokens), tuple(ends), encode)
        grammar = _source(guidance.LLMatcher, names[0], given[names[0]], names[0])
        _check(guidance.LLMatcher, grammar, names[0], tokenizer)
        self._matcher = guidance.LLMatcher(tokenizer, grammar, log_level=0)
        self._num_tokens = len(tokens)

    def __call__(self, tokens: Array, lengths: Array, logits: Array, rows: Rows) -> Array:
        """Mask the tokens that the grammar does not allow."""
        num_rows, vocab_size = logits.shape
        if vocab_size < self._num_tokens:
            raise ConfigError(f"a grammar has {self._num_tokens} tokens and the model {vocab_size}; expected as many")
        if self not in rows.state:
            matchers = [self._matcher.deep_copy() for _ in range(num_rows)]
        else:
            before, parents = rows.state[self], rows.parents.tolist()
            matchers = [
                before[parent].deep_copy() if parent in parents[:row] else before[parent]
                for row, parent in enumerate(parents)
            ]
            for matcher, token in zip(matchers, rows.tokens[:, -1].tolist(), strict=True):
                if not matcher.is_stopped():  # the row of a sample that has ended stays in the batch
                    matcher.consume_token(token)
        rows.state[self] = matchers
        masks = np.zeros((num_rows, -(-self._num_tokens // 32)), dtype=np.int32)
        for matcher, mask in zip(matchers, masks, strict=True):
            if matcher.is_error():
                raise DataError(f"the grammar cannot continue: {_one_line(matcher.get_error())}")
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.zeros((num_rows, vocab_size), dtype=np.bool_)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=self._num_tokens, bitorder="little")
        allowed[:, : self._num_tokens] = bits
        xp = array_namespace(logits)
        return xp.where(xp.from_host(allowed, device=device(logits)), logits, -np.inf)


def check_json_schema(name: str, schema: Mapping[str, Any] | bool | str) -> None:
    """Check that `Grammar` takes a JSON schema, without making a grammar for a vocabulary.

    Args:
        name: Name of the schema in errors.
        schema: JSON schema, as a dictionary or a string.

    Raises:
        ConfigError: For an invalid schema, or keywords that llguidance does not support.
        MissingPackageError: If the package llguidance is missing.
    """
    matcher = require("llguidance").LLMatcher
    _check(matcher, _source(matcher, "json_schema", schema, name), name)


def _check(matcher: Any, grammar: str, name: str, tokenizer: Any = None) -> None:
    has_error, messages = matcher.validate_grammar_with_warnings(grammar, tokenizer)
    if has_error:
        raise ConfigError(f"{name} is not valid: {_one_line(messages[0])}")


@functools.lru_cache(maxsize=_MAX_VOCABULARIES)
def token_bytes(tokenizer: BaseTokenizer) -> tuple[bytes, ...]:
    """Return the bytes of each token of a tokenizer; those of special tokens are empty."""
    special = tokenizer.special_ids
    return tuple(b"" if index in special else tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size))


@functools.lru_cache(maxsize=_MAX_VOCABULARIES)
def _tokenizer(tokens: tuple[bytes, ...], ends: tuple[int, ...], encode: Callable[[str], list[int]] | None) -> Any:
    """Return the tokenizer of llguidance; making one takes as long as many steps."""
    guidance, vocabulary = require("llguidance"), _Vocabulary(tokens, ends, encode)
    for _ in range(2):  # the first one splits texts for the second one
        wrapper = guidance.TokenizerWrapper(vocabulary)
        tokenizer = guidance.LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=list(ends))
        vocabulary.split = tokenizer.greedy_tokenize
    return tokenizer


class _Vocabulary:
    """The tokens as llguidance expects them."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], ends: Sequence[int], encode: Callable[[str], list[int]] | None) -> None:
        self.tokens, self.eos_token_id = [bytes(token) for token in tokens], ends[0]
        self.special_token_ids = sorted({*ends, *(index for index, token in enumerate(self.tokens) if not token)})
        self.split: Any = lambda text: []
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # llguidance tries bytes first
            raise TypeError("expected a string")
        ids = [] if self._encode is None else self._encode(text)
        if b"".join(self.tokens[index] for index in ids) != text.encode():  # e.g. a space at the start
            ids = self.split(text)
        return ids


def _source(matcher: Any, kind: str, value: Any, name: str) -> str:
    """Return a grammar in the notation of llguidance; errors have its name."""
    if kind != "json_schema":
        if not isinstance(value, str):
            raise ConfigError(f"{name} is {value!r:.100}; expected a string")
        return str(matcher.grammar_from_regex(value) if kind == "regex" else matcher.grammar_from_lark(value))
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(closed_schema(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid JSON: {_one_line(str(error))}") from error
    if not isinstance(schema, Mapping | bool):
        raise ConfigError(f"{name} is {value!r:.100}; expected an object")
    return str(matcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS))


def _one_line(message: str) -> str:
    return " ".join(message.split("<state>")[0].split())[:300]
