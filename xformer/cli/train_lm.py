"""`xformer train-lm`: train a language model on plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from xformer.cli._console import plural
from xformer.cli._options import (
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
)
from xformer.cli._training import INIT_HELP, TrainingJob, initial_tokenizer_files, load_initial_model, start_run
from xformer.distributed import Communicator
from xformer.errors import ConfigError
from xformer.families.run_directory import RunDirectory
from xformer.models import LanguageModel, LanguageModelConfig
from xformer.pipelines import Attention, TextGenerator, show_attention
from xformer.pipelines.base import check_vocabulary
from xformer.runs.config import LanguageModelTrainingConfig
from xformer.runs.recipe import Recipe, error_context
from xformer.runs.tasks import LanguageModelTask
from xformer.text import UNK_ID, PretrainedTokenizer, Tokenizer, load_tokenizer, read_text
from xformer.training.data_parallel import default_num_workers

_PROMPT_LENGTH, _NUM_SAMPLED = 32, 100  # tokens, for loggers

HELP = f"""Train a language model on plain text: a decoder-only Transformer that predicts each character, or token, \
from those before it.

Learns a vocabulary, trains, validates at regular intervals, and writes to DIR the best model (model.safetensors), the \
last state (last.safetensors), the tokenizer, the configuration (config.json) and log.jsonl. All input is checked \
before anything is written. The state is saved every few minutes and on Ctrl-C; `xformer resume DIR` continues from it.

\b
Tiny Shakespeare (input.txt, 1.1 million characters), two minutes on two CPU cores:
  xformer train-lm --text input.txt --out run \\
    --recipe docs/recipes/tinyshakespeare.toml
  xformer generate --model run --prompt "ROMEO:"
A text of your own, for 20 minutes (30 by default):
  xformer train-lm --text mine.txt --out run --max-minutes 20
Fine-tune a public checkpoint:
  xformer train-lm --text mine.txt --init SmolLM2-135M --out run
Continue it, and train longer:
  xformer resume run --max-minutes 60

The last tenth of the text is held out for validation (--valid-share), unless --valid-text names another text. The \
loss is in nats per token; perplexity is its exponential.

\b
A recipe has task = "language_modeling" and three tables; options override it:
  \\[model]      d_model, num_heads, d_ff, num_layers, positions, dropout, ...
  \\[tokenizer]  model = "characters" | "bpe", vocab_size, ...
  \\[training]   context_length, batch_size, learning_rate, schedule, optimizer, ...

