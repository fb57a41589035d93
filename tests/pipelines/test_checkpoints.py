"""Pipelines on directories in the Hugging Face format: tiny random models with word-level tokenizers."""

import inspect
import json
import pickle

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers.processors import TemplateProcessing

import xformer as xf
from tests.checkpoints import change_config, checkpoint
from tests.reference import raises_line
from xformer.cli.main import exit_code
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.pipelines import pipeline_class


@pytest.fixture
def llama(tmp_path):
    template = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}assistant :"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    return checkpoint(tmp_path, "llama", tokenizer_config=config, generation_config={"eos_token_id": [2, 5]})


@pytest.fixture
def marian(tmp_path):
    config = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    generation = {"num_beams": 2, "max_length": 12, "bad_words_ids": [[60]]}
    return checkpoint(tmp_path, "marian", tokenizer_config=config, generation_config=generation)


@pytest.fixture
def bert(tmp_path):
    return checkpoint(tmp_path, "bert", tokenizer_config={"model_max_length": 6})


def test_text_is_generated_until_any_end_token_and_streamed(llama):
    generator = xf.TextGenerator.from_pretrained(llama)
    ids = generator.token_ids(["a man"])[0]
    assert ids[0] == 1
    ((output,),) = generator.outputs(["a man"], max_new_tokens=30)
    logits = generator.model
    tokens = list(ids)
    for _ in range(30):
        token = int(np.argmax(logits([tokens])[0, -1]))
        if token in (2, 5):
            break
        tokens.append(token)
    assert output.tokens == tokens[len(ids) :]
    assert "".join(generator.stream("a man", max_new_tokens=30)) == output.text
    assert generator([ids], max_new_tokens=30) == [output.text]


def test_chats_use_the_template_of_the_checkpoint(llama):
    generator = xf.TextGenerator.from_pretrained(llama)
    chat = [{"role": "user", "content": "the dog runs"}]
    words = generator.tokenizer.tokens(generator.token_ids([chat])[0])
    assert words == ["user", ":", "the", "dog", "runs", "assistant", ":"]
    assert len(generator([chat], max_new_tokens=3)) == 1
    for prompts in (chat, [1, 2]):
        with pytest.raises(DataError, match=r"prompts is a single chat or .*; expected a list of them: \[\[\{"):
            generator(prompts)


def test_settings_of_the_checkpoint_are_defaults_that_a_caller_replaces(marian):
    translator = xf.Translator.from_pretrained(marian)
    assert translator.defaults.num_beams == 2
    assert translator.defaults.max_new_tokens == 11
    assert translator.defaults.suppress_tokens == (60,)
    ((first, second),) = translator.outputs(["a man sleeps"], num_return_sequences=2)
    assert first.score >= second.score
    assert first.score == pytest.approx(first.log_probability / (len(first.tokens) + first.finished))
    (greedy,) = translator.outputs(["a man sleeps"], num_beams=1)
    assert len(greedy) == 1


def test_vectors_are_means_of_the_states_of_all_tokens(bert):
    texts = ["a man sleeps", "dog", "the dog runs on a bench"]
    vectors = xf.Embedder.from_pretrained(bert)(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    embedder = xf.Embedder.from_pretrained(bert)
    assert embedder.token_ids(texts)[2][-1] == 2  # cut to 6 tokens, with the last special token
    assert len(embedder.token_ids(texts)[2]) == 6
    for text, vector in zip(texts, vectors, strict=True):
        states = embedder.model(embedder.token_ids([text]))[0]
        mean = states.mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)
    np.testing.assert_array_equal(embedder.encode(texts), vectors)
    for options, hint in (({"batch_size": 2}, "use batch_tokens"), ({"normalize_embeddings": True}, "use normalize")):
        with pytest.raises(ConfigError, match=f"Embedder got an unknown argument '{next(iter(options))}'; {hint}"):
            embedder.encode(texts, **options)
    assert embedder([]).shape == (0, 24)
    np.testing.assert_array_equal(embedder.encode("dog", truncate_dim=5), embedder(["dog"], truncate_dim=5)[0])
    with pytest.raises(DataError, match="texts has type generator; expected a list of texts"):
        embedder(text for text in texts)
    with raises_line(ConfigError, r"Embedder got 'MiniLM'; expected a model, or use from_pretrained\('MiniLM'\)"):
        xf.Embedder("MiniLM")
    assert pickle.loads(pickle.dumps(embedder)).max_length == embedder.max_length
    for use in (
        lambda: xf.generate(embedder, [[1]]),
        lambda: xf.lora(embedder),
        lambda: xf.save_pretrained(embedder, bert),
        lambda: xf.record(embedder).__enter__(),
        lambda: xf.fit(embedder, len, [], num_tokens=len, optimizer=xf.SGD(), learning_rate=1.0, steps=1),
    ):
        with raises_line(ConfigError, r"(model is|record got) an Embedder \(pass its .model\); expected a"):
            use()


