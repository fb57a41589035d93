"""Translation and summarization: from texts to texts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from xformer.config import check_count, take_options, with_options
from xformer.data.token_rows import fill_batches
from xformer.errors import ConfigError, DataError
from xformer.families.run_directory import RunDirectory
from xformer.generation import GenerationConfig, alignments
from xformer.generation.batch import GenerationBatch
from xformer.generation.engine import Task, run_task
from xformer.generation.generate import search
from xformer.generation.pretrained import read_generation
from xformer.models import Transformer
from xformer.models.token_ids import pad
from xformer.pipelines.base import GenerationPipeline, check_class, check_vocabulary, one_per_text
from xformer.pipelines.options import SourceArguments
from xformer.pipelines.output_text import GeneratedText, Output, Outputs, hooks, stop_strings
from xformer.pipelines.tokenizers import Tokenizers
from xformer.random import Rng
from xformer.text import normalize_text
from xformer.text.normalize import check_texts
from xformer.tokenizers import BaseTokenizer

NUM_BEAMS_FOR_LENGTHS, DEFAULT_MAX_SOURCE_LENGTH = 4, 1024


class Result(NamedTuple):
    """The outputs for one text, best first, and its index among the texts."""

    text_index: int
    outputs: list[Output]


class TextToText(GenerationPipeline):
    """An encoder-decoder with its tokenizers: base class of `Translator` and `Summarizer`.

    Args:
        model: The model.
        tokenizers: Tokenizers of source and target.
        mean_length: Mean length of the outputs in training, in tokens. It is the default length of a model with a
            length encoding.
        tokens_per_word: Mean tokens per word of the outputs in training; a model with a length encoding needs it for
            target lengths in words.
        max_source_tokens: Length that sources were cut to in training; longer ones are cut, too. Default: none is cut.
        defaults: Default settings of generation, which a call may replace.

    Raises:
        ConfigError: For a model without a decoder, or arguments of other classes.
        CheckpointError: If the vocabulary sizes of model and tokenizers differ.
    """

    model_classes = (Transformer,)
    has_source = True
    attention_kinds = ("encoder", "decoder", "cross")

    def __init__(
        self,
        model: Transformer,
        tokenizers: Tokenizers,
        *,
        mean_length: float | None = None,
        tokens_per_word: float | None = None,
        max_source_tokens: int | None = None,
        defaults: GenerationConfig | None = None,
    ) -> None:
        check_class("model", model, *self.model_classes)
        check_class("tokenizers", tokenizers, Tokenizers)
        if not model.decoder:
            raise ConfigError("the model has no decoder (num_decoder_layers is 0); it cannot generate text")
        self.model = model
        self.tokenizers = tokenizers
        self.mean_length, self.tokens_per_word, self.max_source_tokens = mean_length, tokens_per_word, max_source_tokens
        self.defaults = defaults
        check_vocabulary("source tokenizer", tokenizers.source, model.config.source_vocab_size)
        check_vocabulary("target tokenizer", tokenizers.target, model.config.target_vocab_size)
        # Tokens at the end of sources. Those of public checkpoints are part of the encoded text.
        self.suffix: list[int] = [] if tokenizers.source_has_eos else [model.config.eos_id]

    @classmethod
    def _from_run(cls, model: Transformer, run: RunDirectory, config: dict[str, Any]) -> Self:
        counts, settings = config.get("counts", {}), config.get("recipe", {}).get("training", {})
        pairs, tokens, words = (counts.get(f"train_{name}") for name in ("pairs", "target_tokens", "target_words"))
        return cls(
            model,
            Tokenizers.load(run),
            mean_length=tokens / pairs if pairs and tokens else None,
            tokens_per_word=tokens / words if words and tokens else None,
            max_source_tokens=settings.get("max_length") if settings.get("truncation") == "cut" else None,
        )

    @classmethod
    def _from_checkpoint(
        cls, model: Transformer, directory: Path, source_language: str | None = None, target_language: str | None = None
    ) -> Self:
        learned = model.config.positions == "learned"
        return cls(
            model,
            Tokenizers.from_pretrained(directory, cls.task, source_language, target_language),
            max_source_tokens=model.config.max_positions if learned else None,
            defaults=read_generation(directory, encoder_decoder=True).config(model.config),
        )

    @property
    def source_tokenizer(self) -> BaseTokenizer:
        """Tokenizer of sources."""
        return self.tokenizers.source

    @property
    def target_tokenizer(self) -> BaseTokenizer:
        """Tokenizer of outputs."""
        return self.tokenizers.target

    @property
    def default_max_length(self) -> int | None:
        """Default maximum length of an output, in tokens; None: twice the source plus 20."""
        return None

    @with_options(SourceArguments)
    def outputs(self, texts: Sequence[str], config: GenerationConfig | None = None, **options: Any) -> Outputs:
        """Generate outputs with their scores; none for a blank text.

        Args:
            texts: Source texts.
            config: Settings. Default: greedy search.
            **options: Arguments of `batches_of_ids`, and fields of `GenerationConfig`.

        Raises:
            DataError: If a text has more than max_source_length tokens, before any output is generated.
            ConfigError: For invalid or contradictory settings.
        """
        encoded, _ = self.truncate(self.token_ids(texts))
        options = {"max_source_length": DEFAULT_MAX_SOURCE_LENGTH, **options}
        found = dict(itertools.chain.from_iterable(self.batches_of_ids(encoded, config, **options)))
        return [found.get(row, []) for row in range(len(encoded))]

    def batches_of_ids(
        self,
        encoded: Sequence[Sequence[int]],
        config: GenerationConfig | None = None,
        *,
        batch_tokens: int = 4096,
        part: tuple[int, int] = (0, 1),
        **options: Any,
    ) -> Iterator[list[Result]]:
        """Yield results batch by batch, shortest sources first, for ids that `encode` returned; none for blank texts.

        Args:
            encoded: Token ids of each source, without eos.
            config: Settings. Default: greedy search.
            batch_tokens: Maximum source tokens of a batch, padding included. On NumPy each core runs one batch.
            part: (k, n) runs the batches k, k + n, k + 2n, ..., and leaves the others to other processes.
            **options: Arguments of `tasks`, and fields of `GenerationConfig`.

        Raises:
            ConfigError: For invalid or contradictory settings.
            DataError: For a wrong number of prefixes, phrases or lengths, and for unknown characters.
        """
        check_count("batch_tokens", batch_tokens)
        task_of = self.tasks(encoded, config, **options)
        rows = sorted((row for row, ids in enumerate(encoded) if len(ids)), key=lambda row: (len(encoded[row]), row))
        batches = fill_batches(rows, [len(ids) + 1 for ids in encoded], batch_tokens)
        return self._run_batches(lambda rows: run_task(task_of(rows)), batches[part[0] :: part[1]])

    def search_task(
        self, encoded: Sequence[Sequence[int]], config: GenerationConfig | None = None, **options: Any
    ) -> Task[Outputs]:
        """Return the task of one batch, which an engine may run with others; its result is that of `outputs`.

        Arguments are those of `tasks`.
        """
        rows = [row for row, ids in enumerate(encoded) if len(ids)]
        task = self.tasks(encoded, config, **options)(rows)

        def run() -> Task[Outputs]:
            found = dict((yield from task)) if rows else {}
            return [found.get(row, []) for row in range(len(encoded))]

        return run()

    @with_options(SourceArguments)
    def tasks(
        self, encoded: Sequence[Sequence[int]], config: GenerationConfig | None = None, *, seed: int = 0, **options: Any
    ) -> Callable[[list[int]], Task[list[Result]]]:
        """Return a function that makes the task of some rows of `encoded`; its result has one entry per row.

        Args:
            encoded: Token ids of each source, without eos.
            config: Settings. Default: greedy search.
            seed: Seed of sampling. The same seed gives the same outputs, however texts are batched.
            **options: Fields of `SourceArguments`, and fields of `GenerationConfig` that replace those of the config.

        Raises:
            ConfigError: For invalid or contradictory settings.
            DataError: For a wrong number of prefixes, phrases or lengths, and for unknown characters.
        """
        given = SourceArguments(**take_options(SourceArguments, options))
        if given.max_source_length is not None:
            check_source_lengths(encoded, given.max_source_length)
        config = self.resolve_config(config, target_length=given.target_length, **options)
        config = self._with_lengths(config, given.target_length, given.length_unit)
        strings = stop_strings(given.stop)
        count, target, rng = len(encoded), self.tokenizers.target, Rng(seed)
        config = dataclasses.replace(config, suppress_tokens=(*config.suppress_tokens, *target.suppressed_ids))
        lengths = _target_lengths(given.target_length, given.length_unit, count)
        conditions = self._length_conditions(lengths, given.length_unit, count)
        columns: dict[str, Any] = {
            "prefix": self._prefixes(given.prefix, count),
            "sequence_bias": self._phrases(given.sequence_bias, count),
            "target_lengths": lengths,
            "length_condition": conditions,
        }
        length_fn = _word_counter(target) if lengths is not None and given.length_unit == "words" else None

        def task(rows: list[int]) -> Task[list[Result]]:
            source = pad([[*encoded[row], *self.suffix] for row in rows], self.model.config.pad_id)
            options: Any = {name: [column[row] for row in rows] for name, column in columns.items() if column}
            texts = [GeneratedText(target, row, given.first_index + row, strings, given.on_text) for row in rows]
            batch = GenerationBatch(
                self.model, source, config, rng=rng, length_fn=length_fn, **hooks(texts, config, given), **options
            )
            for text, hypotheses in zip(texts, (yield from search(batch)), strict=True):
                text.extend(hypotheses, config)
            outputs = [text.outputs for text in texts]
            if given.align:
                row_conditions = [None] * len(rows) if conditions is None else [conditions[row] for row in rows]
                outputs = [self._align(*each) for each in zip(source, outputs, row_conditions, strict=True)]
            return [Result(row, each) for row, each in zip(rows, outputs, strict=True)]

        return task

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of source texts; none for a blank text (invisible characters are blank).

        Raises:
            DataError: For a single text, or an iterator, instead of a list.
        """
        check_texts(texts)
        encoded = self.tokenizers.encode_source(texts)
        return [ids if normalize_text(text) else [] for text, ids in zip(texts, encoded, strict=True)]

    def input_ids(self, text: str) -> list[int]:
        """Return the token ids of a source as the encoder receives them, eos included; none for a blank text."""
        (ids,), _ = self.truncate(self.token_ids([text]))
        return [*ids, *self.suffix] if ids else []

    def truncate(self, encoded: list[list[int]]) -> tuple[list[list[int]], int]:
        """Cut sources to the maximum length in training, if there was one; return them and how many were longer."""
        limit = self.max_source_tokens
        if limit is None:
            return encoded, 0
        return [self.tokenizers.cut_source(ids, limit) for ids in encoded], sum(len(ids) > limit for ids in encoded)

    def resolve_config(
        self, config: GenerationConfig | None = None, *, target_length: Any = None, **overrides: Any
    ) -> GenerationConfig:
        """Return the settings of a call of `outputs`; a target_length replaces the length limits of the defaults.

        Raises:
            ConfigError: For invalid or contradictory settings.
        """
        if config is None and (config := self.defaults) is not None and target_length is not None:
            no_limits = {"min_new_tokens": 0, "max_new_tokens": None, "min_length_ratio": 0.0, "max_length_ratio": None}
            config = GenerationConfig(**{**config.to_dict(), **no_limits})
        return GenerationConfig.resolve(config, overrides)

    def _with_lengths(self, config: GenerationConfig, target_length: Any, length_unit: str) -> GenerationConfig:
        if target_length is not None:
            if config.method == "greedy":
                # Greedy search meets a length by chance; a beam search has hypotheses of many lengths to choose from.
                return dataclasses.replace(config, num_beams=NUM_BEAMS_FOR_LENGTHS)
            return config
        for name, value, default in (
            ("length_unit", length_unit, "tokens"),
            ("length_tolerance", config.length_tolerance, GenerationConfig().length_tolerance),
        ):
            if value != default:
                raise ConfigError(f"{name} is {value!r} without a target_length; set target_length or omit {name}")
        limit = self.default_max_length
        if limit is not None and config.max_new_tokens is None and config.max_length_ratio is None:
            return dataclasses.replace(config, max_new_tokens=max(limit, config.min_new_tokens))
        return config

    def _length_conditions(self, lengths: list[int] | None, length_unit: str, count: int) -> list[int] | None:
        """Return the lengths for a length encoding, in tokens: the target lengths, or the mean in training."""
        if not self.model.config.length_encoding:
            return None
        if lengths is None:
            if self.mean_length is None:
                raise ConfigError("this model has a length encoding; expected a target_length")
            return [max(1, round(self.mean_length))] * count
        if length_unit == "tokens":
            return lengths
        tokens_per_word = self.tokens_per_word
        if tokens_per_word is None:
            raise ConfigError("tokens_per_word of this model is unknown; expected target_length in tokens")
        return [max(1, round(length * tokens_per_word)) for length in lengths]

    def _align(self, source: list[int], outputs: list[Output], condition: int | None) -> list[Output]:
        """Return the outputs for one source with their alignments."""
        lengths = None if condition is None else [condition + 1] * len(outputs)
        tokens = [output.tokens for output in outputs]
        weights = alignments(self.model, [source] * len(outputs), tokens, lengths=lengths)
        found = [each.argmax(axis=1).tolist() for each in weights]
        return [output._replace(alignment=each) for output, each in zip(outputs, found, strict=True)]

    def _prefixes(self, prefix: Any, count: int) -> list[list[int]] | None:
        """Return the token ids that outputs begin with: the forced bos, and the text of the caller."""
        if prefix is None:
            forced = self.tokenizers.forced_bos_id
            return None if forced is None else [[forced]] * count
        texts = one_per_text("prefix", [prefix] * count if isinstance(prefix, str) else prefix, count)
        if texts and all(isinstance(each, Sequence) and not isinstance(each, str) for each in texts):
            return texts  # token ids, which the search checks
        encoded = self.tokenizers.encode_target(texts)
        for text, ids in zip(texts, encoded, strict=True):
            if self.tokenizers.target.unk_id in ids:
                raise DataError(f"prefix {text!r} has characters that the tokenizer does not know")
        return encoded


