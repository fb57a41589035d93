"""Parallel text for training: token ids within the length limit, and validation scores of generated text."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xformer.data.pairs import TokenPairs
from xformer.data.token_rows import TokenWriter, row_lengths
from xformer.distributed import Communicator, SingleProcess
from xformer.errors import DataError
from xformer.models import Transformer
from xformer.pipelines.seq2seq import Summarizer, Translator
from xformer.pipelines.tokenizers import Tokenizers
from xformer.text import ParallelCorpus, bleu, rouge
from xformer.text.extras import require
from xformer.text.metrics import make_bleu

# Metric of validation, by task.
METRICS = {"translation": "BLEU", "summarization": "ROUGE"}
PIPELINES = {pipeline.task: pipeline for pipeline in (Translator, Summarizer)}


@dataclass(frozen=True)
class EncodedCorpus:
    """Token ids of pairs of texts.

    Attributes:
        pairs: The token ids.
        text: The texts, if they were kept.
        num_blank: Pairs that were left out because one side is blank.
        num_long: Pairs that were left out because of their length.
        num_cut: Sources that were cut to the maximum length.
        num_target_words: Words of the targets, separated by white space.
    """

    pairs: TokenPairs
    text: ParallelCorpus
    num_blank: int
    num_long: int
    num_cut: int
    num_target_words: int

    @classmethod
    def encode(
        cls,
        chunks: Iterable[ParallelCorpus],
        tokenizers: Tokenizers,
        directory: Path,
        *,
        max_length: int,
        truncation: str = "error",
        keep_text: bool = True,
    ) -> EncodedCorpus:
        """Encode pairs of texts, chunk after chunk, into temporary files.

        Args:
            chunks: The pairs.
            tokenizers: Tokenizers of source and target.
            directory: Directory of the files.
            max_length: Largest number of tokens of a text.
            truncation: "error" refuses longer texts; "drop" omits their pairs; "cut" keeps the first `max_length`
                tokens of a source and refuses longer targets.
            keep_text: Keep the texts in memory.

        Raises:
            DataError: For texts that are too long, or if no pair remains.
        """
        counts: Counter[str] = Counter()
        kept: tuple[list[str], list[str]] = ([], [])
        with (
            TokenWriter(tokenizers.source.vocab_size, directory) as source_ids,
            TokenWriter(tokenizers.target.vocab_size, directory) as target_ids,
        ):
            for chunk in chunks:
                pairs = tokenizers.encode(chunk)
                source, target = list(pairs.source), list(pairs.target)
                if truncation == "cut":
                    counts["cut"] += sum(len(ids) > max_length for ids in source)
                    source = [tokenizers.cut_source(list(ids), max_length) for ids in source]
                fits = [max(len(s), len(t)) <= max_length for s, t in zip(source, target, strict=True)]
                if truncation != "drop" and not all(fits):
                    raise _too_long(chunk, (source, target), fits.index(False), max_length)
                counts.update(blank=chunk.num_dropped, long=fits.count(False), pairs=fits.count(True))
                source_ids.write(itertools.compress(source, fits))
                target_ids.write(itertools.compress(target, fits))
                targets = list(itertools.compress(chunk.target, fits))
                counts["words"] += sum(len(line.split()) for line in targets)
                if keep_text:
                    kept[0].extend(itertools.compress(chunk.source, fits))
                    kept[1].extend(targets)
            rows = source_ids.finish(), target_ids.finish()
        if not counts["pairs"]:
            raise DataError(f"all {counts['long']} lines have more than {max_length} tokens; raise max_length")
        return cls(
            TokenPairs(rows[0], rows[1], source_has_eos=tokenizers.source_has_eos),
            ParallelCorpus(*kept),
            num_blank=counts["blank"],
            num_long=counts["long"],
            num_cut=counts["cut"],
            num_target_words=counts["words"],
        )

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Number of source and target tokens, special tokens excluded."""
        return int(row_lengths(self.pairs.source).sum()), int(row_lengths(self.pairs.target).sum())


def _too_long(chunk: ParallelCorpus, sides: Any, row: int, max_length: int) -> DataError:
    side = int(len(sides[0][row]) <= max_length)
    number = chunk.line_numbers[row] if chunk.line_numbers else row + 1
    return DataError(
        f"line {number} of {chunk.names[side]} has {len(sides[side][row])} tokens; expected at most {max_length}; "
        "raise max_length, or omit longer texts with truncation 'drop'"
    )


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
        tokenizers: Tokenizers,
        task: str = "translation",
        measure: Callable[[list[str], list[str]], float] | None = None,
        on_batch: Callable[[], None] = lambda: None,
        communicator: Communicator | None = None,
        bleu_tokenize: str = "13a",
    ) -> None:
        self._ranks = communicator or SingleProcess()
        self.corpus, self.tokenizers, self.task = corpus, tokenizers, task
        if measure is None and task == "translation":
            lowercase = tokenizers.target.lowercase
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
