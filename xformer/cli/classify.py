r"""`xformer classify`: train a classifier of texts, and classify texts.

Fine-tune a public encoder, such as BERT or ModernBERT, as a classifier (with --train), or classify the lines of a file
with a run or a public classifier (with --model).

\b
Train; each line of the file has a text, a tab and its label:
  xformer classify --train train.tsv --init bert-base-uncased --out run
Texts and labels in two files, other validation texts, an early end:
  xformer classify --train train.txt --train-labels train.labels \
    --valid valid.tsv --init ModernBERT-base --out run --epochs 10 --patience 3
Several labels a text, with commas between them; or numbers:
  xformer classify --train topics.tsv --init bert-base-uncased --out run \
    --problem-type multi_label_classification
  xformer classify --train stars.tsv --init bert-base-uncased --out run --problem-type regression
Classify each line of a file; a line of the output has the label, a tab and its probability:
  xformer classify --model run --input texts --output labels
Compare with known labels:
  xformer classify --model run --test test.tsv
For transformers:
  xformer export run checkpoint

Training keeps the best model and prints its accuracy, macro F1 and confusion matrix. With --lora 8 it trains adapters
and the new layer only. A tenth of the texts, drawn at random and at most 1,000, is held out unless --valid names
others. The first line of a file may name its columns, "text" and "label". A
recipe has task = "classification" and the tables \[training], \[model] (dropout, 0.1 unless set) and \[init].
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from xformer.cli import _io
from xformer.cli._options import _model_option, config_options, file_option, launch_arguments, option_name, value_option
from xformer.cli.train import COMPUTING, TRAINING, finish
from xformer.errors import ConfigError, DataError
from xformer.pipelines import Classifier
from xformer.pipelines.class_scores import SEPARATOR, class_scores, class_targets
from xformer.pipelines.encoders import class_predictions
from xformer.runs import launch
from xformer.runs.classes import Examples
from xformer.runs.config import ClassTrainingConfig, InitConfig
from xformer.runs.console import make_console, progress_bar

_OPTIONS = ["lora", "problem_type", "labels", "epochs", "batch_tokens", "max_length", *TRAINING, *COMPUTING]
_PIECE = 256  # texts between updates of the progress bar
_PREDICTION = ("batch_tokens", "reproducible")  # settings that prediction has, too


@config_options(ClassTrainingConfig, InitConfig, names=_OPTIONS, default_of="the recipe's")
def classify(
    train: Annotated[Path | None, file_option("--train", "Training texts with their labels.")] = None,
    train_labels: Annotated[Path | None, file_option("--train-labels", "Their labels, one per line.")] = None,
    valid: Annotated[Path | None, file_option("--valid", "Validation texts with their labels.")] = None,
    valid_labels: Annotated[Path | None, file_option("--valid-labels", "Their labels.")] = None,
    out: Annotated[Path | None, value_option("--out", "DIR", "Directory of the run: new or empty.")] = None,
    model: Annotated[Path | None, _model_option("Directory of a run or of a public classifier.")] = None,
    source: Annotated[str | None, file_option("--input", "Texts, one per line; default: standard input.")] = None,
    test: Annotated[Path | None, file_option("--test", "Texts with their labels, to print scores.")] = None,
    test_labels: Annotated[Path | None, file_option("--test-labels", "Their labels.")] = None,
    output: Annotated[str | None, file_option("--output", "File to write; - is standard output.")] = None,
    *,
    training: dict[str, Any],
    settings: dict[str, Any],
) -> int:
    """Train a classifier, or classify texts."""
    files: dict[str, Any] = {"train": train, "train_labels": train_labels, "valid": valid, "valid_labels": valid_labels}
    used = {"input": source, "test": test, "test_labels": test_labels, "output": output}
    unused = {**files, "out": out, **training, "backend": None, **settings, **dict.fromkeys(_PREDICTION)}
    values = used if model is None else unused
    given = [option_name(name) for name, value in values.items() if value not in (None, ())]
    if (model is None) == (train is None) or given:
        found = f"; {given[0]} is for {'--model' if model is None else '--train'}" if given else ""
        raise ConfigError(f"expected --train to train a classifier, or --model to classify texts, not both{found}")
    if model is None:
        if out is None:
            raise ConfigError("--out is missing; expected the directory of the run")
        return finish(launch.train_classifier(**files, out=out, **launch_arguments(settings, training)))
    if (test is not None and source is not None) or (test is None and test_labels is not None):
        raise ConfigError("expected --input FILE to classify texts, or --test FILE to print scores")
    source = "-" if test is None and source is None else source
    if source is not None and _io.is_terminal(source):
        make_console(stderr=True).print("type a line; Ctrl-D ends the input")
    _io.check_output(output or "-", [source, test], model)
    classifier: Any = _io.load_pipeline(Classifier, model, training["backend"])
    problem_type = classifier.model.config.problem_type
    options = {name: settings[name] for name in ("batch_tokens",) if name in settings}
    chunks: Any = _io.read_chunks(source or "")
    if test is not None:
        examples = Examples.read([test], [test_labels] if test_labels else [], problem_type)
        targets = class_targets(examples.labels, classifier.labels, problem_type, examples.places.__getitem__)
        chunks = [examples.texts]
    chunks = chunks if _io.is_stream(source or "") else list(chunks)
    total, logits = sum(map(len, chunks)) if isinstance(chunks, list) else None, list[Any]()
    visible = output not in (None, _io.STANDARD) or not sys.stdout.isatty()
    with _io.open_output(output or "-") as write, progress_bar("classifying", total=total, visible=visible) as update:
        for texts in (chunk[start : start + _PIECE] for chunk in chunks for start in range(0, len(chunk), _PIECE)):
            if any("\t" in text for text in texts):
                name = _io.STANDARD_INPUT if source == _io.STANDARD else source
                raise DataError(f"{name} has lines with tabs; expected texts alone; --test has labels, too")
            logits.append(classifier.class_logits(texts, **options))
            if test is None or output is not None:
                predictions = class_predictions(logits[-1], classifier.labels, problem_type)
                write([_line(each, problem_type) for each in predictions])
            update(advance=len(texts))
    if test is not None:
        print(class_scores(np.concatenate(logits), targets, classifier.labels, problem_type))
    return 0


def _line(prediction: Any, problem_type: str) -> str:
    if problem_type == "regression":
        return f"{prediction.probability:.4f}"
    chosen = {prediction.label: prediction.probability}
    if problem_type == "multi_label_classification":
        chosen = {label: value for label, value in prediction.probabilities.items() if value > 0.5}
    return f"{SEPARATOR.join(chosen)}\t{SEPARATOR.join(f'{value:.4f}' for value in chosen.values())}"
