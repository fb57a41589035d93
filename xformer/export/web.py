"""Models as static pages that generate text in the browser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from importlib.resources import files
from operator import mul
from pathlib import Path
from typing import Any

from xformer.backends import Array, array_namespace
from xformer.errors import ConfigError, describe_type
from xformer.export import onnx
from xformer.export.onnx import Arrays, Graph, Input, OnnxExport
from xformer.io import StrPath, write_bytes, write_json
from xformer.models import BaseModel, LanguageModel, SpeechTransformer, Transformer
from xformer.tracing.activations import intervene, record

# Files of npm packages, and their names in the page.
_RUNTIME = {
    "onnxruntime.js": "onnxruntime-web/dist/ort.wasm.bundle.min.mjs",  # all static hosts know the type of .js
    "ort-wasm-simd-threaded.wasm": "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
    "tokenizers.js": "@huggingface/tokenizers/dist/tokenizers.min.mjs",
    "tokenizers.LICENSE": "@huggingface/tokenizers/LICENSE",
}
_MAX_TOKENS, _MAX_WEIGHTS = 512, 2**25  # of a text, and of all heads; both limit its length


def find_runtime(directory: StrPath | None = None) -> dict[str, Path]:
    """Return the files of the npm packages that a page runs on, by their names in the page.

    Args:
        directory: Directory in which the packages were installed. Default: the current one.

    Raises:
        ConfigError: If a package is missing, with the command that installs it.
    """
    modules = Path("." if directory is None else directory)
    modules = modules if modules.name == "node_modules" else modules / "node_modules"
    found = {name: modules / path for name, path in _RUNTIME.items()}
    for path in found.values():
        if not path.is_file():
            command = "npm install onnxruntime-web @huggingface/tokenizers"
            hint = "and name the directory by --runtime if it is another one"
            raise ConfigError(f"{path} is missing; run: {command}, {hint}")
    return found


def write_explorer(directory: StrPath, runtime: dict[str, Path]) -> None:
    """Write the files of a page that do not depend on the model.

    Args:
        directory: Directory of the page; created if necessary.
        runtime: Files that `find_runtime` returned.
    """
    package = files("xformer")
    contents: dict[str, Any] = {f"runtime/{name}": path for name, path in runtime.items()}
    for file in package.joinpath("serve", "static").iterdir():
        contents[file.name if file.name == "index.html" else f"static/{file.name}"] = file
    contents["static/api.js"] = package.joinpath("export", "web_api.js")  # the browser instead of a server
    for name, source in contents.items():
        write_bytes(Path(directory) / name, source.read_bytes())


def export_web(
    model: BaseModel,
    directory: StrPath,
    settings: dict[str, Any],
    runtime: dict[str, Path],
    *,
    max_length: int | None = None,
) -> OnnxExport:
    """Write a static page that generates text, and shows attention, alternatives and the states of each layer.

    Args:
        model: Language model or encoder-decoder. Weights of `model.quantize()` stay in int8.
        directory: Directory to write to; created if necessary.
        settings: Further settings of the page: special tokens, templates and defaults.
        runtime: Files that `find_runtime` returned.
        max_length: Maximum tokens of a text, which determines the size of tables of positions. Default: the number of
            learned positions, or 512, and fewer in a model with many heads.

    Raises:
        ConfigError: For a model of another class. Other errors are those of `export_onnx`.
    """
    if not isinstance(model, LanguageModel | Transformer) or isinstance(model, SpeechTransformer):
        raise ConfigError(f"model is {describe_type(model)}; a page expects a LanguageModel or a Transformer")
    c: Any = model.config
    directory, layers = Path(directory), len(_decoder(model)[1])
    if getattr(c, "length_encoding", False):
        raise ConfigError("the model has a length encoding; a page expects a model that ends outputs by itself")
    if not layers:
        raise ConfigError("the model has no layers that compute logits; a page expects at least one")
    limits = onnx.limits_of(model, max_length)
    if max_length is None:
        longest = min(limits["target"], _MAX_TOKENS, math.isqrt(_MAX_WEIGHTS // (layers * c.num_heads)))
        limits = onnx.limits_of(model, longest)
    exported = onnx.write_graphs(model, _graphs(model), directory / "model", limits)
    write_explorer(directory, runtime)
    write_json(
        directory / "model" / "settings.json",
        {
            "files": {path.name: path.stat().st_size for path in exported.files},
            "parameters": model.parameter_count(),
            "encoder_layers": len(model.encoder) if isinstance(model, Transformer) else 0,
            "decoder_layers": layers,
            "heads": c.num_heads,
            "key_value_heads": c.num_key_value_heads or c.num_heads,
            "head_dim": c.features_per_head,
            "d_model": c.d_model,
            "max_length": limits["target"],
            **settings,
        },
    )
    return exported


def _decoder(model: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the layers that compute the logits, and the name of their field."""
    name = "decoder" if isinstance(model, Transformer) else "layers"
    return name, getattr(model, name)


