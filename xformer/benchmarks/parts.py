"""Parts of a Transformer, from a norm to a training step, on any array library: what `xformer bench` measures.

Parameters and inputs are drawn on NumPy and copied, so all libraries compute the same numbers, which are compared.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import to_host
from xformer.benchmarks.computation import Backend, Computation, fingerprint
from xformer.benchmarks.interleaved import Settings, Spec, Workload, name_with_dtype
from xformer.data.pairs import Batch, TokenPairs
from xformer.errors import BackendError
from xformer.generation import GenerationConfig
from xformer.generation.generate import generate
from xformer.layers import FeedForward, Initializer, LayerNorm, MultiHeadAttention
from xformer.models import Transformer, TransformerConfig
from xformer.models.base import LayerFactory
from xformer.ops import attention
from xformer.tracing import vjp
from xformer.tracing.jit import jit
from xformer.training.loss import translation_loss
from xformer.training.optimizers import Adam
from xformer.training.step import train_step

_NEW_TOKENS = 32  # of each text that is decoded
_IDS = 4  # smaller ids are padding, start, end and unknown tokens

Function = Callable[..., Any]


class Part(NamedTuple):
    """A part of a model.

    Attributes:
        make: make(settings, backend) returns the function to measure and its arguments, of which `gradients` follow.
        flops: flops(settings): operations of the matrix products of a forward pass.
        has_backward: Whether the gradients of all arguments can be measured, too.
    """

    make: Callable[[Settings, Backend], tuple[Function, tuple[Any, ...]]]
    flops: Callable[[Settings], int]
    has_backward: bool = True


def inputs_of(settings: Settings, count: int = 1) -> list[Any]:
    """Return inputs as NumPy arrays, the same for the same settings.

    Their shape is (batch, heads, length, head_dim) for attention, (batch, length, d_model) for other parts.
    """
    shape: tuple[int, ...] = settings["batch"], settings["length"], _d_model(settings)
    if settings["part"] == "attention":
        shape = settings["batch"], settings["heads"], settings["length"], settings["head_dim"]
    return [np.random.default_rng(seed).standard_normal(shape, dtype="float32") for seed in range(count)]


def mask_of(settings: Settings) -> Any:
    """Return which keys are no padding, as a boolean NumPy array (batch, 1, 1, length), or None."""
    length = settings["length"]
    lengths = np.random.default_rng(0).integers(max(1, length // 2), length + 1, (settings["batch"], 1, 1, 1))
    return np.arange(length) < lengths if settings["padded"] else None


def gradient_of(shape: tuple[int, ...]) -> Any:
    """Return the gradient of an output of this shape, as a NumPy array."""
    return np.random.default_rng(1).standard_normal(shape, dtype="float32")


def _d_model(settings: Settings) -> int:
    return int(settings["heads"] * settings["head_dim"])


def _tokens(settings: Settings) -> int:
    return int(settings["batch"] * settings["length"])


def _config(settings: Settings) -> TransformerConfig:
    sizes: Settings = dict.fromkeys(("source_vocab_size", "target_vocab_size"), settings["vocabulary"])
    sizes |= dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), settings["layers"])
    d_model = _d_model(settings)
    return TransformerConfig(d_model=d_model, num_heads=settings["heads"], d_ff=4 * d_model, dropout=0.0, **sizes)


def _model(settings: Settings, backend: Backend) -> Transformer:
    return Transformer(_config(settings), xp="numpy", seed=0).to(backend.xp, dtype=backend.dtype)


def _ids(settings: Settings, seed: int = 0) -> Any:
    shape = settings["batch"], settings["length"]
    return np.random.default_rng(seed).integers(_IDS, settings["vocabulary"], shape)


def _masking(settings: Settings, backend: Backend) -> dict[str, Any]:
    return {"mask": backend.array(mask_of(settings)), "causal": settings["causal"]}


def _attention(settings: Settings, backend: Backend) -> Any:
    masking = _masking(settings, backend)
    return (lambda *qkv: attention(*qkv, **masking)), tuple(map(backend.array, inputs_of(settings, 3)))


def _layers(
    make: Callable[[Settings, Initializer], Sequence[Any]], num_inputs: int = 1, masking: Function | None = None
) -> Callable[..., Any]:
    """Return the function that makes layers, each of which gets the output of the one before and the other inputs."""

    def part(settings: Settings, backend: Backend) -> Any:
        layers = tuple(make(settings, Initializer("numpy")))
        if (backend.name, backend.dtype) != ("numpy", "float32"):
            layers = tuple([layer.to(backend.xp, dtype=backend.dtype) for layer in layers])

        options = {} if masking is None else masking(settings, backend)

        def apply(layers: Any, x: Any, *memory: Any) -> Any:
            return functools.reduce(lambda x, layer: layer(x, *memory, **options), layers, x)

        return apply, (layers, *map(backend.array, inputs_of(settings, num_inputs)))

    return part


def _multi_head_attention(settings: Settings, init: Initializer) -> list[Any]:
    return [MultiHeadAttention(_d_model(settings), settings["heads"], init=init)]


def _feed_forward(settings: Settings, init: Initializer) -> list[Any]:
    return [FeedForward(_d_model(settings), 4 * _d_model(settings), init=init)]


def _stack(kind: str, settings: Settings, init: Initializer) -> list[Any]:
    return [getattr(LayerFactory(_config(settings), init), f"{kind}_layer")(i) for i in range(settings["layers"])]


def _whole_model(settings: Settings, backend: Backend) -> Any:
    source, target = _ids(settings, 0), _ids(settings, 1)  # models take ids of NumPy on every library
    return (lambda model: model(source, target)), (_model(settings, backend),)


def _train_step(settings: Settings, backend: Backend) -> Any:
    model, optimizer = _model(settings, backend), Adam()
    pairs = TokenPairs(*(_ids(settings, seed)[:, :-1].tolist() for seed in (0, 1)))
    batch = Batch.make(pairs, range(settings["batch"]), xp=backend.xp)

    def step(model: Any, state: Any) -> Any:
        result = train_step(
            model, state, [batch], None, loss_fn=translation_loss, optimizer=optimizer, learning_rate=1e-4,
            num_tokens=batch.num_tokens,
        )  # fmt: skip
        return result.loss, result.model, result.state

    return step, (model, optimizer.init(model))


def _decode(settings: Settings, backend: Backend) -> Any:
    model = _model(settings, backend)
    config = GenerationConfig(max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS)
    sources = _ids(settings).tolist()
    return (lambda: np.asarray([each[0].tokens for each in generate(model, sources, config)])), ()


def _layer_flops(settings: Settings, *, products: int = 12, scores: int = 4) -> int:
    """Count a layer: `products` of d_model x d_model per token, and scores and sums of values over the length."""
    d_model = _d_model(settings)
    return _tokens(settings) * (2 * products * d_model**2 + scores * d_model * settings["length"])


def _attention_flops(settings: Settings, *, products: int = 0) -> int:
    """Count attention, of which a causal mask leaves out the scores after the diagonal."""
    skipped = settings["length"] * (settings["length"] - 1) // 2 if settings["causal"] else 0
    return _layer_flops(settings, products=products) - 4 * settings["batch"] * _d_model(settings) * skipped


def _model_flops(settings: Settings) -> int:
    layers = _layer_flops(settings) + _layer_flops(settings, products=16, scores=8)
    return settings["layers"] * layers + 2 * _tokens(settings) * _d_model(settings) * settings["vocabulary"]


PARTS = {
    "attention": Part(_attention, _attention_flops),
    "layer": Part(_layers(_multi_head_attention, 1, _masking), lambda s: _attention_flops(s, products=4)),
    "feed-forward": Part(_layers(_feed_forward), lambda s: _layer_flops(s, products=8, scores=0)),
    "norm": Part(_layers(lambda s, init: [LayerNorm(_d_model(s), init=init)]), lambda s: 0),
    "encoder": Part(_layers(functools.partial(_stack, "encoder")), lambda s: s["layers"] * _layer_flops(s)),
    "decoder": Part(
        _layers(functools.partial(_stack, "decoder"), 2), lambda s: s["layers"] * _layer_flops(s, products=16, scores=8)
    ),
    "model": Part(_whole_model, _model_flops),
    "train-step": Part(_train_step, lambda s: 3 * _model_flops(s), has_backward=False),
    "decode": Part(_decode, lambda s: 0, has_backward=False),
}
NAMES = tuple(PARTS)
FORWARD_ONLY = tuple(name for name, part in PARTS.items() if not part.has_backward)
VARIANTS = (*NAMES, *(f"{name}, backward" for name in NAMES if name not in FORWARD_ONLY))
_SIZES = {"batch": 8, "length": 128, "heads": 8, "head_dim": 32, "layers": 2, "vocabulary": 1000}
AXES = tuple(_SIZES)
DEFAULTS: Settings = {**_SIZES, **dict.fromkeys(("causal", "padded", "backward", "jit"), False), "dtype": "float32"}


def workload(settings: Settings) -> Workload:
    """Return the workload of a part at one size.

    Args:
        settings: part (one of `NAMES`) and those of `DEFAULTS`.
    """
    name = settings["part"]
    if name in ("attention", "layer"):
        sizes = "x".join(str(settings[axis]) for axis in ("batch", "heads", "length", "head_dim"))
        words = ["multi-head attention" if name == "layer" else name, sizes]
        words += [flag for flag in ("causal", "padded") if settings[flag]]
        text = " ".join([*words, "forward + backward" if settings["backward"] else "forward"])
    else:
        sizes = f"{settings['batch']}x{settings['length']}, d_model {_d_model(settings)}"
        layers = f", {settings['layers']} layers" if name not in ("feed-forward", "norm") else ""
        text = f"{name} {sizes}{layers}{', backward' if settings['backward'] else ''}"
    text += ", jit" if settings.get("jit") else ""
    tokens = settings["batch"] * _NEW_TOKENS if name == "decode" else _tokens(settings)
    flops = PARTS[name].flops(settings) * (3 if settings["backward"] else 1)
    return Workload(name_with_dtype(text, settings), settings, (tokens,), flops)


class Suite(NamedTuple):
    """Parts and sizes that `xformer bench` measures.

    Attributes:
        parts: Names of parts.
        settings: Instead of `DEFAULTS`; sizes may be sequences, for a grid.
        rounds: Default number of rounds.
        warmup_steps: Steps before the first round; to measure memory, no further step is needed.
    """

    parts: tuple[str, ...]
    settings: Settings
    rounds: int = 7
    warmup_steps: int = 3

    def quick(self) -> Suite:
        """Return the suite with one size and at most three rounds."""
        first = {name: value[0] if isinstance(value, tuple) else value for name, value in self.settings.items()}
        return self._replace(settings=first, rounds=min(3, self.rounds))

    def workloads(self, **settings: Any) -> list[Workload]:
        """Return the workload of every part and combination of sizes, with these settings instead of the suite's."""
        settings = {**DEFAULTS, **self.settings, **settings}
        grid = [x if isinstance(x, Sequence) else (x,) for x in (settings[axis] for axis in AXES)]
        points = itertools.product(self.parts, itertools.product(*grid))
        made = (workload({**settings, "part": part, **dict(zip(AXES, sizes, strict=True))}) for part, sizes in points)
        return [replace(each, warmup_steps=self.warmup_steps) for each in made]


