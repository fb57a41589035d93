"""Export of training runs to the formats of other libraries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from xformer.errors import ConfigError, how_to_install
from xformer.export import export_onnx
from xformer.families import load_pretrained, save_pretrained
from xformer.families.checkpoint import is_public, save_with_config
from xformer.io import atomic_write, read_json, write_json
from xformer.models import BaseModel, ImageEncoder, Transformer, load
from xformer.runs.run_directory import RunDirectory, copy_pretrained
from xformer.text import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, UNK_ID, load_tokenizer

GENERATION_CONFIG = "generation_config.json"


def export_run(directory: str | os.PathLike[str], output: str | os.PathLike[str], target: str = "huggingface") -> str:
    """Write the best model of a run, and its tokenizer, in the format of another library.

    Args:
        directory: Directory of the run; for "onnx" also a public checkpoint.
        output: Directory to write; new or empty.
        target: Name of the format: "huggingface" or "onnx".

    Returns:
        A phrase about the result, e.g. "as a model of type pegasus".

    Raises:
        ConfigError: If the output is not empty, or the format has no model that computes the same (the error names the
            field).
        CheckpointError: If a file of the run is missing or damaged, or the output cannot be written.
        BackendError: If a package that the format needs is not installed.
    """
    if target not in FORMATS:
        raise ConfigError(f"the format is {target!r}; expected one of {', '.join(FORMATS)}")
    directory, output = Path(directory), Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is not an empty directory; choose another one")
    return FORMATS[target](directory, output)


def _to_hugging_face(directory: Path, output: Path) -> str:
    run = RunDirectory(directory)
    pretrained, write_tokenizers = run.pretrained_files(), _tokenizer_writer(run)
    model = load(run.model)
    if pretrained is not None:
        copy_pretrained(pretrained, output)
        model_type = save_with_config(model, pretrained / "config.json", output)
    else:
        save_pretrained(model, output)
        write_tokenizers(model, output)
        model_type = read_json(output / "config.json", "configuration")["model_type"]
    return f"as a model of type {model_type}"


def _to_onnx(directory: Path, output: Path) -> str:
    pretrained: Path | None = directory
    model: BaseModel
    if is_public(directory):
        model = load_pretrained(directory)
    else:
        run = RunDirectory(directory)
        pretrained, write_tokenizers = run.pretrained_files(), _tokenizer_writer(run)
        model = load(run.model)
    tokenizer = None if pretrained is None or isinstance(model, ImageEncoder) else load_tokenizer(pretrained)
    exported = export_onnx(model, output)
    if pretrained is None:
        write_tokenizers(model, output)
    elif (pretrained / GENERATION_CONFIG).is_file():
        with atomic_write(output / GENERATION_CONFIG) as file:
            file.write((pretrained / GENERATION_CONFIG).read_bytes())
    if tokenizer is not None:
        tokenizer.save(output)
    names = ", ".join(path.name for path in exported.files)
    if exported.difference is None:
        return f"as {names}; they were not verified: onnxruntime is not installed, {how_to_install('onnxruntime')}"
    return f"as {names}; onnxruntime computes the same, with a relative difference of at most {exported.difference:.0e}"


FORMATS: dict[str, Callable[[Path, Path], str]] = {"huggingface": _to_hugging_face, "onnx": _to_onnx}


def _tokenizer_writer(run: RunDirectory) -> Callable[[BaseModel, Path], None]:
    """Check the tokenizers of a run, and return a function that writes them to a directory."""
    names = run.read_config().get("tokenizers", {})
    sides = [side for side in ("joint", "source", "target") if run.tokenizer(side).name in names]
    tokenizers = {side: run.load_tokenizer(side) for side in sides}

    def write(model: BaseModel, output: Path) -> None:
        for side, tokenizer in tokenizers.items():
            path = output / RunDirectory(output).tokenizer(side).name
            tokenizer.save(path)
            if isinstance(model, Transformer) and side != "target":
                _append_eos(path)
        roles = {"pad_token": PAD_ID, "bos_token": BOS_ID, "eos_token": EOS_ID, "unk_token": UNK_ID}
        settings = {role: SPECIAL_TOKENS[index] for role, index in roles.items()}
        write_json(output / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})

    return write


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
