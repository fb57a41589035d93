import json
import shutil
from pathlib import Path

import pytest

from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.tokenizers import DecodeStream, Tokenizer, load_tokenizer

DATA = Path(__file__).parent / "data"
REFERENCES = json.loads((DATA / "references.json").read_text(encoding="utf-8"))
CASES = sorted(REFERENCES.keys() - {"versions"})
TRANSLATORS = [case for case in CASES if "forced_bos_id" in REFERENCES[case]]


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param, load_tokenizer(DATA / request.param), REFERENCES[request.param]


def copy(case, directory):
    shutil.copytree(DATA / case, directory, dirs_exist_ok=True)
    return directory


def for_source(tokenizer, reference):
    tokenizer.set_languages(*reference.get("languages", ()))
    return tokenizer


def test_ids_and_texts_are_those_of_the_original_libraries(case):
    name, tokenizer, reference = case
    encoded = for_source(tokenizer, reference).encode_batch(reference["texts"])
    for text, ids, expected in zip(reference["texts"], encoded, reference["ids"], strict=True):
        assert ids == expected, (name, text)
    for ids, expected in zip(reference["ids"], reference["decoded"], strict=True):
        # transformers strips the texts of some tokenizers, and writes the language tokens of Marian.
        assert tokenizer.decode(ids).strip() == expected.removeprefix(">>fra<<").strip(), (name, ids)


def test_streamed_text_is_the_decoded_text(case):
    name, tokenizer, reference = case
    for ids in reference["ids"]:
        for prompt in (0, len(ids) // 2):
            if tokenizer.decode(ids[:prompt]).endswith("\ufffd"):
                continue
            stream = DecodeStream(tokenizer.decode, ids[:prompt])
            text = "".join(map(stream.step, ids[prompt:])) + stream.finish()
            assert tokenizer.decode(ids[:prompt]) + text == tokenizer.decode(ids), (name, ids, prompt)


@pytest.mark.parametrize("name", ["byte_level", "word_piece"])
def test_pairs_and_special_tokens(name):
    tokenizer, reference = load_tokenizer(DATA / name), REFERENCES[name]
    texts = reference["texts"]
    assert [tokenizer.encode(text, special_tokens=False) for text in texts] == reference["plain_ids"]
    assert [ids for ids, _ in tokenizer.encode_pairs(texts, ["the friends"] * len(texts))] == reference["pair_ids"]
    decoded = tokenizer.decode_batch(reference["ids"], skip_special_tokens=False)
    assert decoded == reference["decoded_with_special"]


@pytest.mark.parametrize("name", TRANSLATORS)
def test_language_tokens(name):
    tokenizer, reference = load_tokenizer(DATA / name), REFERENCES[name]
    source, target = reference["languages"]
    tokenizer.set_languages(source, target)
    assert tokenizer.encode_batch(reference["texts"]) == reference["ids"]
    assert tokenizer.forced_bos_id == reference["forced_bos_id"] == tokenizer.language_ids[target]
    assert {source, target} <= tokenizer.language_ids.keys()
    assert load_tokenizer(DATA / name, source, target).encode_batch(reference["texts"]) == reference["ids"]
    assert load_tokenizer(DATA / name, target).encode_batch(reference["texts"]) == reference["target_ids"]
    with pytest.raises(ConfigError, match="language is 'de_De'"):
        tokenizer.set_languages("de_De")


def test_nllb_puts_the_language_last_if_the_checkpoint_is_old(tmp_path):
    directory = copy("nllb", tmp_path)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "legacy_behaviour": True}))
    tokenizer = load_tokenizer(directory)
    plain = tokenizer.encode("hello world", special_tokens=False)
    english = tokenizer.language_ids["eng_Latn"]
    assert tokenizer.encode("hello world") == [*plain, tokenizer.eos_id, english]


def test_marian_has_two_models_and_language_tokens_of_the_target():
    tokenizer, reference = load_tokenizer(DATA / "marian", target_language="fra"), REFERENCES["marian"]
    assert [tokenizer.target.encode(text) for text in reference["texts"][:-1]] == reference["target_ids"]
    assert tokenizer.encode("the teacher") == reference["ids"][-1]  # ">>fra<< the teacher"
    assert tokenizer.forced_bos_id is None
    assert sorted(tokenizer.language_ids) == ["deu", "fra"]
    assert (tokenizer.eos_id, tokenizer.unk_id) == (0, 1)
    assert tokenizer.pad_id == tokenizer.vocab_size - 1
    # The source piece "▁th" is not in vocab.json.
    assert tokenizer.unk_id in tokenizer.encode("the")


def test_properties_come_from_the_files():
    tokenizer = load_tokenizer(DATA / "word_piece")
    names = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
    assert [getattr(tokenizer, f"{name}_id") for name in names] == [0, 1, 2, 3, 4, None, None]
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert tokenizer.id_to_token(tokenizer.token_to_id("[SEP]")) == "[SEP]"
    assert tokenizer.token_to_id("missing") is None
    assert tokenizer.id_to_token(10**6) is None
    assert load_tokenizer(DATA / "m2m100").model_max_length is None  # the file says 1e30
    assert load_tokenizer(DATA / "marian").model_max_length == 512
    with pytest.raises(ConfigError, match="has no language tokens"):
        tokenizer.set_languages("de")


