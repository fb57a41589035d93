"""Tasks of runs: the model, the data, the loss and the score; and the training of language models on text."""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

import xformer
from xformer.backends import Array, array_namespace, device
from xformer.data.packing import TextChunks
from xformer.data.token_rows import TokenWriter
from xformer.distributed import Communicator
from xformer.errors import CheckpointError, DataError
from xformer.families import load_pretrained
from xformer.families.checkpoint import is_public
from xformer.families.gguf_file import find_gguf
from xformer.families.run_directory import RunDirectory
from xformer.layers import lora
from xformer.models import BaseModel, LanguageModel, LanguageModelConfig
from xformer.pipelines import Attention, TextGenerator, show_attention
from xformer.pipelines.base import check_vocabulary
from xformer.random import Rng
from xformer.runs.config import BaseTrainingConfig
from xformer.runs.console import plural
from xformer.runs.inputs import Files, paths_of
from xformer.runs.recipe import MODEL_SETTINGS, PASS_TOKENS, InitialModel, Recipe, check_training, error_context
from xformer.text.corpus import TextPart
from xformer.tokenizers import BaseTokenizer, Tokenizer, load_tokenizer
from xformer.training.loggers import Rows
from xformer.training.loss import language_model_loss
from xformer.tree import first_array

MAX_SHOWN = 30  # tokens of a plot of attention, for loggers
NUM_SAMPLED, _PROMPT_LENGTH = 100, 32  # tokens of samples, for loggers
VALID_SHARE, MOST_HELD_OUT = 0.1, 1000  # of the training data, unless valid_share is set
MANY_PARAMETERS = 50  # for each token of the training data
_EXAMPLE_WORDS = 4


@dataclass(eq=False)
class Task(ABC):
    """The model and the data of a run, checked before anything is written.

    Attributes:
        names: Tasks of recipes, the default first.
        unit: Unit of the training speed.
        recipe: The recipe.
        model: The model to train, which determines the backend of the batches.
        train: Training set.
        valid: Validation set.
        tokenizer: The tokenizer, or `Tokenizers` of pairs.
        counts: Sizes of the data.
        is_held_out: Whether the validation set is a part of the training data.
    """

    names: ClassVar[tuple[str, ...]]
    unit: ClassVar[str]

    recipe: Recipe
    model: Any
    train: Any
    valid: Any
    tokenizer: Any = None
    counts: dict[str, int] = field(default_factory=dict)
    is_held_out: bool = False

    @classmethod
    @abstractmethod
    def prepare(cls, recipe: Recipe, xp: Any, files: Files, directory: Path, run: RunDirectory | None = None) -> Self:
        """Read the files and make the task.

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

    @property
    @abstractmethod
    def loss(self) -> Callable[..., Array]:
        """(model, batch, rng, *, label_smoothing, z_loss, load_balancing) -> the sum of the losses of all tokens."""

    @abstractmethod
    def batches(self, rng: Rng, *, skip: int) -> Iterator[tuple[int, Any]]:
        """Yield (epoch, batch) without end; `skip` batches were seen before.

        A batch depends only on the Rng and its own number, so that a resumed run sees the same ones.
        """

    @abstractmethod
    def validation_batches(self) -> list[Any]:
        """Return the validation set."""

    @property
    def metric(self) -> str | None:
        """Name of the score, or None if only the loss is measured."""
        return None

    def score(self, model: Any, communicator: Communicator | None = None, *, is_trial: bool = False) -> float:
        """Return the score of a model on the validation set, larger being better, if there is a metric.

        A trial, whose score has no meaning, takes as much time as if the model were trained.
        """
        raise NotImplementedError

    def report(self, path: Path) -> Iterator[str]:
        """Yield lines about the best model, in a file, at the end."""
        yield from ()

    def samples(self, model: Any) -> Rows:
        """Return outputs of the model for validation text, for loggers."""
        return []

    @abstractmethod
    def attention(self, model: Any) -> Attention:
        """Return the attention of the model for one validation text, for loggers."""

    def example(self) -> str:
        """Return a short text of the validation data to try the model with; empty without one."""
        return ""

    @abstractmethod
    def describe_data(self) -> Iterator[str]:
        """Yield lines that describe the data."""

    def tokenizers(self) -> Mapping[str, Any]:
        """Return the tokenizers by their names in a run directory."""
        return {"joint": self.tokenizer}

    def figures(self, model: Any) -> dict[str, Any]:
        """Return a plot of the attention of each layer, for loggers."""
        attention = self.attention(model)
        kind, first = next(iter(attention.maps.items()))
        return {f"attention/layer {n}": attention.plot(kind, layer=n) for n in range(len(first.weights))}

    @property
    def xp(self) -> Any:
        """Array namespace of the model."""
        return self._array_options["xp"]

    @property
    def _array_options(self) -> dict[str, Any]:
        """The namespace and the device of the arrays of batches."""
        weight = first_array(self.model)
        return {"xp": array_namespace(weight), "device": device(weight)}

    def config(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration to be stored in the run directory; `data` describes the origin of the data."""
        return {
            "task": self.recipe.task,
            "xformer": xformer.__version__,
            "backend": self.xp.name,
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
            yield f"dropout: {self.model.config.dropout:g} (--set model.dropout=RATE sets another rate)"
        if self.recipe.init.path is not None or settings.patience or self.is_held_out:
            most = "" if settings.max_steps is None else f" at most {settings.max_steps:,} (--max-steps),"
            if (minutes := settings.max_minutes) is not None:
                most += f" at most {minutes:g} minutes (--max-minutes),"
            data = " with held-out data (--valid-share)" if self.is_held_out else ""
            ends = f", until {settings.patience} in turn are no better (--patience)" if settings.patience else ""
            every = f"a validation{data} after every {settings.validate_every:,}"
            yield f"steps:{most} {every}{ends}; the best model is kept"
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
            f"{self.xp.name}, {precision}, {plural(settings.data_parallel, 'shard')}, seed {settings.seed}"
        )
        tokens = sum(count for name, count in self.counts.items() if re.fullmatch(r"train_(\w+_)?tokens", name))
        if self.recipe.init.path is None and self.model.parameter_count() > MANY_PARAMETERS * tokens > 0:
            smaller = "a smaller one, such as --set model.d_model=128, is faster and may be as good"
            yield f"note: the model has {count} for {plural(tokens, 'token')} of training data; {smaller}"


