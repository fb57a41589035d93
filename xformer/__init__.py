"""Transformers written once, against the Python Array API standard, that run and train on any array library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xformer import backends, errors, layers, masks, ops, text, tokenizers
    from xformer.backends import array_namespace
    from xformer.families import load_lora, load_pretrained, save_lora, save_pretrained
    from xformer.generation import (
        GenerationConfig,
        Hypothesis,
        LogitsProcessor,
        StoppingCriteria,
        StopSequences,
    )
    from xformer.generation.generate import generate, stream
    from xformer.layers import (
        DecoderLayer,
        Dropout,
        Embedding,
        EncoderLayer,
        FeedForward,
        GatedFeedForward,
        Initializer,
        LayerNorm,
        Linear,
        MixtureOfExperts,
        MultiHeadAttention,
        PostNorm,
        PreNorm,
        RMSNorm,
        load_balancing_loss,
        lora,
        merge_lora,
        record_routing,
    )
    from xformer.models import (
        BaseModel,
        Encoder,
        EncoderConfig,
        ImageEncoder,
        ImageEncoderConfig,
        ImageTextEncoder,
        ImageTextEncoderConfig,
        LanguageModel,
        LanguageModelConfig,
        SpeechTransformer,
        SpeechTransformerConfig,
        Transformer,
        TransformerConfig,
        load,
    )
    from xformer.ops.cross_entropy import cross_entropy
    from xformer.pipelines import (
        Classifier,
        Embedder,
        ImageClassifier,
        Reranker,
        Summarizer,
        TextGenerator,
        Tokenizers,
        Transcriber,
        Translator,
        ZeroShotImageClassifier,
        show_attention,
    )
    from xformer.random import Rng
    from xformer.runs.launch import TrainedRun, resume, train, train_lm
    from xformer.threads import num_threads, set_num_threads
    from xformer.tracing import remat, stop_gradient, value_and_grad, vjp
    from xformer.tracing.activations import activation_names, intervene, record
    from xformer.tracing.grad import grad
    from xformer.tracing.jit import jit
    from xformer.training import (
        SGD,
        Adafactor,
        Adam,
        AdamW,
        Muon,
        Optimizer,
        dpo_loss,
        early_stopping,
        language_model_loss,
        load_parameters,
        mlflow,
        print_every,
        save_parameters,
        schedules,
        sequence_log_probs,
        tensorboard,
        time_limit,
        train_step,
        translation_loss,
        validate,
        wandb,
    )
    from xformer.training.data_parallel import data_parallel
    from xformer.training.fit import fit
    from xformer.tree import Module, freeze, unfreeze

__version__ = "0.2.0"

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "BaseModel",
    "Classifier",
    "DecoderLayer",
    "Dropout",
    "Embedder",
    "Embedding",
    "Encoder",
    "EncoderConfig",
    "EncoderLayer",
    "FeedForward",
    "GatedFeedForward",
    "GenerationConfig",
    "Hypothesis",
    "ImageClassifier",
    "ImageEncoder",
    "ImageEncoderConfig",
    "ImageTextEncoder",
    "ImageTextEncoderConfig",
    "Initializer",
    "LanguageModel",
    "LanguageModelConfig",
    "LayerNorm",
    "Linear",
    "LogitsProcessor",
    "MixtureOfExperts",
    "Module",
    "MultiHeadAttention",
    "Muon",
    "Optimizer",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "Reranker",
    "Rng",
    "SpeechTransformer",
    "SpeechTransformerConfig",
    "StopSequences",
    "StoppingCriteria",
    "Summarizer",
    "TextGenerator",
    "Tokenizers",
    "TrainedRun",
    "Transcriber",
    "Transformer",
    "TransformerConfig",
    "Translator",
    "ZeroShotImageClassifier",
    "__version__",
    "activation_names",
    "array_namespace",
    "backends",
    "cross_entropy",
    "data_parallel",
    "dpo_loss",
    "early_stopping",
    "errors",
    "fit",
    "freeze",
    "generate",
    "grad",
    "intervene",
    "jit",
    "language_model_loss",
    "layers",
    "load",
    "load_balancing_loss",
    "load_lora",
    "load_parameters",
    "load_pretrained",
    "lora",
    "masks",
    "merge_lora",
    "mlflow",
    "num_threads",
    "ops",
    "print_every",
    "record",
    "record_routing",
    "remat",
    "resume",
    "save_lora",
    "save_parameters",
    "save_pretrained",
    "schedules",
    "sequence_log_probs",
    "set_num_threads",
    "show_attention",
    "stop_gradient",
    "stream",
    "tensorboard",
    "text",
    "time_limit",
    "tokenizers",
    "train",
    "train_lm",
    "train_step",
    "translation_loss",
    "unfreeze",
    "validate",
    "value_and_grad",
    "vjp",
    "wandb",
]

if not TYPE_CHECKING:  # or checkers would accept every name
    # Searched for a name in this order, in which each imports little besides the ones before it.
    _HOMES = (
        *("tree", "random", "threads", "backends", "ops", "tracing.activations", "tracing", "layers", "models"),
        *("generation", "families", "pipelines", "training", "runs.launch"),
    )

    def __getattr__(name: str) -> Any:
        """Import a public name or a module at its first use, so that programs start at once."""
        from importlib.util import find_spec

        if find_spec(f"xformer.{name}"):
            return importlib.import_module(f"xformer.{name}")
        if name in __all__:
            for home in _HOMES:
                module = importlib.import_module(f"xformer.{home}")
                if name in module.__dict__:
                    return globals().setdefault(name, module.__dict__[name])
        hint = "" if name.startswith("_") else _hint(name)
        raise AttributeError(f"module 'xformer' has no attribute {name!r}{hint}")

    def _hint(name: str) -> str:
        from xformer import hints

        if name in hints.PACKAGE:
            return f"; use {hints.PACKAGE[name]}"
        for home, known in (("layers", name), ("ops", name.lower())):  # ReLU is relu
            if known in importlib.import_module(f"xformer.{home}").__all__:
                return f"; use xformer.{home}.{known}"
        return ""

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
