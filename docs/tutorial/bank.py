"""Write bank.json, the attention of MiniLM in "the bank of the river".

    python docs/tutorial/bank.py MODEL > docs/tutorial/bank.json

MODEL is the directory of sentence-transformers/all-MiniLM-L6-v2.
"""

import json
import sys

import numpy as np
import xformer as xf
from xformer.models import attention_maps

SENTENCES = ["the bank of the river", "the bank raised its rates"]


def main(directory: str) -> None:
    """Print the tokens and the weights of layer 0 of each sentence."""
    embedder = xf.Embedder.from_pretrained(directory)
    sentences = []
    for sentence in SENTENCES:
        ids = embedder.tokenizer.encode(sentence)  # with [CLS] and [SEP]
        (weights,) = attention_maps(embedder.model, [ids])["encoder"][0]
        tokens = embedder.tokenizer.tokens(ids)
        rounded = np.round(weights.astype(float), 3).tolist()
        sentences.append({"tokens": tokens, "weights": rounded})
    lines = ",\n".join(json.dumps(each) for each in sentences)
    print(f"[\n{lines}\n]")


if __name__ == "__main__":
    main(sys.argv[1])
