"""Numbers from 0 to 999,999 in English and German words.

German puts the units before the tens ("zweiundvierzig" is two-and-forty) and writes a number as one word, which makes
a small translation task with reordering.
"""

from __future__ import annotations

from xformer.errors import DataError

LARGEST = 999_999

# fmt: off
_ENGLISH_BELOW_20 = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
_ENGLISH_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

# One is "ein" inside a number; "eins" stands only at its end.
_GERMAN_BELOW_20 = (
    "null", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
    "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
)
_GERMAN_TENS = (
    "", "", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig",
)
# fmt: on


def english(number: int) -> str:
    """Spell a number in English, without "and".

    Args:
        number: Integer from 0 to 999,999.

    Raises:
        DataError: For any other number.

    Example:
        >>> english(342)
        'three hundred forty-two'
        >>> english(21_007)
        'twenty-one thousand seven'
    """
    thousands, rest = divmod(_checked(number), 1000)
    parts = [_english_below_1000(thousands), "thousand"] if thousands else []
    if rest or not thousands:
        parts.append(_english_below_1000(rest))
    return " ".join(parts)


def german(number: int) -> str:
    """Spell a number in German, in one word, with "ein" before "hundert" and "tausend".

    Args:
        number: Integer from 0 to 999,999.

    Raises:
        DataError: For any other number.

    Example:
        >>> german(342)
        'dreihundertzweiundvierzig'
        >>> german(1_001)
        'eintausendeins'
    """
    thousands, rest = divmod(_checked(number), 1000)
    word = f"{_german_below_1000(thousands)}tausend" if thousands else ""
    if rest or not thousands:
        word += _german_below_1000(rest)
        if rest % 100 == 1:
            word += "s"
    return word


def _english_below_1000(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    parts = [_ENGLISH_BELOW_20[hundreds], "hundred"] if hundreds else []
    if rest or not hundreds:
        parts.append(_english_below_100(rest))
    return " ".join(parts)


def _english_below_100(number: int) -> str:
    if number < 20:
        return _ENGLISH_BELOW_20[number]
    tens, units = divmod(number, 10)
    return f"{_ENGLISH_TENS[tens]}-{_ENGLISH_BELOW_20[units]}" if units else _ENGLISH_TENS[tens]


def _german_below_1000(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    word = f"{_GERMAN_BELOW_20[hundreds]}hundert" if hundreds else ""
    if rest or not hundreds:
        word += _german_below_100(rest)
    return word


def _german_below_100(number: int) -> str:
    if number < 20:
        return _GERMAN_BELOW_20[number]
    tens, units = divmod(number, 10)
    return f"{_GERMAN_BELOW_20[units]}und{_GERMAN_TENS[tens]}" if units else _GERMAN_TENS[tens]


def _checked(number: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= LARGEST:
        raise DataError(f"number is {number!r}; expected an integer from 0 to {LARGEST}")
    return number
