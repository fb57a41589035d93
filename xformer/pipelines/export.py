"""Export of training runs to the formats of other libraries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xformer.errors import ConfigError, how_to_install
from xformer.export import export_ctranslate2, export_onnx
from xformer.families import load_pretrained, save_pretrained
from xformer.families.checkpoint import is_public, save_with_config
from xformer.families.run_directory import RunDirectory, copy_pretrained
from xformer.generation import GenerationConfig
from xformer.generation.pretrained import GENERATION_FILE
from xformer.io import atomic_directory, atomic_write, read_json, write_json
from xformer.models import BaseModel, ImageEncoder, Transformer, load
from xformer.tokenizers import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    UNK_ID,
    PretrainedTokenizer,
    Tokenizer,
    load_tokenizer,
)


def export_run(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    target: str = "huggingface",
    *,
    quantization: str | None = None,
) -> str:
    """Write the best model of a run, and its tokenizer, in the format of another library.

    Args:
        directory: Directory of the run; for "onnx" and "ctranslate2" also a public checkpoint.
        output: Directory to write; new or empty.
        target: Name of the format: "huggingface", "onnx" or "ctranslate2".
        quantization: Type of the weights, for "ctranslate2"; see `export_ctranslate2`.

    Returns:
        A phrase about the result, e.g. "as a model of type pegasus".

    Raises:
        XformerError: As `save_pretrained`, `export_onnx` and `export_ctranslate2`, and for damaged runs.
    """
    if target not in FORMATS:
        raise ConfigError(f"the format is {target!r}; expected one of {', '.join(FORMATS)}")
    if quantization is not None and target != "ctranslate2":
        raise ConfigError(f"quantization is {quantization!r}; the format {target} expects none")
    options = {} if quantization is None else {"quantization": quantization}
    with atomic_directory(output) as temporary:
        return FORMATS[target](Path(directory), temporary, **options)


def _to_hugging_face(directory: Path, output: Path) -> str:
    run = RunDirectory(directory)
    pretrained, write_tokenizers = run.pretrained_files(), _tokenizer_writer(run)
    model = load(run.model)
    if pretrained is not None:
        copy_pretrained(pretrained, output)
        model_type = save_with_config(model, pretrained / "config.json", output)
    else:
        save_pretrained(model, output)
        if (path := output / GENERATION_FILE).exists():
            base = GenerationConfig().length_penalty_base  # of runs; transformers ignores it
            write_json(path, {**read_json(path, "generation settings"), "length_penalty_base": base})
        write_tokenizers(model, output)
        model_type = read_json(output / "config.json", "configuration")["model_type"]
    return f"as a model of type {model_type}"


class _Source(NamedTuple):
    """A model to export, its tokenizers by side, and a function that writes them to a directory."""

    model: BaseModel
    tokenizers: dict[str, Tokenizer | PretrainedTokenizer]
    write_tokenizers: Callable[[BaseModel, Path], None]


def _open(directory: Path) -> _Source:
    """Load the model and the tokenizers of a run or of a public checkpoint."""
    pretrained: Path | None = directory
    model: BaseModel
    if is_public(directory):
        model = load_pretrained(directory)
    else:
        run = RunDirectory(directory)
        pretrained, write_tokenizers = run.pretrained_files(), _tokenizer_writer(run)
        model = load(run.model)
    if pretrained is None:
        return _Source(model, {**_tokenizers(run)}, write_tokenizers)
    tokenizer = None if isinstance(model, ImageEncoder) else load_tokenizer(pretrained)

    def write(model: BaseModel, output: Path) -> None:
        if (pretrained / GENERATION_FILE).is_file():
            with atomic_write(output / GENERATION_FILE) as file:
                file.write((pretrained / GENERATION_FILE).read_bytes())
        if tokenizer is not None:
            tokenizer.save(output)

    return _Source(model, {} if tokenizer is None else {"joint": tokenizer}, write)


def _to_onnx(directory: Path, output: Path) -> str:
    source = _open(directory)
    exported = export_onnx(source.model, output)
    source.write_tokenizers(source.model, output)
    names = ", ".join(path.name for path in exported.files)
    if exported.difference is None:
        return f"as {names}; they were not verified: onnxruntime is not installed, {how_to_install('onnxruntime')}"
    return f"as {names}; onnxruntime computes the same, with a relative difference of at most {exported.difference:.0e}"


def _to_ctranslate2(directory: Path, output: Path, quantization: str = "float32") -> str:
    source = _open(directory)
    c: Any = source.model.config
    sizes = {side: getattr(c, f"{side}_vocab_size", getattr(c, "vocab_size", 0)) for side in ("source", "target")}
    tokens = {
        side: _token_names(source.tokenizers.get(side) or source.tokenizers["joint"], size)
        for side, size in sizes.items()
    }
    exported = export_ctranslate2(
        source.model,
        output,
        source_tokens=tokens["source"],
        target_tokens=tokens["target"],
        quantization=quantization,
    )
    source.write_tokenizers(source.model, output)
    return (
        f"in {quantization}; the log-probabilities of CTranslate2 differ from those of the model by "
        f"{exported.difference:.0e} on average"
    )


def _token_names(tokenizer: Tokenizer | PretrainedTokenizer, size: int) -> list[str]:
    """Return the text of each token; a model may have more ids than its tokenizer."""
    count = min(size, tokenizer.vocab_size)
    return [*tokenizer.tokens(range(count)), *(f"<unused{index}>" for index in range(count, size))]


FORMATS: dict[str, Callable[..., str]] = {
    "huggingface": _to_hugging_face,
    "onnx": _to_onnx,
    "ctranslate2": _to_ctranslate2,
}


def _tokenizers(run: RunDirectory) -> dict[str, Tokenizer]:
    """Return the tokenizers of a run by side."""
    names = run.read_config().get("tokenizers", {})
    sides = [side for side in ("joint", "source", "target") if run.tokenizer(side).name in names]
    return {side: run.load_tokenizer(side) for side in sides}


def _tokenizer_writer(run: RunDirectory) -> Callable[[BaseModel, Path], None]:
    """Check the tokenizers of a run, and return a function that writes them to a directory."""
    tokenizers = _tokenizers(run)

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
