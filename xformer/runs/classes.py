"""Training of classifiers, from a public encoder and texts with labels."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from xformer.backends import from_host
from xformer.data.pairs import Batch, TokenPairs, epochs, plan_batches
from xformer.data.token_rows import TokenWriter
from xformer.distributed import Communicator
from xformer.errors import ConfigError, DataError, abbreviate
from xformer.families.run_directory import RunDirectory
from xformer.models import Encoder
from xformer.models.token_ids import pad
from xformer.pipelines import Attention, Classifier, show_attention
from xformer.pipelines.class_scores import METRICS, SEPARATOR, ClassScores, class_scores, class_targets, labels_of
from xformer.random import Rng
from xformer.runs.config import ClassTrainingConfig
from xformer.runs.console import plural
from xformer.runs.inputs import Files, paths_of
from xformer.runs.recipe import Recipe
from xformer.runs.tasks import MAX_SHOWN, Task, held_out, initial_tokenizer, load_initial_model
from xformer.text import read_lines
from xformer.training.loss import classification_loss
from xformer.tree import unfreeze, with_fields

_EXPECTED = "a text, a tab and its label in each line"
_COLUMNS = {"text": 0, "sentence": 0, "label": 1, "labels": 1}  # names in the first line, and what they are
_BREAKS = dict.fromkeys(map(ord, "\t\n\r"), " ")
_MANY = 20
_LOG = logging.getLogger("xformer")


class Examples(NamedTuple):
    """Texts, their labels as they are in the file, and file and line of each, for errors."""

    texts: Sequence[str]
    labels: Sequence[str]
    places: Sequence[str]

    @classmethod
    def read(cls, paths: Sequence[Path], label_paths: Sequence[Path], problem_type: str) -> Examples:
        """Read files of texts and labels with a tab between them, or a file for each.

        A first line may name the columns: "label" and "text"; others are then ignored. So are blank lines.

        Raises:
            DataError: For other lines, with the number of the line, and for files of different lengths.
        """
        lines = [(f"{path} line {n}", line) for path in paths for n, line in enumerate(read_lines(path), start=1)]
        rows, expected = [(place, line.split("\t")) for place, line in lines if line.strip()], _EXPECTED
        if label_paths:
            labels = [line for path in label_paths for line in read_lines(path)]
            if len(labels) != len(lines):
                raise DataError(f"{label_paths[0]} has {len(labels)} lines for {len(lines)} texts; expected one each")
            rows = [(place, [*line.split("\t"), label]) for (place, line), label in zip(lines, labels, strict=True)]
            expected = "a text without tabs, as its label is in the other file"
        names = [name.strip().lower() for name in rows[0][1]] if rows else []
        columns = {_COLUMNS[name]: index for index, name in enumerate(names) if name in _COLUMNS}
        has_names = len(columns) == 2
        text, label, count = (columns[0], columns[1], len(names)) if has_names else (0, 1, 2)
        found = []
        for place, fields in rows[has_names:]:
            if len(fields) != count:
                num_tabs = len(fields) - 1 - bool(label_paths)
                raise DataError(f"{place} has {plural(num_tabs, 'tab')}; expected {expected}")
            found.append((fields[text].strip(), fields[label].strip(), place))
            if not found[-1][0] or (not found[-1][1] and problem_type != "multi_label_classification"):
                raise DataError(f"{place} has no {'label' if found[-1][0] else 'text'}; expected {_EXPECTED}")
        if not found:
            raise DataError(f"{paths[0]} has no texts; expected {_EXPECTED}")
        return cls(*zip(*found, strict=True))


def as_lines(examples: Any) -> Any:
    """Return pairs of a text and its label, or one of both, as lines; keep paths and lines."""
    if isinstance(examples, str | bytes | PathLike | Mapping) or not isinstance(examples, Iterable):
        return examples
    pairs = ((each if isinstance(each, tuple) and len(each) == 2 else (None, each)) for each in examples)
    return [_text(y) if x is None else f"{str(x).translate(_BREAKS)}\t{_text(y)}" for x, y in pairs]


def _text(label: Any) -> Any:
    label = label.tolist() if hasattr(label, "tolist") else label
    if isinstance(label, list | set | tuple):
        return SEPARATOR.join(map(str, label))
    if label is None or label != label:  # NaN is a missing label, too
        return ""
    return label if isinstance(label, str | PathLike) else str(label)


@dataclass(eq=False)
class ClassTask(Task):
    """Training of a classifier on `TokenPairs` of texts and targets, see `class_targets`."""

    names = ("classification",)
    unit = "labels"
    loss = staticmethod(classification_loss)

    @classmethod
    def prepare(cls, recipe: Recipe, xp: Any, files: Files, directory: Path, run: RunDirectory | None = None) -> Self:
        """Read the files and make the task; see `Task.prepare`."""
        settings: ClassTrainingConfig = recipe.training
        problem = settings.problem_type
        if recipe.init.path is None:
            raise ConfigError("init is missing; expected the directory of an encoder")
        given = [(paths_of(files, name), paths_of(files, f"{name}_labels")) for name in ("train", "valid")]
        train, *others = (Examples.read(*paths, problem) for paths in given if paths[0])
        if is_held_out := not others:
            mask = held_out(settings, len(train.texts), "text")
            if problem != "regression":  # a text whose labels no other one has stays in training
                known = {name for each in compress(train.labels, ~mask) for name in labels_of(each, problem)}
                kept = mask & [known.issuperset(labels_of(each, problem)) for each in train.labels]
                mask = kept if kept.any() else mask
            parts = ((list(compress(column, each)) for column in train) for each in (~mask, mask))
            train, *others = (Examples(*part) for part in parts)
        tokenizer: Any = initial_tokenizer(recipe, run)
        names, sets = _class_names(train, settings), []
        for examples in (train, *others):
            targets = class_targets(examples.labels, names, problem, examples.places.__getitem__)
            with TokenWriter(tokenizer.vocab_size, directory) as writer:
                writer.write(tokenizer.encode_truncated(examples.texts, settings.max_length))
                sets.append(TokenPairs(writer.finish(), targets))
        recipe = recipe.with_training(labels=names).for_data(len(plan_batches(sets[0], settings.batch_tokens, None)))
        model = load_initial_model(recipe, Encoder, xp, num_labels=len(names), labels=names, problem_type=problem)
        if model.config.labels != names:
            raise ConfigError(f"{recipe.init.path} has the classes {model.config.labels}; expected {names}")
        if recipe.init.lora is not None:  # the new layer is trained as a whole
            model = with_fields(model, classifier=unfreeze(model.classifier))
        counts = {"train_texts": len(train.texts), "valid_texts": len(others[0].texts)}
        counts["texts_of_max_length"] = sum(len(ids) == settings.max_length for each in sets for ids in each.source)
        return cls(recipe, model, sets[0], sets[1], tokenizer, counts, is_held_out)

    def batches(self, rng: Rng, *, skip: int) -> Iterator[tuple[int, Batch]]:
        """Yield (epoch, batch) without end."""
        for epoch, rows in epochs(self.train, self.recipe.training.batch_tokens, rng, skip=skip):
            yield epoch, self._batch(self.train, rows)

    def validation_batches(self) -> list[Batch]:
        """Return the validation set, sorted by length."""
        plan = plan_batches(self.valid, self.recipe.training.batch_tokens, rng=None)
        return [self._batch(self.valid, rows) for rows in plan]

    def _batch(self, pairs: Any, rows: Sequence[int]) -> Batch:
        ids, targets = [pairs.source[row] for row in rows], pairs.target[rows]
        tokens, labels = (
            from_host(data=x, dtype=str(x.dtype), **self._array_options)
            for x in (np.asarray(pad(ids, self.model.config.pad_id)), targets)
        )
        return Batch(tokens, labels, labels, np.asarray([(len(each), targets.shape[1]) for each in ids]))

    @property
    def metric(self) -> str:
        """Name of the score."""
        return METRICS[self.recipe.training.problem_type]

    def score(self, model: Encoder, communicator: Communicator | None = None, *, is_trial: bool = False) -> float:
        """Return the score of the predictions for the validation set."""
        return self._scores(model).values[self.metric]

    def _scores(self, model: Encoder) -> ClassScores:
        classifier = Classifier(model, self.tokenizer)
        logits = classifier.class_logits(self.valid.source, batch_tokens=self.recipe.training.batch_tokens)
        return class_scores(logits, self.valid.target, classifier.labels, self.recipe.training.problem_type)

    def report(self, path: Path) -> Iterator[str]:
        """Yield the scores of the best model on the validation set."""
        yield from str(self._scores(Encoder.load(path, **self._array_options))).splitlines()

    def attention(self, model: Encoder) -> Attention:
        """Return the attention of the model for the shortest validation text."""
        return show_attention(Classifier(model, self.tokenizer), min(self.valid.source, key=len)[:MAX_SHOWN])

    def describe_data(self) -> Iterator[str]:
        """Yield lines that describe the data."""
        c, counts = self.recipe.training, self.counts
        yield f"training: {plural(counts['train_texts'], 'text')}, validation: {plural(counts['valid_texts'], 'text')}"
        if counts["texts_of_max_length"]:
            yield f"cut to max_length {c.max_length}: {plural(counts['texts_of_max_length'], 'text')}"
        if c.problem_type != "regression":
            more = f" and {len(c.labels) - _MANY} more" if len(c.labels) > _MANY else ""
            yield f"classes: {', '.join(c.labels[:_MANY])}{more}"


def _class_names(train: Examples, settings: ClassTrainingConfig) -> tuple[str, ...]:
    """Return the names of the classes: those of the settings, or of the training set, in order.

    Raises:
        DataError: If the training set has a single class, or almost as many as texts.
    """
    if settings.problem_type == "regression":
        return ("LABEL_0",)
    found = {name for label in train.labels for name in labels_of(label, settings.problem_type)}
    if len(found) < (least := 1 + (settings.problem_type != "multi_label_classification")):
        raise DataError(f"the training set has the labels {sorted(found)}; expected at least {least} different ones")
    if 2 * len(found) > len(train.texts) and len(found) > _MANY:
        problem = f"the training set has {len(found):,} different labels for {len(train.texts):,} texts"
        raise DataError(f"{problem}; expected {_EXPECTED}, or problem_type 'regression' for numbers")
    counts = Counter(train.labels)
    rare = [f"{y} ({Path(place).name})" for y, place in zip(train.labels, train.places, strict=True) if counts[y] == 1]
    if rare and least == 2:
        _LOG.warning("labels of one text: %s; columns are named text and label", abbreviate(", ".join(rare), 200))
    return settings.labels or tuple(sorted(found, key=lambda name: (len(name) if name.isdigit() else 0, name)))
