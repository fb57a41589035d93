"""The tokenizers of source and target, trained, saved and loaded together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from xformer.data.pairs import TokenPairs
from xformer.families.run_directory import RunDirectory
from xformer.generation.pretrained import read_generation
from xformer.io import read_json
from xformer.text import ParallelCorpus, PretrainedTokenizer, Tokenizer, load_tokenizer, split_sentences
from xformer.text.corpus import ParallelFiles


class CheckpointTokenizers(NamedTuple):
    """The tokenizers of a public encoder-decoder. Unlike those of `Tokenizers`, sources include special tokens.

    Attributes:
        source: Source tokenizer.
        target: Target tokenizer.
        instruction: Text that the model expects before each source, e.g. "summarize: " (T5).
        forced_bos_id: Token that targets begin with, e.g. of the target language.
    """

    source: PretrainedTokenizer
    target: PretrainedTokenizer
    instruction: str = ""
    forced_bos_id: int | None = None

    @classmethod
    def load(
        cls, directory: Path, task: str, source_language: str | None = None, target_language: str | None = None
    ) -> Self:
        """Load the tokenizers of a checkpoint directory for a task, "translation" or "summarization".

        Raises:
            CheckpointError: If a file is missing or damaged.
            ConfigError: If the tokenizer has no such language.
        """
        instruction = _instruction(directory, task, source_language, target_language)
        if instruction:  # T5 names the languages in it
            source_language = target_language = None
        source, target, forced_bos_id = load_tokenizer(directory).for_translation(source_language, target_language)
        if forced_bos_id is None:
            forced_bos_id = read_generation(directory, encoder_decoder=True).forced_bos_id
        return cls(source, target, instruction, forced_bos_id)

    def by_side(self) -> dict[str, PretrainedTokenizer]:
        """Return one tokenizer, whose directory has the files of both sides."""
        return {"joint": self.source}

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of sources, special tokens included."""
        return self.source.encode_batch([self.instruction + text for text in texts])

    def encode(self, corpus: ParallelCorpus) -> TokenPairs:
        """Return the token ids of pairs of texts."""
        prefix = [] if self.forced_bos_id is None else [self.forced_bos_id]
        target = self.target.encode_batch(corpus.target, special_tokens=False)
        return TokenPairs(self.encode_source(corpus.source), [[*prefix, *ids] for ids in target], source_has_eos=True)

    def cut_source(self, ids: list[int], limit: int) -> list[int]:
        """Return at most `limit` token ids of a source; special tokens at its end stay."""
        num_special = 0
        while num_special < min(len(ids), limit) and ids[-1 - num_special] in self.source.special_ids:
            num_special += 1
        return ids if len(ids) <= limit else [*ids[: limit - num_special], *ids[len(ids) - num_special :]]


class Tokenizers(NamedTuple):
    """The tokenizers of source and target; the same object if the vocabulary is joint.

    Attributes:
        source: Source tokenizer.
        target: Target tokenizer.
        language: Language of documents, "en" or "de", which determines where their sentences end.
    """

    source: Tokenizer
    target: Tokenizer
    language: str = "en"

    @classmethod
    def train(
        cls,
        corpus: ParallelCorpus | ParallelFiles,
        *,
        vocab_size: int = 8000,
        model: str = "bpe",
        joint: bool = True,
        lowercase: bool = False,
        unicode_form: str = "NFC",
        documents: bool = False,
        language: str = "en",
    ) -> Tokenizers:
        """Train one tokenizer for both sides, if `joint`, or one for each.

        Sources are `documents` of a language: their sentences are separated by `<sep>`. The other arguments and the
        errors are those of `Tokenizer.train`.
        """
        settings: dict[str, Any] = {"lowercase": lowercase, "model": model, "unicode_form": unicode_form}
        if joint:
            both = Tokenizer.train(
                itertools.chain(corpus.source, corpus.target), vocab_size, separator=documents, **settings
            )
            return cls(both, both, language)
        source = Tokenizer.train(corpus.source, vocab_size, separator=documents, **settings)
        return cls(source, Tokenizer.train(corpus.target, vocab_size, **settings), language)

    @classmethod
    def load(cls, run: RunDirectory) -> Tokenizers:
        """Load the tokenizers of a run; raise CheckpointError if one is missing, damaged or from another run."""
        config = run.read_config()
        language = config.get("recipe", {}).get("tokenizer", {}).get("language", "en")
        if run.tokenizer("joint").name in config.get("tokenizers", {}):
            joint = run.load_tokenizer("joint")
            return cls(joint, joint, language)
        return cls(run.load_tokenizer("source"), run.load_tokenizer("target"), language)

    def by_side(self) -> dict[str, Tokenizer]:
        """Return the distinct tokenizers by their names in a run directory."""
        if self.source is self.target:
            return {"joint": self.source}
        return {"source": self.source, "target": self.target}

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of sources: sentences, or documents with `<sep>` between sentences."""
        if self.source.sep_id is not None:
            return self.source.encode_documents([split_sentences(text, self.language) for text in texts])
        return self.source.encode_batch(list(texts))

    def encode(self, corpus: ParallelCorpus) -> TokenPairs:
        """Return the token ids of pairs of texts."""
        return TokenPairs(self.encode_source(corpus.source), self.target.encode_batch(corpus.target))

    def cut_source(self, ids: list[int], limit: int) -> list[int]:
        """Return at most `limit` token ids of a source."""
        return ids[:limit]


def _instruction(directory: Path, task: str, source_language: str | None, target_language: str | None) -> str:
    """Return the text that config.json puts before the sources of a task (T5), or an empty text."""
    tasks = read_json(directory / "config.json", "configuration").get("task_specific_params") or {}
    name = task if source_language is None else f"{task}_{source_language}_to_{target_language}"
    parameters = tasks.get(name) if isinstance(tasks, dict) else None
    return str(parameters.get("prefix") or "") if isinstance(parameters, dict) else ""
