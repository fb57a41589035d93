"""The tokenizers of source and target, trained, saved and loaded together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xformer.data.pairs import TokenPairs
from xformer.families.run_directory import RunDirectory
from xformer.generation.pretrained import read_generation
from xformer.io import read_json
from xformer.text import ParallelCorpus
from xformer.text.corpus import ParallelFiles
from xformer.tokenizers import BaseTokenizer, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of source and target; the same object if the vocabulary is joint.

    Attributes:
        source: Source tokenizer.
        target: Target tokenizer.
        language: Language of documents, "en" or "de", which determines where their sentences end.
        instruction: Text that the model expects before each source, e.g. "summarize: " (T5).
        forced_bos_id: Token that targets begin with, e.g. that of the target language.
    """

    source: BaseTokenizer
    target: BaseTokenizer
    language: str = "en"
    instruction: str = ""
    forced_bos_id: int | None = None

    @classmethod
    def train(
        cls,
        corpus: ParallelCorpus | ParallelFiles,
        *,
        vocab_size: int = 8000,
        joint: bool = True,
        documents: bool = False,
        language: str = "en",
        **settings: Any,
    ) -> Tokenizers:
        """Train one tokenizer for both sides, if `joint`, or one for each.

        Sources are `documents` of a language: their sentences are separated by `<sep>`. The other arguments and the
        errors are those of `Tokenizer.train`.
        """
        texts = itertools.chain(corpus.source, corpus.target) if joint else corpus.source
        source = Tokenizer.train(texts, vocab_size, separator=documents, **settings)
        return cls(source, source if joint else Tokenizer.train(corpus.target, vocab_size, **settings), language)

    @classmethod
    def load(cls, run: RunDirectory) -> Tokenizers:
        """Load the tokenizers of a run; raise CheckpointError if one is missing, damaged or from another run."""
        config = run.read_config()
        language = config.get("recipe", {}).get("tokenizer", {}).get("language", "en")
        is_joint = run.tokenizer("joint").name in config.get("tokenizers", {})
        source = run.load_tokenizer("joint" if is_joint else "source")
        return cls(source, source if is_joint else run.load_tokenizer("target"), language)

    @classmethod
    def from_pretrained(
        cls, directory: Path, task: str, source_language: str | None = None, target_language: str | None = None
    ) -> Tokenizers:
        """Load the tokenizers of a public checkpoint for a task, "translation" or "summarization".

        Raises:
            CheckpointError: If a file is missing or damaged.
            ConfigError: If the tokenizer has no such language.
        """
        tasks = read_json(directory / "config.json", "configuration").get("task_specific_params") or {}
        name = task if source_language is None else f"{task}_{source_language}_to_{target_language}"
        parameters = tasks.get(name) if isinstance(tasks, dict) else None
        instruction = str(parameters.get("prefix") or "") if isinstance(parameters, dict) else ""
        if instruction:  # T5 names the languages in it
            source_language = target_language = None
        source = load_tokenizer(directory, source_language, target_language)
        forced_bos_id = source.forced_bos_id
        if forced_bos_id is None:
            forced_bos_id = read_generation(directory, encoder_decoder=True).forced_bos_id
        return cls(source, source.target, instruction=instruction, forced_bos_id=forced_bos_id)

    def by_side(self) -> dict[str, BaseTokenizer]:
        """Return the distinct tokenizers by their names in a run directory."""
        if self.source is self.target or self.source.directory is not None:  # a directory has the files of both
            return {"joint": self.source}
        return {"source": self.source, "target": self.target}

    @property
    def source_has_eos(self) -> bool:
        """True if `encode_source` adds eos and other special tokens."""
        return self.source.adds_special_tokens

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of sources; special tokens are included for a public checkpoint."""
        texts = [self.instruction + text for text in texts] if self.instruction else texts
        return self.source.encode_source(texts, self.language)

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of targets, without bos and eos but with `forced_bos_id`."""
        prefix = [] if self.forced_bos_id is None else [self.forced_bos_id]
        return [[*prefix, *ids] for ids in self.target.encode_batch(texts, special_tokens=False)]

    def encode(self, corpus: ParallelCorpus) -> TokenPairs:
        """Return the token ids of pairs of texts."""
        source, target = self.encode_source(corpus.source), self.encode_target(corpus.target)
        return TokenPairs(source, target, source_has_eos=self.source_has_eos)

    def cut_source(self, ids: list[int], limit: int) -> list[int]:
        """Return at most `limit` token ids of a source; special tokens at its end stay."""
        num_special = 0
        while num_special < min(len(ids), limit) and ids[-1 - num_special] in self.source.special_ids:
            num_special += 1
        return ids if len(ids) <= limit else [*ids[: limit - num_special], *ids[len(ids) - num_special :]]
