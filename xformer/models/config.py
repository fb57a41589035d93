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
        received = f"{name} is {layers!r}"
        raise ConfigError(f"{received}; expected indices of layers, from 0 to num_layers - 1, {num_layers - 1}")


class _AttentionFields(Config):
    """Sizes of the model and of its attention, and dropout.

    Args:
        d_model: Features of a token.
        num_heads: Attention heads; must divide d_model.
        d_ff: Inner features of the feed-forward network.
        num_key_value_heads: Heads of keys and values; fewer than num_heads for grouped-query attention, 1 for
            multi-query.
        head_dim: Features of a head; default d_model / num_heads.
        attention_scale: Scale of the scores; default 1 / sqrt(head_dim).
        qk_norm: Normalize the queries and keys of each head (Dehghani et al., 2023).
        qk_norm_all_heads: Normalize the features of all heads together instead of those of each head (OLMo 2).
        window: Distance that self-attention can see, in tokens.
        layer_types: For each layer 'sliding_attention', if the window applies to it, or 'full_attention'; default: to
            all.
        attention_softcap: Limit c of the scores, c tanh(score / c) (Gemma 2).
        attention_sinks: Add a learned logit per head to the denominator of the softmax (gpt-oss).
        dropout: Dropout on embeddings and the output of every sublayer (Vaswani et al., 2017, 5.4).
        attention_dropout: Dropout on the attention weights.
        activation_dropout: Dropout inside the feed-forward network.
    """

    d_model: int = option(default=512, at_least=1)
    num_heads: int = option(default=8, at_least=1)
    d_ff: int = option(default=2048, at_least=1)
    num_key_value_heads: int | None = option(default=None, at_least=1)
    head_dim: int | None = option(default=None, at_least=1)
    attention_scale: float | None = option(default=None, above=0)
    qk_norm: bool = option(default=False)
    qk_norm_all_heads: bool = option(default=False)
    window: int | None = option(default=None, at_least=1)
    layer_types: tuple[str, ...] | None = option(default=None)
    attention_softcap: float | None = option(default=None, above=0)
    attention_sinks: bool = option(default=False)
    dropout: float = option(default=0.1, at_least=0, below=1)
    attention_dropout: float = option(default=0.0, at_least=0, below=1)
    activation_dropout: float = option(default=0.0, at_least=0, below=1)

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
    """The feed-forward network and its experts.

    Args:
        activation: Activation of the feed-forward network.
        num_experts: Experts of the feed-forward network (Shazeer et al., 2017); 0 for a network without.
        num_experts_per_token: Experts that compute a token.
        router_bias: Add a bias to the scores of experts.
        normalize_expert_weights: Divide the weights of the experts of a token by their sum.
        expert_d_ff: Inner features of an expert; default d_ff.
        shared_expert_d_ff: Inner features of a further expert that computes every token, with a gate (Qwen 2 MoE);
            default: none.
        dense_layers: Indices of the layers, from 0, that have no experts.
    """

    activation: Activation | Gated = option(default="relu", choices=_CHOICES)
    num_experts: int = option(default=0, at_least=0)
    num_experts_per_token: int = option(default=2, at_least=1)
    router_bias: bool = option(default=False)
    normalize_expert_weights: bool = option(default=True)
    expert_d_ff: int | None = option(default=None, at_least=1)
    shared_expert_d_ff: int | None = option(default=None, at_least=1)
    dense_layers: tuple[int, ...] = option(default=())

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
    """Norms, residual connections and biases.

    Args:
        norm: Normalization.
        norm_position: Norm before the sublayer, with a final norm (Xiong et al., 2020); after the residual connection,
            as in the paper; before and after the sublayer (sandwich); or of its output, with a final norm (Liu et al.,
            2022).
        residual_scale: Factor of the output of every sublayer (Granite).
        layer_scale: Multiply each feature of the output of every sublayer by a learned factor (Touvron et al., 2021).
        parallel_residual: Add attention and feed-forward of a layer to the same input (Wang and Komatsuzaki, 2021).
        shared_norm: Give both the same norm; needs parallel_residual.
        final_norm: Normalize the output of the last layer; default unless norm_position is post.
        norm_epsilon: Added to the variance by norms.
        attention_bias: Add biases to the projections of queries, keys and values.
        key_bias: Add a bias to the projection of keys; default as attention_bias. It changes no attention weight.
        attention_output_bias: Add a bias to the output projection of attention; default as attention_bias.
        feed_forward_bias: Add biases in the feed-forward network.
        norm_bias: Add a bias to layer norms.
    """

    norm: Literal["layer", "max_scaled", "rms"] = option(default="layer", choices=tuple(NORMS))
    norm_position: Literal["pre", "post", "sandwich", "output"] = option(default="pre", choices=tuple(RESIDUALS))
    residual_scale: float = option(default=1.0, above=0)
    layer_scale: bool = option(default=False)
    parallel_residual: bool = option(default=False)
    shared_norm: bool = option(default=False)
    final_norm: bool | None = option(default=None)
    norm_epsilon: float = option(default=1e-5, above=0, below=1)
    attention_bias: bool = option(default=True)
    key_bias: bool | None = option(default=None)
    attention_output_bias: bool | None = option(default=None)
    feed_forward_bias: bool = option(default=True)
    norm_bias: bool = option(default=True)

    def _check(self) -> None:
        if self.parallel_residual and self.norm_position != "pre":
            raise contradiction(self, "parallel_residual norm_position", "'pre'")
        if self.shared_norm and not self.parallel_residual:
            raise contradiction(self, "shared_norm parallel_residual", "both, or no shared norm")


