"""Training: the step, the loop around it, losses, optimizers, schedules and callbacks."""

from xformer.data.packing import Documents, PackedBatch, TextChunks, pack_documents
from xformer.data.pairs import Batch, TokenPairs
from xformer.training import schedules
from xformer.training.callbacks import early_stopping, print_every, time_limit, validate
from xformer.training.checkpoint import load_parameters, save_parameters
from xformer.training.data_parallel import data_parallel
from xformer.training.events import Checkpoint, End, Event, History, Plan, Skip, Start, Step, Validation
from xformer.training.fit import Callback, TrainingLoop, fit
from xformer.training.inputs import FitConfig
from xformer.training.loggers import Logger, MLflow, TensorBoard, WeightsAndBiases, mlflow, tensorboard, wandb
from xformer.training.loss import dpo_loss, language_model_loss, mean_loss, sequence_log_probs, translation_loss
from xformer.training.optimizers import SGD, Adafactor, Adam, AdamW, Muon, Optimizer
from xformer.training.step import StepResult, clip_by_global_norm, train_step

__all__ = [
    "SGD", "Adafactor", "Adam", "AdamW", "Batch", "Callback", "Checkpoint", "Documents", "End", "Event", "FitConfig",
    "History", "Logger", "MLflow", "Muon", "Optimizer", "PackedBatch", "Plan", "Skip", "Start", "Step", "StepResult",
    "TensorBoard", "TextChunks", "TokenPairs", "TrainingLoop", "Validation", "WeightsAndBiases", "clip_by_global_norm",
    "data_parallel", "dpo_loss", "early_stopping", "fit", "language_model_loss", "load_parameters", "mean_loss",
    "mlflow", "pack_documents", "print_every", "save_parameters", "schedules", "sequence_log_probs", "tensorboard",
    "time_limit", "train_step", "translation_loss", "validate", "wandb",
]  # fmt: skip
