"""tokenizer_config.json, special_tokens_map.json and added_tokens.json mean what they mean in transformers."""

import inspect
import itertools
import json
import re

import pytest

from xformer.errors import CheckpointError
from xformer.tokenizers import load_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<unk>", "<pad>", "<mask>")
GENERIC = {
    "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]",
    "sep_token": "[SEP]", "mask_token": "[MASK]",
}  # fmt: skip
TEXTS = [
    "A b é, c. 中 a<x>b [MASK] <y> ab",
    "<|im|> a <x> b<y>",
    "a n't b . a",
    " a '  b",
    "it 's a ' b n't",
    "a  <y>  b ab<y>ba",
]
LETTERS = "abcdefghijklmnopqrstuvwxyzABé中,.'<>|[] "


def token(content, **attributes):
    return {
        "content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False,
    } | attributes  # fmt: skip


def word_piece(directory):
    """Write a tokenizer.json of BERT that lowercases."""
    pieces = [*SPECIAL[:5], *LETTERS, *(f"##{letter}" for letter in LETTERS), "<x>"]
    models, processors = tokenizers.models, tokenizers.processors
    inner = tokenizers.Tokenizer(models.WordPiece({each: i for i, each in enumerate(pieces)}, unk_token="[UNK]"))
    inner.normalizer = tokenizers.normalizers.BertNormalizer()
    inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    inner.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.add_special_tokens(list(SPECIAL[:5]))
    inner.save(str(directory / "tokenizer.json"))


def of_class(name, directory):
    """Write the files of a class of transformers with a small vocabulary."""
    cls = getattr(transformers, name)
    if name in ("XLMRobertaTokenizer", "AlbertTokenizer", "DebertaV2Tokenizer"):
        pieces = ["▁", *LETTERS[:-1], "▁a", "▁b"]
        special = {"XLMRobertaTokenizer": ("<s>", "<pad>", "</s>", "<unk>", "<mask>")}
        special |= {"AlbertTokenizer": ("<pad>", "<unk>", *SPECIAL[2:5]), "DebertaV2Tokenizer": SPECIAL[:5]}
        vocab = [(each, 0.0) for each in special[name]] + [(each, -1.0 - i) for i, each in enumerate(pieces)]
    else:
        special = [] if name == "BertTokenizer" else [*tokenizers.pre_tokenizers.ByteLevel.alphabet()]
        pieces = [*SPECIAL, *special, *LETTERS, *(f"##{letter}" for letter in LETTERS), "Ġb"]
        vocab = {each: i for i, each in enumerate(dict.fromkeys(["<|endoftext|>", *pieces]))}
    merges = {"merges": [("Ġ", "b")]} if "merges" in inspect.signature(cls.__init__).parameters else {}
    cls(vocab=vocab, **merges).save_pretrained(directory)


def write(directory, values):
    for name, content in values.items():
        path = directory / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**old, **content}))


def outputs(tokenizer, encode):
    ids = [encode(text) for text in TEXTS]
    return ids, [tokenizer.decode(each, skip_special_tokens=True) for each in ids]


