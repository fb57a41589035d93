"""A fake cuDNN frontend on the memory of NumPy arrays: it sees tensors only as addresses, shapes and strides.

It refuses what cuDNN refuses, and goes wrong where cuDNN does: NaN for rows of minus infinity, and for rows of low
logsumexp in tiles that are not whole (pytorch issue 196678), and rows beyond the given lengths stay unwritten, those of
the cotangents of keys and values, too.
"""

from __future__ import annotations

import pickle
import types

import numpy as np
import pytest

from tests.ops._cupy.fake_cublas import dtype_named, strided

DTYPES = {"HALF": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32", "INT32": "int32"}
STREAM = 77


class cudnnGraphNotSupportedError(Exception):
    """Not a RuntimeError, there either."""


class Handle:
    def __init__(self):
        self.backend_handle, self.stream = id(self), None


class Tensor:
    def __init__(self, uid, dim=None, stride=None, data_type=None):
        self.uid, self.dim, self.stride, self.data_type, self.output = uid, dim, stride, data_type, False

    def get_uid(self):
        return self.uid

    def set_output(self, output):
        self.output = output
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self


class Module:
    """The module `cudnn`. built: number of plans; executed: (forward or backward, entry point)."""

    data_type = types.SimpleNamespace(**{name: name for name in DTYPES})
    heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")
    diagonal_alignment = types.SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT")
    cudnnGraphNotSupportedError = cudnnGraphNotSupportedError
    __version__ = "1.32.0"

    def __init__(self):
        self.handles, self.built, self.executed, self.refuses, self.engine = [], 0, [], None, None

    def backend_version(self):
        return 91900

    def create_handle(self):
        self.handles.append(Handle())
        return self.handles[-1]

    def set_stream(self, handle, stream):
        handle.stream = stream

    def pygraph(self, **settings):
        return Graph(self, **settings)


class Graph:
    def __init__(self, module, handle, io_data_type="FLOAT", intermediate_data_type="FLOAT", compute_data_type="FLOAT"):
        if intermediate_data_type != "FLOAT" or compute_data_type != "FLOAT":
            raise ValueError("sums are to be kept in float32")
        self.module, self.handle, self.tensors, self.node, self.is_built = module, handle, {}, None, False
        self.selected_engine = module.engine

    def tensor(self, name, dim, stride, data_type):
        tensor = Tensor(len(self.tensors) + 11, dim, stride, data_type)
        self.tensors[tensor.uid] = tensor
        return tensor

    def _add(self, backward, outputs, tensors, settings):
        results = [self.tensor(name, None, None, None) for name in outputs]
        uids = {name: tensor.uid for name, tensor in {**tensors, **dict(zip(outputs, results, strict=True))}.items()}
        self.node = {"backward": backward, "uids": uids, **settings}
        return results

    def sdpa(self, *, q, k, v, bias=None, seq_len_q=None, seq_len_kv=None, dropout=(), generate_stats, **settings):
        tensors = {"q": q, "k": k, "v": v, "bias": bias, "seq_len_q": seq_len_q, "seq_len_kv": seq_len_kv}
        if dropout:
            tensors["dropout_mask"], tensors["scale"] = dropout
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        results = self._add(False, ("O", "Stats") if generate_stats else ("O",), given, settings)
        return results if generate_stats else [*results, None]

    def sdpa_backward(self, *, q, k, v, o, dO, stats, bias=None, seq_len_q=None, seq_len_kv=None, **settings):
        tensors = {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats}
        tensors |= {"bias": bias, "seq_len_q": seq_len_q, "seq_len_kv": seq_len_kv}
        if "dropout" in settings:
            tensors["dropout_mask"], tensors["scale"], tensors["inverse"] = settings.pop("dropout")
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return self._add(True, ("dQ", "dK", "dV"), given, settings)

    def _of(self, name):
        uid = self.node["uids"].get(name)
        return None if uid is None else self.tensors[uid]

    def build(self, modes):
        if modes != ["A", "FALLBACK"]:
            raise ValueError("unknown heuristics")
        if self.module.refuses is not None:
            raise cudnnGraphNotSupportedError(self.module.refuses)
        self._validate()
        self.is_built = True
        self.module.built += 1

    def serialize(self):
        if not self.is_built:
            raise RuntimeError("build the plan first")
        return list(pickle.dumps((self.tensors, self.node)))

    def deserialize(self, handle, data):
        if handle is not self.handle or self.tensors:
            raise RuntimeError("CUDNN_STATUS_BAD_PARAM")
        (self.tensors, self.node), self.is_built = pickle.loads(data), True

    def _validate(self):
        query, key, value, bias, keep = map(self._of, ("q", "k", "v", "bias", "dropout_mask"))
        batch, heads, queries, features = query.dim
        keys, causal = key.dim[2], self.node.get("diagonal_alignment")
        wrong = [
            any(tensor.dim is None or tensor.data_type is None for tensor in self.tensors.values()),
            any(width % 8 or width > 256 for width in (features, value.dim[3])),
            any(tensor.data_type not in ("HALF", "BFLOAT16") for tensor in (query, key, value)),
            any(tensor.stride[-1] != 1 for tensor in self.tensors.values()),
            any(step % 8 for tensor in (query, key, value, self._of("dO") or query) for step in tensor.stride[:-1]),
            bias is not None
            and (
                bias.dim[3] != keys
                or (bias.dim[:3] != [batch, 1, 1] and bias.dim[2] != queries)
                or (self.node["backward"] and bias.dim[2] != queries)  # it would return zeros
                or bias.dim[0] not in (1, batch)
                or bias.dim[1] not in (1, heads)
                or any(step % 8 for step in bias.stride[:-1])
            ),
            causal == "BOTTOM_RIGHT" and (bias is not None or keep is not None or queries > keys),
            causal is not None and self.node["diagonal_band_right_bound"] < 0,
            self.node["backward"] and queries == keys == 1,
            heads % key.dim[1] or value.dim[1] != key.dim[1],
            keep is not None
            and (keep.dim != [batch, heads, queries, keys] or any(step % 8 for step in keep.stride[:-1])),
            (self._of("seq_len_q") is not None) != self.node.get("use_padding_mask", False),
        ]
        if any(wrong):
            raise cudnnGraphNotSupportedError(f"No valid engine configs: rule {wrong.index(True)}")

    def get_workspace_size(self):
        return 256 if self.node["backward"] else 0

    @property
    def _lowered_graph(self):
        return types.SimpleNamespace(_execute=self._execute_private)

    def _execute_private(self, pack, workspace, backend_handle):
        if backend_handle != self.handle.backend_handle:
            raise RuntimeError("CUDNN_STATUS_BAD_PARAM")
        self._execute(pack, workspace, "private")

    def execute(self, pack, workspace, handle):
        if handle is not self.handle:
            raise RuntimeError("CUDNN_STATUS_BAD_PARAM")
        self._execute(pack, workspace, "public")

    def _execute(self, pack, workspace, way):
        if not self.is_built or self.handle.stream != STREAM or not workspace:
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
        if set(pack) != set(self.tensors):
            raise KeyError("the variant pack is missing a buffer, or has one too many")
        if any(address % 16 for address in pack.values()):
            raise RuntimeError("misaligned: the results would be wrong")
        arrays = {
            name: strided(
                pack[uid],
                dtype_named(DTYPES[self.tensors[uid].data_type]),
                self.tensors[uid].dim,
                self.tensors[uid].stride,
            )
            for name, uid in self.node["uids"].items()
        }
        self.module.executed.append(("backward" if self.node["backward"] else "forward", way))
        (_backward if self.node["backward"] else _forward)(self.node, arrays)


def _wide(array):
    return array.astype("float32")


def _for_all(heads, array):
    return np.repeat(_wide(array), heads // array.shape[1], axis=1)


def _groups(x, heads):
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(axis=2)


def _scores(node, arrays):
    """The scores as cuDNN masks them, and where queries and keys are within the given lengths."""
    query = _wide(arrays["q"])
    key = _for_all(query.shape[1], arrays["k"])
    scores = node["attn_scale"] * (query @ key.swapaxes(-1, -2))
    row, column = np.arange(scores.shape[2])[:, None], np.arange(scores.shape[3])
    if "bias" in arrays:
        scores = scores + _wide(arrays["bias"])
    if "diagonal_alignment" in node:
        corner = scores.shape[3] - scores.shape[2] if node["diagonal_alignment"] == "BOTTOM_RIGHT" else 0
        late = column > row + corner + node["diagonal_band_right_bound"]
        scores = np.where(late, -np.inf, scores)
    if "diagonal_band_left_bound" in node:
        far = column <= row + corner - node["diagonal_band_left_bound"]
        scores = np.where(far, -np.inf, scores)
    inside, counted = (np.ones((len(scores), 1, size, 1), bool) for size in scores.shape[2:])
    if node.get("use_padding_mask"):
        inside, counted = row < arrays["seq_len_q"], column[:, None] < arrays["seq_len_kv"]
        scores = np.where(column < arrays["seq_len_kv"], scores, -np.inf)
    return scores, inside, counted


def _write(place, values, inside):
    np.copyto(place, values.astype(place.dtype), where=np.broadcast_to(inside, place.shape))


def _dropout(arrays):
    return _wide(arrays["dropout_mask"]) * arrays["scale"] if "dropout_mask" in arrays else np.float32(1.0)


def _forward(node, arrays):
    scores, inside, _ = _scores(node, arrays)
    with np.errstate(invalid="ignore", divide="ignore"):
        top = scores.max(axis=-1, keepdims=True)
        powers = np.exp(scores - top)
        total = powers.sum(axis=-1, keepdims=True)
        weights = powers / total * _dropout(arrays)
        _write(arrays["O"], weights @ _for_all(weights.shape[1], arrays["v"]), inside)
        if "Stats" in arrays:
            _write(arrays["Stats"], top + np.log(total), inside)


def _backward(node, arrays):
    scores, inside, counted = _scores(node, arrays)
    query, output, g = (_wide(arrays[name]) for name in ("q", "o", "dO"))
    key, value = (_for_all(query.shape[1], arrays[name]) for name in ("k", "v"))
    with np.errstate(invalid="ignore"):
        weights, dropout = np.exp(scores - arrays["stats"]), _dropout(arrays)
        dweights = g @ value.swapaxes(-1, -2) * dropout
        dscores = weights * (dweights - (g * output).sum(axis=-1, keepdims=True))
        dquery = node["attn_scale"] * (dscores @ key)
    if "dropout_mask" in arrays:
        assert arrays["scale"] * arrays["inverse"] == pytest.approx(1.0)
    if "bias" in arrays and not node.get("use_padding_mask") and (scores.shape[2] % 128 or scores.shape[3] % 128):
        dquery = np.where(arrays["stats"] < -88.0, np.nan, dquery)
    dkey, dvalue = node["attn_scale"] * (dscores.swapaxes(-1, -2) @ query), (weights * dropout).swapaxes(-1, -2) @ g
    _write(arrays["dQ"], dquery, inside)
    for name, cotangent in (("dK", dkey), ("dV", dvalue)):
        _write(arrays[name], _groups(cotangent, arrays[name].shape[1]), counted)
