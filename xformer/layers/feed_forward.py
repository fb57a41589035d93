"""Feed-forward networks (Vaswani et al., 2017, section 3.3), and mixtures of them.

A mixture of experts (Shazeer et al., 2017) has a load-balancing loss (Fedus et al., 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from xformer.backends import Array, array_namespace, device, dtype_name, extra, is_half_precision, to_library_of
from xformer.config import check_bool, check_count
from xformer.errors import ConfigError
from xformer.layers.basic import Dropout, Init, Linear, as_dtype_of, initializer
from xformer.ops.activations import Activation, gated, logistic
from xformer.ops.activations import activation as activation_named
from xformer.ops.decoding import top_k
from xformer.ops.embedding import embedding
from xformer.ops.experts import apply_experts
from xformer.ops.linear import as_rows, linear, project_heads
from xformer.ops.softmax import softmax
from xformer.random import Rng, split_rng
from xformer.threads import Collector
from xformer.tracing.activations import named
from xformer.tracing.grad import stop_gradient
from xformer.tree import Module, with_fields, wrong_array


class FeedForward(Module):
    """Two linear maps with an activation in between, `down(activation(up(x)))` (Vaswani et al., 2017, section 3.3).

    Args:
        d_model: Features of the input and output.
        d_ff: Features in between.
        activation: "relu", "gelu", "gelu_tanh", "silu", "relu_squared" or "quick_gelu".
        bias: Add learned biases.
        dropout: Dropout rate on the activations, as in torch's Transformer layers; the paper has none here.
        init: Source of the initial parameters, required: an `Initializer`, or a seed for a new one on NumPy.

    Raises:
        ConfigError: For an unknown activation.
    """

    __activations__ = ("hidden", "output")

    up: Linear
    down: Linear
    dropout: Dropout
    activation: Activation

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: Activation = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        init: Init = None,
    ):
        init = initializer(init)
        self.up = Linear(d_model, d_ff, bias=bias, init=init)
        self.down = Linear(d_ff, d_model, bias=bias, init=init)
        self.dropout = Dropout(dropout)
        activation_named(activation)  # an unknown name raises here, not at the first call
        self.activation = activation

    def __call__(self, x: Array, rng: Rng | None = None) -> Array:
        """Apply the network to each position.

        Args:
            x: Array of shape (..., d_model).
            rng: Draws dropout; None switches it off.

        Returns:
            Array of shape (..., d_model).
        """
        hidden = named(self, "hidden", self.hidden(x))
        return named(self, "output", self.down(self.dropout(hidden, rng)))

    def hidden(self, x: Array) -> Array:
        """Return the features in between, (..., d_ff)."""
        return self.up(x, self.activation)


class GatedFeedForward(FeedForward):
    """Gated linear unit, `down(activation(gate(x)) * up(x))` (Shazeer, 2020).

    "silu" gives SwiGLU, "gelu" GEGLU. The layer has three matrices; with two thirds of the d_ff of a `FeedForward` it
    has as many parameters. Arguments are those of `FeedForward`; the default activation is "silu".
    """

    gate: Linear

    def __init__(self, d_model: int, d_ff: int, *, activation: Activation = "silu", init: Init = None, **options: Any):
        init = initializer(init)
        self.gate = Linear(d_model, d_ff, bias=options.get("bias", True), init=init)
        super().__init__(d_model, d_ff, activation=activation, init=init, **options)

    def hidden(self, x: Array) -> Array:
        """Return the features in between, (..., d_ff)."""
        return gated(*self._gate_and_up(x), self.activation)

    def _gate_and_up(self, x: Array) -> tuple[Array, Array]:
        """Return both maps of the input, as one operation where a library gains by it."""
        maps, xp = (self.gate, self.up), array_namespace(x)
        if not xp.library.joins_maps() or any(type(each) is not Linear for each in maps):
            return self.gate(x), self.up(x)
        rows = xp.reshape(as_dtype_of(x, self.gate.weight), (1, math.prod(x.shape[:-1]), x.shape[-1]))
        gate, up = project_heads(rows, *((each.weight, each.bias, 1) for each in maps))
        shape = *x.shape[:-1], gate.shape[-1]
        return xp.reshape(gate, shape), xp.reshape(up, shape)


_LIMIT, _SLOPE = 7.0, 1.702


class ClampedFeedForward(GatedFeedForward):
    """SwiGLU with clamped inputs, `down(g sigmoid(1.702 g) (u + 1))` (OpenAI, 2025, "gpt-oss").

    Here g = min(gate(x), 7) and u = clip(up(x), -7, 7). Arguments are those of `GatedFeedForward`.

    Raises:
        ConfigError: For activations other than "silu".
    """

    def __init__(self, d_model: int, d_ff: int, *, activation: Activation = "silu", init: Init = None, **options: Any):
        if activation != "silu":
            raise ConfigError(f"activation is {activation!r}; ClampedFeedForward expects 'silu'")
        super().__init__(d_model, d_ff, init=init, **options)

    def hidden(self, x: Array) -> Array:
        """Return the features in between."""
        gate, up = self._gate_and_up(x)
        xp = array_namespace(gate, up)
        gate, up = xp.clip(gate, max=_LIMIT), xp.clip(up, min=-_LIMIT, max=_LIMIT)
        activation = activation_named(self.activation)
        return extra.cast_like(activation(gate * _SLOPE) * (up + 1.0) * (1.0 / _SLOPE), gate)


class RecordedRouting(NamedTuple):
    """The routing of one call of a `MixtureOfExperts`.

    Attributes:
        layer: The layer that was called.
        probabilities: Probabilities of the experts for each token, (tokens, experts).
        experts: Indices of the experts that were chosen for each token, integers (tokens, num_experts_per_token).
    """

    layer: MixtureOfExperts
    probabilities: Array
    experts: Array


_RECORDED: Collector[RecordedRouting] = Collector("recorded routing")


def record_routing() -> AbstractContextManager[list[RecordedRouting]]:
    """Record the routing of every call of a `MixtureOfExperts` inside the block, e.g. for `load_balancing_loss`.

    Returns:
        A context manager of the list that the routing is appended to, in the order of the calls.

    Examples:
        >>> import numpy as np
        >>> layer = MixtureOfExperts([FeedForward(4, 8, init=seed) for seed in range(3)], init=3)
        >>> with record_routing() as routing:
        ...     output = layer(np.ones((2, 5, 4), dtype=np.float32))
        >>> routing[0].probabilities.shape, routing[0].experts.shape
        ((10, 3), (10, 2))
    """
    return _RECORDED.collect()


class MixtureOfExperts(Module):
    """Mixture of experts: a router sends each token to a few feed-forward networks.

    See Shazeer et al. (2017) and Jiang et al. (2024). The output is the sum of the outputs of the chosen experts,
    weighted by their probabilities, which are the softmax of the router's scores over all experts. No token is dropped.
    On NumPy, on CuPy, and on torch on a CPU, only the chosen experts are computed for a token; other libraries compute
    all of them, as no shape may depend on values.

    Args:
        experts: The experts, `FeedForward` or `GatedFeedForward` layers of the same sizes and settings.
        num_experts_per_token: Number of experts that are chosen for each token.
        normalize: Divide the probabilities of the chosen experts by their sum. With one expert for each token, the
            weight is then 1, and only `load_balancing_loss` trains the router.
        bias: Add a learned bias to the scores of the router.
        shared: Shared expert, applied to every token; its output is multiplied by sigmoid(x @ shared_gate)
            (Qwen 2 MoE). None for none.
        init: Source of the initial parameters of the router, required: an `Initializer`, or a seed for a new one on
            NumPy.

    Raises:
        ConfigError: If there are no experts or fewer than are chosen, or if the experts differ.

    Examples:
        >>> import numpy as np
        >>> layer = MixtureOfExperts([FeedForward(4, 8, init=seed) for seed in range(3)], init=3)
        >>> layer(np.ones((2, 5, 4), dtype=np.float32)).shape
        (2, 5, 4)
    """

    __activations__ = ("output",)

    # An array and no Linear: quantization and adapters leave the router as it is.
    router: Array
    router_bias: Array | None
    shared_gate: Array | None
    experts: tuple[FeedForward, ...]
    shared: FeedForward | None
    num_experts_per_token: int
    normalize: bool

    def __init__(
        self,
        experts: Sequence[FeedForward],
        *,
        num_experts_per_token: int = 2,
        normalize: bool = True,
        bias: bool = False,
        shared: FeedForward | None = None,
        init: Init = None,
    ):
        if not isinstance(experts, tuple | list) or not experts or not all(isinstance(x, FeedForward) for x in experts):
            raise ConfigError(f"experts is {experts!r:.60}; expected a list of FeedForward or GatedFeedForward layers")
        kinds = {repr(expert) for expert in experts}  # class, sizes and settings
        if len(kinds) > 1:
            first, second, *_ = (" ".join(kind.split()) for kind in sorted(kinds))
            raise ConfigError(f"the experts differ: {first} and {second}; expected the same class, sizes and settings")
        check_count("num_experts_per_token", num_experts_per_token)
        if num_experts_per_token > len(experts):
            received = f"num_experts_per_token is {num_experts_per_token}"
            raise ConfigError(f"{received}; expected at most the number of experts, {len(experts)}")
        init = initializer(init)
        d_model = experts[0].up.weight.shape[0]
        self.router = init.xavier_uniform((d_model, len(experts)))
        self.router_bias = init.zeros((len(experts),)) if check_bool("bias", bias) else None
        self.shared_gate = None if shared is None else init.xavier_uniform((d_model, 1))
        self.shared = shared
        self.experts = tuple(experts)
        self.num_experts_per_token = num_experts_per_token
        self.normalize = check_bool("normalize", normalize)

    def __call__(self, x: Array, rng: Rng | None = None) -> Array:
        """Apply the layer to each position.

        Args:
            x: Array of shape (..., d_model).
            rng: Draws dropout inside the experts; None switches it off.

        Returns:
            Array of shape (..., d_model).
        """
        x = as_dtype_of(x, self.router)
        expert_rng, shared_rng = split_rng(rng, 2)
        scores = linear(x, self.router, self.router_bias)
        xp, k = array_namespace(scores), self.num_experts_per_token
        rows, scores = as_rows(x), as_rows(scores)
        count, d_model = rows.shape
        probabilities = softmax(xp.astype(scores, xp.float32) if is_half_precision(scores.dtype) else scores)
        experts = top_k(stop_gradient(probabilities), k)[1]
        if (recorded := _RECORDED.items()) is not None:
            recorded.append(RecordedRouting(self, probabilities, experts))
        weights = xp.take_along_axis(probabilities, experts, axis=-1)
        if self.normalize:
            weights = weights / xp.sum(weights, axis=-1, keepdims=True)
        # Sort the tokens by expert, and undo it for the outputs.
        expert_indices = xp.reshape(experts, (count * k,))
        order = xp.argsort(expert_indices, stable=True)
        outputs = self._apply(embedding(rows, order // k), xp.take(expert_indices, order, axis=0), expert_rng)
        outputs = xp.reshape(embedding(outputs, xp.argsort(order)), (count, k, d_model))
        total = xp.sum(xp.astype(outputs, weights.dtype, copy=False) * weights[:, :, None], axis=1)
        y = xp.reshape(xp.astype(total, x.dtype, copy=False), x.shape)
        if self.shared is not None and self.shared_gate is not None:
            y = y + extra.cast_like(logistic(linear(x, self.shared_gate)) * self.shared(x, shared_rng), y)
        return named(self, "output", y)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield those of `Module.named_modules` but the experts, which are applied as one network."""
        yield prefix, self
        if self.shared is not None:
            yield from self.shared.named_modules(f"{prefix}.shared" if prefix else "shared")

    def _apply(self, rows: Array, expert_indices: Array, rng: Rng | None) -> Array:
        """Apply the experts to rows that are sorted by expert.

        All experts are one feed-forward network whose linear maps have a weight for each expert. So dropout does not
        depend on how they are computed.
        """

        def linear_map(name: str) -> Any:
            maps = [getattr(expert, name) for expert in self.experts]

            def call(x: Array, activation: Activation | None = None) -> Array:
                y = apply_experts(x, expert_indices, maps)
                return y if activation is None else activation_named(activation)(y)

            return call

        first = self.experts[0]
        names = [name for name in first.__fields__ if isinstance(getattr(first, name), Linear)]
        network = with_fields(first, **{name: linear_map(name) for name in names})
        return network(rows, rng)


