"""Numbers from 0 to 999,999 in English and German words.

German puts the units before the tens ("zweiundvierzig" is two-and-forty) and writes a number as one word, which makes
a small translation task with reordering.
"""

from __future__ import annotations

from xformer.errors import DataError

LARGEST = 999_999

# fmt: off
_ENGLISH = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]
_ENGLISH_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_ENGLISH += [f"{tens}-{ones}".rstrip("-") for tens in _ENGLISH_TENS for ones in ("", *_ENGLISH[1:10])]
# One is "ein" inside a number; "eins" stands only at its end.
_GERMAN = [
    "null", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
    "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
]
_GERMAN_TENS = ("zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig")
_GERMAN += [f"{ones}und{tens}" if ones else tens for tens in _GERMAN_TENS for ones in ("", *_GERMAN[1:10])]
# fmt: on
_ENGLISH_UNITS = {1000: "thousand", 100: "hundred"}
_GERMAN_UNITS = {1000: "tausend", 100: "hundert"}


def english(number: int) -> str:
    """Spell a number in English, without "and".

    Args:
        number: Integer from 0 to 999,999.

    Raises:
        DataError: For any other number.

    Examples:
        >>> english(342)
        'three hundred forty-two'
        >>> english(21_007)
        'twenty-one thousand seven'
    """
    return _spell(_checked(number), _ENGLISH_UNITS, _ENGLISH, " ")


def german(number: int) -> str:
    """Spell a number in German, in one word, with "ein" before "hundert" and "tausend"; see `english`.

    Examples:
        >>> german(342)
        'dreihundertzweiundvierzig'
        >>> german(1_001)
        'eintausendeins'
    """
    word = _spell(_checked(number), _GERMAN_UNITS, _GERMAN, "")
    return f"{word}s" if number % 100 == 1 else word


def _spell(number: int, units: dict[int, str], below_100: list[str], space: str) -> str:
    for size, name in units.items():
        count, rest = divmod(number, size)
        if count:
            words = [_spell(count, units, below_100, space), name]
            return space.join([*words, _spell(rest, units, below_100, space)] if rest else words)
    return below_100[number]


def _checked(number: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= LARGEST:
        raise DataError(f"number is {number!r}; expected an integer from 0 to {LARGEST}")
    return number