def test_saved_files_are_the_same_bytes(case, tmp_path):
    name, tokenizer, reference = case
    tokenizer.save(tmp_path)
    originals = {path.name: path.read_bytes() for path in (DATA / name).iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == originals
    again = for_source(load_tokenizer(tmp_path), reference)
    assert again.encode_batch(reference["texts"]) == reference["ids"]


def test_invalid_input_is_rejected():
    tokenizer = load_tokenizer(DATA / "byte_level")
    for invalid in ([None], "text", ["\ud800"], [["a"]]):
        with pytest.raises(DataError, match="expected"):
            tokenizer.encode_batch(invalid)
    with pytest.raises(DataError, match="1 texts and 2 second texts"):
        tokenizer.encode_pairs(["a"], ["b", "c"])
    with pytest.raises(DataError, match="accepts single texts only"):
        load_tokenizer(DATA / "marian").encode_pairs(["a"], ["b"])
    with pytest.raises(DataError, match="token id is -1"):
        tokenizer.decode([-1])
    assert tokenizer.decode([*tokenizer.encode("a"), 10**6, 2**40]) == "a"


def test_phrases_are_spelled_as_inside_a_text(case):
    _, tokenizer, _ = case
    first, *_ = tokenizer.phrase_ids(" and ")
    assert tokenizer.decode([*tokenizer.encode("a", special_tokens=False), *first]).strip() == "a and"
    with pytest.raises(DataError, match="phrase is ' '; expected a word or a phrase"):
        tokenizer.phrase_ids(" ")


@pytest.mark.parametrize("joint", [True, False])
def test_tokenizers_that_xformer_trained(tmp_path, joint):
    ours = Tokenizer.train(["a small frog", "ein kleiner Frosch"], 40)
    for name in ("tokenizer.json",) if joint else ("source_tokenizer.json", "target_tokenizer.json"):
        ours.save(tmp_path / name)
    source = load_tokenizer(tmp_path)
    target = source.target
    assert source.encode("small frog") == target.encode("small frog") == ours.encode("small frog")
    assert (source.pad_id, source.bos_id, source.eos_id, source.unk_id) == (0, 1, 2, 3)
    assert target.decode([1, *ours.encode("small frog"), 2]) == "small frog"
    source.save(tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {path.name for path in tmp_path.glob("*.json")}


def write_vocabulary(directory, **settings):
    """Write the vocabulary of the tokenizer.json of `byte_level` as vocab.json and merges.txt."""
    model = json.loads((DATA / "byte_level" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (directory / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    special = {"bos_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    settings = {"tokenizer_class": "GPT2Tokenizer", **special, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_byte_level_vocabularies_without_tokenizer_json(tmp_path):
    tokenizer, reference = load_tokenizer(write_vocabulary(tmp_path)), REFERENCES["byte_level"]
    assert tokenizer.encode_batch(reference["texts"]) == reference["ids"]
    assert tokenizer.decode_batch(reference["ids"]) == reference["decoded"]
    pairs = ["the friends"] * len(reference["texts"])
    assert [ids for ids, _ in tokenizer.encode_pairs(reference["texts"], pairs)] == reference["pair_ids"]
    tokenizer.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").encode_batch(reference["texts"]) == reference["ids"]


def test_texts_of_opt_begin_with_bos(tmp_path):
    directory = write_vocabulary(tmp_path, tokenizer_class="", add_bos_token=True)
    (directory / "config.json").write_text('{"model_type": "opt"}')
    tokenizer = load_tokenizer(directory)
    plain = load_tokenizer(DATA / "byte_level").encode("the frog")
    assert tokenizer.encode("the frog") == [tokenizer.bos_id, *plain]
    assert tokenizer.encode("the frog", special_tokens=False) == plain


def test_bytes_of_tokens_concatenate_to_the_text(case):
    name, tokenizer, _ = case
    for ids in map(tokenizer.encode, ["a small frog", "the teacher asked", "für köstliche grüße", "日本 and 😀!"]):
        ids = [index for index in ids if index not in tokenizer.special_ids]
        data = b"".join(map(tokenizer.token_bytes, ids))
        assert data.decode().strip() == tokenizer.decode(ids).strip(), name
    special = tokenizer.tokens(sorted(tokenizer.special_ids))
    assert [*map(tokenizer.token_bytes, sorted(tokenizer.special_ids))] == [token.encode() for token in special]


# --- Damaged and unsupported files ------------------------------------------------------------------------------------


def test_a_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer that can be read; expected one of: tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_tokenizer(tmp_path / "missing")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("vocab.json", "version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("merges.txt", "a b c\n", "is not valid"),
        ("tokenizer_config.json", '{"tokenizer_class": "Qwen2Tokenizer"}', "merges.txt of Qwen2; expected"),
    ],
)
def test_damaged_vocabularies(file, content, message, tmp_path):
    directory = write_vocabulary(tmp_path)
    (directory / file).write_text(content)
    with pytest.raises(CheckpointError, match=message) as error:
        load_tokenizer(directory)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("byte_level", "tokenizer_config.json", "[" * 100_000, "not valid JSON"),
        ("byte_level", "tokenizer_config.json", "[]", "expected a JSON object"),
        ("marian", "vocab.json", '{"</s>": 0, "<unk>": 0}', "distinct id"),
        ("marian", "vocab.json", '{"a": 0}', "lacks the unk_token '<unk>'"),
        ("marian", "tokenizer_config.json", '{"eos_token": {"content": "x"}}', "lacks the eos_token"),
        ("m2m100", "tokenizer_config.json", '{"language_codes": "x", "tokenizer_class": "M2M100Tokenizer"}', "m2m100"),
        ("t5", "tokenizer_config.json", '{"tokenizer_class": "T5Tokenizer", "extra_ids": 1e9}', "extra_ids"),
        ("t5", "tokenizer_config.json", '{"tokenizer_class": "AlbertTokenizer"}', "spiece.model of Albert"),
        ("mbart", "tokenizer_config.json", '{"tokenizer_class": "MBartTokenizer", "src_lang": [5]}', "src_lang"),
    ],
)
def test_damaged_settings(tmp_path, name, file, content, message):
    directory = copy(name, tmp_path)
    (directory / file).write_text(content)
    with pytest.raises(CheckpointError, match=message) as error:
        load_tokenizer(directory)
    assert "\n" not in str(error.value)


def test_siglip_removes_punctuation_and_upper_case(tmp_path):
    shutil.copy(DATA / "t5" / "spiece.model", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "siglip"}')
    tokenizer = load_tokenizer(tmp_path)
    # Ids of SiglipTokenizer of transformers.
    expected = {
        "Small Frog, near THE river!": [3, 5, 59, 23, 25, 14, 22, 49, 45, 8, 4, 3, 87, 50, 13, 1],
        "a  b\t c\n": [7, 27, 52, 1],
        "frog's (river) [x] \\ ^ ~ ` _ -": [25, 14, 22, 5, 3, 87, 50, 13, 3, 2, 1],
        "": [1],
    }
    assert tokenizer.encode_batch(list(expected)) == list(expected.values())
    assert tokenizer.pad_id == tokenizer.eos_id == 1


# --- Chats ------------------------------------------------------------------------------------------------------------


def test_prompts_of_a_chat_are_those_of_transformers():
    pytest.importorskip("jinja2")
    tokenizer, chat = load_tokenizer(DATA / "byte_level"), REFERENCES["byte_level"]["chat"]
    for options, prompt in zip(chat["options"], chat["prompts"], strict=True):
        options = {"add_generation_prompt": False, **options}
        assert tokenizer.apply_chat_template(chat["messages"], **options) == prompt
    assert tokenizer.encode(chat["prompts"][0], special_tokens=False).count(tokenizer.token_to_id("<|im_start|>")) == 5
    with pytest.raises(DataError, match=r"expected .*role"):
        tokenizer.apply_chat_template("hello")
    with pytest.raises(DataError, match="the user speaks first"):
        tokenizer.apply_chat_template([{"role": "assistant", "content": ""}])
    with pytest.raises(ConfigError, match="apply_chat_template returns a text"):
        tokenizer.apply_chat_template(chat["messages"], return_tensors="np")


def test_named_chat_templates(tmp_path):
    pytest.importorskip("jinja2")
    directory = copy("word_piece", tmp_path)
    assert load_tokenizer(directory).chat_templates == {}
    with pytest.raises(CheckpointError, match=r"has no chat template 'default'$"):
        load_tokenizer(directory).apply_chat_template([])
    templates = [
        {"name": "default", "template": "{{ messages[0].name }}{{ messages[0].content }}"},
        {"name": "tools", "template": "T"},
    ]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "x"
    assert tokenizer.apply_chat_template([{"role": "user", "name": "Ann", "content": "x"}]) == "Annx"
    assert tokenizer.apply_chat_template([{"role": "assistant", "content": None}]) == ""
    assert tokenizer.apply_chat_template([], template="tools") == "T"
    for message in ({}, {"content": "x"}, {"role": 3, "content": "x"}, {"role": "user", "content": 3}):
        with pytest.raises(DataError, match=r"expected .*role"):
            tokenizer.apply_chat_template([message])
    with pytest.raises(CheckpointError, match="'none'; expected one of: default, tools"):
        tokenizer.apply_chat_template([], template="none")
    (directory / "chat_templates").mkdir()
    (directory / "chat_templates" / "tools.jinja").write_text("U")
    assert load_tokenizer(directory).apply_chat_template([], template="tools") == "U"
    tokenizer.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").apply_chat_template([], template="tools") == "U"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(CheckpointError, match=r"'default' of .* is not a text"):
        _ = load_tokenizer(directory).chat_templates