def test_pooling_follows_the_files_of_sentence_transformers(bert):
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling")]
    (bert / "modules.json").write_text(json.dumps(modules))
    (bert / "1_Pooling").mkdir()
    (bert / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    embedder = xf.Embedder.from_pretrained(bert)
    assert (embedder.pooling, embedder.normalize) == ("cls", False)
    np.testing.assert_allclose(embedder(["dog"])[0], embedder.model(embedder.token_ids(["dog"]))[0, 0], atol=1e-6)
    for modules, match in (
        ("Transformer Pooling CNN", r"has Transformer, Pooling, CNN; expected Transformer, Pooling, Dense, "),
        ("Transformer Normalize Pooling", r"has Transformer, Normalize, Pooling; expected .*, in this order"),
    ):
        write_modules(bert, modules)
        with pytest.raises(CheckpointError, match=match):
            xf.Embedder.from_pretrained(bert)


def write_modules(directory, kinds):
    """Write modules.json of sentence-transformers."""
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": paths.get(kind, f"{i}_{kind}"),
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds.split())
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    for module in modules:
        (directory / module["path"]).mkdir(exist_ok=True)


def write_dense(directory, in_features, out_features, activation="torch.nn.modules.activation.Tanh", bias=True):
    """Write a Dense module of sentence-transformers, and return its weight and bias."""
    rng = np.random.default_rng(0)
    tensors = {"linear.weight": rng.normal(size=(out_features, in_features)).astype("f4")}
    if bias:
        tensors["linear.bias"] = rng.normal(size=out_features).astype("f4")
    values = {"in_features": in_features, "out_features": out_features, "bias": bias, "activation_function": activation}
    (directory / "config.json").write_text(json.dumps(values))
    save_file(tensors, directory / "model.safetensors")
    return tensors["linear.weight"], tensors.get("linear.bias", 0.0)


