"""A tiny model that answers chats, in the Hugging Face format: a Llama with a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

import xformer as xf
from xformer.tokenizers import PretrainedTokenizer, load_tokenizer

TEXT = ["system user assistant", "two and three is five", "one and four is five", "what is  two and one ? three ."]
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_ANSWER, _END = "{{ m['content'] + '<|im_end|>' }}", "{{ '\\n' }}{% endfor %}"
_START = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
PLAIN = f"{_START}{_ANSWER}{_END}{_PROMPT}"
TAGGED = (
    f"{_START}{{% if m['role'] == 'assistant' %}}{{% generation %}}{_ANSWER}{{% endgeneration %}}"
    f"{{% else %}}{_ANSWER}{{% endif %}}{_END}{_PROMPT}"
)
CHATS = [
    [{"role": "user", "content": "what is two and three ?"}, {"role": "assistant", "content": "five"}],
    [{"role": "system", "content": "one and two"}, {"role": "user", "content": "what is one and four ?"},
     {"role": "assistant", "content": "  five is\nfive é 🙂"}, {"role": "user", "content": " four ?"},
     {"role": "assistant", "content": "three  "}],
]  # fmt: skip


def write_tokenizer(directory: Path, template: str = TAGGED) -> PretrainedTokenizer:
    """Write a tokenizer with a chat template, and return it."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=290, special_tokens=_SPECIAL, initial_alphabet=alphabet)
    inner.train_from_iterator(TEXT * 4, trainer)
    inner.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(directory)


def write_model(directory: Path, template: str = TAGGED, **settings: Any) -> Path:
    """Write a model with random weights and its tokenizer."""
    llama = {"norm": "rms", "activation": "swiglu", "positions": "rotary", "scale_embeddings": False}
    llama |= {"attention_bias": False, "feed_forward_bias": False, "bos_id": 0, "eos_id": 2, "pad_id": 0}
    sizes = {"vocab_size": 290, "d_model": 32, "num_heads": 2, "d_ff": 48, "num_layers": 1, "max_positions": 64}
    config = xf.LanguageModelConfig(**{**llama, **sizes, **settings})
    xf.save_pretrained(xf.LanguageModel(config, seed=1), directory)
    write_tokenizer(directory, template)
    return directory
