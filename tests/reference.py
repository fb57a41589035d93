"""Small models to test with, weights copied from torch modules, and a stricter `pytest.raises`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.conftest import LIBRARIES
from xformer import (
    Initializer,
    LanguageModel,
    LanguageModelConfig,
    Transformer,
    TransformerConfig,
    array_namespace,
    native,
)
from xformer.backends import from_host
from xformer.models import ModelConfig
from xformer.models.base import LayerFactory
from xformer.ops import cross_entropy
from xformer.tree import map_arrays

# For tests with many shapes, which jax would compile one by one.
without_jax = pytest.mark.parametrize(
    "xp", ["numpy", "torch", pytest.param("array_api_strict", id="strict", marks=pytest.mark.strict)], indirect=True
)


def few_on_jax(names: str, cases: Iterable[tuple[Any, ...]], on_jax: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrize `xp` and other names: by all cases, except on JAX, which compiles every operation for every shape."""
    libraries = [library for library in LIBRARIES if library.values != ("jax",)]
    parameters = [pytest.param(*library.values, *case, marks=library.marks) for case in cases for library in libraries]
    parameters += [pytest.param("jax", *case) for case in on_jax]
    return pytest.mark.parametrize(f"xp,{names}", parameters, indirect=["xp"])


def for_each(names: str, rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for every row of a table, as one test: for tables of many short cases.

    Rows are as in `pytest.mark.parametrize`. A failure has a note with its row; rows that skip are left out.
    """
    keys, table = [name.strip() for name in names.split(",")], list(rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            skipped = []
            for number, row in enumerate(table):
                try:
                    test(**fixtures, **dict(zip(keys, row if len(keys) > 1 else (row,), strict=True)))
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except BaseException as error:
                    error.add_note(f"row {number}: {names} = {row!r}")
                    raise
            if len(skipped) == len(table):
                raise skipped[0] if skipped else pytest.skip.Exception("the table has no rows here")

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


SMALL = {
    "source_vocab_size": 11,
    "target_vocab_size": 13,
    "d_model": 8,
    "num_heads": 2,
    "d_ff": 12,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
}

# Every positional encoding, combined with the other options of a model.
KINDS: dict[str, dict[str, Any]] = {
    "sinusoidal": {"length_encoding": True},
    "post-norm": {"norm_position": "post", "embedding_norm": True},
    "learned": {"positions": "learned", "max_positions": 16, "scale_positions": True, "tie_output": False},
    "rotary": {"positions": "rotary", "num_heads": 4, "num_key_value_heads": 2, "norm": "rms", "activation": "swiglu"},
    "alibi": {"positions": "alibi", "num_key_value_heads": 1, "activation": "geglu"},
    "relative": {"positions": "relative", "norm": "max_scaled", "rematerialize": True},
    "none, window": {"positions": "none", "window": 3, "output_bias": True},
    "copy": {"share_embeddings": True, "source_vocab_size": 13, "copy": True},
}

# Two sentences of different lengths, padded with 0.
SOURCE = np.asarray([[5, 4, 7, 2, 0], [3, 10, 2, 0, 0]])
TARGET = np.asarray([[1, 12, 6, 4], [1, 9, 0, 0]])
LABELS = np.asarray([[12, 6, 4, 2], [9, 2, 0, 0]])


def native_levels() -> list[str]:
    """Return the instruction sets that this processor and the native library have, the lowest one first."""
    levels = ["baseline", "avx2", "avx512"]
    if not native.is_available():
        return []
    return [level for level in levels[: levels.index(native.level()) + 1] if level in compiled_levels()]


def compiled_levels() -> list[str]:
    """Return the instruction sets that the native library has."""
    found = re.search(rb"xformer sources \w+ for ([\w ]+)", native.LIBRARY.read_bytes())
    assert found
    return found[1].decode().split()


def small_model(xp: Any = "numpy", *, dtype: str = "float64", seed: int = 0, **settings: Any) -> Transformer:
    """Return a model of two layers on each side, in float64 by default."""
    return Transformer(TransformerConfig(**{**SMALL, **settings}), xp=xp, seed=seed, dtype=dtype)


def model_of_kind(kind: str) -> Transformer:
    """Return a small model of one of KINDS, with noise so that no bias is zero and no norm is one."""
    return map_arrays(lambda array: array + 0.1 * normal(array.size, *array.shape), small_model(**KINDS[kind]))


def small_language_model(xp: Any = "numpy", *, dtype: str = "float64", seed: int = 0, **settings: Any) -> LanguageModel:
    """Return a decoder-only model of two layers, in float64 by default."""
    shape = {"vocab_size": 13, "d_model": 8, "num_heads": 2, "d_ff": 12, "num_layers": 2}
    return LanguageModel(LanguageModelConfig(**{**shape, **settings}), xp=xp, seed=seed, dtype=dtype)


def small_parts(xp: Any = "numpy", *, dtype: str = "float64", seed: int = 0, **settings: Any) -> LayerFactory:
    """Return the factory of the layers of a small model."""
    config = ModelConfig(**{"d_model": 8, "num_heads": 2, "d_ff": 12, "dropout": 0.0, **settings})
    return LayerFactory(config, Initializer(xp, seed=seed, dtype=dtype))


def translation_loss(
    model: Transformer, source: Any = SOURCE, target: Any = TARGET, labels: Any = LABELS, rng: Any = None
) -> Any:
    """Return the mean smoothed cross-entropy of all labels that are not padding."""
    logits = model(source, target, rng=rng)
    xp = array_namespace(logits)
    losses = cross_entropy(logits, from_host(xp, labels), pad_id=0, label_smoothing=0.1)
    return xp.sum(losses) / float((labels != 0).sum())


def weighted_sum(y: Any, weights: Any) -> Any:
    """Return a scalar whose gradient with respect to y is `weights`."""
    return array_namespace(y).sum(y * weights)


def normal(seed: int, *shape: int) -> Any:
    """Return standard normal float64 values."""
    return np.random.default_rng(seed).normal(size=shape)


def counted_calls(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> list[Any]:
    """Return a list to which every call of a class of modules appends the module."""
    calls, call = [], kind.__call__

    def counting(self: Any, *args: Any, **keywords: Any) -> Any:
        calls.append(self)
        return call(self, *args, **keywords)

    monkeypatch.setattr(kind, "__call__", counting)
    return calls


@contextlib.contextmanager
def raises_line(kind: type[Exception], match: str) -> Iterator[None]:
    """Check as `pytest.raises` does, and that the error has exactly this type and a message of one line."""
    with pytest.raises(kind, match=match) as caught:
        yield
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


# --- Parameters of torch modules under the names of xformer; `of` returns the value or the gradient of each. ----------

Arrays = dict[str, Any]
Pick = Callable[[Any], Any]


def values(parameter: Any) -> Any:
    return parameter.detach().numpy()


def gradients(parameter: Any) -> Any:
    return parameter.grad.numpy()


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def linear_arrays(module: Any, of: Pick) -> Arrays:
    return {"weight": of(module.weight).T, "bias": of(module.bias)}


def norm_arrays(module: Any, of: Pick) -> Arrays:
    return {"weight": of(module.weight), "bias": of(module.bias)}


def attention_arrays(module: Any, of: Pick) -> Arrays:
    """torch stacks the three input projections on top of each other."""
    parts = zip(np.split(of(module.in_proj_weight), 3), np.split(of(module.in_proj_bias), 3), strict=True)
    arrays = prefixed("output", linear_arrays(module.out_proj, of))
    for name, (weight, bias) in zip(("query", "key", "value"), parts, strict=True):
        arrays |= {f"{name}.weight": weight.T, f"{name}.bias": bias}
    return arrays


def encoder_layer_arrays(module: Any, of: Pick) -> Arrays:
    return {
        **prefixed("self_attention", attention_arrays(module.self_attn, of)),
        **prefixed("feed_forward.up", linear_arrays(module.linear1, of)),
        **prefixed("feed_forward.down", linear_arrays(module.linear2, of)),
        **prefixed("self_attention_residual.norm", norm_arrays(module.norm1, of)),
        **prefixed("feed_forward_residual.norm", norm_arrays(module.norm2, of)),
    }


def decoder_layer_arrays(module: Any, of: Pick) -> Arrays:
    return {
        **encoder_layer_arrays(module, of),
        **prefixed("cross_attention", attention_arrays(module.multihead_attn, of)),
        **prefixed("cross_attention_residual.norm", norm_arrays(module.norm2, of)),
        **prefixed("feed_forward_residual.norm", norm_arrays(module.norm3, of)),
    }


def randomize(module: Any, seed: int = 0) -> Any:
    """Give all parameters of a torch module values away from zero and one, so that no term is left out."""
    generator = np.random.default_rng(seed)
    for parameter in module.parameters():
        parameter.data = parameter.data.new_tensor(generator.normal(0.1, 0.4, tuple(parameter.shape)))
    return module
