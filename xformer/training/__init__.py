"""Training: batches, the objective, optimizers, schedules, the step and the loop around it."""

from xformer.training.batches import Batch, TokenPairs
from xformer.training.events import Progress, Update, Validation
from xformer.training.loss import translation_loss
from xformer.training.optimizers import Adam
from xformer.training.recipe import Recipe, TokenizerSettings, TrainingSettings
from xformer.training.run_directory import RunDirectory
from xformer.training.schedules import cosine, inverse_square_root
from xformer.training.step import clip_by_global_norm, train_step
from xformer.training.trainer import Trainer

__all__ = [
    "Adam",
    "Batch",
    "Progress",
    "Recipe",
    "RunDirectory",
    "TokenPairs",
    "TokenizerSettings",
    "Trainer",
    "TrainingSettings",
    "Update",
    "Validation",
    "clip_by_global_norm",
    "cosine",
    "inverse_square_root",
    "train_step",
    "translation_loss",
]