SUITES = {
    **{name: Suite((name,), {}) for name in NAMES},
    "all": Suite(NAMES, {"batch": 2, "length": 64}, 3),
    "attention": Suite(("attention",), {"batch": (1, 8, 32), "length": (32, 128, 512), "head_dim": 64}),
    "memory": Suite(
        ("attention",),
        {"batch": 1, "length": (1024, 2048, 4096, 8192, 16384), "heads": 1, "head_dim": 64, "backward": True},
        1, 0,
    ),
}  # fmt: skip


def build(settings: Settings) -> Computation:
    """Build a part by xformer on settings["backend"]."""
    name, backend = settings["part"], Backend.from_settings(settings)
    function, arguments = PARTS[name].make(settings, backend)
    if name == "decode":
        return Computation(lambda index: function(), lambda tokens: [tokens.ravel().tolist()], wait=backend.wait)
    if name == "train-step":  # whose state has Python's numbers, which a compiler would have to trace
        step = jit(function) if settings.get("jit") else function
        return Computation(lambda index: to_host(step(*arguments)[0]), fingerprint)
    computation = _with_gradients(backend, settings, function, arguments)
    if name == "model":  # which has no other inputs than its parameters
        return replace(computation, fingerprint=lambda result: fingerprint(result[0]))
    return computation if name == "attention" else replace(computation, fingerprint=layer_fingerprint)


