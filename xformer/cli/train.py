"""`xformer train`: train a model on parallel text."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.cli._console import plural
from xformer.cli._options import (
    DATA,
    RECIPE,
    BackendOption,
    DistributedOption,
    InitOption,
    LoggerOption,
    OutOption,
    RecipeOption,
    SetRecipeOption,
    config_options,
    file_option,
    open_backend,
    option_name,
)
from xformer.cli._training import INIT_HELP, TrainingJob, initial_tokenizer_files, load_initial_model, start_run
from xformer.distributed import Communicator
from xformer.errors import ConfigError
from xformer.families.run_directory import RunDirectory
from xformer.models import Transformer
from xformer.pipelines import Attention, Tokenizers, show_attention
from xformer.pipelines.base import check_vocabulary
from xformer.pipelines.tokenizers import CheckpointTokenizers
from xformer.runs.config import TokenizerConfig, TrainingConfig
from xformer.runs.evaluation import PIPELINES, EncodedCorpus, ValidationScore
from xformer.runs.recipe import Recipe, error_context
from xformer.runs.tasks import TASKS, TranslationTask, build_model
from xformer.text import ParallelCorpus, read_parallel
from xformer.text.metrics import bleu_tokenizer
from xformer.training.data_parallel import default_num_workers
from xformer.training.interrupt import check_stop

_NUM_SAMPLES, _MAX_SHOWN = 5, 30  # for loggers: outputs, and tokens of a plot of attention

HELP = f"""Train a translation model on parallel text: two files, line n of one translating line n of the other. With \
--task summarization, train a summarizer: documents, one per line, and their summaries.

Learns a vocabulary, trains, validates at regular intervals, and writes to DIR the best model (model.safetensors), the \
last state (last.safetensors), the tokenizers, the configuration (config.json) and log.jsonl. All input is checked \
before anything is written. The state is saved every few minutes and on Ctrl-C; `xformer resume DIR` continues from it.

\b
A first run of 25 minutes (30 by default):
  xformer train --source train.de --target train.en \\
    --valid-source val.de --valid-target val.en --out run --max-minutes 25
With a recipe, and two of its settings changed:
  xformer train --source train.de --target train.en \\
    --valid-source val.de --valid-target val.en --out run \\
    --recipe my.toml --seed 1 --set training.warmup_steps=4000
Fine-tune a public checkpoint:
  xformer train --source train.de --target train.en \\
    --valid-source val.de --valid-target val.en --init opus-mt-de-en --out run
Continue it, and train longer:
  xformer resume run --max-minutes 60

\b
A recipe has a task and three tables; options override it:
  \\[model]      d_model, num_heads, d_ff, num_encoder_layers, dropout, ...
  \\[tokenizer]  vocab_size, model = "bpe" | "words" | "characters", joint, ...
  \\[training]   batch_tokens, learning_rate_factor, warmup_steps, ...

Train with 8 processes, on one or more hosts:
  mpiexec -n 8 xformer train RECIPE-AND-FILES --out run --distributed mpi

