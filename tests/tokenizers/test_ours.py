import hashlib
import os
import subprocess
import sys
import unicodedata

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from xformer.data.demo_tasks import english, german
from xformer.errors import BackendError, CheckpointError, ConfigError, DataError
from xformer.tokenizers.ours import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, UNK_ID, Tokenizer

MODELS = ["bpe", "characters", "words"]
SENTENCES = [
    "Zwei junge Männer stehen im Garten, weit weg vom Haus.",
    "Eine Frau mit rotem Hut liest am Fluss ein Buch über Vögel.",
    "A man in a blue shirt is standing on a ladder; he cleans a window!",
    "Two dogs play in the snow while a small child watches (from afar).",
    "Straßenmusiker spielen Jazz für 25 Leute am Straßenrand.",
    "What is the quick fox doing next to the zebra?",
]
LINES = SENTENCES + [words(number) for number in range(0, 400, 3) for words in (english, german)]
VOCABULARY = " ".join(LINES).split()

known_words = st.lists(st.sampled_from(VOCABULARY), max_size=12).map(" ".join)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.fixture(scope="module", params=MODELS)
def tokenizer(request):
    return Tokenizer.train(LINES, 1000, model=request.param)


@pytest.fixture(scope="module")
def bpe():
    return Tokenizer.train(LINES, 200)


# --- What a tokenizer is -------------------------------------------------------------------------


def test_vocab_size_is_a_limit():
    assert Tokenizer.train(LINES, 200).vocab_size == 200
    assert Tokenizer.train(["ab ab"], 1000).vocab_size == 4 + 5  # ▁ a b, ▁a or ab, ▁ab
    assert Tokenizer.train(["ab ab"], 1000, model="characters").vocab_size == 4 + 3
    assert Tokenizer.train(["ab ab"], 1000, model="words").vocab_size == 4 + 1


def test_bpe_tokens():
    tokenizer = Tokenizer.train(["hug hug hugs bug"] * 3, 12)
    # ▁ b g h s u, then the most frequent pairs: u+g (12 times), then h+ug (9).
    assert tokenizer.tokens(range(4, 12)) == ["b", "g", "h", "s", "u", "▁", "ug", "hug"]
    assert tokenizer.tokens(tokenizer.encode("hugs bugs")) == ["▁", "hug", "s", "▁", "b", "ug", "s"]


def test_word_tokens_are_the_most_frequent_words():
    tokenizer = Tokenizer.train(["d b a b", "c a b\tx\u2003c"], 8, model="words")
    assert tokenizer.tokens(range(4, 8)) == ["b", "a", "c", "d"]
    assert tokenizer.tokens(tokenizer.encode("a x\tb")) == ["a", "<unk>", "b"]


def test_character_tokens_keep_spaces():
    tokenizer = Tokenizer.train(["7 3 9", "7\u2028"], 9, model="characters")
    assert tokenizer.tokens(tokenizer.encode("39 \u20287")) == ["3", "9", " ", "\u2028", "7"]
    assert tokenizer.decode(tokenizer.encode("  7  ")) == "  7  "


# --- Text and back -------------------------------------------------------------------------------


@given(line=known_words)
def test_round_trip_of_known_words(tokenizer, line):
    ids = tokenizer.encode(line)
    assert UNK_ID not in ids
    assert tokenizer.decode(ids) == line


@given(lines=st.lists(st.one_of(known_words, any_text), max_size=5))
def test_a_batch_is_its_lines(tokenizer, lines):
    batch = tokenizer.encode_batch(lines)
    assert batch == [tokenizer.encode(line) for line in lines]
    assert tokenizer.decode_batch(batch) == [tokenizer.decode(ids) for ids in batch]


def test_text_is_normalized_to_nfc(tokenizer):
    decomposed = unicodedata.normalize("NFD", "Männer stehen")
    assert decomposed != "Männer stehen"
    assert tokenizer.normalize(decomposed) == "Männer stehen"
    assert tokenizer.encode(decomposed) == tokenizer.encode("Männer stehen")


