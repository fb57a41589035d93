"""CTranslate2 computes the log-probabilities and the greedy outputs of exported models."""

import numpy as np
import pytest

from xformer import GenerationConfig, LanguageModel, LanguageModelConfig, Transformer, TransformerConfig, generate
from xformer.backends import resolve
from xformer.errors import BackendError, ConfigError
from xformer.export import ctranslate2 as exporter
from xformer.export import export_ctranslate2
from xformer.models import Encoder, EncoderConfig

ctranslate2 = pytest.importorskip("ctranslate2")
TOKENS = ["<pad>", "<s>", "</s>", "<unk>", *(f"t{index}" for index in range(4, 40))]
SIZES = {"d_model": 32, "num_heads": 4, "d_ff": 48}
T5 = {"positions": "relative", "norm": "rms", "attention_scale": 1.0, "scale_embeddings": False, "scale_output": True}
VARIANTS = {
    "pre-norm": {},
    "post-norm": {"norm_position": "post", "embedding_norm": True, "activation": "gelu"},
    "rms": {"norm": "rms", "activation": "swiglu", "positions": "rotary", "num_key_value_heads": 2},
    "part of a head": {"positions": "rotary", "rotary_fraction": 0.5, "rope_theta": 500.0, "activation": "geglu_tanh"},
    "learned": {"positions": "learned", "max_positions": 60, "tie_output": False, "activation": "gelu_tanh"},
    "no positions": {"positions": "none", "head_dim": 6, "norm_epsilon": 1e-3, "activation": "silu"},
    "T5": {**T5, "activation": "geglu", "num_key_value_heads": 1},
    "no biases": {"attention_bias": False, "feed_forward_bias": False, "norm_bias": False, "output_bias": True},
    "no key bias": {"key_bias": False, "sinusoidal_layout": "halves", "scale_embeddings": False},
}
TRANSLATORS = {**VARIANTS, "umT5": {**T5, "share_relative_bias": False}}


def make(cls, **settings):
    """Return a model whose parameters differ from zero and one."""
    if cls is Transformer:
        sizes = {"source_vocab_size": 40, "target_vocab_size": 40, "num_encoder_layers": 2, "num_decoder_layers": 1}
        model = Transformer(TransformerConfig(**sizes, **SIZES, **settings), seed=1)
    else:
        model = LanguageModel(LanguageModelConfig(vocab_size=40, num_layers=2, **SIZES, **settings), seed=1)
    rng = np.random.default_rng(0)
    for _, parameter in model.named_parameters():
        parameter += rng.normal(size=parameter.shape).astype("float32") * 0.2
    return model


@pytest.mark.parametrize("settings", TRANSLATORS.values(), ids=TRANSLATORS)
def test_translators(settings, tmp_path):
    model = make(Transformer, **settings)
    before = [array.copy() for _, array in model.named_parameters()]
    assert export_ctranslate2(model, tmp_path / "int8", source_tokens=TOKENS, quantization="int8").difference < 1.0
    assert export_ctranslate2(model, tmp_path / "float", source_tokens=TOKENS).difference < 1e-5
    for (_, array), copy in zip(model.named_parameters(), before, strict=True):
        np.testing.assert_array_equal(array, copy)
    sources = np.random.default_rng(2).integers(4, 40, (5, 9))
    expected = generate(model, sources, GenerationConfig(max_new_tokens=12))
    translator = ctranslate2.Translator(str(tmp_path / "float"))
    results = translator.translate_batch(
        [[TOKENS[token] for token in row] for row in sources],
        beam_size=1,
        max_decoding_length=12,
        suppress_sequences=[["<pad>"], ["<s>"]],
    )
    assert [result.hypotheses[0] for result in results] == [[TOKENS[i] for i in row[0].tokens] for row in expected]


LANGUAGE_MODELS = {**VARIANTS, "T5": {**T5, "positions": "alibi"}}