def _with_gradients(backend: Backend, settings: Settings, forward: Function, arguments: tuple[Any, ...]) -> Computation:
    """Return the computation of a function, by jit if settings["jit"], with all gradients if settings["backward"]."""
    compile_function = jit if settings.get("jit") else lambda function: function
    if not settings["backward"]:
        return backend.computation(compile_function(lambda *arguments: (forward(*arguments),)), *arguments)

    def forward_and_backward(gradient: Any, *arguments: Any) -> tuple[Any, ...]:
        outputs, pullback = vjp(forward, *arguments)
        return (outputs, *pullback(gradient))

    gradient = backend.array(gradient_of(tuple(forward(*arguments).shape)))
    return backend.computation(compile_function(forward_and_backward), gradient, *arguments)


def layer_fingerprint(result: Any) -> list[list[float]]:
    """Return the fingerprint of the output and of the input's gradient; the order of parameters differs by library."""
    return fingerprint((result[0], result[-1]) if len(result) > 1 else result)


# --- peers ------------------------------------------------------------------------------------------------------------


def _own(settings: Settings) -> tuple[Any, list[Any], Any]:
    """Return the layers of a part on NumPy, none for attention, its inputs, and the gradient of its output."""
    _, arguments = PARTS[settings["part"]].make(settings, Backend("numpy"))
    layers, inputs = ((), arguments) if settings["part"] == "attention" else (arguments[0], arguments[1:])
    return layers, list(inputs), gradient_of(inputs[0].shape)


