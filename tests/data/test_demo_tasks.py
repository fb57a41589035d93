import functools
import random

import pytest

from xformer.data.demo_tasks import english, german, numbers_task
from xformer.errors import ConfigError, DataError


@functools.cache
def numbers() -> dict[str, int]:
    """Return the numbers by their English names, which takes a second."""
    return {english(number): number for number in range(100_000)}


def sources(task):
    return set(task.train.source), set(task.valid.source), set(task.test.source)


def test_sizes_and_disjoint_splits():
    task = numbers_task(seed=3, num_train=2000, num_valid=70, num_test=300)
    assert (len(task.train), len(task.valid), len(task.test)) == (2000, 70, 300)
    train, valid, test = sources(task)
    assert (len(train), len(valid), len(test)) == (2000, 70, 300)
    assert len(train | valid | test) == 2370


def test_the_seed_decides_the_task():
    sizes = {"num_train": 500, "num_valid": 20, "num_test": 50}
    random.seed(0)
    state = random.getstate()
    task = numbers_task(seed=3, **sizes)
    assert task == numbers_task(seed=3, **sizes)
    assert random.getstate() == state
    others = [numbers_task(seed=seed, **sizes) for seed in (4, -3)]
    assert all(set(task.test.source) != set(other.test.source) for other in others)


def test_numbers_are_spelled_in_both_languages():
    task = numbers_task(num_train=700, num_valid=50, num_test=250, largest=999)
    everything = [numbers()[line] for split in (task.train, task.valid, task.test) for line in split.source]
    assert sorted(everything) == list(range(1000))
    for split in (task.train, task.valid, task.test):
        assert split.target == [german(numbers()[line]) for line in split.source]


def test_empty_splits_are_refused():
    for size in ("num_train", "num_valid", "num_test"):
        with pytest.raises(ConfigError, match=r"num_train, num_valid, num_test are .*; expected 1 or more of each"):
            numbers_task(**{size: 0})


def test_largest_out_of_range():
    for largest in (99, 1_000_000):
        with pytest.raises(ConfigError, match=f"^largest is {largest}; expected 100 to 999999$"):
            numbers_task(largest=largest)


def test_too_few_numbers_for_the_splits():
    with pytest.raises(ConfigError, match=r"the splits need 1001 numbers; expected at most 1000, those from 0 to 999"):
        numbers_task(num_train=800, num_valid=101, num_test=100, largest=999)
    with pytest.raises(ConfigError, match="num_train is 108; expected at least 109, the numbers that show every word"):
        numbers_task(num_train=108, num_valid=1, num_test=1, largest=999)


# --- Number words ---------------------------------------------------------------------------------------------------

# Written by hand; the German as in Duden, with "ein" before "hundert" and "tausend".
TRUTHS = [
    (0, "zero", "null"), (1, "one", "eins"), (7, "seven", "sieben"), (12, "twelve", "zwölf"),
    (16, "sixteen", "sechzehn"), (17, "seventeen", "siebzehn"), (21, "twenty-one", "einundzwanzig"),
    (30, "thirty", "dreißig"), (42, "forty-two", "zweiundvierzig"), (66, "sixty-six", "sechsundsechzig"),
    (70, "seventy", "siebzig"), (100, "one hundred", "einhundert"), (101, "one hundred one", "einhunderteins"),
    (121, "one hundred twenty-one", "einhunderteinundzwanzig"), (201, "two hundred one", "zweihunderteins"),
    (1000, "one thousand", "eintausend"), (1001, "one thousand one", "eintausendeins"),
    (1100, "one thousand one hundred", "eintausendeinhundert"), (21_000, "twenty-one thousand", "einundzwanzigtausend"),
    (30_017, "thirty thousand seventeen", "dreißigtausendsiebzehn"),
    (101_101, "one hundred one thousand one hundred one", "einhunderteintausendeinhunderteins"),
    (999_999, "nine hundred ninety-nine thousand nine hundred ninety-nine",
     "neunhundertneunundneunzigtausendneunhundertneunundneunzig"),
]  # fmt: skip


def test_words_written_by_hand():
    for number, in_english, in_german in TRUTHS:
        assert (english(number), german(number)) == (in_english, in_german)


def test_other_numbers_are_refused():
    for number in (-1, 1_000_000, 3.0, "7", True, None):
        for words in (english, german):
            with pytest.raises(DataError, match=f"^number is {number!r}; expected an integer from 0 to 999999$"):
                words(number)
