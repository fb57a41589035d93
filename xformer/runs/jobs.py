"""Training jobs: the model of a run, and its texts as token ids."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import xformer
from xformer.backends import backend_name
from xformer.data.token_rows import TokenWriter
from xformer.distributed import Communicator
from xformer.errors import ConfigError
from xformer.families.run_directory import RunDirectory
from xformer.layers import lora
from xformer.models import BaseModel, LanguageModel, LanguageModelConfig, Transformer
from xformer.pipelines import Attention, TextGenerator, Tokenizers, show_attention
from xformer.pipelines.base import check_vocabulary
from xformer.runs.console import plural
from xformer.runs.evaluation import PIPELINES, EncodedCorpus, ValidationScore
from xformer.runs.initial_model import InitialModel
from xformer.runs.inputs import paths_of
from xformer.runs.recipe import Recipe, check_training, error_context
from xformer.runs.tasks import TASKS, LanguageModelTask, Task, TranslationTask, build_model
from xformer.text.corpus import ParallelFiles, TextPart
from xformer.text.metrics import bleu_tokenizer
from xformer.tokenizers import BaseTokenizer, Tokenizer, load_tokenizer
from xformer.training.data_parallel import default_num_workers
from xformer.training.interrupt import check_stop
from xformer.training.loggers import Rows

_NUM_SAMPLES, MAX_SHOWN = 5, 30  # for loggers: outputs, and tokens of a plot of attention
_PROMPT_LENGTH, NUM_SAMPLED = 32, 100  # tokens, for loggers
_EXAMPLE_WORDS = 4


@dataclass(frozen=True)
class TrainingJob(ABC):
    """Model and data of a training run, checked before anything is written.

    Attributes:
        tasks: Tasks that the job trains, the default first.
        unit: Unit of the training speed.
        recipe: The recipe, which includes the number of shards.
        model: The model to train.
        xp: Array namespace of the model.
        tokenizer: The tokenizer, or `Tokenizers` of pairs.
        train: Data to train on: `EncodedCorpus` of pairs, token ids of a text, or conversations as `Documents`.
        valid: Data for validation.
        counts: Sizes of the data.
    """

    tasks: ClassVar[tuple[str, ...]]
    unit: ClassVar[str]

    recipe: Recipe
    model: Any
    xp: Any
    tokenizer: Any
    train: Any
    valid: Any
    counts: dict[str, int]

    @classmethod
    @abstractmethod
    def prepare(
        cls, recipe: Recipe, xp: Any, files: Mapping[str, Path], directory: Path, run: RunDirectory | None = None
    ) -> TrainingJob:
        """Read the files and make the job.

        Args:
            recipe: The recipe.
            xp: Array namespace of the model.
            files: Text files by name.
            directory: Directory of temporary files.
            run: The run to be resumed, if any, with its tokenizers.

        Raises:
            DataError: If the text does not fit the recipe.
            ConfigError: If the vocabulary does not.
        """

    @abstractmethod
    def task(self, communicator: Communicator | None = None) -> Task:
        """Return the task for a Trainer."""

    def tokenizers(self) -> Mapping[str, Any]:
        """Return the tokenizers by their names in a run directory."""
        return {"joint": self.tokenizer}

    @abstractmethod
    def samples(self, model: Any, task: Task) -> Rows:
        """Return outputs of the model for validation text, for loggers."""

    @abstractmethod
    def attention(self, model: Any) -> Attention:
        """Return the attention of the model for one validation text, for loggers."""

    def figures(self, model: Any) -> dict[str, Any]:
        """Return a plot of the attention of each layer, for loggers."""
        attention = self.attention(model)
        kind, first = next(iter(attention.maps.items()))
        return {f"attention/layer {n}": attention.plot(kind, layer=n) for n in range(len(first.weights))}

    @abstractmethod
    def example(self) -> str:
        """Return a short text of the validation data to try the model with; empty without one."""

    @abstractmethod
    def describe_data(self) -> Iterator[str]:
        """Yield lines that describe the data."""

    def config(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration to be stored in the run directory; `data` describes the origin of the data."""
        return {
            "task": self.recipe.task,
            "xformer": xformer.__version__,
            "backend": backend_name(self.xp),
            "seed": self.recipe.training.seed,
            "recipe": self.recipe.to_dict(),
            "init": {} if self.recipe.init.path is None else InitialModel(Path(self.recipe.init.path)).digests(),
            "model": self.model.config.to_dict(),
            "num_parameters": self.model.parameter_count(),
            "data": data,
            "counts": self.counts,
            "example": self.example(),
        }

    def describe(self) -> Iterator[str]:
        """Yield lines about data and model."""
        yield from self.describe_data()
        settings = self.recipe.training
        if self.recipe.init.path is not None:
            yield f"start: the parameters and the tokenizer of {self.recipe.init.path}"
            peak = "" if settings.learning_rate is None else f" at most {settings.learning_rate:g},"
            yield f"learning rate:{peak} {plural(settings.warmup_steps, 'step')} of warm-up"
        sizes = [f"{tokenizer.vocab_size:,}" for tokenizer in self.tokenizers().values()]
        vocabulary = f"{'vocabulary' if len(sizes) == 1 else 'vocabularies'} of {' and '.join(sizes)} tokens"
        mixed = settings.precision != "float32"
        precision = f"{settings.precision} mixed precision" if mixed else settings.dtype
        count = plural(self.model.parameter_count(), "parameter")
        if self.recipe.init.lora is not None:
            trained = sum(math.prod(array.shape) for _, array in self.model.named_trainable_parameters())
            count += f", {trained:,} of them trained"
        yield (
            f"model: {count}, {vocabulary}; "
            f"{backend_name(self.xp)}, {precision}, {plural(settings.data_parallel, 'shard')}, seed {settings.seed}"
        )