def test_maps_follow_pooling_and_vectors_are_truncated_before_they_are_normalized(bert):
    write_modules(bert, "Transformer Pooling Dense Dense Normalize")
    (bert / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    first = write_dense(bert / "2_Dense", 24, 16)
    second = write_dense(bert / "3_Dense", 16, 7, "torch.nn.modules.linear.Identity", bias=False)
    embedder, texts = xf.Embedder.from_pretrained(bert), ["a man sleeps", "dog"]
    expected = [
        second[0] @ np.tanh(first[0] @ embedder.model(embedder.token_ids([text]))[0].mean(axis=0) + first[1])
        for text in texts
    ]

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    np.testing.assert_allclose(embedder(texts), unit(expected), atol=1e-6)
    assert embedder([]).shape == (0, 7)
    np.testing.assert_allclose(embedder(texts, truncate_dim=3), unit(np.asarray(expected)[:, :3]), atol=1e-6)
    options = {"dense": embedder.dense, "normalize": False, "truncate_dim": 5}
    short = xf.Embedder(embedder.model, embedder.tokenizer, **options)
    np.testing.assert_allclose(short(texts), np.asarray(expected)[:, :5], atol=1e-5)
    assert (short([]).shape, short(texts, truncate_dim=2).shape) == ((0, 5), (2, 2))
    for size, match in (
        (8, "truncate_dim is 8; expected at most 7"),
        (0, "truncate_dim is 0"),
        (2.5, "truncate_dim is"),
    ):
        with pytest.raises(ConfigError, match=match):
            embedder(texts, truncate_dim=size)
    with pytest.raises(ConfigError, match=r"dense\[0\] has a weight of shape \(16, 7\); expected 24 in_features"):
        xf.Embedder(embedder.model, embedder.tokenizer, dense=embedder.dense[1:])
    write_dense(bert / "3_Dense", 16, 7, "torch.nn.modules.activation.Softplus")
    with pytest.raises(CheckpointError, match="has the activation 'Softplus'; expected one of Tanh, ReLU"):
        xf.Embedder.from_pretrained(bert)


@pytest.mark.parametrize("xp", ["numpy", "array_api_strict"])
def test_vectors_of_language_models_are_the_last_states(tmp_path, xp):
    pytest.importorskip(xp)
    directory = checkpoint(tmp_path, "qwen3")
    write_modules(directory, "Transformer Pooling Normalize")
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    assert pipeline_class(directory) is xf.Embedder
    embedder = xf.Embedder.from_pretrained(directory, xp, dtype="float32")
    assert (embedder.pooling, embedder.normalize) == ("lasttoken", True)
    texts = ["a man sleeps", "dog", "the dog runs on a bench"]
    vectors, model = embedder(texts), xf.load_pretrained(directory)
    for text, vector in zip(texts, vectors, strict=True):
        (ids,) = embedder.token_ids([text])
        assert ids[-1] == 2
        last = model.states([ids])[0, -1]
        np.testing.assert_allclose(vector, last / np.linalg.norm(last), atol=1e-5)
    np.testing.assert_allclose(
        model.states([ids]) @ dict(model.named_parameters())["output.weight"], model([ids]), atol=1e-5
    )
    assert embedder.attention_kinds == ("decoder",)
    short = xf.Embedder(embedder.model, embedder.tokenizer, pooling="lasttoken", max_length=4)
    assert [ids[-1] for ids in short.token_ids(texts)] == [2, 2, 2]
    assert max(map(len, short.token_ids(texts))) == 4


@pytest.mark.slow  # imports torch and transformers
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("pooling", "include_prompt"),
    [
        ({"pooling_mode_mean_tokens": True}, True),
        ({"pooling_mode_mean_tokens": True}, False),
        ({"pooling_mode": "cls"}, False),
        ({"pooling_mode": "lasttoken"}, False),
    ],
)
def test_vectors_are_those_of_sentence_transformers(bert, pooling, include_prompt):
    library = pytest.importorskip("sentence_transformers")
    write_modules(bert, "Transformer Pooling Dense Normalize")
    write_dense(bert / "2_Dense", 24, 16)
    files = {
        "1_Pooling/config.json": {"word_embedding_dimension": 24, **pooling, "include_prompt": include_prompt},
        "sentence_bert_config.json": {"max_seq_length": 9, "do_lower_case": True},
        "config_sentence_transformers.json": {
            "prompts": {"query": "The dog : ", "document": ""}, "default_prompt_name": "query",
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]",
            "pad_token": "[PAD]", "unk_token": "<unk>",
        },
    }  # fmt: skip
    for name, values in files.items():
        (bert / name).write_text(json.dumps(values))
    theirs = library.SentenceTransformer(str(bert), device="cpu")
    ours = xf.Embedder.from_pretrained(bert)
    texts = ["A MAN Sleeps", "dog [SEP] bench", "the dog runs on a bench on a bench on a bench", ""]
    for options in ({}, {"prompt": "a man : "}, {"prompt": ""}, {"prompt_name": "document"}, {"prompt_name": "query"}):
        np.testing.assert_allclose(ours.encode(texts, **options), theirs.encode(texts, **options), atol=2e-6)
    short = theirs.encode(texts, truncate_dim=5, normalize_embeddings=True)
    np.testing.assert_allclose(ours(texts, truncate_dim=5), short, atol=2e-6)
    np.testing.assert_array_equal(ours(["A CAT"]), ours(["a cat"]))
    assert np.abs(ours(["dog"]) - ours(["dog"], prompt="")).max() > 0.01


