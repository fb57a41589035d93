"""Score a classifier: accuracy, F1 and the confusion matrix, or the errors of a regression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.errors import DataError, nearest_hint

SEPARATOR = ","  # of the labels of a text
# The score of each problem type that chooses the best model.
METRICS = {"single_label_classification": "accuracy", "multi_label_classification": "macro F1", "regression": "R2"}


class ClassScores(NamedTuple):
    """Scores of a classifier; `print` shows them as a table.

    Attributes:
        values: "accuracy" and "macro F1" in percent; for several labels a text, which count as one for the accuracy,
            "micro F1", too; for regression "R2", in percent of the variance, and "mean squared error".
        labels: Names of the classes.
        confusion: Number of texts of each label (rows) and prediction (columns); None unless a text has one label.
    """

    values: dict[str, float]
    labels: Sequence[str]
    confusion: Any = None

    def __str__(self) -> str:
        lines = [f"{name:<20}{value:8.2f}" for name, value in self.values.items()]
        if self.confusion is not None:
            rows = [["label", *self.labels], *([n, *r] for n, r in zip(self.labels, self.confusion, strict=True))]
            widths = [max(len(str(x)) for x in column) for column in zip(*rows, strict=True)]
            lines += ["", "confusion matrix: a row for each label, a column for each prediction"]
            lines += ["  ".join(f"{x!s:>{width}}" for x, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(lines)


def class_targets(values: Sequence[Any], names: Sequence[str], problem_type: str, place: Callable[[int], str]) -> Any:
    """Return the labels of texts: numbers of classes (texts, 1), rows of 0 and 1 for several, or values (texts, 1).

    Args:
        values: The label of each text: a name, or a value; for several labels a list, or names with commas between.
        names: Names of the classes.
        problem_type: That of the model.
        place: Describes the place of a text in errors.

    Raises:
        DataError: For a label that is none of the names, or a value that is not a number.
    """
    known = {name: index for index, name in enumerate(names)}
    targets: Any = np.zeros((len(values), len(names)), np.float32)
    for row, value in enumerate(values):
        if problem_type == "regression":
            try:
                targets[row] = float(value)
            except (TypeError, ValueError):
                targets[row] = np.nan
            if not np.isfinite(targets[row, 0]):
                raise DataError(f"{place(row)} has the value {value!r:.60}; expected a number")
            continue
        for name in labels_of(value, problem_type):
            if name not in known:
                raise DataError(f"{place(row)} has the unknown label {name!r:.60}; {nearest_hint(name, known)}")
            targets[row, known[name]] = 1
    is_single = problem_type == "single_label_classification"
    return np.argmax(targets, axis=1, keepdims=True) if is_single else targets


def labels_of(value: Any, problem_type: str) -> list[str]:
    """Return the names of the labels of one text."""
    if problem_type != "multi_label_classification":
        return [str(value)]
    names = value.split(SEPARATOR) if isinstance(value, str) else map(str, value)
    return [name.strip() for name in names if name.strip()]


def class_scores(logits: Any, targets: Any, labels: Sequence[str], problem_type: str) -> ClassScores:
    """Return the scores of logits (texts, num_labels), a NumPy array, and the targets of `class_targets`."""
    if problem_type == "regression":
        error = float(np.mean((logits.astype(np.float64) - targets) ** 2))
        r2 = 100.0 * (1.0 - error / max(float(np.var(targets)), 1e-12))
        return ClassScores({"R2": r2, "mean squared error": error}, labels)
    one, is_single = np.eye(len(labels), dtype=bool), problem_type == "single_label_classification"
    chosen, applies = (one[logits.argmax(axis=1)], one[targets[:, 0]]) if is_single else (logits > 0, targets > 0)
    hits, sums = (chosen & applies).sum(axis=0), chosen.sum(axis=0) + applies.sum(axis=0)
    values = {
        "accuracy": (chosen == applies).all(axis=1).mean(),
        "macro F1": np.mean(2.0 * hits[sums > 0] / sums[sums > 0]) if sums.any() else 0.0,
    }
    if not is_single:
        values["micro F1"] = 2.0 * hits.sum() / max(1, sums.sum())
    confusion = applies.T.astype(np.int64) @ chosen if is_single else None
    return ClassScores({name: 100.0 * float(value) for name, value in values.items()}, labels, confusion)
