from xformer.tokenizers.streaming import DecodeStream


def decode_bytes(ids):
    return bytes(ids).decode(errors="replace")


def test_work_is_linear_in_the_number_of_tokens():
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return decode_bytes(ids)

    data = "aß😀 ".encode() * 200
    stream = DecodeStream(decode)
    assert "".join(map(stream.step, data)) == data.decode()
    assert max(lengths) < 10


def test_invalid_bytes_are_not_held_back_forever():
    stream = DecodeStream(decode_bytes)
    texts = [stream.step(0xFF) for _ in range(100)]
    assert any(texts)
    assert "".join(texts) + stream.finish() == "\ufffd" * 100


def test_several_ids_may_arrive_at_once():
    stream = DecodeStream(decode_bytes, prompt=b"ab")
    assert stream.step(*"cß".encode()) == "cß"
    assert stream.finish() == ""
