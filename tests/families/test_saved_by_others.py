"""Checkpoints that transformers, PEFT and sentence-transformers save here: computed as they do, or refused."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import xformer as xf
from tests.checkpoints import change_config
from tests.families.cases import BERT, CASES, DEBERTA, LLAMA, VIT
from xformer.errors import CheckpointError, ConfigError
from xformer.families.family import _FALSE, _HARMLESS, FAMILIES
from xformer.families.values import _UNTIED
from xformer.models import LanguageModel

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # imports torch and transformers
TEXTS = ["a man sleeps", "the dog runs on a bench", "dog", "a man and a dog and a bench and a man"]
TOKENS = np.asarray([[5, 17, 33, 8, 41, 12], [7, 44, 21, 9, 30, 4]])

# A case of each class of configurations; heads have no flags of their own.
FLAGGED = {each: name for name, (each, model, _) in CASES.items() if not re.search("Sequence|MaskedLM", model)}


def write_tokenizer(directory):
    """Write a tokenizer of words with special tokens of BERT."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *" ".join(TEXTS).split()]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    pair, special = "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)]
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=special)
    roles = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=names, **roles)
    tokenizer.save_pretrained(directory)


def save(config_class, model_class, directory, **values):
    """Save a random model of transformers with a tokenizer, and return it."""
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{"initializer_range": 0.5, **values})
    model = getattr(transformers, model_class)(config).eval()
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model


# --- Configurations ---------------------------------------------------------------------------------------------------


def default_config(model_type):
    """Return the configuration of a model type with the defaults of transformers."""
    return json.loads(json.dumps(transformers.AutoConfig.for_model(model_type).to_dict()))


def test_the_types_that_are_untied_by_default_are_those_of_transformers():
    language_models = {name for name, family in FAMILIES.items() if family.model is LanguageModel}
    untied = {name for name in FAMILIES if default_config(name).get("tie_word_embeddings") is False}
    assert set(_UNTIED.split()) == untied <= language_models


def test_keys_that_may_be_false_without_being_read_are_false_by_default():
    for name in FAMILIES:
        config = default_config(name)
        assert not [key for key in _FALSE.split() if config.get(key) is True]


@pytest.mark.parametrize("name", FLAGGED.values())
def test_flags_that_are_true_by_default_and_set_to_false_are_honored_or_refused(name, tmp_path):
    config_class, model_class, values = CASES[name]
    config = getattr(transformers, config_class)(**values).to_dict()
    harmless = set(_HARMLESS.split())
    for key in [key for key, value in config.items() if value is True and key not in harmless]:
        changed = {**{k: v for k, v in values.items() if k != key}, key: False}
        try:
            theirs = save(config_class, model_class, tmp_path / key, **changed)
        except (TypeError, ValueError):  # transformers refuses it
            continue
        try:
            ours = xf.load_pretrained(tmp_path / key)
        except CheckpointError:
            continue
        if isinstance(ours, LanguageModel):
            with torch.no_grad():
                expected = theirs(torch.asarray(TOKENS)).logits.numpy()
            mask = np.ones((1, 1), bool)
            error = np.max(np.abs(ours(TOKENS, mask=mask) - expected)) / np.max(np.abs(expected))
            assert error < 1e-4, key


