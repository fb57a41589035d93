"""Training on pairs of texts: translation and summarization, validated by the score of generated text."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from xformer.backends import Array
from xformer.data.pairs import Batch, TokenPairs, epochs, plan_batches
from xformer.data.token_rows import TokenWriter
from xformer.distributed import Communicator, SingleProcess
from xformer.errors import ConfigError, DataError
from xformer.families.run_directory import RunDirectory
from xformer.models import Transformer, TransformerConfig
from xformer.pipelines import Attention, Tokenizers, show_attention
from xformer.pipelines.base import check_vocabulary
from xformer.pipelines.seq2seq import Summarizer, Translator
from xformer.random import Rng
from xformer.runs.console import plural
from xformer.runs.inputs import Files, paths_of
from xformer.runs.recipe import TASKS, Recipe, error_context
from xformer.runs.tasks import MAX_SHOWN, Task, held_out, load_initial_model, tokenizer_files
from xformer.text import ParallelCorpus, bleu, rouge
from xformer.text.corpus import ParallelFiles
from xformer.text.extras import require
from xformer.text.metrics import bleu_tokenizer, make_bleu
from xformer.training.interrupt import check_stop
from xformer.training.loggers import Rows
from xformer.training.loss import translation_loss

_PIPELINES = {pipeline.task: pipeline for pipeline in (Translator, Summarizer)}
_NUM_SAMPLES = 5  # for loggers
_COUNTS = ("pairs", "pairs_dropped_blank", "pairs_dropped_long", "sources_cut")
_SIZES = ("source_tokens", "target_tokens", "target_words")  # of the training set


@dataclass(eq=False)
class PairsTask(Task):
    """Training on `TokenPairs`, in batches of a number of tokens.

    Attributes:
        valid_text: The `ParallelCorpus` of the validation set; without it, only the loss is measured.
        outputs: Outputs of the latest validation.

    Raises:
        ConfigError: If the model has no padding, or sacreBLEU no such tokenizer.
        BackendError: If a package that the metric needs is not installed.
    """

    names = ("translation", "summarization")
    unit = "target tokens"

    valid_text: Any = None
    outputs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.model.config
        if config.label_padding_id is None:
            raise ConfigError(f"pad_id is {config.pad_id}; training on pairs expects an id other than eos_id")
        self._options = {"pad_id": config.label_padding_id, "bos_id": config.bos_id, "eos_id": config.eos_id}
        self._options |= self._array_options
        if self.xp.builds_per_shape:
            limit = config.max_positions if config.positions == "learned" else None
            self._options |= {"bucketed": True, "max_positions": limit}
        if self.metric == "BLEU":
            make_bleu(**self._bleu_options)
        elif self.metric:
            require("rouge_score")

    @classmethod
    def prepare(cls, recipe: Recipe, xp: Any, files: Files, directory: Path, run: RunDirectory | None = None) -> Self:
        """Read the files and make the task; see `Task.prepare`."""
        paths = {name: paths_of(files, name) for name in ("source", "target", "valid_source", "valid_target")}
        train = ParallelFiles(paths["source"], paths["target"])
        valid = ParallelFiles(paths["valid_source"], paths["valid_target"])
        # Both are read here for the errors of the files, before a vocabulary is learned.
        num_valid, count = (sum(map(len, corpus)) for corpus in (valid, train))
        if not num_valid:
            train, valid = train.split(held_out(recipe.training, count, "sentence pair"))
        tokenizers = _initial_tokenizers(recipe, run)
        with error_context("[tokenizer]"):
            tokenizers = tokenizers or Tokenizers.train(train, **recipe.tokenizer.to_dict())
        settings = recipe.training
        options: dict[str, Any] = {"max_length": settings.max_length, "truncation": settings.truncation}
        encoded = EncodedCorpus.encode(train, tokenizers, directory, keep_text=False, **options)
        encoded_valid = EncodedCorpus.encode(valid, tokenizers, directory, **options)
        if recipe.init.path is None:
            model = build_model(recipe, tokenizers, xp)
        else:
            model = load_initial_model(recipe, Transformer, xp)
            check_vocabulary("source tokenizer", tokenizers.source, model.config.source_vocab_size)
            check_vocabulary("target tokenizer", tokenizers.target, model.config.target_vocab_size)
        tokenize = settings.bleu_tokenize
        if recipe.task == "translation":
            suffix = [*paths["valid_target"], *paths["target"]][0].suffix[1:]
            tokenize = tokenize or bleu_tokenizer(recipe.init.target_language or suffix)
        elif tokenize is not None:
            raise ConfigError(f"bleu_tokenize is {tokenize!r}, but {recipe.task} is not scored by BLEU; leave it out")
        recipe = recipe.with_training(bleu_tokenize=tokenize)
        recipe = recipe.for_data(len(plan_batches(encoded.pairs, settings.batch_tokens, rng=None)))
        counts = {f"train_{name}": encoded.counts[name] for name in (*_COUNTS[:1], *_SIZES, *_COUNTS[1:])}
        if not num_valid:  # they are counted above
            del encoded_valid.counts["pairs_dropped_blank"]
        counts |= {f"valid_{name}": encoded_valid.counts[name] for name in _COUNTS}
        sets = encoded.pairs, encoded_valid.pairs
        return cls(recipe, model, *sets, tokenizers, counts, not num_valid, valid_text=encoded_valid.text)

    @property
    def metric(self) -> str | None:
        """Name of the score, or None if only the loss is measured."""
        return None if self.valid_text is None else TASKS[self.recipe.task].metric

    def loss(self, model: Transformer, batch: Batch, rng: Rng | None, **options: Any) -> Array:
        """Return the sum of the losses of all labels, see `translation_loss`."""
        return translation_loss(model, batch, rng, r_drop=self.recipe.training.r_drop, **options)

    def batches(self, rng: Rng, *, skip: int) -> Iterator[tuple[int, Batch]]:
        """Yield (epoch, batch) without end."""
        for epoch, rows in epochs(self.train, self.recipe.training.batch_tokens, rng, skip=skip):
            yield epoch, Batch.make(self.train, rows, **self._options)

    def validation_batches(self) -> list[Batch]:
        """Return the validation set, sorted by length."""
        plan = plan_batches(self.valid, self.recipe.training.batch_tokens, rng=None)
        return [Batch.make(self.valid, rows, **self._options) for rows in plan]

    def score(self, model: Transformer, communicator: Communicator | None = None, *, is_trial: bool = False) -> float:
        """Return the score of outputs for the validation set, which the ranks generate in turns.

        Outputs are decoded greedily; a model with a length encoding generates outputs of the lengths of the references,
        by the small beam search that this needs.
        """
        ranks = communicator or SingleProcess()
        pipeline = _PIPELINES[self.recipe.task](model, self.tokenizer)
        lengths = [max(1, len(ids)) for ids in self.valid.target] if model.config.length_encoding else None
        options: dict[str, Any] = {"target_length": lengths, "part": (ranks.rank, ranks.size)}
        if is_trial and lengths is None:  # outputs as long as the references
            options["max_length_ratio"] = sum(map(len, self.valid.target)) / sum(map(len, self.valid.source))
        texts: list[tuple[int, str]] = []
        for batch in pipeline.batches_of_ids(self.valid.source, **options):
            texts += [(index, outputs[0].text) for index, outputs in batch]
            check_stop()
        self.outputs = [text for _, text in sorted(itertools.chain.from_iterable(ranks.all_gather(texts)))]
        return self._measure(self.outputs, self.valid_text.target)

    def _measure(self, outputs: list[str], references: list[str]) -> float:
        """Return BLEU, without case if the tokenizer lowercases, or the mean of ROUGE-1, 2 and L; larger is better."""
        if self.metric == "BLEU":
            return bleu(outputs, references, **self._bleu_options).value
        scores = rouge(outputs, references)
        return sum(score.value for score in scores) / len(scores)

    @property
    def _bleu_options(self) -> dict[str, Any]:
        tokenize = self.recipe.training.bleu_tokenize or "13a"
        return {"lowercase": self.tokenizer.target.lowercase, "tokenize": tokenize}

    def tokenizers(self) -> Mapping[str, Any]:
        """Return the tokenizers by their names in a run directory."""
        return self.tokenizer.by_side()

    def samples(self, model: Transformer) -> Rows:
        """Return the first outputs of the last validation."""
        rows = zip(self.valid_text.source, self.outputs[:_NUM_SAMPLES], self.valid_text.target, strict=False)
        return [{"source": source, "output": output, "reference": target} for source, output, target in rows]

    def attention(self, model: Transformer) -> Attention:
        """Return the attention of the model for the first short validation pair."""
        pipeline, row = _PIPELINES[self.recipe.task](model, self.tokenizer), self._first_short_pair
        return show_attention(pipeline, [*self.valid.source[row], *pipeline.suffix], self.valid.target[row])

    def example(self) -> str:
        """Return the first short source of the validation data."""
        return self.valid_text.source[self._first_short_pair]

    @property
    def _first_short_pair(self) -> int:
        lengths = [max(map(len, pair)) for pair in zip(self.valid.source, self.valid.target, strict=True)]
        return next((row for row, length in enumerate(lengths) if length <= MAX_SHOWN), lengths.index(min(lengths)))

    def describe_data(self) -> Iterator[str]:
        """Yield lines that describe the data."""
        for name, key in (("training", "train"), ("validation", "valid")):
            pairs, blank, long, cut = (self.counts[f"{key}_{count}"] for count in _COUNTS)
            reasons = [f"{blank:,} with a blank side"] if blank else []
            reasons += [f"{long:,} too long"] if long else []
            notes = [f"dropped: {', '.join(reasons)}"] if reasons else []
            notes += [f"truncated: {plural(cut, 'source')}"] if cut else []
            note = f" ({'; '.join(notes)})" if notes else ""
            yield f"{name}: {plural(pairs, TASKS[self.recipe.task].unit)}{note}"
        if (tokenize := self.recipe.training.bleu_tokenize) not in (None, "13a"):
            yield f"validation by BLEU with the tokenizer {tokenize} of sacreBLEU"


class EncodedCorpus(NamedTuple):
    """Token ids of pairs of texts.

    Attributes:
        pairs: The token ids.
        text: The texts, if they were kept.
        counts: Numbers of pairs, of tokens without special ones, of words of the targets, of pairs that were dropped
            because one side is blank or too long, and of sources that were cut.
    """

    pairs: TokenPairs
    text: ParallelCorpus
    counts: Counter[str]

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
        text = ParallelCorpus([], [])
        with (
            TokenWriter(tokenizers.source.vocab_size, directory) as source_ids,
            TokenWriter(tokenizers.target.vocab_size, directory) as target_ids,
        ):
            for chunk in chunks:
                pairs = tokenizers.encode(chunk)
                source, target = list(pairs.source), list(pairs.target)
                if truncation == "cut":
                    counts["sources_cut"] += sum(len(ids) > max_length for ids in source)
                    source = [tokenizers.cut_source(list(ids), max_length) for ids in source]
                fits = [max(len(s), len(t)) <= max_length for s, t in zip(source, target, strict=True)]
                if truncation != "drop" and not all(fits):
                    raise _too_long(chunk, (source, target), fits.index(False), max_length)
                counts["pairs"] += fits.count(True)
                counts["pairs_dropped_blank"] += chunk.num_dropped
                counts["pairs_dropped_long"] += fits.count(False)
                for name, writer, rows in (("source", source_ids, source), ("target", target_ids, target)):
                    kept = list(itertools.compress(rows, fits))
                    counts[f"{name}_tokens"] += sum(map(len, kept))
                    writer.write(kept)
                targets = list(itertools.compress(chunk.target, fits))
                counts["target_words"] += sum(len(line.split()) for line in targets)
                if keep_text:
                    text.source.extend(itertools.compress(chunk.source, fits))
                    text.target.extend(targets)
            ids = source_ids.finish(), target_ids.finish()
        if not counts["pairs"]:
            long = counts["pairs_dropped_long"]
            raise DataError(f"all {long} lines have more than {max_length} tokens; raise max_length")
        return cls(TokenPairs(*ids, source_has_eos=tokenizers.source_has_eos), text, counts)


def _too_long(chunk: ParallelCorpus, sides: Any, row: int, max_length: int) -> DataError:
    side = int(len(sides[0][row]) <= max_length)
    number = chunk.line_numbers[row] if chunk.line_numbers else row + 1
    return DataError(
        f"line {number} of {chunk.names[side]} has {len(sides[side][row])} tokens; expected at most {max_length}; "
        "raise max_length, or omit longer texts with truncation 'drop'"
    )


def build_model(recipe: Any, tokenizers: Any, xp: Any) -> Transformer:
    """Return a new encoder-decoder for training.

    Args:
        recipe: Recipe with the model's configuration, seed and dtype.
        tokenizers: `Tokenizers` that determine the vocabularies.
        xp: Array library.
    """
    config = TransformerConfig(
        source_vocab_size=tokenizers.source.vocab_size,
        target_vocab_size=tokenizers.target.vocab_size,
        share_embeddings=tokenizers.source is tokenizers.target,
        **recipe.model,
    )
    return Transformer(config, xp=xp, seed=recipe.training.seed, dtype=recipe.training.dtype)


def _initial_tokenizers(recipe: Recipe, run: RunDirectory | None) -> Tokenizers | None:
    """Return the tokenizers of a run to be resumed, or of the model to start from; None for those to be trained."""
    init, (run, pretrained) = recipe.init, tokenizer_files(recipe, run)
    if pretrained is not None:
        return Tokenizers.from_pretrained(pretrained, recipe.task, init.source_language, init.target_language)
    for name in ("source_language", "target_language"):
        if getattr(init, name) is not None:
            raise ConfigError(f"{name} applies to public checkpoints; omit it for a run of xformer")
    return None if run is None else Tokenizers.load(run)