@pytest.mark.parametrize("model", MODELS)
def test_lowercase(model):
    tokenizer = Tokenizer.train(LINES, 1000, model=model, lowercase=True)
    line = "Zwei junge MÄNNER"
    assert tokenizer.normalize(line) == "zwei junge männer"
    assert tokenizer.decode(tokenizer.encode(line)) == "zwei junge männer"
    assert not any("Z" in token for token in tokenizer.tokens(range(tokenizer.vocab_size)))
    assert Tokenizer.train(LINES, 1000, model=model).normalize(line) == line


def test_decode_skips_special_ids_but_unknown(tokenizer):
    ids = tokenizer.encode("Zwei zwölf")
    assert tokenizer.decode([BOS_ID, *ids, EOS_ID, PAD_ID, PAD_ID]) == "Zwei zwölf"
    assert tokenizer.decode([*ids, UNK_ID]).replace(" <unk>", "<unk>") == "Zwei zwölf<unk>"


def test_unknown_characters_become_unknown(tokenizer):
    ids = tokenizer.encode("Zwei 日")
    assert ids.count(UNK_ID) == 1
    assert tokenizer.decode(ids) == "Zwei <unk>"


@pytest.mark.parametrize("model", MODELS)
def test_text_cannot_spell_special_ids(model):
    # Often enough for byte-pair encoding to learn "<s>" and "</s>" as tokens, if it could.
    lines = [f"{letter}<s> {letter}</s> {letter}<pad>" for letter in "abcdef"] * 5 + ["<s> </s> <pad> <unk>"] * 5
    tokenizer = Tokenizer.train(lines, 60, model=model)
    assert tokenizer.tokens(range(4)) == list(SPECIAL_TOKENS)
    size = tokenizer.vocab_size
    assert len(set(tokenizer.tokens(range(size)))) == size
    for line in (*lines, "<s>", "a <pad></s>"):
        assert not {PAD_ID, BOS_ID, EOS_ID} & set(tokenizer.encode(line))


def test_ids_outside_the_vocabulary(bpe):
    message = "^token id 200 is outside the vocabulary; expected 0 to 199; use the tokenizer that the model was"
    for read in (bpe.decode, bpe.tokens, lambda ids: bpe.decode_batch([[5], ids])):
        with pytest.raises(DataError, match=message):
            read([5, 200])


def test_other_types_are_refused(bpe):
    for wrong in (None, 3, "a\ud800"):
        for call in (bpe.encode, bpe.encode_text, lambda line: bpe.encode_batch(["a", line])):
            with pytest.raises(DataError, match="got something that is not text"):
                call(wrong)
        for model in MODELS:
            with pytest.raises(DataError, match="got something that is not text"):
                Tokenizer.train(["a", wrong], 100, model=model)


# --- Training ------------------------------------------------------------------------------------


