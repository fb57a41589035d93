"""Rule-based sentence splitting for English and German.

The libraries for this are no longer maintained (pysbd), or download models or data (spaCy, nltk's punkt).

A full stop ends a sentence, an abbreviation, an initial or a German ordinal. Short lists of abbreviations and of words
that begin sentences decide most cases. Ambiguous stops are not split, because half a sentence does more harm to a
summary than two sentences in one.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from xformer.errors import ConfigError, DataError

_CLOSING = "\"'”\u2019“»«)\\]}"
_OPENING = "\"'“”\u2018„\u201a«»([{¿¡–—-"
# A stop with its closing quotes, brackets or citation mark; then a lookahead at the following word.
_STOP = re.compile(
    rf"(?P<stop>[.!?…]+)(?P<close>[{_CLOSING}]*(?:\[[\d,\s–-]+\])?)(?P<gap>\s*)"
    rf"(?=(?P<open>[{re.escape(_OPENING)}]*)(?P<next>\S+))"
)
_PARAGRAPH = re.compile(r"\n\s*\n")
_WORD = re.compile(r"[^\W_]+")
_DIGIT, _LETTER = r"[\d¹²³⁰⁴-⁹₀-₉①-⑨]", r"[^\W\d_]"


# Abbreviations that never end a sentence, do not before a number, or may (the following word decides); and words that,
# with a capital, begin a sentence.
_WORDS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@functools.cache
def _rules(language: str) -> tuple[re.Pattern[str], set[str]]:
    """Return the pattern of a stop within a sentence, and the words that, with a capital, begin sentences.

    The pattern is for two words, the stop, ")" for what closes, a space and the next word, in lower case.
    """
    opening, words = rf"[{re.escape(_OPENING)}]*", {key: " ".join(lines) for key, lines in _WORDS[language].items()}
    never, before_number, open = (
        re.escape(words[name]).replace(r"\ ", "|").replace(r"\.", rf"\.(?:\ {opening})?")  # "e.g." and "e. g."
        for name in ("never", "before_number", "open")
    )
    starters = words["starters"].split()
    ordinals = rf"{_DIGIT}{{1,3}}" if language == "de" else "(?!)"  # "3." means "third"
    # "J.-P", "U.S", "a.m", "Ph.D": one or two letters between stops; or a single letter.
    initials = rf"(?:{_LETTER}{{1,2}}\.-?)+{_LETTER}{{1,2}}|(?P<letter>{_LETTER})"
    within = rf"""(?:^|\ ){opening}(?:(?:{never})(?:(?<=!)|(?<=\w)\.)\)?\ \w+|(?:{before_number})\.\)?\ {_DIGIT}\w*
        |(?:{open}|{ordinals}|{initials})\.(?!\ (?:{"|".join(starters)})$)\)?\ \w+)$
        |^{_DIGIT}{{1,2}}\.\)?\ \w+$|(?<![.!?…])(?:\.\.|…)[.!?…]*\)?\ i$"""  # "1. Introduction", "So... I see"
    return re.compile(within, re.VERBOSE), set(starters)


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Split a text into sentences.

    Nothing but white space is lost: runs of it become single spaces. A blank line ends a sentence; a single line end is
    a space. A stop without a following space ends a sentence only between a lower-case word and a word that begins
    sentences (a common typo: "... decreases.In ...").

    Args:
        text: The text.
        language: "en" or "de".

    Raises:
        ConfigError: For another language.
        DataError: If `text` is not a str.

    Examples:
        >>> split_sentences("Dr. J. Smith et al. (2019) scored 3.5 points, i.e. more. We do not! Why?")
        ['Dr. J. Smith et al. (2019) scored 3.5 points, i.e. more.', 'We do not!', 'Why?']
        >>> split_sentences("Am 3. Mai kam z. B. Frau Dr. Ott. Sie blieb.", "de")
        ['Am 3. Mai kam z. B. Frau Dr. Ott.', 'Sie blieb.']
    """
    if language not in _WORDS:
        raise ConfigError(f"the language is {language!r}; expected one of: {', '.join(_WORDS)}")
    if not isinstance(text, str):
        raise DataError(f"got {text!r}; expected text, a str")
    sentences = []
    for paragraph in _PARAGRAPH.split(text):
        start = 0
        for stop in _STOP.finditer(paragraph):
            if _ends(paragraph[start : stop.start()], stop, language):
                sentences.append(paragraph[start : stop.end("close")])
                start = stop.end()
        sentences.append(paragraph[start:])
    return [" ".join(sentence.split()) for sentence in sentences if sentence.strip()]


def _ends(before: str, stop: re.Match[str], language: str) -> bool:
    """Return True if a sentence ends at a stop; `before` is the sentence up to it."""
    follower = _WORD.search(stop["next"])
    if follower is None or (follower[0][0].islower() and not any(map(str.isupper, follower[0]))):  # but "mBERT"
        return False
    (within, starters), word = _rules(language), follower[0].lower()
    tail = "" if before[-1:].isspace() else " ".join(before.split()[-2:])
    if not stop["gap"]:
        token = tail[tail.rfind(" ") + 1 :].lstrip(_OPENING)
        return (
            word in starters and stop["stop"] == "." and not stop["close"] and token.isalpha() and token[1:].islower()
        )
    found = within.search(f"{tail.lower()}{stop['stop']}{')' if stop['close'] else ''} {word}")
    # A lower-case letter is a word in English ("of size n.") and half an abbreviation in German ("z. B.").
    return found is None or (language == "en" and found["letter"] is not None and before[-1].islower())
