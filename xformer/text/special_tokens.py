"""The tokens that are not text, with their ids; every tokenizer of ours has the first four."""

from __future__ import annotations

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")

# Stands between the sentences of a document; a tokenizer has it only on request, and then its file says with which id.
SEPARATOR = "<sep>"
