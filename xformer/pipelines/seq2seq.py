"""From texts to texts: what translation and summarization have in common."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.generation import Hypothesis, alignments, decode
from xformer.models import Transformer
from xformer.models.token_ids import pad
from xformer.pipelines.requests import GenerationRequest
from xformer.pipelines.tokenizers import Tokenizers
from xformer.pipelines.wishes import Wishes
from xformer.random import Rng
from xformer.runs.run_directory import RunDirectory
from xformer.text import normalize_text
from xformer.threads import blas_threads, num_threads, parallel_map
from xformer.training.data_parallel import shards_for


class Output(NamedTuple):
    """One output for one text.

    tokens, log_probability, score, finished: as in generation.Hypothesis; alignment: for each token the source token,
    counted from 0 and eos included, that it attends to most (generation.alignments), if that was asked for.
    """

    text: str
    tokens: list[int]
    log_probability: float
    score: float
    finished: bool
    alignment: list[int] | None = None


class Result(NamedTuple):
    """The outputs for one text, best first. row: its place among the texts."""

    row: int
    outputs: list[Output]


class TextToText:
    """A model with its tokenizers; `Translator` and `Summarizer` say what it was trained for.

    mean_length, tokens_per_word: of the outputs it was trained on, where that is known; they give a desired length
    where none is given, or one in words. cut_length: where it was trained on sources cut to so many tokens, longer ones
    are cut now, too.
    """

    task: ClassVar[str]

    def __init__(
        self,
        model: Transformer,
        tokenizers: Tokenizers,
        *,
        mean_length: float | None = None,
        tokens_per_word: float | None = None,
        cut_length: int | None = None,
    ) -> None:
        if not model.decoder:
            raise ConfigError("the model has no decoder (num_decoder_layers is 0); it cannot write text")
        self.model = model
        self.tokenizers = tokenizers
        self.mean_length, self.tokens_per_word, self.cut_length = mean_length, tokens_per_word, cut_length
        for side, tokenizer, size in (
            ("source", tokenizers.source, model.config.source_vocab_size),
            ("target", tokenizers.target, model.config.target_vocab_size),
        ):
            if tokenizer.vocab_size != size:
                raise CheckpointError(
                    f"the {side} tokenizer has {tokenizer.vocab_size} tokens, the model {size}; they are not of one run"
                )

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], *, xp: Any = "numpy", dtype: Any = None) -> Self:
        """Load the best model of a training run.

        Raises CheckpointError when something is missing, damaged, or does not belong to the run, ConfigError when the
        run is of another task.
        """
        run = RunDirectory(Path(directory))
        config = run.read_config_for(cls.task)
        model = Transformer.load(run.model, xp=xp, dtype=dtype)
        return cls(model, Tokenizers.load(run), **_habits(config))

    @property
    def usual_limit(self) -> int | None:
        """The most tokens of an output where no limit is given; None: twice the source plus 20."""
        return None

    def __call__(self, texts: Sequence[str], **settings: Any) -> list[Any]:
        """Write an output for each text, keeping their order; a blank text gets an empty one.

        settings: the fields of GenerationRequest and DecodingOptions, e.g. num_beams=5, length_penalty=0.6.
        Returns one text each; with num_return_sequences above 1, a list of texts each, best first.

        Raises DataError, before any work, when a text has more than max_source_length tokens; ConfigError for settings
        that are unknown or contradict each other.
        """
        request = GenerationRequest.of(**settings)
        results: list[Any] = [[""]] * len(texts)
        for batch in self.batches(texts, request):
            for row, outputs in batch:
                results[row] = [output.text for output in outputs]
        return results if request.decoding.num_return_sequences > 1 else [outputs[0] for outputs in results]

    def outputs(self, texts: Sequence[str], **settings: Any) -> list[list[Output]]:
        """The n best outputs for each text, with their scores; none for a blank text. Arguments as above."""
        results: list[list[Output]] = [[] for _ in texts]
        for batch in self.batches(texts, GenerationRequest.of(**settings)):
            for row, outputs in batch:
                results[row] = outputs
        return results

    def batches(self, texts: Sequence[str], request: GenerationRequest) -> Iterator[list[Result]]:
        """Yield results as batches of similar length get done, the shortest texts first, blank ones never.

        Raises what `__call__` raises.
        """
        encoded, _ = self.cut(self.encode(texts))
        check_source_lengths(encoded, request.max_source_length)
        return self.batches_of_ids(encoded, request)

    def batches_of_ids(
        self, encoded: Sequence[Sequence[int]], request: GenerationRequest, *, first_number: int = 0
    ) -> Iterator[list[Result]]:
        """Do the same as `batches` for sources that `encode` made token ids of, however long they are.

        first_number: how many texts came before these, when they are part of a longer list: what is drawn for a text
        depends on its number.
        """
        wishes = Wishes(self, request, len(encoded))

        config, separator = self.model.config, self.tokenizers.target.sep_id

        def write(rows: list[int]) -> list[Result]:
            source = pad([[*encoded[row], config.eos_id] for row in rows], config.pad_id)
            found = decode(
                self.model,
                source,
                wishes.decoding,
                rng=Rng(request.seed),
                sentence_numbers=[first_number + row for row in rows],
                never=() if separator is None else (separator,),
                **wishes.of(rows),
            )
            chosen = [self._texts(each) for each in found]
            if request.align:
                told = [wishes.told(row) for row in rows]
                chosen = [self._aligned(*each) for each in zip(source, chosen, told, strict=True)]
            return [Result(row, outputs) for row, outputs in zip(rows, chosen, strict=True)]

        allowed = num_threads()
        threads = shards_for(self.model, allowed)
        batches = _by_length(encoded, request.batch_tokens)
        while group := list(itertools.islice(batches, threads)):
            # The products of decoding are small: threads inside them cost more than they gain, above all on a busy
            # machine, where one of them waits for the other at every token.
            with blas_threads(allowed // threads):
                done = parallel_map(write, group)
            yield from done

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn source texts into token ids; a blank text, invisible characters included, has none.

        Raises DataError for one text in the place of a list.
        """
        if isinstance(texts, str):
            raise DataError("got one text; expected a list of texts: put it in brackets")
        encoded = self.tokenizers.encode_source(texts)
        return [ids if normalize_text(text) else [] for text, ids in zip(texts, encoded, strict=True)]

    def cut(self, encoded: list[list[int]]) -> tuple[list[list[int]], int]:
        """Sources as long as those of the training, if those were cut, and how many were longer."""
        if self.cut_length is None:
            return encoded, 0
        return [ids[: self.cut_length] for ids in encoded], sum(len(ids) > self.cut_length for ids in encoded)

    def _aligned(self, ids: list[int], outputs: list[Output], told: int | None) -> list[Output]:
        """The outputs for one source, with their alignments; told: the length that the model was told."""
        lengths = None if told is None else [told + 1] * len(outputs)
        weights = alignments(self.model, [ids] * len(outputs), [output.tokens for output in outputs], lengths=lengths)
        return [
            output._replace(alignment=each.argmax(axis=1).tolist())
            for output, each in zip(outputs, weights, strict=True)
        ]

    def _texts(self, hypotheses: Sequence[Hypothesis]) -> list[Output]:
        texts = self.tokenizers.target.decode_batch([hypothesis.tokens for hypothesis in hypotheses])
        return [Output(text, *hypothesis) for text, hypothesis in zip(texts, hypotheses, strict=True)]


