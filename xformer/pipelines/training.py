"""What a trainer needs of parallel text: token ids within the length limit, and a score of translations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xformer.models import Transformer
from xformer.pipelines.tokenizers import Tokenizers
from xformer.pipelines.translation import Translator
from xformer.text import ParallelCorpus, bleu, check_lengths, drop_long
from xformer.training.batches import TokenPairs


@dataclass(frozen=True)
class EncodedCorpus:
    """Sentence pairs as text and as token ids. num_long: pairs that were left out for their length."""

    text: ParallelCorpus
    pairs: TokenPairs
    num_long: int

    @classmethod
    def encode(
        cls,
        corpus: ParallelCorpus,
        tokenizers: Tokenizers,
        *,
        max_length: int,
        drop: bool,
        names: Sequence[Any] = ("source", "target"),
    ) -> EncodedCorpus:
        """Encode a corpus whose sentences may have up to max_length tokens.

        drop: leave longer ones out and count them; otherwise they are an error. names: of the two sides, for errors.

        Raises DataError for sentences that are too long, or when none is left.
        """
        pairs = tokenizers.encode(corpus)
        if not drop:
            for ids, name in zip((pairs.source, pairs.target), names, strict=True):
                check_lengths(ids, max_length, name, corpus.line_numbers)
            return cls(corpus, pairs, 0)
        kept, num_long = drop_long(max_length, pairs.source, pairs.target)
        if not num_long:
            return cls(corpus, pairs, 0)
        source, target = ([column[row] for row in kept] for column in (pairs.source, pairs.target))
        return cls(corpus.select(kept), TokenPairs(source, target), num_long)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens of the source and of the target, special ones not counted."""
        return sum(map(len, self.pairs.source)), sum(map(len, self.pairs.target))


class ValidationBleu:
    """BLEU of a model's greedy translations of a validation set, for `Trainer(bleu=...)`.

    measure: (translations, references) -> a score from 0 to 100; default BLEU of words, case ignored where the target
    tokenizer lower-cases. translations: the latest ones.
    """

    def __init__(
        self,
        corpus: ParallelCorpus,
        tokenizers: Tokenizers,
        measure: Callable[[list[str], list[str]], float] | None = None,
    ) -> None:
        self.corpus, self.tokenizers = corpus, tokenizers
        self.measure = measure or self._bleu
        self.translations: list[str] = []

    def __call__(self, model: Transformer) -> float:
        """Translate the validation set and score it."""
        translator = Translator(model, *self.tokenizers)
        # The limit on lines of input protects whoever translates unknown text; these were checked before training.
        longest = max(map(len, translator.source_tokenizer.encode_batch(self.corpus.source)), default=1)
        self.translations = translator(self.corpus.source, max_source_length=max(1, longest))
        return self.measure(self.translations, self.corpus.target)

    def _bleu(self, translations: list[str], references: list[str]) -> float:
        return bleu(translations, references, lowercase=self.tokenizers.target.lowercase).value
