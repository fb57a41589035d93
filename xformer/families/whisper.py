"""Whisper (Radford et al., 2023)."""

from __future__ import annotations

from xformer.families.bart import SHARED, stack
from xformer.families.layouts import linear, same, transposed
from xformer.families.table import Key, register_tables
from xformer.families.values import tied
from xformer.models import SpeechTransformer, SpeechTransformerConfig

_OUTPUT = "proj_out.weight"
register_tables(
    SHARED.variant(
        "whisper",
        "WhisperForConditionalGeneration",
        config_class=SpeechTransformerConfig,
        keys={
            **SHARED.keys,
            "source_vocab_size": Key("num_mel_bins", 80),
            "target_vocab_size": Key("vocab_size"),
            "max_source_positions": Key("max_source_positions", 1500),
            "max_positions": Key("max_target_positions", 448),
        },
        columns=(*SHARED.columns, tied(_OUTPUT)),
        fixed={**SHARED.fixed, "key_bias": False, "positions": "learned", "scale_embeddings": False},
        required={**SHARED.required, "use_weighted_layer_sum": False},
        # scale_embedding, which transformers does not use, and keys for training or generation only
        skipped="classifier_proj_size median_filter_width scale_embedding apply_spec_augment mask_time_prob "
        "mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks "
        f"suppress_tokens begin_suppress_tokens forced_decoder_ids {SHARED.skipped}",
        written={**SHARED.written, "bos_token_id": lambda config: config.bos_id, "begin_suppress_tokens": None},
    ),
    model=SpeechTransformer,
    tensors={
        "model.decoder.embed_tokens.weight": same("target_embedding.weight"),
        _OUTPUT: transposed("output.weight"),
        **stack("encoder"),
        **stack("decoder"),
        **linear("model.encoder.conv1", "source_embedding.conv1"),
        **linear("model.encoder.conv2", "source_embedding.conv2"),
    },
    prefix="model.",
    tied={_OUTPUT: "model.decoder.embed_tokens.weight"},
)
