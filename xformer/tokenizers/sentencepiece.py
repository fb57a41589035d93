"""SentencePiece models (`.spm`, `.model`), read without the sentencepiece and protobuf packages.

A model becomes a `tokenizers.Tokenizer` with the same steps: the compiled normalization, white space as "▁", and
Unigram (Kudo, 2018) or byte-pair encoding. The file format is sentencepiece_model.proto of
https://github.com/google/sentencepiece.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xformer.errors import CheckpointError
from xformer.io import StrPath
from xformer.text.extras import read_bytes, require

SPACE = "▁"
MAX_BYTES = 32 << 20  # far above any model, as is the length of a piece
_MAX_PIECE = 256  # characters; BPE merges are found by trying all splits of a piece

_UNIGRAM, BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNUSED_SCORE = -1e6  # never the best choice; the library does not know unused pieces


@dataclass(frozen=True)
class SentencePieceModel:
    """The contents of a SentencePiece model that affect tokens.

    Attributes:
        pieces: Pieces in the order of their ids.
        scores: Log-probabilities of the pieces of a Unigram model; priorities of the merges of a BPE model.
        types: Types of the pieces: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
        model_type: 1 for Unigram, 2 for BPE.
        byte_fallback: Spell unknown characters as bytes.
        charsmap: Compiled normalization; empty for the identity.
        add_dummy_prefix: Put a space before the text.
        remove_extra_whitespaces: Strip spaces at both ends, and replace runs of spaces by one.
    """

    pieces: list[str]
    scores: list[float]
    types: list[int]
    model_type: int = _UNIGRAM
    byte_fallback: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


# --- Reading ----------------------------------------------------------------------------------------------------------


def read_sentencepiece(path: StrPath) -> SentencePieceModel:
    """Read a SentencePiece model, such as spiece.model, source.spm or sentencepiece.bpe.model.

    Raises:
        CheckpointError: If the file is missing, damaged or of another format, or has a feature that is not supported.
    """
    content = memoryview(read_bytes(Path(path), "SentencePiece model", MAX_BYTES))
    try:
        return _parse(content)
    except (ValueError, struct.error, IndexError, OverflowError) as error:
        raise CheckpointError(f"{path} is not a valid SentencePiece model ({error})") from error


def _parse(content: memoryview) -> SentencePieceModel:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(content):
        if field == 1:
            piece = dict(_fields(_message(value)))
            pieces.append(str(_message(piece.get(1, memoryview(b""))), "utf-8"))
            scores.append(float(piece.get(2, 0.0)))
            types.append(int(piece.get(3, _NORMAL)))
        elif field == 2:
            trainer |= _fields(_message(value))
        elif field == 3:
            normalizer |= _fields(_message(value))
    _check_pieces(pieces, scores, types)
    model_type = int(trainer.get(3, _UNIGRAM))
    if model_type not in (_UNIGRAM, BPE):
        raise ValueError(f"its model type is {model_type}; expected 1 (Unigram) or 2 (BPE)")
    if trainer.get(24, 0) or not normalizer.get(5, 1):
        raise ValueError("it treats white space as a suffix or does not escape it, which is not supported")
    charsmap = bytes(_message(normalizer.get(2, memoryview(b""))))
    _check_charsmap(charsmap)
    flags = {"byte_fallback": bool(trainer.get(35, False)), "add_dummy_prefix": bool(normalizer.get(3, True))}
    flags["remove_extra_whitespaces"] = bool(normalizer.get(4, True))
    return SentencePieceModel(pieces, scores, types, model_type, charsmap=charsmap, **flags)


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: (number, int, float or bytes)."""
    index, size = 0, len(data)
    while index < size:
        key, index = _varint(data, index)
        value: Any
        match key & 7:
            case 0:
                value, index = _varint(data, index)
            case 1:
                value, index = struct.unpack_from("<d", data, index)[0], index + 8
            case 2:
                length, index = _varint(data, index)
                if length > size - index:
                    raise ValueError(f"a field of {length} bytes at {index} ends after the data")
                value, index = data[index : index + length], index + length
            case 5:
                value, index = struct.unpack_from("<f", data, index)[0], index + 4
            case other:
                raise ValueError(f"byte {index} has wire type {other}")
        yield key >> 3, value


