"""Parallel text for training: token ids within the length limit, and validation scores of generated text."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xformer.data.pairs import TokenPairs
from xformer.distributed import Communicator, SingleProcess
from xformer.models import Transformer
from xformer.pipelines.seq2seq import Summarizer, Translator
from xformer.pipelines.tokenizers import CheckpointTokenizers, Tokenizers
from xformer.text import ParallelCorpus, Tokenizer, bleu, fit_lengths, rouge
from xformer.text.extras import require
from xformer.text.metrics import make_bleu

# Metric of validation, by task.
METRICS = {"translation": "BLEU", "summarization": "ROUGE"}
PIPELINES = {pipeline.task: pipeline for pipeline in (Translator, Summarizer)}


@dataclass(frozen=True)
class EncodedCorpus:
    """Pairs of texts with their token ids.

    Attributes:
        text: The texts.
        pairs: Their token ids.
        num_long: Pairs that were dropped because of their length.
        num_cut: Sources that were cut to the maximum length.
    """

    text: ParallelCorpus
    pairs: TokenPairs
    num_long: int = 0
    num_cut: int = 0

    @classmethod
    def encode(
        cls,
        corpus: ParallelCorpus,
        tokenizers: Tokenizers | CheckpointTokenizers,
        *,
        max_length: int,
        truncation: str = "error",
        names: Sequence[Any] = ("source", "target"),
    ) -> EncodedCorpus:
        """Encode texts of at most `max_length` tokens; arguments and errors are those of `fit_lengths`."""
        pairs = tokenizers.encode(corpus)
        fitted = fit_lengths(
            [list(ids) for ids in pairs.source],
            [list(ids) for ids in pairs.target],
            max_length,
            truncation=truncation,
            names=names,
            line_numbers=corpus.line_numbers,
            cut=tokenizers.cut_source,
        )
        text = corpus.select(fitted.rows) if fitted.num_dropped else corpus
        pairs = dataclasses.replace(pairs, source=fitted.source, target=fitted.target)
        return cls(text, pairs, fitted.num_dropped, fitted.num_cut)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Number of source and target tokens, special tokens excluded."""
        return sum(map(len, self.pairs.source)), sum(map(len, self.pairs.target))


class ValidationScore:
    """Quality of the outputs for a validation set: the `score` of a TranslationTask.

    Outputs are decoded greedily; a model with a length encoding generates outputs of the lengths of the references, by
    the small beam search that this needs.

    Args:
        corpus: Validation set.
        tokenizers: Tokenizers of source and target.
        task: "translation" or "summarization".
        measure: Function (outputs, references) -> score; higher is better. Default: BLEU of words for translation, the
            mean of ROUGE-1, 2 and L for summarization; case is ignored if the target tokenizer lowercases.
        bleu_tokenize: Tokenizer of BLEU, as in `bleu`.
        on_batch: Called after each batch; may raise to stop.
        communicator: The ranks, which generate the batches in turns; default this process alone.

    Attributes:
        name: Name of the metric.
        outputs: Latest outputs.

    Raises:
        ConfigError: If sacreBLEU has no such tokenizer.
        BackendError: If a package that the metric needs is not installed.
    """

    def __init__(
        self,
        corpus: EncodedCorpus,
        tokenizers: Tokenizers | CheckpointTokenizers,
        task: str = "translation",
        measure: Callable[[list[str], list[str]], float] | None = None,
        on_batch: Callable[[], None] = lambda: None,
        communicator: Communicator | None = None,
        bleu_tokenize: str = "13a",
    ) -> None:
        self._ranks = communicator or SingleProcess()
        self.corpus, self.tokenizers, self.task = corpus, tokenizers, task
        if measure is None and task == "translation":
            lowercase = isinstance(tokenizers.target, Tokenizer) and tokenizers.target.lowercase
            make_bleu(lowercase, bleu_tokenize)  # refuses a tokenizer before training
            measure = lambda *lines: bleu(*lines, lowercase=lowercase, tokenize=bleu_tokenize).value  # noqa: E731
        elif measure is None:
            require("rouge_score")
            measure = _rouge
        self.measure = measure
        self.name, self.on_batch = METRICS[task], on_batch
        self.outputs: list[str] = []

    def __call__(self, model: Transformer) -> float:
        """Generate the outputs of the validation set and score them."""
        pairs = self.corpus.pairs
        pipeline = PIPELINES[self.task](model, self.tokenizers)
        lengths = [max(1, len(ids)) for ids in pairs.target] if model.config.length_encoding else None
        texts: list[tuple[int, str]] = []
        part = (self._ranks.rank, self._ranks.size)
        for batch in pipeline.batches_of_ids(pairs.source, target_length=lengths, part=part):
            texts += [(index, outputs[0].text) for index, outputs in batch]
            self.on_batch()
        self.outputs = [""] * len(pairs)
        for index, text in itertools.chain.from_iterable(self._ranks.all_gather(texts)):
            self.outputs[index] = text
        return self.measure(self.outputs, self.corpus.text.target)


def _rouge(outputs: list[str], references: list[str]) -> float:
    scores = rouge(outputs, references)
    return sum(score.value for score in scores) / len(scores)
