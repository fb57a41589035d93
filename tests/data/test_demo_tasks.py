import random
import re

import pytest

from xformer.data.demo_tasks import copy_task, numbers_task, reverse_task
from xformer.data.number_words import english, german
from xformer.errors import ConfigError
from xformer.tokenizers.models import UNK_ID
from xformer.tokenizers.ours import Tokenizer

TASKS = [numbers_task, reverse_task, copy_task]
NUMBER_OF = {english(number): number for number in range(100_000)}


def sources(task):
    return set(task.train.source), set(task.valid.source), set(task.test.source)


@pytest.mark.parametrize("make", TASKS)
def test_sizes_and_disjoint_splits(make):
    task = make(seed=3, num_train=2000, num_valid=70, num_test=300)
    assert (len(task.train), len(task.valid), len(task.test)) == (2000, 70, 300)
    train, valid, test = sources(task)
    assert (len(train), len(valid), len(test)) == (2000, 70, 300)
    assert len(train | valid | test) == 2370


@pytest.mark.parametrize("make", TASKS)
def test_the_seed_decides_the_task(make):
    sizes = {"num_train": 500, "num_valid": 20, "num_test": 50}
    random.seed(0)
    state = random.getstate()
    task = make(seed=3, **sizes)
    assert task == make(seed=3, **sizes)
    assert random.getstate() == state
    others = [make(seed=seed, **sizes) for seed in (4, -3)]
    assert all(set(task.test.source) != set(other.test.source) for other in others)


@pytest.mark.parametrize("make", TASKS)
def test_the_tokenizer_covers_the_task(make):
    task = make(num_train=3000, num_valid=50, num_test=200)
    tokenizer = Tokenizer.train(task.train.source + task.train.target, task.vocab_size, model=task.tokenizer_model)
    assert tokenizer.vocab_size == task.vocab_size
    for line in task.test.source + task.test.target:
        ids = tokenizer.encode(line)
        assert UNK_ID not in ids
        assert tokenizer.decode(ids) == line


@pytest.mark.parametrize("make", TASKS)
def test_the_order_of_training_pairs_is_random(make):
    lengths = [len(line) for line in make(num_train=1000, num_valid=10, num_test=10).train.source]
    assert lengths != sorted(lengths)
    assert sum(lengths[:500]) == pytest.approx(sum(lengths[500:]), rel=0.1)


def test_numbers_are_spelled_in_both_languages():
    task = numbers_task(num_train=700, num_valid=50, num_test=250, largest=999)
    assert task.name == "numbers"
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


@pytest.mark.parametrize(("make", "step"), [(reverse_task, -1), (copy_task, 1)])
def test_sequences(make, step):
    task = make(num_train=3000, num_valid=100, num_test=300)
    assert task.name == {-1: "reverse", 1: "copy"}[step]
    for split in (task.train, task.valid, task.test):
        for source, target in zip(split.source, split.target, strict=True):
            symbols = source.split(" ")
            assert set(symbols) <= set("3456789")
            assert 4 <= len(symbols) <= 10
            assert target.split(" ") == symbols[::step]
    assert {len(line.split(" ")) for line in task.test.source} == set(range(4, 11))


def test_sequence_lengths_can_be_chosen():
    task = reverse_task(num_train=50, num_valid=5, num_test=5, shortest=3, longest=3)
    assert {len(line.split(" ")) for line in task.train.source} == {3}


def test_reverse_and_copy_draw_different_sequences():
    sizes = {"num_train": 100, "num_valid": 10, "num_test": 50}
    assert reverse_task(**sizes).test.source != copy_task(**sizes).test.source


@pytest.mark.parametrize("make", TASKS)
@pytest.mark.parametrize("size", ["num_train", "num_valid", "num_test"])
def test_empty_splits_are_refused(make, size):
    with pytest.raises(ConfigError, match=r"num_train, num_valid, num_test are .*; expected 1 or more of each"):
        make(**{size: 0})


@pytest.mark.parametrize("largest", [99, 1_000_000])
def test_largest_out_of_range(largest):
    with pytest.raises(ConfigError, match=f"^largest is {largest}; expected 100 to 999999$"):
        numbers_task(largest=largest)


def test_too_few_numbers_for_the_splits():
    with pytest.raises(ConfigError, match=r"the splits need 1001 numbers; expected at most 1000, those from 0 to 999"):
        numbers_task(num_train=800, num_valid=101, num_test=100, largest=999)
    with pytest.raises(ConfigError, match="num_train is 108; expected at least 109, the numbers that show every word"):
        numbers_task(num_train=108, num_valid=1, num_test=1, largest=999)


def test_too_few_sequences_for_the_splits():
    with pytest.raises(ConfigError, match=r"need 25 different sequences; expected at most 24; raise longest=2"):
        reverse_task(num_train=23, num_valid=1, num_test=1, shortest=1, longest=2)


@pytest.mark.parametrize(("shortest", "longest"), [(0, 5), (6, 5)])
def test_lengths_out_of_order(shortest, longest):
    with pytest.raises(ConfigError, match=f"lengths are {shortest} to {longest}; expected 1 or more, the shortest"):
        copy_task(shortest=shortest, longest=longest)