LEFT = {"truncation_side": "left"}
LONG = ["the dog runs on a bench on a man", "a man", "", "dog : user : assistant : word1 word2 word3"]
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]",
    "unk_token": "<unk>", "model_max_length": 9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "module"),
    [
        (LEFT, {}),
        ({}, {"tokenizer_args": LEFT, "max_seq_length": 5}),
        (LEFT, {"processor_kwargs": {"truncation_side": "right", "model_max_length": 6}, "max_seq_length": 5}),
        ({}, {"model_args": {"torch_dtype": "float32"}, "do_lower_case": True, "max_seq_length": None}),
    ],
)
def test_texts_are_cut_as_in_sentence_transformers(bert, caplog, settings, module):
    library = pytest.importorskip("sentence_transformers")
    write_modules(bert, "Transformer Pooling")
    pooling = {"word_embedding_dimension": 24, "pooling_mode_cls_token": True}
    (bert / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (bert / "tokenizer_config.json").write_text(json.dumps({**TOKENIZER, **settings}))
    (bert / "sentence_bert_config.json").write_text(json.dumps(module))
    expected = library.SentenceTransformer(str(bert), device="cpu").encode(LONG)
    np.testing.assert_allclose(xf.Embedder.from_pretrained(bert)(LONG), expected, atol=2e-6)
    assert caplog.messages == []


# The fate of each key of sentence_bert_config.json; those that are followed are in the test above.
FOLLOWED = {"max_seq_length", "do_lower_case", "processor_kwargs", "tokenizer_args"}
REFUSED = {
    "transformer_task": "fill-mask", "config_kwargs": {"is_causal": False}, "config_args": {"is_causal": False},
    "processing_kwargs": {"text": {"truncation": False}},
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "query_expansion": {"length": 5}, "tokenizer_name_or_path": "other",
}  # fmt: skip
NAMED = {
    "query_length": 5, "document_length": 5, "model_kwargs": {"output_attentions": True},
    "model_args": {"output_attentions": True}, "unknown": 1,
}  # fmt: skip
NO_EFFECT = {"module_output_name", "unpad_inputs", "backend"}


def test_each_key_of_sentence_transformers_is_followed_refused_or_named(bert, caplog):
    library = pytest.importorskip("sentence_transformers.base.modules.transformer").Transformer
    keys = {*inspect.signature(library.__init__).parameters} - {"self", "model_name_or_path"} | {*library.config_keys}
    keys |= {"model_args", "tokenizer_args", "config_args", "unknown"}
    assert keys == FOLLOWED | REFUSED.keys() | NAMED.keys() | NO_EFFECT
    for key, value in (REFUSED | NAMED).items():
        (bert / "sentence_bert_config.json").write_text(json.dumps({key: value}))
        name = key.replace("_args", "_kwargs")
        if key in REFUSED:
            with raises_line(CheckpointError, f"has {name} .* which changes the results and is not supported"):
                xf.Embedder.from_pretrained(bert)
        else:
            caplog.clear()
            xf.Embedder.from_pretrained(bert)
            assert f"sentence_bert_config.json: settings that are not followed: {name}" in caplog.messages[0]


def test_prompts_are_checked(bert):
    embedder = xf.Embedder.from_pretrained(bert)
    with pytest.raises(ConfigError, match="prompt_name is 'query'; the model has no prompts"):
        embedder(["dog"], prompt_name="query")
    embedder = xf.Embedder(embedder.model, embedder.tokenizer, prompts={"query": "a "}, include_prompt=False)
    with pytest.raises(ConfigError, match="prompt_name is 'qery'; did you mean 'query'"):
        embedder(["dog"], prompt_name="qery")
    with pytest.raises(ConfigError, match=r"the prompt has \d+ tokens; expected fewer than max_length"):
        embedder(["dog"], prompt="a " * 99)
    for values in ({"prompts": ["a"]}, {"prompts": {"a": 1}}, {"prompts": {"a": "b"}, "default_prompt_name": "c"}):
        (bert / "config_sentence_transformers.json").write_text(json.dumps(values))
        with pytest.raises(CheckpointError, match=r"has prompts .*; expected a text by name"):
            xf.Embedder.from_pretrained(bert)


def test_classes_have_names_and_probabilities(tmp_path):
    directory = checkpoint(tmp_path, "bert_classifier")
    change_config(directory, id2label={"0": "bad", "1": "fair", "2": "good"})
    classifier = xf.Classifier.from_pretrained(directory)
    (prediction,) = classifier(["a man sleeps"])
    assert prediction.label in ("bad", "fair", "good")
    assert sum(prediction.probabilities.values()) == pytest.approx(1.0)
    assert prediction.probability == max(prediction.probabilities.values())
    xf.save_pretrained(classifier.model, tmp_path / "saved")
    classifier.tokenizer.save(tmp_path / "saved")
    assert xf.Classifier.from_pretrained(tmp_path / "saved").labels == ["bad", "fair", "good"]


QUERY = "where does a dog sleep"
DOCUMENTS = ["a man sleeps on the bench", "a dog runs", "the dog sleeps on a bench and the man runs on", ""]


@pytest.fixture
def cross_encoder(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    directory = checkpoint(tmp_path, "bert")
    path = directory / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    inner.save(str(path))
    roles = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 12, **roles}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {**json.loads((directory / "config.json").read_text()), "num_labels": 1, "initializer_range": 0.5}
    torch.manual_seed(3)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**config))
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("num_labels", "expected"), [(0, xf.Embedder), (1, xf.Reranker), (3, xf.Classifier)])
def test_the_number_of_labels_selects_the_pipeline(tmp_path, num_labels, expected):
    directory = checkpoint(tmp_path, "bert")
    config = {**xf.load_pretrained(directory).config.to_dict(), "num_labels": num_labels, "masked_lm": False}
    xf.save_pretrained(xf.Encoder(xf.EncoderConfig(**config), xp=np, seed=0), directory)
    assert pipeline_class(directory) is expected
    assert expected.from_pretrained(directory).model.config.num_labels == num_labels