{INIT_HELP}"""


@config_options(
    LanguageModelTrainingConfig,
    names=["valid_share", "max_minutes", "max_steps", "seed", "dtype", "precision"],
    default_of="the recipe's",
)
def train_lm(
    out: OutOption,
    text: Annotated[Path | None, file_option("--text", "Training text, used with its line ends.")] = None,
    valid_text: Annotated[Path | None, file_option("--valid-text", "Validation text.")] = None,
    init: InitOption = None,
    recipe: RecipeOption = None,
    overrides: SetRecipeOption = None,
    logger: LoggerOption = None,
    distributed: DistributedOption = None,
    *,
    settings: dict[str, Any],
    backend: BackendOption = "numpy",
) -> int:
    """Train a language model on plain text."""
    if valid_text is not None and "valid_share" in settings:
        raise ConfigError("--valid-text and --valid-share are both given; expected only one of them")
    files = {"text": text, "valid_text": valid_text}
    options: dict[str, Any] = {"settings": settings, "overrides": overrides, "backend": backend}
    options |= {"loggers": logger, "distributed": distributed}
    options["init"] = {"path": init}
    return start_run(LanguageModelTrainingJob, out, files, recipe=recipe, **options)


@dataclass(frozen=True)
class LanguageModelTrainingJob(TrainingJob):
    """Training on one long text.

    Attributes:
        tokenizer: Tokenizer.
        train: Token ids of the training text.
        valid: Token ids of the validation text.
        num_characters: Lengths of the training and validation text.
    """

    tasks = ("language_modeling",)
    required = ("text",)
    optional = ("valid_text",)
    unit = "tokens"

    tokenizer: Tokenizer | PretrainedTokenizer
    train: Any
    valid: Any
    num_characters: tuple[int, int]

    @classmethod
    def prepare(
        cls, recipe: Recipe, backend: str, files: Mapping[str, Path], run: RunDirectory | None
    ) -> LanguageModelTrainingJob:
        """Read the files and make the job; `run` is the run to be resumed, if any."""
        xp = open_backend(backend, recipe.training.dtype, recipe.training.precision)
        train = read_text(files["text"])
        if "valid_text" in files:
            valid = read_text(files["valid_text"])
        else:
            train, valid = split(train, recipe.training.valid_share)
        tokenizer = _initial_tokenizer(recipe, run)
        return cls.make(recipe, train, valid, xp=xp, backend=backend, tokenizer=tokenizer)

    @classmethod
    def make(
        cls,
        recipe: Recipe,
        train: str,
        valid: str,
        *,
        xp: Any,
        backend: str,
        tokenizer: Tokenizer | PretrainedTokenizer | None = None,
    ) -> LanguageModelTrainingJob:
        """Train the tokenizer, unless given, encode the text, and make the model.

        Raises:
            DataError: If the text is too short.
            ConfigError: If the vocabulary does not fit the recipe.
        """
        with error_context("[tokenizer]"):
            tokenizer = tokenizer or Tokenizer.train([train], **recipe.tokenizer.to_dict())
        ids = [np.asarray(_encode(tokenizer, text), dtype=np.int64) for text in (train, valid)]
        settings = recipe.training
        if recipe.init.path is None:
            config = LanguageModelConfig(vocab_size=tokenizer.vocab_size, **recipe.model)
            model = LanguageModel(config, xp=xp, seed=settings.seed, dtype=settings.dtype)
        else:
            model = load_initial_model(recipe, LanguageModel, xp)
            check_vocabulary("tokenizer", tokenizer, model.vocab_size)
        # The last bits of the results depend on the number of shards, so it is part of the run.
        recipe = recipe.with_training(data_parallel=settings.data_parallel or default_num_workers(model))
        job = cls(recipe, model, backend, tokenizer, ids[0], ids[1], (len(train), len(valid)))
        job.task()  # raises an error if the text is too short
        return job

    def task(self, *, communicator: Communicator | None = None) -> LanguageModelTask:
        """Return the task for a Trainer."""
        settings = self.recipe.training
        return LanguageModelTask(
            self.model, self.train, self.valid, context_length=settings.context_length, batch_size=settings.batch_size
        )

    def tokenizers(self) -> Mapping[str, Any]:
        """Return the tokenizer by its name in a run directory."""
        return {"joint": self.tokenizer}

    def counts(self) -> dict[str, int]:
        """Return the sizes of the data."""
        return {
            "train_characters": self.num_characters[0],
            "train_tokens": len(self.train),
            "valid_characters": self.num_characters[1],
            "valid_tokens": len(self.valid),
            "valid_tokens_unknown": self.num_unknown,
        }

    @property
    def num_unknown(self) -> int:
        """Number of tokens of the validation text that do not occur in the training text."""
        unk_id = UNK_ID if isinstance(self.tokenizer, Tokenizer) else self.tokenizer.unk_id
        return 0 if unk_id is None else int((self.valid == unk_id).sum())

    def samples(self, model: LanguageModel, task: Any) -> list[dict[str, str]]:
        """Return a continuation of the beginning of the validation text."""
        length = min(_PROMPT_LENGTH, len(self.valid) // 2, self.recipe.training.context_length // 2)
        prompt, rest = self.valid[:length].tolist(), self.valid[length : length + _NUM_SAMPLED].tolist()
        ((output,),) = self._generator(model).outputs([prompt], max_new_tokens=_NUM_SAMPLED, context="slide")
        decode = self.tokenizer.decode
        return [{"prompt": decode(prompt), "output": output.text, "reference": decode(rest)}]

    def attention(self, model: LanguageModel) -> Attention:
        """Return the attention of the model for the beginning of the validation text."""
        length = min(_PROMPT_LENGTH, self.recipe.training.context_length)
        return show_attention(self._generator(model), self.valid[:length].tolist())

    def _generator(self, model: LanguageModel) -> TextGenerator:
        return TextGenerator(model, self.tokenizer, context_length=self.recipe.training.context_length)

    def describe_data(self) -> Iterator[str]:
        """Yield lines that describe the data."""
        notes = ["", f", {self.num_unknown:,} of them unknown" if self.num_unknown else ""]
        texts = (self.train, self.valid)
        for name, count, ids, note in zip(("training", "validation"), self.num_characters, texts, notes, strict=True):
            tokens = "" if getattr(self.tokenizer, "model", None) == "characters" else f", {plural(len(ids), 'token')}"
            yield f"{name}: {plural(count, 'character')}{tokens}{note}"


def _initial_tokenizer(recipe: Recipe, run: RunDirectory | None) -> Tokenizer | PretrainedTokenizer | None:
    """Return the tokenizer of a run to be resumed, or of the model to start from; None for one to be trained."""
    run, pretrained = initial_tokenizer_files(recipe, run)
    if pretrained is not None:
        return load_tokenizer(pretrained)
    return None if run is None else run.load_tokenizer("joint")


def _encode(tokenizer: Tokenizer | PretrainedTokenizer, text: str) -> list[int]:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.encode_text(text)
    return tokenizer.encode(text, special_tokens=False)


def split(text: str, valid_share: float) -> tuple[str, str]:
    """Split off the end of a text for validation, a fraction of its characters, as nanoGPT does.

    >>> split("abcdefghij", 0.1)
    ('abcdefghi', 'j')
    """
    index = max(1, int(len(text) * (1.0 - valid_share)))
    return text[:index], text[index:]
