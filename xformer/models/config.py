"""What a model is, apart from its numbers."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any, Self

from xformer.errors import ConfigError
from xformer.layers.attention import check_heads
from xformer.layers.normalization import norm_named
from xformer.ops.activations import ACTIVATIONS

POSITIONS = ("sinusoidal", "learned", "rotary", "alibi", "relative", "none")
# Activations that gate: the name of the whole, and that of the function in it (Shazeer, 2020).
GATED = {"swiglu": "silu", "geglu": "gelu"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What all models have in common, with the defaults of the paper and of a modern translator.

    d_model, num_heads, d_ff: features of a token, attention heads (which share d_model), inner features
    num_key_value_heads: fewer than num_heads for grouped-query attention, 1 for multi-query; None: as many
    window: how far self-attention sees, in tokens; None: everywhere
    dropout: on the output of every sublayer and on the embeddings (Vaswani et al., 2017, section 5.4)
    attention_dropout, activation_dropout: on attention weights and inside the feed-forward, as torch.nn has them
    activation: "relu", "gelu", "gelu_tanh", "silu", or gated: "swiglu", "geglu"
    norm: "layer", "rms" or "max_scaled"; norm_position: "pre" (Xiong et al., 2020; with a final norm after each
    stack) or "post" (the paper's own)
    attention_bias, feed_forward_bias, norm_bias: whether projections, feed-forward and norms add a learned vector
    positions: "sinusoidal" (the paper's), "learned" (up to max_positions), "rotary", "alibi", "relative" (T5) or "none"
    scale_embeddings: embeddings times sqrt(d_model), section 3.4 of the paper; scale_positions: what is added for the
    position too; embedding_norm: then normalize
    tie_output: the (target) embedding is also the output projection (Press and Wolf, 2017)
    rematerialize: compute a layer again in the backward pass rather than keep what it computed (Chen et al., 2016):
    less memory, a third more time, the same numbers
    pad_id, bos_id, eos_id: ids of padding, start and end

    Raises ConfigError, naming the field, for values that make no model.
    """

    d_model: int = 512
    num_heads: int = 8
    d_ff: int = 2048
    num_key_value_heads: int | None = None
    window: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = "relu"
    norm: str = "layer"
    norm_position: str = "pre"
    norm_epsilon: float = 1e-5
    attention_bias: bool = True
    feed_forward_bias: bool = True
    norm_bias: bool = True
    positions: str = "sinusoidal"
    max_positions: int = 1024
    scale_embeddings: bool = True
    scale_positions: bool = False
    embedding_norm: bool = False
    tie_output: bool = True
    output_bias: bool = False
    rematerialize: bool = False
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_kind(field.name, getattr(self, field.name), str(field.type))
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"{name} is {value!r}; expected a probability in [0, 1)")
        if not 0.0 < self.norm_epsilon < 1.0:
            raise ConfigError(f"norm_epsilon is {self.norm_epsilon!r}; expected a small positive number")
        for name in ("d_model", "num_heads", "d_ff", "num_key_value_heads", "window", "max_positions"):
            _check_least(name, getattr(self, name), 1)
        for name in ("pad_id", "bos_id", "eos_id"):
            _check_least(name, getattr(self, name), 0)
        if len({self.pad_id, self.bos_id, self.eos_id}) < 3:
            raise ConfigError(
                f"pad_id {self.pad_id}, bos_id {self.bos_id} and eos_id {self.eos_id} must be three different ids"
            )
        check_heads(self.d_model, self.num_heads, self.num_key_value_heads or self.num_heads)
        if self.positions == "rotary" and self.d_model // self.num_heads % 2:
            raise ConfigError(
                f"positions 'rotary' turn pairs of features; d_model / num_heads is {self.d_model // self.num_heads}, "
                "expected an even number"
            )
        if self.positions not in POSITIONS:
            raise ConfigError(f"positions is {self.positions!r}; expected one of {', '.join(POSITIONS)}")
        if self.norm_position not in ("pre", "post"):
            raise ConfigError(f"norm_position is {self.norm_position!r}; expected 'pre' or 'post'")
        if self.activation not in (*ACTIVATIONS, *GATED):
            raise ConfigError(f"activation is {self.activation!r}; expected one of {', '.join((*ACTIVATIONS, *GATED))}")
        norm_named(self.norm)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a JSON-ready dictionary."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Make a configuration from a dictionary; raises ConfigError for an unknown key or a missing one."""
        if not isinstance(values, dict):
            raise ConfigError(f"the model configuration is a {type(values).__name__}; expected names and values")
        fields = dataclasses.fields(cls)
        for key in values:
            check_key(key, {field.name for field in fields}, "the model configuration")
        missing = {field.name for field in fields if field.default is dataclasses.MISSING} - values.keys()
        if missing:
            raise ConfigError(f"the model configuration lacks {', '.join(sorted(missing))}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """An encoder-decoder Transformer (Vaswani et al., 2017).

    source_vocab_size, target_vocab_size: numbers of tokens
    num_encoder_layers, num_decoder_layers: depths; without decoder layers the model is an encoder alone
    share_embeddings: one table for source and target tokens, for joint vocabularies
    copy: a copy head lets the decoder take tokens from the source (See et al., 2017); needs share_embeddings
    length_encoding: the decoder sees how many tokens are still to come (Takase and Okazaki, 2019), beside its positions

    The other fields are those of ModelConfig. Raises ConfigError, naming the field, for values that make no model.
    """

    source_vocab_size: int
    target_vocab_size: int
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    share_embeddings: bool = False
    copy: bool = False
    length_encoding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("source_vocab_size", "target_vocab_size"):
            _check_least(name, getattr(self, name), 1)
        for name in ("num_encoder_layers", "num_decoder_layers"):
            _check_least(name, getattr(self, name), 0)
        if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
            raise ConfigError(
                f"share_embeddings needs one vocabulary; source has {self.source_vocab_size} tokens, "
                f"target {self.target_vocab_size}"
            )
        if self.copy and not self.share_embeddings:
            raise ConfigError("copy needs share_embeddings: source tokens must be target tokens too")
        if max(self.pad_id, self.bos_id, self.eos_id) >= self.target_vocab_size:
            raise ConfigError(f"pad_id, bos_id and eos_id must be below target_vocab_size {self.target_vocab_size}")
        if self.pad_id >= self.source_vocab_size:
            raise ConfigError(f"pad_id {self.pad_id} must be below source_vocab_size {self.source_vocab_size}")


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(ModelConfig):
    """A decoder-only Transformer (Radford et al., 2018): every token sees the ones before it.

    vocab_size: number of tokens; num_layers: depth

    The other fields are those of ModelConfig. Raises ConfigError, naming the field, for values that make no model.
    """

    vocab_size: int
    num_layers: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_least("vocab_size", self.vocab_size, 1)
        _check_least("num_layers", self.num_layers, 0)


def check_key(key: str, known: set[str], where: str) -> None:
    """Raise ConfigError for a key that is not known, suggesting the nearest one that is."""
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        raise ConfigError(f"unknown key {key!r} in {where}; {hint}")


_KINDS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a name"),
}


def _check_kind(name: str, value: Any, annotation: str) -> None:
    kind, words = _KINDS[annotation.removesuffix(" | None")]
    if value is None and annotation.endswith(" | None"):
        return
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} is {value!r}; expected {words}")


def _check_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least {least}")
