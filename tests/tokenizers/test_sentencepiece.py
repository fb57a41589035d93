import struct
from pathlib import Path

import pytest

from xformer.errors import CheckpointError
from xformer.tokenizers.sentencepiece import build_tokenizer, read_sentencepiece

MODEL = Path(__file__).parent / "data" / "t5" / "spiece.model"


def varint(value):
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def piece(text, score=0.0, kind=1):
    return field(1, field(1, text.encode()) + field(2, score) + field(3, kind))


UNKNOWN = piece("<unk>", kind=2)


def read(directory, content):
    (directory / "x.model").write_bytes(content)
    return read_sentencepiece(directory / "x.model")


def test_fields_of_a_model():
    model = read_sentencepiece(MODEL)
    assert model.pieces[:3] == ["<pad>", "</s>", "<unk>"]
    assert model.types[:4] == [3, 3, 2, 1]
    assert all(score < 0 for score in model.scores[3:])
    assert (model.model_type, model.byte_fallback, model.add_dummy_prefix) == (1, False, True)
    assert model.charsmap


def test_unused_pieces_are_not_produced(tmp_path):
    content = UNKNOWN + piece("▁a", -1.0) + piece("b", -1.0) + piece("▁ab", -0.1, kind=5)
    tokenizer = build_tokenizer(read(tmp_path, content))
    assert tokenizer.encode("ab").tokens == ["▁a", "b"]


def test_spaces_stay_if_the_model_keeps_them(tmp_path):
    content = UNKNOWN + piece("▁", -1.0) + piece("a", -1.0) + field(3, field(3, 0) + field(4, 0))
    tokenizer = build_tokenizer(read(tmp_path, content))
    assert tokenizer.encode(" a  a").tokens == ["▁", "a", "▁", "▁", "a"]
    assert tokenizer.decode(tokenizer.encode(" a  a").ids) == " a  a"


def test_bytes_spell_unknown_characters(tmp_path):
    pieces = b"".join(piece(f"<0x{byte:02X}>", kind=6) for byte in range(256))
    content = UNKNOWN + piece("▁", -1.0) + piece("a", -2.0) + pieces + field(2, field(3, 2) + field(35, 1))
    tokenizer = build_tokenizer(read(tmp_path, content))
    assert tokenizer.encode("aß").tokens == ["▁", "a", "<0xC3>", "<0x9F>"]
    assert tokenizer.decode(tokenizer.encode("aß 😀").ids) == "aß 😀"


def test_damaged_models(tmp_path):
    for content, message in (
        (b"", "unknown type"),
        (b"\xff" * 20, "more than 10 bytes"),
        (b"\x0a\x7fabc", "ends after the data"),
        (b"\x0b", "wire type 3"),
        (b"\x08\x01", "expected bytes"),
        (field(1, field(1, b"\xff") + field(3, 2)), "valid"),
        (UNKNOWN + piece("a") + piece("a"), "occurs twice"),
        (UNKNOWN + piece("a" * 300), "more than 256 characters"),
        (UNKNOWN + piece("a", float("nan")), "not finite"),
        (UNKNOWN + field(2, field(3, 4)), "model type is 4"),
        (UNKNOWN + field(2, field(24, 1)), "suffix"),
        (UNKNOWN + field(3, field(2, struct.pack("<I", 400) + b"a")), "trie of 400"),
        (UNKNOWN + field(3, field(2, struct.pack("<II", 4, 1 << 30) + b"a")), "refers to a node"),
        (UNKNOWN + field(3, field(2, struct.pack("<II", 4, 1 << 31 | 9) + b"a")), "refers to a text"),
    ):
        with pytest.raises(CheckpointError, match=message) as error:
            read(tmp_path, content)
        assert "x.model" in str(error.value)


def test_truncated_and_changed_models_raise_one_error_or_load(tmp_path):
    content, messages = MODEL.read_bytes(), []
    for position in range(0, len(content), 37):
        for damaged in (content[:position], content[:position] + b"\xff" + content[position + 1 :]):
            try:
                build_tokenizer(read(tmp_path, damaged)).encode("a small frog ﬁ…")
            except CheckpointError as error:
                messages.append(str(error))
    assert messages
    assert not any("\n" in message for message in messages)
