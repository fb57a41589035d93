"""Tokenizers in GGUF files divide texts as the model's own tokenizer does."""

import json

import pytest

from xformer.errors import CheckpointError
from xformer.tokenizers import load_tokenizer

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = [
    "hello world", "  two  spaces\n\n\tand more ", "it's 2024, isn't it?", "naïve 你好 🦙", "", "f(x):\n    return x",
]  # fmt: skip


def write(path, model, tokens, *, architecture="llama", pre=None, merges=None, scores=None, types=None, **values):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_token_types(types or [NORMAL] * len(tokens))
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_alphabet():
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE tokenizer with the pre-tokenizer of SmolLM, learned from a few words."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    steps = tokenizers.pre_tokenizers
    digits, words = steps.Digits(individual_digits=True), steps.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = steps.Sequence([digits, words])
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=byte_alphabet(), show_progress=False
    )
    texts = ["hello world it's a world of words, isn't it?", "return the two spaces  and  more"]
    tokenizer.train_from_iterator(texts * 3, trainer)
    return tokenizer


def test_byte_level_bpe_gives_the_ids_of_the_tokenizer_that_was_stored(trained, tmp_path):
    tokens = [trained.id_to_token(i) for i in range(trained.get_vocab_size())]
    merges = [" ".join(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3)
    options = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "chat_template": "{{ messages }}"}
    path = write(tmp_path / "a.gguf", "gpt2", tokens, pre="smollm", merges=merges, types=types, **options)
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.unk_id) == (1, (2, 0), 2, None)
    assert tokenizer.chat_templates == {"default": "{{ messages }}"}
    for text in [*TEXTS, "<|im_start|>user\nhello<|im_end|>"]:
        ids = tokenizer.encode(text)
        assert ids == trained.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", "Ġ20245", "Ġ", "ĠCamelCase", "'", "LL", "."]),
        ("smollm", ["It", "'s", "Ġ", "2", "0", "2", "4", "5", "Ġ", "ĠCamelCase", "'", "LL", "."]),
        ("llama-bpe", ["It", "'s", "Ġ", "202", "45", "Ġ", "ĠCamelCase", "'LL", "."]),
        ("qwen2", ["It", "'s", "Ġ", "2", "0", "2", "4", "5", "Ġ", "ĠCamelCase", "'LL", "."]),
        ("gpt-4o", ["It's", "Ġ", "202", "45", "Ġ", "ĠCamel", "Case'LL", "."]),
        ("tekken", ["It", "'s", "Ġ", "2", "0", "2", "4", "5", "Ġ", "ĠCamel", "Case", "'LL", "."]),
    ],
)
def test_the_pre_tokenizer_that_the_file_names_divides_the_text(pre, words, tmp_path):
    path = write(tmp_path / "model.gguf", "gpt2", [*byte_alphabet(), "ab"], pre=pre, merges=["a b"])
    tokenizer = load_tokenizer(path)
    assert [word for word, _ in tokenizer._inner.pre_tokenizer.pre_tokenize_str("It's 20245  CamelCase'LL.")] == words


def test_tokenizers_of_llama_3_begin_with_bos_and_take_whole_words_first(tmp_path):
    tokens = ["<|begin_of_text|>", "<|eot_id|>", *byte_alphabet(), "Ġcat", "ab"]
    types = [CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 2)]
    options = {"pre": "llama-bpe", "merges": ["a b"], "types": types, "bos_token_id": 0, "eos_token_id": 1}
    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", "gpt2", tokens, **options))
    assert tokenizer.tokens(tokenizer.encode("a cat")) == ["<|begin_of_text|>", "a", "Ġcat"]  # no merge gives " cat"
    assert tokenizer.tokens(tokenizer.encode("a", special_tokens=False)) == ["a"]
    path = write(tmp_path / "without.gguf", "gpt2", tokens, **options, add_bos_token=False)
    assert load_tokenizer(path).encode("a") == tokenizer.encode("a", special_tokens=False)


def sentencepiece(path, **options):
    pieces = ["▁", "a", "b", "c", "[", "x", "ab", "▁ab", "bc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "[x]", "<|end|>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED, CONTROL]
    scores = [0.0] * 259 + [-9.0] * 6 + [-3.0, -2.0, -1.0] + [0.0, 0.0]
    return load_tokenizer(
        write(
            path, "llama", tokens, scores=scores, types=types, bos_token_id=1, eos_token_id=2, unk_token_id=0, **options
        )
    )


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path):
    tokenizer = sentencepiece(tmp_path / "model.gguf")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.unk_id) == (1, (2, 269), None, 0)

    def tokens(text):
        return tokenizer.tokens(tokenizer.encode(text, special_tokens=False))

    assert tokenizer.encode("ab") == [1, tokenizer.token_to_id("▁ab")]
    assert tokens("abc") == ["▁", "a", "bc"]  # "bc" has the best score
    assert tokens("é  a") == ["▁", "<0xC3>", "<0xA9>", "▁", "▁", "a"]
    assert tokens("a[x]b</s>") == ["▁", "a", "[x]", "▁", "b", "</s>"]
    for text in ["ab", " a  b", "é\n"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        ids = tokenizer.encode(text, special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == f" {text}".encode()


def test_sentencepiece_without_a_first_space(tmp_path):
    options = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    tokenizer = sentencepiece(tmp_path / "model.gguf", **options)
    assert tokenizer.tokens(tokenizer.encode("a b")) == ["a", "▁", "b", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_special_tokens_of_phi_3_take_the_spaces_to_their_right(tmp_path):
    tokenizer = sentencepiece(tmp_path / "model.gguf", architecture="phi3")
    ids = tokenizer.encode("<|end|>\n a<s> b", special_tokens=False)
    assert tokenizer.tokens(ids) == ["<|end|>", "▁", "a", "<s>", "▁", "▁", "b"]


def test_a_saved_tokenizer_loads_in_the_hugging_face_format(tmp_path):
    tokenizer = sentencepiece(tmp_path / "model.gguf", chat_template="{{ messages }}")
    directory = tmp_path / "saved"
    directory.mkdir()
    (directory / "generation_config.json").write_text('{"eos_token_id": 2, "pad_token_id": 0}')
    tokenizer.save(directory)
    loaded = load_tokenizer(directory)
    assert [loaded.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert loaded.special_tokens == tokenizer.special_tokens
    assert loaded.chat_templates == {"default": "{{ messages }}"}
    assert json.loads((directory / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 269], "pad_token_id": 0}  # </s> and <|end|>


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "bert"}, "has the tokenizer 'bert'; expected 'gpt2' or 'llama'"),
        ({"model": "gpt2", "pre": "grok-2", "merges": ["a b"]}, "has the pre-tokenizer 'grok-2'; expected one of dbrx"),
        ({"model": "gpt2", "pre": "qwen2"}, r"has no tokenizer\.ggml\.merges, which its tokenizer 'gpt2' needs"),
        ({"model": "llama"}, r"has no tokenizer\.ggml\.scores"),
        ({"model": "llama", "scores": [0.0] * 3}, "has a tokenizer that is not valid"),
        ({"model": "llama", "tokens": ["a", "b", "a"], "scores": [0.0] * 3}, "has 3 tokens, some of them twice"),
    ],
)
def test_tokenizers_that_cannot_be_built_are_refused(options, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(write(tmp_path / "model.gguf", **{"tokens": ["a", "b"], **options}))