def _varint(data: memoryview, index: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        index += 1
        if byte < 0x80:
            return value, index
    raise ValueError(f"the number before byte {index} has more than 10 bytes")


def _message(value: Any) -> memoryview:
    if not isinstance(value, memoryview):
        raise ValueError(f"got the number {value}, expected bytes")
    return value


def _check_pieces(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> None:
    if types.count(_UNKNOWN) != 1:
        raise ValueError(f"{types.count(_UNKNOWN)} of its {len(pieces)} pieces are of the unknown type; expected 1")
    if len(set(pieces)) != len(pieces) or "" in pieces:
        raise ValueError("a piece is empty or occurs twice")
    if max(map(len, pieces)) > _MAX_PIECE:
        raise ValueError(f"a piece has more than {_MAX_PIECE} characters")
    if not all(-1e30 < score < 1e30 for score in scores):
        raise ValueError("a score is not finite")


def _check_charsmap(charsmap: bytes) -> None:
    """Check that lookups in the compiled normalization, a double-array trie and its texts, stay inside of it."""
    if not charsmap:
        return
    (size,) = struct.unpack_from("<I", charsmap)
    if size % 4 or not 0 < size <= len(charsmap) - 4:
        raise ValueError(f"its normalization has {len(charsmap)} bytes with a trie of {size}")
    str(charsmap[4 + size :], "utf-8")
    units = struct.unpack_from(f"<{size // 4}I", charsmap, 4)
    for index, unit in enumerate(units):
        if unit >> 31:  # a leaf: the position of its text
            if (unit & 0x7FFFFFFF) >= len(charsmap) - 4 - size:
                raise ValueError("its normalization refers to a text that it does not have")
        else:  # children are at index ^ offset ^ byte
            offset = (unit >> 10) << ((unit & (1 << 9)) >> 6)
            if (index ^ offset) | 0xFF >= len(units) and unit:
                raise ValueError("its normalization refers to a node that it does not have")


# --- Building ---------------------------------------------------------------------------------------------------------


def build_tokenizer(
    model: SentencePieceModel, *, before: Sequence[str] = (), start: int = 0, after: Sequence[str] = ()
) -> Any:
    """Build the `tokenizers.Tokenizer` of a SentencePiece model; encoding adds no special tokens.

    Ids are in the order of `before`, which replaces the first `start` pieces, the other pieces, and `after`.
    """
    package = require("tokenizers")
    vocabulary = [(token, 0.0) for token in before]
    for piece, score, kind in list(zip(model.pieces, model.scores, model.types, strict=True))[start:]:
        vocabulary.append((piece, _UNUSED_SCORE if kind == _UNUSED else score))
    known = {token for token, _ in vocabulary}
    if len(known) < len(vocabulary):
        raise CheckpointError(f"a SentencePiece model has a piece with the name of a special token: {before}")
    vocabulary += [(token, 0.0) for token in after if token not in known]
    unknown = model.pieces[model.types.index(_UNKNOWN)]
    ids = {token: index for index, (token, _) in enumerate(vocabulary)}
    if unknown not in ids:
        raise CheckpointError(f"the vocabulary of a SentencePiece model lacks its unknown piece {unknown!r}")
    if model.model_type == _UNIGRAM:
        # The tokens of `before` and `after` are never chosen: they are found as added tokens first.
        inner = package.models.Unigram(vocabulary, ids[unknown], model.byte_fallback)
    else:
        options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": model.byte_fallback}
        inner = package.models.BPE(ids, _merges(model, ids), **options)
    tokenizer = package.Tokenizer(inner)
    tokenizer.normalizer = _normalizer(package, model)
    decoders = package.decoders
    steps = [decoders.Replace(SPACE, " ")]
    steps += [decoders.ByteFallback()] if model.byte_fallback else []
    steps += [decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(steps)
    special = dict.fromkeys((*before, *after), True)
    for piece, kind in zip(model.pieces, model.types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special[piece] = kind == _CONTROL
    added = {token: is_special for token, is_special in special.items() if token in ids}
    make = functools.partial(package.AddedToken, normalized=False)
    tokenizer.add_tokens([make(token, special=is_special) for token, is_special in added.items()])
    return tokenizer


def _normalizer(package: Any, model: SentencePieceModel) -> Any:
    normalizers, pattern = package.normalizers, package.Regex
    steps = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(pattern(r"\A +| +\z"), ""), normalizers.Replace(pattern(" {2,}"), " ")]
    if model.add_dummy_prefix:
        steps += [normalizers.Prepend(" ")]
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _merges(model: SentencePieceModel, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that join to a piece, those with the highest scores first."""
    merges, rows = [], zip(model.pieces, model.scores, model.types, strict=True)
    scores = {piece: score for piece, score, kind in rows if kind in (_NORMAL, _USER_DEFINED) and piece in ids}
    for piece, score in scores.items():
        for middle in range(1, len(piece)):
            left, right = piece[:middle], piece[middle:]
            if left in scores and right in scores:
                merges.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]
