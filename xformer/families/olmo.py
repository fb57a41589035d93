"""OLMo 2 and 3 (OLMo team, 2024 and 2025) and EXAONE 4 (LG AI Research, 2025)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import Decoder, decoder, register_decoders
from xformer.families.table import Column, Key
from xformer.families.values import (
    every_nth_full,
    heads,
    local_rope,
    rope,
    sizes,
    windows,
    without_positions,
    write_windows,
)


def _read_exaone4(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of windows of EXAONE 4; if there are any, other layers have no positions."""
    keys = ("sliding_window_pattern",) if reader.values.get("layer_types") is None else ()
    reader.skip("sliding_window_pattern")
    read = {**fields, **windows(every_nth_full(4, *keys), default=4096).read(reader, fields)}
    has_window = reader.values.get("sliding_window", 4096) is not None
    return {**read, **without_positions(reader, read)} if has_window else read


_OLMO2 = Decoder(
    model_type="olmo2",
    architecture="Olmo2",
    keys={**sizes("rms_norm_eps", 1e-5, 2048), **heads(), "attention_bias": Key("attention_bias", False)},
    fixed={
        "norm": "rms",
        "norm_position": "output",
        "feed_forward_bias": False,
        "qk_norm": True,
        "qk_norm_all_heads": True,
    },
    rope=rope(10000.0),
)
_OLMO3 = _OLMO2.variant(
    "olmo3", "Olmo3", rope=local_rope(5e5, 5e5), columns=(windows(every_nth_full(4), default=4096),)
)
_EXAONE4 = _OLMO2.variant(
    "exaone4",
    "Exaone4",
    fixed={**_OLMO2.fixed, "qk_norm_all_heads": False},
    columns=(Column(_read_exaone4, write_windows),),
)
_NORMS = {
    "post_attention_layernorm": "self_attention_residual.norm",
    "post_feedforward_layernorm": "feed_forward_residual.norm",
}
register_decoders(_OLMO2, _OLMO3, _EXAONE4, tensors=decoder(_NORMS))
