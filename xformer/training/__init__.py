"""Training: batches, the objective, optimizers, schedules, the step and the loop around it."""

from xformer.data.pairs import Batch, TokenPairs
from xformer.data.windows import TextChunks
from xformer.runs.checkpoints import average_models
from xformer.runs.config import (
    LanguageModelSettings,
    LoopSettings,
    TextTokenizerSettings,
    TokenizerSettings,
    TrainingSettings,
)
from xformer.runs.recipe import Recipe
from xformer.runs.run_directory import RunDirectory
from xformer.runs.tasks import LanguageModelTask, Task, TranslationTask
from xformer.runs.trainer import Trainer
from xformer.training.events import Average, Progress, Update, Validation
from xformer.training.loss import language_model_loss, translation_loss
from xformer.training.optimizers import SGD, Adafactor, Adam, AdamW, Optimizer
from xformer.training.schedules import constant, cosine, inverse_square_root, linear
from xformer.training.step import clip_by_global_norm, train_step

__all__ = [
    "SGD",
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
    "Task",
    "TextChunks",
    "TextTokenizerSettings",
    "TokenPairs",
    "TokenizerSettings",
    "Trainer",
    "TrainingSettings",
    "TranslationTask",
    "Update",
    "Validation",
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
