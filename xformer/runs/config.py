"""The configuration of a run: how text becomes tokens, and how a model is trained."""

from __future__ import annotations

import math
from typing import Any

from xformer.config import Config, option
from xformer.errors import ConfigError
from xformer.models.config import PROBLEM_TYPES
from xformer.training.inputs import FitConfig
from xformer.training.optimizers import SGD, Adafactor, Adam, AdamW, Muon, Optimizer
from xformer.training.schedules import Schedule, constant, cosine, inverse_square_root, linear

_ADAM = ("beta1", "beta2", "epsilon")
# Each optimizer, and the options that it has.
_OPTIMIZERS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "adam": (Adam, _ADAM),
    "adamw": (AdamW, (*_ADAM, "weight_decay")),
    "muon": (Muon, (*_ADAM, "weight_decay")),
    "adafactor": (Adafactor, ("weight_decay",)),
    "sgd": (SGD, ("momentum",)),
}
_FALLING = {"cosine": cosine, "linear": linear}  # schedules that end at the last step
_SCHEDULES: dict[str, Any] = {"inverse_square_root": inverse_square_root, **_FALLING, "constant": constant}


class InitConfig(Config):
    """The model that a run starts from, in place of random parameters.

    Args:
        path: Directory of a public checkpoint or of a run, or a GGUF file.
        source_language: Language of the sources, for models of many languages.
        target_language: Language of the targets, for models of many languages.
        lora: With a model to start from: train adapters of all linear maps with this rank (LoRA), and freeze the model.
    """

    path: str | None = option(default=None, panel="Files")
    source_language: str | None = option(default=None)
    target_language: str | None = option(default=None)
    lora: int | None = option(default=None, at_least=1)


class TextTokenizerConfig(Config):
    """Tokenization of one long text.

    Args:
        vocab_size: Size of the vocabulary.
        model: Tokenizer type; characters include line ends.
        lowercase: Lower-case all text, the output included.
        unicode_form: Unicode normalization form.
    """

    vocab_size: int = option(default=8000, at_least=1)
    model: str = option(default="characters", choices=("bpe", "characters"))
    lowercase: bool = option(default=False)
    unicode_form: str = option(default="NFC", choices=("NFC", "NFKC"))


class TokenizerConfig(TextTokenizerConfig):
    """Tokenization of pairs of texts.

    Args:
        vocab_size: Size of the vocabulary (of each vocabulary if joint is false).
        model: Tokenizer type.
        joint: Use one vocabulary, and one embedding, for both sides.
        documents: Sources are documents, split into sentences with a separator between them.
        language: Language of the sentence splitter.
    """

    vocab_size: int = option(default=8000, at_least=1)
    model: str = option(default="bpe", choices=("bpe", "words", "characters"))
    joint: bool = option(default=True)
    documents: bool = option(default=False)
    language: str = option(default="en", choices=("en", "de"))


