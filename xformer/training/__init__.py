"""Training: batches, the objective, optimizers, schedules, the step and the loop around it."""

from xformer.training.batches import Batch, TokenPairs
from xformer.training.checkpoints import average_models
from xformer.training.events import Average, Progress, Update, Validation
from xformer.training.loss import language_model_loss, translation_loss
from xformer.training.optimizers import Adafactor, Adam, AdamW, Optimizer, Sgd
from xformer.training.recipe import Recipe
from xformer.training.run_directory import RunDirectory
from xformer.training.schedules import constant, cosine, inverse_square_root, linear
from xformer.training.settings import (
    LanguageModelSettings,
    LoopSettings,
    TextTokenizerSettings,
    TokenizerSettings,
    TrainingSettings,
)
from xformer.training.step import clip_by_global_norm, train_step
from xformer.training.tasks import LanguageModelTask, Task, TranslationTask
from xformer.training.trainer import Trainer
from xformer.training.windows import Windows

__all__ = [
    "Adafactor",
    "Adam",
    "AdamW",
    "Average",
    "Batch",
    "LanguageModelSettings",
    "LanguageModelTask",
    "LoopSettings",
    "Optimizer",
    "Progress",
    "Recipe",
    "RunDirectory",
    "Sgd",
    "Task",
    "TextTokenizerSettings",
    "TokenPairs",
    "TokenizerSettings",
    "Trainer",
    "TrainingSettings",
    "TranslationTask",
    "Update",
    "Validation",
    "Windows",
    "average_models",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "inverse_square_root",
    "language_model_loss",
    "linear",
    "train_step",
    "translation_loss",
]
