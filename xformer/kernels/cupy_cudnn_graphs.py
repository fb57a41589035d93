"""Attention as cuDNN graphs: what is read, what is written, and what lies between.

Softmax(scale Q K' + bias) V and its derivative, each one node of the frontend's graph, which cuDNN makes one kernel of
(FlashAttention-2: Dao, 2023). Shapes are (batch, heads, length, features); strides, in elements, say how they lie.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Layout = tuple[tuple[int, int, int, int], tuple[int, int, int, int]]  # shape, and strides in elements

DTYPES = {"float16": "HALF", "bfloat16": "BFLOAT16"}


class Spec(NamedTuple):
    """All that a plan depends on, but for the device and the versions of the software.

    dtype: of all tensors but `stats`. causal: "" (no), "top_left" or "bottom_right", the corner on the diagonal.
    padded: lengths are given, one a sentence. dropped: weights are multiplied by a mask, and by a number. stats: the
    forward also writes what the backward needs. repeatable: the backward sums in a fixed order, for which it takes
    memory for queries times keys.
    """

    backward: bool
    dtype: str
    query: Layout
    key: Layout
    value: Layout
    bias: Layout | None
    causal: str
    scale: float
    padded: bool
    dropped: bool
    stats: bool
    repeatable: bool


def packed(batch: int, heads: int, length: int, features: int) -> Layout:
    """Memory in the order (batch, length, heads, features): heads are merged and split without a copy."""
    return (batch, heads, length, features), (length * heads * features, features, heads * features, 1)


def in_rows(batch: int, heads: int, queries: int, keys: int) -> Layout:
    """Memory of what there is for every score, its rows aligned to 16 bytes."""
    row = -(-keys // 8) * 8
    return (batch, heads, queries, keys), (heads * queries * row, queries * row, row, 1)


def describe(cudnn: Any, spec: Spec, context: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make the graph of a spec and its ports by name; `context` is what the graph is made for (a handle).

    Forward: query, key, value, [bias], [queries, keys: lengths], [keep, scale, inverse: of dropout], output, [stats:
    logsumexp of the scores]. Backward: those, of which output and stats are read, g, dquery, dkey, dvalue.
    """
    kind, io = cudnn.data_type, getattr(cudnn.data_type, DTYPES[spec.dtype])
    graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=kind.FLOAT, compute_data_type=kind.FLOAT, **context)
    (batch, heads, queries, _), keys = spec.query[0], spec.key[0][2]
    output = packed(batch, heads, queries, spec.value[0][-1])
    stats = (batch, heads, queries, 1), (heads * queries, queries, 1, 1)
    lengths, number = ((batch, 1, 1, 1), (1, 1, 1, 1)), ((1, 1, 1, 1), (1, 1, 1, 1))
    keep = in_rows(batch, heads, queries, keys)
    layouts: dict[str, tuple[Layout | None, Any]] = {
        "query": (spec.query, io),
        "key": (spec.key, io),
        "value": (spec.value, io),
        "bias": (spec.bias, io),
        "queries": (lengths if spec.padded else None, kind.INT32),
        "keys": (lengths if spec.padded else None, kind.INT32),
        "keep": (keep if spec.dropped else None, io),
        "scale": (number if spec.dropped else None, kind.FLOAT),
        "inverse": (number if spec.dropped and spec.backward else None, kind.FLOAT),
        "output": (output if spec.backward else None, io),
        "g": (output if spec.backward else None, io),
        "stats": (stats if spec.backward else None, kind.FLOAT),
    }
    ports = {
        name: graph.tensor(name=name, dim=[*layout[0]], stride=[*layout[1]], data_type=dtype)
        for name, (layout, dtype) in layouts.items()
        if layout is not None
    }
    read = {_KEYWORDS[name]: port for name, port in ports.items() if name in _KEYWORDS}
    settings = {"name": "attention", "attn_scale": spec.scale, **_masking(cudnn, spec)}
    if spec.dropped:
        settings["dropout"] = tuple(ports[name] for name in ("keep", "scale", "inverse") if name in ports)
    if spec.backward:
        cotangents = graph.sdpa_backward(**read, **settings, use_deterministic_algorithm=spec.repeatable)
        written = dict(zip(("dquery", "dkey", "dvalue"), cotangents, strict=True))
        places = {"d" + name: packed(*getattr(spec, name)[0]) for name in ("query", "key", "value")}
    else:
        written = dict(zip(("output", "stats"), graph.sdpa(**read, **settings, generate_stats=spec.stats), strict=True))
        places = {"output": output, "stats": stats} if spec.stats else {"output": output}
    for name, (shape, strides) in places.items():
        written[name].set_output(True).set_dim([*shape]).set_stride([*strides])
        written[name].set_data_type(kind.FLOAT if name == "stats" else io)
    return graph, ports | {name: written[name] for name in places}


# What cuDNN calls them.
_KEYWORDS = {
    "query": "q",
    "key": "k",
    "value": "v",
    "bias": "bias",
    "queries": "seq_len_q",
    "keys": "seq_len_kv",
    "output": "o",
    "g": "dO",
    "stats": "stats",
}


def _masking(cudnn: Any, spec: Spec) -> dict[str, Any]:
    settings: dict[str, Any] = {"use_padding_mask": True} if spec.padded else {}
    if spec.causal:
        corner = getattr(cudnn.diagonal_alignment, spec.causal.upper())
        settings.update(diagonal_alignment=corner, diagonal_band_right_bound=0)
    return settings
