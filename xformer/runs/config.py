"""The configuration of a run: how text becomes tokens, and how a model is trained."""

from __future__ import annotations

import math
from typing import Any

from xformer.config import Config, option
from xformer.errors import ConfigError
from xformer.training.optimizers import SGD, Adafactor, Adam, AdamW, Optimizer
from xformer.training.precision import PRECISIONS
from xformer.training.schedules import Schedule, constant, cosine, inverse_square_root, linear

_FALLING = {"cosine": cosine, "linear": linear}  # schedules that end at max_updates
_DURATION, _OPTIMIZER, _LOSS = "Duration", "Optimizer", "Loss"
_VALIDATION, _COMPUTING, _DATA = "Validation and checkpoints", "Computing", "Data"


class TokenizerConfig(Config):
    """Tokenization of pairs of texts."""

    vocab_size: int = option(
        default=8000, help="Size of the vocabulary (of each vocabulary if joint is false).", at_least=1
    )
    model: str = option(default="bpe", help="Unit of a token.", choices=("bpe", "words", "characters"))
    joint: bool = option(default=True, help="Use one vocabulary, and one embedding, for both sides.")
    lowercase: bool = option(default=False, help="Lower-case all text, the output included.")
    unicode_form: str = option(default="NFC", help="Unicode normalization form.", choices=("NFC", "NFKC"))
    documents: bool = option(
        default=False, help="Sources are documents, split into sentences with a separator between them."
    )
    language: str = option(
        default="en", help="Language whose rules split documents into sentences.", choices=("en", "de")
    )


class TextTokenizerConfig(Config):
    """Tokenization of one long text."""

    vocab_size: int = option(default=8000, help="Size of the vocabulary.", at_least=1)
    model: str = option(
        default="characters", help="Unit of a token; characters include line ends.", choices=("bpe", "characters")
    )
    lowercase: bool = option(default=False, help="Lower-case all text, the output included.")
    unicode_form: str = option(default="NFC", help="Unicode normalization form.", choices=("NFC", "NFKC"))


