"""Transcription with a tiny random Whisper model and a word-level tokenizer."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import xformer as xf
from tests.reference import normal, raises_line
from xformer.cli.main import exit_code
from xformer.data.audio import log_mel_spectrogram, resample, split_at_pauses
from xformer.errors import CheckpointError, ConfigError, DataError

DATA = Path(__file__).parent.parent / "families" / "data"
EOS, START, LANGUAGES, TASKS, NO_TIMESTAMPS = 50, 51, {"de": 52, "en": 53}, {"transcribe": 54, "translate": 55}, 56
SPECIAL = {
    "<|endoftext|>": EOS,
    "<|startoftranscript|>": START,
    "<|notimestamps|>": NO_TIMESTAMPS,
    **{f"<|{name}|>": token for name, token in {**LANGUAGES, **TASKS}.items()},
}
WINDOW = 2 * 7 * 160  # samples: the model has 7 positions for audio
NOISE = 0.1 * normal(0, 2 * WINDOW + 300).astype(np.float32)


def make_whisper(directory):
    """Make a tiny Whisper with a word-level tokenizer."""
    shutil.copytree(DATA / "whisper", directory)
    vocab = {f"word{index}": index for index in range(61) if index not in SPECIAL.values()}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab | SPECIAL, unk_token="word0"))
    inner.add_special_tokens(list(SPECIAL))
    inner.save(str(directory / "tokenizer.json"))
    settings = {"is_multilingual": True, "max_length": 12, "suppress_tokens": [28], "begin_suppress_tokens": [EOS]}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    return make_whisper(tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture(scope="module")
def transcriber(whisper):
    return xf.Transcriber.from_pretrained(whisper)


def write_wav(path, samples, rate=16000):
    data = np.round(samples * 32767).astype("<i2").tobytes()
    header = struct.pack("<4sIHHIIHH4sI", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", len(data))
    path.write_bytes(b"RIFF" + struct.pack("<I", 4 + len(header) + len(data)) + b"WAVE" + header + data)
    return path


def expected_words(model, samples, prefix):
    """Search greedily without a cache; word 28 is suppressed."""
    padded = np.zeros(WINDOW, np.float32)
    padded[: len(samples)] = samples
    features, tokens = log_mel_spectrogram(padded, 6)[None], [START, *prefix]
    while len(tokens) < 12:
        logits = np.array(model(features, [tokens])[0, -1])
        logits[28] = -np.inf
        logits[EOS] = -np.inf if len(tokens) == 1 + len(prefix) else logits[EOS]
        if (token := int(np.argmax(logits))) == EOS:
            break
        tokens.append(token)
    words = [token for token in tokens[1 + len(prefix) :] if token < EOS]
    return " ".join(f"word{token}" for token in words)


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_outputs_begin_with_language_and_task_and_skip_suppressed_tokens(transcriber, task):
    samples = NOISE[:1000]
    text = transcriber(samples, language="de", task=task)
    assert text == expected_words(transcriber.model, samples, [LANGUAGES["de"], TASKS[task], NO_TIMESTAMPS])
    assert text


def test_the_language_is_detected_from_the_start_of_the_audio(transcriber):
    samples = NOISE[:1000]
    features = log_mel_spectrogram(np.pad(samples, (0, WINDOW - 1000)), 6)[None]
    logits = transcriber.model(features, [[START]])[0, 0]
    expected = max(LANGUAGES, key=lambda language: logits[LANGUAGES[language]])
    assert transcriber.detect_language(samples) == expected
    assert transcriber(samples) == transcriber(samples, language=expected)


def test_long_audio_is_read_window_by_window(transcriber):
    parts = [transcriber(window, language="en") for window in split_at_pauses(NOISE, transcriber.window_length)]
    assert len(parts) == 3
    for batch_size in (1, 8):
        assert transcriber(NOISE, language="en", batch_size=batch_size) == " ".join(filter(None, parts))


def test_files_and_lists_give_the_texts_of_their_samples(transcriber, tmp_path):
    samples = np.round(NOISE[:1000] * 32767).astype(np.float32) / 32768
    path = write_wav(tmp_path / "a.wav", NOISE[:1000])
    expected = transcriber(samples, language="en")
    assert transcriber([path, samples], language="en") == [expected, expected]
    assert transcriber([]) == []
    options = {"language": "en", "num_beams": 3, "num_return_sequences": 2}
    assert transcriber(samples, sample_rate=8000, **options) == transcriber(resample(samples, 8000), **options)


def test_models_for_english_take_no_language_or_task(whisper, transcriber):
    english = xf.Transcriber(
        transcriber.model, transcriber.tokenizer, multilingual=False, defaults=transcriber.defaults
    )
    assert english.languages == ["en"]
    assert english.detect_language(NOISE[:1000]) == "en"
    assert english(NOISE[:1000]) == expected_words(english.model, NOISE[:1000], [NO_TIMESTAMPS])
    with raises_line(ConfigError, "the model knows English only"):
        english(NOISE, task="translate")
    with raises_line(ConfigError, "language is 'de'; "):
        english(NOISE, language="de")


def test_unknown_options_are_errors(transcriber):
    for options, match in (
        ({"language": "fr"}, "language is 'fr'; "),
        ({"task": "summarize"}, "task is 'summarize'; expected one of 'transcribe', 'translate'"),
        ({"batch_size": 0}, "batch_size is 0; expected at least 1"),
    ):
        with raises_line(ConfigError, match):
            transcriber(NOISE, **options)


def test_audio_that_cannot_be_read_is_an_error(transcriber):
    with raises_line(DataError, "the audio has no samples"):
        transcriber(np.zeros(0))
    with raises_line(DataError, r"samples have shape \(2, 500\)"):
        transcriber(np.zeros((2, 500)))


def test_a_checkpoint_of_text_is_refused():
    with raises_line(CheckpointError, "has a language model; Transcriber expects a speech model; use TextGenerator"):
        xf.Transcriber.from_pretrained(DATA / "llama")
    with raises_line(CheckpointError, "has a speech model; Translator expects an encoder-decoder; use Transcriber"):
        xf.Translator.from_pretrained(DATA / "whisper")


def test_the_command_writes_one_line_per_file(whisper, transcriber, tmp_path, capsys):
    paths = [write_wav(tmp_path / f"{number}.wav", NOISE[number:1000]) for number in range(2)]
    options = ["--language", "de", "--task", "translate", "--num-beams", "2"]
    assert exit_code(["transcribe", "--model", str(whisper), *map(str, paths), *options]) == 0
    texts = [transcriber(path, language="de", task="translate", num_beams=2) for path in paths]
    assert capsys.readouterr().out.splitlines() == texts
    hot = ["--language", "de", "--temperature", "0", "--temperature", "0.9"]  # random weights give improbable outputs
    assert exit_code(["transcribe", "--model", str(whisper), str(paths[0]), *hot]) == 0
    expected = transcriber(paths[0], language="de", temperature=(0.0, 0.9))
    assert capsys.readouterr().out == f"{expected}\n"
    assert expected != transcriber(paths[0], language="de")
    assert exit_code(["transcribe", "--model", str(whisper), str(paths[0]), "--temperature", "-1"]) == 2
    assert "temperature is -1.0; expected" in capsys.readouterr().err
    output = tmp_path / "texts"
    assert exit_code(["transcribe", "--model", str(whisper), str(paths[0]), *options, "--output", str(output)]) == 0
    assert output.read_text() == f"{texts[0]}\n"
    assert exit_code(["transcribe", "--model", str(whisper), str(output)]) == 2
    assert "is not a WAV file" in capsys.readouterr().err
    assert exit_code(["transcribe", "--model", str(whisper), str(paths[0]), "--output", str(paths[0])]) == 2