@pytest.mark.parametrize("settings", LANGUAGE_MODELS.values(), ids=LANGUAGE_MODELS)
def test_language_models(settings, tmp_path):
    model = make(LanguageModel, **settings)
    export_ctranslate2(model, tmp_path / "int8", source_tokens=TOKENS, quantization="int8")
    assert export_ctranslate2(model, tmp_path / "float", source_tokens=TOKENS).difference < 1e-5
    prompts = np.random.default_rng(2).integers(4, 40, (3, 5))
    expected = generate(model, prompts.tolist(), GenerationConfig(max_new_tokens=12))
    generator = ctranslate2.Generator(str(tmp_path / "float"))
    results = generator.generate_batch(
        [[TOKENS[token] for token in row] for row in prompts],
        max_length=12,
        include_prompt_in_result=False,
        suppress_sequences=[["<pad>"], ["<s>"]],
    )
    assert [result.sequences_ids[0] for result in results] == [row[0].tokens for row in expected]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm": "max_scaled"}, "norm is 'max_scaled'; CTranslate2 supports 'layer' or 'rms'"),
        ({"norm_position": "sandwich"}, "norm_position is 'sandwich'; CTranslate2 supports 'pre' or 'post'"),
        ({"window": 4}, "window is 4; CTranslate2 supports None"),
        ({"positions": "alibi"}, "positions is 'alibi'; CTranslate2 supports it in language models"),
        ({"copy": True, "share_embeddings": True}, "copy is True; CTranslate2 supports False"),
        ({"length_encoding": True}, "length_encoding is True; CTranslate2 supports False"),
        ({"final_norm": False}, "final_norm is False; CTranslate2 supports True if norm_position is 'pre'"),
    ],
)
def test_what_ctranslate2_cannot_compute_is_refused_by_name(settings, message, tmp_path):
    with pytest.raises(ConfigError) as info:
        export_ctranslate2(make(Transformer, **settings), tmp_path / "out", source_tokens=TOKENS)
    assert str(info.value) == message
    assert not (tmp_path / "out").exists()


def test_other_models_vocabularies_and_directories_are_refused(tmp_path):
    model, encoder = make(LanguageModel), Encoder(EncoderConfig(vocab_size=40, num_layers=1, **SIZES))
    with pytest.raises(ConfigError, match="the model is an Encoder; expected a Transformer or a LanguageModel"):
        export_ctranslate2(encoder, tmp_path / "out", source_tokens=TOKENS)
    with pytest.raises(ConfigError, match="got 40 tokens, 39 of them different; expected 40"):
        export_ctranslate2(model, tmp_path / "out", source_tokens=[*TOKENS[:-1], "t4"])
    with pytest.raises(ConfigError, match="quantization is 'int4'; expected one of float32, int8"):
        export_ctranslate2(model, tmp_path / "out", source_tokens=TOKENS, quantization="int4")
    with pytest.raises(ConfigError, match="quantized to int8; export the original model"):
        export_ctranslate2(model.quantize(), tmp_path / "out", source_tokens=TOKENS)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not an empty directory"):
        export_ctranslate2(model, tmp_path, source_tokens=TOKENS)


def test_relative_positions_of_language_models_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="positions is 'relative'; CTranslate2 supports it in translators"):
        export_ctranslate2(make(LanguageModel, **T5), tmp_path / "out", source_tokens=TOKENS)


def test_a_model_that_differs_is_not_written(monkeypatch, tmp_path):
    monkeypatch.setattr(exporter, "_set_norm", lambda spec, norm: _shifted(spec, norm))
    with pytest.raises(BackendError, match="computes log-probabilities that differ by"):
        export_ctranslate2(make(LanguageModel), tmp_path / "out", source_tokens=TOKENS)
    assert not list(tmp_path.iterdir())


def _shifted(spec, norm):
    spec.gamma, spec.beta = np.array(norm.weight) + 1.0, np.array(norm.bias)


def test_models_of_torch_are_exported(tmp_path):
    pytest.importorskip("torch")
    model = make(LanguageModel).to(resolve("torch"))
    assert export_ctranslate2(model, tmp_path / "out", source_tokens=TOKENS).difference < 1e-5
