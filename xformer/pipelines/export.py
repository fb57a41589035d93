"""Export of training runs to the Hugging Face format."""

from __future__ import annotations

import json
import os
from pathlib import Path

from xformer.errors import ConfigError
from xformer.families import save_pretrained
from xformer.families.checkpoint import save_with_config
from xformer.io import read_json, write_json
from xformer.models import Transformer, load
from xformer.runs.run_directory import RunDirectory, copy_pretrained
from xformer.text import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, UNK_ID


def export_run(directory: str | os.PathLike[str], output: str | os.PathLike[str]) -> str:
    """Write the best model of a run, and its tokenizer, as a checkpoint directory in the Hugging Face format.

    Args:
        directory: Directory of the run.
        output: Directory to write; new or empty.

    Returns:
        The model type that was written: "pegasus", "marian", "llama" or "gpt2", or that of the public checkpoint
        that the run started from.

    Raises:
        ConfigError: If the output is not empty, or no family computes the same as the model (the error names the
            field).
        CheckpointError: If a file of the run is missing or damaged, or the output cannot be written.
    """
    run, output = RunDirectory(Path(directory)), Path(output)
    pretrained = run.pretrained_files()
    tokenizers = {side: run.load_tokenizer(side) for side in _tokenizer_sides(run)}
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is not an empty directory; choose another one")
    model = load(run.model)
    if pretrained is not None:
        copy_pretrained(pretrained, output)
        return save_with_config(model, pretrained / "config.json", output)
    save_pretrained(model, output)
    for side, tokenizer in tokenizers.items():
        path = output / RunDirectory(output).tokenizer(side).name
        tokenizer.save(path)
        if isinstance(model, Transformer) and side != "target":
            _append_eos(path)
    roles = {"pad_token": PAD_ID, "bos_token": BOS_ID, "eos_token": EOS_ID, "unk_token": UNK_ID}
    settings = {role: SPECIAL_TOKENS[index] for role, index in roles.items()}
    write_json(output / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    return str(json.loads((output / "config.json").read_text(encoding="utf-8"))["model_type"])


def _append_eos(path: Path) -> None:
    """Change a tokenizer file so that the ids of each text end with eos."""
    content = read_json(path, "tokenizer")
    eos = {"SpecialToken": {"id": SPECIAL_TOKENS[EOS_ID], "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    token = {"id": SPECIAL_TOKENS[EOS_ID], "ids": [EOS_ID], "tokens": [SPECIAL_TOKENS[EOS_ID]]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, eos],
        "pair": [first, second, eos],
        "special_tokens": {SPECIAL_TOKENS[EOS_ID]: token},
    }
    write_json(path, content)


def _tokenizer_sides(run: RunDirectory) -> list[str]:
    names = run.read_config().get("tokenizers", {})
    return [side for side in ("joint", "source", "target") if run.tokenizer(side).name in names]
