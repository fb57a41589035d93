"""Damaged files: readers return or raise an error of one line, in bounded time and memory, and write nothing."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xformer as xf
from tests.cli.conftest import RECIPE
from tests.families import test_peft
from tests.families.test_checkpoint import write_mxfp4
from tests.families.test_gguf import convert, write_gguf
from tests.pipelines import test_zero_shot_images
from tests.stress.conftest import accepts_or_refuses, byte_mutations, contents, json_mutations
from xformer.cli.main import exit_code
from xformer.data.audio import read_wav
from xformer.data.demo_tasks import numbers_task
from xformer.io import load_arrays, save_arrays
from xformer.pipelines import ChunkOutput, process_corpus
from xformer.pipelines.loading import pipeline_class
from xformer.runs.recipe import read_tables
from xformer.text.corpus import read_lines, read_parallel, read_text
from xformer.tokenizers import load_tokenizer
from xformer.training.checkpoint import TrainingFiles

TESTS = Path(__file__).parents[1]
CHECKPOINTS = TESTS / "families" / "data"
TOKENIZERS = TESTS / "tokenizers" / "data"


class Format(NamedTuple):
    """Files that `read` reads; `make` writes valid ones into a new directory."""

    make: Callable[[Path], Any]
    read: Callable[[Path], Any]
    files: tuple[str, ...] = ()


def copy_of(source: Path, *names: str) -> Callable[[Path], None]:
    """Return a function that copies these files, or all of them."""

    def make(directory: Path) -> None:
        for name in names or [path.name for path in source.iterdir() if path.is_file()]:
            shutil.copy(source / name, directory)

    return make


def make_shards(directory: Path) -> None:
    copy_of(CHECKPOINTS / "gpt2", "config.json")(directory)
    tensors = load_arrays(CHECKPOINTS / "gpt2" / "model.safetensors")[0]
    names, index = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_arrays(directory / file, {name: tensors[name] for name in part}, {})
        index |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def make_run(directory: Path) -> None:
    task = numbers_task(num_train=120, num_valid=4, num_test=4, largest=999)
    files = {}
    for name, corpus in (("train", task.train), ("valid", task.valid)):
        for side in ("source", "target"):
            files[f"{name}-{side}"] = directory / f"{name}.{side}"
            files[f"{name}-{side}"].write_text("\n".join(getattr(corpus, side)) + "\n", encoding="utf-8")
    options = {
        "--source": files["train-source"],
        "--target": files["train-target"],
        "--valid-source": files["valid-source"],
        "--valid-target": files["valid-target"],
    }
    recipe = directory / "recipe.toml"
    recipe.write_text(RECIPE)
    out = directory / "run"
    arguments = [str(value) for option in options.items() for value in option]
    assert exit_code(["train", *arguments, "--recipe", str(recipe), "--out", str(out), "--seed", "1"]) == 0


def make_pair(directory: Path) -> None:
    for name in ("a", "b"):
        (directory / name).write_text("Ein Satz.\nZwei Sätze, größer.\n\n 日本語 \n", encoding="utf-8")


def make_wav(directory: Path) -> None:
    import wave

    with wave.open(str(directory / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(np.arange(400, dtype="<i2").tobytes())


def make_quantized(directory: Path) -> None:
    values = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    values |= {"num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 8, "rms_norm_eps": 1e-6}
    values |= {"vocab_size": 11, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    values |= {"bos_token_id": 0, "eos_token_id": 1}
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (11, 32), "model.norm.weight": (32,), "lm_head.weight": (11, 32)}
    shapes |= {f"{layer}self_attn.{name}_proj.weight": (32, 32) for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj.weight": (32, 32) for name in ("gate", "up", "down")}
    shapes |= {f"{layer}{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    write_gguf(directory / "model.gguf", values, tensors, kind=gguf.GGMLQuantizationType.Q8_0)


def make_gguf_tokenizer(directory: Path) -> None:
    writer = gguf.GGUFWriter(directory / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*"abcdefgh", "ab", "abc", "<|endoftext|>"])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_token_types([1] * 10 + [3])
    writer.add_bos_token_id(10)
    writer.add_eos_token_id(10)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def embed(lines: list[str], first_index: int) -> ChunkOutput:
    """Return an array of a row per line, which `process_corpus` writes as a part."""
    file = io.BytesIO()
    np.save(file, np.full((len(lines), 3), first_index, np.float32))
    return ChunkOutput(file.getvalue(), {"lines": len(lines)})


def read_corpus(directory: Path) -> None:
    """Continue a run that is complete, and merge its parts elsewhere."""
    with ThreadPoolExecutor(1) as executor, tempfile.TemporaryDirectory() as merged:
        arguments = {"executor": executor, "settings": {"dim": 3}, "chunk_lines": 2, "suffix": ".npy"}
        process_corpus(embed, directory / "text", directory / "parts", **arguments).merge_arrays(f"{merged}/out.npy")


def make_corpus(directory: Path) -> None:
    (directory / "text").write_text("one\ntwo\nthree\nfour\nfive\n")
    read_corpus(directory)


LLAMA = xf.load_pretrained(CHECKPOINTS / "llama")


def checkpoint(name: str) -> Format:
    return Format(copy_of(CHECKPOINTS / name, "config.json", "model.safetensors"), xf.load_pretrained)


FORMATS = {
    **{f"checkpoint-{name}": checkpoint(name) for name in ("bart", "bert_classifier", "gemma3", "gpt2", "llama")},
    **{f"checkpoint-{name}": checkpoint(name) for name in ("llama_yarn", "marian", "t5", "vit", "whisper")},
    **{f"checkpoint-{name}": checkpoint(name) for name in ("blenderbot", "clip", "t5gemma", "umt5")},
    "mxfp4": Format(write_mxfp4, xf.load_pretrained),
    "dora": Format(
        lambda path: test_peft.write("llama", path, use_dora=True),
        lambda path: xf.load_lora(LLAMA, path / "adapters"),
        ("adapters/adapter_config.json", "adapters/adapter_model.safetensors"),
    ),
    "zero-shot": Format(
        lambda path: test_zero_shot_images.write_checkpoint("clip", path),
        lambda path: xf.ZeroShotImageClassifier.from_pretrained(path)([np.zeros((9, 9), np.uint8)], ["cat"]),
        ("config.json", "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json"),
    ),
    "shards": Format(make_shards, xf.load_pretrained),
    **{
        f"tokenizer-{path.name}": Format(copy_of(path), load_tokenizer)
        for path in sorted(TOKENIZERS.iterdir())
        if path.is_dir()
    },
    "gguf": Format(
        lambda path: convert("llama", path / "model.gguf"), lambda path: xf.load_pretrained(path / "model.gguf")
    ),
    "gguf-quantized": Format(make_quantized, lambda path: xf.load_pretrained(path / "model.gguf")),
    "gguf-tokenizer": Format(make_gguf_tokenizer, lambda path: load_tokenizer(path / "model.gguf")),
    "run": Format(
        make_run,
        lambda path: xf.Translator.from_pretrained(path / "run"),
        ("run/config.json", "run/tokenizer.json", "run/model.safetensors"),
    ),
    "run-task": Format(make_run, lambda path: pipeline_class(path / "run"), ("run/config.json",)),
    "log": Format(make_run, lambda path: TrainingFiles(path / "run").read_log(), ("run/log.jsonl",)),
    "recipe": Format(
        lambda path: (path / "recipe.toml").write_text(RECIPE), lambda path: read_tables(path / "recipe.toml")
    ),
    "corpus": Format(
        make_corpus, read_corpus, ("parts/manifest.json", "parts/log.jsonl", "parts/part-00000001.npy", "text")
    ),
    "lines": Format(make_pair, lambda path: read_lines(path / "a")),
    "text": Format(make_pair, lambda path: read_text(path / "a")),
    "parallel": Format(make_pair, lambda path: read_parallel(path / "a", path / "b")),
    "wav": Format(make_wav, lambda path: read_wav(path / "a.wav")),
}


@pytest.fixture(scope="session", params=list(FORMATS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Format]:
    """A directory with valid files of one format."""
    path = tmp_path_factory.mktemp(request.param)
    form = FORMATS[request.param]
    form.make(path)
    form.read(path)  # the undamaged files are accepted
    return path, form


@given(data=st.data())
def test_damaged_files_are_read_or_refused_in_one_line(directory, data):
    path, form = directory
    names = form.files or tuple(sorted(name for name in contents(path) if (path / name).is_file()))
    name = data.draw(st.sampled_from(names))
    original, whole = (path / name).read_bytes(), contents(path)
    mutations = byte_mutations(original)
    if name.endswith(".json"):
        mutations = json_mutations(json.loads(original)) | mutations
    (path / name).write_bytes(data.draw(mutations))
    before = contents(path)
    try:
        accepts_or_refuses(lambda: form.read(path))
        # A corpus run computes parts again whose sizes are not those of its log, and appends to the log.
        after, log = contents(path), {"parts/log.jsonl": None}
        assert after == before or after | log == whole | log
    finally:
        (path / name).write_bytes(original)
