"""Write tests/tokenizers/data: small tokenizers of every kind, with the ids and texts that the original libraries give.

Needs transformers, sentencepiece and tokenizers: python tests/tokenizers/make_references.py
The files are made from the sentences below. test_pretrained.py reads them without these libraries.
"""

import json
import shutil
import tempfile
from pathlib import Path

import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

DATA = Path(__file__).parent / "data"
ENGLISH = """a small frog sat on a log near the river and sang all day long
the teacher asked her friends for advice about the new house in the city
we are going to the market tomorrow morning because the bread is fresh
hello world, this is a test of the tokenizer with numbers 0 1 2 3 4 5 6 7 8 9
he said that she would not come to the party if it rained in the evening
training models takes time and patience but the results are worth the effort"""
GERMAN = """ein kleiner frosch saß auf einem baumstamm am fluss und sang den ganzen tag
die lehrerin bat ihre freunde um rat wegen des neuen hauses in der stadt
wir gehen morgen früh zum markt, weil das brot dort frisch und köstlich ist
hallo welt, dies ist ein test des tokenisierers mit zahlen 0 1 2 3 4 5 6 7 8 9
er sagte, dass sie nicht zur feier kommen würde, wenn es am abend regnete
das training von modellen braucht zeit und geduld, aber die mühe lohnt sich"""
TEXTS = [
    "a small frog sat near the river", "  the   teacher  asked, friends ", "ein kleiner frosch saß am fluss",
    "für köstliche grüße", "ﬁne ﬂuss … 12", "日本 and 😀!", "", " ", "line\nbreak\ttab", "▁odd ▁ x", "hello</s>world",
]  # fmt: skip
# Normalization with a small compiled map; that of nmt_nfkc has 230 kB.
RULES = [("ﬁ", "fi"), ("ﬂ", "fl"), ("…", "..."), ("\t", " "), ("\n", " "), ("\u00a0", " "), ("a\u0308", "ä")]
CHAT = """{%- if messages[0].role == 'assistant' %}{{ raise_exception('the user speaks first') }}{% endif %}
{% for message in messages %}
    {% if loop.first %}{{ bos_token }}{% endif %}
<|im_start|>{{ message['role'] }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}{% endgeneration %}{% else %}{{ message.content | trim }}{% endif %}<|im_end|>
    {% if loop.index > 8 %}{% break %}{% endif %}
{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""  # noqa: E501
MESSAGES = [
    {"role": "system", "content": " Answer <briefly> & 'well'. "},
    {"role": "user", "content": "Grüße?"},
    {"role": "assistant", "content": "Hi\n"},
    {"role": "user", "content": "more"},
]
TOOLS = [{"name": "add", "text": "größer < 3 & 'x'"}]


def train(path: Path, text: str, **options: object) -> None:
    """Train a SentencePiece model."""
    with tempfile.TemporaryDirectory() as directory:
        corpus, rules = Path(directory) / "corpus.txt", Path(directory) / "rules.tsv"
        corpus.write_text(text, encoding="utf-8")
        rows = ("\t".join(" ".join(f"{ord(c):X}" for c in side) for side in rule) for rule in RULES)
        rules.write_text("\n".join(rows) + "\n", encoding="utf-8")
        options = {"normalization_rule_tsv": str(rules), **options}
        if "normalization_rule_name" in options:
            del options["normalization_rule_tsv"]
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus), model_prefix=str(Path(directory) / "model"), hard_vocab_limit=False,
            character_coverage=1.0, minloglevel=2, num_threads=1, **{"vocab_size": 160, **options},
        )  # fmt: skip
        shutil.copyfile(Path(directory) / "model.model", path)


def write(path: Path, value: object) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def pieces(path: Path) -> list[str]:
    """Return the pieces of a SentencePiece model."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [model.id_to_piece(index) for index in range(len(model))]


def make_marian(directory: Path) -> dict:
    train(directory / "source.spm", ENGLISH)
    train(directory / "target.spm", GERMAN)
    joint = dict.fromkeys(pieces(directory / "source.spm") + pieces(directory / "target.spm"))
    left_out = {"</s>", "<unk>", "<s>", "▁th"}
    # As in the files of OPUS-MT: eos and unk first, pad last; one piece of the source is not in the vocabulary.
    tokens = ["</s>", "<unk>", ">>deu<<", ">>fra<<", *(token for token in joint if token not in left_out)]
    write(directory / "vocab.json", {token: index for index, token in enumerate([*tokens, "<pad>"])})
    write(directory / "tokenizer_config.json", {"source_lang": "en", "target_lang": "de", "model_max_length": 512})
    tokenizer = transformers.MarianTokenizer.from_pretrained(directory)
    texts = [*TEXTS, ">>fra<< the teacher"]
    return {
        "texts": texts,
        "ids": [tokenizer(text).input_ids for text in texts],
        "target_ids": [tokenizer(text_target=text).input_ids for text in TEXTS],
        "decoded": [tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) for text in texts],
    }


def make_m2m100(directory: Path) -> dict:
    model = directory / "sentencepiece.bpe.model"
    train(model, ENGLISH + "\n" + GERMAN, model_type="bpe", vocab_size=220)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces(model)[3:]]
    write(directory / "vocab.json", {token: index for index, token in enumerate(tokens)})
    write(directory / "tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer", "model_max_length": 1e30})
    codes = transformers.models.m2m_100.tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"]
    special = {"additional_special_tokens": [f"__{code}__" for code in codes]}
    write(directory / "special_tokens_map.json", special)
    tokenizer = transformers.M2M100Tokenizer.from_pretrained(directory, src_lang="de", tgt_lang="en")
    return {
        "texts": TEXTS,
        "languages": ["de", "en"],
        "ids": [tokenizer(text).input_ids for text in TEXTS],
        "target_ids": [tokenizer(text_target=text).input_ids for text in TEXTS],
        "forced_bos_id": tokenizer.get_lang_id("en"),
        "decoded": [tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) for text in TEXTS],
    }


