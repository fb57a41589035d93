"""Encoder-decoder whose source is audio (Whisper, Radford et al., 2023)."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends import Array, dtype_name, from_host, is_floating
from xformer.errors import ShapeError
from xformer.layers import AudioEmbedding, InputEmbedding
from xformer.layers.cache import Memory
from xformer.models.builder import LayerFactory
from xformer.models.config import SpeechTransformerConfig
from xformer.models.token_ids import as_token_ids, check_padding_mask
from xformer.models.transformer import Transformer
from xformer.random import Rng
from xformer.tree import is_array


class SpeechTransformer(Transformer, init=False):
    """Encoder-decoder Transformer whose source is a spectrogram (Radford et al., 2023).

    Two convolutions halve the number of frames. Everything else is a `Transformer`, and calls, `encode`, `decode` and
    `generate` take the same arguments, with these sources:

    - `source`: floating frames (batch, frames, source_vocab_size), e.g. of `xformer.data.audio.log_mel_spectrogram`.
    - `source_mask`: boolean (batch, 1, 1, (frames + 1) // 2), True = audio, False = padding. Default: all is audio.

    Arguments are those of `BaseModel`.

    Examples:
        >>> import numpy as np
        >>> config = SpeechTransformerConfig(
        ...     source_vocab_size=5,
        ...     target_vocab_size=13,
        ...     d_model=8,
        ...     num_heads=2,
        ...     d_ff=16,
        ...     num_encoder_layers=1,
        ...     num_decoder_layers=1,
        ... )
        >>> model = SpeechTransformer(config)
        >>> model(np.zeros((1, 10, 5), dtype=np.float32), [[1, 7, 3]]).shape
        (1, 3, 13)
    """

    config_class = SpeechTransformerConfig

    source_embedding: AudioEmbedding  # type: ignore[assignment]
    config: SpeechTransformerConfig

    def source_ids(self, data: Any) -> Array:
        """Check frames and convert them to the model's library; arguments are those of a call.

        Raises:
            ShapeError: Unless the frames are floating, (batch, frames, source_vocab_size).
        """
        data = data if is_array(data) else from_host(np, data)
        features = self.config.source_vocab_size
        if not is_floating(data.dtype) or len(data.shape) != 3 or data.shape[2] != features or data.shape[1] == 0:
            raise ShapeError(
                f"source has shape {tuple(data.shape)} and dtype {dtype_name(data.dtype)}; "
                f"expected floating frames (batch, frames, {features})"
            )
        return as_token_ids(data, "source", features, self._parameter)

    def _make_source_embedding(self, make: LayerFactory) -> AudioEmbedding:  # type: ignore[override]
        return AudioEmbedding(self.config.source_vocab_size, self.config.d_model, init=make.init)

    def _make_encoder_input(self, make: LayerFactory) -> InputEmbedding:
        return make.input_embedding(self.config.max_source_positions)

    def _encode(self, source: Array, mask: Array | None, rng: Rng | None = None) -> Memory:
        x = self.source_embedding(source)
        mask = None if mask is None else check_padding_mask(mask, x, "source_mask")
        return self._encode_vectors(x, None, mask, rng)