def build_torch(settings: Settings) -> Computation:
    """Build a part by torch.nn, with the parameters of xformer's."""
    torch: Any = importlib.import_module("torch")
    nn, (own, inputs, gradient) = torch.nn, _own(settings)
    d_model, heads, causal = _d_model(settings), settings["heads"], settings["causal"]
    d_ff = 4 * d_model
    options = {"dim_feedforward": d_ff, "dropout": 0.0, "batch_first": True, "norm_first": True}
    if settings["padded"]:
        raise BackendError("the peers have no padding")

    make: dict[str, Callable[[], Any]] = {
        "attention": nn.Identity,
        "layer": lambda: nn.MultiheadAttention(d_model, heads, batch_first=True),
        "norm": lambda: nn.LayerNorm(d_model),
        "feed-forward": lambda: nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model)),
        "encoder": lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(d_model, heads, **options), settings["layers"], enable_nested_tensor=False
        ),
    }
    dtype = getattr(torch, settings["dtype"])
    tensors = [torch.from_numpy(x).to(dtype).requires_grad_(settings["backward"]) for x in inputs]
    module: Any = make[settings["part"]]().to(dtype).train(settings["backward"])
    with torch.no_grad():
        for theirs, array in zip(module.parameters(), _as_in_torch(own), strict=True):
            theirs.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    mask = nn.Transformer.generate_square_subsequent_mask(settings["length"], dtype=dtype) if causal else None

    def forward() -> Any:
        if settings["part"] == "attention":
            return nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
        if settings["part"] == "layer":
            return module(*tensors * 3, attn_mask=mask, is_causal=causal, need_weights=False)[0]
        return module(*tensors)

    def step(index: int) -> Any:
        if not settings["backward"]:
            with torch.inference_mode():
                return [forward().float().numpy()]
        output = forward()
        slopes = torch.autograd.grad(output, [*module.parameters(), *tensors], torch.from_numpy(gradient).to(dtype))
        return [output.detach().float().numpy(), *(x.float().numpy() for x in slopes)]

    compare = fingerprint if settings["part"] == "attention" else layer_fingerprint
    return Computation(step, compare)


