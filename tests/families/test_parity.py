"""Outputs of tiny checkpoints of every family equal those of transformers (see make_references.py)."""

import json

import numpy as np
import pytest

import xformer as xf
from tests.checkpoints import DATA, copy, relative_error
from tests.families.cases import FULL, GRADIENTS
from xformer.families import load_pretrained, save_pretrained
from xformer.layers import DecoderLayer, EncoderLayer, ParallelEncoderLayer, SharedNormEncoderLayer

CASES = [path.name for path in sorted(DATA.iterdir()) if "greedy" in np.load(path / "reference.npz").files]
# One for each class of layers, attention, positions and inputs.
REPRESENTATIVES = ("llama", "gemma3", "mixtral", "gpt_oss", "bloom", "phi", "cohere", "marian", "umt5", "whisper")


def inputs_of(reference) -> list:
    return [reference[name] for name in ("source", "tokens") if name in reference.files]


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_computes_what_transformers_does(name, monkeypatch, tmp_path):
    reference = np.load(DATA / name / "reference.npz")
    states = {cls: [] for cls in (EncoderLayer, DecoderLayer, ParallelEncoderLayer, SharedNormEncoderLayer)}
    for cls in states:

        def record(layer, x, *args, call=cls.__call__, **options):
            states[type(layer)].append(call(layer, x, *args, **options))
            return states[type(layer)][-1]

        monkeypatch.setattr(cls, "__call__", record)
    model = load_pretrained(DATA / name, dtype="float64")
    assert relative_error(model(*inputs_of(reference)), reference["logits"]) < 1e-10
    monkeypatch.undo()
    # transformers returns the embeddings first, and the last state after the final norm.
    if "source" in reference.files:
        is_token = reference["source"] != model.config.pad_id
        is_token = is_token if is_token.ndim == 2 else slice(None)  # frames of audio
        pairs = zip(states.pop(EncoderLayer)[:-1], reference["encoder_hidden_states"][1:-1], strict=True)
        for actual, expected in pairs:
            assert relative_error(actual[is_token], expected[is_token]) < 1e-10
    (states,) = filter(None, states.values())
    for actual, expected in zip(states[:-1], reference["hidden_states"][1:-1], strict=True):
        assert relative_error(actual, expected) < 1e-10
    greedy = reference["greedy"][0].tolist()
    if "source" in reference.files:
        ((output,),) = xf.generate(model, reference["source"][:1], max_new_tokens=8)
        assert len(output.tokens) > 1
        assert list(output.tokens) == greedy[: len(output.tokens)]
    else:
        tokens = reference["tokens"]
        ((output,),) = xf.generate(model, tokens[:1, :5].tolist(), max_new_tokens=8, special_tokens=False)
        assert list(output.tokens[-8:]) == greedy
        padded = np.concatenate([tokens[:, :6], np.zeros((2, 3), tokens.dtype)], axis=1)
        np.testing.assert_allclose(model(padded)[:, :6], model(tokens[:, :6]), rtol=0, atol=1e-10)
    check_round_trip(name, model, tmp_path)
    assert (tmp_path / "generation_config.json").exists()


def check_round_trip(name, model, directory):
    """A model that was saved and loaded is the same, and of the same family."""
    save_pretrained(model, directory)
    others = {"mt5": "t5", "seed_oss": "qwen2"}  # of the same family
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    assert model_type == others.get(name, model.model_type)
    again = load_pretrained(directory)
    assert again.config == model.config
    for (key, x), (other, y) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert key == other
        np.testing.assert_array_equal(x, y)


def loss_of(model, reference):
    """Return the cross-entropy of class 2 for each output of a model, summed; see make_references.py."""
    if {"images", "tokens"} <= reference.keys():
        logits = model(reference["images"], reference["tokens"])
    elif name_of_inputs := {"images", "token_types"} & reference.keys():
        inputs = reference["images"] if "images" in name_of_inputs else reference["tokens"]
        options = {} if "images" in name_of_inputs else {"token_types": reference["token_types"]}
        logits = model.class_logits(model(inputs, **options))
    else:
        logits = model(*(reference[name] for name in ("source", "tokens") if name in reference))
    xp = xf.array_namespace(logits)
    return xp.sum(xf.cross_entropy(logits, np.full(logits.shape[:-1], 2)))


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_equal_those_of_torch(name):
    reference = dict(np.load(DATA / name / "reference.npz"))
    _, gradients = xf.value_and_grad(loss_of)(load_pretrained(DATA / name, dtype="float64"), reference)
    expected = dict(load_pretrained(DATA / name / "gradients").named_parameters())
    largest = max(np.max(np.abs(x)) for x in expected.values())
    for key, x in gradients.named_parameters():
        np.testing.assert_allclose(x, expected[key], rtol=1e-9, atol=1e-12 * largest, err_msg=key)


@pytest.mark.parametrize("name", REPRESENTATIVES)
@pytest.mark.parametrize("xp", ["numpy", "array_api_strict", "torch", "jax"])
def test_checkpoints_run_on_every_library(name, xp):
    pytest.importorskip(xp)
    reference = np.load(DATA / name / "reference.npz")
    model = load_pretrained(DATA / name, xp=xp, dtype="float32")
    logits = np.asarray(xf.backends.to_host(model(*inputs_of(reference))))
    assert relative_error(logits, reference["logits"]) < 1e-5


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("opt", {"word_embed_proj_dim": 12}, "word_embed_proj_dim"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
    ("t5gemma", {"encoder": {"hidden_size": 32}}, "has an encoder with d_model 32 and a decoder with 24; expected the"),
    ("t5gemma", {"encoder": {"layer_types": FULL[:1]}}, "has other windows in the encoder than in the decoder"),
    ("t5gemma", {"encoder": {"num_hidden_layers": 0}}, "has encoder.num_hidden_layers 0; expected an integer from 1"),
    ("t5gemma", {"encoder": {"new_key": 3}}, r"has the key 'new_key' \(3\), which xformer does not know"),
    ("t5gemma", {"encoder": None}, "has no key 'vocab_size'"),
    ("olmoe", {"clip_qkv": 8.0}, "has the key 'clip_qkv'"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_token is 9; expected at most num_experts, 4"),
    ("mixtral", {"num_local_experts": 5}, "lacks the tensor model.layers.0.block_sparse_moe.experts.4.w1.weight"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"lacks the tensor model\.layers\.0\.mlp\.down_proj\.weight"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "has swiglu_limit 5.0; expected 7.0"),
    ("gpt_oss", {"num_local_experts": 3}, r"gives layers\.\d.* config\.json implies"),
    ("gpt_oss", {"rope_parameters": None}, "has no key 'rope_parameters'"),
])  # fmt: skip
def test_variants_with_another_computation_are_refused(name, changes, message, tmp_path):
    with pytest.raises(xf.errors.CheckpointError, match=message):
        load_pretrained(copy(name, tmp_path, **changes))
