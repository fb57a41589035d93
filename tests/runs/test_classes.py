"""`xf.train_classifier` and `xformer classify`: classifiers from public encoders."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

import xformer as xf
from tests.reference import raises_line
from xformer.cli.main import exit_code
from xformer.errors import CheckpointError, ConfigError, DataError, ShapeError
from xformer.io import load_arrays
from xformer.pipelines.class_scores import class_scores, class_targets
from xformer.pipelines.export import export_run
from xformer.training.loss import classification_loss

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
metrics = pytest.importorskip("sklearn.metrics")
tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["good", "bad", "fine", "awful", "film", "book", "a", "the", "very", "it"]
TEXTS = [f"{a} {b} {c}" for a in WORDS[:4] for b in WORDS[4:6] for c in WORDS[6:]]
LABELS = ["yes" if text.split()[0] in ("good", "fine") else "no" for text in TEXTS]
SIZES = {
    "vocab_size": 15, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip
DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
DEBERTA |= {"norm_rel_ebd": "layer_norm", "share_att_key": True, "position_buckets": 8}
BASES = {
    "bert": ("BertModel", {}),
    "bert-mlm": ("BertForMaskedLM", {}),
    "roberta": ("RobertaModel", {"pad_token_id": 1}),
    "roberta-mlm": ("RobertaForMaskedLM", {"pad_token_id": 1}),
    "distilbert": ("DistilBertForMaskedLM", DISTIL),
    "modernbert": ("ModernBertModel", {"classifier_pooling": "mean"}),
    "modernbert-mlm": ("ModernBertForMaskedLM", {}),
    "electra": ("ElectraModel", {"embedding_size": 16}),
    "albert": ("AlbertModel", {"embedding_size": 8}),
    "mpnet": ("MPNetModel", {"pad_token_id": 1}),
    "deberta": ("DebertaV2Model", DEBERTA),
}  # fmt: skip


def write_base(directory, name="bert"):
    """Write a tiny random checkpoint without a classifier, and its tokenizer."""
    torch.manual_seed(0)
    kind, changes = BASES[name]
    cls = getattr(transformers, kind)
    sizes = {"vocab_size": 15, "max_position_embeddings": 40} if name == "distilbert" else SIZES
    cls(cls.config_class(**{**sizes, **changes})).eval().save_pretrained(directory)
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


def tune(base, out, texts=TEXTS, labels=LABELS, **options):
    options = {"epochs": 30, "learning_rate": 1e-2, "batch_tokens": 64, "max_length": 20, "seed": 1, **options}
    return xf.train_classifier(
        train=texts,
        train_labels=labels,
        valid=texts,
        valid_labels=labels,
        init=base,
        out=out,
        progress=False,
        **options,
    )


def logits_of(directory, ids):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0].numpy() for row in ids]


# --- New heads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BASES)
def test_a_base_checkpoint_gets_a_classifier_that_transformers_reads(tmp_path, caplog, name):
    directory = write_base(tmp_path / "base", name)
    model = xf.load_pretrained(directory, labels=["no", "yes", "maybe"])
    assert "classifier.weight" in caplog.text
    assert "train the model before use" in caplog.text
    again = xf.load_pretrained(directory, num_labels=3)
    np.testing.assert_array_equal(model.classifier.weight, again.classifier.weight)
    states = xf.load_pretrained(directory)([[2, 5, 3]])
    np.testing.assert_allclose(model([[2, 5, 3]]), states, atol=1e-6)
    xf.save_pretrained(model, tmp_path / "tuned")
    ids = [[2, 5, 6, 3], [2, 9, 3], [2, 12, 11, 10, 13, 3]]
    np.testing.assert_allclose(model.class_logits(ids), logits_of(tmp_path / "tuned", ids), atol=2e-5)
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "yes", "2": "maybe"}
    assert config["label2id"] == {"no": 0, "yes": 1, "maybe": 2}


def test_a_classifier_of_as_many_classes_is_kept(tmp_path, base, caplog):
    xf.save_pretrained(xf.load_pretrained(base, labels=["a", "b"]), tmp_path)
    caplog.clear()
    kept = xf.load_pretrained(tmp_path, labels=["c", "d"])
    assert (kept.config.labels, caplog.text) == (("c", "d"), "")
    other = xf.load_pretrained(tmp_path, num_labels=1)
    assert other.config.problem_type == "regression"
    assert "classifier.weight" in caplog.text


def test_logits_of_ids_in_any_form(base):
    model = xf.load_pretrained(base, num_labels=2)
    expected = np.concatenate([model.class_logits(model([row])) for row in ([2, 5, 3], [2, 5, 6, 3])])
    for ids in (
        [[2, 5, 3], [2, 5, 6, 3]],
        ((2, 5, 3), (2, 5, 6, 3)),
        [np.array([2, 5, 3]), np.array([2, 5, 6, 3])],
        np.array([[2, 5, 3, 0], [2, 5, 6, 3]]),
    ):
        np.testing.assert_allclose(model.class_logits(ids), expected, atol=1e-6)
    mask = np.array([[True, True, True, False], [True] * 4])
    for library in filter(importlib.util.find_spec, ("numpy", "torch", "jax")):
        found = model.to(library).class_logits([[2, 5, 3, 9], [2, 5, 6, 3]], mask=mask)
        np.testing.assert_allclose(np.asarray(found), expected, atol=1e-6)
    without_padding = model.with_config(pad_id=None).class_logits([[2, 5, 3], [2, 5, 6, 3]])
    np.testing.assert_allclose(without_padding, expected, atol=1e-6)
    for text in ("good film", ["good film"], [["good"]]):
        with raises_line(ShapeError, "token ids are text; expected integers"):
            model.class_logits(text)
    with raises_line(ShapeError, r"have shape \(2,\); expected \(batch, length\)"):
        model.class_logits([2, 3])
    with raises_line(ConfigError, "this model has no classifier"):
        xf.load_pretrained(base).class_logits([[2, 3]])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"labels": "ab"}, DataError, "labels is a single text"),
        ({"labels": ["a", "a"]}, ConfigError, "expected num_labels, 2, different names"),
        ({"labels": ["a"], "num_labels": 2}, ConfigError, "expected num_labels, 2, different names"),
        ({"num_labels": 0}, ConfigError, "num_labels is 0; expected an integer of at least 1"),
        ({"problem_type": "regression"}, ConfigError, "num_labels is 0"),
        ({"num_labels": 2, "problem_type": "x"}, CheckpointError, "problem_type is 'x'"),
    ],
)
def test_wrong_classes_are_refused(base, options, kind, message):
    for load in (xf.load_pretrained, xf.Classifier.from_pretrained):
        with raises_line(kind, message):
            load(base, **options)


def test_models_without_a_classifier_say_so(tmp_path):
    config = xf.LanguageModelConfig(
        vocab_size=9, d_model=8, num_heads=2, d_ff=8, num_layers=1, positions="learned", scale_embeddings=False
    )
    xf.save_pretrained(xf.LanguageModel(config), tmp_path / "gpt", model_type="gpt2")
    with raises_line(
        CheckpointError, "models of type gpt2 have no classifier; num_labels and labels expect an encoder"
    ):
        xf.load_pretrained(tmp_path / "gpt", num_labels=2)


def test_models_say_which_dropout_they_have(base):
    model = xf.load_pretrained(base)
    assert "dropout 0; model.with_config(dropout=0.1) sets another rate" in repr(model)
    assert "dropout 0.1;" in repr(model.with_config(dropout=0.1))


# --- Training ---------------------------------------------------------------------------------------------------------


def test_a_trained_classifier_is_exported(base, tmp_path):
    run = tune(base, tmp_path / "run", patience=5)
    scores = run.pipeline.evaluate(TEXTS, LABELS)
    assert scores.values["accuracy"] == 100.0
    assert run.pipeline.labels == ["no", "yes"]
    best = [event for event in run.history if event["event"] == "validation" and event["best"]][-1]
    assert (best["score"], best["metric"]) == (100.0, "accuracy")
    assert exit_code(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    ids = run.pipeline.token_ids(TEXTS[:3])
    expected = logits_of(tmp_path / "hf", ids)
    np.testing.assert_allclose(run.pipeline.class_logits(TEXTS[:3]), expected, atol=1e-5)
    np.testing.assert_allclose(run.pipeline.class_logits(ids), expected, atol=1e-5)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert (config.id2label, config.architectures) == ({0: "no", 1: "yes"}, ["BertForSequenceClassification"])


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(base, tmp_path):
    tune(base, tmp_path / "whole", max_steps=6)
    tune(base, tmp_path / "part", max_steps=6, callbacks=[lambda event, loop: event.step == 3 and event.name == "step"])
    xf.resume(tmp_path / "part", progress=False)
    first, second = (load_arrays(tmp_path / name / "last.safetensors")[0] for name in ("whole", "part"))
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def test_adapters_and_the_new_layer_are_trained(base, tmp_path):
    run = tune(base, tmp_path / "run", lora=2)
    assert run.pipeline.evaluate(TEXTS, LABELS).values["accuracy"] == 100.0
    trained, before = xf.Encoder.load(tmp_path / "run" / "model.safetensors"), xf.load_pretrained(base)
    np.testing.assert_array_equal(trained.embedding.weight, before.embedding.weight)
    assert not np.array_equal(
        trained.layers[0].self_attention.query.weight, before.layers[0].self_attention.query.weight
    )
    names = [name for name in load_arrays(tmp_path / "run" / "adapters.safetensors")[0] if ".lora_" not in name]
    assert sorted(names) == ["classifier.bias", "classifier.weight"]
    tune(base, tmp_path / "whole", lora=2, max_steps=4)
    stop = {"callbacks": [lambda event, loop: event.step == 2 and event.name == "step"]}
    tune(base, tmp_path / "part", lora=2, max_steps=4, **stop)
    xf.resume(tmp_path / "part", progress=False)
    first, second = (load_arrays(tmp_path / name / "last.safetensors")[0] for name in ("whole", "part"))
    assert {name: x.tobytes() for name, x in first.items()} == {name: x.tobytes() for name, x in second.items()}
    assert exit_code(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    expected = logits_of(tmp_path / "hf", run.pipeline.token_ids(TEXTS[:3]))
    np.testing.assert_allclose(run.pipeline.class_logits(TEXTS[:3]), expected, atol=1e-5)
    with pytest.raises(ConfigError, match=r"trained classifier\.\w+, too, which is no adapter; use --format hugging"):
        export_run(tmp_path / "run", tmp_path / "adapters", "peft")


def test_regression_and_several_labels(base, tmp_path):
    values = [float(label == "yes") + 0.5 * ("film" in text) for text, label in zip(TEXTS, LABELS, strict=True)]
    run = tune(base, tmp_path / "values", labels=values, problem_type="regression")
    scores = run.pipeline.evaluate(TEXTS, values)
    assert scores.values["R2"] > 80.0
    found = [each.probability for each in run.pipeline(TEXTS)]
    assert scores.values["R2"] == pytest.approx(100 * metrics.r2_score(values, found), rel=1e-4)
    both = [[name for name in ("film", "good", "very") if name in text] for text in TEXTS]
    run = tune(base, tmp_path / "several", labels=both, problem_type="multi_label_classification", epochs=60)
    assert run.pipeline.labels == ["film", "good", "very"]
    assert run.pipeline.evaluate(TEXTS, both).values["accuracy"] > 90.0
    (found,) = run.pipeline(["good film it"])
    assert [name for name, value in found.probabilities.items() if value > 0.5] == ["film", "good"]


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_the_losses_are_those_of_transformers(base, tmp_path, library):
    pytest.importorskip(library)
    ids, generator = [[2, 5, 3], [2, 5, 6, 3]], np.random.default_rng(0)
    for problem, labels in (
        ("single_label_classification", np.array([[2], [0]])),
        ("multi_label_classification", np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], np.float32)),
        ("regression", generator.normal(size=(2, 3)).astype(np.float32)),
    ):
        model = xf.load_pretrained(base, num_labels=3, problem_type=problem)
        xf.save_pretrained(model, tmp_path / problem)
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / problem).eval()
        tokens, mask = torch.tensor([[2, 5, 3, 0], [2, 5, 6, 3]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
        given = torch.tensor(labels[:, 0] if problem.startswith("single") else labels)
        expected = theirs(tokens, attention_mask=mask, labels=given).loss.item()
        batch = xf.training.Batch(
            np.array([[2, 5, 3, 0], ids[1]]), labels, labels, np.array([[3, labels.shape[1]]] * 2)
        )
        loss = classification_loss(model.to(library), batch)
        assert float(loss) / batch.num_tokens == pytest.approx(expected, rel=1e-5)


def test_scores_are_those_of_scikit_learn():
    generator = np.random.default_rng(0)
    logits, names = generator.normal(size=(50, 4)), ["a", "b", "c", "d"]
    labels = generator.integers(0, 3, 50)
    found = class_scores(logits, labels[:, None], names, "single_label_classification")
    predicted = logits.argmax(axis=1)
    np.testing.assert_array_equal(found.confusion, metrics.confusion_matrix(labels, predicted, labels=range(4)))
    assert found.values["accuracy"] == pytest.approx(100 * metrics.accuracy_score(labels, predicted))
    assert found.values["macro F1"] == pytest.approx(100 * metrics.f1_score(labels, predicted, average="macro"))
    several = generator.integers(0, 2, (50, 4))
    found = class_scores(logits, several, names, "multi_label_classification")
    assert found.values["macro F1"] == pytest.approx(100 * metrics.f1_score(several, logits > 0, average="macro"))
    assert found.values["micro F1"] == pytest.approx(100 * metrics.f1_score(several, logits > 0, average="micro"))
    assert found.values["accuracy"] == pytest.approx(100 * metrics.accuracy_score(several, logits > 0))
    assert str(class_scores(logits[:2], np.array([[0], [1]]), names, "single_label_classification")).count("\n") == 8
    targets = class_targets(["a,c", "", "d"], names, "multi_label_classification", str)
    assert targets.tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]


# --- The command line and its errors ----------------------------------------------------------------------------------


def test_the_command_trains_and_classifies(base, tmp_path, capsys, monkeypatch):
    lines = [f"{label}\t{text}\tmore" for text, label in zip(TEXTS, LABELS, strict=True)]
    (tmp_path / "train.tsv").write_text("\n".join(["label\tsentence\tnote", *lines]) + "\n")
    (tmp_path / "texts").write_text("\n".join(TEXTS) + "\n")
    (tmp_path / "labels").write_text("\n".join(LABELS) + "\n")
    run, options = str(tmp_path / "run"), ["--max-length", "20", "--batch-tokens", "64", "--learning-rate", "0.01"]
    assert exit_code(["classify", "--train", f"{tmp_path}/train.tsv", "--init", str(base), "--out", run, *options]) == 0
    shown = capsys.readouterr().out
    steps = "steps: at most 60 (--max-steps), a validation with held-out data (--valid-share) after every 6;"
    for part in ("training: 29 texts, validation: 3 texts", "no, yes", steps, "dropout: 0.1", "macro F1", "confusion"):
        assert part in shown
    files = ["--test", f"{tmp_path}/texts", "--test-labels", f"{tmp_path}/labels", "--output", f"{tmp_path}/found"]
    assert exit_code(["classify", "--model", run, *files]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert exit_code(["classify", "--model", run, "--input", f"{tmp_path}/texts"]) == 0
    assert capsys.readouterr().out == (tmp_path / "found").read_text()
    with (tmp_path / "texts").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        assert exit_code(["classify", "--model", run]) == 0
    assert capsys.readouterr().out == (tmp_path / "found").read_text()
    assert exit_code(["classify", "--model", run, "--input", f"{tmp_path}/train.tsv"]) == 2
    assert "train.tsv has lines with tabs; expected texts alone; --test has labels, too" in capsys.readouterr().err
    (tmp_path / "test").write_text("good film\tyes\nbad film\tnope\n")
    assert exit_code(["classify", "--model", run, "--test", f"{tmp_path}/test"]) == 2
    assert "test line 2 has the unknown label 'nope'" in capsys.readouterr().err
    label, probability = (tmp_path / "found").read_text().splitlines()[0].split("\t")
    assert label in ("no", "yes")
    assert 0.5 <= float(probability) <= 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("good film\tyes\nbad film", "train line 2 has 0 tabs; expected a text, a tab and its label in each line"),
        ("good film\tyes\nbad\tfilm\tno", "train line 2 has 2 tabs"),
        ("good film\tyes\n\n \tno", "train line 3 has no text"),
        ("good film\tyes\nbad film\t ", "train line 2 has no label"),
        ("good film\tyes\nbad film\tyes\nit\tyes", r"the training set has the labels \['yes'\]; expected at least 2"),
        ("text\tlabel\n", "train has no texts"),
        ("\n".join(f"yes\t{n} film" for n in range(50)), "45 different labels for 45 texts; expected a text, a tab"),
    ],
)
def test_wrong_lines_are_refused(base, tmp_path, content, message):
    (tmp_path / "train").write_text(content + "\n")
    with raises_line(DataError, message):
        xf.train_classifier(train=tmp_path / "train", init=base, out=tmp_path / "run", max_length=20, progress=False)
    assert not (tmp_path / "run").exists()


def test_training_has_a_text_of_each_label(base, tmp_path, caplog):
    rare = [*zip(TEXTS, LABELS, strict=True), ("it", "other"), ("review", "sentiment")]
    options = {"init": base, "max_length": 20, "max_steps": 1, "valid_share": 0.6, "progress": False}
    for seed in range(3):
        run = xf.train_classifier(train=rare, out=tmp_path / f"{seed}", seed=seed, **options)
        assert run.pipeline.labels == ["no", "other", "sentiment", "yes"]
    assert "labels of one text: " in caplog.text
    assert "sentiment (train line 34)" in caplog.text


def test_wrong_calls_are_refused(base, tmp_path, capsys):
    pairs = list(zip(TEXTS, LABELS, strict=True))
    options = {"init": base, "out": tmp_path / "run", "max_length": 20, "progress": False}
    with raises_line(DataError, "valid line 1 has the unknown label 'yess'; did you mean 'yes'"):
        xf.train_classifier(train=pairs, valid=[("good film", "yess")], **options)
    with raises_line(DataError, "has the unknown label 'yes'; did you mean 'yep'"):
        xf.train_classifier(train=pairs, labels=["yep", "no"], **options)
    for row in (("a film", None), ("a film", np.float64("nan"))):
        with raises_line(DataError, "train line 33 has no label"):
            xf.train_classifier(train=(each for each in [*pairs, row]), **options)  # a generator of pairs
    with raises_line(DataError, "train line 2 has 1 tab; expected a text without tabs, as its label is in the other"):
        xf.train_classifier(train=["it", "a\tyes"], train_labels=["yes", "no"], **options)
    with raises_line(DataError, "train_labels has 2 lines for 32 texts; expected one each"):
        xf.train_classifier(train=TEXTS, train_labels=["yes", "no"], **options)
    with raises_line(DataError, "train line 2 has the value 'x'; expected a number"):
        xf.train_classifier(train=[("it", 1.5), ("a", "x")], problem_type="regression", valid_share=0.4, **options)
    with raises_line(ConfigError, "init is missing; expected the directory of an encoder"):
        xf.train_classifier(train=pairs, out=tmp_path / "run", progress=False)
    classifier = xf.Classifier.from_pretrained(base, labels=["no", "yes"])
    with raises_line(DataError, "labels has 1 entries for 2 inputs"):
        classifier.evaluate(["a", "it"], ["yes"])
    for arguments, message in (
        ([], "expected --train to train a classifier, or --model to classify texts"),
        (["--model", str(base), "--input", "x", "--epochs", "2"], "--epochs is for --train"),
        (["--train", "x", "--input", "y"], "--input is for --model"),
        (["--train", "x"], "--out is missing"),
        (["--model", str(base), "--input", "x", "--test", "y"], "expected --input FILE to classify texts, or --test"),
        (["--model", str(base), "--input", "x", "--test-labels", "y"], "expected --input FILE to classify texts, or"),
    ):
        assert exit_code(["classify", *arguments]) == 2
        assert message in capsys.readouterr().err
    with raises_line(CheckpointError, "does not exist"):
        xf.train_classifier(train=pairs, **{**options, "init": tmp_path / "none"})
