"""What a model is, apart from its numbers."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from xformer.errors import ConfigError
from xformer.ops.activations import activation


@dataclass(frozen=True)
class TransformerConfig:
    """An encoder-decoder Transformer (Vaswani et al., 2017), with the defaults of a modern translator.

    source_vocab_size, target_vocab_size: numbers of tokens
    d_model, num_heads, d_ff: features of a token, attention heads (which share d_model), inner features
    num_encoder_layers, num_decoder_layers: depths
    dropout: on the output of every sublayer and on the embeddings (section 5.4 of the paper)
    attention_dropout, activation_dropout: on attention weights and inside the feed-forward, as torch.nn has them
    activation: "relu", "gelu" or "gelu_tanh"
    norm_position: "pre" (Xiong et al., 2020; with a final norm after each stack) or "post" (the paper's own)
    share_embeddings: one table for source and target tokens, for joint vocabularies
    tie_output: the target embedding is also the output projection (Press and Wolf, 2017)
    scale_embeddings: embeddings times sqrt(d_model), section 3.4 of the paper
    pad_id, bos_id, eos_id: ids of padding, start and end

    Raises ConfigError, naming the field, for values that make no model.
    """

    source_vocab_size: int
    target_vocab_size: int
    d_model: int = 512
    num_heads: int = 8
    d_ff: int = 2048
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = "relu"
    norm_position: str = "pre"
    norm_epsilon: float = 1e-5
    attention_bias: bool = True
    share_embeddings: bool = False
    tie_output: bool = True
    output_bias: bool = False
    scale_embeddings: bool = True
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        for name in ("source_vocab_size", "target_vocab_size", "d_model", "num_heads", "d_ff"):
            _check_whole(name, getattr(self, name), 1)
        for name in ("num_encoder_layers", "num_decoder_layers", "pad_id", "bos_id", "eos_id"):
            _check_whole(name, getattr(self, name), 0)
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0.0 <= value < 1.0:
                raise ConfigError(f"{name} is {value!r}; expected a probability in [0, 1)")
        for name in ("attention_bias", "share_embeddings", "tie_output", "output_bias", "scale_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected true or false")
        if not isinstance(self.norm_epsilon, int | float) or not 0.0 < self.norm_epsilon < 1.0:
            raise ConfigError(f"norm_epsilon is {self.norm_epsilon!r}; expected a small positive number")
        if self.d_model % self.num_heads:
            raise ConfigError(
                f"d_model {self.d_model} is not divisible by num_heads {self.num_heads}; "
                "every head gets d_model / num_heads features"
            )
        if self.norm_position not in ("pre", "post"):
            raise ConfigError(f"norm_position is {self.norm_position!r}; expected 'pre' or 'post'")
        if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
            raise ConfigError(
                f"share_embeddings needs one vocabulary; source has {self.source_vocab_size} tokens, "
                f"target {self.target_vocab_size}"
            )
        activation(self.activation)
        if max(self.pad_id, self.bos_id, self.eos_id) >= self.target_vocab_size:
            raise ConfigError(f"pad_id, bos_id and eos_id must be below target_vocab_size {self.target_vocab_size}")
        if self.pad_id >= self.source_vocab_size:
            raise ConfigError(f"pad_id {self.pad_id} must be below source_vocab_size {self.source_vocab_size}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as a JSON-ready dictionary."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TransformerConfig:
        """Make a configuration from a dictionary; raises ConfigError for an unknown key or a missing one."""
        if not isinstance(values, dict):
            raise ConfigError(f"the model configuration is a {type(values).__name__}; expected names and values")
        known = {field.name for field in dataclasses.fields(cls)}
        for key in values:
            check_key(key, known, "the model configuration")
        missing = {"source_vocab_size", "target_vocab_size"} - values.keys()
        if missing:
            raise ConfigError(f"the model configuration lacks {', '.join(sorted(missing))}")
        return cls(**values)


def check_key(key: str, known: set[str], where: str) -> None:
    """Raise ConfigError for a key that is not known, suggesting the nearest one that is."""
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        raise ConfigError(f"unknown key {key!r} in {where}; {hint}")


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least {least}")
