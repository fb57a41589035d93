"""Inputs of the analyses, and the names of activations in TransformerLens."""

import numpy as np

_RANDOM = np.random.default_rng(0)
CLEAN = _RANDOM.integers(3, 60, (2, 7))
CORRUPTED = CLEAN.copy()
CORRUPTED[:, 2] = CLEAN[::-1, 2]
REPEATED = np.concatenate([_RANDOM.permutation(np.arange(3, 60))[:10].reshape(2, 5)] * 2, axis=1)
TARGETS, OTHERS = [5, 40], [17, 8]

NAMES = {
    "embeddings": "hook_embed",
    "layers.0.residual_in": "blocks.0.hook_resid_pre",
    "layers.1.residual_mid": "blocks.1.hook_resid_mid",
    "layers.1.residual_out": "blocks.1.hook_resid_post",
    "layers.1.self_attention.queries": "blocks.1.attn.hook_rot_q",
    "layers.1.self_attention.keys": "blocks.1.attn.hook_rot_k",
    "layers.1.self_attention.values": "blocks.1.attn.hook_v",
    "layers.1.self_attention.scores": "blocks.1.attn.hook_attn_scores",
    "layers.1.self_attention.weights": "blocks.1.attn.hook_pattern",
    "layers.1.self_attention.heads": "blocks.1.attn.hook_z",
    "layers.1.self_attention.output": "blocks.1.hook_attn_out",
    "layers.1.feed_forward.hidden": "blocks.1.mlp.hook_post",
    "layers.1.feed_forward.output": "blocks.1.hook_mlp_out",
}