def load_balancing_loss(routing: Sequence[RecordedRouting], mask: Array | None = None) -> Array:
    """Compute the load-balancing loss, smallest when all experts receive the same number of tokens.

    See Fedus et al. (2021), section 2.2. It is the number of experts times the sum over the experts of f p, with f the
    number of times that an expert was chosen and p the sum of its probabilities, both divided by the number of tokens.
    Tokens of all layers count together, as in transformers. With equal use of all experts, it is
    `num_experts_per_token`. Add a small multiple, such as 0.01, to the mean loss of the tokens:

        with record_routing() as routing:
            logits = model(tokens, rng=rng)
        loss = array_namespace(logits).mean(cross_entropy(logits, labels)) + 0.01 * load_balancing_loss(routing)

    Args:
        routing: What `record_routing` recorded, of layers with the same number of experts.
        mask: Boolean, True = the token counts; as many elements as each layer had tokens, e.g. (batch, length). NumPy
            arrays and lists are moved to the probabilities.

    Returns:
        Scalar array, float32 or wider; 0 if no token counts.

    Raises:
        ConfigError: If `routing` is empty, or the numbers of experts differ.
        ShapeError: If the mask is not boolean, or has another number of elements.
    """
    if not isinstance(routing, list | tuple) or not all(isinstance(each, RecordedRouting) for each in routing):
        raise ConfigError(f"routing is {routing!r:.60}; expected the list of record_routing()")
    sizes = sorted({each.probabilities.shape[-1] for each in routing})
    if len(sizes) != 1:
        received = f"layers with {sizes[0]} and {sizes[1]} experts" if sizes else "nothing was recorded"
        raise ConfigError(f"routing: {received}; expected calls of MixtureOfExperts layers with one number of experts")
    totals: Any = None
    for _, probabilities, experts in routing:
        xp = array_namespace(probabilities)
        indices = xp.arange(sizes[0], dtype=experts.dtype, device=device(probabilities))
        chosen = xp.sum(xp.astype(experts[:, :, None] == indices, probabilities.dtype), axis=1)
        kept = _token_weights(mask, probabilities)
        parts = xp.stack([xp.sum(kept * chosen, axis=0), xp.sum(kept * probabilities, axis=0)])
        count = xp.sum(kept)
        totals = (parts, count) if totals is None else (totals[0] + parts, totals[1] + count)
    parts, count = totals[0], xp.clip(totals[1], min=1)
    return sizes[0] * xp.sum(parts[0, :] / count * (parts[1, :] / count))


def _token_weights(mask: Array | None, probabilities: Array) -> Array:
    """Return 1 for the tokens that count and 0 for the others, (tokens, 1)."""
    xp, count = array_namespace(probabilities), probabilities.shape[0]
    if mask is None:
        return xp.ones((count, 1), dtype=probabilities.dtype, device=device(probabilities))
    mask = to_library_of(mask, probabilities, "the mask is")
    if dtype_name(mask.dtype) != "bool" or math.prod(mask.shape) != count:
        expected = f"bool, True = the token counts, for {count} tokens, e.g. (batch, length)"
        raise wrong_array(mask, "mask has", expected)
    return xp.astype(xp.reshape(mask, (count, 1)), probabilities.dtype)
