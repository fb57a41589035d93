"""The tokenizers of both sides of a model: learned, kept and loaded together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xformer.data.pairs import TokenPairs
from xformer.models import Transformer, TransformerConfig
from xformer.runs.config import TokenizerSettings
from xformer.runs.recipe import Recipe
from xformer.runs.run_directory import RunDirectory
from xformer.text import ParallelCorpus, Tokenizer, split_sentences


class Tokenizers(NamedTuple):
    """The tokenizers of both sides; one and the same object where the vocabulary is joint.

    language: of documents ("en" or "de"), which decides where their sentences end.
    """

    source: Tokenizer
    target: Tokenizer
    language: str = "en"

    @classmethod
    def train(cls, corpus: ParallelCorpus, settings: TokenizerSettings) -> Tokenizers:
        """Learn them from the training text; raises what `Tokenizer.train` raises."""

        def learn(lines: list[str], *, separator: bool) -> Tokenizer:
            return Tokenizer.train(
                lines,
                settings.vocab_size,
                lowercase=settings.lowercase,
                model=settings.model,
                unicode_form=settings.unicode_form,
                separator=separator,
            )

        if settings.joint:
            joint = learn([*corpus.source, *corpus.target], separator=settings.documents)
            return cls(joint, joint, settings.language)
        source = learn(corpus.source, separator=settings.documents)
        return cls(source, learn(corpus.target, separator=False), settings.language)

    @classmethod
    def load(cls, run: RunDirectory) -> Tokenizers:
        """Read those of a run; raises CheckpointError when one is missing, damaged, or of another run."""
        config = run.read_config()
        language = config.get("recipe", {}).get("tokenizer", {}).get("language", "en")
        if run.tokenizer("joint").name in config.get("tokenizers", {}):
            joint = run.load_tokenizer("joint")
            return cls(joint, joint, language)
        return cls(run.load_tokenizer("source"), run.load_tokenizer("target"), language)

    def by_side(self) -> dict[str, Tokenizer]:
        """The different ones, under the names that a run directory keeps them by."""
        if self.source is self.target:
            return {"joint": self.source}
        return {"source": self.source, "target": self.target}

    @property
    def documents(self) -> bool:
        """Whether sources are documents, of which the tokenizer marks the sentences."""
        return self.source.sep_id is not None

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn sources into token ids: sentences, or documents with a separator between their sentences."""
        if self.documents:
            return self.source.encode_documents([split_sentences(text, self.language) for text in texts])
        return self.source.encode_batch(list(texts))

    def encode(self, corpus: ParallelCorpus) -> TokenPairs:
        """Turn pairs of texts into token ids."""
        return TokenPairs(self.encode_source(corpus.source), self.target.encode_batch(corpus.target))

    def make_model(self, recipe: Recipe, xp: Any) -> Transformer:
        """A fresh model of the recipe's shape, seed and dtype for these vocabularies."""
        config = TransformerConfig(
            source_vocab_size=self.source.vocab_size,
            target_vocab_size=self.target.vocab_size,
            share_embeddings=self.source is self.target,
            **recipe.model,
        )
        return Transformer(config, xp=xp, seed=recipe.training.seed, dtype=recipe.training.dtype)
