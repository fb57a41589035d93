"""Attention as cuDNN graphs: inputs, outputs and their memory layouts.

softmax(scale Q K^T + bias) V and its derivative are one node each of a graph of the cuDNN frontend, which runs as one
kernel (FlashAttention-2: Dao, 2023). Shapes are (batch, heads, length, features).
"""

from __future__ import annotations

from typing import Any, NamedTuple

Layout = tuple[tuple[int, int, int, int], tuple[int, int, int, int]]  # shape and strides, in elements

DTYPES = {"float16": "HALF", "bfloat16": "BFLOAT16"}


class Spec(NamedTuple):
    """A graph; its plan also depends on the device and the versions of the libraries.

    Attributes:
        backward: Whether this is the derivative.
        dtype: Dtype of all tensors except `stats`.
        query, key, value, bias: Layouts.
        window: Number of keys up to its own that a query sees; 0: all.
        after: Number of keys after its own that a query sees, if there is a diagonal.
        causal: "" (no), "top_left" or "bottom_right", the corner that the diagonal goes through.
        scale: Scale of the scores.
        padded: Whether the lengths of each sentence are inputs.
        dropout: Whether the weights are multiplied by a mask and a scale.
        stats: Whether the forward also writes the logsumexp, for the derivative.
        deterministic: Whether the derivative sums in a fixed order, which needs memory for queries times keys.
        g: Layout of the cotangent of the output, of the derivative only.
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
    dropout: bool
    stats: bool
    deterministic: bool
    g: Layout | None = None
    window: int = 0
    after: int = 0


def packed(batch: int, heads: int, length: int, features: int) -> Layout:
    """Return the layout (batch, length, heads, features), in which heads are merged and split without a copy."""
    return (batch, heads, length, features), (length * heads * features, features, heads * features, 1)


def aligned_rows(batch: int, heads: int, queries: int, keys: int) -> Layout:
    """Return the layout of scores, biases and dropout masks, with rows aligned to 16 bytes."""
    row = -(-keys // 8) * 8
    return (batch, heads, queries, keys), (heads * queries * row, queries * row, row, 1)


def describe(cudnn: Any, spec: Spec, context: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Build the graph of a spec.

    The forward reads query, key, value, bias, query_lengths and key_lengths, dropout_mask and dropout_scale, if the
    spec has them, and writes output and stats. The backward reads all of them and g, and writes dquery, dkey and
    dvalue.

    Args:
        cudnn: Module of the cuDNN frontend.
        spec: The spec.
        context: Further arguments of the graph, such as its handle.

    Returns:
        The graph, and its ports by name.
    """
    types, layouts = cudnn.data_type, _layouts(spec)
    dtypes = {"query_lengths": types.INT32, "key_lengths": types.INT32}
    dtypes |= dict.fromkeys(("dropout_scale", "dropout_scale_inverse", "stats"), types.FLOAT)
    io = getattr(types, DTYPES[spec.dtype])
    graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, **context)
    ports = {}
    for name in _inputs(spec):
        shape, strides = layouts[name]
        ports[name] = graph.tensor(name=name, dim=[*shape], stride=[*strides], data_type=dtypes.get(name, io))
    settings = {_KEYWORDS[name]: port for name, port in ports.items() if name in _KEYWORDS}
    settings |= {"name": "attention", "attn_scale": spec.scale, **_masking(cudnn, spec)}
    if spec.dropout:
        settings["dropout"] = tuple(ports[name] for name in _DROPOUT if name in ports)
    if spec.backward:
        outputs = graph.sdpa_backward(**settings, use_deterministic_algorithm=spec.deterministic)
        names = ["dquery", "dkey", "dvalue"]
    else:
        outputs = graph.sdpa(**settings, generate_stats=spec.stats)
        names = ["output", "stats"] if spec.stats else ["output"]
    for name, port in zip(names, outputs, strict=False):
        shape, strides = layouts[name]
        port.set_output(True).set_dim([*shape]).set_stride([*strides]).set_data_type(dtypes.get(name, io))
        ports[name] = port
    return graph, ports


def _inputs(spec: Spec) -> list[str]:
    """Return the names of the ports that are read."""
    names = ["query", "key", "value"]
    names += ["bias"] if spec.bias else []
    names += ["query_lengths", "key_lengths"] if spec.padded else []
    names += _DROPOUT[:2] if spec.dropout else []
    names += _DROPOUT[2:] if spec.dropout and spec.backward else []
    return [*names, "output", "g", "stats"] if spec.backward else names


def _layouts(spec: Spec) -> dict[str, Layout]:
    """Return the layouts of all ports."""
    (batch, heads, queries, _), keys = spec.query[0], spec.key[0][2]
    output = packed(batch, heads, queries, spec.value[0][-1])
    lengths: Layout = (batch, 1, 1, 1), (1, 1, 1, 1)
    layouts = {name: getattr(spec, name) for name in ("query", "key", "value", "bias", "g")}
    layouts |= {"d" + name: packed(*getattr(spec, name)[0]) for name in ("query", "key", "value")}
    layouts |= dict.fromkeys(("query_lengths", "key_lengths"), lengths)
    layouts |= dict.fromkeys(_DROPOUT[1:], ((1,) * 4, (1,) * 4))
    layouts |= {"dropout_mask": aligned_rows(batch, heads, queries, keys), "output": output}
    return layouts | {"stats": ((batch, heads, queries, 1), (heads * queries, queries, 1, 1))}


_DROPOUT = ["dropout_mask", "dropout_scale", "dropout_scale_inverse"]
# The names of ports in cuDNN.
_PORTS = "query key value bias query_lengths key_lengths output g stats"
_NAMES = "q k v bias seq_len_q seq_len_kv o dO stats"
_KEYWORDS = dict(zip(_PORTS.split(), _NAMES.split(), strict=True))


def _masking(cudnn: Any, spec: Spec) -> dict[str, Any]:
    settings: dict[str, Any] = {"use_padding_mask": True} if spec.padded else {}
    if spec.causal:
        corner = getattr(cudnn.diagonal_alignment, spec.causal.upper())
        settings.update(diagonal_alignment=corner, diagonal_band_right_bound=spec.after)
    if spec.window:
        settings["diagonal_band_left_bound"] = spec.window
    return settings
