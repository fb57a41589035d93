"""Tokenizers: those that xformer trains, those of public checkpoints and of GGUF files, with one set of methods."""

from xformer.tokenizers.base import BaseTokenizer
from xformer.tokenizers.loading import load_tokenizer
from xformer.tokenizers.ours import BOS_ID, EOS_ID, PAD_ID, SEPARATOR, SPECIAL_TOKENS, UNK_ID, Tokenizer
from xformer.tokenizers.pretrained import PretrainedTokenizer
from xformer.tokenizers.streaming import DecodeStream

__all__ = [
    "BOS_ID", "EOS_ID", "PAD_ID", "SEPARATOR", "SPECIAL_TOKENS", "UNK_ID", "BaseTokenizer", "DecodeStream",
    "PretrainedTokenizer", "Tokenizer", "load_tokenizer",
]  # fmt: skip
