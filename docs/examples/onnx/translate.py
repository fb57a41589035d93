"""Translate lines with onnxruntime alone: python translate.py FOLDER < texts."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


class Graph:
    """An ONNX file; a call takes and returns arrays by name, and ignores others."""

    def __init__(self, path):
        self.session = onnxruntime.InferenceSession(path)
        self.inputs = {x.name: x.shape for x in self.session.get_inputs()}
        self.outputs = [x.name for x in self.session.get_outputs()]

    def __call__(self, arrays):
        feed = {name: arrays[name] for name in self.inputs}
        return dict(zip(self.outputs, self.session.run(None, feed), strict=True))


class Translator:
    def __init__(self, folder):
        folder = Path(folder)
        self.encode, self.step = (
            Graph(folder / "encoder.onnx"),
            Graph(folder / "step.onnx"),
        )
        self.settings = json.loads((folder / "generation_config.json").read_text())
        names = ("source_tokenizer.json", "target_tokenizer.json")
        source, target = (
            name if (folder / name).exists() else "tokenizer.json" for name in names
        )
        self.source, self.target = (
            Tokenizer.from_file(str(folder / name)) for name in (source, target)
        )

    def __call__(self, texts):
        pad_id, eos_id = self.settings["pad_token_id"], self.settings["eos_token_id"]
        rows = [encoding.ids for encoding in self.source.encode_batch(texts)]
        source = np.full((len(rows), max(map(len, rows))), pad_id)
        for row, ids in zip(source, rows, strict=True):
            row[: len(ids)] = ids
        # The encoder returns the memory, and its keys and values.
        arrays = {
            "source": source,
            **self.encode({"source": source}),
        }
        for name, shape in self.step.inputs.items():
            if name.startswith("past_"):  # (batch, heads, tokens so far, head_dim)
                arrays[name] = np.zeros((len(rows), shape[1], 0, shape[3]), np.float32)
        tokens = np.full((len(rows), 1), self.settings["decoder_start_token_id"])
        outputs = [[] for _ in rows]
        # The limits of xformer, which does not count eos.
        limits = [2 * (len(ids) - 1) + 20 for ids in rows]
        is_open = [True] * len(rows)
        while any(is_open):
            results = self.step({**arrays, "tokens": tokens})
            logits = results.pop("logits")  # of the next token, (batch, vocab_size)
            logits[:, self.settings.get("suppress_tokens", [])] = -np.inf
            tokens = np.argmax(logits, axis=1)[:, None]
            arrays |= {
                name.replace("present_", "past_"): x for name, x in results.items()
            }
            for i, token in enumerate(tokens[:, 0].tolist()):
                if is_open[i] and token != eos_id:
                    outputs[i].append(token)
                is_open[i] &= token != eos_id and len(outputs[i]) < limits[i]
        return self.target.decode_batch(outputs)


if __name__ == "__main__":
    for translation in Translator(sys.argv[1])(sys.stdin.read().splitlines()):
        print(translation)