@dataclass(eq=False)
class TextTask(Task):
    """Training of a language model on the token ids of one long text, in batches of random chunks.

    An epoch is the number of batches that together have as many tokens as the text.

    Raises:
        DataError: If a text has less than two tokens.
    """

    names = ("language_modeling",)
    unit = "tokens"
    loss = staticmethod(language_model_loss)

    def __post_init__(self) -> None:
        settings = self.recipe.training
        for text, name in ((self.train, "training"), (self.valid, "validation")):
            if len(text) < 2:
                raise DataError(f"the {name} text has {len(text)} tokens; expected at least 2; use a longer text")
        self._length, self._size = min(settings.context_length, len(self.train) - 1), settings.batch_size

    @classmethod
    def prepare(cls, recipe: Recipe, xp: Any, files: Files, directory: Path, run: RunDirectory | None = None) -> Self:
        """Read the files and make the task; see `Task.prepare`."""
        train, settings = TextPart(paths_of(files, "text")), recipe.training
        if valid_paths := paths_of(files, "valid_text"):
            valid = TextPart(valid_paths)
        else:
            train, valid = train.split(settings.valid_share or VALID_SHARE)
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
        recipe = recipe.for_data(math.ceil(len(train_ids) / (settings.batch_size * settings.context_length)))
        model = language_model(recipe, tokenizer, xp)
        return cls(recipe, model, train_ids, valid_ids, tokenizer, counts, not valid_paths)

    def batches(self, rng: Rng, *, skip: int) -> Iterator[tuple[int, Any]]:
        """Yield (epoch, batch) without end; chunks are uniformly distributed over the text."""
        options, num_starts = self._array_options, len(self.train) - self._length
        for number in itertools.count(skip):
            starts = rng.fold_in("chunks", number).generator().integers(0, num_starts, self._size).tolist()
            epoch = number * self._size * self._length // len(self.train)
            yield epoch, TextChunks.make(self.train, starts, self._length, **options)

    def validation_batches(self) -> list[Any]:
        """Return the validation text, chunk after chunk; its end may be one shorter chunk."""
        count, remainder = divmod(len(self.valid) - 1, self._length)
        starts = [number * self._length for number in range(count)]
        plan = [(starts[first : first + self._size], self._length) for first in range(0, count, self._size)]
        plan += [([count * self._length], remainder)] if remainder else []
        return [TextChunks.make(self.valid, starts, length, **self._array_options) for starts, length in plan]

    def samples(self, model: LanguageModel) -> Rows:
        """Return a continuation of the beginning of the validation text."""
        length = min(_PROMPT_LENGTH, len(self.valid) // 2, self.recipe.training.context_length // 2)
        ids = self.valid[: length + NUM_SAMPLED].tolist()
        return [self._sample(model, ids[:length], ids[length:])]

    def _sample(self, model: LanguageModel, prompt: list[int], reference: list[int]) -> dict[str, str]:
        ((output,),) = self._generator(model).outputs([prompt], max_new_tokens=NUM_SAMPLED, context="slide")
        decode = self.tokenizer.decode
        return {"prompt": decode(prompt), "output": output.text, "reference": decode(reference)}

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


def held_out(settings: BaseTrainingConfig, count: int, unit: str) -> Any:
    """Return which of a number of examples are held out for validation, as booleans.

    Raises:
        DataError: If there are fewer than two.
    """
    if count < 2:
        raise DataError(f"the training set has {plural(count, unit)}; expected 1 to train on and 1 for validation")
    size = round(count * (settings.valid_share or VALID_SHARE))
    size = min(max(1, size), count - 1 if settings.valid_share else MOST_HELD_OUT)
    mask = np.zeros(count, dtype=bool)
    mask[Rng(settings.seed).fold_in("validation").permutation(count)[:size]] = True
    return mask


def language_model(recipe: Recipe, tokenizer: BaseTokenizer, xp: Any) -> LanguageModel:
    """Return a new language model, or the one that the run starts from."""
    if recipe.init.path is None:
        config = LanguageModelConfig(vocab_size=tokenizer.vocab_size, **recipe.model)
        return LanguageModel(config, xp=xp, seed=recipe.training.seed, dtype=recipe.training.dtype)
    model: LanguageModel = load_initial_model(recipe, LanguageModel, xp)
    check_vocabulary("tokenizer", tokenizer, model.vocab_size)
    return model


def load_initial_model(recipe: Recipe, model_class: type[BaseModel], xp: Any, **classes: Any) -> Any:
    """Return the model that a run starts from; raise an error if it is of another class, or does not fit the recipe.

    Public checkpoints get a classifier of `classes`, arguments of `load_pretrained`.
    """
    path = Path(str(recipe.init.path))
    dtype, is_adapted = recipe.training.dtype, recipe.init.lora is not None
    if is_adapted and dtype == "float32" and find_gguf(path) is not None:  # its blocks stay as they are, and frozen
        model = load_pretrained(path, xp=xp, pack=True)
    else:
        model = load_pretrained(path, xp=xp, dtype=dtype, **(classes if is_public(path) else {}))
    if type(model) is not model_class:
        received = f"the model of {path} is of class {type(model).__name__}"
        raise CheckpointError(f"{received}; expected {model_class.__name__}")
    settings = {"rematerialize": is_adapted and getattr(recipe.training, "context_length", 0) > PASS_TOKENS}
    settings |= {name: value for name, value in recipe.model.items() if name in MODEL_SETTINGS}
    model = model.with_config(**settings)
    with error_context("[training]"):
        check_training(model.config, recipe.training)
    return model if recipe.init.lora is None else lora(model, recipe.init.lora, seed=recipe.training.seed)


def tokenizer_files(recipe: Recipe, run: RunDirectory | None) -> tuple[RunDirectory | None, Path | None]:
    """Return the run, and the directory of public files, with the tokenizers of a run to be resumed or started from."""
    if run is None and recipe.init.path is not None:
        initial = InitialModel(Path(recipe.init.path))
        return initial.run, initial.pretrained
    return run, None if run is None else run.pretrained_files()


def initial_tokenizer(recipe: Recipe, run: RunDirectory | None) -> BaseTokenizer | None:
    """Return the tokenizer of a run to be resumed, or of the model to start from; None for one to be trained."""
    run, pretrained = tokenizer_files(recipe, run)
    if pretrained is not None:
        return load_tokenizer(pretrained)
    return None if run is None else run.load_tokenizer("joint")


def _store(tokenizer: BaseTokenizer, text: TextPart, directory: Path) -> Any:
    """Return the token ids of a text, mapped into memory."""
    with TokenWriter(tokenizer.vocab_size, directory) as writer:
        for piece in text:
            writer.write([tokenizer.encode_text(piece)])
        return writer.finish().ids
