"""Configurations of models."""

from __future__ import annotations

from typing import Any, Literal, get_args

from xformer.config import Config, check_heads, contradiction, option
from xformer.errors import ConfigError
from xformer.layers.basic import NORMS
from xformer.layers.positions import SINUSOIDAL_LAYOUTS
from xformer.layers.transformer import RESIDUALS
from xformer.ops.activations import ACTIVATIONS, Activation

Positions = Literal["sinusoidal", "learned", "rotary", "alibi", "relative", "none"]
POSITIONS = get_args(Positions)
Gated = Literal["swiglu", "swiglu_clamped", "geglu", "geglu_tanh"]
# Gated activations and the function of their gate (Shazeer, 2020).
GATED = {"swiglu": "silu", "swiglu_clamped": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
_CHOICES = (*ACTIVATIONS, *GATED)
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")
LAYER_TYPES = ("sliding_attention", "full_attention")
_MAX_LAYERS = 10_000  # far above any model: making a model makes objects for each
_MAX_ROTARY = 65_536  # features of a head, far above any model: making a model computes their wavelengths


def _check_layers(name: str, layers: Any, num_layers: int) -> None:
    """Raise ConfigError unless a field has indices of layers."""
    if not isinstance(layers, tuple) or not all(type(each) is int and 0 <= each < num_layers for each in layers):
        raise ConfigError(
            f"{name} is {layers!r}; expected indices of layers, from 0 to num_layers - 1, {num_layers - 1}"
        )


class _AttentionFields(Config):
    """Sizes of the model and of its attention, and dropout."""

    d_model: int = option("Features of a token.", default=512, at_least=1)
    num_heads: int = option("Attention heads; must divide d_model.", default=8, at_least=1)
    d_ff: int = option("Inner features of the feed-forward network.", default=2048, at_least=1)
    num_key_value_heads: int | None = option(
        "Heads of keys and values; fewer than num_heads for grouped-query attention, 1 for multi-query.",
        default=None,
        at_least=1,
    )
    head_dim: int | None = option("Features of a head; default d_model / num_heads.", default=None, at_least=1)
    attention_scale: float | None = option("Scale of the scores; default 1 / sqrt(head_dim).", default=None, above=0)
    qk_norm: bool = option("Normalize the queries and keys of each head (Dehghani et al., 2023).", default=False)
    qk_norm_all_heads: bool = option(
        "Normalize the features of all heads together instead of those of each head (OLMo 2).", default=False
    )
    window: int | None = option("Distance that self-attention can see, in tokens.", default=None, at_least=1)
    layer_types: tuple[str, ...] | None = option(
        "For each layer 'sliding_attention', if the window applies to it, or 'full_attention'; default: to all.",
        default=None,
    )
    attention_softcap: float | None = option(
        "Limit c of the scores, c tanh(score / c) (Gemma 2).", default=None, above=0
    )
    attention_sinks: bool = option(
        "Add a learned logit per head to the denominator of the softmax (gpt-oss).", default=False
    )
    dropout: float = option(
        "Dropout on embeddings and the output of every sublayer (Vaswani et al., 2017, 5.4).",
        default=0.1,
        at_least=0,
        below=1,
    )
    attention_dropout: float = option("Dropout on the attention weights.", default=0.0, at_least=0, below=1)
    activation_dropout: float = option("Dropout inside the feed-forward network.", default=0.0, at_least=0, below=1)

    def _check(self) -> None:
        if self.layer_types is not None:
            if unknown := set(self.layer_types) - set(LAYER_TYPES):
                raise ConfigError(f"layer_types has {min(unknown)!r}; expected 'sliding_attention' or 'full_attention'")
            if (length := len(self.layer_types)) != self._num_layers:
                raise ConfigError(f"layer_types has {length} entries; expected {self._num_layers}, one for each layer")
        check_heads(self.d_model, self.num_heads, self.num_key_value_heads or self.num_heads, self.head_dim)

    @property
    def _num_layers(self) -> int:
        """Number of layers, of the larger stack of an encoder-decoder."""
        return max(getattr(self, name, 0) for name in ("num_layers", "num_encoder_layers", "num_decoder_layers"))

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer, counted from 0; None if it sees all tokens."""
        return self.window if self.layer_types is None or self.layer_types[layer] == "sliding_attention" else None

    @property
    def features_per_head(self) -> int:
        """Features of a head: head_dim, or d_model / num_heads."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim


class _FeedForwardFields(_AttentionFields):
    """The feed-forward network and its experts."""

    activation: Activation | Gated = option("Activation of the feed-forward network.", default="relu", choices=_CHOICES)
    num_experts: int = option(
        "Experts of the feed-forward network (Shazeer et al., 2017); 0 for a network without.", default=0, at_least=0
    )
    num_experts_per_token: int = option("Experts that compute a token.", default=2, at_least=1)
    router_bias: bool = option("Add a bias to the scores of experts.", default=False)
    normalize_expert_weights: bool = option("Divide the weights of the experts of a token by their sum.", default=True)
    expert_d_ff: int | None = option("Inner features of an expert; default d_ff.", default=None, at_least=1)
    shared_expert_d_ff: int | None = option(
        "Inner features of a further expert that computes every token, with a gate (Qwen 2 MoE); default: none.",
        default=None,
        at_least=1,
    )
    dense_layers: tuple[int, ...] = option("Indices of the layers, from 0, that have no experts.", default=())

    def _check(self) -> None:
        _check_layers("dense_layers", self.dense_layers, self._num_layers)
        for name in _FeedForwardFields.__annotations__ if self.num_experts == 0 else ():
            if name not in ("activation", "num_experts") and getattr(self, name) != getattr(_FeedForwardFields, name):
                raise contradiction(self, f"{name} num_experts", "a number of experts")
        if 0 < self.num_experts < self.num_experts_per_token:
            raise contradiction(self, "num_experts_per_token", f"at most num_experts, {self.num_experts}")

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts."""
        return self.num_experts > 0 and layer not in self.dense_layers


class _NormFields(Config):
    """Norms, residual connections and biases."""

    norm: Literal["layer", "max_scaled", "rms"] = option("Normalization.", default="layer", choices=tuple(NORMS))
    norm_position: Literal["pre", "post", "sandwich", "output"] = option(
        "Norm before the sublayer, with a final norm (Xiong et al., 2020); after the residual connection, as in the "
        "paper; before and after the sublayer (sandwich); or of its output, with a final norm (Liu et al., 2022).",
        default="pre",
        choices=tuple(RESIDUALS),
    )
    residual_scale: float = option("Factor of the output of every sublayer (Granite).", default=1.0, above=0)
    layer_scale: bool = option(
        "Multiply each feature of the output of every sublayer by a learned factor (Touvron et al., 2021).",
        default=False,
    )
    parallel_residual: bool = option(
        "Add attention and feed-forward of a layer to the same input (Wang and Komatsuzaki, 2021).", default=False
    )
    shared_norm: bool = option("Give both the same norm; needs parallel_residual.", default=False)
    final_norm: bool | None = option(
        "Normalize the output of the last layer; default unless norm_position is post.", default=None
    )
    norm_epsilon: float = option("Added to the variance by norms.", default=1e-5, above=0, below=1)
    attention_bias: bool = option("Add biases to the projections of queries, keys and values.", default=True)
    key_bias: bool | None = option(
        "Add a bias to the projection of keys; default as attention_bias. It changes no attention weight.", default=None
    )
    attention_output_bias: bool | None = option(
        "Add a bias to the output projection of attention; default as attention_bias.", default=None
    )
    feed_forward_bias: bool = option("Add biases in the feed-forward network.", default=True)
    norm_bias: bool = option("Add a bias to layer norms.", default=True)

    def _check(self) -> None:
        if self.parallel_residual and self.norm_position != "pre":
            raise contradiction(self, "parallel_residual norm_position", "'pre'")
        if self.shared_norm and not self.parallel_residual:
            raise contradiction(self, "shared_norm parallel_residual", "both, or no shared norm")


class _PositionFields(_AttentionFields):
    positions: Positions = option(
        "Positional encoding: the paper's, learned, or relative (rotary, alibi, T5's).",
        default="sinusoidal",
        choices=POSITIONS,
    )
    max_positions: int = option("Number of learned positions.", default=1024, at_least=1)
    sinusoidal_layout: str = option(
        "Order of the features of sinusoidal positions.", default="interleaved", choices=SINUSOIDAL_LAYOUTS
    )
    alibi_scale: float = option("Factor of the slopes of alibi (Falcon: 1 / sqrt(head_dim)).", default=1.0, above=0)
    relative_buckets: int = option("Buckets of relative positions (T5).", default=32, at_least=2)
    relative_max_distance: int = option(
        "Distance from which relative positions share a bucket.", default=128, at_least=1
    )
    rope_theta: float = option("Base of the wavelengths of rotary positions.", default=10000.0, above=0)
    rope_scaling: dict[str, Any] | None = option(
        "Change of the wavelengths of rotary positions for long texts, as in Hugging Face's rope_parameters.",
        default=None,
    )
    rope_local_theta: float | None = option(
        "Base of the wavelengths in layers with a window; default rope_theta with its scaling.", default=None, above=0
    )
    rotary_fraction: float = option("Fraction of a head's features that is rotated.", default=1.0, above=0, at_most=1)

    def _check(self) -> None:
        features, rotated = self.features_per_head, int(self.features_per_head * self.rotary_fraction)
        if self.positions == "rotary" and (features % 2 or features > _MAX_ROTARY):
            name = "d_model / num_heads" if self.head_dim is None else "head_dim"
            raise ConfigError(
                f"{name} is {features}; positions 'rotary' expects an even number of at most {_MAX_ROTARY}"
            )
        if self.positions == "rotary" and rotated % 2:
            received = f"rotary_fraction is {self.rotary_fraction} and rotates {rotated} of {features} features"
            raise ConfigError(f"{received}; expected an even number")


class ModelConfig(_PositionFields, _NormFields, _FeedForwardFields, _AttentionFields):
    """Fields that all models have. The defaults are those of the original Transformer, with pre-norm.

    The fields of each part are those of a base class, the last one first.

    Raises:
        ConfigError: For unknown fields and invalid values, naming the field.
    """

    scale_embeddings: bool = option("Multiply embeddings by sqrt(d_model) (Vaswani et al., 2017, 3.4).", default=True)
    scale_positions: bool = option(
        "Scale the sum of embedding and position instead of the embedding alone.", default=False
    )
    embedding_scale: float = option("Multiply embeddings by this factor, too (Granite).", default=1.0, above=0)
    embedding_norm: bool = option("Normalize embeddings before the first layer.", default=False)
    tie_output: bool = option("Use the (target) embedding as output projection (Press and Wolf, 2017).", default=True)
    scale_output: bool = option(
        "Multiply the last states by d_model^-0.5 before the output projection (T5).", default=False
    )
    output_bias: bool = option("Add a bias to the logits.", default=False)
    logits_softcap: float | None = option("Limit of the logits, as for scores (Gemma 2).", default=None, above=0)
    rematerialize: bool = option(
        "Recompute layers in the backward pass (Chen et al., 2016): less memory, a third more time.", default=False
    )
    pad_id: int | None = option(
        "Id of padding. If it is also bos_id or eos_id, or None, padding is not inferred from ids: pass masks.",
        default=0,
        at_least=0,
    )
    bos_id: int | None = option("Id that starts an output; None for no such token.", default=1, at_least=0)
    eos_id: int | None = option("Id that ends an output; None for no such token.", default=2, at_least=0)
    suppress_special: bool = option("Never generate pad_id and bos_id, unless they are also eos_id.", default=True)

    def _check(self) -> None:
        if self.num_experts and self.rematerialize:  # a loss of the recorded routing would have no gradient
            raise ConfigError("rematerialize is true; a model with experts expects false")

    @property
    def padding_id(self) -> int | None:
        """Id that is padding wherever it occurs; None if pad_id has another meaning too."""
        return None if self.pad_id in (self.bos_id, self.eos_id) else self.pad_id

    @property
    def suppressed_ids(self) -> frozenset[int]:
        """Ids that no output contains: pad_id and bos_id, unless they are also eos_id."""
        if not self.suppress_special:
            return frozenset()
        return frozenset(each for each in (self.bos_id, self.pad_id) if each is not None and each != self.eos_id)


class TransformerConfig(ModelConfig):
    """Configuration of an encoder-decoder Transformer (Vaswani et al., 2017)."""

    bos_id: int = option("Id that starts an output.", default=1, at_least=0)
    eos_id: int = option("Id that ends an output.", default=2, at_least=0)
    source_vocab_size: int = option("Number of source tokens.", at_least=1)
    target_vocab_size: int = option("Number of target tokens.", at_least=1)
    num_encoder_layers: int = option("Layers of the encoder.", default=6, at_least=0, at_most=_MAX_LAYERS)
    num_decoder_layers: int = option(
        "Layers of the decoder; 0 makes an encoder only.", default=6, at_least=0, at_most=_MAX_LAYERS
    )
    share_embeddings: bool = option("Share one table between source and target (joint vocabulary).", default=False)
    copy: bool = option(
        "Copy source tokens with a pointer-generator (See et al., 2017); needs share_embeddings.", default=False
    )
    share_relative_bias: bool = option(
        "Use the same bias of relative positions in all layers of a stack; false gives each layer its own (umT5).",
        default=True,
    )
    decoder_norm_before_positions: bool = option(
        "In the decoder, normalize embeddings before positions are added (BlenderbotSmall); needs embedding_norm.",
        default=False,
    )
    length_encoding: bool = option(
        "Show the decoder how many tokens are still to come (Takase and Okazaki, 2019).", default=False
    )

    def _check(self) -> None:
        if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
            raise contradiction(self, "source_vocab_size target_vocab_size share_embeddings", "equal sizes")
        if self.copy and not self.share_embeddings:
            raise contradiction(self, "copy share_embeddings", "both: copying needs a shared vocabulary")
        if not self.share_relative_bias and self.positions != "relative":
            raise contradiction(self, "share_relative_bias positions", "'relative'")
        if self.decoder_norm_before_positions and not self.embedding_norm:
            raise contradiction(self, "decoder_norm_before_positions embedding_norm", "both, or neither")
        if self.length_encoding and self.padding_id is None:
            raise ConfigError("length_encoding expects a pad_id that is neither bos_id nor eos_id")
        for name in ("pad_id", "bos_id", "eos_id"):
            if (value := getattr(self, name)) is not None and value >= self.target_vocab_size:
                raise contradiction(self, name, f"less than target_vocab_size {self.target_vocab_size}")
        if self.source_padding_id is not None and self.source_padding_id >= self.source_vocab_size:
            raise contradiction(self, "pad_id", f"less than source_vocab_size {self.source_vocab_size}")

    @property
    def source_padding_id(self) -> int | None:
        """Id that is padding wherever it occurs in a source; sources have no bos_id."""
        return self.label_padding_id

    @property
    def label_padding_id(self) -> int | None:
        """Id that is padding wherever it occurs in labels, which have no bos_id."""
        return None if self.pad_id == self.eos_id else self.pad_id


class SpeechTransformerConfig(TransformerConfig):
    """Configuration of an encoder-decoder Transformer whose source is audio (Radford et al., 2023).

    The features of a frame take the place of the source vocabulary.
    """

    source_vocab_size: int = option("Features of a source frame, e.g. mel bands.", default=80, at_least=1)
    max_source_positions: int = option(
        "Number of learned positions of the encoder: half the frames.", default=1500, at_least=1
    )

    def _check(self) -> None:
        for name in ("share_embeddings", "length_encoding"):
            if getattr(self, name):
                raise ConfigError(f"{name} is true; a model of audio expects false")

    @property
    def source_padding_id(self) -> int | None:
        """None: frames are no ids."""
        return None


class LanguageModelConfig(ModelConfig):
    """Configuration of a decoder-only Transformer (Radford et al., 2018): each token attends to earlier ones."""

    vocab_size: int = option("Number of tokens.", at_least=1)
    num_layers: int = option("Number of layers.", default=6, at_least=0, at_most=_MAX_LAYERS)
    logits_scale: float = option("Factor of the logits (Granite).", default=1.0, above=0)
    causal: bool = option(
        "Let each token attend to those before it only; false makes an encoder, which generates no text.", default=True
    )
    has_output: bool = option("Compute logits; false for a model of states, such as an embedder.", default=True)
    layers_without_positions: tuple[int, ...] = option(
        "Indices of the layers, from 0, that have no relative positions (Kazemnejad et al., 2023).", default=()
    )

    def _check(self) -> None:
        _check_layers("layers_without_positions", self.layers_without_positions, self.num_layers)


class _EncoderConfig(ModelConfig):
    """Fields of all encoders."""

    num_layers: int = option("Number of layers.", default=6, at_least=0, at_most=_MAX_LAYERS)
    pooler: str = option(
        "Layer that summarizes the input by one vector: a linear map with this activation, or attention of a learned "
        "query (Lee et al., 2019, 3.2).",
        default="none",
        choices=("none", "attention", "identity", "tanh", *ACTIVATIONS),
    )
    pooling: str = option(
        "Input of a linear pooler: the vector of the first or the last token, or the mean of all tokens.",
        default="cls",
        choices=("cls", "mean", "last"),
    )
    projection_dim: int | None = option("Features of a linear pooler; default d_model.", default=None, at_least=1)
    pooler_norm: bool = option("Normalize the output of the pooler (ModernBERT).", default=False)
    head_bias: bool = option("Add biases to the maps of the pooler and of masked language modeling.", default=True)
    first_norm: bool = option(
        "Normalize the input of the first self-attention; ModernBERT has embedding_norm instead.", default=True
    )
    share_layers: bool = option("Use the same parameters in all layers (Lan et al., 2020, 3.1).", default=False)
    relative_bias: bool = option(
        "Add T5's bias of relative positions to the scores, beside absolute positions (MPNet).", default=False
    )
    num_labels: int = option("Classes of the classifier; 0 for none.", default=0, at_least=0)
    labels: tuple[str, ...] | None = option("Names of the classes.", default=None)
    problem_type: str = option(
        "Meaning of the logits of the classifier: one of the classes applies, any number of them, or they are values.",
        default=PROBLEM_TYPES[0],
        choices=PROBLEM_TYPES,
    )

    def _check(self) -> None:
        if self.labels is not None and len(self.labels) != self.num_labels:
            raise ConfigError(f"labels has {len(self.labels)} names; expected num_labels, {self.num_labels}")
        is_linear = self.pooler not in ("none", "attention")
        if not is_linear and (self.pooling != "cls" or self.pooler_norm or self.projection_dim is not None):
            raise contradiction(self, "pooling pooler_norm projection_dim pooler", "a linear pooler")
        if not self.first_norm and (self.norm_position != "pre" or self.shared_norm):
            raise contradiction(self, "first_norm norm_position shared_norm", "'pre' and false")
        if self.share_layers and (self.layer_types is not None or self.dense_layers or not self.first_norm):
            raise contradiction(self, "share_layers", "no layer_types, no dense_layers, and first_norm true")
        if self.relative_bias and self.positions in ("rotary", "alibi", "relative", "disentangled"):
            raise contradiction(self, "relative_bias positions", "absolute positions")

    @property
    def pooled_features(self) -> int:
        """Features of the vector that summarizes an input."""
        return self.d_model if self.projection_dim is None else self.projection_dim


class EncoderConfig(_EncoderConfig):
    """Configuration of an encoder-only Transformer (Devlin et al., 2019): each token attends to all."""

    vocab_size: int = option("Number of tokens.", at_least=1)
    embedding_dim: int | None = option(
        "Features of the embeddings, which a linear map turns into d_model (Lan et al., 2020, 3.1); default d_model "
        "without a map.",
        default=None,
        at_least=1,
    )
    positions: Positions | Literal["disentangled"] = option(  # type: ignore[assignment]
        "Positional encoding: that of other models, or vectors of distances (disentangled, He et al., 2021).",
        default="sinusoidal",
        choices=(*POSITIONS, "disentangled"),
    )
    num_token_types: int = option(
        "Types of tokens, e.g. of the two texts of a pair; 0 for none.", default=0, at_least=0
    )
    causal: bool = option("Let each token attend to those before it only (CLIP).", default=False)
    convolution_size: int = option(
        "Tokens that a convolution beside the first layer sees, an odd number (DeBERTa-v2); 0 for no convolution.",
        default=0,
        at_least=0,
    )
    convolution_activation: Activation | Literal["tanh"] = option(
        "Activation of the convolution.", default="tanh", choices=("tanh", *ACTIVATIONS)
    )
    masked_lm: bool = option("Add the head of masked language modeling.", default=False)
    masked_lm_activation: Activation = option("Activation of that head.", default="gelu", choices=tuple(ACTIVATIONS))

    def _check(self) -> None:
        others = " ".join(name for name in ("share_layers", "parallel_residual", "causal") if getattr(self, name))
        if self.convolution_size and (others or self.convolution_size % 2 == 0):
            expected = "an odd number without share_layers, parallel_residual and causal"
            raise contradiction(self, f"convolution_size {others}", expected)
        if self.positions == "disentangled" and self.num_key_value_heads not in (None, self.num_heads):
            raise contradiction(self, "positions num_key_value_heads", f"num_heads, {self.num_heads}")

    @property
    def padding_id(self) -> int | None:
        """Id that is padding wherever it occurs."""
        return self.pad_id


class ImageEncoderConfig(_EncoderConfig):
    """Configuration of a Vision Transformer (Dosovitskiy et al., 2021). It has no tokens: their ids have no effect."""

    image_size: int = option("Height and width of an image, in pixels.", default=224, at_least=1)
    patch_size: int = option(
        "Height and width of a patch; rows and columns of pixels after the last whole patch are left out.",
        default=16,
        at_least=1,
    )
    num_channels: int = option("Channels of a pixel.", default=3, at_least=1)
    patch_bias: bool = option("Add a bias to the vectors of patches.", default=True)
    class_token: bool = option("Put a learned vector before those of the patches.", default=True)
    activation: Activation | Gated = option("Activation of the feed-forward network.", default="gelu", choices=_CHOICES)
    positions: Positions = option(
        "Positional encoding of the class token and the patches.", default="learned", choices=POSITIONS
    )
    resize_positions: bool = option(
        "Accept images of other sizes, for which learned positions are interpolated (DINOv2).", default=False
    )
    classify_patches: bool = option(
        "Classify the state of the class token together with the mean of those of the patches (DINOv2).", default=False
    )

    def _check(self) -> None:
        if self.patch_size > self.image_size:
            raise contradiction(self, "patch_size", f"at most image_size {self.image_size}")
        if self.resize_positions and self.image_size % self.patch_size:
            raise contradiction(self, "patch_size resize_positions", f"a divisor of image_size {self.image_size}")
        pools_first = self.num_labels > 0 if self.pooler == "none" else self.pooler != "attention"
        if not self.class_token and (pools_first or self.resize_positions or self.classify_patches):
            expected = "false for both, and pooler 'attention', or 'none' without labels"
            raise contradiction(self, "class_token pooler num_labels resize_positions classify_patches", expected)
        if self.resize_positions and self.positions != "learned":
            raise contradiction(self, "resize_positions positions", "'learned'")

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class ImageTextEncoderConfig(Config):
    """Configuration of an encoder of texts and one of images whose vectors are compared (Radford et al., 2021).

    Raises:
        ConfigError: For values that are not such configurations, encoders without a pooler, and vectors of two sizes.
    """

    text: EncoderConfig = option("Configuration of the encoder of texts. A text ends with its first eos_id, if any.")
    image: ImageEncoderConfig = option("Configuration of the encoder of images.")
    sigmoid: bool = option(
        "The probability of a pair is the sigmoid of its logit, which has a bias (Zhai et al., 2023); otherwise the "
        "texts of an image have a softmax.",
        default=False,
    )

    def _check(self) -> None:
        for name, cls in (("text", EncoderConfig), ("image", ImageEncoderConfig)):
            part = getattr(self, name)
            if isinstance(part, dict):
                part = cls.from_dict(part, name)
                object.__setattr__(self, name, part)
            if not isinstance(part, cls):
                raise ConfigError(f"{name} is {part!r:.60}; expected {cls.__name__}(...)")
            if part.pooler == "none":
                raise ConfigError(f"pooler of {name} is 'none'; expected a pooler, which makes the vector to compare")
        if self.text.pooled_features != self.image.pooled_features:
            raise ConfigError(
                f"vectors of texts have {self.text.pooled_features} features, those of images "
                f"{self.image.pooled_features}; expected equal sizes, see projection_dim"
            )