@pytest.mark.parametrize(
    ("case", "output"), [("qwen2_tied", "lm_head"), ("gpt2", "lm_head"), ("gpt_neox", "embed_out")]
)
def test_a_model_without_its_output_matrix_is_refused(case, output, tmp_path):
    config_class, model_class, values = CASES[case]
    save(config_class, model_class, tmp_path, **{**values, "tie_word_embeddings": False})
    tensors = load_file(tmp_path / "model.safetensors")
    if f"{output}.weight" in tensors:
        assert xf.load_pretrained(tmp_path).output is not None
        del tensors[f"{output}.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"does not tie .* lacks the tensor {output}.weight; expected"):
        xf.load_pretrained(tmp_path)


@pytest.mark.parametrize("architecture", ["LlamaModel", "LlamaForCausalLM"])
def test_a_base_model_computes_states_and_no_logits(architecture, tmp_path):
    theirs = save("LlamaConfig", "LlamaModel", tmp_path, **LLAMA)
    change_config(tmp_path, architectures=[architecture])
    model = xf.load_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(torch.asarray(TOKENS)).last_hidden_state.numpy()
    np.testing.assert_allclose(model.states(TOKENS), expected, rtol=0, atol=1e-5 * np.max(np.abs(expected)))
    xf.save_pretrained(model, tmp_path / "saved")
    again = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        np.testing.assert_array_equal(again(torch.asarray(TOKENS)).last_hidden_state.numpy(), expected)
    for each in (model, xf.load_pretrained(tmp_path / "saved")):
        for call in (lambda each=each: each(TOKENS), lambda each=each: xf.generate(each, TOKENS, max_new_tokens=2)):
            with pytest.raises(ConfigError, match="the model has no output matrix, as its checkpoint has none; use"):
                call()


# --- Heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [True, False])
def test_masked_language_models_of_deberta_with_both_heads(legacy, tmp_path):
    theirs = save("DebertaV2Config", "DebertaV2ForMaskedLM", tmp_path, **{**DEBERTA, "legacy": legacy})
    with torch.no_grad():
        for bias in [x for name, x in theirs.named_parameters() if name.endswith("predictions.bias")]:
            bias.normal_()
        theirs.save_pretrained(tmp_path)
        expected = theirs(torch.asarray(TOKENS)).logits.numpy()
    model = xf.load_pretrained(tmp_path)
    logits = model.masked_lm_logits(model(TOKENS))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.max(np.abs(expected)))


@pytest.mark.parametrize(
    ("problem_type", "num_labels"),
    [(None, 1), (None, 3), ("multi_label_classification", 1), ("multi_label_classification", 3), ("regression", 3)],
)
def test_probabilities_of_texts_are_those_of_the_pipeline_of_transformers(problem_type, num_labels, tmp_path):
    values = {"num_labels": num_labels, "problem_type": problem_type}
    save("BertConfig", "BertForSequenceClassification", tmp_path, **BERT, **values)
    expected = transformers.pipeline("text-classification", str(tmp_path), top_k=None)(TEXTS)
    classifier = xf.Classifier.from_pretrained(tmp_path)
    xf.save_pretrained(classifier.model, tmp_path / "saved")
    write_tokenizer(tmp_path / "saved")
    for each in (classifier, xf.Classifier.from_pretrained(tmp_path / "saved")):
        check_predictions(each(TEXTS), expected)


@pytest.mark.parametrize("problem_type", [None, "regression"])
def test_probabilities_of_images_are_those_of_the_pipeline_of_transformers(problem_type, tmp_path):
    image = pytest.importorskip("PIL.Image")
    save("ViTConfig", "ViTForImageClassification", tmp_path, **VIT, num_labels=3, problem_type=problem_type)
    transformers.ViTImageProcessor(size={"height": 12, "width": 12}).save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 20, 30, 3), dtype=np.uint8)
    expected = transformers.pipeline("image-classification", str(tmp_path))([image.fromarray(each) for each in pixels])
    check_predictions(xf.ImageClassifier.from_pretrained(tmp_path)(list(pixels)), expected)


def check_predictions(predictions, expected):
    for prediction, row in zip(predictions, expected, strict=True):
        scores = {each["label"]: each["score"] for each in row}
        assert prediction.label == row[0]["label"]
        assert prediction.probability == pytest.approx(row[0]["score"], rel=1e-4, abs=1e-6)
        assert prediction.probabilities == pytest.approx(scores, rel=1e-4, abs=1e-6)


# --- sentence-transformers --------------------------------------------------------------------------------------------

