"""The pipeline that a checkpoint or a run is for, and the digests of its files."""

from __future__ import annotations

from pathlib import Path

from xformer.errors import CheckpointError, describe_type
from xformer.families.checkpoint import is_public, open_checkpoint
from xformer.families.gguf_file import find_gguf
from xformer.families.run_directory import RunDirectory, sha256
from xformer.io import StrPath, read_json
from xformer.models import Encoder, LanguageModel, SpeechTransformer, Transformer
from xformer.pipelines.base import Pipeline
from xformer.pipelines.encoders import Classifier, Embedder, Reranker
from xformer.pipelines.seq2seq import Summarizer, Translator
from xformer.pipelines.text_generation import TextGenerator
from xformer.pipelines.transcription import Transcriber

_TASKS: dict[str, type[Pipeline]] = {each.task: each for each in (Translator, Summarizer, TextGenerator, Classifier)}
_TASKS["chat"] = TextGenerator
_PUBLIC_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "vocab.txt", "merges.txt", "*_*/config.json")


def pipeline_class(directory: StrPath) -> type[Pipeline]:
    """Return the class of pipelines that a model is for, without reading its weights.

    A public encoder-decoder is for a `Summarizer` if its config.json has settings for summarization only, else for a
    `Translator`. An encoder with one label is for a `Reranker`, one with several labels for a `Classifier`, and one
    without labels for an `Embedder`; so is a language model with the files of sentence-transformers.

    Args:
        directory: Directory of a run or public checkpoint, or a GGUF file.

    Raises:
        CheckpointError: If there is no checkpoint, it is damaged, or no pipeline of texts or speech uses its model.
    """
    path = Path(directory)
    if not is_public(path):
        return _TASKS[RunDirectory(path).read_config().get("task", "translation")]
    model = open_checkpoint(path).model
    if type(model) is LanguageModel:
        return Embedder if (path / "modules.json").exists() else TextGenerator
    if type(model) is Encoder:
        count = model.config.num_labels
        return Reranker if count == 1 else Classifier if count else Embedder
    if type(model) is Transformer:
        tasks = read_json(path / "config.json", "configuration").get("task_specific_params") or {}
        is_summarizer = any("summarization" in name for name in tasks) and not any("trans" in name for name in tasks)
        return Summarizer if is_summarizer else Translator
    if type(model) is SpeechTransformer:
        return Transcriber
    raise CheckpointError(f"{path} has {describe_type(model)}; expected a model of texts or speech")


def model_digests(directory: StrPath) -> dict[str, str]:
    """Return the SHA-256 of each file that determines the outputs of a model: weights, configuration and tokenizer.

    Args:
        directory: Directory of a run or public checkpoint, or a GGUF file.

    Raises:
        CheckpointError: If there is no checkpoint, or a file cannot be read.
    """
    path = Path(directory)
    if gguf := find_gguf(path):
        return {gguf.name: sha256(gguf)}
    run = RunDirectory(path)
    tokenizers = [run.tokenizer(side) for side in ("joint", "source", "target")]
    files = [run.config, run.model, *tokenizers, *run.pretrained.rglob("*")]
    if is_public(path):
        files = [file for pattern in _PUBLIC_FILES for file in path.glob(pattern)]
    return {file.relative_to(path).as_posix(): sha256(file) for file in sorted(files) if file.is_file()}
