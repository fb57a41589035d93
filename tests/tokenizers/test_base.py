import pytest

from xformer.errors import ConfigError
from xformer.tokenizers import BaseTokenizer, PretrainedTokenizer, Tokenizer

LINES = ["Ein Mann schläft .", "Zwei Hunde rennen über das Gras ."]


@pytest.mark.parametrize("model", ["bpe", "characters"])
def test_bytes_of_tokens_concatenate_to_the_text(model):
    tokenizer = Tokenizer.train(LINES, 60, model=model, separator=True)
    for line in LINES:
        ids = tokenizer.encode(line)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == line
    assert [*map(tokenizer.token_bytes, [0, 1, 2, 4])] == [b"<pad>", b"<s>", b"</s>", b"<sep>"]


def test_special_tokens_can_be_shown():
    tokenizer = Tokenizer.train(LINES, 60, model="words")
    ids = [1, *tokenizer.encode(LINES[0]), 2]
    assert tokenizer.decode(ids) == LINES[0]
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<s> {LINES[0]} </s>"


def test_both_classes_have_the_methods_that_pipelines_use():
    assert issubclass(Tokenizer, BaseTokenizer)
    assert issubclass(PretrainedTokenizer, BaseTokenizer)
    tokenizer = Tokenizer.train(LINES, 60)
    assert (tokenizer.chat_templates, tokenizer.directory) == ({}, None)
    with pytest.raises(ConfigError, match="got a chat, but this model has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hallo"}])
