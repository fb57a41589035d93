"""Small synthetic tasks that a Transformer learns in a minute: number words, reversing and copying.

Text is generated with Python's `random.Random`, seeded with the name of the task and the seed: the same arguments give
the same task, and no global state is read or changed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xformer.data.number_words import LARGEST, english, german
from xformer.errors import ConfigError
from xformer.text.corpus import ParallelCorpus

# The classic toy task has the vocabulary 0 to 9, of which 0, 1 and 2 are padding, start and end.
_SYMBOLS = "3456789"


@dataclass(frozen=True)
class DemoTask:
    """A synthetic translation task whose splits share no source.

    Attributes:
        name: Name of the task.
        description: Description in a few words.
        train: Training pairs.
        valid: Validation pairs.
        test: Test pairs.
        tokenizer_model: Argument `model` of `Tokenizer.train`, for source and target of `train` together.
        vocab_size: Argument `vocab_size` of `Tokenizer.train`.
    """

    name: str
    description: str
    train: ParallelCorpus
    valid: ParallelCorpus
    test: ParallelCorpus
    tokenizer_model: str
    vocab_size: int

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
    _check_sizes(num_train, num_valid, num_test)
    if not 100 <= largest <= LARGEST:
        raise ConfigError(f"largest is {largest}; expected 100 to {LARGEST}")
    basic = _basic_numbers(largest)
    num_drawn = num_valid + num_test + num_train - len(basic)
    if num_train < len(basic):
        raise ConfigError(f"num_train is {num_train}; expected at least {len(basic)}, the numbers that show every word")
    if len(basic) + num_drawn > largest + 1:
        raise ConfigError(
            f"the splits need {len(basic) + num_drawn} numbers; expected at most {largest + 1}, "
            f"those from 0 to {largest}"
        )
    generator = random.Random(f"numbers/{seed}")
    drawn = _draw_numbers(generator, num_drawn, largest, set(basic))
    generator.shuffle(drawn)
    held_out = num_valid + num_test
    train = basic + drawn[held_out:]
    generator.shuffle(train)
    splits = train, drawn[:num_valid], drawn[num_valid:held_out]
    return _make_task(
        "numbers",
        f"English number words from 0 to {largest:,}, in lower case, to German",
        splits,
        lambda number: (english(number), german(number)),
        "bpe",
        128,
    )


def reverse_task(seed: int = 0, **sizes: int) -> DemoTask:
    """Make a task of reversing sequences of the symbols 3 to 9: "7 3 9 4" to "4 9 3 7".

    Args:
        seed: Seed of the task.
        **sizes: num_train, num_valid and num_test, as for `numbers_task`; shortest (default 4) and longest (10) length.
            All lengths are about equally frequent.

    Raises:
        ConfigError: If lengths are out of order or there are too few sequences for the splits.
    """
    return _sequence_task("reverse", "a sequence in reverse", -1, seed, **sizes)


def copy_task(seed: int = 0, **sizes: int) -> DemoTask:
    """Make a task of copying sequences: "7 3 9 4" to "7 3 9 4". Arguments and errors are those of `reverse_task`."""
    return _sequence_task("copy", "a sequence as it is", 1, seed, **sizes)


def _make_task(
    name: str,
    description: str,
    splits: Sequence[Sequence[Any]],
    pair: Callable[[Any], tuple[str, str]],
    tokenizer_model: str,
    vocab_size: int,
) -> DemoTask:
    """Make a task from the items of train, valid and test, each of which gives a pair of texts."""
    pairs = [[pair(item) for item in items] for items in splits]
    train, valid, test = (
        ParallelCorpus([source for source, _ in each], [target for _, target in each]) for each in pairs
    )
    return DemoTask(name, description, train, valid, test, tokenizer_model, vocab_size)


def _check_sizes(*sizes: int) -> None:
    if min(sizes) < 1:
        raise ConfigError(f"num_train, num_valid, num_test are {sizes}; expected 1 or more of each")


# --- Number words -------------------------------------------------------------------------------------------


def _basic_numbers(largest: int) -> list[int]:
    """List the numbers that show each word in each position."""
    small = [*range(100), *range(100, 1000, 100)]
    return [number for number in small + [1000 * thousands for thousands in small[1:]] if number <= largest]


def _draw_numbers(generator: random.Random, count: int, largest: int, basic: set[int]) -> list[int]:
    """Draw distinct numbers that are not basic, in turn from those of three, four, five and six digits."""
    pools = []
    for low in (100, 1000, 10_000, 100_000):
        numbers = range(low, min(10 * low, largest + 1))
        sample = generator.sample(numbers, min(count + len(basic), len(numbers)))
        pools.append([number for number in sample if number not in basic])
    turns = itertools.zip_longest(*pools)
    return [number for turn in turns for number in turn if number is not None][:count]


# --- Sequences ----------------------------------------------------------------------------------------------


def _sequence_task(
    name: str,
    description: str,
    step: int,
    seed: int,
    num_train: int = 20_000,
    num_valid: int = 200,
    num_test: int = 1000,
    shortest: int = 4,
    longest: int = 10,
) -> DemoTask:
    """Make a task whose target is the source read with a slice step: 1 forward, -1 backward."""
    _check_sizes(num_train, num_valid, num_test)
    if not 1 <= shortest <= longest:
        raise ConfigError(f"lengths are {shortest} to {longest}; expected 1 or more, the shortest first")
    # Sequences are drawn until they are new, which takes long once half of the longest ones are used.
    count, available = num_train + num_valid + num_test, len(_SYMBOLS) ** longest // 2
    if count > available:
        raise ConfigError(
            f"the splits need {count} different sequences; expected at most {available}; raise longest={longest}"
        )
    generator = random.Random(f"{name}/{seed}")
    drawn: dict[tuple[str, ...], None] = {}  # a set that keeps its order
    while len(drawn) < count:
        drawn[tuple(generator.choices(_SYMBOLS, k=generator.randint(shortest, longest)))] = None
    # Held-out sequences come first: later draws lack the short sequences that are used up.
    sequences, held_out = list(drawn), num_valid + num_test
    splits = sequences[held_out:], sequences[:num_valid], sequences[num_valid:held_out]
    vocab_size = 4 + len(_SYMBOLS)  # with the special tokens of every tokenizer
    return _make_task(
        name, description, splits, lambda each: (" ".join(each), " ".join(each[::step])), "words", vocab_size
    )