def original(path: Path, texts: list[str], offset: int = 0, special: dict[int, int] | None = None) -> tuple[list, list]:
    """Return the ids of the sentencepiece library, shifted as the checkpoints do, and the decoded texts."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    rows = [model.encode(text) for text in texts]
    shifted = [[(special or {}).get(index, index + offset) for index in row] for row in rows]
    return shifted, [model.decode([index for index in row if index != model.unk_id()]) for row in rows]


PLAIN = [text for text in TEXTS if "</s>" not in text]  # sentencepiece spells it, transformers does not


def make_t5(directory: Path) -> dict:
    train(directory / "spiece.model", ENGLISH, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    write(directory / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "extra_ids": 5})
    ids, decoded = original(directory / "spiece.model", PLAIN)
    return {"texts": PLAIN, "ids": [[*row, 1] for row in ids], "decoded": decoded}


def make_pegasus(directory: Path) -> dict:
    train(directory / "spiece.model", ENGLISH, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    write(directory / "tokenizer_config.json", {"tokenizer_class": "PegasusTokenizer"})
    ids, decoded = original(directory / "spiece.model", PLAIN, 103)
    return {"texts": PLAIN, "ids": [[*row, 1] for row in ids], "decoded": decoded}


def make_mbart(directory: Path) -> dict:
    train(directory / "sentencepiece.bpe.model", ENGLISH + "\n" + GERMAN)
    write(directory / "tokenizer_config.json", {"tokenizer_class": "MBartTokenizer"})
    ids, decoded = original(directory / "sentencepiece.bpe.model", PLAIN, 1, {0: 3})
    first = len(pieces(directory / "sentencepiece.bpe.model")) + 1  # ar_AR; de_DE and en_XX follow
    return {
        "texts": PLAIN, "languages": ["de_DE", "en_XX"], "ids": [[*row, 2, first + 2] for row in ids],
        "target_ids": [[*row, 2, first + 3] for row in ids], "forced_bos_id": first + 3, "decoded": decoded,
    }  # fmt: skip


def save(tokenizer: tokenizers.Tokenizer, directory: Path, texts: list[str], **settings: object) -> dict:
    """Save a tokenizer.json and return what transformers makes of it."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    return {
        "texts": texts,
        "ids": [fast(text).input_ids for text in texts],
        "plain_ids": [fast(text, add_special_tokens=False).input_ids for text in texts],
        "pair_ids": [fast(text, "the friends").input_ids for text in texts],
        "decoded": [fast.decode(fast(text).input_ids, skip_special_tokens=True) for text in texts],
        "decoded_with_special": [fast.decode(fast(text).input_ids, skip_special_tokens=False) for text in texts],
    }


def make_byte_level(directory: Path) -> dict:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((ENGLISH + GERMAN).splitlines(), trainer)
    settings = {"bos_token": special[0], "eos_token": special[2], "pad_token": special[0]}
    result = save(tokenizer, directory, [*TEXTS, "<|im_start|>user\nGrüße 👨‍👩‍👧<|im_end|>"], **settings)
    (directory / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    options = [{"add_generation_prompt": True}, {"add_generation_prompt": False}, {"tools": TOOLS}]
    result["chat"] = {
        "messages": MESSAGES,
        "options": options,
        "prompts": [fast.apply_chat_template(MESSAGES, tokenize=False, **each) for each in options],
    }
    return result


def make_word_piece(directory: Path) -> dict:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(ENGLISH.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    roles = ("pad", "unk", "cls", "sep", "mask")
    settings = {f"{role}_token": f"[{role.upper()}]" for role in roles}
    return save(tokenizer, directory, TEXTS, **settings)


def make_nllb(directory: Path) -> dict:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator((ENGLISH + GERMAN).splitlines(), trainer)
    tokenizer.add_special_tokens(["deu_Latn", "eng_Latn", "fra_Latn", "<mask>"])
    size = tokenizer.token_to_id("deu_Latn")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="eng_Latn $A </s>", pair="eng_Latn $A $B </s>", special_tokens=[("eng_Latn", size + 1), ("</s>", 2)]
    )
    settings = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    result = save(tokenizer, directory, TEXTS, **settings)
    write(directory / "tokenizer_config.json", {"tokenizer_class": "NllbTokenizer", "src_lang": "eng_Latn", **settings})
    plain = result.pop("plain_ids")
    return {
        "texts": TEXTS, "languages": ["deu_Latn", "fra_Latn"], "ids": [[size, *row, 2] for row in plain],
        "target_ids": [[size + 2, *row, 2] for row in plain], "forced_bos_id": size + 2, "decoded": result["decoded"],
    }  # fmt: skip


def main() -> None:
    shutil.rmtree(DATA, ignore_errors=True)
    references = {"versions": {each.__name__: each.__version__ for each in (transformers, sentencepiece, tokenizers)}}
    for name, function in globals().copy().items():
        if name.startswith("make_"):
            directory = DATA / name.removeprefix("make_")
            directory.mkdir(parents=True)
            references[directory.name] = function(directory)
    write(DATA / "references.json", references)


if __name__ == "__main__":
    main()
