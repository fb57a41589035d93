import math

import pytest

from tests.reference import raises_line
from xformer.errors import ConfigError
from xformer.generation import DecodingOptions


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({}, "greedy"),
        ({"num_beams": 4}, "beam"),
        ({"temperature": 1.0}, "sampling"),
        ({"top_k": 3, "num_return_sequences": 5}, "sampling"),
        ({"top_p": 1.0}, "sampling"),
        ({"min_p": 0.1}, "sampling"),
    ],
)
def test_the_settings_say_what_the_method_is(settings, method):
    assert DecodingOptions(**settings).method == method


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"min_length": 5, "max_length": 4},
            "min_length 5 is above max_length 4; .*lower min_length or raise max_length",
        ),
        ({"min_length_ratio": 2.0, "max_length_ratio": 1.5}, "min_length_ratio 2.0 is above max_length_ratio 1.5"),
        ({"num_beams": 6, "num_beam_groups": 4}, "num_beam_groups 4 does not divide num_beams 6; .*e.g. num_beams 8"),
        ({"num_beams": 2, "num_beam_groups": 4}, "num_beam_groups 4 does not divide num_beams 2; .*e.g. num_beams 4"),
        (
            {"num_beams": 2, "num_return_sequences": 3},
            "num_return_sequences 3 is above num_beams 2; .*e.g. num_beams 3",
        ),
        ({"num_return_sequences": 2}, "num_return_sequences 2 is above num_beams 1"),
        ({"num_beams": 2, "temperature": 0.7}, "num_beams is 2 and a setting of sampling is given"),
        ({"diversity_penalty": 0.5, "num_beams": 4}, "diversity_penalty is 0.5 and num_beam_groups is 1"),
    ],
)
def test_contradictions_are_refused_with_a_way_out(settings, message):
    with raises_line(ConfigError, message):
        DecodingOptions(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 0}, "num_beams is 0; expected a whole number of at least 1"),
        ({"num_beams": 2.0}, "num_beams is 2.0; expected a whole number"),
        ({"num_beams": True}, "num_beams is True"),
        ({"num_beams": None}, "num_beams is None"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0"),
        ({"num_beam_groups": 0}, "num_beam_groups is 0"),
        ({"max_length": 0}, "max_length is 0; expected a whole number of at least 1"),
        ({"min_length": -1}, "min_length is -1"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"length_penalty": -0.1}, "length_penalty is -0.1; expected a number from 0 to 100"),
        ({"length_penalty": 2000}, "length_penalty is 2000; expected a number from 0 to 100"),
        ({"num_beams": 10**20}, "num_beams is 100000000000000000000; expected at most 10000"),
        ({"max_length": 100_001}, "max_length is 100001; expected at most 100000"),
        ({"length_penalty": math.nan}, "length_penalty is nan"),
        ({"coverage_penalty": "0.2"}, "coverage_penalty is '0.2'"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; expected a number from 0.001 to 1000"),
        (
            {"temperature": 0.0},
            "temperature is 0.0; expected a number from 1e-06 to 1000; for the most probable token take top_k 1",
        ),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0; expected a number from 1e-09 to 1"),
        ({"top_p": 1.5}, "top_p is 1.5; expected a number from 1e-09 to 1"),
        ({"min_p": -0.5}, "min_p is -0.5"),
        ({"max_length_ratio": 0.0}, "max_length_ratio is 0.0"),
        ({"max_length_ratio": math.inf}, "max_length_ratio is inf"),
        ({"length_tolerance": 2.0}, "length_tolerance is 2.0; expected a number from 0 to 1"),
        ({"diversity_penalty": 0.0, "num_beams": 2, "num_beam_groups": 2}, "diversity_penalty is 0.0"),
        ({"topic_strength": -1.0}, "topic_strength is -1.0"),
        ({"keep_greedy": 1}, "keep_greedy is 1; expected true or false"),
    ],
)
def test_impossible_values_are_refused(settings, message):
    with raises_line(ConfigError, message):
        DecodingOptions(**settings)


def test_groups_have_a_default_strength():
    assert DecodingOptions(num_beams=4, num_beam_groups=2).diversity == 0.5
    assert DecodingOptions(num_beams=4, num_beam_groups=2, diversity_penalty=0.2).diversity == 0.2
    assert DecodingOptions(num_beams=4, num_beam_groups=2).group_size == 2
