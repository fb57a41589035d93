"""Normalization of input text: Unicode form, white space, invisible characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any, Literal, cast

from xformer.errors import ConfigError, DataError

_FORMS = ("NFC", "NFKC")

# Removed: controls that are not white space; soft hyphen; marks of writing direction; word joiners and the
# byte-order mark. The letter joiners (U+200C, U+200D) stay: some scripts, and emoji, need them.
_INVISIBLE = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]")
# Thai and other scripts separate words with the zero width space, which str.split() does not know.
_ZERO_WIDTH_SPACE = "\u200b"


def normalize_text(text: str, form: str = "NFC") -> str:
    r"""Return a text in one Unicode form, on one line, with single spaces and without invisible characters.

    The steps are:

    1. Remove control characters, soft hyphens, marks of writing direction, word joiners and byte-order marks. The
       letter joiners U+200C and U+200D stay.
    2. Apply the Unicode form.
    3. Replace each run of white space, including line ends, no-break spaces and the zero width space (U+200B), by one
       space, and strip both ends.

    The result is a fixed point: normalizing it again changes nothing.

    Args:
        text: The text.
        form: "NFC" composes letters and accents. "NFKC" also unifies variants of a letter, such as full width and
            ASCII. A tokenizer has its own form (`Tokenizer.train(unicode_form=...)`): choose NFKC there for the
            input of a model.

    Raises:
        ConfigError: For another form.
        DataError: If `text` is not a str.

    Examples:
        >>> normalize_text("Zwei  Ma\u0308nner\u00a0im\u200b Park\u00ad\n")
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


def check_texts(texts: Any, name: str = "texts") -> None:
    """Raise DataError for anything but a list, or another sequence of known length, of texts."""
    if isinstance(texts, str):
        raise DataError(f"{name} is a single text; expected a list of texts, e.g. ['Hello']")
    if isinstance(texts, type | Mapping) or not hasattr(texts, "__len__") or getattr(texts, "shape", None) == ():
        raise DataError(f"{name} has type {type(texts).__name__}; expected a list of texts")
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise DataError(f"got something that is not text ({wrong[0]!r:.60} in {name}); expected a list of str")