def check_source_lengths(
    encoded: Sequence[Sequence[int]], max_source_length: int, *, name: str = "text", first_number: int = 1
) -> None:
    """Raise DataError for the first source that has more than max_source_length tokens.

    name, first_number: what the error calls a source, and the number that it gives the first one.
    """
    for number, ids in enumerate(encoded, start=first_number):
        if len(ids) > max_source_length:
            raise DataError(
                f"{name} {number} has {len(ids)} tokens; expected at most {max_source_length}; split it up, or raise "
                "max_source_length"
            )


def _habits(config: dict[str, Any]) -> dict[str, Any]:
    """What a run's configuration says about the texts it was trained on."""
    counts, settings = config.get("counts", {}), config.get("recipe", {}).get("training", {})
    pairs, tokens, words = (counts.get(name) for name in ("train_pairs", "train_target_tokens", "train_target_words"))
    known: dict[str, Any] = {}
    if settings.get("truncation") == "cut" and isinstance(settings.get("max_length"), int):
        known["cut_length"] = settings["max_length"]
    if isinstance(pairs, int) and isinstance(tokens, int) and pairs > 0:
        known["mean_length"] = tokens / pairs
        if isinstance(words, int) and words > 0:
            known["tokens_per_word"] = tokens / words
    return known


def _by_length(encoded: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Group rows of similar length, leaving out those without tokens."""
    batch: list[int] = []
    filled = (row for row, ids in enumerate(encoded) if ids)
    for row in sorted(filled, key=lambda row: (len(encoded[row]), row)):
        if batch and (len(encoded[row]) + 1) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


class Translator(TextToText):
    """Translates: `Translator.from_pretrained("run")(["Ein Mann schläft ."], num_beams=5)`."""

    task = "translation"


class Summarizer(TextToText):
    """Summarizes: `Summarizer.from_pretrained("run")([document], desired_length=10, length_unit="words")`.

    A document is split into sentences, which the model sees with separators between them.
    """

    task = "summarization"

    @property
    def usual_limit(self) -> int | None:
        """Four times as many tokens as summaries have on average, plus 20: twice a document would be no limit."""
        return None if self.mean_length is None else round(4 * self.mean_length) + 20
