import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xformer.data.demo_tasks import english, german, numbers_task
from xformer.errors import ConfigError, DataError
from xformer.tokenizers.models import UNK_ID
from xformer.tokenizers.ours import Tokenizer

NUMBER_OF = {english(number): number for number in range(100_000)}


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


def test_the_tokenizer_covers_the_task():
    task = numbers_task(num_train=3000, num_valid=50, num_test=200)
    tokenizer = Tokenizer.train(task.train.source + task.train.target, 128)
    assert tokenizer.vocab_size == 128
    for line in task.test.source + task.test.target:
        ids = tokenizer.encode(line)
        assert UNK_ID not in ids
        assert tokenizer.decode(ids) == line


def test_the_order_of_training_pairs_is_random():
    lengths = [len(line) for line in numbers_task(num_train=1000, num_valid=10, num_test=10).train.source]
    assert lengths != sorted(lengths)
    assert sum(lengths[:500]) == pytest.approx(sum(lengths[500:]), rel=0.1)


def test_numbers_are_spelled_in_both_languages():
    task = numbers_task(num_train=700, num_valid=50, num_test=250, largest=999)
    everything = [NUMBER_OF[line] for split in (task.train, task.valid, task.test) for line in split.source]
    assert sorted(everything) == list(range(1000))
    for split in (task.train, task.valid, task.test):
        assert split.target == [german(NUMBER_OF[line]) for line in split.source]


@pytest.mark.parametrize("largest", [999, 99_999, 999_999])
def test_training_numbers_show_every_word_in_every_position(largest):
    task = numbers_task(num_train=250, num_valid=50, num_test=200, largest=largest)
    train = set(task.train.source)
    assert {english(number) for number in [*range(100), *range(100, 1000, 100)]} <= train
    words = {word for line in task.test.source for word in re.findall(r"\w+", line)}
    assert words <= {word for line in train for word in re.findall(r"\w+", line)}
    if largest > 999:
        assert {english(1000 * number) for number in range(1, 100)} <= train
    if largest > 99_999:
        assert {english(1000 * number) for number in range(100, 1000, 100)} <= train


def test_numbers_stay_within_the_largest():
    task = numbers_task(num_train=900, num_valid=50, num_test=84, largest=1033)
    everything = set.union(*sources(task))
    assert everything == {english(number) for number in range(1034)}


def test_numbers_of_every_length_are_drawn():
    task = numbers_task(num_train=3000, num_valid=100, num_test=400)
    short = sum("thousand" not in line for line in task.test.source)
    assert 0.15 < short / 400 < 0.4


@pytest.mark.parametrize("size", ["num_train", "num_valid", "num_test"])
def test_empty_splits_are_refused(size):
    with pytest.raises(ConfigError, match=r"num_train, num_valid, num_test are .*; expected 1 or more of each"):
        numbers_task(**{size: 0})


@pytest.mark.parametrize("largest", [99, 1_000_000])
def test_largest_out_of_range(largest):
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
    (0, "zero", "null"),
    (1, "one", "eins"),
    (2, "two", "zwei"),
    (6, "six", "sechs"),
    (7, "seven", "sieben"),
    (10, "ten", "zehn"),
    (11, "eleven", "elf"),
    (12, "twelve", "zwölf"),
    (13, "thirteen", "dreizehn"),
    (15, "fifteen", "fünfzehn"),
    (16, "sixteen", "sechzehn"),
    (17, "seventeen", "siebzehn"),
    (18, "eighteen", "achtzehn"),
    (20, "twenty", "zwanzig"),
    (21, "twenty-one", "einundzwanzig"),
    (30, "thirty", "dreißig"),
    (42, "forty-two", "zweiundvierzig"),
    (60, "sixty", "sechzig"),
    (66, "sixty-six", "sechsundsechzig"),
    (70, "seventy", "siebzig"),
    (77, "seventy-seven", "siebenundsiebzig"),
    (80, "eighty", "achtzig"),
    (99, "ninety-nine", "neunundneunzig"),
    (100, "one hundred", "einhundert"),
    (101, "one hundred one", "einhunderteins"),
    (111, "one hundred eleven", "einhundertelf"),
    (121, "one hundred twenty-one", "einhunderteinundzwanzig"),
    (201, "two hundred one", "zweihunderteins"),
    (342, "three hundred forty-two", "dreihundertzweiundvierzig"),
    (1000, "one thousand", "eintausend"),
    (1001, "one thousand one", "eintausendeins"),
    (1100, "one thousand one hundred", "eintausendeinhundert"),
    (2016, "two thousand sixteen", "zweitausendsechzehn"),
    (21_000, "twenty-one thousand", "einundzwanzigtausend"),
    (30_017, "thirty thousand seventeen", "dreißigtausendsiebzehn"),
    (100_000, "one hundred thousand", "einhunderttausend"),
    (101_000, "one hundred one thousand", "einhunderteintausend"),
    (101_101, "one hundred one thousand one hundred one", "einhunderteintausendeinhunderteins"),
    (
        999_999,
        "nine hundred ninety-nine thousand nine hundred ninety-nine",
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
    ),
]

