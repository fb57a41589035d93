"""`xformer transcribe`: write the text of spoken audio."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.cli import _io
from xformer.cli._console import line_progress, loading_progress
from xformer.cli._options import (
    BackendOption,
    CheckpointOption,
    QuantizeOption,
    SetOption,
    config_options,
    file_option,
    parse_generation_settings,
)
from xformer.config import Config, option
from xformer.data.audio import read_wav
from xformer.generation import GenerationConfig
from xformer.io import check_no_overwrite
from xformer.pipelines import Transcriber
from xformer.pipelines.transcription import TASKS
from xformer.runs.backend import open_backend
from xformer.text.corpus import one_line

HELP = """Write the text of WAV files with a public speech model such as whisper-tiny, one line per file.

\b
One file        xformer transcribe --model whisper-tiny speech.wav
Into English    xformer transcribe --model whisper-small --task translate rede.wav
Several files   xformer transcribe --model whisper-tiny --output texts.txt *.wav

Convert other formats first, e.g. ffmpeg -i talk.mp3 -ac 1 -ar 16000 talk.wav. Audio is split at pauses into windows \
of at most 30 seconds.
"""


class SpeechOptions(Config):
    """Arguments of `Transcriber.__call__` that are options of transcribe."""

    language: str | None = option(
        "Code of the spoken language, e.g. de; default: the model detects it.", default=None, panel="Speech"
    )
    task: str = option("Write the spoken language, or translate to English.", default="transcribe", choices=TASKS)


@config_options(SpeechOptions, GenerationConfig, names=["language", "task", "num_beams", "max_new_tokens"])
def transcribe(
    audio: Annotated[list[Path], typer.Argument(metavar="AUDIO.wav", help="WAV files.", show_default=False)],
    model: CheckpointOption,
    output: Annotated[str, file_option("--output", "Texts, one per file; - is standard output.")] = "-",
    *,
    settings: dict[str, Any],
    backend: BackendOption = "numpy",
    quantize: QuantizeOption = None,
    assignments: SetOption = None,
) -> None:
    """Transcribe WAV files."""
    settings |= parse_generation_settings(assignments)
    if output != _io.STANDARD:
        check_no_overwrite(output, [*audio, model / "config.json", model / "model.safetensors"], "--output")
    for path in audio:
        read_wav(path)  # report invalid files before the first text is written
    with loading_progress() as progress:
        transcriber = Transcriber.from_pretrained(model, open_backend(backend), quantize=quantize, progress=progress)
    with _io.open_output(output) as write, line_progress(len(audio), visible=output != _io.STANDARD) as advance:
        for path in audio:
            write([one_line(transcriber(path, **settings))])
            advance(1)