def test_training_in_other_processes_gives_the_same_bytes(tmp_path):
    # All two-letter words once: every pair is a tie.
    code = """
import sys
from xformer.tokenizers import Tokenizer
lines = [a + b + " " + b + a for a in "abcdefghijkl" for b in "mnopqrstuvwx"]
for model in ("bpe", "characters", "words"):
    Tokenizer.train(lines, 150, model=model).save(sys.argv[1] + model)
"""
    digests = set()
    for seed, threads in (("1", "1"), ("2", "2")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        target = tmp_path / seed
        subprocess.run([sys.executable, "-c", code, str(target)], env=environment, check=True)
        digests.add(tuple(hashlib.sha256((tmp_path / (seed + m)).read_bytes()).hexdigest() for m in MODELS))
    assert len(digests) == 1


def test_wrong_arguments_of_training_are_refused():
    small = ["abcde edcba"]
    for lines, size, options, error, message in (
        (LINES, 200, {"model": "wordpiece"}, ConfigError, "tokenizer model is 'wordpiece'; expected one of bpe, cha"),
        (LINES, 200, {"unicode_form": "nfc"}, ConfigError, "the Unicode form is 'nfc'; expected one of: NFC, NFKC"),
        (LINES, 4, {}, ConfigError, "^vocab_size is 4; expected more than the 4 special tokens$"),
        (LINES, 5, {"separator": True}, ConfigError, "^vocab_size is 5; expected more than the 5 special tokens$"),
        (LINES, 10**9, {}, ConfigError, "^vocab_size is 1000000000; expected at most 10000000; 4000 to 50000 are"),
        (small, 9, {}, ConfigError, "^vocab_size is 9; expected at least 10, for 4 special tokens and 6 distinct char"),
        (small, 10, {"separator": True}, ConfigError, "^vocab_size is 10; expected at least 11, for 5 special tokens"),
        (["", ""], 100, {}, DataError, "^cannot learn a tokenizer from lines without text"),
        ("train.de", 100, {}, DataError, "lines is one string; expected a list of lines, such as read_lines"),
    ):
        with pytest.raises(error, match=message):
            Tokenizer.train(lines, size, **options)
    for model in ("bpe", "characters"):
        assert Tokenizer.train(small, 10, model=model).vocab_size == 10


def test_missing_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for call in (lambda: Tokenizer.train(LINES, 200), lambda: Tokenizer.load(tmp_path / "tokenizer.json")):
        with pytest.raises(BackendError, match=r"pip install \"array-transformers\[chat\]"):
            call()


# --- Files ---------------------------------------------------------------------------------------


def test_save_and_load(tokenizer, tmp_path):
    original = Tokenizer.train(LINES, 1000, model=tokenizer.model, lowercase=True)
    original.save(tmp_path / "a.json")
    loaded = Tokenizer.load(tmp_path / "a.json")
    assert repr(loaded) == repr(original)
    for line in [*LINES, "unknown: 日本", ""]:
        assert loaded.encode(line) == original.encode(line)
        assert loaded.decode(loaded.encode(line)) == original.decode(original.encode(line))
    loaded.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@settings(deadline=None, max_examples=30)
@given(share=st.floats(0, 0.999))
def test_load_truncated(bpe, tmp_path_factory, share):
    path = tmp_path_factory.mktemp("truncated") / "tokenizer.json"
    bpe.save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=f"^tokenizer {path} is not valid JSON"):
        Tokenizer.load(path)


def foreign(special_tokens=SPECIAL_TOKENS, unk_token="<unk>"):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=unk_token))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=80, special_tokens=list(special_tokens), show_progress=False)
    inner.train_from_iterator(SENTENCES, trainer)
    return inner


@pytest.mark.parametrize(
    ("inner", "fault"),
    [
        (foreign(["[PAD]", "[UNK]", "[CLS]", "[SEP]"], "[UNK]"), "<pad> has id None, not 0"),
        (foreign(["<s>", "<pad>", "</s>", "<unk>"]), "<pad> has id 1, not 0"),
        (foreign(unk_token=None), "its model does not turn unknown tokens into <unk>"),
    ],
)
def test_load_foreign(tmp_path, inner, fault):
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    with pytest.raises(CheckpointError, match=f"^tokenizer {path} is incompatible: {fault}; expected a file that"):
        Tokenizer.load(path)


def test_truncation_and_padding_of_a_file_are_ignored(tmp_path):
    inner = foreign()
    expected = inner.encode(SENTENCES[0]).ids
    inner.enable_truncation(5)
    inner.enable_padding(length=200)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.encode(SENTENCES[0]) == expected
    assert not tokenizer.lowercase
    assert tokenizer.normalize("Ab") == "Ab"


# --- Documents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_the_separator_has_an_id_that_the_file_keeps(model, tmp_path):
    tokenizer = Tokenizer.train([*LINES, "a <sep> b"], 1000, model=model, separator=True)
    assert tokenizer.sep_id == 4
    assert tokenizer.tokens(range(5)) == [*SPECIAL_TOKENS, "<sep>"]
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.sep_id == 4
    for same in (tokenizer, loaded):
        # Text that spells it is text.
        assert same.sep_id not in same.encode("zwei <sep> drei<sep>")
        assert same.sep_id not in same.encode_text("zwei <sep> drei<sep>")