class BaseTrainingConfig(FitConfig):
    """Training of any model, by the options of `fit` and others.

    Args:
        max_grad_norm: Largest norm of the gradient (clipping).
        max_steps: Stop after this many steps.
        max_minutes: Make the steps that fit into this many minutes of wall time, validation included.
        patience: Stop after this many validations without a better model.
        schedule: Learning rate schedule; cosine and linear decay until the last step.
        learning_rate_factor: The peak learning rate is factor * d_model^-0.5 * warmup_steps^-0.5.
        learning_rate: Peak learning rate, instead of learning_rate_factor.
        min_learning_rate: Learning rate at the end of the cosine and linear schedules.
        warmup_steps: Steps of the linear warm-up.
        optimizer: Optimizer; muon needs fewer steps than adam; adafactor's learning rate is relative (0.01 is usual).
        beta1: Decay rate of the mean of the gradients (adam, adamw, muon).
        beta2: Decay rate of the mean of the squared gradients (as beta1).
        epsilon: Added to the denominator (as beta1).
        momentum: Decay rate of the velocity (sgd).
        weight_decay: Weight decay (adamw and muon, default 0.01; adafactor, default 0).
        label_smoothing: Label smoothing: probability mass given to all tokens.
        z_loss: Weight of the squared logarithm of the softmax's denominator (PaLM: 1e-4).
        load_balancing: Weight of the loss that balances the use of experts (Fedus et al., 2021).
        validate_every: Steps between validations, each of which saves the state.
        valid_share: Share of the training data that is held out for validation, if no other data are given: the end of
            a text, or examples drawn at random (default: a tenth, at most 1,000 examples).
        metric_for_best: Criterion of the best checkpoint: score (BLEU or ROUGE) or loss.
        keep_checkpoints: Number of models to keep in checkpoints/.
        checkpoint_every: Steps between these models; default validate_every.
        average: At the end, average the last or the best keep_checkpoints checkpoints, and use the average if it is
            better.
        dtype: Dtype of the parameters.
        communication_dtype: Data type in which ranks exchange gradients; bfloat16 halves the traffic, and the bits
            depend on the ranks.
        overlap_communication: Exchange gradients between ranks during the backward pass, without jit; the bits stay the
            same.
        shard_optimizer: Keep the optimizer state of each parameter on one rank only (ZeRO stage 1).
    """

    # JSON has no infinity.
    max_grad_norm: float = option(default=1.0, above=0.0, panel="Optimizer")

    max_steps: int | None = option(default=None, at_least=1, panel="Duration")
    max_minutes: float | None = option(default=None, above=0.0)
    patience: int | None = option(default=None, at_least=1)
    schedule: str = option(default="inverse_square_root", choices=tuple(_SCHEDULES), panel="Optimizer")
    learning_rate_factor: float = option(default=1.0, above=0.0)
    learning_rate: float | None = option(default=None, above=0.0)
    min_learning_rate: float = option(default=0.0, at_least=0.0)
    warmup_steps: int = option(default=600, at_least=1)
    optimizer: str = option(default="adam", choices=tuple(_OPTIMIZERS))
    beta1: float = option(default=0.9, at_least=0.0, below=1.0)
    beta2: float = option(default=0.98, at_least=0.0, below=1.0)
    epsilon: float = option(default=1e-9, above=0.0)
    momentum: float = option(default=0.9, at_least=0.0, below=1.0)
    weight_decay: float | None = option(default=None, at_least=0.0)
    label_smoothing: float = option(default=0.1, at_least=0.0, below=1.0, panel="Loss")
    z_loss: float = option(default=0.0, at_least=0.0)
    load_balancing: float = option(default=0.01, at_least=0.0)
    validate_every: int = option(default=500, at_least=1, panel="Validation and checkpoints")
    valid_share: float | None = option(default=None, above=0.0, below=1.0)
    metric_for_best: str = option(default="score", choices=("score", "loss"))
    keep_checkpoints: int = option(default=0, at_least=0)
    checkpoint_every: int | None = option(default=None, at_least=1)
    average: str = option(default="none", choices=("none", "last", "best"))
    dtype: str = option(default="float32", choices=("float32", "float64"), panel="Computing")
    communication_dtype: str = option(default="float32", choices=("float32", "bfloat16"))
    overlap_communication: bool = option(default=False)
    shard_optimizer: bool = option(default=False)

    def _check(self) -> None:
        if self.average != "none" and not self.keep_checkpoints:
            raise ConfigError(f"average is {self.average!r}, but keep_checkpoints is 0; expected the number of models")
        if self.average == "best" and self.checkpoint_interval % self.validate_every:
            expected = "average 'best' needs the score of each, so expected a multiple of validate_every"
            raise ConfigError(f"checkpoint_every is {self.checkpoint_every}; {expected} {self.validate_every}")
        if self.precision != "float32" and self.dtype != "float32":
            hint = "mixed precision keeps the parameters in float32; leave one of the two out"
            raise ConfigError(f"precision is {self.precision!r} and dtype {self.dtype!r}; {hint}")
        for name, is_unused, reason in (
            ("checkpoint_every", not self.keep_checkpoints, "keep_checkpoints is 0"),
            ("learning_rate_factor", self.learning_rate is not None, "learning_rate gives the peak"),
        ):
            if is_unused and self._is_set(name):
                raise ConfigError(f"{name} is {getattr(self, name)!r} and {reason}, so it has no effect; leave it out")
        self._check_optimizer()
        self._check_schedule()

    def _is_set(self, name: str) -> bool:
        return getattr(self, name) != getattr(BaseTrainingConfig, name)

    def _check_optimizer(self) -> None:
        """Raise ConfigError for an option that only other optimizers have."""
        for name in (*_ADAM, "weight_decay", "momentum"):
            choices = [repr(each) for each, (_, names) in _OPTIMIZERS.items() if name in names]
            no_decay = name == "weight_decay" and not self.weight_decay
            if repr(self.optimizer) not in choices and self._is_set(name) and not no_decay:
                others = f"{', '.join(choices[:-1])}{' or ' * (len(choices) > 1)}{choices[-1]}"
                received = f"{name} is {getattr(self, name)}; optimizer {self.optimizer!r} has none"
                raise ConfigError(f"{received}; choose {others}")

    def _check_schedule(self) -> None:
        falls = self.schedule in _FALLING
        if falls and self.max_steps is None and self.max_minutes is None and not hasattr(self, "epochs"):
            raise ConfigError(f"schedule {self.schedule!r} needs max_steps or max_minutes, which say when it ends")
        if self.min_learning_rate and not falls:
            received = f"min_learning_rate is {self.min_learning_rate}; schedule {self.schedule!r} has none"
            raise ConfigError(f"{received}; leave it out")
        if self.learning_rate is not None:  # else the peak depends on the model
            self.make_schedule(None)

    @property
    def checkpoint_interval(self) -> int:
        """Number of steps between the models that are kept."""
        return self.checkpoint_every or self.validate_every

    def make_optimizer(self) -> Optimizer:
        """Return the optimizer."""
        cls, names = _OPTIMIZERS[self.optimizer]
        optimizer: Optimizer = cls(**{name: value for name in names if (value := getattr(self, name)) is not None})
        return optimizer

    def make_schedule(self, d_model: int | None) -> Schedule:
        """Return the learning rate schedule, which follows the steps of the run if it falls to the floor.

        Args:
            d_model: Size of the model, from which the peak is computed if learning_rate is None.

        Raises:
            ConfigError: For a peak that cannot be computed or is below min_learning_rate.
        """
        peak = self.learning_rate
        if peak is None:
            if d_model is None:
                raise ConfigError("learning_rate is None; the model has no d_model to compute it from; set it")
            peak = self.learning_rate_factor * math.pow(d_model, -0.5) * math.pow(self.warmup_steps, -0.5)
        if self.min_learning_rate > peak:
            received = f"min_learning_rate is {self.min_learning_rate}, above the peak of {peak:.3g}"
            raise ConfigError(f"{received}; lower it, or raise the peak")
        floor = {"floor": self.min_learning_rate} if self.schedule in _FALLING else {}
        schedule: Schedule = _SCHEDULES[self.schedule](peak, warmup_steps=self.warmup_steps, **floor)
        return schedule


