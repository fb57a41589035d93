import pytest

from tests.reference import raises_line
from xformer.errors import ConfigError
from xformer.generation import DecodingOptions, default_limit
from xformer.generation.lengths import LengthRange, desired_ranges, length_ranges


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0, 40)),
        ({"min_length": 3, "max_length": 7}, (3, 7)),
        ({"min_length_ratio": 0.25, "max_length_ratio": 1.25}, (3, 12)),  # inward: 2.5 and 12.5
        ({"min_length_ratio": 1.1, "max_length_ratio": 1.1}, (11, 11)),  # 1.1 * 10 is a little above 11 in floats
        ({"min_length": 5, "min_length_ratio": 0.1}, (5, 40)),
        ({"max_length": 30, "max_length_ratio": 2.0}, (0, 20)),
        ({"min_length": 15, "max_length_ratio": 1.2}, (12, 12)),  # the maximum wins
        ({"min_length": 100}, (100, 100)),  # a default limit makes room
        ({"max_length_ratio": 0.01}, (0, 1)),
    ],
)
def test_ranges_for_a_source_of_ten_tokens(settings, expected):
    assert length_ranges(DecodingOptions(**settings), [10]) == [LengthRange(*expected)]


def test_the_default_limit_leaves_room():
    assert default_limit(0) == 20
    assert length_ranges(DecodingOptions(), [0, 3]) == [(0, 20), (0, 26)]


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
def test_ranges_around_desired_lengths(desired, tolerance, expected):
    assert desired_ranges(DecodingOptions(length_tolerance=tolerance), [desired], 1) == [expected]


def test_bad_desired_lengths():
    with raises_line(ConfigError, "desired length of sentence 2 is 0; expected 1 to 100000"):
        desired_ranges(DecodingOptions(), [4, 0], 2)
    with raises_line(ConfigError, "desired length of sentence 1 is 2.5"):
        desired_ranges(DecodingOptions(), [2.5], 1)
    with raises_line(ConfigError, "desired_lengths has 1 lengths for 2 sentences"):
        desired_ranges(DecodingOptions(), [4], 2)
    with raises_line(ConfigError, "a desired length and max_length are both given; .*leave out max_length"):
        desired_ranges(DecodingOptions(max_length=9), [4], 1)
