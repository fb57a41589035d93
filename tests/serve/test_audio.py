"""Transcription by the server, as the client of OpenAI sees it."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest

import xformer as xf
from tests.pipelines.test_transcription import NOISE, make_whisper, write_wav
from tests.reference import raises_line

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
from tests.serve.test_app import Client, make_generator  # noqa: E402
from xformer.errors import DataError  # noqa: E402
from xformer.pipelines import pipeline_class  # noqa: E402
from xformer.serve import audio as speech  # noqa: E402
from xformer.serve.routes import parse_form  # noqa: E402


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory):
    directory = make_whisper(tmp_path_factory.mktemp("whisper") / "model")
    return pipeline_class(directory).from_pretrained(directory)


@pytest.fixture(scope="module")
def wav(tmp_path_factory):
    return write_wav(tmp_path_factory.mktemp("wav") / "noise.wav", NOISE)


@pytest.fixture(scope="module")
def server(transcriber):
    server = Client({"text": make_generator(), "whisper": transcriber}, max_audio=100_000, max_body=10_000)
    yield server
    server.close()


@pytest.fixture(scope="module")
def audio(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client.audio


@pytest.mark.filterwarnings("ignore:deprecated")  # by the client
def test_answers_are_those_of_the_pipeline(audio, transcriber, wav):
    create = audio.transcriptions.create
    for options in ({}, {"language": "de"}, {"temperature": 0.5}):
        text = transcriber(wav, **options)
        assert create(model="whisper", file=wav, **options).text == text
        assert create(model="whisper", file=wav, response_format="text", **options) == f"{text}\n"
    assert audio.translations.create(model="whisper", file=wav).text == transcriber(wav, task="translate")
    found = transcriber(wav, timestamps="words")
    assert create(model="whisper", file=wav, response_format="srt") == transcriber(wav, timestamps="segments").to_srt()
    assert create(model="whisper", file=wav, response_format="vtt") == transcriber(wav, timestamps="segments").to_vtt()
    options = {"model": "whisper", "file": wav, "response_format": "verbose_json"}
    plain, words, both = (
        create(**options, **({"timestamp_granularities": each} if each else {}))
        for each in ([], ["word"], ["segment", "word"])
    )
    for answer in (plain, words, both):
        assert (answer.text, answer.language, answer.task) == (found.text, found.language, "transcribe")
        assert answer.duration == pytest.approx(len(NOISE) / 16000)
    assert (words.segments, plain.words) == (None, None)
    assert [(each.start, each.end, each.text) for each in both.segments] == [each[1:3] + each[:1] for each in found[2]]
    expected = [(word.text.strip(), word.start, word.end) for segment in found.segments for word in segment.words]
    assert [(each.word, each.start, each.end) for each in words.words] == expected


def test_segments_are_streamed(audio, transcriber, wav):
    found = transcriber(wav, timestamps="segments")
    events = list(audio.transcriptions.create(model="whisper", file=wav, stream=True))
    segments = [(each.text, each.start, each.end) for each in events if each.type == "transcript.text.segment"]
    assert segments == [each[:3] for each in found.segments]
    assert "".join(each.delta for each in events if each.type == "transcript.text.delta") == found.text
    assert (events[-1].type, events[-1].text) == ("transcript.text.done", found.text)


def test_other_formats_are_read(audio, transcriber):
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.stack([NOISE, NOISE], axis=1), 16000, format="FLAC")
    texts = [transcriber(np.round(NOISE * 32767) / 32768), transcriber(NOISE)]
    assert audio.transcriptions.create(model="whisper", file=("a.flac", file.getvalue())).text in texts


def test_what_is_decoded_has_limits(monkeypatch, tmp_path):
    monkeypatch.setattr(speech, "MAX_SECONDS", 3)
    for seconds, rate, message in (
        (4, 1000, "has 4,000 samples, 1,000 per second; expected at most 3 seconds of up to 48,000 samples$"),
        (0, 16000, "has no samples"),
        (2, 999, "has 999 samples per second; expected 1000 to 1000000"),
    ):
        with raises_line(DataError, f"^the recording {message}"):
            speech.read_audio(write_wav(tmp_path / "a.wav", np.zeros(seconds * rate), rate).read_bytes())
    soundfile = pytest.importorskip("soundfile")
    for seconds, rate, options, message in (
        (4, 1000, {"format": "FLAC"}, "has 4,000 samples, 1,000 per second; expected at most 3 seconds of"),
        (1, 500_000, {"format": "FLAC"}, "has 500,000 samples, 500,000 per second; expected at most 3 seconds"),
        (2, 1, {"format": "FLAC"}, "has 1 samples per second; expected 1000 to 1000000"),
        (0, 16000, {"format": "AU"}, "has no samples"),
        (math.nan, 16000, {"format": "AU", "subtype": "FLOAT"}, "has samples that are not finite"),
    ):
        file, samples = io.BytesIO(), np.zeros(int(np.nan_to_num(seconds, nan=1.0)) * rate, np.float32)
        soundfile.write(file, samples + np.float32(0.0 * seconds), rate, **options)
        with raises_line(DataError, f"^the recording {message}"):
            speech.read_audio(file.getvalue())


def test_wrong_requests_are_errors(audio, server, wav):
    for options, error, message in (
        ({"file": b"RIFF"}, openai.BadRequestError, "the recording is not a WAV file"),
        ({"file": b"abc"}, openai.APIStatusError, "the file is no recording|soundfile"),
        ({"file": b"RIFF" + bytes(100_000)}, openai.APIStatusError, "too long; expected at most 100000 bytes"),
        ({"language": "xx"}, openai.BadRequestError, "language is 'xx'; expected one of de, en"),
        ({"model": "text"}, openai.BadRequestError, "model 'text' cannot transcribe speech"),
        ({"temperature": 3}, openai.BadRequestError, 'temperature is "3"'),
        ({"timestamp_granularities": ["word"]}, openai.BadRequestError, "expected 'verbose_json'"),
        ({"extra_body": {"langauge": "de"}}, openai.BadRequestError, "unknown key 'langauge'"),
    ):
        for stream in (False, True):
            with pytest.raises(error, match=message) as caught:
                audio.transcriptions.create(**{"model": "whisper", "file": wav, "stream": stream, **options})
            assert "\n" not in caught.value.message
    headers = audio.transcriptions.with_raw_response.create(model="whisper", file=wav, prompt="Hi").headers
    assert headers["x-xformer-ignored"] == "prompt"
    for kind, status in (("application/json", 415), ("multipart/form-data; boundary=a", 400)):
        answer = server.send("POST", "/v1/audio/transcriptions", b"{}", {"Content-Type": kind})
        assert (answer[0], list(json.loads(answer[2]))) == (status, ["error"])
    assert server.get("/v1/models")["data"][1]["task"] == "transcription"


def test_forms_keep_every_byte():
    content = bytes(range(256)) * 2 + b"\r\n--b\r--bound\n\r\n--bound-1-\r\n--bound-1XYZ\r\n"
    parts = [
        (b'name="file"; filename="a; b.wav"\r\nContent-Type: audio/wav', content), (b'name="text"', "é\n".encode()),
        (b'name="list[]"', b"a"), (b'name="list[]"', b"b"), (b'name="empty"', b""),
    ]  # fmt: skip
    body = b"".join(b"--bound-1\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % part for part in parts)
    fields = parse_form('multipart/form-data; boundary="bound-1"', body + b"--bound-1--\r\n")
    assert fields == {"file": content, "text": "é\n", "list": ["a", "b"]}


def test_segments_arrive_one_by_one(transcriber):
    seen = []
    found = transcriber(NOISE, timestamps="segments", on_segment=lambda *each: seen.append(each))
    assert tuple(segment for segment, _ in seen) == found.segments
    assert "".join(text for _, text in seen) == found.text
    assert xf.Transcriber is type(transcriber)