class PairsJob(TrainingJob):
    """Training on pairs of texts."""

    tasks = ("translation", "summarization")
    unit = "target tokens"

    @classmethod
    def prepare(
        cls, recipe: Recipe, xp: Any, files: Mapping[str, Path], directory: Path, run: RunDirectory | None = None
    ) -> PairsJob:
        """Read the files and make the job; see `TrainingJob.prepare`."""
        paths = {name: paths_of(files, name) for name in ("source", "target", "valid_source", "valid_target")}
        train = ParallelFiles(paths["source"], paths["target"])
        valid = ParallelFiles(paths["valid_source"], paths["valid_target"])
        for corpus in (valid, train):
            for _ in corpus:  # all errors of the files, before a vocabulary is learned
                pass
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
            suffix = paths["valid_target"][0].suffix[1:]
            tokenize = tokenize or bleu_tokenizer(recipe.init.target_language or suffix)
        elif tokenize is not None:
            raise ConfigError(f"bleu_tokenize is {tokenize!r}, but {recipe.task} is not scored by BLEU; leave it out")
        recipe = with_shards(recipe, model).with_training(bleu_tokenize=tokenize)
        job = cls(recipe, model, xp, tokenizers, encoded, encoded_valid, _count_pairs(encoded, encoded_valid))
        job.task()  # raises an error if the package that computes the score is missing
        return job

    def task(self, communicator: Communicator | None = None) -> TranslationTask:
        """Return the task for a Trainer."""
        score = ValidationScore(
            self.valid,
            self.tokenizer,
            self.recipe.task,
            on_batch=check_stop,
            communicator=communicator,
            bleu_tokenize=self.recipe.training.bleu_tokenize or "13a",
        )
        return TranslationTask(
            self.model,
            self.train.pairs,
            self.valid.pairs,
            batch_tokens=self.recipe.training.batch_tokens,
            score=score,
            metric=score.name,
            r_drop=self.recipe.training.r_drop,
        )

    def tokenizers(self) -> Mapping[str, Any]:
        """Return the tokenizers by their names in a run directory."""
        return self.tokenizer.by_side()

    def samples(self, model: Any, task: Any) -> list[dict[str, str]]:
        """Return the first outputs of the last validation."""
        text, outputs = self.valid.text, task.score.outputs[:_NUM_SAMPLES]
        rows = zip(text.source, outputs, text.target, strict=False)
        return [{"source": source, "output": output, "reference": target} for source, output, target in rows]

    def attention(self, model: Transformer) -> Attention:
        """Return the attention of the model for the first short validation pair."""
        pipeline, pairs = PIPELINES[self.recipe.task](model, self.tokenizer), self.valid.pairs
        row = self._first_short_pair
        return show_attention(pipeline, [*pairs.source[row], *pipeline.suffix], pairs.target[row])

    def example(self) -> str:
        """Return the first short source of the validation data."""
        return self.valid.text.source[self._first_short_pair]

    @property
    def _first_short_pair(self) -> int:
        pairs = self.valid.pairs
        lengths = [max(map(len, pair)) for pair in zip(pairs.source, pairs.target, strict=True)]
        return next((row for row, length in enumerate(lengths) if length <= MAX_SHOWN), lengths.index(min(lengths)))

    def describe_data(self) -> Iterator[str]:
        """Yield lines that describe the data."""
        for name, corpus in (("training", self.train), ("validation", self.valid)):
            reasons = [f"{corpus.num_blank:,} with a blank side"] if corpus.num_blank else []
            reasons += [f"{corpus.num_long:,} too long"] if corpus.num_long else []
            notes = [f"dropped: {', '.join(reasons)}"] if reasons else []
            notes += [f"truncated: {plural(corpus.num_cut, 'source')}"] if corpus.num_cut else []
            note = f" ({'; '.join(notes)})" if notes else ""
            yield f"{name}: {plural(len(corpus.pairs), TASKS[self.recipe.task].unit)}{note}"
        if (tokenize := self.recipe.training.bleu_tokenize) not in (None, "13a"):
            yield f"validation by BLEU with the tokenizer {tokenize} of sacreBLEU"


