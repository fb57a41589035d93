"""Write the analyses of two tiny checkpoints that TransformerLens computes, in float64.

Requires torch, transformers and transformer_lens: `python -m tests.interpret.make_references DIR`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformer_lens
import transformers
from transformer_lens import HookedTransformer, HookedTransformerConfig, head_detector, patching
from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_llama_weights

from tests.interpret.cases import CLEAN, CORRUPTED, NAMES, OTHERS, REPEATED, TARGETS

CHECKPOINTS = Path(__file__).parents[1] / "families" / "data"
CONVERT = {"gpt2": convert_gpt2_weights, "llama": convert_llama_weights}


def load(name: str, **processing: bool) -> HookedTransformer:
    """Return a checkpoint without the folded and centered weights that TransformerLens makes by default."""
    config = json.loads((CHECKPOINTS / name / "config.json").read_text())
    hf = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, dtype=torch.float64)
    common = {"default_prepend_bos": False, "dtype": torch.float64, "device": "cpu", "d_vocab": config["vocab_size"]}
    if name == "gpt2":
        settings = {
            "n_layers": config["n_layer"],
            "d_model": config["n_embd"],
            "n_heads": config["n_head"],
            "n_ctx": config["n_positions"],
            "d_head": config["n_embd"] // config["n_head"],
            "act_fn": "gelu_new",
            "eps": config["layer_norm_epsilon"],
            "normalization_type": "LN",
        }
    else:
        settings = {
            "n_layers": config["num_hidden_layers"],
            "d_model": config["hidden_size"],
            "n_heads": config["num_attention_heads"],
            "n_key_value_heads": config["num_key_value_heads"],
            "n_ctx": config["max_position_embeddings"],
            "d_head": config["head_dim"],
            "d_mlp": config["intermediate_size"],
            "act_fn": "silu",
            "gated_mlp": True,
            "eps": config["rms_norm_eps"],
            "normalization_type": "RMS",
            "positional_embedding_type": "rotary",
            "rotary_dim": config["head_dim"],
            "rotary_base": config["rope_parameters"]["rope_theta"],
            "rotary_adjacent_pairs": False,
            "final_rms": True,
        }
    model = HookedTransformer(HookedTransformerConfig(**common, **settings))
    state = {key: x.double() for key, x in CONVERT[name](hf.double(), model.cfg).items()}
    none = {"center_writing_weights": False, "center_unembed": False, "fold_value_biases": False}
    model.load_and_process_state_dict(state, **{"fold_ln": False, **none, **processing})
    return model.double()


def metric(logits: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(TARGETS))
    return (logits[rows, -1, torch.tensor(TARGETS)] - logits[rows, -1, torch.tensor(OTHERS)]).mean()


def ablations(model: HookedTransformer, tokens: torch.Tensor) -> dict:
    def effect(name, change):
        return metric(model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: change(x))])) - before

    def head(index, mean):
        def change(z):  # (batch, position, head, d_head)
            z = z.clone()
            z[:, :, index] = z[:, :, index].mean(dim=(0, 1)) if mean else 0.0
            return z

        return change

    before, layers, heads = metric(model(tokens)), range(model.cfg.n_layers), range(model.cfg.n_heads)
    zero, mean = (
        torch.stack([torch.stack([effect(f"blocks.{i}.attn.hook_z", head(j, kind)) for j in heads]) for i in layers])
        for kind in (False, True)
    )
    networks = [effect(f"blocks.{i}.hook_mlp_out", torch.zeros_like) for i in layers]
    means = [effect(f"blocks.{i}.hook_mlp_out", lambda x: x.mean((0, 1), keepdim=True).expand_as(x)) for i in layers]
    return {
        "head_ablation": zero,
        "head_ablation_mean": mean,
        "feed_forward_ablation": torch.stack(networks),
        "feed_forward_ablation_mean": torch.stack(means),
    }


def patches(model: HookedTransformer, tokens: torch.Tensor, source: torch.Tensor) -> dict:
    _, clean = model.run_with_cache(source)
    before = metric(model(tokens))
    functions = {
        "residual": patching.get_act_patch_resid_pre,
        "heads": patching.get_act_patch_attn_head_out_all_pos,
        "feed_forward": patching.get_act_patch_mlp_out,
    }
    results = {f"activation_{part}": f(model, tokens, clean, metric) - before for part, f in functions.items()}
    hooks = {"residual": "hook_resid_pre", "heads": "attn.hook_z", "feed_forward": "hook_mlp_out"}
    own, forward, backward = model.get_caching_hooks(lambda name: name.endswith(tuple(hooks.values())), incl_bwd=True)
    with torch.enable_grad(), model.hooks(fwd_hooks=forward, bwd_hooks=backward):
        metric(model(tokens)).backward()
    for part, hook in hooks.items():
        effects = []
        for i in range(model.cfg.n_layers):
            name = f"blocks.{i}.{hook}"
            product = (clean[name] - own[name]) * own[f"{name}_grad"]
            effects.append(product.sum(dim=(0, 1, 3) if part == "heads" else (0, 2)))
        results[f"attribution_{part}"] = torch.stack(effects)
    return results


def heads_of(model: HookedTransformer, tokens: torch.Tensor) -> dict:
    """Return scores of heads, with the patterns of transformer_lens.head_detector."""
    patterns = torch.stack([model.run_with_cache(tokens)[1]["pattern", i] for i in range(model.cfg.n_layers)])
    results = {"attention_entropy": torch.distributions.Categorical(probs=patterns).entropy()}
    rollout = torch.eye(tokens.shape[1]).double().expand(len(tokens), -1, -1)
    for layer in patterns.mean(dim=2):
        rollout = (0.5 * layer + 0.5 * torch.eye(tokens.shape[1])) @ rollout
    results["attention_rollout"] = rollout
    for name in ("previous_token", "duplicate_token", "induction"):
        detect = getattr(head_detector, f"get_{name}_head_detection_pattern")
        keys = torch.stack([detect(row[None]) for row in tokens]).double()
        count = keys.any(dim=-1).sum()
        results[f"{name}_scores"] = (patterns * keys[None, :, None]).sum(dim=(1, 3, 4)) / count
    return results


@torch.no_grad()
def analyses(name: str) -> dict:
    """Return all results as NumPy arrays."""
    model, (clean, corrupted, repeated) = load(name), map(torch.tensor, (CLEAN, CORRUPTED, REPEATED))
    logits, cache = model.run_with_cache(clean)
    results = {"logits": logits}
    for ours, theirs in NAMES.items():
        x = cache[theirs if "rot" not in theirs or name == "llama" else theirs.replace("rot_", "")]
        results[f"activation {ours}"] = (
            x.transpose(1, 2) if ours.endswith(("queries", "keys", "values", "heads")) else x
        )
    residuals = [*(cache["resid_pre", i] for i in range(model.cfg.n_layers)), cache["resid_post", -1]]
    results["logit_lens"] = torch.stack([model.unembed(model.ln_final(x)) for x in residuals])
    # Parts of a logit need the weight of the final norm inside the unembedding.
    folded = load(name, fold_ln=True)
    _, cache = folded.run_with_cache(clean)
    parts = {
        "embeddings": cache["resid_pre", 0][None, :, -1],
        "heads": cache.stack_head_results(pos_slice=-1),
        "feed_forward": torch.stack([cache["mlp_out", i][:, -1] for i in range(model.cfg.n_layers)]),
    }
    for part, stack in parts.items():
        scaled = cache.apply_ln_to_stack(stack, layer=-1, pos_slice=-1)
        direction = folded.W_U[:, TARGETS] - folded.W_U[:, OTHERS]
        x = torch.einsum("nbd,db->nb", scaled, direction)
        results[f"part {part}"] = x.reshape(model.cfg.n_layers, -1, len(TARGETS)).mT if part == "heads" else x
    results |= ablations(model, clean) | patches(model, corrupted, clean) | heads_of(model, repeated)
    return {key: x.detach().numpy() for key, x in results.items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_default_dtype(torch.float64)  # of the results of transformer_lens.patching
    for name in CONVERT:
        np.savez_compressed(folder / f"{name}.npz", **analyses(name))
    print(f"TransformerLens {transformer_lens.__file__}: {', '.join(CONVERT)}")