class _PositionFields(_AttentionFields):
    """Positional encoding.

    Args:
        positions: Positional encoding: the paper's, learned, or relative (rotary, alibi, T5's).
        max_positions: Number of learned positions.
        sinusoidal_layout: Order of the features of sinusoidal positions.
        alibi_scale: Factor of the slopes of alibi (Falcon: 1 / sqrt(head_dim)).
        relative_buckets: Buckets of relative positions (T5).
        relative_max_distance: Distance from which relative positions share a bucket.
        rope_theta: Base of the wavelengths of rotary positions.
        rope_scaling: Change of the wavelengths of rotary positions for long texts, as in Hugging Face's
            rope_parameters.
        rope_local_theta: Base of the wavelengths in layers with a window; default rope_theta with its scaling.
        rotary_fraction: Fraction of a head's features that is rotated.
    """

    positions: Positions = option(default="sinusoidal", choices=POSITIONS)
    max_positions: int = option(default=1024, at_least=1)
    sinusoidal_layout: str = option(default="interleaved", choices=SINUSOIDAL_LAYOUTS)
    alibi_scale: float = option(default=1.0, above=0)
    relative_buckets: int = option(default=32, at_least=2)
    relative_max_distance: int = option(default=128, at_least=1)
    rope_theta: float = option(default=10000.0, above=0)
    rope_scaling: dict[str, Any] | None = option(default=None)
    rope_local_theta: float | None = option(default=None, above=0)
    rotary_fraction: float = option(default=1.0, above=0, at_most=1)

    def _check(self) -> None:
        features, rotated = self.features_per_head, int(self.features_per_head * self.rotary_fraction)
        if self.positions == "rotary" and (features % 2 or features > _MAX_ROTARY):
            name = "d_model / num_heads" if self.head_dim is None else "head_dim"
            problem = f"{name} is {features}"
            raise ConfigError(f"{problem}; positions 'rotary' expects an even number of at most {_MAX_ROTARY}")
        if self.positions == "rotary" and rotated % 2:
            received = f"rotary_fraction is {self.rotary_fraction} and rotates {rotated} of {features} features"
            raise ConfigError(f"{received}; expected an even number")


