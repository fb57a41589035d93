"""Exported ONNX files compute what the model computes, at any length, and decode as it does."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from xformer.errors import BackendError, ConfigError
from xformer.tree import replace

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from xformer.export import export_onnx, onnx, onnx_namespace  # noqa: E402

SMALL = {"d_model": 24, "num_heads": 4, "d_ff": 20}
TRANSLATOR = {
    **SMALL, "source_vocab_size": 61, "target_vocab_size": 61, "num_encoder_layers": 1, "num_decoder_layers": 2,
    "share_embeddings": True,
}  # fmt: skip
LANGUAGE_MODEL = {**SMALL, "vocab_size": 61, "num_layers": 2}
LLAMA = {
    "norm": "rms", "activation": "swiglu", "positions": "rotary", "attention_bias": False, "feed_forward_bias": False,
    "num_key_value_heads": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 50, "factor": 4.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

TRANSLATORS = {
    "default": {},
    "t5": {
        "norm": "rms", "positions": "relative", "activation": "geglu_tanh", "attention_bias": False,
        "scale_output": True, "scale_embeddings": False,
    },
    "alibi": {"positions": "alibi", "activation": "geglu", "norm": "max_scaled", "num_heads": 6},
    "rotary": {**LLAMA, "rope_scaling": LLAMA3, "tie_output": False, "share_embeddings": False, "qk_norm": True},
    "copy": {"copy": True, "num_key_value_heads": 1, "window": 4, "sinusoidal_layout": "halves"},
    "length": {"length_encoding": True, "scale_positions": True, "embedding_norm": True, "attention_softcap": 5.0},
    "no padding": {"pad_id": None, "sinusoidal_layout": "fairseq", "activation": "silu"},
}  # fmt: skip
LANGUAGE_MODELS = {
    "gpt_oss": {
        **LLAMA, "attention_sinks": True, "activation": "swiglu_clamped", "window": 5,
        "layer_types": ("sliding_attention", "full_attention"),
    },
    "olmo2": {**LLAMA, "norm_position": "output", "qk_norm": True, "qk_norm_all_heads": True},
    "phi3": {**LLAMA, "rope_scaling": LONGROPE, "rotary_fraction": 1.0, "attention_scale": 0.3},
    "gptj": {
        "positions": "rotary", "parallel_residual": True, "shared_norm": True, "rotary_fraction": 0.5, "head_dim": 8,
    },
    "gemma2": {
        **LLAMA, "norm_position": "sandwich", "window": 5, "layer_types": ("sliding_attention", "full_attention"),
        "rope_local_theta": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "attention_softcap": 5.0,
        "logits_softcap": 10.0,
    },
    "bloom": {"positions": "alibi", "embedding_norm": True},
    "relative": {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 20},
}  # fmt: skip


def random_model(config):
    """Return a model whose biases and norms are random too."""
    models = (xf.SpeechTransformer, xf.Transformer, xf.LanguageModel, xf.Encoder, xf.ImageEncoder)
    model = next(cls for cls in models if isinstance(config, cls.config_class))(config)
    rng = np.random.default_rng(0)
    noise = {name: x + 0.2 * rng.standard_normal(x.shape) for name, x in model.named_parameters()}
    return replace(model, {name: x.astype(np.float32) for name, x in noise.items()})


class Session:
    """An ONNX file, called with arrays by name; it ignores those that it does not take."""

    def __init__(self, path):
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.inputs = {x.name for x in self.session.get_inputs()}
        self.outputs = [x.name for x in self.session.get_outputs()]

    def __call__(self, **arrays):
        arrays = {name: x for name, x in arrays.items() if name in self.inputs}
        return dict(zip(self.outputs, self.session.run(None, arrays), strict=True))


def empty_past(session, batch):
    shapes = {x.name: x.shape for x in session.session.get_inputs() if x.name.startswith("past_")}
    return {name: np.zeros((batch, shape[1], 0, shape[3]), np.float32) for name, shape in shapes.items()}


def decode_greedily(step, tokens, fixed, expected_logits, steps):
    """Feed tokens that ONNX chooses to both, and compare their logits: the choices agree up to ties."""
    past = empty_past(step, len(tokens))
    for _ in range(steps):
        outputs = step(tokens=tokens, **fixed, **past)
        logits = expected_logits(tokens)
        np.testing.assert_allclose(outputs["logits"], logits, rtol=0, atol=2e-4)
        tokens = np.argmax(outputs["logits"], axis=-1)[:, None]
        assert np.all(np.take_along_axis(logits, tokens, 1)[:, 0] > logits.max(axis=1) - 1e-3)
        past = {name.replace("present", "past"): x for name, x in outputs.items() if name.startswith("present")}


@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_translator(name, tmp_path):
    model = random_model(xf.TransformerConfig(**{**TRANSLATOR, **TRANSLATORS[name]}))
    exported = export_onnx(model, tmp_path)
    assert exported.difference < 1e-4
    encode, step = Session(tmp_path / "encoder.onnx"), Session(tmp_path / "step.onnx")
    source, lengths = np.asarray([[5, 6, 7, 9, 2], [9, 4, 2, 0, 0]]), np.asarray([4, 9])
    fixed = {**encode(source=source), "source": source, "lengths": lengths}
    cache = model.prefill(source, lengths=lengths if model.config.length_encoding else None)
    decode_greedily(step, np.ones((2, 1), int), fixed, lambda tokens: model.decode_step(tokens, cache), 8)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_language_model(name, tmp_path):
    model = random_model(xf.LanguageModelConfig(**{**LANGUAGE_MODEL, **LANGUAGE_MODELS[name]}))
    assert export_onnx(model, tmp_path).difference < 1e-4
    cache = model.init_cache(2)
    prompts = np.random.default_rng(0).integers(3, 61, (2, 47))  # steps pass the short positions of longrope
    step = Session(tmp_path / "step.onnx")
    decode_greedily(step, prompts, {}, lambda tokens: model.decode_step(tokens, cache), 8)


ENCODER = {**SMALL, "vocab_size": 61, "num_layers": 1, "positions": "learned", "max_positions": 80}
OTHERS = {
    "classifier": xf.EncoderConfig(**ENCODER, num_token_types=2, pooler="tanh", num_labels=3, norm_position="post"),
    "masked": xf.EncoderConfig(**ENCODER, masked_lm=True),
    "image": xf.ImageEncoderConfig(**SMALL, image_size=8, patch_size=4, num_layers=1, pooler="relu", num_labels=3),
    "encoder": xf.TransformerConfig(**{**TRANSLATOR, "num_decoder_layers": 0}),
    "speech": xf.SpeechTransformerConfig(
        **SMALL, source_vocab_size=5, target_vocab_size=61, num_encoder_layers=1, num_decoder_layers=1,
        positions="learned", max_source_positions=80, max_positions=90,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name, tmp_path):
    assert export_onnx(random_model(OTHERS[name]), tmp_path).difference < 1e-4


FAMILIES = Path(__file__).parents[1] / "families" / "data"
# One for each class of models and layers that the models above do not have.
CHECKPOINTS = ["bert_classifier", "deberta_v2_masked_lm", "mbart", "clip", "mixtral", "whisper", "dinov2_swiglu"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_public_checkpoints(name, tmp_path):
    assert export_onnx(xf.load_pretrained(FAMILIES / name), tmp_path).difference < 1e-4


def peer(name, transformers):
    """Return a random model of transformers with the settings of a published one, and its inputs by name."""
    sizes, rng = {"d_model": 24, "vocab_size": 61}, np.random.default_rng(0)
    if name == "flan-t5":  # heads are narrower than d_model, the output layer is untied
        options = {"d_kv": 5, "num_heads": 3, "d_ff": 40, "num_layers": 3, "feed_forward_proj": "gated-gelu"}
        config = transformers.T5Config(**sizes, **options, tie_word_embeddings=False, decoder_start_token_id=0)
        source = np.asarray([[5, 6, 7, 9, 1], [9, 4, 1, 0, 0]])
        return transformers.T5ForConditionalGeneration(config), {"input_ids": source, "attention_mask": source != 0}
    layers = {"encoder_layers": 4, "decoder_layers": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    ends = {"pad_token_id": 50, "bos_token_id": 50, "eos_token_id": 50, "decoder_start_token_id": 51}
    limits = {"max_source_positions": 9, "max_target_positions": 16, "num_mel_bins": 6}
    config = transformers.WhisperConfig(**sizes, **layers, **heads, **ends, **limits)
    frames = rng.normal(size=(2, 6, 18)).astype(np.float32)
    return transformers.WhisperForConditionalGeneration(config), {"input_features": frames}


@pytest.mark.filterwarnings("ignore")  # importing transformers runs deprecated code
@pytest.mark.parametrize("name", ["flan-t5", "distil-whisper"])
def test_files_decode_as_transformers(name, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs, inputs = peer(name, transformers)
    with torch.no_grad():
        for x in theirs.parameters():
            x += 0.2 * torch.randn(x.shape)
    theirs.eval().save_pretrained(tmp_path / "model")
    assert export_onnx(xf.load_pretrained(tmp_path / "model"), tmp_path).difference < 1e-4
    encode, step = Session(tmp_path / "encoder.onnx"), Session(tmp_path / "step.onnx")
    source = inputs["input_features"].swapaxes(1, 2) if name == "distil-whisper" else inputs["input_ids"]
    tensors, ids = {key: torch.tensor(x) for key, x in inputs.items()}, []

    @torch.no_grad()
    def logits(tokens):
        ids.append(torch.tensor(tokens))
        return theirs(**tensors, decoder_input_ids=torch.cat(ids, dim=1)).logits[:, -1].numpy()

    start = np.full((2, 1), theirs.config.decoder_start_token_id)
    decode_greedily(step, start, {**encode(source=source), "source": source}, logits, 8)


def test_a_file_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_namespace, "_KERNELS", onnx_namespace._KERNELS | {"softmax": lambda x, mask: x})
    with pytest.raises(BackendError, match=r"^encoder.onnx differs from the model by \d.*; expected less than 1e-03$"):
        export_onnx(random_model(xf.TransformerConfig(**TRANSLATOR)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_onnxruntime_nothing_is_verified(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find_spec(name))
    config = xf.LanguageModelConfig(**LANGUAGE_MODEL)
    exported = export_onnx(random_model(config), tmp_path, max_length=100)
    assert [path.name for path in exported.files] == ["model.onnx", "step.onnx"]
    assert exported.difference is None
    monkeypatch.undo()
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match="out of data bounds"):
        Session(tmp_path / "model.onnx")(tokens=np.ones((1, 200), int))


class Rolled(xf.LanguageModel):
    """A model whose forward code uses a function that cannot be exported."""

    def __call__(self, tokens, **options):
        logits = super().__call__(tokens, **options)
        return xf.array_namespace(logits).roll(logits, 1, axis=1)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (xf.LanguageModel, {"max_length": 91}, "max_length is 91; expected 6 to 90, the positions of the model"),
        (Rolled, {}, "xp.roll cannot be exported to ONNX"),
    ],
)
def test_refusals(model, options, message, tmp_path):
    config = xf.LanguageModelConfig(**LANGUAGE_MODEL, positions="learned", max_positions=90)
    with pytest.raises((BackendError, ConfigError), match=f"^{message}[^\n]*$"):
        export_onnx(model(config), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_sizes_are_expressions_of_the_sizes_of_inputs():
    inputs = onnx_namespace.make_inputs({"x": onnx.Input(("batch", "length"))}, {"batch": 3, "length": 9})
    batch, length = inputs["x"].shape
    assert batch * length // batch is length
    assert (2 * length + 4) // 2 - length == 2
    assert type(length + 2 - length) is int
    assert (length + 1) // 2 is (1 + length) // 2
    assert (length + 1) // 2 is not length // 2
    assert (length + 1) // 2 == 5
    assert ((batch + length) * length).name == "(batch + length) * length"


def test_files_are_verified_at_states_that_the_model_computes(tmp_path):
    """A trained decoder may have weights for states of a small range; other states make it sensitive to rounding."""
    model = random_model(xf.TransformerConfig(**{**TRANSLATOR, **TRANSLATORS["t5"], "pad_id": None}))
    arrays = dict(model.named_arrays())
    scales = {"encoder_norm.weight": 1e-3, "cross_attention.query.weight": 1e5}
    arrays = {
        name: x * next((scale for part, scale in scales.items() if name.endswith(part)), 1.0)
        for name, x in arrays.items()
    }
    exported = export_onnx(replace(model, arrays), tmp_path)
    assert exported.difference < 1e-5