# The test's own way back, with its own tables.
# fmt: off
ENGLISH_VALUES = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
    "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50,
    "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}
GERMAN_VALUES = {
    "null": 0, "eins": 1, "zwei": 2, "drei": 3, "vier": 4, "fünf": 5, "sechs": 6, "sieben": 7, "acht": 8,
    "neun": 9, "zehn": 10, "elf": 11, "zwölf": 12, "dreizehn": 13, "vierzehn": 14, "fünfzehn": 15,
    "sechzehn": 16, "siebzehn": 17, "achtzehn": 18, "neunzehn": 19, "zwanzig": 20, "dreißig": 30, "vierzig": 40,
    "fünfzig": 50, "sechzig": 60, "siebzig": 70, "achtzig": 80, "neunzig": 90,
}
# fmt: on


def read_english(words):
    total = part = 0
    for word in words.replace("-", " ").split(" "):
        if word == "thousand":
            total, part = 1000 * part, 0
        elif word == "hundred":
            part *= 100
        else:
            part += ENGLISH_VALUES[word]
    return total + part


def read_german(word):
    head, tausend, tail = word.partition("tausend")
    if not tausend:
        return read_german_below_1000(word)
    # "ein", never "eins", before "tausend".
    return 1000 * read_german_below_1000(head, one="ein") + (read_german_below_1000(tail) if tail else 0)


def read_german_below_1000(word, one="eins"):
    head, hundert, tail = word.partition("hundert")
    if not hundert:
        return read_german_below_100(word, one)
    return 100 * read_german_below_100(head, "ein") + (read_german_below_100(tail, one) if tail else 0)


def read_german_below_100(word, one):
    values = {word: value for word, value in GERMAN_VALUES.items() if value != 1} | {one: 1}
    units, und, tens = word.partition("und")
    if not und:
        return values[word]
    units = (values | {"ein": 1})[units]
    assert 1 <= units <= 9
    assert values[tens] in range(20, 100, 10)
    return values[tens] + units


@pytest.mark.parametrize(("number", "in_english", "in_german"), TRUTHS)
def test_words_written_by_hand(number, in_english, in_german):
    assert english(number) == in_english
    assert german(number) == in_german


@given(st.integers(0, 999_999))
def test_words_can_be_read_back(number):
    assert read_english(english(number)) == number
    assert read_german(german(number)) == number


@pytest.mark.parametrize("words", [english, german])
def test_words_are_distinct(words):
    numbers = [*range(20_000), *range(100_000, 103_000), 999_999]
    assert len({words(number) for number in numbers}) == len(numbers)


@pytest.mark.parametrize("words", [english, german])
@pytest.mark.parametrize("number", [-1, 1_000_000, 3.0, "7", True, None])
def test_other_numbers_are_refused(words, number):
    with pytest.raises(DataError, match=f"^number is {number!r}; expected an integer from 0 to 999999$"):
        words(number)