class TextJob(TrainingJob):
    """Training of a language model on one long text."""

    tasks = ("language_modeling",)
    unit = "tokens"
    task_class: ClassVar[type[Any]] = LanguageModelTask

    def task(self, communicator: Communicator | None = None) -> Task:
        """Return the task for a Trainer."""
        settings = self.recipe.training
        sizes = {"context_length": settings.context_length, "batch_size": settings.batch_size}
        task: Task = self.task_class(self.model, self.train, self.valid, **sizes)
        return task

    @classmethod
    def prepare(
        cls, recipe: Recipe, xp: Any, files: Mapping[str, Path], directory: Path, run: RunDirectory | None = None
    ) -> TextJob:
        """Read the files and make the job; see `TrainingJob.prepare`."""
        settings = recipe.training
        train = TextPart(paths_of(files, "text"))
        if valid_paths := paths_of(files, "valid_text"):
            valid = TextPart(valid_paths)
        else:
            train, valid = train.split(settings.valid_share)
        tokenizer = initial_tokenizer(recipe, run)
        with error_context("[tokenizer]"):
            tokenizer = tokenizer or Tokenizer.train(train, **recipe.tokenizer.to_dict())
        train_ids, valid_ids = (_store(tokenizer, text, directory) for text in (train, valid))
        unk_id = tokenizer.unk_id
        counts = {
            "train_characters": len(train),
            "train_tokens": len(train_ids),
            "valid_characters": len(valid),
            "valid_tokens": len(valid_ids),
            "valid_tokens_unknown": 0 if unk_id is None else int((valid_ids == unk_id).sum()),
        }
        if recipe.init.path is None:
            config = LanguageModelConfig(vocab_size=tokenizer.vocab_size, **recipe.model)
            model = LanguageModel(config, xp=xp, seed=settings.seed, dtype=settings.dtype)
        else:
            model = load_initial_model(recipe, LanguageModel, xp)
            check_vocabulary("tokenizer", tokenizer, model.vocab_size)
        recipe = with_shards(recipe, model)
        job = cls(recipe, model, xp, tokenizer, train_ids, valid_ids, counts)
        job.task()  # raises an error if the text is too short
        return job

    def samples(self, model: LanguageModel, task: Any) -> list[dict[str, str]]:
        """Return a continuation of the beginning of the validation text."""
        length = min(_PROMPT_LENGTH, len(self.valid) // 2, self.recipe.training.context_length // 2)
        prompt, rest = self.valid[:length].tolist(), self.valid[length : length + NUM_SAMPLED].tolist()
        ((output,),) = self._generator(model).outputs([prompt], max_new_tokens=NUM_SAMPLED, context="slide")
        decode = self.tokenizer.decode
        return [{"prompt": decode(prompt), "output": output.text, "reference": decode(rest)}]

    def example(self) -> str:
        """Return the first words of the validation text."""
        words = self.tokenizer.decode(self.valid[:_PROMPT_LENGTH].tolist()).split()
        return " ".join(words[:_EXAMPLE_WORDS])

    def attention(self, model: LanguageModel) -> Attention:
        """Return the attention of the model for the beginning of the validation text."""
        length = min(_PROMPT_LENGTH, self.recipe.training.context_length)
        return show_attention(self._generator(model), self.valid[:length].tolist())

    def _generator(self, model: LanguageModel) -> TextGenerator:
        return TextGenerator(model, self.tokenizer, context_length=self.recipe.training.context_length)

    def describe_data(self) -> Iterator[str]:
        """Yield lines that describe the data."""
        counts = self.counts
        unknown = f", {counts['valid_tokens_unknown']:,} of them unknown" if counts["valid_tokens_unknown"] else ""
        for name, key, note in (("training", "train", ""), ("validation", "valid", unknown)):
            tokens = "" if self.tokenizer.model == "characters" else f", {plural(counts[f'{key}_tokens'], 'token')}"
            yield f"{name}: {plural(counts[f'{key}_characters'], 'character')}{tokens}{note}"
        if (longest := len(self.train) - 1) < self.recipe.training.context_length:
            yield f"chunks of {plural(longest, 'token')}: the text is shorter than context_length"


def _count_pairs(train: EncodedCorpus, valid: EncodedCorpus) -> dict[str, int]:
    """Return the sizes of the data."""
    source_tokens, target_tokens = train.num_tokens
    counts = {
        "train_pairs": len(train.pairs),
        "train_source_tokens": source_tokens,
        "train_target_tokens": target_tokens,
        "train_target_words": train.num_target_words,
        "valid_pairs": len(valid.pairs),
    }
    for name, corpus in (("train", train), ("valid", valid)):
        counts[f"{name}_pairs_dropped_blank"] = corpus.num_blank
        counts[f"{name}_pairs_dropped_long"] = corpus.num_long
        counts[f"{name}_sources_cut"] = corpus.num_cut
    return counts


def with_shards(recipe: Recipe, model: Any) -> Recipe:
    """Return a recipe with its number of shards, which the last bits of the results depend on."""
    return recipe.with_training(data_parallel=recipe.training.data_parallel or default_num_workers(model))


def load_initial_model(recipe: Recipe, model_class: type[BaseModel], xp: Any) -> Any:
    """Return the model that a run starts from; raise ConfigError if the recipe does not fit it."""
    initial = InitialModel(Path(str(recipe.init.path)))
    model = initial.load(model_class, recipe.model, xp=xp, dtype=recipe.training.dtype)
    with error_context("[training]"):
        check_training(model.config, recipe.training)
    return model if recipe.init.lora is None else lora(model, recipe.init.lora, seed=recipe.training.seed)


def _tokenizer_files(recipe: Recipe, run: RunDirectory | None) -> tuple[RunDirectory | None, Path | None]:
    """Return the run, and the directory of public files, with the tokenizers of a run to be resumed or started from."""
    if run is None and recipe.init.path is not None:
        initial = InitialModel(Path(recipe.init.path))
        return initial.run, initial.pretrained
    return run, None if run is None else run.pretrained_files()


def _initial_tokenizers(recipe: Recipe, run: RunDirectory | None) -> Tokenizers | None:
    """Return the tokenizers of a run to be resumed, or of the model to start from; None for those to be trained."""
    init, (run, pretrained) = recipe.init, _tokenizer_files(recipe, run)
    if pretrained is not None:
        return Tokenizers.from_pretrained(pretrained, recipe.task, init.source_language, init.target_language)
    for name in ("source_language", "target_language"):
        if getattr(init, name) is not None:
            raise ConfigError(f"{name} applies to public checkpoints; omit it for a run of xformer")
    return None if run is None else Tokenizers.load(run)


def initial_tokenizer(recipe: Recipe, run: RunDirectory | None) -> BaseTokenizer | None:
    """Return the tokenizer of a run to be resumed, or of the model to start from; None for one to be trained."""
    run, pretrained = _tokenizer_files(recipe, run)
    if pretrained is not None:
        return load_tokenizer(pretrained)
    return None if run is None else run.load_tokenizer("joint")


def _store(tokenizer: BaseTokenizer, text: TextPart, directory: Path) -> Any:
    """Return the token ids of a text, mapped into memory."""
    with TokenWriter(tokenizer.vocab_size, directory) as writer:
        for piece in text:
            writer.write([tokenizer.encode_text(piece)])
        return writer.finish().ids