class ModelConfig(_PositionFields, _NormFields, _FeedForwardFields, _AttentionFields):
    """Fields that all models have. The defaults are those of the original Transformer, with pre-norm.

    The fields of each part are those of a base class, the last one first.

    Args:
        scale_embeddings: Multiply embeddings by sqrt(d_model) (Vaswani et al., 2017, 3.4).
        scale_positions: Scale the sum of embedding and position instead of the embedding alone.
        embedding_scale: Multiply embeddings by this factor, too (Granite).
        embedding_norm: Normalize embeddings before the first layer.
        tie_output: Use the (target) embedding as output projection (Press and Wolf, 2017).
        scale_output: Multiply the last states by d_model^-0.5 before the output projection (T5).
        output_bias: Add a bias to the logits.
        logits_softcap: Limit of the logits, as for scores (Gemma 2).
        rematerialize: Recompute layers in the backward pass (Chen et al., 2016): less memory, a third more time.
        pad_id: Id of padding. If it is also bos_id or eos_id, or None, padding is not inferred from ids: pass masks.
        bos_id: Id that starts an output; None for no such token.
        eos_id: Id that ends an output; None for no such token.
        suppress_special: Never generate pad_id and bos_id, unless they are also eos_id.

    Raises:
        ConfigError: For unknown fields and invalid values, naming the field.
    """

    scale_embeddings: bool = option(default=True)
    scale_positions: bool = option(default=False)
    embedding_scale: float = option(default=1.0, above=0)
    embedding_norm: bool = option(default=False)
    tie_output: bool = option(default=True)
    scale_output: bool = option(default=False)
    output_bias: bool = option(default=False)
    logits_softcap: float | None = option(default=None, above=0)
    rematerialize: bool = option(default=False)
    pad_id: int | None = option(default=0, at_least=0)
    bos_id: int | None = option(default=1, at_least=0)
    eos_id: int | None = option(default=2, at_least=0)
    suppress_special: bool = option(default=True)

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
    """Configuration of an encoder-decoder Transformer (Vaswani et al., 2017).

    Args:
        bos_id: Id that starts an output.
        eos_id: Id that ends an output.
        source_vocab_size: Number of source tokens.
        target_vocab_size: Number of target tokens.
        num_encoder_layers: Layers of the encoder.
        num_decoder_layers: Layers of the decoder; 0 makes an encoder only.
        share_embeddings: Share one table between source and target (joint vocabulary).
        copy: Copy source tokens with a pointer-generator (See et al., 2017); needs share_embeddings.
        share_relative_bias: Use the same bias of relative positions in all layers of a stack; false gives each layer
            its own (umT5).
        decoder_norm_before_positions: In the decoder, normalize embeddings before positions are added
            (BlenderbotSmall); needs embedding_norm.
        length_encoding: Show the decoder how many tokens are still to come (Takase and Okazaki, 2019).
    """

    bos_id: int = option(default=1, at_least=0)
    eos_id: int = option(default=2, at_least=0)
    source_vocab_size: int = option(at_least=1)
    target_vocab_size: int = option(at_least=1)
    num_encoder_layers: int = option(default=6, at_least=0, at_most=_MAX_LAYERS)
    num_decoder_layers: int = option(default=6, at_least=0, at_most=_MAX_LAYERS)
    share_embeddings: bool = option(default=False)
    copy: bool = option(default=False)
    share_relative_bias: bool = option(default=True)
    decoder_norm_before_positions: bool = option(default=False)
    length_encoding: bool = option(default=False)

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

    Args:
        source_vocab_size: Features of a source frame, e.g. mel bands.
        max_source_positions: Number of learned positions of the encoder: half the frames.
    """

    source_vocab_size: int = option(default=80, at_least=1)
    max_source_positions: int = option(default=1500, at_least=1)

    def _check(self) -> None:
        for name in ("share_embeddings", "length_encoding"):
            if getattr(self, name):
                raise ConfigError(f"{name} is true; a model of audio expects false")

    @property
    def source_padding_id(self) -> int | None:
        """None: frames are no ids."""
        return None


class LanguageModelConfig(ModelConfig):
    """Configuration of a decoder-only Transformer (Radford et al., 2018): each token attends to earlier ones.

    Args:
        vocab_size: Number of tokens.
        num_layers: Number of layers.
        logits_scale: Factor of the logits (Granite).
        causal: Let each token attend to those before it only; false makes an encoder, which generates no text.
        has_output: Compute logits; false for a model of states, such as an embedder.
        layers_without_positions: Indices of the layers, from 0, that have no relative positions (Kazemnejad et al.,
            2023).
    """

    vocab_size: int = option(at_least=1)
    num_layers: int = option(default=6, at_least=0, at_most=_MAX_LAYERS)
    logits_scale: float = option(default=1.0, above=0)
    causal: bool = option(default=True)
    has_output: bool = option(default=True)
    layers_without_positions: tuple[int, ...] = option(default=())

    def _check(self) -> None:
        _check_layers("layers_without_positions", self.layers_without_positions, self.num_layers)


class _EncoderConfig(ModelConfig):
    """Fields of all encoders.

    Args:
        num_layers: Number of layers.
        pooler: Layer that summarizes the input by one vector: a linear map with this activation, or attention of a
            learned query (Lee et al., 2019, 3.2).
        pooling: Input of a linear pooler: the vector of the first or the last token, or the mean of all tokens.
        projection_dim: Features of a linear pooler; default d_model.
        pooler_norm: Normalize the output of the pooler (ModernBERT).
        head_bias: Add biases to the maps of the pooler and of masked language modeling.
        first_norm: Normalize the input of the first self-attention; ModernBERT has embedding_norm instead.
        share_layers: Use the same parameters in all layers (Lan et al., 2020, 3.1).
        relative_bias: Add T5's bias of relative positions to the scores, beside absolute positions (MPNet).
        num_labels: Classes of the classifier; 0 for none.
        labels: Names of the classes.
        problem_type: Meaning of the logits of the classifier: one of the classes applies, any number of them, or they
            are values.
    """

    num_layers: int = option(default=6, at_least=0, at_most=_MAX_LAYERS)
    pooler: str = option(default="none", choices=("none", "attention", "identity", "tanh", *ACTIVATIONS))
    pooling: str = option(default="cls", choices=("cls", "mean", "last"))
    projection_dim: int | None = option(default=None, at_least=1)
    pooler_norm: bool = option(default=False)
    head_bias: bool = option(default=True)
    first_norm: bool = option(default=True)
    share_layers: bool = option(default=False)
    relative_bias: bool = option(default=False)
    num_labels: int = option(default=0, at_least=0)
    labels: tuple[str, ...] | None = option(default=None)
    problem_type: str = option(default=PROBLEM_TYPES[0], choices=PROBLEM_TYPES)

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
    """Configuration of an encoder-only Transformer (Devlin et al., 2019): each token attends to all.

    Args:
        vocab_size: Number of tokens.
        embedding_dim: Features of the embeddings, which a linear map turns into d_model (Lan et al., 2020, 3.1);
            default d_model without a map.
        positions: Positional encoding: that of other models, or vectors of distances (disentangled, He et al., 2021).
        num_token_types: Types of tokens, e.g. of the two texts of a pair; 0 for none.
        causal: Let each token attend to those before it only (CLIP).
        convolution_size: Tokens that a convolution beside the first layer sees, an odd number (DeBERTa-v2); 0 for no
            convolution.
        convolution_activation: Activation of the convolution.
        masked_lm: Add the head of masked language modeling.
        masked_lm_activation: Activation of that head.
    """

    vocab_size: int = option(at_least=1)
    embedding_dim: int | None = option(default=None, at_least=1)
    positions: Positions | Literal["disentangled"] = option(  # type: ignore[assignment]
        default="sinusoidal", choices=(*POSITIONS, "disentangled")
    )
    num_token_types: int = option(default=0, at_least=0)
    causal: bool = option(default=False)
    convolution_size: int = option(default=0, at_least=0)
    convolution_activation: Activation | Literal["tanh"] = option(default="tanh", choices=("tanh", *ACTIVATIONS))
    masked_lm: bool = option(default=False)
    masked_lm_activation: Activation = option(default="gelu", choices=tuple(ACTIVATIONS))

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
    """Configuration of a Vision Transformer (Dosovitskiy et al., 2021). It has no tokens: their ids have no effect.

    Args:
        image_size: Height and width of an image, in pixels.
        patch_size: Height and width of a patch; rows and columns of pixels after the last whole patch are left out.
        num_channels: Channels of a pixel.
        patch_bias: Add a bias to the vectors of patches.
        class_token: Put a learned vector before those of the patches.
        activation: Activation of the feed-forward network.
        positions: Positional encoding of the class token and the patches.
        resize_positions: Accept images of other sizes, for which learned positions are interpolated (DINOv2).
        classify_patches: Classify the state of the class token together with the mean of those of the patches (DINOv2).
    """

    image_size: int = option(default=224, at_least=1)
    patch_size: int = option(default=16, at_least=1)
    num_channels: int = option(default=3, at_least=1)
    patch_bias: bool = option(default=True)
    class_token: bool = option(default=True)
    activation: Activation | Gated = option(default="gelu", choices=_CHOICES)
    positions: Positions = option(default="learned", choices=POSITIONS)
    resize_positions: bool = option(default=False)
    classify_patches: bool = option(default=False)

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

    Args:
        text: Configuration of the encoder of texts. A text ends with its first eos_id, if any.
        image: Configuration of the encoder of images.
        sigmoid: The probability of a pair is the sigmoid of its logit, which has a bias (Zhai et al., 2023); otherwise
            the texts of an image have a softmax.

    Raises:
        ConfigError: For values that are not such configurations, encoders without a pooler, and vectors of two sizes.
    """

    text: EncoderConfig = option()
    image: ImageEncoderConfig = option()
    sigmoid: bool = option(default=False)

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
