"""Results of transcription with times, and their subtitles."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")  # line ends, too


class Word(NamedTuple):
    """A spoken word.

    Attributes:
        text: The word with its punctuation and the space before it, so that words concatenate to a text.
        start: Time at which it begins, in seconds.
        end: Time at which it ends.
        probability: Mean probability of its tokens.
    """

    text: str
    start: float
    end: float
    probability: float


class Segment(NamedTuple):
    """A part of a speech, usually a sentence.

    Attributes:
        text: Its text.
        start: Time at which it begins, in seconds.
        end: Time at which it ends.
        words: Its words; empty unless they were requested.
    """

    text: str
    start: float
    end: float
    words: tuple[Word, ...] = ()


class Transcription(NamedTuple):
    """Transcript of a recording, with times.

    Attributes:
        text: The whole text.
        language: Code of the spoken language.
        segments: The parts of the text in order; none overlaps the next one.
    """

    text: str
    language: str
    segments: tuple[Segment, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the transcription as a dictionary that can be written as JSON."""
        segments = [{**each._asdict(), "words": [word._asdict() for word in each.words]} for each in self.segments]
        return {**self._asdict(), "segments": segments}

    def to_srt(self) -> str:
        """Return subtitles in SubRip (.srt) format."""
        return "".join(
            f"{number}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{text.replace('-->', '->')}\n\n"
            for number, (each, text) in enumerate(self._cues(), start=1)
        )

    def to_vtt(self) -> str:
        """Return subtitles in the format WebVTT; a time before each word, if there are words."""
        cues = ["WEBVTT\n\n"]
        for segment, text in self._cues():
            lines, last = html.escape(text, quote=False), segment.start
            if segment.words:
                lines = ""
                for word in segment.words:
                    if last < word.start < segment.end:  # the format has no other times
                        lines, last = f"{lines}<{_time(word.start)}>", word.start
                    lines += html.escape(_CONTROL.sub(" ", word.text), quote=False)
            cues.append(f"{_time(segment.start)} --> {_time(segment.end)}\n{lines.strip()}\n\n")
        return "".join(cues)

    def _cues(self) -> Iterator[tuple[Segment, str]]:
        """Yield the segments with their texts in one line."""
        for segment in self.segments:
            if text := _CONTROL.sub(" ", segment.text).strip():
                yield segment, text


def _time(seconds: float, point: str = ".") -> str:
    """Format a time.

    Examples:
        >>> _time(3725.5)
        '01:02:05.500'
    """
    rest, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}{point}{milliseconds:03}"