_NAMES = {
    "Identity": "torch.nn.modules.linear.Identity",
    "Sigmoid": "torch.nn.modules.activation.Sigmoid",
    "Tanh": "torch.nn.modules.activation.Tanh",
}


@pytest.mark.parametrize(
    ("version", "activation"), [("before 4", "Identity"), ("before 4", "Sigmoid"), ("4 to 5", "Tanh"), ("6", "Tanh")]
)
def test_scores_of_cross_encoders_are_those_of_sentence_transformers(version, activation, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    save("BertConfig", "BertForSequenceClassification", tmp_path, **BERT, num_labels=1)
    directory = tmp_path
    if version == "before 4":
        change_config(tmp_path, sbert_ce_default_activation_function=_NAMES[activation])
    elif version == "4 to 5":
        change_config(tmp_path, sentence_transformers={"activation_fn": _NAMES[activation], "version": "4.1.0"})
    else:
        function = getattr(torch.nn, activation)()
        directory = tmp_path / "6"
        library.CrossEncoder(str(tmp_path), device="cpu", activation_fn=function).save_pretrained(str(directory))
    pairs = [(TEXTS[0], text) for text in TEXTS]
    expected = library.CrossEncoder(str(directory), device="cpu").predict(pairs)
    reranker = xf.Reranker.from_pretrained(directory)
    np.testing.assert_allclose(reranker.scores(pairs), expected, rtol=1e-4, atol=1e-6)
    assert [each.position for each in reranker(TEXTS[0], TEXTS)] == np.argsort(-expected).tolist()


@pytest.mark.parametrize(
    ("name", "values", "pooling"),
    [("Llama", {}, "mean"), ("Qwen3", {}, "lasttoken"), ("Mistral", {"is_causal": False}, "mean")],
)
def test_vectors_of_embedders_made_of_decoders_are_those_of_sentence_transformers(name, values, pooling, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    save(f"{name}Config", f"{name}Model", tmp_path, **LLAMA, **values)
    transformer = modules.Transformer(str(tmp_path), max_seq_length=12)
    parts = [transformer, modules.Pooling(24, pooling_mode=pooling), modules.Normalize()]
    theirs = library.SentenceTransformer(modules=parts, device="cpu")
    theirs.save_pretrained(str(tmp_path / "embedder"))
    vectors = xf.Embedder.from_pretrained(tmp_path / "embedder")(TEXTS)
    np.testing.assert_allclose(vectors, theirs.encode(TEXTS), rtol=0, atol=2e-6)


# --- PEFT -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("initialization", ["pissa_niter_4", "olora", "gaussian"])
def test_adapters_whose_initialization_changes_the_base_model_are_refused_unless_converted(initialization, tmp_path):
    peft = pytest.importorskip("peft")
    base = save("LlamaConfig", "LlamaForCausalLM", tmp_path / "base", **LLAMA)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": initialization}
    theirs = peft.get_peft_model(base, peft.LoraConfig(**options))
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "initial")
    theirs.peft_config["default"].init_lora_weights = initialization
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            if "lora_" in name:
                x += 0.1 * torch.randn_like(x)
        expected = theirs(torch.asarray(TOKENS)).logits.numpy()
    theirs.save_pretrained(tmp_path / "adapter")
    model, adapter = xf.load_pretrained(tmp_path / "base"), tmp_path / "adapter"
    if isinstance(initialization, str) and initialization.startswith(("pissa", "olora")):
        with pytest.raises(CheckpointError, match="which changes the weights of the base model; expected a plain"):
            xf.load_lora(model, adapter)
        options = {"path_initial_model_for_weight_conversion": str(tmp_path / "initial")}
        theirs.save_pretrained(tmp_path / "converted", **options)
        adapter = tmp_path / "converted"
    logits = xf.load_lora(model, adapter)(TOKENS, mask=np.ones((1, 1), bool))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.max(np.abs(expected)))
