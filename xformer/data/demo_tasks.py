"""A synthetic task that a Transformer learns within a minute: English number words to German.

German puts the units before the tens ("zweiundvierzig" is two-and-forty) and writes a number as one word, which makes
a small translation task with reordering. Numbers are drawn by Python's `random.Random`, seeded with the seed: the same
arguments give the same task, and no global state is read or changed.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from xformer.errors import ConfigError, DataError
from xformer.text.corpus import ParallelCorpus

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


@dataclass(frozen=True)
class DemoTask:
    """A synthetic translation task whose splits share no source.

    Attributes:
        description: Description in a few words.
        train: Training pairs.
        valid: Validation pairs.
        test: Test pairs.
    """

    description: str
    train: ParallelCorpus
    valid: ParallelCorpus
    test: ParallelCorpus

    @property
    def texts(self) -> dict[str, Any]:
        """The texts as arguments of `xformer.train`."""
        train, valid = self.train, self.valid
        names = ("source", "target", "valid_source", "valid_target")
        return dict(zip(names, (train.source, train.target, valid.source, valid.target), strict=True))


def numbers_task(
    seed: int = 0, num_train: int = 20_000, num_valid: int = 200, num_test: int = 1000, largest: int = LARGEST
) -> DemoTask:
    """Make a task of English to German number words.

    Numbers of three, four, five and six digits are equally frequent if there are enough. `train` always has the
    numbers that show each word in each position: 0 to 99, the hundreds, and all of these as thousands.

    Args:
        seed: Seed of the task.
        num_train: Number of training pairs.
        num_valid: Number of validation pairs.
        num_test: Number of test pairs.
        largest: Largest number.

    Raises:
        ConfigError: If `largest` is out of range or there are too few numbers for the splits.
    """
    if min(num_train, num_valid, num_test) < 1:
        sizes = num_train, num_valid, num_test
        raise ConfigError(f"num_train, num_valid, num_test are {sizes}; expected 1 or more of each")
    if not 100 <= largest <= LARGEST:
        raise ConfigError(f"largest is {largest}; expected 100 to {LARGEST}")
    small = [*range(100), *range(100, 1000, 100)]
    numbers = [*small, *(1000 * thousands for thousands in small[1:])]
    basic = [number for number in numbers if number <= largest]  # each word in each position
    num_drawn = num_valid + num_test + num_train - len(basic)
    if num_train < len(basic):
        raise ConfigError(f"num_train is {num_train}; expected at least {len(basic)}, the numbers that show every word")
    if len(basic) + num_drawn > largest + 1:
        expected = f"at most {largest + 1}, those from 0 to {largest}"
        raise ConfigError(f"the splits need {len(basic) + num_drawn} numbers; expected {expected}")
    generator = random.Random(f"numbers/{seed}")
    drawn = _draw_numbers(generator, num_drawn, largest, set(basic))
    generator.shuffle(drawn)
    held_out = num_valid + num_test
    train = basic + drawn[held_out:]
    generator.shuffle(train)
    splits = [train, drawn[:num_valid], drawn[num_valid:held_out]]
    corpora = [ParallelCorpus([*map(english, numbers)], [*map(german, numbers)]) for numbers in splits]
    return DemoTask(f"English number words from 0 to {largest:,}, in lower case, to German", *corpora)


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


def _draw_numbers(generator: random.Random, count: int, largest: int, basic: set[int]) -> list[int]:
    """Draw distinct numbers that are not basic, in turn from those of three, four, five and six digits."""
    pools = []
    for low in (100, 1000, 10_000, 100_000):
        numbers = range(low, min(10 * low, largest + 1))
        sample = generator.sample(numbers, min(count + len(basic), len(numbers)))
        pools.append([number for number in sample if number not in basic])
    turns = itertools.zip_longest(*pools)
    return [number for turn in turns for number in turn if number is not None][:count]