def test_documents():
    tokenizer = Tokenizer.train(LINES, 1000, separator=True)
    sep = tokenizer.sep_id
    one, two = tokenizer.encode_batch(SENTENCES[:2])
    documents = [SENTENCES[:2], [], ["", SENTENCES[1], " "], [SENTENCES[0]]]
    assert tokenizer.encode_documents(documents) == [[*one, sep, *two], [], two, one]
    assert tokenizer.encode_documents([]) == []


def test_documents_require_a_separator_and_lists(bpe):
    with pytest.raises(ConfigError, match=r"^the tokenizer has no <sep>; expected one trained with separator=True"):
        bpe.encode_documents([["a"]])
    tokenizer = Tokenizer.train(LINES, 200, separator=True)
    for wrong in ("a b", ["a b"]):
        with pytest.raises(DataError, match=r"^a document is no list of sentences; expected one"):
            tokenizer.encode_documents(wrong)
    with pytest.raises(DataError, match="got something that is not text"):
        tokenizer.encode_documents([[None]])


# --- Unicode forms -------------------------------------------------------------------------------


def test_nfkc_on_request(tmp_path):
    Tokenizer.train([*LINES, "fit"], 1000, unicode_form="NFKC").save(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.normalize("\ufb01t") == "fit"
    assert tokenizer.encode("\ufb01t") == tokenizer.encode("fit")
    assert Tokenizer.train(LINES, 1000).normalize("\ufb01t") == "\ufb01t"


# --- Whole texts ---------------------------------------------------------------------------------

PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\n\tSpeak, speak.\r\n  Aye! \n"


def test_characters_decode_to_the_same_text(tmp_path):
    Tokenizer.train([PLAY], 100, model="characters").save(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.vocab_size == 4 + len(set(PLAY))
    ids = tokenizer.encode_text(PLAY)
    assert len(ids) == len(PLAY)
    assert UNK_ID not in ids
    assert tokenizer.decode(ids) == PLAY
    assert tokenizer.encode_text("All\u00e4") == [*tokenizer.encode_text("All"), UNK_ID]
    assert tokenizer.encode_text("") == []


@given(text=st.one_of(any_text, st.text("ab \n\t<s>/ä\u0308")))
def test_a_text_is_encoded_as_a_line_is(tokenizer, text):
    assert tokenizer.encode_text(text) == tokenizer.encode(text)


# --- Topics and lengths --------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_phrase_matches_the_tokens_of_a_line(model):
    tokenizer = Tokenizer.train([*LINES, "Rotem Hut rotem Hut"], 1000, model=model)
    spellings = tokenizer.phrase_ids(" rotem  Hut ")
    (inside,) = [ids for ids in spellings if contains(tokenizer.encode("Eine Frau mit rotem Hut liest"), ids)][:1]
    assert inside == spellings[0]
    starts = [tokenizer.encode(line) for line in ("rotem Hut liest", "Rotem Hut liest")]
    assert all(any(ids[: len(each)] == each for each in spellings) for ids in starts)
    assert {tokenizer.decode(ids).strip() for ids in spellings} == {"rotem Hut", "Rotem Hut"}


def contains(ids, phrase):
    return any(ids[start : start + len(phrase)] == phrase for start in range(len(ids)))


def test_a_word_in_characters_is_not_part_of_another():
    tokenizer = Tokenizer.train(["start art"], 100, model="characters")
    inside, start = tokenizer.phrase_ids("art")  # there is no capital A in the vocabulary
    assert (tokenizer.decode(inside), tokenizer.decode(start)) == (" art", "art")
    assert not contains(tokenizer.encode("a start"), inside)


def test_unknown_words_of_a_phrase(bpe):
    message = "^phrase .* has words with unknown characters: '日本', 'Ωmega'; expected words, or spellings"
    with pytest.raises(DataError, match=message):
        bpe.phrase_ids("Zwei 日本 Ωmega")
    for blank in ("", " \t"):
        with pytest.raises(DataError, match=r"^phrase is '.*'; expected a word or a phrase$"):
            bpe.phrase_ids(blank)
