"""Export of training runs to the formats of other libraries."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xformer.errors import ConfigError, check_choice, describe_type, how_to_install
from xformer.export import OnnxExport, export_ctranslate2, export_onnx, export_web, find_runtime
from xformer.export.gguf import export_gguf, export_gguf_lora
from xformer.families import load_lora, load_pretrained, save_lora, save_pretrained
from xformer.families.checkpoint import Progress, is_public, open_checkpoint, save_with_config
from xformer.families.gguf_file import find_gguf
from xformer.families.peft import ADAPTER_CONFIG
from xformer.families.run_directory import RunDirectory, copy_pretrained
from xformer.generation import GenerationConfig
from xformer.generation.pretrained import GENERATION_FILE
from xformer.io import StrPath, atomic_directory, check_no_overwrite, load_arrays, read_json, write_bytes, write_json
from xformer.layers import lora
from xformer.models import BaseModel, ImageEncoder, LanguageModel, Transformer, load
from xformer.pipelines.loading import pipeline_class
from xformer.pipelines.seq2seq import TextToText
from xformer.pipelines.text_generation import DEFAULT_SAMPLING, TextGenerator
from xformer.pipelines.tokenizers import Tokenizers
from xformer.text.extras import require
from xformer.tokenizers import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, UNK_ID, BaseTokenizer, load_tokenizer
from xformer.tokenizers.pretrained import read_inner
from xformer.tree import replace

_MARK = "\ue000"  # a character for private use, in place of the text of a chat


def export_run(
    directory: StrPath, output: StrPath, target: str = "huggingface", progress: Progress | None = None, **options: Any
) -> str:
    """Write the best model of a run, and its tokenizer, in the format of another library.

    Args:
        directory: Directory of the run; for all formats but "peft" and "gguf-lora" also a public checkpoint; for "gguf"
            and "gguf-lora" also a directory of PEFT, whose adapters are written.
        output: Directory to write, new or empty; a file for "gguf" and "gguf-lora".
        target: Name of the format: "huggingface", "peft" and "gguf-lora" for the adapters of a run with LoRA, "gguf",
            "onnx", "ctranslate2" or "web".
        progress: As for `export_gguf`; other formats show none.
        **options: Those of the format, if they are not None. quantization is the type of the weights: for "ctranslate2"
            see `export_ctranslate2`; for "gguf" see `export_gguf`; for "onnx" and "web" float32 or int8, which is the
            default of "web". runtime is the directory in which the npm packages of "web" are installed, see
            `export.find_runtime`, and max_length the maximum of tokens of a text in its page, see `export_web`. base is
            the checkpoint to which the adapters of PEFT belong; default what adapter_config.json names.

    Returns:
        A phrase about the result, e.g. "as a model of type pegasus".

    Raises:
        XformerError: As `save_pretrained`, `export_onnx`, `export_ctranslate2` and `export_web`, and for damaged runs.
    """
    check_choice("the format", target, FORMATS)
    asked = target
    options = {name: value for name, value in options.items() if value is not None}
    if target == "gguf" and ("base" in options or (Path(directory) / ADAPTER_CONFIG).is_file()):
        target = "gguf-lora"
    known = inspect.signature(FORMATS[target]).parameters
    if unknown := options.keys() - known:
        name = min(unknown)
        reason = f"; {directory} has adapters of PEFT" if target != asked else ""
        raise ConfigError(f"{name} is {str(options[name])!r}; the format {target} expects none{reason}")
    is_file = target.startswith("gguf")
    if is_file != (Path(output).suffix == ".gguf"):
        expected = "a file that ends in .gguf" if is_file else "a directory, or the format gguf"
        raise ConfigError(f"the output is {output}; expected the path of {expected}")
    if is_file:
        check_no_overwrite(output, RunDirectory(directory).files(), "the output")
        return FORMATS[target](Path(directory), Path(output), **options, progress=progress)
    with atomic_directory(output) as temporary:
        return FORMATS[target](Path(directory), temporary, **options)


def _to_hugging_face(directory: Path, output: Path) -> str:
    run = None if is_public(directory) else RunDirectory(directory)
    if run is not None and (pretrained := run.pretrained_files()) is not None:
        copy_pretrained(pretrained, output)
        save_with_config(load(run.model), pretrained / "config.json", output)
    else:
        model, _, write_tokenizers = _open(directory)
        if not isinstance(model, LanguageModel | Transformer):
            raise ConfigError(f"{directory} has {describe_type(model)}; expected a model that generates text")
        save_pretrained(model, output)
        if run is not None and (path := output / GENERATION_FILE).exists():
            # transformers ignores it
            own: dict[str, Any] = {"length_penalty_base": GenerationConfig().length_penalty_base}
            if isinstance(model, LanguageModel):
                own |= {"do_sample": True, "temperature": DEFAULT_SAMPLING.temperature, "top_k": DEFAULT_SAMPLING.top_k}
            write_json(path, {**read_json(path, "generation settings"), **own})
        write_tokenizers(model, output)
    return f"as a model of type {read_json(output / 'config.json', 'configuration')['model_type']}"


def _to_peft(directory: Path, output: Path) -> str:
    run = RunDirectory(directory)
    model = _adapted(directory)
    pretrained, base = run.pretrained_files(), Path(run.read_config()["recipe"]["init"]["path"])
    if pretrained is None:
        raise ConfigError(
            f"{directory} started from {base}, which is no checkpoint that PEFT can load; use --format huggingface"
        )
    model_type = read_json(pretrained / "config.json", "configuration")["model_type"]
    is_directory = base.is_dir() and is_public(base)
    save_lora(model, output, model_type=model_type, base_model=str(base) if is_directory else None)
    name = str(base) if is_directory else f"the directory that `xformer export {base} DIR` writes"
    return f"as adapters of {name}; load them with peft.PeftModel.from_pretrained, or xformer.load_lora"


def _adapted(directory: Path, base: Any = None) -> BaseModel:
    """Return the model of a run, or the base of a directory of PEFT without its weights, with adapters."""
    if (config := directory / ADAPTER_CONFIG).is_file():
        name = base or read_json(config, "adapter configuration").get("base_model_name_or_path")
        if not Path(str(name)).exists():
            raise ConfigError(f"the base model of {directory} is {name}; expected the path of a checkpoint (--base)")
        return load_lora(open_checkpoint(Path(str(name))).model, directory)
    if base is not None:
        raise ConfigError(f"base is {str(base)!r}; {directory} expects none, as it has no {ADAPTER_CONFIG}")
    run = RunDirectory(directory)
    init = run.read_config()["recipe"].get("init", {})
    if not run.adapters.exists():
        raise ConfigError(f"{run.path} has no adapters; expected a run with --lora; use --format huggingface or gguf")
    if run.has_average:
        raise ConfigError(f"the model of {run.path} is an average of checkpoints, which has no adapters of its rank")
    model, arrays = lora(load(run.model), init["lora"]), load_arrays(run.adapters)[0]
    if other := [name for name in arrays if ".lora_" not in name]:
        raise ConfigError(f"{run.path} trained {other[0]}, too, which is no adapter; use --format huggingface")
    return replace(model, {**dict(model.named_arrays()), **arrays})


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
            write_bytes(output / GENERATION_FILE, generation.read_bytes())
        if tokenizer is not None:
            tokenizer.save(output)

    return _Source(model, {} if tokenizer is None else {"joint": tokenizer}, write)


def _to_onnx(directory: Path, output: Path, quantization: str = "float32") -> str:
    quantize = _quantizes(quantization)
    source = _open(directory)
    exported = export_onnx(source.model.quantize() if quantize else source.model, output)
    source.write_tokenizers(source.model, output)
    return _described(exported)


def _quantizes(quantization: str) -> bool:
    check_choice("quantization", quantization, ("float32", "int8"))
    return quantization == "int8"


def _described(exported: OnnxExport) -> str:
    names = ", ".join(path.name for path in exported.files)
    if exported.difference is None:
        return f"as {names}; they were not verified: onnxruntime is not installed, {how_to_install('onnxruntime')}"
    return f"as {names}; onnxruntime computes the same, with a relative difference of at most {exported.difference:.0e}"


def _to_web(
    directory: Path, output: Path, quantization: str = "int8", runtime: Any = None, max_length: int | None = None
) -> str:
    quantize, found, pipeline_type = _quantizes(quantization), find_runtime(runtime), pipeline_class(directory)
    if not issubclass(pipeline_type, TextToText | TextGenerator):
        raise ConfigError(f"{directory} is for {pipeline_type.__name__}; a page expects a model that generates text")
    pipeline = pipeline_type.from_pretrained(directory)
    tokenizers = {"source": pipeline.source_tokenizer.to_json(), "target": pipeline.target_tokenizer.to_json()}
    run = {} if is_public(directory) else RunDirectory(directory).read_config()
    example = run.get("example") or ("Once upon a time" if isinstance(pipeline, TextGenerator) else "")
    settings = {"name": directory.resolve().stem, "example": example, **_settings(pipeline)}
    model = pipeline.model.unpack()
    model = model.quantize() if quantize else model
    exported = export_web(model, output, settings, found, max_length=max_length)
    for side, content in tokenizers.items():
        write_bytes(output / "model" / f"{side}.json", content.encode())
    return f"{_described(exported)}; serve the page, e.g. with python -m http.server"


def _settings(pipeline: TextToText | TextGenerator) -> dict[str, Any]:
    """Return settings with which a page encodes texts and searches as the pipeline does."""
    c, source, target = pipeline.model.config, pipeline.source_tokenizer, pipeline.target_tokenizer
    if source.sep_id is not None and not source.adds_special_tokens:
        raise ConfigError("the model expects sentences that are separated by <sep>; a page encodes whole texts only")
    config, ends, forbidden = GenerationConfig(), {c.eos_id}, set(c.suppressed_ids)
    templates, start, suffix = {"text": ["", ""]}, [], []
    if isinstance(pipeline, TextToText):
        config = pipeline.defaults or config
        forced = pipeline.tokenizers.forced_bos_id
        start, suffix = [c.bos_id, *([] if forced is None else [forced])], pipeline.suffix
        templates["text"][0] = pipeline.tokenizers.instruction
    else:
        config = pipeline.resolve_config()
        if pipeline.defaults is None:  # special tokens are never generated
            ends, forbidden = set(), set(range(len(SPECIAL_TOKENS)))
        if pipeline.has_chat:
            chat = source.apply_chat_template([{"role": "user", "content": _MARK}])
            templates["chat"] = list(chat.partition(_MARK)[::2])
    return {
        "task": pipeline.task,
        "templates": templates,
        "adds_special_tokens": source.adds_special_tokens,
        "start": start,
        "suffix": suffix,
        "ends": sorted({*ends, *config.stop_token_ids}),
        "forbidden": sorted({*forbidden, *config.suppress_tokens, *target.suppressed_ids}),
        "max_new_tokens": config.max_new_tokens or pipeline.default_max_length,
    }


def _to_ctranslate2(directory: Path, output: Path, quantization: str = "float32") -> str:
    source = _open(directory)
    c: Any = source.model.config
    tokens: dict[str, Any] = {}
    for side in ("source", "target"):
        tokenizer = source.tokenizers.get(side) or source.tokenizers["joint"]
        size = getattr(c, f"{side}_vocab_size", getattr(c, "vocab_size", 0))
        known = min(size, tokenizer.vocab_size)  # a model may have more ids than its tokenizer
        unused = (f"<unused{index}>" for index in range(known, size))
        tokens[f"{side}_tokens"] = [*tokenizer.tokens(range(known)), *unused]
    exported = export_ctranslate2(source.model, output, quantization=quantization, **tokens)
    source.write_tokenizers(source.model, output)
    return (
        f"in {quantization}; the log-probabilities of CTranslate2 differ from those of the model by "
        f"{exported.difference:.0e} on average"
    )


def _to_gguf(directory: Path, output: Path, quantization: str | None = None, progress: Progress | None = None) -> str:
    init = {} if is_public(directory) else RunDirectory(directory).read_config()["recipe"].get("init", {})
    start = find_gguf(Path(init.get("path", directory)))
    if is_public(directory):
        if start is not None:
            return export_gguf(None, output, quantization=quantization, source=start, progress=progress)
        codes = {"float16": "F16", "bfloat16": "BF16"}
        quantization = quantization or codes.get(open_checkpoint(directory).tensors.dtype())
    model, tokenizers, _ = _open(directory)
    options: dict[str, Any] = {"tokenizer": tokenizers.get("joint"), "source": start, "progress": progress}
    types = export_gguf(model, output, quantization=quantization, **options)
    is_lost = init.get("lora") and not quantization and any(f"Q{bits}_" in types for bits in range(2, 7))
    return types + "; these round away much of what adapters add: --quantization Q8_0 keeps it" * bool(is_lost)


def _to_gguf_lora(directory: Path, output: Path, base: Any = None, progress: Progress | None = None) -> str:
    return export_gguf_lora(_adapted(directory, base), output)


FORMATS: dict[str, Callable[..., str]] = {
    "huggingface": _to_hugging_face,
    "peft": _to_peft,
    "gguf": _to_gguf,
    "gguf-lora": _to_gguf_lora,
    "onnx": _to_onnx,
    "ctranslate2": _to_ctranslate2,
    "web": _to_web,
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
    inner, eos = read_inner(path), SPECIAL_TOKENS[EOS_ID]
    inner.post_processor = require("tokenizers").processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A $B {eos}", special_tokens=[(eos, EOS_ID)]
    )
    write_bytes(path, inner.to_str().encode())
