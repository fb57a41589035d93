"""What a trainer needs of parallel text: token ids within the length limit, and a score of what the model writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xformer.data.pairs import TokenPairs
from xformer.models import Transformer
from xformer.pipelines.requests import GenerationRequest
from xformer.pipelines.seq2seq import Summarizer, Translator
from xformer.pipelines.tokenizers import Tokenizers
from xformer.text import ParallelCorpus, bleu, fit_lengths, rouge
from xformer.text.extras import require
from xformer.training.interrupt import until_stopped

TASKS = {task.task: task for task in (Translator, Summarizer)}
# What validation measures, by task.
METRICS = {"translation": "BLEU", "summarization": "ROUGE"}


@dataclass(frozen=True)
class EncodedCorpus:
    """Pairs of texts, and the same as token ids. num_long: pairs that were left out for their length; num_cut: sources
    that were cut to the limit."""

    text: ParallelCorpus
    pairs: TokenPairs
    num_long: int = 0
    num_cut: int = 0

    @classmethod
    def encode(
        cls,
        corpus: ParallelCorpus,
        tokenizers: Tokenizers,
        *,
        max_length: int,
        truncation: str = "error",
        names: Sequence[Any] = ("source", "target"),
    ) -> EncodedCorpus:
        """Encode a corpus whose texts may have up to max_length tokens.

        truncation: what to do with longer ones: "error", "drop" the pair, or "cut" the source. names: of the two
        sides, for errors.

        Raises DataError for texts that are too long, or when none is left.
        """
        pairs = tokenizers.encode(corpus)
        fitted = fit_lengths(
            [list(ids) for ids in pairs.source],
            [list(ids) for ids in pairs.target],
            max_length,
            truncation=truncation,
            names=names,
            line_numbers=corpus.line_numbers,
        )
        text = corpus.select(fitted.rows) if fitted.num_dropped else corpus
        return cls(text, TokenPairs(fitted.source, fitted.target), fitted.num_dropped, fitted.num_cut)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens of the source and of the target, special ones not counted."""
        return sum(map(len, self.pairs.source)), sum(map(len, self.pairs.target))


class ValidationScore:
    """How good what a model writes for a validation set is: the `score` of a TranslationTask.

    Outputs are decoded greedily; those of a model with a length encoding to the lengths of the references, with the
    small beam that this takes.

    measure: (outputs, references) -> a score, more being better; default BLEU of words for translation, the mean of
    ROUGE-1, 2 and L for summarization, case ignored where the target tokenizer lower-cases. outputs: the latest ones.

    Raises BackendError where the package that measures is not installed.
    """

    def __init__(
        self,
        corpus: EncodedCorpus,
        tokenizers: Tokenizers,
        task: str = "translation",
        measure: Callable[[list[str], list[str]], float] | None = None,
    ) -> None:
        self.corpus, self.tokenizers, self.task = corpus, tokenizers, task
        if measure is None:
            require({"translation": "sacrebleu", "summarization": "rouge_score"}[task])
        self.measure = measure or {"translation": self._bleu, "summarization": _rouge}[task]
        self.name = METRICS[task]
        self.outputs: list[str] = []

    def __call__(self, model: Transformer) -> float:
        """Write the outputs of the validation set and score them."""
        pairs = self.corpus.pairs
        writer = TASKS[self.task](model, self.tokenizers)
        # A model that writes to a length is measured at the lengths of the references.
        lengths = [max(1, len(ids)) for ids in pairs.target] if model.config.length_encoding else None
        self.outputs = [""] * len(pairs)
        for batch in until_stopped(writer.batches_of_ids(pairs.source, GenerationRequest(desired_length=lengths))):
            for row, outputs in batch:
                self.outputs[row] = outputs[0].text
        return self.measure(self.outputs, self.corpus.text.target)

    def _bleu(self, outputs: list[str], references: list[str]) -> float:
        return bleu(outputs, references, lowercase=self.tokenizers.target.lowercase).value


def _rouge(outputs: list[str], references: list[str]) -> float:
    scores = rouge(outputs, references)
    return sum(score.value for score in scores) / len(scores)
