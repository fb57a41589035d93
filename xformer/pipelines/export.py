"""Export of training runs to the formats of other libraries."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xformer.errors import ConfigError, how_to_install
from xformer.export import export_ctranslate2, export_onnx
from xformer.families import load_pretrained, save_lora, save_pretrained
from xformer.families.checkpoint import is_public, save_with_config
from xformer.families.run_directory import RunDirectory, copy_pretrained
from xformer.generation import GenerationConfig
from xformer.generation.pretrained import GENERATION_FILE
from xformer.io import atomic_directory, atomic_write, load_arrays, read_json, write_json
from xformer.layers import lora
from xformer.models import BaseModel, ImageEncoder, Transformer, load
from xformer.pipelines.tokenizers import Tokenizers
from xformer.tokenizers import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, UNK_ID, BaseTokenizer, load_tokenizer
from xformer.tree import replace


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
        target: Name of the format: "huggingface", "peft" for the adapters of a run with LoRA, "onnx" or "ctranslate2".
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
    if (pretrained := run.pretrained_files()) is not None:
        copy_pretrained(pretrained, output)
        model_type = save_with_config(load(run.model), pretrained / "config.json", output)
    else:
        tokenizers, model = Tokenizers.load(run).by_side(), load(run.model)
        save_pretrained(model, output)
        if (path := output / GENERATION_FILE).exists():
            base = GenerationConfig().length_penalty_base  # of runs; transformers ignores it
            write_json(path, {**read_json(path, "generation settings"), "length_penalty_base": base})
        _write_tokenizers(tokenizers, model, output)
        model_type = read_json(output / "config.json", "configuration")["model_type"]
    return f"as a model of type {model_type}"


def _to_peft(directory: Path, output: Path) -> str:
    run = RunDirectory(directory)
    init = run.read_config()["recipe"].get("init", {})
    if not run.adapters.exists():
        raise ConfigError(f"{directory} has no adapters; expected a run with --lora; use --format huggingface")
    if run.has_average:
        raise ConfigError(f"the model of {directory} is an average of checkpoints, which has no adapters of its rank")
    model = lora(load(run.model), init["lora"])
    model = replace(model, {**dict(model.named_arrays()), **load_arrays(run.adapters)[0]})
    pretrained, base = run.pretrained_files(), Path(init["path"])
    if pretrained is None:
        raise ConfigError(
            f"{directory} started from {base}, which is no checkpoint that PEFT can load; use --format huggingface"
        )
    model_type = read_json(pretrained / "config.json", "configuration")["model_type"]
    is_directory = base.is_dir() and is_public(base)
    save_lora(model, output, model_type=model_type, base_model=str(base) if is_directory else None)
    name = str(base) if is_directory else f"the directory that `xformer export {base} DIR` writes"
    return f"as adapters of {name}; load them with peft.PeftModel.from_pretrained, or xformer.load_lora"


class _Source(NamedTuple):
    """A model to export, its tokenizers by side, and a function that writes them to a directory."""

    model: BaseModel
    tokenizers: dict[str, BaseTokenizer]
    write_tokenizers: Callable[[BaseModel, Path], None]


def _open(directory: Path) -> _Source:
    """Load the model and the tokenizers of a run or of a public checkpoint."""
    run = None if is_public(directory) else RunDirectory(directory)
    model: BaseModel = load_pretrained(directory) if run is None else load(run.model)
    pretrained = directory if run is None else run.pretrained_files()
    if pretrained is None:
        tokenizers = Tokenizers.load(RunDirectory(directory)).by_side()
        return _Source(model, tokenizers, functools.partial(_write_tokenizers, tokenizers))
    generation = pretrained / GENERATION_FILE
    tokenizer = None if isinstance(model, ImageEncoder) else load_tokenizer(pretrained)

    def write(model: BaseModel, output: Path) -> None:
        if generation.is_file():
            with atomic_write(output / GENERATION_FILE) as file:
                file.write(generation.read_bytes())
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
        source.model, output, source_tokens=tokens["source"], target_tokens=tokens["target"], quantization=quantization
    )
    source.write_tokenizers(source.model, output)
    return (
        f"in {quantization}; the log-probabilities of CTranslate2 differ from those of the model by "
        f"{exported.difference:.0e} on average"
    )


def _token_names(tokenizer: BaseTokenizer, size: int) -> list[str]:
    """Return the text of each token; a model may have more ids than its tokenizer."""
    count = min(size, tokenizer.vocab_size)
    return [*tokenizer.tokens(range(count)), *(f"<unused{index}>" for index in range(count, size))]


FORMATS: dict[str, Callable[..., str]] = {
    "huggingface": _to_hugging_face,
    "peft": _to_peft,
    "onnx": _to_onnx,
    "ctranslate2": _to_ctranslate2,
}


def _write_tokenizers(tokenizers: dict[str, BaseTokenizer], model: BaseModel, output: Path) -> None:
    """Write the tokenizers of a run to a directory."""
    for side, tokenizer in tokenizers.items():
        path = RunDirectory(output).tokenizer(side)
        tokenizer.save(path)
        if isinstance(model, Transformer) and side != "target":
            _append_eos(path)
    roles = {"pad_token": PAD_ID, "bos_token": BOS_ID, "eos_token": EOS_ID, "unk_token": UNK_ID}
    settings = {role: SPECIAL_TOKENS[index] for role, index in roles.items()}
    write_json(output / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})


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