def test_scores_of_pairs_are_those_of_transformers(cross_encoder):
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(cross_encoder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(cross_encoder)
    options = {"padding": True, "truncation": True, "return_tensors": "pt", "return_token_type_ids": True}
    inputs = tokenizer([QUERY] * len(DOCUMENTS), DOCUMENTS, **options)
    assert inputs.input_ids.shape[1] == 12  # one of them is cut
    assert inputs.token_type_ids.max() == 1
    with torch.no_grad():
        expected = model(**inputs).logits[:, 0].numpy()
    reranker = xf.Reranker.from_pretrained(cross_encoder)
    ranked = reranker(QUERY, DOCUMENTS, batch_tokens=30)
    assert [each.score for each in ranked] == sorted((each.score for each in ranked), reverse=True)
    np.testing.assert_allclose([each.score for each in sorted(ranked)], expected, rtol=1e-4, atol=1e-5)
    assert reranker(QUERY, DOCUMENTS, top_k=2) == ranked[:2]
    assert reranker(QUERY, []) == []


def test_a_reranker_refuses_invalid_input(cross_encoder, tmp_path):
    reranker = xf.Reranker.from_pretrained(cross_encoder)
    for query, documents, message in [
        (["a"], ["b"], "query has type list; expected a text"),
        ("a", "b", "documents is a single text; expected a list of texts"),
        ("a", [None], "got something that is not text"),
    ]:
        with pytest.raises(DataError, match=message):
            reranker(query, documents)
    with pytest.raises(ConfigError, match="top_k is 0"):
        reranker("a", ["b"], top_k=0)
    with pytest.raises(ConfigError, match="the model has 3 labels; Reranker expects a model with one"):
        xf.Reranker.from_pretrained(checkpoint(tmp_path, "bert_classifier"))


def test_rerank_writes_lines_best_first(cross_encoder, tmp_path, capsys):
    source = tmp_path / "documents.txt"
    source.write_text("\n".join(DOCUMENTS) + "\n")
    arguments = ["rerank", "--model", str(cross_encoder), "--query", QUERY, "--input", str(source), "--top-k", "3"]
    assert exit_code(arguments) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    ranked = xf.Reranker.from_pretrained(cross_encoder)(QUERY, DOCUMENTS, top_k=3)
    expected = [[f"{score:.4f}", str(position + 1), DOCUMENTS[position]] for position, score in ranked]
    assert lines == expected


def test_a_checkpoint_of_another_kind_is_refused(bert, llama):
    with pytest.raises(CheckpointError, match="has an encoder; Translator expects an encoder-decoder; use Embedder,"):
        xf.Translator.from_pretrained(bert)
    message = "has a language model; Classifier expects an encoder; use TextGenerator or Embedder"
    with pytest.raises(CheckpointError, match=message):
        xf.Classifier.from_pretrained(llama)


def test_the_maximum_length_of_sentence_transformers_is_limited_by_the_positions(bert):
    for length in ("x", [1], -1, 2.5, True):
        (bert / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
        with pytest.raises(CheckpointError, match="has max_seq_length"):
            xf.Embedder.from_pretrained(bert)
    (bert / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
    embedder = xf.Embedder.from_pretrained(bert)
    assert embedder.max_length == embedder.model.config.max_positions


def test_an_unknown_argument_is_refused_before_loading(marian, llama):
    with pytest.raises(ConfigError, match="unknown argument 'source_lang'; did you mean 'source_language'"):
        xf.Translator.from_pretrained(marian, source_lang="de")
    message = "unknown argument 'source_language'; expected one of draft_model, dtype, progress, quantize, xp"
    with pytest.raises(ConfigError, match=message):
        xf.TextGenerator.from_pretrained(llama, source_language="de")


def test_outputs_begin_with_the_target_language(tmp_path):
    tokens = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "NllbTokenizer", "src_lang": "eng_Latn", **tokens}
    directory = checkpoint(tmp_path, "m2m_100", tokenizer_config=config)
    translator = xf.Translator.from_pretrained(directory, source_language="deu_Latn", target_language="eng_Latn")
    assert translator.token_ids(["the dog"])[0][0] == 5
    assert translator.token_ids(["the dog"])[0][-1] == 2
    ((output,),) = translator.outputs(["the dog"], max_new_tokens=4)
    assert output.tokens[0] == 4
    assert "eng_Latn" not in output.text
    with pytest.raises(ConfigError, match="language is 'deu'; expected one of deu_Latn, eng_Latn"):
        xf.Translator.from_pretrained(directory, source_language="deu", target_language="eng_Latn")


def test_special_tokens_at_the_end_of_a_source_survive_truncation(tmp_path):
    tokens = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "MBartTokenizer", "src_lang": "en_XX", **tokens}
    directory = checkpoint(tmp_path, "mbart", tokenizer_config=config)
    translator = xf.Translator.from_pretrained(directory, source_language="de_DE", target_language="en_XX")
    translator.max_source_tokens = 4
    encoded = translator.token_ids(["the dog runs on the bench", "the dog"])
    cut, num_cut = translator.truncate(encoded)
    assert (cut, num_cut) == ([[*encoded[0][:2], 2, 5], encoded[1]], 1)


def test_the_instruction_of_a_task_precedes_sources(tmp_path):
    directory = checkpoint(tmp_path, "t5", tokenizer_config={"unk_token": "<unk>"})
    path = directory / "config.json"
    tasks = {"summarization": {"prefix": "user : "}, "translation_en_to_de": {"prefix": "assistant : "}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "task_specific_params": tasks}))
    summarizer = xf.Summarizer.from_pretrained(directory)
    assert summarizer.tokenizers.source.tokens(summarizer.token_ids(["a dog"])[0]) == ["user", ":", "a", "dog", "</s>"]
    translator = xf.Translator.from_pretrained(directory, source_language="en", target_language="de")
    assert translator.tokenizers.source.tokens(translator.token_ids(["a dog"])[0])[0] == "assistant"
    assert len(summarizer(["a dog runs"], max_new_tokens=5)) == 1
