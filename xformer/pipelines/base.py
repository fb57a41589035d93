"""Base class of pipelines, which join a model with its tokenizers."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from xformer.backends import array_namespace, dtype_name
from xformer.errors import CheckpointError, ConfigError, DataError, describe_type, nearest_hint
from xformer.families import load_pretrained
from xformer.families.checkpoint import Progress, for_inference, is_public
from xformer.families.run_directory import RunDirectory
from xformer.generation import GenerationConfig
from xformer.html import Markup, table, tag
from xformer.io import StrPath
from xformer.models import BaseModel
from xformer.pipelines.output_text import Outputs
from xformer.text.normalize import check_texts
from xformer.threads import blas_threads, num_threads, parallel_map
from xformer.tokenizers import BaseTokenizer, load_tokenizer

# Description and pipelines of each class of models.
_MODELS = {
    "LanguageModel": ("a language model", "TextGenerator or Embedder"),
    "Transformer": ("an encoder-decoder", "Translator or Summarizer"),
    "SpeechTransformer": ("a speech model", "Transcriber"),
    "Encoder": ("an encoder", "Embedder, Classifier or Reranker"),
    "ImageEncoder": ("an image encoder", "ImageClassifier or load_pretrained"),
    "ImageTextEncoder": ("an encoder of images and texts", "ZeroShotImageClassifier or load_pretrained"),
}


class Pipeline:
    """A model, of a public checkpoint or a training run, with its tokenizer: base class of all pipelines.

    A subclass sets `task` and `model_classes`. It overrides `_from_checkpoint` if files have more than a tokenizer; one
    whose models xformer trains also defines `_from_run`.

    Attributes:
        task: Name of the task.
        model_classes: Classes of models that the pipeline takes; the first one is that of training runs.
        head_options: Options of `from_pretrained` that `load_pretrained` gets.
        generates_text: True if outputs are texts that the model generates token by token.
        has_source: True for an encoder-decoder, whose outputs are separate from its input.
        attention_kinds: Kinds of attention that the model has: "encoder", "decoder", "cross".
        model: The model.
        tokenizer: Its tokenizer.
    """

    task: ClassVar[str]
    model_classes: ClassVar[tuple[type[BaseModel], ...]]
    head_options: ClassVar[tuple[str, ...]] = ()
    generates_text: ClassVar[bool] = False
    has_source: ClassVar[bool] = False
    attention_kinds: tuple[str, ...] = ("encoder",)
    model: Any
    tokenizer: Any

    def __new__(cls, model: Any = None, *_arguments: Any, **_settings: Any) -> Self:
        """Refuse a path in place of a model."""
        if isinstance(model, str | os.PathLike):
            path = os.fspath(model)
            raise ConfigError(f"{cls.__name__} got {path!r}; expected a model, or use from_pretrained({path!r})")
        return super().__new__(cls)

    def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
        raise NotImplementedError

    @classmethod
    def from_pretrained(
        cls,
        directory: StrPath,
        xp: Any = "numpy",
        *,
        dtype: Any = None,
        quantize: str | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Self:
        """Load a public checkpoint, or the best model of a training run; nothing is downloaded.

        Args:
            directory: Directory of the checkpoint or the run, or a GGUF file.
            xp: Array library of the model, as a module or by name.
            dtype: dtype of the parameters. Default: that of the files; the quantized blocks of a GGUF file stay as they
                are on NumPy.
            quantize: "int8" or "bfloat16" to quantize the weights after loading, see `layers.quantize`. They are also
                packed (`layers.pack`): to train the model, use `model.unpack()`.
            progress: As for `load_pretrained`.
            **options: `source_language` and `target_language`, for public translation checkpoints; `num_labels`,
                `labels` and `problem_type` for `Classifier`, as for `load_pretrained`.

        Raises:
            CheckpointError: If a file is missing, damaged or from another run, or the model is of another class.
            ConfigError: If the run is of another task, or for unknown options.
        """
        head = {name: options.pop(name) for name in cls.head_options if name in options}
        known = [*inspect.signature(cls._from_checkpoint).parameters][2:]  # after model and directory
        for name in options.keys() - known:
            loaders = (inspect.signature(each.from_pretrained).parameters for each in (cls, Pipeline))
            names = {*known, *itertools.chain(*loaders)} - {"directory", "options"}
            raise ConfigError(f"unknown argument {name!r}; {nearest_hint(name, names)}")
        if is_public(directory):
            options_of_model = {"quantize": quantize, "xp": xp, "dtype": dtype, "progress": progress, **head}
            model = load_pretrained(directory, pack=True, **options_of_model)
            if type(model) not in cls.model_classes:
                name, pipelines = _MODELS[type(model).__name__]
                expected = " or ".join(_MODELS[each.__name__][0] for each in cls.model_classes)
                raise CheckpointError(f"{directory} has {name}; {cls.__name__} expects {expected}; use {pipelines}")
            return cls._from_checkpoint(model, Path(directory), **options)
        run = RunDirectory(Path(directory))
        config = run.read_config_for(cls.task)
        pretrained = run.pretrained_files()
        if others := [*head, *(options if pretrained is None else ())]:
            raise ConfigError(f"{others[0]} applies to public checkpoints; omit it for a run of xformer")
        trained = for_inference(cls.model_classes[0].load(run.model, xp=xp, dtype=dtype), quantize, pack=True)
        if pretrained is None:
            return cls._from_run(trained, run, config)
        init = config["recipe"]["init"]
        languages = {name: init.get(name) for name in known if init.get(name) is not None}
        return cls._from_checkpoint(trained, pretrained, **{**languages, **options})

    @classmethod
    def _from_run(cls, model: Any, run: RunDirectory, config: dict[str, Any]) -> Self:
        """Return the pipeline of a model, with the tokenizers and settings of its run."""
        raise NotImplementedError

    @classmethod
    def _from_checkpoint(cls, model: Any, directory: Path) -> Self:
        """Return the pipeline of a public checkpoint, with its tokenizers and settings."""
        return cls(model, load_tokenizer(directory))

    @property
    def source_tokenizer(self) -> Any:
        """Tokenizer of sources, prompts or texts."""
        return self.tokenizer

    @property
    def target_tokenizer(self) -> Any:
        """Tokenizer of outputs."""
        return self.tokenizer

    @property
    def has_chat(self) -> bool:
        """True if prompts may be chats: the tokenizer has a chat template."""
        return False

    def token_ids(self, texts: Any) -> list[list[int]]:
        """Return the token ids of each text."""
        raise NotImplementedError

    def input_ids(self, text: Any) -> list[int]:
        """Return the token ids of one text as the model receives them; none for a blank text."""
        return self.token_ids([text])[0]

    def _run_batches(self, function: Callable[[Any], Any], batches: Iterable[Any]) -> Iterator[Any]:
        """Yield function(batch) for each batch, in order; a NumPy model works on several ones in parallel threads."""
        allowed = num_threads()
        threads = allowed if array_namespace(self.model._parameter).name == "numpy" else 1
        remaining = iter(batches)
        while group := list(itertools.islice(remaining, threads)):
            # The matrix products of generation are small: threads inside them cost more than they gain, above all on a
            # busy machine, where one of them waits for another at every token.
            with blas_threads(allowed // len(group)):
                results = parallel_map(function, group)
            yield from results

    # --- Descriptions -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        lines = "".join(f"  {name}={value},\n" for name, value in self._describe().items())
        return f"{type(self).__name__}(\n{lines})"

    def _repr_html_(self) -> str:
        """Return the attributes and the model for notebooks."""
        rows = [(name, value) for name, value in self._describe().items() if name != "model"]
        return tag("b", type(self).__name__) + table((), rows) + Markup(self.model._repr_html_())

    def _describe(self) -> dict[str, str]:
        """Return short descriptions of the public attributes that are set."""
        model = self.model
        array = model._parameter
        origin = f"{dtype_name(array.dtype)}, {array_namespace(array).name}"
        shown = {name: value for name, value in vars(self).items() if name != "model" and not name.startswith("_")}
        others = {name: repr(value) for name, value in shown.items() if value not in (None, [])}
        return {"model": f"{type(model).__name__}({model.parameter_count():,} parameters, {origin})", **others}


class GenerationPipeline(Pipeline):
    """A pipeline from text to text. A subclass defines `outputs`."""

    generates_text = True

    def outputs(self, texts: Sequence[str], config: GenerationConfig | None = None, **options: Any) -> Outputs:
        """Return the outputs for each text, best first."""
        raise NotImplementedError

    def __call__(self, texts: Sequence[str], config: GenerationConfig | None = None, **options: Any) -> list[Any]:
        """Generate text for each text: `translator(["Ein Mann schläft ."], num_beams=5)`.

        Args:
            texts: Source texts or prompts. A blank source gets an empty output; an empty prompt is treated as a line
                break.
            config: Settings. Default: greedy search, or the default of the pipeline.
            **options: Arguments of `outputs`, and fields of `GenerationConfig`.

        Returns:
            One output per text, in order; with num_return_sequences above 1 a list of outputs per text, best first.

        Raises:
            DataError: For invalid texts, before any output is generated.
            ConfigError: For invalid or contradictory settings.
        """
        outputs = self.outputs(texts, config, **options)
        results = [[output.text for output in each] or [""] for each in outputs]
        count = options.get("num_return_sequences", 1 if config is None else config.num_return_sequences)
        return results if count > 1 else [each[0] for each in results]

    def _phrases(self, sequence_bias: Any, count: int) -> list[list[list[list[int]]]] | None:
        """Return the favored phrases of each of `count` texts as token ids, for `generate`; None without any."""
        if isinstance(sequence_bias, str):
            raise DataError(f"sequence_bias is the text {sequence_bias!r}; expected a list of words or phrases")
        if not sequence_bias:
            return None
        phrase_ids = self.target_tokenizer.phrase_ids
        if isinstance(sequence_bias, Iterable) and all(isinstance(phrase, str) for phrase in sequence_bias):
            return [[phrase_ids(phrase) for phrase in sequence_bias]] * count
        rows = one_per_text("sequence_bias", sequence_bias, count)
        for phrases in rows:
            check_texts(phrases, "sequence_bias")
        return [[phrase_ids(phrase) for phrase in phrases] for phrases in rows]


def check_class(name: str, value: Any, *classes: type) -> None:
    """Raise ConfigError unless an argument of a pipeline is an instance of one of the classes."""
    if not isinstance(value, classes):
        expected = " or ".join(each.__name__ for each in classes)
        raise ConfigError(f"{name} is {describe_type(value)}; expected an instance of {expected}")


def check_vocabulary(name: str, tokenizer: BaseTokenizer, vocab_size: int) -> None:
    """Raise CheckpointError unless a tokenizer fits its model; public ones may leave rows of the embedding unused."""
    size = tokenizer.vocab_size  # takes long for a large vocabulary
    fits = tokenizer.directory is not None and size <= vocab_size
    if size != vocab_size and not fits:
        raise CheckpointError(f"the {name} has {size} tokens, the model {vocab_size}; expected both from the same run")


def one_per_text(name: str, values: Sequence[Any], count: int) -> list[Any]:
    """Return the values as a list; raise DataError for a wrong number of them."""
    if not hasattr(values, "__len__") or len(values) != count:
        received = f"{len(values)} entries" if hasattr(values, "__len__") else f"type {type(values).__name__}"
        raise DataError(f"{name} has {received} for {count} texts; expected one for each, or one for all")
    return list(values)
