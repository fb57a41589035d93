"""The tokenizers of a translator: learned, kept and loaded together."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.models import Transformer, TransformerConfig
from xformer.text import ParallelCorpus, Tokenizer
from xformer.training.batches import TokenPairs
from xformer.training.recipe import Recipe, TokenizerSettings
from xformer.training.run_directory import RunDirectory


class Tokenizers(NamedTuple):
    """The tokenizers of both sides; one and the same object where the vocabulary is joint."""

    source: Tokenizer
    target: Tokenizer

    @classmethod
    def train(cls, corpus: ParallelCorpus, settings: TokenizerSettings) -> Tokenizers:
        """Learn them from the training text; raises what `Tokenizer.train` raises."""

        def learn(lines: list[str]) -> Tokenizer:
            return Tokenizer.train(lines, settings.vocab_size, lowercase=settings.lowercase, model=settings.model)

        if settings.joint:
            joint = learn([*corpus.source, *corpus.target])
            return cls(joint, joint)
        return cls(learn(corpus.source), learn(corpus.target))

    @classmethod
    def load(cls, run: RunDirectory) -> Tokenizers:
        """Read those of a run; raises CheckpointError when one is missing, damaged, or of another run."""
        if run.tokenizer("joint").exists():
            joint = run.load_tokenizer("joint")
            return cls(joint, joint)
        return cls(run.load_tokenizer("source"), run.load_tokenizer("target"))

    def by_side(self) -> dict[str, Tokenizer]:
        """The different ones, under the names that a run directory keeps them by."""
        if self.source is self.target:
            return {"joint": self.source}
        return {"source": self.source, "target": self.target}

    def encode(self, corpus: ParallelCorpus) -> TokenPairs:
        """Turn sentence pairs into token ids."""
        return TokenPairs(self.source.encode_batch(corpus.source), self.target.encode_batch(corpus.target))

    def make_model(self, recipe: Recipe, xp: Any) -> Transformer:
        """A fresh model of the recipe's shape, seed and dtype for these vocabularies."""
        config = TransformerConfig(
            source_vocab_size=self.source.vocab_size,
            target_vocab_size=self.target.vocab_size,
            share_embeddings=self.source is self.target,
            **recipe.model,
        )
        return Transformer(config, xp=xp, seed=recipe.training.seed, dtype=recipe.training.dtype)
