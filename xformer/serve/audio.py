"""OpenAI-compatible routes of speech: transcriptions, and translations into English."""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np
from starlette.responses import PlainTextResponse, Response

from xformer.data.audio import Audio, as_audio, read_wav
from xformer.errors import DataError
from xformer.pipelines import Segment, Transcriber
from xformer.serve import schema
from xformer.serve.jobs import Event, Job, JobError
from xformer.serve.models import Server
from xformer.serve.routes import Chunks, event_bytes, route, stream
from xformer.text.extras import require

MAX_SECONDS = 3600  # of a recording
_STREAM = '"transcript.text.segment" and "transcript.text.delta" for each segment, then "transcript.text.done", [DONE].'


@route("POST", "/v1/audio/transcriptions", _STREAM, is_form=True)
async def transcriptions(server: Server, request: schema.TranscriptionRequest) -> schema.Json | Response | Chunks:
    """Write the text of a recording."""
    return await _transcribe(server, request, "transcribe")


@route("POST", "/v1/audio/translations", _STREAM, is_form=True)
async def translations(server: Server, request: schema.TranscriptionRequest) -> schema.Json | Response | Chunks:
    """Translate a recording into English."""
    return await _transcribe(server, request, "translate")


async def _transcribe(server: Server, request: schema.TranscriptionRequest, task: str) -> Any:
    model = server.model(request.model, Transcriber, task="transcribe speech")
    form, granularities = request.response_format, request.timestamp_granularities
    if granularities and form != "verbose_json":
        message = f"timestamp_granularities is given and response_format is {form!r}; expected 'verbose_json'"
        raise JobError(message, param="timestamp_granularities")
    has_times = request.stream or form not in ("json", "text")
    options: dict[str, Any] = {"language": request.language, "temperature": request.temperature, "task": task}
    options["timestamps"] = "words" if "word" in granularities else "segments" if has_times else None

    def work(job: Job) -> tuple[Any, float]:
        numbers = itertools.count()

        def on_segment(segment: Segment, text: str) -> None:
            job.emit("segment", (next(numbers), segment, text))
            job.flush()

        samples, rate = read_audio(request.file)
        listen = on_segment if request.stream else None
        found = model.pipeline(samples, sample_rate=rate, on_segment=listen, progress=lambda *_: job.check(), **options)
        return found, len(samples) / rate

    job = Job(server.config.timeout)
    model.worker.start(job, work)
    if request.stream:
        return await stream(job.events(), _write, b"data: [DONE]\n\n")
    found, seconds = await job.result()
    usage = {"type": "duration", "seconds": seconds}
    if form in ("text", "srt", "vtt"):
        return PlainTextResponse(f"{found}\n" if form == "text" else getattr(found, f"to_{form}")())
    if form == "json":
        return {"text": found, "usage": usage}
    answer = {"task": task, "language": found.language, "duration": seconds, "text": found.text, "usage": usage}
    if "word" in granularities:
        words = (word for segment in found.segments for word in segment.words)
        answer["words"] = [{"word": word.text.strip(), "start": word.start, "end": word.end} for word in words]
    if "segment" in granularities or not granularities:
        answer["segments"] = [_segment(number, each) for number, each in enumerate(found.segments)]
    return answer


def read_audio(content: bytes) -> Audio:
    """Return the samples of a recording, the mean of its channels; other formats than WAV need soundfile."""
    if content[:4] == b"RIFF":
        audio = read_wav(content)
        _check_length(len(audio.samples), audio.sample_rate)
        return audio
    soundfile = require("soundfile")
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            _check_length(file.frames, file.samplerate)
            blocks = [block.mean(axis=1) for block in file.blocks(2**16, dtype="float32", always_2d=True)]
            return as_audio("the recording", np.concatenate([np.empty(0, np.float32), *blocks]), file.samplerate)
    except soundfile.LibsndfileError as error:
        raise DataError(f"the file is no recording ({error.error_string}); expected WAV, MP3, FLAC or Ogg") from error


def _check_length(num_samples: int, rate: int) -> None:
    """Refuse what is too long: a few bytes of FLAC can be hours of silence."""
    if num_samples > MAX_SECONDS * min(rate, 48_000):
        received = f"the recording has {num_samples:,} samples, {rate:,} per second"
        raise DataError(f"{received}; expected at most {MAX_SECONDS:,} seconds of up to 48,000 samples")


def _segment(number: int, segment: Segment) -> schema.Json:
    return {"id": number, "start": segment.start, "end": segment.end, "text": segment.text}


def _write(event: Event) -> list[bytes]:
    """Return the server-sent events of a segment or of the result."""
    if event.name == "segment":
        number, segment, text = event.data
        whole = {**_segment(number, segment), "id": f"seg_{number}", "speaker": ""}
        parts = [{"type": "transcript.text.segment", **whole}, {"type": "transcript.text.delta", "delta": text}]
    else:
        found, seconds = event.data
        usage = {"type": "duration", "seconds": seconds}
        parts = [{"type": "transcript.text.done", "text": found.text, "usage": usage}]
    return [event_bytes("", part) for part in parts]