def _as_in_torch(layers: Sequence[Any]) -> Iterator[Any]:
    """Yield parameters in the order of torch.nn: transposed, those of queries, keys and values as one."""
    named = [pair for layer in layers for pair in layer.named_arrays()]
    for i, (name, array) in enumerate(named):
        kind, _, what = name.rpartition(".")
        if kind.endswith("query"):
            yield np.concatenate([named[i + 2 * k][1].T if what == "weight" else named[i + 2 * k][1] for k in range(3)])
        elif not kind.endswith(("key", "value")):
            yield array.T


def build_textbook(settings: Settings) -> Computation:
    """Build a forward pass of a part in plain NumPy, as textbooks write it."""
    layers, inputs, _ = _own(settings)
    own: Any = layers[0] if layers else None
    if settings["backward"] or settings["padded"] or settings["dtype"] != "float32":
        raise BackendError("the textbook has forward passes in float32 without padding")

    def attend(query: Any, key: Any, value: Any) -> Any:
        scores = query @ key.swapaxes(-1, -2) / np.float32(math.sqrt(query.shape[-1]))
        if settings["causal"]:
            scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True) @ value

    def linear(x: Any, part: Any) -> Any:
        return x @ part.weight + part.bias

    def layer(x: Any) -> Any:
        def split(x: Any) -> Any:
            return x.reshape(*x.shape[:2], settings["heads"], -1).swapaxes(1, 2)

        heads = attend(*(split(linear(x, part)) for part in (own.query, own.key, own.value)))
        return linear(heads.swapaxes(1, 2).reshape(x.shape), own.output)

    def norm(x: Any) -> Any:
        x = x - x.mean(axis=-1, keepdims=True)
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(1e-5)) * own.weight + own.bias

    def feed_forward(x: Any) -> Any:
        return linear(np.maximum(linear(x, own.up), np.float32(0.0)), own.down)

    function: Any = {"attention": attend, "layer": layer, "norm": norm, "feed-forward": feed_forward}[settings["part"]]
    return Computation(lambda index: (function(*inputs),), fingerprint)


# By name: the factory, and the parts that it has.
PEERS = {
    "torch.nn": ("build_torch", ("attention", "layer", "feed-forward", "norm", "encoder")),
    "textbook NumPy": ("build_textbook", ("attention", "layer", "feed-forward", "norm")),
}


def specs(part: str, backends: Sequence[str], peers: Sequence[str] = ()) -> list[Spec]:
    """Return the implementations of a part by xformer on these backends, and those of the peers that have it."""
    factory = f"{__name__}:build"
    own = [Spec(f"xformer {name}", factory, {"backend": name}, optional=name != backends[0]) for name in backends]
    return own + [Spec(name, f"{__name__}:{PEERS[name][0]}", optional=True) for name in peers if part in PEERS[name][1]]