def _graphs(model: BaseModel) -> dict[str, Graph]:
    """Return the graphs of a page: those of the ONNX files of a loop, with attention weights and states."""
    graphs = onnx.graphs(model)
    step = graphs["step.onnx"].inputs | {"lens": Input(("batch", "rows", model.config.d_model))}
    found = {"step.onnx": Graph(step | _switches(model, _decoder(model)[1]), _step)}
    if isinstance(model, Transformer):
        encoder = graphs["encoder.onnx"]
        if model.encoder:
            encoder = Graph(encoder.inputs | _switches(model, model.encoder), _encoder(encoder.function))
        found["encoder.onnx"] = encoder
    return found


def _switches(model: Any, layers: tuple[Any, ...]) -> dict[str, Input]:
    """Return the input with a factor of each head, and after the heads one of the output, by layer and part."""
    return {"switches": Input((len(layers), len(_parts(layers[0])), model.config.num_heads + 1), is_switch=True)}


def _parts(layer: Any) -> list[str]:
    return [part for part in ("self_attention", "cross_attention", "feed_forward") if hasattr(layer, part)]


def _switched(model: Any, name: str, switches: Array) -> AbstractContextManager[None]:
    """Multiply the heads and the outputs of the parts of layers by `switches`: 0 leaves one out, 1 keeps it."""
    changes = {}
    for i, layer in enumerate(getattr(model, name)):
        for j, part in enumerate(_parts(layer)):
            heads, output = switches[i, j, :-1, None, None], switches[i, j, -1]
            changes[f"{name}.{i}.{part}.output"] = partial(mul, output)
            if part != "feed_forward":
                changes[f"{name}.{i}.{part}.heads"] = partial(mul, heads)
    return intervene(model, changes)


def _encoder(function: Callable[..., Arrays]) -> Callable[..., Arrays]:
    def encode(model: Transformer, switches: Array, **inputs: Any) -> Arrays:
        with _switched(model, "encoder", switches), record(model, "encoder.*.self_attention.weights") as found:
            outputs = function(model, **inputs)
        return outputs | {"encoder_attention": _stack(found.values())}

    return encode


def _step(model: Any, tokens: Array, lens: Array, switches: Array, **inputs: Any) -> Arrays:
    """Return the outputs of a step with attention weights (layers, batch, heads, queries, keys) and states of layers.

    The states are those of the last token before the first layer and after each one, (batch, 1 + layers, d_model).
    Passed as `lens` to another step, they become logits, (batch, rows, vocabulary): the logit lens (nostalgebraist,
    2020). The norms are those of the outputs of the parts of each layer, (batch, layers, parts).
    """
    name, layers = _decoder(model)
    cache, parts = onnx.cache_of(model, inputs), _parts(layers[0])
    names = [f"{name}.{i}.{part}.output" for i in range(len(layers)) for part in parts]
    names += [f"{name}.*attention.weights", f"{name}.0.residual_in", f"{name}.*.residual_out"]
    with _switched(model, name, switches), record(model, names) as found:
        outputs = onnx.step(model, tokens, cache)
    xp = array_namespace(tokens)
    for part in parts[:-1]:
        weights = (x for key, x in found.items() if key.endswith(f"{part}.weights"))
        outputs["cross_attention" if part == "cross_attention" else "attention"] = _stack(weights)
    states = [f"{name}.0.residual_in", *(f"{name}.{i}.residual_out" for i in range(len(layers)))]
    outputs["states"] = xp.concat([found[each][:, -1:, :] for each in states], axis=1)
    norms = [xp.sum(found[each][:, -1:, :] ** 2, axis=-1) ** 0.5 for each in names[: len(layers) * len(parts)]]
    outputs["norms"] = xp.reshape(xp.concat(norms, axis=1), (tokens.shape[0], len(layers), len(parts)))
    outputs["lens_logits"] = model.readout(lens)
    return outputs


def _stack(arrays: Iterable[Array]) -> Array:
    first, *others = arrays
    return array_namespace(first).stack([first, *others], axis=0)
