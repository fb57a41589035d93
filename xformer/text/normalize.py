"""Cleaning of text that people and programs hand in: Unicode form, white space, invisible characters."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal, cast

from xformer.errors import ConfigError, DataError

_FORMS = ("NFC", "NFKC")

# Removed: controls that are not white space; soft hyphen; marks of writing direction; joiners of words and the
# byte-order mark. The joiners of letters (U+200C, U+200D) stay: spelling in some scripts, and emoji, need them.
_INVISIBLE = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]")
# "Zero width space" is where Thai and others end a word without a gap; str.split() does not know it.
_ZERO_WIDTH_SPACE = "\u200b"


def normalize_text(text: str, form: str = "NFC") -> str:
    """Return a text in one Unicode form, on one line, with single spaces and nothing invisible.

    In this order: controls, soft hyphens, marks of writing direction, word joiners and byte-order marks are removed
    (the joiners of letters, U+200C and U+200D, stay); what remains is brought into the form; each run of white space,
    line ends, no-break spaces and the zero width space (U+200B) among it, becomes one space, and none is left at the
    ends. Doing it twice changes nothing more.

    form: "NFC" composes letters and accents; "NFKC" also makes one of variants of a letter, such as full width and
        ASCII. A tokenizer keeps a form of its own for all its text (`Tokenizer.train(unicode_form=...)`), so choose
        NFKC there, not here, for a model's input; text that is in its form already passes in no time.

    Raises ConfigError for another form, DataError for what is not text.

    >>> normalize_text("Zwei  Ma\u0308nner\u00a0im\u200b Park\u00ad\\n")
    'Zwei Männer im Park'
    >>> normalize_text("\ufb01ne\u3000\uff54e\uff58t", "NFKC")
    'fine text'
    """
    check_form(form)
    if not isinstance(text, str):
        raise DataError(f"got {text!r}; expected text, a str")
    visible = _INVISIBLE.sub("", text).replace(_ZERO_WIDTH_SPACE, " ")
    return " ".join(unicodedata.normalize(cast("Literal['NFC', 'NFKC']", form), visible).split())


def check_form(form: str) -> None:
    """Raise ConfigError for a Unicode form that is neither NFC nor NFKC."""
    if form not in _FORMS:
        raise ConfigError(f"the Unicode form is {form!r}; expected one of: {', '.join(_FORMS)}")
