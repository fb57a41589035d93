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

    Forward: query, key, value, [bias], [query_lengths, key_lengths], [keep, scale, scale_inverse: of dropout], output,
    [stats: logsumexp of the scores]. Backward: those, of which output and stats are read, g, dquery, dkey, dvalue.
    """
    kind, layouts = cudnn.data_type, _layouts(spec)
    dtypes = {"query_lengths": kind.INT32, "key_lengths": kind.INT32}
    dtypes |= dict.fromkeys(("scale", "scale_inverse", "stats"), kind.FLOAT)
    io = getattr(kind, DTYPES[spec.dtype])
    graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=kind.FLOAT, compute_data_type=kind.FLOAT, **context)
    ports = {}
    for name in _read(spec):
        shape, strides = layouts[name]
        ports[name] = graph.tensor(name=name, dim=[*shape], stride=[*strides], data_type=dtypes.get(name, io))
    settings = {_KEYWORDS[name]: port for name, port in ports.items() if name in _KEYWORDS}
    settings |= {"name": "attention", "attn_scale": spec.scale, **_masking(cudnn, spec)}
    if spec.dropped:
        settings["dropout"] = tuple(ports[name] for name in ("keep", "scale", "scale_inverse") if name in ports)
    if spec.backward:
        made = graph.sdpa_backward(**settings, use_deterministic_algorithm=spec.repeatable)
        names = ["dquery", "dkey", "dvalue"]
    else:
        made = graph.sdpa(**settings, generate_stats=spec.stats)
        names = ["output", "stats"] if spec.stats else ["output"]
    for name, port in zip(names, made, strict=False):
        shape, strides = layouts[name]
        port.set_output(True).set_dim([*shape]).set_stride([*strides]).set_data_type(dtypes.get(name, io))
        ports[name] = port
    return graph, ports


def _read(spec: Spec) -> list[str]:
    """The ports that are read."""
    names = ["query", "key", "value"]
    names += ["bias"] if spec.bias else []
    names += ["query_lengths", "key_lengths"] if spec.padded else []
    names += ["keep", "scale"] if spec.dropped else []
    names += ["scale_inverse"] if spec.dropped and spec.backward else []
    return [*names, "output", "g", "stats"] if spec.backward else names


def _layouts(spec: Spec) -> dict[str, Layout]:
    """How all that a graph may read or write lies."""
    (batch, heads, queries, _), keys = spec.query[0], spec.key[0][2]
    output = packed(batch, heads, queries, spec.value[0][-1])
    lengths: Layout = (batch, 1, 1, 1), (1, 1, 1, 1)
    number: Layout = (1, 1, 1, 1), (1, 1, 1, 1)
    layouts = {name: getattr(spec, name) for name in ("query", "key", "value", "bias")}
    layouts |= {"d" + name: packed(*getattr(spec, name)[0]) for name in ("query", "key", "value")}
    layouts |= {"query_lengths": lengths, "key_lengths": lengths, "scale": number, "scale_inverse": number}
    layouts |= {"keep": in_rows(batch, heads, queries, keys), "output": output, "g": output}
    return layouts | {"stats": ((batch, heads, queries, 1), (heads * queries, queries, 1, 1))}


# What cuDNN calls them.
_KEYWORDS = {
    "query": "q",
    "key": "k",
    "value": "v",
    "bias": "bias",
    "query_lengths": "seq_len_q",
    "key_lengths": "seq_len_kv",
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
