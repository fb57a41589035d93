"""The tasks that a recipe can name, and the training tasks (data, loss, score) that a `Trainer` works on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from xformer.backends import Array, array_namespace, backend_of, device
from xformer.config import Config, check_count
from xformer.data.chunks import TextChunks, check_text, consecutive_chunks, random_starts
from xformer.data.packing import Documents, PackedBatch, pack_documents
from xformer.data.pairs import Batch, TokenPairs, epochs, plan_batches
from xformer.errors import ConfigError, DataError
from xformer.models import LanguageModel, LanguageModelConfig, Transformer, TransformerConfig
from xformer.random import Rng
from xformer.runs.config import (
    BaseTrainingConfig,
    ChatTrainingConfig,
    LanguageModelTrainingConfig,
    TextTokenizerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from xformer.training.loss import language_model_loss, translation_loss
from xformer.tree import flatten

_SPECIAL_TOKENS = frozenset({"pad_id", "bos_id", "eos_id"})


@dataclass(frozen=True)
class TaskSpec:
    """A task that a recipe can name.

    Attributes:
        model: Configuration of the model, whose fields [model] sets.
        model_defaults: Defaults of [model]: a model that a CPU trains in half an hour. (The defaults of the
            configuration itself are those of the paper's base model.)
        from_tokenizer: Fields of the model's configuration that the tokenizers determine, which [model] cannot set.
        tokenizer: Configuration of [tokenizer].
        training: Configuration of [training].
        defaults: Defaults of other tables where they differ from those of the configurations.
        metric: Name of the validation score, or None.
        unit: Name of a training example.
        train_command: Command that trains the model.
    """

    model: type[Any]
    model_defaults: Mapping[str, Any]
    from_tokenizer: frozenset[str]
    tokenizer: type[Config]
    training: type[BaseTrainingConfig]
    metric: str | None
    unit: str
    train_command: str
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def tables(self) -> dict[str, type[Any]]:
        """The configurations of the tables of a recipe."""
        return {"model": self.model, "tokenizer": self.tokenizer, "training": self.training}


_PAIRS: dict[str, Any] = {
    "model": TransformerConfig,
    "model_defaults": {"d_model": 256, "num_heads": 4, "d_ff": 1024, "num_encoder_layers": 3, "num_decoder_layers": 3},
    "from_tokenizer": _SPECIAL_TOKENS | {"source_vocab_size", "target_vocab_size", "share_embeddings"},
    "tokenizer": TokenizerConfig,
    "training": TrainingConfig,
    "train_command": "train",
}
_LANGUAGE_MODEL: dict[str, Any] = {
    "model": LanguageModelConfig,
    # Rotary positions need no limit of the length, and several public families have them with all other defaults.
    "model_defaults": {
        "d_model": 256,
        "num_heads": 4,
        "d_ff": 1024,
        "num_layers": 4,
        "positions": "rotary",
        "scale_embeddings": False,
    },
    "from_tokenizer": _SPECIAL_TOKENS | {"vocab_size"},
    "tokenizer": TextTokenizerConfig,
    "metric": None,
    "train_command": "train-lm",
}
TASKS = {
    "translation": TaskSpec(**_PAIRS, metric="BLEU", unit="sentence pair"),
    "summarization": TaskSpec(
        **_PAIRS,
        metric="ROUGE",
        unit="document",
        defaults={"tokenizer": {"documents": True}, "training": {"truncation": "cut"}},
    ),
    "language_modeling": TaskSpec(**_LANGUAGE_MODEL, training=LanguageModelTrainingConfig, unit="character"),
    "chat": TaskSpec(**_LANGUAGE_MODEL, training=ChatTrainingConfig, unit="conversation"),
}


class Task(Protocol):
    """The data, the loss and the score that a `Trainer` works on."""

    @property
    def loss(self) -> Callable[..., Array]:
        """(model, batch, rng, *, label_smoothing, z_loss, load_balancing) -> the sum of the losses of all tokens."""

    def batches(self, rng: Rng, *, skip: int) -> Iterator[tuple[int, Any]]:
        """Yield (epoch, batch) without end; `skip` batches were seen before.

        A batch depends only on the Rng and its own number, so that a resumed run sees the same ones.
        """

    def validation_batches(self) -> list[Any]:
        """Return the validation set."""

    @property
    def score(self) -> Callable[[Any], float] | None:
        """A function (model) -> score, larger being better; None if only the loss is measured."""

    @property
    def metric(self) -> str | None:
        """Name of the score."""


class TranslationTask:
    """Pairs of texts, in batches of a number of tokens.

    Args:
        model: The model, which determines the backend and the special tokens of the batches.
        train: Training set.
        valid: Validation set.
        batch_tokens: Largest number of tokens of a batch, padding included.
        score: (model) -> score on the validation set, larger being better.
        metric: Name of the score.
        r_drop: Weight of the divergence between two passes with different dropout, see `translation_loss`.
    """

    def __init__(
        self,
        model: Transformer,
        train: TokenPairs,
        valid: TokenPairs,
        *,
        batch_tokens: int,
        score: Callable[[Transformer], float] | None = None,
        metric: str = "BLEU",
        r_drop: float = 0.0,
    ) -> None:
        self.train, self.valid, self.batch_tokens = train, valid, batch_tokens
        self.score, self.metric, self.r_drop = score, metric, r_drop
        self._batch_options = _array_options(model)
        config = model.config
        if config.label_padding_id is None:
            raise ConfigError(f"pad_id is {config.pad_id}; training on pairs expects an id other than eos_id")
        self._batch_options |= {"pad_id": config.label_padding_id, "bos_id": config.bos_id, "eos_id": config.eos_id}
        if backend_of(self._batch_options["xp"]).builds_per_shape:
            limit = config.max_positions if config.positions == "learned" else None
            self._batch_options |= {"bucketed": True, "max_positions": limit}

    def loss(self, model: Transformer, batch: Batch, rng: Rng | None, **options: Any) -> Array:
        """Return the sum of the losses of all labels, see `translation_loss`."""
        return translation_loss(model, batch, rng, r_drop=self.r_drop, **options)

    def batches(self, rng: Rng, *, skip: int) -> Iterator[tuple[int, Batch]]:
        """Yield (epoch, batch) without end."""
        for epoch, rows in epochs(self.train, self.batch_tokens, rng, skip=skip):
            yield epoch, Batch.make(self.train, rows, **self._batch_options)

    def validation_batches(self) -> list[Batch]:
        """Return the validation set, sorted by length."""
        plan = plan_batches(self.valid, self.batch_tokens, rng=None)
        return [Batch.make(self.valid, rows, **self._batch_options) for rows in plan]


class LanguageModelTask:
    """One long text, in batches of random chunks.

    An epoch is the number of batches that together have as many tokens as the text.

    Args:
        model: The model, which determines the backend of the batches.
        train: Token ids of the training text, as a list or NumPy array.
        valid: Token ids of the validation text.
        context_length: Number of tokens of a chunk; the whole text if it is shorter.
        batch_size: Number of chunks in a batch.

    Raises:
        DataError: If a text has less than two tokens.
        ConfigError: If chunks or batches are empty.
    """

    loss = staticmethod(language_model_loss)
    score, metric = None, None

    def __init__(
        self, model: LanguageModel, train: Sequence[int], valid: Sequence[int], *, context_length: int, batch_size: int
    ) -> None:
        check_count("context_length", context_length)
        for text, name in ((train, "training"), (valid, "validation")):
            check_text(text, 1, batch_size, name)
        self.train, self.valid = train, valid
        self.context_length, self.batch_size = min(context_length, len(train) - 1), batch_size
        self._batch_options = _array_options(model)

    def batches(self, rng: Rng, *, skip: int) -> Iterator[tuple[int, TextChunks]]:
        """Yield (epoch, batch) without end."""
        length, size = self.context_length, self.batch_size
        for number, starts in enumerate(random_starts(self.train, length, size, rng, skip), start=skip):
            epoch = number * size * length // len(self.train)
            yield epoch, TextChunks.make(self.train, starts, length, **self._batch_options)

    def validation_batches(self) -> list[TextChunks]:
        """Return the validation text, chunk after chunk."""
        plan = consecutive_chunks(self.valid, self.context_length, self.batch_size)
        return [TextChunks.make(self.valid, starts, length, **self._batch_options) for starts, length in plan]


class PackedTask:
    """Documents, such as conversations, in packed rows. An epoch has each of them once.

    Args:
        model: The model, which determines the backend of the batches.
        train: Training set.
        valid: Validation set.
        context_length: Largest number of tokens of a row.
        batch_size: Number of rows in a batch.

    Raises:
        DataError: If a document is longer than a row, or a set is empty.
        ConfigError: If rows or batches are empty.
    """

    loss = staticmethod(language_model_loss)
    score, metric = None, None

    def __init__(
        self, model: LanguageModel, train: Documents, valid: Documents, *, context_length: int, batch_size: int
    ) -> None:
        check_count("batch_size", batch_size)
        self.train, self.valid, self.batch_size = train, valid, batch_size
        self.context_length = context_length
        sizes = []
        for documents, name in ((train, "training"), (valid, "validation")):
            lengths = documents.lengths
            sizes += [sum(lengths[row]) for row in pack_documents(lengths, context_length)]
            if not sum(lengths):
                raise DataError(f"the {name} set has no documents of at least two tokens; expected at least one")
        self._batch_options = {"length": int(max(sizes)), **_array_options(model)}

    def batches(self, rng: Rng, *, skip: int) -> Iterator[tuple[int, PackedBatch]]:
        """Yield (epoch, batch) without end."""
        size = self.batch_size
        for epoch in itertools.count():
            source = rng.fold_in("epoch", epoch)
            order = source.fold_in("documents").permutation(len(self.train))
            rows = pack_documents(self.train.lengths[order], self.context_length)
            rows = [[order[index] for index in rows[row]] for row in source.fold_in("rows").permutation(len(rows))]
            for start in range(skip * size, len(rows), size):
                yield epoch, PackedBatch.make(self.train, rows[start : start + size], **self._batch_options)
            skip = max(0, skip - -(-len(rows) // size))

    def validation_batches(self) -> list[PackedBatch]:
        """Return the validation set."""
        rows, size = pack_documents(self.valid.lengths, self.context_length), self.batch_size
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [PackedBatch.make(self.valid, batch, **self._batch_options) for batch in batches]


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


def _array_options(model: Any) -> dict[str, Any]:
    """Return the namespace and the device of a model's arrays."""
    weight = flatten(model)[0][0]
    return {"xp": array_namespace(weight), "device": device(weight)}
