import pytest

from tests.reference import raises_line
from xformer.errors import ConfigError, DataError
from xformer.generation import GenerationConfig, default_max_length
from xformer.generation.config import LengthRange, length_ranges, target_ranges


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0, 40)),
        ({"min_new_tokens": 3, "max_new_tokens": 7}, (3, 7)),
        ({"min_length_ratio": 0.25, "max_length_ratio": 1.25}, (3, 12)),  # inward: 2.5 and 12.5
        ({"min_length_ratio": 1.1, "max_length_ratio": 1.1}, (11, 11)),  # 1.1 * 10 is a little above 11 in floats
        ({"min_new_tokens": 5, "min_length_ratio": 0.1}, (5, 40)),
        ({"max_new_tokens": 30, "max_length_ratio": 2.0}, (0, 20)),
        ({"min_new_tokens": 15, "max_length_ratio": 1.2}, (12, 12)),  # the maximum wins
        ({"min_new_tokens": 100}, (100, 100)),  # a default limit makes room
        ({"max_length_ratio": 0.01}, (0, 1)),
    ],
)
def test_ranges_for_a_source_of_ten_tokens(settings, expected):
    assert length_ranges(GenerationConfig(**settings), [10]) == [LengthRange(*expected)]


def test_the_default_limit_is_twice_the_source_plus_20():
    assert default_max_length(0) == 20
    assert length_ranges(GenerationConfig(), [0, 3]) == [(0, 20), (0, 26)]


@pytest.mark.parametrize(
    ("desired", "tolerance", "expected"),
    [
        (8, 0.1, (8, 8)),
        (20, 0.1, (18, 22)),
        (10, 0.1, (9, 11)),
        (1, 0.1, (1, 1)),
        (10, 0.0, (10, 10)),
        (3, 1.0, (1, 6)),
    ],
)
def test_ranges_around_target_lengths(desired, tolerance, expected):
    assert target_ranges(GenerationConfig(length_tolerance=tolerance), [desired], 1) == [expected]


def test_invalid_target_lengths_raise():
    with raises_line(ConfigError, "target length 2 is 0; expected 1 to 100000"):
        target_ranges(GenerationConfig(), [4, 0], 2)
    with raises_line(ConfigError, "target length 1 is 2.5"):
        target_ranges(GenerationConfig(), [2.5], 1)
    with raises_line(DataError, "target_lengths has 1 entries for 2 inputs"):
        target_ranges(GenerationConfig(), [4], 2)
    with raises_line(DataError, "target_lengths has type int for 2 inputs"):
        target_ranges(GenerationConfig(), 4, 2)
    with raises_line(ConfigError, "both a target length and max_new_tokens are set; expected one or the other: omit"):
        target_ranges(GenerationConfig(max_new_tokens=9), [4], 1)
