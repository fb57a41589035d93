"""Translate standard input by an exported run; needs ctranslate2 and tokenizers."""

import sys

import ctranslate2
from tokenizers import Tokenizer

directory = sys.argv[1]
tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
translator = ctranslate2.Translator(directory)

sources = [tokenizer.encode(line.rstrip("\n")).tokens for line in sys.stdin]
results = translator.translate_batch(
    sources,
    beam_size=1,
    max_decoding_length=200,
    suppress_sequences=[["<pad>"], ["<s>"]],
)
for result in results:
    ids = [tokenizer.token_to_id(token) for token in result.hypotheses[0]]
    print(tokenizer.decode(ids))
