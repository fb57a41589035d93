"""Language models and pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import xformer as xf


def language_model(vocab_size: int) -> xf.LanguageModel:
    """Return a small model."""
    positions = xf.LanguageModelConfig(vocab_size=vocab_size).positions
    config = xf.LanguageModelConfig(
        vocab_size=vocab_size, d_model=8, num_heads=2, d_ff=16, num_layers=1, norm="rms", activation="swiglu",
        positions="rotary" if positions != "rotary" else positions, norm_position="pre",
    )  # fmt: skip
    return xf.LanguageModel(config, seed=0)


def adapted(model: xf.LanguageModel, directory: Path) -> xf.LanguageModel:
    """Return a model with adapters, packed and quantized; the class stays."""
    adapted = xf.lora(model, rank=2)
    assert_type(adapted, xf.LanguageModel)
    assert_type(xf.merge_lora(adapted), xf.LanguageModel)
    assert_type(model.pack().quantize("int8"), xf.LanguageModel)
    assert_type(xf.layers.quantize(model), xf.LanguageModel)
    model.save(directory / "model.safetensors")
    return adapted


def continuations(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return outputs of a model that is read from a file."""
    model = xf.load_pretrained(path, xp="numpy", dtype="float32")
    assert_type(model, xf.BaseModel)
    if not isinstance(model, xf.LanguageModel):
        raise xf.CheckpointError(f"{path} has a {type(model).__name__}; expected a language model")
    logits = model(prompts[:1])
    assert_type(logits, xf.Array)
    config = xf.GenerationConfig(max_new_tokens=4)
    hypotheses = xf.generate(model, prompts, config, special_tokens=False)
    assert_type(hypotheses, list[list[xf.Hypothesis]])
    for tokens in xf.stream(model, prompts[:1], config, special_tokens=False):
        assert_type(tokens, list[list[int]])
    return [best.tokens for best, *_ in hypotheses]


def pipelines(directory: Path, texts: list[str]) -> xf.Array:
    """Return the class of a run's pipeline, and vectors of texts."""
    run = xf.train_lm(text=texts, out=directory, max_steps=2)
    assert_type(run.pipeline, xf.TextGenerator)
    pairs = xf.train(source=texts, target=texts, valid_source=texts, valid_target=texts, out=directory)
    assert_type(pairs.pipeline, xf.Translator | xf.Summarizer)
    classifier = xf.Classifier.from_pretrained(directory)
    assert_type(classifier, xf.Classifier)
    assert_type(classifier(texts), list[xf.Prediction])
    embedder = xf.Embedder.from_pretrained(directory)
    vectors: xf.Array = embedder(texts)
    return vectors
