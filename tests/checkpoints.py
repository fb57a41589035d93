"""Tiny checkpoints of every family, which families/make_references.py wrote: changed, and with tokenizers."""

import json
import shutil
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers.processors import TemplateProcessing

DATA = Path(__file__).parent / "families" / "data"
WORDS = ["a", "man", "sleeps", "on", "bench", "dog", "the", "runs", "user", "assistant", ":"]
LLAMA = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
BERT = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "<unk>": 3}
BART = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
# name: (template of encoded texts, ids of special tokens)
TOKENIZERS = {
    "llama": ("<s> $A", LLAMA), "qwen3": ("<s> $A </s>", LLAMA), "bert": ("[CLS] $A [SEP]", BERT),
    "bert_classifier": ("[CLS] $A [SEP]", BERT), "marian": ("$A </s>", {"</s>": 0, "<unk>": 1, "<pad>": 60}),
    "m2m_100": ("", {**BART, "eng_Latn": 4, "deu_Latn": 5}), "mbart": ("", {**BART, "en_XX": 4, "de_DE": 5}),
    "t5": ("$A </s>", {"<pad>": 0, "</s>": 1, "<unk>": 2}),
}  # fmt: skip


def change_config(directory, **values):
    """Replace values of config.json; "removed" removes one, and a dictionary changes some values of another one."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in values.items():
        is_nested = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = {**config[key], **value} if is_nested else value
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "removed"}))


def copy(name, directory, **values):
    """Copy a checkpoint below a directory, change values of its config.json, and return its own directory."""
    target = Path(shutil.copytree(DATA / name, directory / name))
    change_config(target, **values)
    return target


def checkpoint(directory, name, *, template=None, special=None, **files):
    """Copy a checkpoint and add a tokenizer of words whose ids fit it, and JSON files."""
    target = copy(name, directory)
    (target / "reference.npz").unlink()
    template = TOKENIZERS[name][0] if template is None else template
    special = special or TOKENIZERS[name][1]
    tokens, words = {index: token for token, index in special.items()}, iter([*WORDS, *(f"word{i}" for i in range(61))])
    vocab = {tokens.get(index) or next(words): index for index in range(61)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(list(special))
    if template:
        inner.post_processor = TemplateProcessing(single=template, special_tokens=list(special.items()))
    inner.save(str(target / "tokenizer.json"))
    for file, content in files.items():
        (target / f"{file}.json").write_text(json.dumps(content))
    return target


def relative_error(actual, expected) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))