MAP, ADDED, CONFIG = "special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"
FILES = {
    "nothing": {}, "truncation_side": {CONFIG: {"truncation_side": "left"}},
    "clean_up_tokenization_spaces": {CONFIG: {"clean_up_tokenization_spaces": True}},
    "split_special_tokens": {CONFIG: {"split_special_tokens": True}},
    "extra_special_tokens": {CONFIG: {"extra_special_tokens": ["<y>", "<x>"]}},
    "extra_special_tokens by name": {CONFIG: {"extra_special_tokens": {"im_token": "<|im|>"}}},
    "additional_special_tokens": {CONFIG: {"additional_special_tokens": ["<y>"]}},
    "both lists": {CONFIG: {"additional_special_tokens": ["<y>"], "extra_special_tokens": ["<|im|>"]}},
    "model_specific_special_tokens": {CONFIG: {"model_specific_special_tokens": {"image_token": "<y>"}}},
    "pad_token that is a word": {CONFIG: {"pad_token": token("<y>", single_word=True, __type="AddedToken")}},
    "image_token": {CONFIG: {"image_token": "<y>"}}, "pad_token": {CONFIG: {"pad_token": "<y>"}},
    "pad_token with attributes": {CONFIG: {"pad_token": token("<y>", lstrip=True, __type="AddedToken")}},
    "added_tokens_decoder": {
        CONFIG: {"added_tokens_decoder": {"92": token("<|im|>", rstrip=True), "91": token("<y>", special=True)}},
    },
    "added_tokens_decoder of the vocabulary": {CONFIG: {"added_tokens_decoder": {"90": token("<x>")}}},
    "added_tokens_decoder and other files": {
        CONFIG: {"added_tokens_decoder": {"91": token("<y>")}},
        MAP: {"additional_special_tokens": ["<|im|>"], "eos_token": "[SEP]"}, ADDED: {"<|im|>": 92},
    },
    "added tokens": {ADDED: {"<y>": 92, "<|im|>": 91}}, "pad_token of the map": {MAP: {"pad_token": token("<y>")}},
    "the map before the configuration": {CONFIG: {"pad_token": "<x>"}, MAP: {"pad_token": "<y>"}},
    "two lists": {CONFIG: {"additional_special_tokens": ["<y>"]}, MAP: {"extra_special_tokens": ["<|im|>"]}},
    "the same list": {CONFIG: {"extra_special_tokens": ["<y>"]}, MAP: {"extra_special_tokens": ["<|im|>", "<y>"]}},
    "a list of the map": {MAP: {"additional_special_tokens": ["<|im|>"]}},
    "do_lower_case of another class": {CONFIG: {"do_lower_case": False, "add_prefix_space": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_ids_and_texts_are_those_of_transformers(tmp_path, name):
    word_piece(tmp_path)
    write(tmp_path, {CONFIG: GENERIC})
    write(tmp_path, FILES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = load_tokenizer(tmp_path)
    assert outputs(ours, ours.encode) == outputs(theirs, theirs.encode)
    cut = {"truncation": True, "max_length": 6}
    assert ours.encode_truncated(TEXTS, 6) == [theirs.encode(text, **cut) for text in TEXTS]
    pairs = [(ids, types) for ids, types in ours.truncated(9).encode_pairs(TEXTS, TEXTS[::-1])]
    for (ids, types), first, second in zip(pairs, TEXTS, TEXTS[::-1], strict=True):
        expected = theirs(first, second, truncation="longest_first", max_length=9, return_token_type_ids=True)
        assert (ids, types) == (expected["input_ids"], expected["token_type_ids"])


CLASSES = ("BertTokenizer", "RobertaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "XLMRobertaTokenizer")


@pytest.mark.parametrize("name", [*CLASSES, "AlbertTokenizer", "DebertaV2Tokenizer"])
def test_settings_of_a_class_change_its_tokenizer_as_in_transformers(tmp_path, caplog, name):
    of_class(name, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    parameters = inspect.signature(getattr(transformers, name).__init__).parameters
    keys = [key for key in parameters if FATES.get(key) in ("followed", "named") and not key.endswith("_token")]
    for key in keys:
        for value in (True, False):
            (tmp_path / CONFIG).write_text(json.dumps({**config, key: value}))
            theirs = getattr(transformers, name).from_pretrained(str(tmp_path))
            caplog.clear()
            ours = load_tokenizer(tmp_path)
            if not caplog.messages:
                assert outputs(ours, ours.encode)[0] == outputs(theirs, theirs.encode)[0], (key, value)
            assert bool(caplog.messages) <= (FATES[key] == "named"), key


@pytest.mark.parametrize("prepends", ["Prepend", "always", "first"])
def test_a_llama_begins_words_as_in_transformers(tmp_path, caplog, prepends):
    """Whatever tokenizer.json does, by `legacy` and `add_prefix_space`."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b"]
    ids = {piece: index for index, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [("▁", "a"), ("▁", "b")], unk_token="<unk>", fuse_unk=True))
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    if prepends == "Prepend":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prepends, split=False)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    inner.add_special_tokens(pieces[:3])
    inner.save(str(tmp_path / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for legacy, prefix in itertools.product(({}, {"legacy": True}, {"legacy": False}), (None, True, False)):
        config = {"tokenizer_class": "LlamaTokenizer", **roles, **legacy, "add_prefix_space": prefix}
        (tmp_path / CONFIG).write_text(json.dumps(config))
        theirs, ours = transformers.LlamaTokenizer.from_pretrained(str(tmp_path)), load_tokenizer(tmp_path)
        for text in ("a b", " a b", "b<s>a b", "ab </s> a"):
            expected = theirs.encode(text, add_special_tokens=False)
            assert ours.encode(text, special_tokens=False) == expected, (config, text)
            assert ours.decode(expected, skip_special_tokens=False) == theirs.decode(expected), (config, text)
    assert not caplog.messages


@pytest.mark.parametrize("case", ["t5", "byte_level", "marian", "mbart"])
def test_tokens_that_only_one_file_names_are_one_token(tmp_path, case):
    """Also with SentencePiece models and separate vocabularies."""
    from tests.tokenizers.test_pretrained import copy

    for index, files in enumerate(({ADDED: {"<|new|>": 5000}}, {MAP: {"additional_special_tokens": ["<|new|>"]}})):
        directory = copy(case, tmp_path / str(index))
        size = load_tokenizer(directory).vocab_size
        write(directory, files)
        tokenizer = load_tokenizer(directory)
        found = tokenizer.token_to_id("<|new|>")
        assert found == (5000 if case == "marian" and index == 0 else size)
        assert tokenizer.encode("a <|new|> b").count(found) == 1
        tokenizer.save(tmp_path / f"copy {index}")
        assert load_tokenizer(tmp_path / f"copy {index}").encode("a <|new|> b") == tokenizer.encode("a <|new|> b")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"add_eos_token": True, "eos_token": "[MASK]"}, "add_eos_token True"),
        ({"add_bos_token": True, "bos_token": "[MASK]"}, "add_bos_token True"),
        ({"add_eos_token": False, "eos_token": "[SEP]", "sep_token": None}, "add_eos_token False"),
        ({"tokenizer_class": "LlamaTokenizer", "legacy": True}, None),
        ({"tokenizer_class": "T5Tokenizer", "legacy": True, "add_bos_token": False, "bos_token": "[CLS]"}, None),
        ({"fast_tokenizer_files": ["tokenizer.9.json"]}, "fast_tokenizer_files ['tokenizer.9.json']"),
        ({"add_eos_token": True, "eos_token": "[SEP]", "add_bos_token": False, "bos_token": None}, None),
    ],
)
def test_a_warning_names_what_is_not_followed(tmp_path, caplog, settings, named):
    word_piece(tmp_path)
    write(tmp_path, {CONFIG: {**GENERIC, **settings}})
    load_tokenizer(tmp_path)
    expected = [] if named is None else [f"{tmp_path}: settings of the tokenizer that are not followed: {named}"]
    assert caplog.messages == expected


def test_files_of_a_wrong_form_are_refused(tmp_path):
    word_piece(tmp_path)
    for values, message in (
        ({"truncation_side": "middle"}, "truncation_side 'middle'; expected 'left' or 'right'"),
        ({"added_tokens_decoder": {"x": {"content": "<y>"}}}, "added tokens that are not tokens by id"),
        ({"added_tokens_decoder": {"5": {}}}, "added tokens that are not tokens by id"),
        ({"added_tokens_decoder": 5}, "added tokens that are not tokens by id"),
    ):
        (tmp_path / CONFIG).write_text(json.dumps(values))
        with pytest.raises(CheckpointError, match=message):
            load_tokenizer(tmp_path)


# --- Every key --------------------------------------------------------------------------------------------------------

# What happens to each key: it is followed, a warning names it if the tokenizer differs, or it has no effect on tokens.
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
FATES = {
    **dict.fromkeys((f"{role}_token" for role in ROLES), "followed"),
    **dict.fromkeys(
        (
            *("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"),
            *("added_tokens_decoder", "model_max_length", "max_len", "truncation_side", "model_input_names"),
            *("clean_up_tokenization_spaces", "split_special_tokens", "chat_template", "add_prefix_space"),
            *("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "do_lower_case"),
            *("strip_accents", "tokenize_chinese_chars", "src_lang", "tgt_lang", "source_lang", "target_lang"),
            *("separate_vocabs", "language_codes", "legacy_behaviour", "extra_ids", "offset", "num_madeup_words"),
            "legacy",
            *("prefix_token", "middle_token", "suffix_token", "eot_token", "fill_token", "eod_token"),
        ),
        "followed",
    ),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "keep_accents", "split_by_punct", "sp_model_kwargs"), "named"),
    **dict.fromkeys(
        (
            *("name_or_path", "processor_class", "verbose", "padding_side", "response_template", "response_schema"),
            *("chat_control_tokens", "backend", "files_loaded", "max_length", "stride", "truncation_strategy"),
            *("pad_token_type_id", "pad_to_multiple_of", "errors", "trim_offsets", "use_default_system_prompt"),
            *("unk_id", "language", "task", "predict_timestamps", "normalizer_file", "init_inputs", "auto_map"),
            *("grounded_generation_template", "tool_use_template", "mask_token_sent", "tokenizer_class"),
            # Arguments of calls and of the conversion of files.
            *("vocab", "merges", "vocab_file", "merges_file", "source_spm", "target_spm", "spm_file", "gguf_file"),
            *("target_vocab_file", "tokenizer_file", "tokenizer_object", "post_processor", "is_local"),
            *("local_files_only", "tokenizer_truncation", "tokenizer_padding", "fix_mistral_regex", "tokenizer"),
            *("_json_truncation", "_json_padding", "_spm_precompiled_charsmap", "args", "kwargs", "self"),
        ),
        "no effect",
    ),
}
CONCRETE = (
    *("Albert", "Bart", "Barthez", "Bert", "Blenderbot", "Camembert", "CLIP", "CodeLlama", "Cohere", "Deberta"),
    *("DebertaV2", "GPT2", "GPTNeoX", "Gemma", "Llama", "M2M100", "MBart", "MBart50", "MPNet", "Marian", "Nllb"),
    *("Pegasus", "Qwen2", "Roberta", "Siglip", "T5", "Whisper", "XLMRoberta"),
)


def test_the_fate_of_every_key_of_transformers_is_known():
    base = transformers.PreTrainedTokenizerBase
    backend = next(cls for cls in transformers.BertTokenizer.__mro__ if cls.__name__ == "TokenizersBackend")
    keys = set()
    for function in (base.__init__, base._from_pretrained, backend.__init__):
        keys |= set(re.findall(r"kwargs(?:\.(?:pop|get|setdefault)\(|\[)\"(\w+)\"", inspect.getsource(function)))
    for name in CONCRETE:
        keys |= inspect.signature(getattr(transformers, f"{name}Tokenizer").__init__).parameters.keys()
    assert len(keys) > 70
    assert keys - FATES.keys() == set()