class TrainingConfig(BaseTrainingConfig):
    """Training on pairs of texts.

    Args:
        batch_tokens: Largest number of tokens in a batch, padding included, counting the longer of source and target.
        max_length: Largest number of tokens of a text.
        truncation: What to do with longer texts: an error, drop the pair, or cut the source.
        bleu_tokenize: Tokenizer of sacreBLEU for validation, e.g. 13a, zh, ja-mecab, char; default: that of the target
            language if it is known by --target-language or the suffix of the file (val.zh), else 13a.
        r_drop: Weight of R-Drop, the divergence between two passes with different dropout masks, typically 1 to 5.
            Training needs fewer steps, but each takes almost twice as long.
    """

    batch_tokens: int = option(default=2048, at_least=1, panel="Data")
    max_length: int = option(default=256, at_least=1)
    truncation: str = option(default="error", choices=("error", "drop", "cut"))

    bleu_tokenize: str | None = option(default=None)
    r_drop: float = option(default=0.0, at_least=0.0, panel="Loss")


class ClassTrainingConfig(BaseTrainingConfig):
    """Training of a classifier of texts.

    Args:
        problem_type: What the labels mean: one of the classes, any number of them with commas between, or numbers.
        labels: Name of a class; repeat it to fix their order. Default: the labels of the training set, sorted.
        batch_tokens: Largest number of tokens in a batch, padding included.
        max_length: Tokens of a text, special ones included; longer texts are cut.
        epochs: Passes over the training set, unless max_steps is given; by default at least 60 steps.
    """

    problem_type: str = option(default=PROBLEM_TYPES[0], choices=PROBLEM_TYPES, panel="Data")
    labels: tuple[str, ...] | None = option(default=None)
    batch_tokens: int = option(default=2048, at_least=1)
    max_length: int = option(default=256, at_least=2)
    epochs: float = option(default=3.0, above=0.0)


class LanguageModelTrainingConfig(BaseTrainingConfig):
    """Training of a language model on one long text.

    Args:
        label_smoothing: Label smoothing: probability mass given to all tokens.
        metric_for_best: Criterion for choosing the best checkpoint.
        context_length: Number of tokens that the model sees.
        batch_size: Number of chunks of context_length tokens in a batch.
    """

    label_smoothing: float = option(default=0.0, at_least=0.0, below=1.0, panel="Loss")
    metric_for_best: str = option(default="loss", choices=("loss",))
    context_length: int = option(default=128, at_least=1, panel="Data")
    batch_size: int = option(default=16, at_least=1)


class ChatTrainingConfig(LanguageModelTrainingConfig):
    """Training of a language model on the answers of chats.

    Args:
        context_length: Number of tokens of a row, which holds several conversations (default: the longest one, from 192
            to 1024).
        batch_size: Number of rows in a batch.
        truncation: What to do with conversations that are longer than a row: an error, drop them, or cut their end.
    """

    context_length: int | None = option(  # type: ignore[assignment]  # a run in a directory has a number
        default=None, at_least=1, panel="Data"
    )
    batch_size: int = option(default=4, at_least=1)
    truncation: str = option(default="error", choices=("error", "drop", "cut"))