{INIT_HELP}"""


@config_options(
    TrainingConfig,
    TokenizerConfig,
    names=[
        *("max_minutes", "max_steps", "vocab_size", "lowercase", "max_length", "truncation"),
        "bleu_tokenize",
        *("seed", "dtype", "precision"),
    ],
    default_of="the recipe's",
)
def train(
    out: OutOption,
    source: Annotated[Path | None, file_option("--source", "Training text, source side.")] = None,
    target: Annotated[Path | None, file_option("--target", "Training text, target side.")] = None,
    valid_source: Annotated[Path | None, file_option("--valid-source", "Validation text, source side.")] = None,
    valid_target: Annotated[Path | None, file_option("--valid-target", "Validation text, target side.")] = None,
    init: InitOption = None,
    source_language: Annotated[
        str | None, typer.Option(help="Language of the sources, for --init with many languages.", rich_help_panel=DATA)
    ] = None,
    target_language: Annotated[str | None, typer.Option(help="Language of the targets.", rich_help_panel=DATA)] = None,
    recipe: RecipeOption = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="translation|summarization",
            help="Task; for summarization the source is one document per line and the target its summary. "
            "\\[default: the recipe's, or translation]",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    overrides: SetRecipeOption = None,
    logger: LoggerOption = None,
    distributed: DistributedOption = None,
    *,
    settings: dict[str, Any],
    backend: BackendOption = "numpy",
) -> int:
    """Train a model on parallel text."""
    files = {"source": source, "target": target, "valid_source": valid_source, "valid_target": valid_target}
    options: dict[str, Any] = {"settings": settings, "overrides": overrides, "backend": backend, "task": task}
    options |= {"loggers": logger, "distributed": distributed}
    options["init"] = {"path": init, "source_language": source_language, "target_language": target_language}
    return start_run(ParallelTrainingJob, out, files, recipe=recipe, **options)


@dataclass(frozen=True)
class ParallelTrainingJob(TrainingJob):
    """Training on pairs of texts."""

    tasks = ("translation", "summarization")
    required = ("source", "target", "valid_source", "valid_target")
    unit = "target tokens"

    tokenizer_pair: Tokenizers | CheckpointTokenizers
    train: EncodedCorpus
    valid: EncodedCorpus

    @classmethod
    def prepare(
        cls, recipe: Recipe, backend: str, files: Mapping[str, Path], run: RunDirectory | None
    ) -> ParallelTrainingJob:
        """Read the files and make the job; `run` is the run to be resumed, if any."""
        xp = open_backend(backend, recipe.training.dtype, recipe.training.precision)
        train = read_parallel(files["source"], files["target"])
        valid = read_parallel(files["valid_source"], files["valid_target"])
        names = [files[name] for name in cls.required]
        tokenizers = _initial_tokenizers(recipe, run)
        job = cls.make(recipe, train, valid, xp=xp, backend=backend, names=names, tokenizers=tokenizers)
        job.task()  # raises an error if the package that computes the score is missing
        return job

    @classmethod
    def make(
        cls,
        recipe: Recipe,
        train: ParallelCorpus,
        valid: ParallelCorpus,
        *,
        xp: Any,
        backend: str,
        names: Sequence[Any],
        tokenizers: Tokenizers | CheckpointTokenizers | None = None,
    ) -> ParallelTrainingJob:
        """Train the tokenizers, unless given, encode the text, and make the model.

        Args:
            recipe: The recipe.
            train: Training text.
            valid: Validation text.
            xp: Array namespace of the model.
            backend: Its name.
            names: Names for errors of training source and target, validation source and target.
            tokenizers: Tokenizers of a run to be resumed.

        Raises:
            DataError: If the text does not fit the recipe.
            ConfigError: If the vocabulary does not.
        """
        with error_context("[tokenizer]"):
            tokenizers = tokenizers or Tokenizers.train(train, **recipe.tokenizer.to_dict())
        settings = recipe.training
        encode = functools.partial(
            EncodedCorpus.encode, tokenizers=tokenizers, max_length=settings.max_length, truncation=settings.truncation
        )
        encoded, encoded_valid = encode(train, names=names[:2]), encode(valid, names=names[2:])
        model = _make_model(recipe, tokenizers, xp)
        tokenize = settings.bleu_tokenize
        if recipe.task == "translation":
            tokenize = tokenize or bleu_tokenizer(recipe.init.target_language or Path(names[3]).suffix[1:])
        elif tokenize is not None:
            raise ConfigError(f"bleu_tokenize is {tokenize!r}, but {recipe.task} is not scored by BLEU; leave it out")
        # The last bits of the results depend on the number of shards, so it is part of the run.
        num_shards = settings.data_parallel or default_num_workers(model)
        recipe = recipe.with_training(data_parallel=num_shards, bleu_tokenize=tokenize)
        return cls(recipe, model, backend, tokenizers, encoded, encoded_valid)

    def task(self, score: ValidationScore | None = None, communicator: Communicator | None = None) -> TranslationTask:
        """Return the task for a Trainer; the score defaults to that of the task."""
        score = score or ValidationScore(
            self.valid,
            self.tokenizer_pair,
            self.recipe.task,
            on_batch=check_stop,
            communicator=communicator,
            bleu_tokenize=self.recipe.training.bleu_tokenize or "13a",
        )
        return TranslationTask(
            self.model,
            self.train.pairs,
            self.valid.pairs,
            batch_tokens=self.recipe.training.batch_tokens,
            score=score,
            metric=score.name,
        )

    def tokenizers(self) -> Mapping[str, Any]:
        """Return the tokenizers by their names in a run directory."""
        return self.tokenizer_pair.by_side()

    def counts(self) -> dict[str, int]:
        """Return the sizes of the data."""
        source_tokens, target_tokens = self.train.num_tokens
        return {
            "train_pairs": len(self.train.pairs),
            "train_source_tokens": source_tokens,
            "train_target_tokens": target_tokens,
            "train_target_words": sum(len(line.split()) for line in self.train.text.target),
            "train_pairs_dropped_blank": self.train.text.num_dropped - self.train.num_long,
            "train_pairs_dropped_long": self.train.num_long,
            "train_sources_cut": self.train.num_cut,
            "valid_pairs": len(self.valid.pairs),
            "valid_pairs_dropped_blank": self.valid.text.num_dropped - self.valid.num_long,
            "valid_pairs_dropped_long": self.valid.num_long,
            "valid_sources_cut": self.valid.num_cut,
        }

    def samples(self, model: Any, task: Any) -> list[dict[str, str]]:
        """Return the first outputs of the last validation."""
        text, outputs = self.valid.text, task.score.outputs[:_NUM_SAMPLES]
        rows = zip(text.source, outputs, text.target, strict=False)
        return [{"source": source, "output": output, "reference": target} for source, output, target in rows]

    def attention(self, model: Transformer) -> Attention:
        """Return the attention of the model for the first short validation pair."""
        pipeline, pairs = PIPELINES[self.recipe.task](model, self.tokenizer_pair), self.valid.pairs
        lengths = [max(map(len, pair)) for pair in zip(pairs.source, pairs.target, strict=True)]
        row = next((row for row, length in enumerate(lengths) if length <= _MAX_SHOWN), lengths.index(min(lengths)))
        return show_attention(pipeline, [*pairs.source[row], *pipeline.suffix], pairs.target[row])

    def describe_data(self) -> Iterator[str]:
        """Yield lines that describe the data."""
        for name, corpus in (("training", self.train), ("validation", self.valid)):
            yield f"{name}: {plural(len(corpus.pairs), TASKS[self.recipe.task].unit)}{_describe_dropped(corpus)}"
        if (tokenize := self.recipe.training.bleu_tokenize) not in (None, "13a"):
            yield f"validation by BLEU with the tokenizer {tokenize} of sacreBLEU"


def _initial_tokenizers(recipe: Recipe, run: RunDirectory | None) -> Tokenizers | CheckpointTokenizers | None:
    """Return the tokenizers of a run to be resumed, or of the model to start from; None for those to be trained."""
    init, (run, pretrained) = recipe.init, initial_tokenizer_files(recipe, run)
    if pretrained is not None:
        return CheckpointTokenizers.load(pretrained, recipe.task, init.source_language, init.target_language)
    for name in ("source_language", "target_language"):
        if getattr(init, name) is not None:
            raise ConfigError(f"{option_name(name)} applies to public checkpoints; omit it for a run of xformer")
    return None if run is None else Tokenizers.load(run)


def _make_model(recipe: Recipe, tokenizers: Tokenizers | CheckpointTokenizers, xp: Any) -> Transformer:
    """Return a new model, or the one that the recipe names."""
    if recipe.init.path is None:
        return build_model(recipe, tokenizers, xp)
    model: Transformer = load_initial_model(recipe, Transformer, xp)
    check_vocabulary("source tokenizer", tokenizers.source, model.config.source_vocab_size)
    check_vocabulary("target tokenizer", tokenizers.target, model.config.target_vocab_size)
    return model


def _describe_dropped(corpus: EncodedCorpus) -> str:
    blank = corpus.text.num_dropped - corpus.num_long
    reasons = [f"{blank:,} with a blank side"] if blank else []
    reasons += [f"{corpus.num_long:,} too long"] if corpus.num_long else []
    notes = [f"dropped: {', '.join(reasons)}"] if reasons else []
    notes += [f"truncated: {plural(corpus.num_cut, 'source')}"] if corpus.num_cut else []
    return f" ({'; '.join(notes)})" if notes else ""