class BaseTrainingConfig(Config):
    """Training of any model."""

    max_updates: int | None = option(
        default=None, help="End after this number of updates.", at_least=1, panel=_DURATION
    )
    max_minutes: float | None = option(
        default=None, help="End after this wall time in minutes, validation included.", above=0.0, panel=_DURATION
    )
    patience: int | None = option(
        default=None, help="End after this number of validations without a better model.", at_least=1, panel=_DURATION
    )
    schedule: str = option(
        default="inverse_square_root",
        help="Learning rate schedule; cosine and linear fall until max_updates.",
        choices=("inverse_square_root", "cosine", "linear", "constant"),
        panel=_OPTIMIZER,
    )
    learning_rate_factor: float = option(
        default=1.0,
        help="The peak learning rate is factor * d_model^-0.5 * warmup_steps^-0.5.",
        above=0.0,
        panel=_OPTIMIZER,
    )
    learning_rate: float | None = option(
        default=None, help="Peak learning rate, instead of learning_rate_factor.", above=0.0, panel=_OPTIMIZER
    )
    min_learning_rate: float = option(
        default=0.0, help="Learning rate at the end of the cosine and linear schedules.", at_least=0.0, panel=_OPTIMIZER
    )
    warmup_steps: int = option(default=600, help="Updates of the linear warm-up.", at_least=1, panel=_OPTIMIZER)
    optimizer: str = option(
        default="adam",
        help="Optimizer; adafactor's learning rate is relative (0.01 is usual).",
        choices=("adam", "adamw", "adafactor", "sgd"),
        panel=_OPTIMIZER,
    )
    beta1: float = option(
        default=0.9,
        help="Decay rate of the mean of the gradients (adam, adamw).",
        at_least=0.0,
        below=1.0,
        panel=_OPTIMIZER,
    )
    beta2: float = option(
        default=0.98,
        help="Decay rate of the mean of the squared gradients (adam, adamw).",
        at_least=0.0,
        below=1.0,
        panel=_OPTIMIZER,
    )
    epsilon: float = option(default=1e-9, help="Added to the denominator (adam, adamw).", above=0.0, panel=_OPTIMIZER)
    momentum: float = option(
        default=0.9, help="Decay rate of the velocity (sgd).", at_least=0.0, below=1.0, panel=_OPTIMIZER
    )
    weight_decay: float | None = option(
        default=None,
        help="Weight decay of weights and embeddings (adamw, default 0.01; adafactor, default 0).",
        at_least=0.0,
        panel=_OPTIMIZER,
    )
    max_grad_norm: float = option(
        default=1.0, help="Largest norm of the gradient (clipping).", above=0.0, panel=_OPTIMIZER
    )
    grad_accumulation: int = option(
        default=1, help="Batches per update, computed one after the other.", at_least=1, panel=_OPTIMIZER
    )
    label_smoothing: float = option(
        default=0.1,
        help="Probability that label smoothing spreads over all tokens.",
        at_least=0.0,
        below=1.0,
        panel=_LOSS,
    )
    z_loss: float = option(
        default=0.0,
        help="Weight of the squared logarithm of the softmax's denominator (PaLM: 1e-4).",
        at_least=0.0,
        panel=_LOSS,
    )
    validate_every: int = option(
        default=500, help="Updates between validations, each of which saves the state.", at_least=1, panel=_VALIDATION
    )
    metric_for_best: str = option(
        default="score",
        help="Measure of the best model: its score (BLEU for translation, ROUGE for summarization) or loss.",
        choices=("score", "loss"),
        panel=_VALIDATION,
    )
    save_every_minutes: float = option(
        default=5.0, help="Minutes between saves of the state.", above=0.0, panel=_VALIDATION
    )
    keep_checkpoints: int = option(
        default=0, help="Number of models to keep in checkpoints/.", at_least=0, panel=_VALIDATION
    )
    checkpoint_every: int | None = option(
        default=None, help="Updates between these models; default validate_every.", at_least=1, panel=_VALIDATION
    )
    average: str = option(
        default="none",
        help="Average the kept checkpoints at the end, the last or the best ones, and use the average if it is better.",
        choices=("none", "last", "best"),
        panel=_VALIDATION,
    )
    seed: int = option(default=0, help="Seed of all random numbers.", at_least=0, panel=_COMPUTING)
    dtype: str = option(
        default="float32", help="Dtype of the parameters.", choices=("float32", "float64"), panel=_COMPUTING
    )
    precision: str = option(
        default="float32",
        help="Mixed precision: compute forward and backward in bfloat16 or float16; float32 turns it off.",
        choices=PRECISIONS,
        panel=_COMPUTING,
    )
    data_parallel: int = option(
        default=0,
        help="Shards of each batch that are computed in parallel (0: one per core on NumPy); changes the last bits.",
        at_least=0,
        panel=_COMPUTING,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_checkpoints()
        self._check_unused()
        self.make_optimizer()
        self._check_schedule()

    def _check_checkpoints(self) -> None:
        if self.average != "none" and not self.keep_checkpoints:
            raise ConfigError(f"average is {self.average!r}, but keep_checkpoints is 0; expected the number of models")
        if self.average == "best" and self.checkpoint_interval % self.validate_every:
            raise ConfigError(
                f"checkpoint_every is {self.checkpoint_every}; average 'best' needs the score of each, so expected a "
                f"multiple of validate_every {self.validate_every}"
            )

    def _check_unused(self) -> None:
        """Raise ConfigError for an option that conflicts with another one or has no effect."""
        if self.precision != "float32" and self.dtype != "float32":
            raise ConfigError(
                f"precision is {self.precision!r} and dtype {self.dtype!r}; mixed precision keeps the parameters in "
                "float32; leave one of the two out"
            )
        unused = [
            (
                "checkpoint_every",
                self.checkpoint_every is not None and not self.keep_checkpoints,
                "keep_checkpoints is 0",
            ),
            ("learning_rate_factor", self.learning_rate is not None, "learning_rate gives the peak"),
            ("momentum", self.optimizer != "sgd", f"optimizer is {self.optimizer!r}"),
        ]
        is_adam = self.optimizer.startswith("adam")
        unused += [(name, not is_adam, f"optimizer is {self.optimizer!r}") for name in ("beta1", "beta2", "epsilon")]
        for name, is_unused, reason in unused:
            if is_unused and getattr(self, name) != getattr(BaseTrainingConfig, name):
                raise ConfigError(f"{name} is {getattr(self, name)!r} and {reason}, so it has no effect; leave it out")

    @property
    def checkpoint_interval(self) -> int:
        """Number of updates between the models that are kept."""
        return self.checkpoint_every or self.validate_every

    def make_optimizer(self) -> Optimizer:
        """Return the optimizer.

        Raises:
            ConfigError: For weight decay with an optimizer that has none.
        """
        decay: dict[str, Any] = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        if self.optimizer == "adamw":
            return AdamW(beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon, **decay)
        if self.optimizer == "adafactor":
            return Adafactor(**decay)
        if self.weight_decay:
            raise ConfigError(
                f"weight_decay is {self.weight_decay}; optimizer {self.optimizer!r} has none; choose 'adamw' or "
                "'adafactor'"
            )
        if self.optimizer == "sgd":
            return SGD(momentum=self.momentum)
        return Adam(beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon)

    def make_schedule(self, d_model: int | None) -> Schedule:
        """Return the learning rate schedule.

        Args:
            d_model: Size of the model, from which the peak is computed if learning_rate is None.

        Raises:
            ConfigError: For a peak that cannot be computed or is below min_learning_rate.
        """
        peak = self.learning_rate
        if peak is None:
            if d_model is None:
                raise ConfigError(
                    "learning_rate is None; the model has no d_model to compute it from; set learning_rate"
                )
            peak = self.learning_rate_factor * math.pow(d_model, -0.5) * math.pow(self.warmup_steps, -0.5)
        if self.min_learning_rate > peak:
            raise ConfigError(
                f"min_learning_rate is {self.min_learning_rate}, above the peak of {peak:.3g}; lower it, or raise the "
                "peak"
            )
        if self.schedule in _FALLING and self.max_updates is not None:
            return _FALLING[self.schedule](
                peak, warmup_steps=self.warmup_steps, total_steps=self.max_updates, floor=self.min_learning_rate
            )
        return (constant if self.schedule == "constant" else inverse_square_root)(peak, warmup_steps=self.warmup_steps)

    def _check_schedule(self) -> None:
        falls = self.schedule in _FALLING
        if falls and self.max_updates is None:
            raise ConfigError(f"schedule {self.schedule!r} needs max_updates, the number of updates at which it ends")
        if self.min_learning_rate and not falls:
            raise ConfigError(
                f"min_learning_rate is {self.min_learning_rate}; schedule {self.schedule!r} has none; leave it out"
            )
        if self.learning_rate is not None:  # else the peak depends on the model
            self.make_schedule(None)


class TrainingConfig(BaseTrainingConfig):
    """Training on pairs of texts."""

    batch_tokens: int = option(
        default=2048,
        help="Largest number of tokens in a batch, padding included, counted on the longer side.",
        at_least=1,
        panel=_DATA,
    )
    max_length: int = option(default=256, help="Largest number of tokens of a text.", at_least=1, panel=_DATA)
    truncation: str = option(
        default="error",
        help="Treatment of longer texts: an error, drop the pair, or cut the source.",
        choices=("error", "drop", "cut"),
        panel=_DATA,
    )


class LanguageModelTrainingConfig(BaseTrainingConfig):
    """Training of a language model on one long text."""

    label_smoothing: float = option(
        default=0.0,
        help="Probability that label smoothing spreads over all tokens.",
        at_least=0.0,
        below=1.0,
        panel=_LOSS,
    )
    metric_for_best: str = option(
        default="loss", help="Measure of the best model.", choices=("loss",), panel=_VALIDATION
    )
    context_length: int = option(default=128, help="Number of tokens that the model sees.", at_least=1, panel=_DATA)
    batch_size: int = option(
        default=16, help="Number of chunks of context_length tokens in a batch.", at_least=1, panel=_DATA
    )
    valid_share: float = option(
        default=0.1,
        help="Share of the text, at its end, that is kept for validation.",
        above=0.0,
        below=1.0,
        panel=_DATA,
    )
