r"""`xformer transcribe`: write the text of spoken audio.

Write the text of WAV files with a public speech model such as whisper-tiny, one line per file, or subtitles.

\b
One file        xformer transcribe --model whisper-tiny speech.wav
Into English    xformer transcribe --model whisper-small --task translate rede.wav
Several files   xformer transcribe --model whisper-tiny --output texts.txt *.wav
Subtitles       xformer transcribe --model whisper-tiny --format srt --output speech.srt speech.wav
Times of words  xformer transcribe --model whisper-tiny --format json --timestamps words speech.wav
Noisy speech    xformer transcribe --model whisper-tiny --temperature 0 --temperature 0.4 --temperature 0.8 speech.wav

Convert other formats first, e.g. ffmpeg -i talk.mp3 -ac 1 -ar 16000 talk.wav. For txt, audio is split at pauses into
windows of at most 30 seconds, which several cores transcribe at a time. With times, a window begins where the last
segment before it ends. json is one object per line, one for each file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from xformer.cli import _io
from xformer.cli._options import CheckpointOption, argument, config_options, file_option, value_option
from xformer.data.audio import read_wav
from xformer.errors import ConfigError
from xformer.generation import GenerationConfig
from xformer.pipelines import Transcriber
from xformer.pipelines.options import SpeechOptions
from xformer.text.corpus import one_line


@config_options(
    GenerationConfig,
    SpeechOptions,
    names=["language", "task", "timestamps", "temperature", "num_beams", "max_new_tokens"],
)
def transcribe(
    audio: Annotated[list[Path], argument("AUDIO.wav", "WAV files.")],
    model: CheckpointOption,
    output: Annotated[str, file_option("--output", "Texts, one per file; - is standard output.")] = "-",
    target: Annotated[
        Literal["txt", "srt", "vtt", "json"], value_option("--format", "txt|srt|vtt|json", "Text, subtitles, or JSON.")
    ] = "txt",
    *,
    settings: dict[str, Any],
    loading: dict[str, Any],
) -> None:
    """Transcribe WAV files."""
    if target == "txt" and "timestamps" in settings:
        raise ConfigError("--timestamps is given and --format is txt; expected --format srt, vtt or json")
    if target == "srt" and settings.get("timestamps") == "words":
        raise ConfigError("--timestamps is words and --format is srt, which has times of lines; expected vtt or json")
    if target in ("srt", "vtt") and len(audio) > 1:
        raise ConfigError(f"--format {target} has subtitles of one file; got {len(audio)} files: run it for each")
    if target != "txt":
        settings = {"timestamps": "segments", **settings}
    _io.check_output(output, audio, model)
    for path in audio:
        read_wav(path)  # report invalid files before the first text is written
    transcriber = _io.load_pipeline(Transcriber, model, **loading)
    with _io.open_output(output) as write:
        for path in audio:
            with _io.percent_progress(path.name, visible=output != _io.STANDARD) as progress:
                result = transcriber(path, progress=progress, **settings)
            if target == "txt":
                write([one_line(result)])
            elif target == "json":
                write([json.dumps({"file": str(path), **result.to_dict()}, ensure_ascii=False)])
            else:
                write((result.to_srt() if target == "srt" else result.to_vtt()).splitlines())
