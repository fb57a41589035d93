"""Small encoder-decoders in files of torch.save, read without torch and converted to our parameters, for tests."""

import pickle
import re
import zipfile
from collections import OrderedDict

import numpy as np

import xformer as xf
from xformer.tree import replace

DTYPES = {"FloatStorage": "<f4", "LongStorage": "<i8"}


class TensorUnpickler(pickle.Unpickler):
    """Reads tensors and containers; any other object is an error."""

    def __init__(self, archive, root):
        super().__init__(archive.open(f"{root}/data.pkl"))
        self.archive, self.root = archive, root

    def persistent_load(self, saved):
        _, dtype, key, *_ = saved
        return np.frombuffer(self.archive.read(f"{self.root}/data/{key}"), dtype)

    def find_class(self, module, name):
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *_: np.lib.stride_tricks.as_strided(
                storage[offset:], shape, [stride * storage.itemsize for stride in strides]
            )
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name} is no tensor")


def read_tensors(path):
    """Return what a file of torch.save holds, with NumPy arrays for tensors."""
    with zipfile.ZipFile(path) as archive:
        (root,) = {name.split("/")[0] for name in archive.namelist()}
        return TensorUnpickler(archive, root).load()


# Patterns of the names of tensors and ours, applied in order; `{p}` separates query, key and value.
COMMON = [(r"fc_q|in_proj_q", "query"), (r"fc_k|in_proj_k", "key"), (r"fc_v|in_proj_v", "value"), (r"layers\.", "")]
ANNALOG = [
    *COMMON,
    (r"encoder\.(tok|pos)_embedding", r"source_\1"), (r"decoder\.(tok|pos)_embedding", r"target_\1"),
    ("source_tok", "source_embedding"), ("target_tok", "target_embedding"),
    ("source_pos", "encoder_input.positions"), ("target_pos", "decoder_input.positions"),
    ("self_attn_layer_norm", "self_attention_residual.norm"), ("enc_attn_layer_norm", "cross_attention_residual.norm"),
    ("ff_layer_norm", "feed_forward_residual.norm"), ("encoder_attention", "cross_attention"), ("fc_o", "output"),
    (r"positionwise_feedforward\.fc_1", "feed_forward.up"), (r"positionwise_feedforward\.fc_2", "feed_forward.down"),
    (r"decoder\.outputut\.weight", "output.weight"), (r"decoder\.outputut\.bias", "output_bias"),
]  # fmt: skip
TG2FA = [
    *COMMON,
    (r"transformer\.", ""), (r"(src|tgt)_tok_emb\.embedding", r"\1_embedding"),
    ("src_", "source_"), ("tgt_", "target_"),
    ("self_attn", "self_attention"), ("multihead_attn", "cross_attention"), ("out_proj", "output"),
    ("linear1", "feed_forward.up"), ("linear2", "feed_forward.down"), ("norm1", "self_attention_residual.norm"),
    (r"(encoder\.\d\.)norm2", r"\1feed_forward_residual.norm"), ("norm2", "cross_attention_residual.norm"),
    ("norm3", "feed_forward_residual.norm"), (r"(encoder|decoder)\.norm", r"\1_norm"),
    (r"generator\.weight", "output.weight"), (r"generator\.bias", "output_bias"),
]  # fmt: skip


def load_model(config, tensors, patterns):
    """Return a Transformer with the tensors of a file."""
    split = {}
    for name, x in tensors.items():
        if "in_proj_" in name:
            prefix, kind = name.rsplit("in_proj_", 1)
            split.update({f"{prefix}in_proj_{part}.{kind}": y for part, y in zip("qkv", np.split(x, 3), strict=True)})
        elif name != "positional_encoding.pos_embedding":
            split[name] = x
    parameters = {}
    for name, x in split.items():
        for pattern, replacement in patterns:
            name = re.sub(pattern, replacement, name)
        is_linear = x.ndim == 2 and "embedding" not in name and "positions" not in name
        parameters[name] = np.ascontiguousarray(x.T if is_linear else x)
    return replace(xf.Transformer(config, seed=None), parameters)
