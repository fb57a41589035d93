"""Analyses of models: plain functions of a model and tokens, on every array library.

Each records activations (`xformer.record`), changes them (`xformer.intervene`) or differentiates with respect to them.
The code is short, so that you can copy and change it.
"""

from xformer.interpret.attention import (
    attention_entropy,
    attention_rollout,
    duplicate_token_scores,
    induction_scores,
    previous_token_scores,
)
from xformer.interpret.logits import LogitAttribution, direct_logit_attribution, logit_difference, logit_lens
from xformer.interpret.patching import activation_patching, attribution_patching, feed_forward_ablation, head_ablation

__all__ = [
    "LogitAttribution", "activation_patching", "attention_entropy", "attention_rollout", "attribution_patching",
    "direct_logit_attribution", "duplicate_token_scores", "feed_forward_ablation", "head_ablation", "induction_scores",
    "logit_difference", "logit_lens", "previous_token_scores",
]  # fmt: skip
