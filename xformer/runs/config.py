"""The settings of a run: how text becomes tokens, and how a model is trained, by what it is trained on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xformer.errors import ConfigError
from xformer.training.optimizers import OPTIMIZERS, Optimizer, make_optimizer
from xformer.training.precision import PRECISIONS
from xformer.training.schedules import SCHEDULES, schedule


@dataclass(frozen=True)
class TokenizerSettings:
    """How pairs of texts become tokens.

    vocab_size: tokens of the vocabulary (of each, when separate); model: "bpe", "words" or "characters";
    joint: one vocabulary for both sides, with one embedding table; lowercase: what the model writes is, too
    unicode_form: "NFC" or "NFKC"; documents: sources are documents, split into sentences with a token between them, by
    the rules of a language, "en" or "de"
    """

    vocab_size: int = 8000
    model: str = "bpe"
    joint: bool = True
    lowercase: bool = False
    unicode_form: str = "NFC"
    documents: bool = False
    language: str = "en"

    def __post_init__(self) -> None:
        check_setting("language", self.language)


@dataclass(frozen=True)
class TextTokenizerSettings:
    """How one long text becomes tokens.

    model: "characters", one token each, line ends included, or "bpe"; the others are those of TokenizerSettings
    """

    vocab_size: int = 8000
    model: str = "characters"
    lowercase: bool = False
    unicode_form: str = "NFC"

    def __post_init__(self) -> None:
        if self.model == "words":
            raise ConfigError("model 'words' forgets spaces and line ends; expected 'characters' or 'bpe'")


_CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "metric_for_best": ("score", "loss"),
    "average": ("none", "last", "best"),
    "truncation": ("error", "drop", "cut"),
    "dtype": ("float32", "float64"),
    "precision": PRECISIONS,
    "language": ("en", "de"),
}
# Which values of the training settings are usable: names, a test (which None passes), and the test in words.
_RANGES: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
    (
        ("batch_tokens", "context_length", "batch_size", "warmup_steps", "validate_every", "max_length", "max_updates",
         "accumulate", "patience", "checkpoint_every"),
        lambda value: value >= 1,
        "at least 1",
    ),
    (("seed", "shards", "keep_checkpoints"), lambda value: value >= 0, "at least 0"),
    (
        ("max_minutes", "save_every_minutes", "learning_rate_factor", "learning_rate", "max_grad_norm", "epsilon"),
        lambda value: 0 < value < math.inf,
        "a finite number above 0",
    ),
    (
        ("z_loss", "weight_decay", "min_learning_rate"),
        lambda value: 0.0 <= value < math.inf,
        "a finite number of at least 0",
    ),
    (("label_smoothing", "beta1", "beta2", "momentum"), lambda value: 0.0 <= value < 1.0, "a number in [0, 1)"),
    (("valid_share",), lambda value: 0.0 < value < 1.0, "a number between 0 and 1"),
    *(((name,), some.__contains__, f"one of {', '.join(map(repr, some))}") for name, some in _CHOICES.items()),
]  # fmt: skip


def check_setting(name: str, value: Any, called: str = "") -> None:
    """Raise ConfigError for a value that a training setting cannot have; called: what the error calls it."""
    for names, is_fine, expected in _RANGES:
        if name in names and value is not None and not is_fine(value):
            raise ConfigError(f"{called or name} is {value!r}; expected {expected}")


@dataclass(frozen=True)
class LoopSettings:
    """How any model is trained.

    max_updates, max_minutes: where training ends (whichever comes first; minutes include validation)
    schedule: "inverse_square_root", "cosine" or "linear" (which fall until max_updates), or "constant"
    learning_rate_factor, warmup_steps: the peak is factor * d_model^-0.5 * warmup_steps^-0.5
    learning_rate: the peak itself, in place of learning_rate_factor; min_learning_rate: where cosine and linear end
    optimizer: "adam", "adamw", "adafactor" (whose learning rate is relative; 0.01 is usual) or "sgd"
    beta1, beta2, epsilon: of adam and adamw; momentum: of sgd
    weight_decay: of the weights and embeddings, by adamw (default 0.01) or adafactor (default 0)
    accumulate: batches per update, worked on one after the other
    label_smoothing, max_grad_norm: of the loss; of the gradient (clipping by global norm)
    z_loss: how much the squared logarithm of the softmax's denominator counts in the loss (PaLM: 1e-4)
    validate_every: updates between validations; each one saves the state, and the model if it is the best so far
    save_every_minutes: of wall time between two savings of the state, where validations are further apart
    patience: validations without a better model that end training (None: it goes on)
    metric_for_best: "score" (BLEU for translation, ROUGE for summarization) or "loss": what makes a model the best
    keep_checkpoints: models to keep in checkpoints/; checkpoint_every: updates between them (None: validate_every)
    average: "last" or "best": at the end, the mean of the checkpoints kept (the most recent ones, or those with the
    best scores) is validated, and becomes the model if it is better; "none": the most recent ones are only kept
    dtype: of the parameters: "float32" or "float64"
    precision: mixed precision (precision.py): forward and backward compute in "bfloat16", or in "float16", with a scale
    of the loss; the parameters and the optimizer's state stay in float32. "float32" is none: all is in dtype
    shards: pieces of a batch that are worked on side by side (0: one for each core, on NumPy); results depend on
    it in the last bits, so a resumed run keeps it
    """

    max_updates: int | None = None
    max_minutes: float | None = None
    schedule: str = "inverse_square_root"
    learning_rate_factor: float = 1.0
    learning_rate: float | None = None
    min_learning_rate: float = 0.0
    warmup_steps: int = 600
    optimizer: str = "adam"
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    momentum: float = 0.9
    weight_decay: float | None = None
    accumulate: int = 1
    label_smoothing: float = 0.1
    z_loss: float = 0.0
    max_grad_norm: float = 1.0
    validate_every: int = 500
    save_every_minutes: float = 5.0
    patience: int | None = None
    metric_for_best: str = "score"
    keep_checkpoints: int = 0
    checkpoint_every: int | None = None
    average: str = "none"
    seed: int = 0
    dtype: str = "float32"
    precision: str = "float32"
    shards: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_setting(name, value)
        self._check_checkpoints()
        self._check_unused()
        self.make_optimizer()
        # An unknown schedule, or one that lacks its end, is refused before any work starts; without a learning rate
        # the peak depends on the model.
        schedule(self.schedule, **{**self.schedule_settings(1), "learning_rate": self.learning_rate or math.inf})

    def _check_checkpoints(self) -> None:
        if self.average != "none" and not self.keep_checkpoints:
            raise ConfigError(f"average is {self.average!r}, but keep_checkpoints is 0; expected the number of models")
        if self.average == "best" and self.checkpoint_interval % self.validate_every:
            raise ConfigError(
                f"checkpoint_every is {self.checkpoint_every}; average 'best' needs the score of each, so expected a "
                f"multiple of validate_every {self.validate_every}"
            )

    def _check_unused(self) -> None:
        """Raise ConfigError for a setting that another one makes impossible, or leaves without effect."""
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
        adam = self.optimizer.startswith("adam")
        unused += [(name, not adam, f"optimizer is {self.optimizer!r}") for name in ("beta1", "beta2", "epsilon")]
        for name, is_unused, reason in unused:
            if is_unused and getattr(self, name) != getattr(LoopSettings, name):
                raise ConfigError(f"{name} is {getattr(self, name)!r} and {reason}, so it has no effect; leave it out")

    def end_of(self, step: int, minutes: float, stale_validations: int) -> str | None:
        """Why a run that is so far has nothing left to do (None: it has)."""
        if self.max_updates is not None and step >= self.max_updates:
            return f"{self.max_updates} updates"
        if self.max_minutes is not None and minutes >= self.max_minutes:
            return f"{self.max_minutes:g} minutes"
        if self.patience is not None and stale_validations >= self.patience:
            return f"no better model in {self.patience} validation{'s' if self.patience > 1 else ''}"
        return None

    @property
    def checkpoint_interval(self) -> int:
        """Updates between the models that are kept."""
        return self.checkpoint_every or self.validate_every

    def make_optimizer(self) -> Optimizer:
        """The optimizer that the settings describe."""
        names = ("beta1", "beta2", "epsilon", "momentum", "weight_decay")
        return make_optimizer(self.optimizer, **{name: getattr(self, name) for name in names})

    def schedule_settings(self, d_model: int) -> dict[str, Any]:
        """What `schedule` is told, beside its name."""
        return {
            "factor": self.learning_rate_factor,
            "d_model": d_model,
            "warmup_steps": self.warmup_steps,
            "total_steps": self.max_updates,
            "learning_rate": self.learning_rate,
            "min_learning_rate": self.min_learning_rate,
        }


@dataclass(frozen=True)
class TrainingSettings(LoopSettings):
    """How a model is trained on pairs of texts: LoopSettings, and

    batch_tokens: most tokens in a batch, padding included, counted on the longer side
    max_length: most tokens of a text; truncation: what to do with longer ones: "error", "drop" the pair, or "cut" the
    source to the limit
    """

    batch_tokens: int = 2048
    max_length: int = 256
    truncation: str = "error"


@dataclass(frozen=True)
class LanguageModelSettings(LoopSettings):
    """How a language model is trained on one long text: LoopSettings, with plain labels and the loss as the judge, and

    context_length: tokens that the model sees at a time; batch_size: pieces of that length in a batch, from anywhere
    in the text
    valid_share: how much of the text, at its end, is kept for validation where there is no text for that
    """

    label_smoothing: float = 0.0
    metric_for_best: str = "loss"
    context_length: int = 128
    batch_size: int = 16
    valid_share: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric_for_best != "loss":
            raise ConfigError(
                f"metric_for_best is {self.metric_for_best!r}; a language model has its loss alone; leave it out"
            )
