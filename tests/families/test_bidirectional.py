"""Decoders that are not causal compute the states of transformers, and generate nothing."""

import numpy as np
import pytest

import xformer as xf
from tests.checkpoints import DATA, copy
from xformer.data.packing import TextChunks
from xformer.errors import CheckpointError, ConfigError
from xformer.export import export_onnx
from xformer.training.loss import language_model_loss

# One for each class of layers, attention and positions.
DECODERS = ["gpt2", "opt", "llama", "gemma2", "mixtral", "phi", "cohere2", "stablelm", "falcon_alibi", "bloom"]
TOKENS = np.asarray([[5, 17, 33, 8, 41, 12, 3, 29, 56], [7, 44, 21, 9, 30, 0, 0, 0, 0]])
LENGTHS = (9, 5)


def states_of(model):
    mask = (np.arange(9) < np.asarray(LENGTHS)[:, None])[:, None, None, :]
    return [x[:length] for x, length in zip(model.states(TOKENS, mask=mask), LENGTHS, strict=True)]


@pytest.mark.slow  # imports torch and transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DECODERS)
def test_states_are_those_of_transformers(name, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    directory = copy(name, tmp_path, is_causal=False)
    # The eager attention of Falcon adds ALiBi twice; that of torch ignores is_causal in StableLM and Nemotron.
    kind = "sdpa" if name == "falcon_alibi" else "eager"
    theirs = transformers.AutoModel.from_pretrained(directory, attn_implementation=kind).eval()
    mask = torch.asarray([[int(i < length) for i in range(9)] for length in LENGTHS])
    with torch.no_grad():
        expected = theirs(torch.asarray(TOKENS), attention_mask=mask).last_hidden_state.numpy()
    model = xf.load_pretrained(directory)
    xf.save_pretrained(model, tmp_path / "saved")
    for each in (model, xf.load_pretrained(tmp_path / "saved")):
        for actual, row in zip(states_of(each), expected, strict=True):
            np.testing.assert_allclose(actual, row[: len(actual)], rtol=0, atol=2e-5 * np.max(np.abs(expected)))


def test_a_model_that_is_not_causal_generates_nothing(tmp_path):
    model = xf.load_pretrained(copy("llama", tmp_path, is_causal=False))
    message = r"the model is not causal \(is_causal is false\): .* use an Embedder, or model.states\(tokens\)$"
    for call in (
        lambda: xf.generate(model, [[5, 6]], max_new_tokens=2),
        lambda: xf.generate(model, [[5, 6]], max_new_tokens=2, num_beams=2),
        lambda: xf.generate(xf.load_pretrained(DATA / "llama"), [[5, 6]], draft_model=model, max_new_tokens=2),
        lambda: model.decode_step(np.asarray([[5]]), model.init_cache(1)),
        lambda: export_onnx(model, tmp_path / "onnx"),
        lambda: language_model_loss(model, TextChunks.make(range(3, 12), [0], 4, xp=np)),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_an_encoder_decoder_that_is_not_causal_is_refused(tmp_path):
    for name in ("bart", "t5", "whisper"):
        with pytest.raises(CheckpointError, match=r"has the key 'is_causal' \(False\)"):
            xf.load_pretrained(copy(name, tmp_path, is_causal=False))
    with pytest.raises(CheckpointError, match="has is_causal False; expected True"):
        xf.load_pretrained(copy("t5gemma", tmp_path, decoder={"is_causal": False}))


@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert", "deberta_v2", "vit", "dinov2"])
def test_an_encoder_that_says_that_it_is_not_causal_is_accepted(name, tmp_path):
    xf.load_pretrained(copy(name, tmp_path / "encoder", is_causal=False))
    with pytest.raises(CheckpointError, match="has is_causal True; expected False"):
        xf.load_pretrained(copy(name, tmp_path / "causal", is_causal=True))
