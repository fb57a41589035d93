"""Train small models in many ways, and print one hash for each: `python -m tests.native.variants [NAME ...]`.

The environment selects threads, level and BLAS library. With `--ranks` the processes of mpiexec train together; with
`--interrupted` each training is ended and resumed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import tempfile
from typing import Any, NamedTuple

import numpy as np

import xformer as xf
from xformer.backends import array_namespace
from xformer.data.packing import Documents, PackedBatch, TextChunks
from xformer.data.pairs import Batch, TokenPairs
from xformer.distributed import ShardedOptimizer, connect
from xformer.layers import positions
from xformer.training import events, schedules

INTERRUPTED = False
VOCABULARY = 96
SMALL = {"d_model": 32, "num_heads": 4, "d_ff": 96, "dropout": 0.1}

# Language models of several kinds; also for tests of decoding.
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "paper": {},
    "learned": {"positions": "learned", "activation": "gelu", "tie_output": False, "norm_position": "post"},
    "rotary": {"positions": "rotary", "norm": "rms", "activation": "swiglu", "num_key_value_heads": 2},
    "softcap": {
        "positions": "rotary", "norm": "rms", "norm_position": "sandwich", "activation": "geglu_tanh", "qk_norm": True,
        "window": 5, "layer_types": ("sliding_attention", "full_attention"), "attention_softcap": 5.0,
        "logits_softcap": 9.0,
    },
    "alibi": {"positions": "alibi", "parallel_residual": True, "shared_norm": True, "num_key_value_heads": 1},
    "relative": {"positions": "relative", "activation": "relu_squared", "norm_position": "output", "window": 7},
    "sinks": {"positions": "rotary", "attention_sinks": True, "activation": "swiglu_clamped", "output_bias": True},
    "experts": {"num_experts": 5, "activation": "swiglu", "positions": "none", "shared_expert_d_ff": 40},
}  # fmt: skip
TRANSLATORS: dict[str, dict[str, Any]] = {
    "paper": {},
    "learned": {"positions": "learned", "norm_position": "post", "activation": "gelu", "embedding_norm": True},
    "rotary": {"positions": "rotary", "norm": "rms", "activation": "swiglu", "num_key_value_heads": 2},
    "relative": {"positions": "relative", "norm": "rms", "activation": "geglu_tanh", "scale_output": True},
    "alibi": {"positions": "alibi", "window": 4, "tie_output": False, "activation": "quick_gelu"},
    "experts": {"num_experts": 4, "share_embeddings": True},
    "copy": {"copy": True, "share_embeddings": True, "activation": "silu"},
}


def translator(**fields):
    sizes = {"source_vocab_size": VOCABULARY, "target_vocab_size": VOCABULARY}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    return xf.Transformer(xf.TransformerConfig(**(sizes | SMALL | layers | fields)), seed=1)


def language_model(**fields):
    config = xf.LanguageModelConfig(**({"vocab_size": VOCABULARY, "num_layers": 2} | SMALL | fields))
    return xf.LanguageModel(config, seed=1)


def texts(seed, rows, length=18):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, VOCABULARY, n).tolist() for n in rng.integers(2, length, rows)]


def pairs(seed=0, rows=24):
    return Batch.make(TokenPairs(texts(seed, rows), texts(seed + 1, rows)), range(rows), xp=np)


def documents(seed=0, rows=24):
    return PackedBatch.make(Documents(texts(seed, rows)), xp=np)


class Preferences(NamedTuple):
    """Preferred and rejected documents."""

    chosen: PackedBatch
    rejected: PackedBatch

    @property
    def num_tokens(self):
        return len(self.chosen.counts)

    def split(self, count):
        sides = (side.split(count) for side in self)
        return [Preferences(*parts) for parts in zip(*sides, strict=True)]


def preference_loss(model, batch, rng):
    chosen, rejected = (xf.sequence_log_probs(model, side, rng) for side in batch)
    reference = np.full(len(batch.chosen.counts), -9.0, np.float32)
    losses = xf.dpo_loss(chosen, rejected, reference, reference - 1.0, beta=0.5)
    return array_namespace(losses).sum(losses)


def own_loss(model, batch, rng):
    """Compute a contrastive loss by functions of the standard."""
    xp = array_namespace(model.embedding.weight)
    x = xp.take(model.embedding.weight, xp.reshape(batch.tokens, (-1,)), axis=0)
    x = x / xp.sqrt(xp.mean(x * x, axis=1, keepdims=True) + 1e-3)
    scores = xp.matmul(x, x.T) / 32.0
    return xp.sum(xp.log(xp.sum(xp.exp(scores), axis=1)) + xp.tanh(xp.mean(scores, axis=1)))


def smoothed(loss=xf.translation_loss, **options):
    return functools.partial(loss, label_smoothing=0.1, **options)


def fit(model, batches, loss, steps=2, **options):
    """Train, with a break if INTERRUPTED; return the arrays of the model, and the losses and norms of the gradients."""
    defaults = {"optimizer": xf.AdamW(), "learning_rate": 0.01, "data_parallel": 4, "seed": 3}
    numbers = []

    def keep(event, loop):
        if isinstance(event, events.Step):
            numbers.append((event.loss, event.grad_norm))

    def run(steps, **more):
        return xf.fit(model, loss, batches, steps=steps, callbacks=[keep], **(defaults | options | more))[0]

    if INTERRUPTED:
        with tempfile.TemporaryDirectory() as folder:
            run(steps // 2, run_dir=folder)
            model = run(steps, run_dir=folder)
    else:
        model = run(steps)
    return [*(array for _, array in model.named_arrays()), np.asarray(numbers)]


def translate(fields=None, loss=None, count=2, **options):
    batches = [pairs(seed) for seed in range(count)]
    return lambda communicator: fit(
        translator(**(fields or {})), batches, loss or smoothed(), communicator=communicator, **options
    )


def read(fields=None, loss=xf.language_model_loss, change=lambda model: model, make=documents, count=2, **options):
    batches = [make(seed) for seed in range(count)]
    return lambda communicator: fit(
        change(language_model(**(fields or {}))), batches, loss, communicator=communicator, **options
    )


def sharded(communicator):
    optimizer = xf.AdamW() if communicator is None else ShardedOptimizer(xf.AdamW(), communicator)
    return fit(translator(), [pairs()], smoothed(), optimizer=optimizer, communicator=communicator)


def chunks(seed):
    return TextChunks.make(np.random.default_rng(seed).integers(4, VOCABULARY, 250), range(0, 230, 14), 13, xp=np)


def preferences(seed):
    return Preferences(documents(seed), documents(seed + 5))


def tables(communicator):
    """Return positions of a long text."""
    sines = positions.sinusoidal(8192, 128, layout="fairseq", xp=np, dtype=np.dtype(np.float32))
    return [sines, *positions.Rotary(128).rotation(8192, like=sines)]


# Products use the BLAS library by default: they have more than 192 rows and 2**26 multiplications.
def large(**options):
    model = translator(d_model=256, num_heads=8, d_ff=1024, num_encoder_layers=0)
    return lambda communicator: fit(model, [pairs(rows=104)], smoothed(), communicator=communicator, **options)


DROPOUTS = {"dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1}
VARIANTS = {
    "large": large(optimizer=xf.Muon()),
    "one_large_shard": large(optimizer=xf.Adafactor(), data_parallel=1),
    "tables": tables,
    "adam": translate(optimizer=xf.Adam(), learning_rate=schedules.cosine(0.01, warmup_steps=1, total_steps=4)),
    "sgd": translate(optimizer=xf.SGD(nesterov=True), learning_rate=schedules.inverse_square_root(0.1, warmup_steps=2)),
    "adafactor": translate(optimizer=xf.Adafactor()),
    "muon": translate({"d_model": 64}, optimizer=xf.Muon()),
    "sharded": sharded,
    "dropouts": translate(DROPOUTS),
    "r_drop": translate(DROPOUTS, smoothed(r_drop=1.0)),
    "clipped": translate(max_grad_norm=0.1),
    "accumulated": translate(count=4, grad_accumulation=2),
    "z_loss": translate(loss=smoothed(z_loss=0.01)),
    "one_shard": translate(data_parallel=1),
    "many_shards": translate(data_parallel=8),
    "jit": read(make=chunks, jit=True, steps=6),
    "one_shard_jit": read(make=chunks, jit=True, steps=6, data_parallel=1),
    "rematerialized": translate({"rematerialize": True}),
    "lora": read(change=lambda model: xf.lora(model, 4)),
    "dora": read(change=lambda model: xf.lora(model, 4, use_dora=True)),
    "qlora": read(change=lambda model: xf.lora(xf.layers.quantize(model), 4)),
    "chunks": read(make=chunks),
    "dpo": read(loss=preference_loss, make=preferences),
    "own": read(loss=own_loss, make=chunks),
    **{f"lm_{name}": read(fields) for name, fields in LANGUAGE_MODELS.items()},
    **{f"translation_{name}": translate(fields) for name, fields in TRANSLATORS.items()},
    "balanced_lm": read(LANGUAGE_MODELS["experts"], functools.partial(xf.language_model_loss, load_balancing=0.1)),
    "balanced": translate(TRANSLATORS["experts"], smoothed(load_balancing=0.1)),
}


def digest(arrays):
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def main(names, communicator=None):
    hashes = {name: digest(VARIANTS[name](communicator)) for name in names or VARIANTS}
    if communicator is None or communicator.rank == 0:
        print(json.dumps(hashes))


if __name__ == "__main__":
    options = {"--ranks", "--interrupted"} & set(sys.argv)
    INTERRUPTED = "--interrupted" in options
    ranks = connect("mpi") if "--ranks" in options else None
    main([name for name in sys.argv[1:] if name not in options], ranks)
