"""What a trainer is told about its work: the data, the objective, and what makes a model good."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from xformer.backends import Array, array_namespace, device
from xformer.data.pairs import Batch, TokenPairs, epochs, plan_batches, split_rows
from xformer.data.windows import TextChunks, all_windows, check_text, random_starts
from xformer.errors import ConfigError
from xformer.models import LanguageModel, Transformer, TransformerConfig
from xformer.random import Rng
from xformer.training.loss import language_model_loss, translation_loss
from xformer.tree import flatten


class Task(Protocol):
    """What differs between translation and other work; the training loop (trainer.py) is the same.

    A batch is anything with `num_tokens`. It may be worked on by another process: it holds data, and the loss can be
    imported by name.
    """

    @property
    def loss(self) -> Callable[..., Array]:
        """(model, batch, rng=None, *, label_smoothing=0.0, z_loss=0.0) -> the sum over all tokens, in nats."""

    def batches(self, rng: Rng, *, skip: int, shards: int) -> Iterator[tuple[int, list[Any]]]:
        """Yield (epoch, the batch in at most so many shards) without end; `skip` batches were seen before.

        A batch depends on the Rng and its own number alone, so that a resumed run sees the same ones.
        """

    def validation_batches(self) -> list[Any]:
        """The whole validation set."""

    @property
    def score(self) -> Callable[[Any], float] | None:
        """Says how good a model is beyond its loss, more being better; None when the loss is all there is."""

    @property
    def metric(self) -> str | None:
        """What the score is called."""


class TranslationTask:
    """Pairs of texts, in batches of so many tokens.

    score: says how good what the model writes for the validation set is, by the metric of that name.
    """

    loss = staticmethod(translation_loss)

    def __init__(
        self,
        model: Transformer,
        train: TokenPairs,
        valid: TokenPairs,
        *,
        batch_tokens: int,
        score: Callable[[Transformer], float] | None = None,
        metric: str = "BLEU",
    ) -> None:
        self.train, self.valid, self.batch_tokens = train, valid, batch_tokens
        self.score, self.metric = score, metric
        weight, config = flatten(model)[0][0], model.config
        self._place = {"xp": array_namespace(weight), "device": device(weight)}
        if config.padding_id is None:
            raise ConfigError(f"pad_id is {config.pad_id}; training on pairs expects an id of its own")
        self._ids = {"pad_id": config.padding_id, "bos_id": config.bos_id, "eos_id": config.eos_id}

    def batches(self, rng: Rng, *, skip: int, shards: int) -> Iterator[tuple[int, list[Batch]]]:
        """Yield (epoch, the batch in at most so many shards) without end."""
        for epoch, rows in epochs(self.train, self.batch_tokens, rng, skip=skip):
            yield epoch, [self._batch(self.train, part) for part in split_rows(rows, shards)]

    def validation_batches(self) -> list[Batch]:
        """The whole validation set, sorted by length."""
        plan = plan_batches(self.valid, self.batch_tokens, rng=None)
        return [self._batch(self.valid, rows) for rows in plan]

    def _batch(self, pairs: TokenPairs, rows: list[int]) -> Batch:
        return Batch.make(pairs, rows, **self._place, **self._ids)


class LanguageModelTask:
    """One long text, in windows of context_length tokens, batch_size of them drawn at random for each batch.

    train, valid: token ids, as lists or NumPy arrays. An epoch is as many batches as the text has tokens for.

    Raises DataError for a text that is shorter than a window, ConfigError for windows or batches of nothing.
    """

    loss = staticmethod(language_model_loss)
    score, metric = None, None

    def __init__(
        self,
        model: LanguageModel,
        train: Sequence[int],
        valid: Sequence[int],
        *,
        context_length: int,
        batch_size: int,
    ) -> None:
        check_text(train, context_length, batch_size, "training")
        check_text(valid, 1, batch_size, "validation")
        self.train, self.valid = train, valid
        self.context_length, self.batch_size = context_length, batch_size
        weight = flatten(model)[0][0]
        self._place = {"xp": array_namespace(weight), "device": device(weight)}

    def batches(self, rng: Rng, *, skip: int, shards: int) -> Iterator[tuple[int, list[TextChunks]]]:
        """Yield (epoch, the batch in at most so many shards) without end."""
        length, size = self.context_length, self.batch_size
        for number, starts in enumerate(random_starts(self.train, length, size, rng, skip), start=skip):
            parts = [TextChunks.make(self.train, part, length, **self._place) for part in split_rows(starts, shards)]
            yield number * size * length // len(self.train), parts

    def validation_batches(self) -> list[TextChunks]:
        """The whole validation text, window after window."""
        plan = all_windows(self.valid, self.context_length, self.batch_size)
        return [TextChunks.make(self.valid, starts, length, **self._place) for starts, length in plan]


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