def check_source_lengths(
    encoded: Iterable[Sequence[int]], max_source_length: int, *, name: str = "text", first_number: int = 1
) -> None:
    """Raise DataError for the first source with more than max_source_length tokens; its number starts at the first."""
    for number, ids in enumerate(encoded, start=first_number):
        if len(ids) > max_source_length:
            received = f"{name} {number} has {len(ids)} tokens; expected at most {max_source_length}"
            raise DataError(f"{received}; split it, or raise max_source_length")


class Translator(TextToText):
    """Translate texts: `Translator.from_pretrained("run")(["Ein Mann schläft ."], num_beams=5)`."""

    task = "translation"


class Summarizer(TextToText):
    """Summarize texts: `Summarizer.from_pretrained("run")([document], target_length=10, length_unit="words")`.

    A document is split into sentences, which are separated by `<sep>` in the model's input.
    """

    task = "summarization"

    @property
    def default_max_length(self) -> int | None:
        """Four times the mean length in training, plus 20: twice a document would be no limit."""
        return None if self.mean_length is None else round(4 * self.mean_length) + 20


def _target_lengths(target_length: Any, unit: str, count: int) -> list[int] | None:
    """Return one length per text, or None."""
    if target_length is None:
        return None
    lengths = target_length if isinstance(target_length, list | tuple) else [target_length] * count
    for length in lengths:
        check_count(f"target_length in {unit}", length)
    return [int(length) for length in one_per_text("target_length", lengths, count)]


def _word_counter(tokenizer: Any) -> Callable[[Sequence[int]], int]:
    """Return a function that counts the words of token ids; it is cached, since a search repeats the same calls."""
    count = functools.lru_cache(maxsize=65536)(lambda tokens: len(tokenizer.decode(tokens).split()))
    return lambda tokens: count(tuple(tokens))
