"""Tokenizers in GGUF files divide texts as the model's own tokenizer does."""

import json

import pytest

from tests.reference import raises_line
from xformer.errors import CheckpointError, ConfigError
from xformer.tokenizers import load_tokenizer
from xformer.tokenizers.gguf import tokenizer_metadata

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


# --- writing ----------------------------------------------------------------------------------------------------------

PRE_TOKENIZERS = ["gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "gpt-4o", "tekken"]


def write_again(tokenizer, directory, architecture="llama"):
    """Save a tokenizer in the Hugging Face format, and write it as a GGUF file again; return both."""
    (directory / "saved").mkdir()
    tokenizer.save(directory / "saved")
    saved = load_tokenizer(directory / "saved")
    metadata = tokenizer_metadata(saved, saved.vocab_size + 3, architecture)
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    writer = gguf.GGUFWriter(directory / "again.gguf", values.pop("general.architecture"))
    writer.add_tokenizer_model(values.pop("model"))
    writer.add_token_list(values.pop("tokens"))
    writer.add_token_types(values.pop("token_type"))
    writer.add_token_scores(values.pop("scores"))
    writer.add_token_merges(values.pop("merges"))
    for key, value in values.items():
        if key == "tokenizer.chat_template":
            writer.add_chat_template(value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return metadata, saved, load_tokenizer(directory / "again.gguf")


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_bpe_of_other_files_is_written_with_its_pre_tokenizer(pre, trained, tmp_path):
    tokens = [trained.id_to_token(i) for i in range(trained.get_vocab_size())]
    merges = [" ".join(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 4) + [USER_DEFINED]
    options = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "chat_template": "{{ messages }}"}
    path = write(tmp_path / "a.gguf", "gpt2", tokens, pre=pre, merges=merges, types=types, **options)
    original = load_tokenizer(path)
    metadata, saved, again = write_again(original, tmp_path)
    assert metadata["tokenizer.ggml.pre"] == {"deepseek-r1-qwen": "megrez", "smaug-bpe": "llama-bpe"}.get(pre, pre)
    assert metadata["tokenizer.ggml.tokens"] == [*tokens, *(f"[PAD{len(tokens) + i}]" for i in range(3))]
    assert metadata["tokenizer.ggml.token_type"] == [*types, 5, 5, 5]
    assert metadata["tokenizer.ggml.merges"] == merges
    assert (again.bos_id, again.eos_id, again.pad_id) == (1, 2, 2)
    assert again.chat_templates == original.chat_templates
    for text in [*TEXTS, "<|im_start|>user\nIt's 2024<|im_end|>", "CamelCase'LL e\u0301"]:
        assert again.encode(text) == saved.encode(text) == original.encode(text)
        assert again.decode(again.encode(text)) == saved.decode(saved.encode(text))


@pytest.mark.parametrize("options", [{}, {"add_space_prefix": False}, {"add_bos_token": False, "add_eos_token": True}])
def test_sentencepiece_of_other_files_is_written_with_scores_by_the_order_of_merges(options, tmp_path):
    original = sentencepiece(tmp_path / "model.gguf", **options)
    metadata, saved, again = write_again(original, tmp_path)
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.token_type"][3:259] == [BYTE] * 256
    for text in [*TEXTS, "ab abc  b", "a[x]b</s>", "é  a"]:
        assert again.encode(text) == saved.encode(text) == original.encode(text)


def bpe(**options):
    """Return a BPE tokenizer of the library, of bytes unless the options say otherwise."""
    vocab = {token: i for i, token in enumerate(["<unk>", *byte_alphabet(), "ab"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = options.get("pre_tokenizer", tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.decoder = options.get("decoder", tokenizers.decoders.ByteLevel())
    tokenizer.normalizer = options.get("normalizer")
    return tokenizer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pre_tokenizer": tokenizers.pre_tokenizers.ByteLevel()},
            "divides texts in another way than those of GGUF files",
        ),
        ({"normalizer": tokenizers.normalizers.Lowercase()}, "divides texts in another way than those of GGUF files"),
        ({"decoder": tokenizers.decoders.Fuse()}, "is BPE of 258 tokens; GGUF files expect byte-level BPE, or"),
        ({"rows": 257}, "is byte-level BPE of 258 tokens; .* of at most 257 tokens"),
    ],
)
def test_tokenizers_that_llama_cpp_does_not_have_are_refused(options, message, tmp_path):
    bpe(**options).save(str(tmp_path / "tokenizer.json"))
    with raises_line(ConfigError, message):
        tokenizer_metadata(load_tokenizer(tmp_path), options.get("rows", 300), "llama")
