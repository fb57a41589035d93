"""Convert a run of xformer 0.1: python convert_run.py OLD NEW."""

import json
import shutil
import sys
from pathlib import Path

from xformer.io import load_arrays, save_arrays

RENAMED = {
    "accumulate": "grad_accumulation",
    "long_lines": "truncation",
    "max_norm": "max_grad_norm",
    "max_updates": "max_steps",
    "select_by": "metric_for_best",
    "shards": "data_parallel",
    "language_modelling": "language_modeling",
}


def convert_model(old: Path, new: Path) -> None:
    """Convert a file that Transformer.save or LanguageModel.save wrote."""
    arrays, metadata = load_arrays(old)
    renamed = {}
    for name, array in arrays.items():
        name = name.replace(".expand.", ".up.").replace(".contract.", ".down.")
        renamed[name] = array
    save_arrays(new, renamed, metadata)


def convert_run(old: Path, new: Path) -> None:
    """Convert the best model of a run, without the state of the training."""
    config = json.loads((old / "config.json").read_text())
    recipe = config["recipe"]
    training = recipe["training"]
    recipe["training"] = {RENAMED.get(k, k): v for k, v in training.items()}
    recipe["task"] = config["task"] = RENAMED.get(config["task"], config["task"])
    new.mkdir()
    (new / "config.json").write_text(json.dumps({**config, "format": 2}, indent=2))
    for path in (*old.glob("*tokenizer.json"), *old.glob("log.jsonl")):
        shutil.copy(path, new)
    convert_model(old / "model.safetensors", new / "model.safetensors")


if __name__ == "__main__":
    old, new = map(Path, sys.argv[1:])
    (convert_run if old.is_dir() else convert_model)(old, new)
