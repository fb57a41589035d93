"""Encoders of images and texts whose vectors are compared (Radford et al., 2021)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, to_host
from xformer.errors import DataError
from xformer.models.base import BaseModel
from xformer.models.builder import LayerFactory
from xformer.models.config import ImageTextEncoderConfig
from xformer.models.encoder import Encoder, as_token_mask, normalized
from xformer.models.image_encoder import ImageEncoder
from xformer.models.token_ids import as_token_ids, ids_of
from xformer.random import Rng, split_rng
from xformer.tree import check_array


class ImageTextEncoder(BaseModel, init=False):
    """Encoders of images and texts whose vectors are compared (CLIP, Radford et al., 2021; SigLIP, Zhai et al., 2023).

    The logit of an image and a text is the cosine of their vectors, multiplied by a learned scale; SigLIP adds a bias.

    Arguments are those of `BaseModel`.

    Attributes:
        text: Encoder of texts.
        image: Encoder of images.
        logit_scale: Logarithm of the scale, (1,).
        logit_bias: Bias, (1,), or None.

    Examples:
        >>> import numpy as np
        >>> from xformer.models import EncoderConfig, ImageEncoderConfig
        >>> sizes = {"d_model": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1, "pooler": "identity"}
        >>> text = EncoderConfig(vocab_size=13, pooling="last", **sizes)
        >>> image = ImageEncoderConfig(image_size=8, patch_size=4, **sizes)
        >>> model = ImageTextEncoder(ImageTextEncoderConfig(text=text, image=image))
        >>> model(np.zeros((2, 3, 8, 8), dtype=np.float32), [[5, 4, 2], [7, 2, 0], [6, 3, 2]]).shape
        (2, 3)
    """

    config_class = ImageTextEncoderConfig  # type: ignore[assignment] # it has two configurations

    text: Encoder
    image: ImageEncoder
    logit_scale: Array
    logit_bias: Array | None
    config: ImageTextEncoderConfig  # type: ignore[assignment]

    def _build(self, make: LayerFactory) -> None:
        c, init = self.config, make.init
        self.text = Encoder(c.text, seed=init)
        self.image = ImageEncoder(c.image, seed=init)
        # The initial values of both papers.
        self.logit_scale = init.full((1,), math.log(10.0 if c.sigmoid else 1.0 / 0.07))
        self.logit_bias = init.full((1,), -10.0) if c.sigmoid else None

    def __call__(self, images: Any, tokens: Any, *, mask: Any = None, rng: Rng | None = None) -> Array:
        """Compute the logit of each image and each text.

        Args:
            images: As for `ImageEncoder`.
            tokens: As for `encode_text`; any number of texts.
            mask: As for `encode_text`.
            rng: Draws dropout; None switches it off.

        Returns:
            Logits (images, texts).
        """
        image_rng, text_rng = split_rng(rng, 2)
        return self.logits(self.encode_image(images, rng=image_rng), self.encode_text(tokens, mask=mask, rng=text_rng))

    def encode_image(self, images: Any, *, normalize: bool = False, rng: Rng | None = None) -> Array:
        """Compute a vector for each image.

        Args:
            images: As for `ImageEncoder`.
            normalize: Divide vectors by their length, so that dot products are cosine similarities.
            rng: Draws dropout; None switches it off.

        Returns:
            Vectors (images, features).
        """
        vectors = self.image.pooler(self.image(images, rng=rng))  # type: ignore[misc] # the configuration has a pooler
        return normalized(vectors) if normalize else vectors

    def encode_text(self, tokens: Any, *, mask: Any = None, normalize: bool = False, rng: Rng | None = None) -> Array:
        """Compute a vector for each text.

        Args:
            tokens: Ids (texts, length). If the configuration has an eos_id (CLIP), a text ends with the first one.
                Otherwise all tokens other than pad_id belong to the text. SigLIP has neither: its texts are padded to
                one length, and tokens attend to the padding.
            mask: Boolean, True = may be attended to, (texts, length). Default: the tokens of the text.
            normalize: As for `encode_image`.
            rng: Draws dropout; None switches it off.

        Returns:
            Vectors (texts, features).

        Raises:
            DataError: For ids out of range, and for a text without its eos_id.
            ShapeError: For other ranks, and a mask of another shape or dtype.
            BackendError: For an array of another library.
        """
        tokens = as_token_ids(tokens, "token", self.config.text.vocab_size, self._parameter)
        self._check_ends(ids_of(tokens))
        vectors = self._encode_ids(tokens, mask=mask, rng=rng)
        return normalized(vectors) if normalize else vectors

    def _encode_ids(self, tokens: Array, *, mask: Any = None, rng: Rng | None = None) -> Array:
        """Compute the vectors of texts, of which those without an eos_id end with their last token."""
        ids = ids_of(tokens)
        is_token = self._is_token(ids)
        mask = is_token if mask is None else as_token_mask(mask, ids)
        states = self.text(tokens, mask=None if mask is None else mask[:, None, None, :], rng=rng)
        return self.text.pooler(states, is_token)  # type: ignore[misc] # the configuration has a pooler

    def logits(self, image_vectors: Array, text_vectors: Array) -> Array:
        """Compute the logits (images, texts) of vectors, whose lengths have no effect.

        Args:
            image_vectors: Result of `encode_image`, (images, features).
            text_vectors: Result of `encode_text`, (texts, features).

        Raises:
            ShapeError: For arrays of other shapes.
        """
        features = self.config.text.pooled_features
        check_array(image_vectors, "image_vectors", "images", features)
        check_array(text_vectors, "text_vectors", "texts", features)
        xp = array_namespace(image_vectors, text_vectors)
        cosines = xp.matmul(normalized(image_vectors), xp.matrix_transpose(normalized(text_vectors)))
        logits = cosines * xp.exp(self.logit_scale)
        return logits if self.logit_bias is None else logits + self.logit_bias

    def _check_ends(self, ids: Array) -> None:
        """Raise DataError if a text lacks its eos_id, where reading values is cheap."""
        eos_id = self.config.text.eos_id
        if eos_id is None or not array_namespace(ids).is_host_accessible(ids):
            return
        has_eos = np.any(to_host(ids) == eos_id, axis=1)
        if not has_eos.all():
            row = int(np.argmin(has_eos))
            raise DataError(f"tokens[{row}] has no eos_id, {eos_id}; expected one at the end of each text")

    def _is_token(self, ids: Array) -> Array | None:
        """Return the mask (texts, length) of the tokens of texts; None if all are."""
        c = self.config.text
        if c.eos_id is None:
            return None if c.padding_id is None else ids != c.padding_id
        xp = array_namespace(ids)
        is_eos = xp.astype(ids == c.eos_id, ids.dtype)
        return xp.cumulative_sum(is_eos, axis=1) - is_eos == 0
