import math

from tests.reference import for_each, raises_line
from xformer.config import options_of
from xformer.errors import ConfigError
from xformer.generation import GenerationConfig


@for_each(
    "settings, method",
    [
        ({}, "greedy"),
        ({"num_beams": 4}, "beam"),
        ({"temperature": 1.0}, "sampling"),
        ({"top_k": 3, "num_return_sequences": 5}, "sampling"),
        ({"top_p": 0.9}, "sampling"),
        ({"min_p": 0.1}, "sampling"),
        ({"do_sample": True}, "sampling"),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, "greedy"),
        ({"do_sample": False, "temperature": 0.7, "num_beams": 2}, "beam"),
        ({"do_sample": True, "temperature": 0}, "greedy"),
        ({"temperature": 0, "top_k": 5}, "greedy"),
        ({"temperature": 0.0, "num_beams": 2}, "beam"),
        ({"top_k": 0}, "greedy"),
        ({"top_p": 1.0}, "greedy"),
        ({"top_p": 0}, "greedy"),
        ({"min_p": 0.0}, "greedy"),
        ({"do_sample": True, "top_k": 0, "top_p": 1, "min_p": 0}, "sampling"),
        ({"do_sample": True, "temperature": 2.0, "top_p": 0}, "greedy"),
    ],
)
def test_settings_determine_the_method(settings, method):
    assert GenerationConfig(**settings).method == method


@for_each(
    "settings, message",
    [
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens 5 is above max_new_tokens 4; expected a minimum"),
        ({"min_length_ratio": 2.0, "max_length_ratio": 1.5}, "min_length_ratio 2.0 is above max_length_ratio 1.5"),
        ({"num_beams": 6, "num_beam_groups": 4}, "num_beam_groups 4 does not divide num_beams 6; .*e.g. num_beams=8"),
        ({"num_beams": 2, "num_beam_groups": 4}, "num_beam_groups 4 does not divide num_beams 2; .*e.g. num_beams=4"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences 3 is above num_beams 2; .*e.g."),
        ({"num_return_sequences": 2}, "num_return_sequences 2 is above num_beams 1"),
        ({"num_beams": 2, "temperature": 0.7}, "num_beams is 2 and sampling is requested"),
        ({"diversity_penalty": 0.5, "num_beams": 4}, "diversity_penalty is 0.5 and num_beam_groups 1"),
    ],
)
def test_contradictory_settings_raise(settings, message):
    with raises_line(ConfigError, message):
        GenerationConfig(**settings)


@for_each(
    "settings, message",
    [
        ({"num_beams": 0}, "num_beams is 0; expected"),
        ({"num_beams": 2.0}, "num_beams is 2.0; expected"),
        ({"num_beams": True}, "num_beams is True"),
        ({"num_beams": None}, "num_beams is None"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0"),
        ({"num_beam_groups": 0}, "num_beam_groups is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; expected"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"length_penalty": -0.1}, "length_penalty is -0.1; expected a number in \\[0, 100\\]"),
        ({"length_penalty": 2000}, "length_penalty is 2000; expected a number in \\[0, 100\\]"),
        ({"num_beams": 10**20}, "num_beams is 100000000000000000000; expected"),
        ({"max_new_tokens": 100_001}, "max_new_tokens is 100001; expected"),
        ({"length_penalty": math.nan}, "length_penalty is nan"),
        ({"coverage_penalty": "0.2"}, "coverage_penalty is '0.2'"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; expected a number in \\[0.001, 1000\\]"),
        ({"temperature": -0.1}, "temperature is -0.1; expected a number in \\[0, 1000\\]"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": -0.1}, "top_p is -0.1; expected a number in"),
        ({"top_p": 1.5}, "top_p is 1.5; expected a number in"),
        ({"min_p": -0.5}, "min_p is -0.5"),
        ({"max_length_ratio": 0.0}, "max_length_ratio is 0.0"),
        ({"max_length_ratio": math.inf}, "max_length_ratio is inf"),
        ({"length_tolerance": 2.0}, "length_tolerance is 2.0; expected a number in \\[0, 1\\]"),
        ({"diversity_penalty": 0.0, "num_beams": 2, "num_beam_groups": 2}, "diversity_penalty is 0.0"),
        ({"sequence_bias_strength": -1.0}, "sequence_bias_strength is -1.0"),
        ({"suppress_tokens": (3, -1)}, r"suppress_tokens is \(3, -1\); expected token ids"),
        ({"keep_greedy": 1}, "keep_greedy is 1; expected true or false"),
    ],
)
def test_invalid_values_raise(settings, message):
    with raises_line(ConfigError, message):
        GenerationConfig(**settings)


@for_each(
    "settings",
    [
        {"num_beams": 1, "num_return_sequences": 1, "num_beam_groups": 1, "max_new_tokens": 1, "min_new_tokens": 0},
        {"prompt_lookup_num_tokens": 1, "max_matching_ngram_size": 1},
        {"prompt_lookup_num_tokens": 256, "max_matching_ngram_size": 256},
        {"num_draft_tokens": 1, "max_new_tokens": 100_000, "no_repeat_ngram_size": 0},
        {"length_penalty": 0.0, "coverage_penalty": 0.0, "repetition_penalty": 0.001, "length_tolerance": 0.0},
        {"length_penalty": 100.0, "repetition_penalty": 1000, "length_tolerance": 1.0, "temperature": 1000},
        {"sequence_bias_strength": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    ],
)
def test_the_smallest_and_the_largest_values_are_allowed(settings):
    config = GenerationConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


def test_never_stops_as_in_hugging_face():
    assert GenerationConfig(early_stopping="never", num_beams=2) == GenerationConfig(num_beams=2)
    config = GenerationConfig(early_stopping=True, num_beams=2)
    assert not GenerationConfig.resolve(config, {"early_stopping": "never"}).early_stopping
    with raises_line(ConfigError, "early_stopping is 'always'; expected true or false"):
        GenerationConfig(early_stopping="always")


def test_fields_can_be_overridden():
    config = GenerationConfig(num_beams=4, suppress_tokens=[5, 3])
    assert GenerationConfig.resolve(config, {"num_beams": 2}) == GenerationConfig(num_beams=2, suppress_tokens=(5, 3))
    assert GenerationConfig.resolve(None, {}) == GenerationConfig()
    with raises_line(ConfigError, "unknown key 'num_beam' in GenerationConfig; did you mean 'num_beams'"):
        GenerationConfig.resolve(config, {"num_beam": 2})
    with raises_line(ConfigError, "config is 4; expected a GenerationConfig"):
        GenerationConfig.resolve(4, {})


@for_each(
    "config, overrides, method, kept",
    [
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
            {"temperature": 0.7},
            "sampling",
            {"top_k": 20, "top_p": 0.9},
        ),
        ({"do_sample": True, "top_k": 20}, {"top_k": 0}, "sampling", {}),
        ({"do_sample": True, "top_k": 20}, {"num_beams": 2}, "beam", {"top_k": 20}),
        ({"do_sample": False, "top_k": 20}, {"temperature": 2.0}, "sampling", {"top_k": 20}),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, {"top_k": 5}, "sampling", {"num_beams": 1}),
        (
            {"num_beams": 4, "top_k": 5, "do_sample": False},
            {"do_sample": True},
            "sampling",
            {"num_beams": 1, "top_k": 5},
        ),
        ({"num_beams": 4}, {"temperature": 0}, "beam", {"num_beams": 4}),
        ({"num_beams": 4}, {"top_p": 1.0}, "beam", {"num_beams": 4}),
        ({"temperature": 0.6, "top_k": 5}, {"temperature": 0}, "greedy", {"top_k": 5}),
        ({"temperature": 0.6}, {"do_sample": False}, "greedy", {"temperature": 0.6}),
    ],
)
def test_an_override_leaves_other_fields_unless_it_selects_another_search(config, overrides, method, kept):
    found = GenerationConfig.resolve(GenerationConfig(**config), overrides)
    assert found.method == method
    for name, value in {**kept, **overrides}.items():
        assert getattr(found, name) == value, name


def test_every_field_has_help_and_a_panel():
    panels = {}
    for name, _, panel, field in options_of(GenerationConfig):
        assert field.metadata["help"].endswith("."), name
        panels.setdefault(panel, []).append(name)
    assert "" not in panels
    assert panels["Speed"] == ["prompt_lookup_num_tokens", "max_matching_ngram_size", "num_draft_tokens"]


@for_each(
    "name, ours",
    [("max_length", "max_new_tokens"), ("eos_token_id", "eos_id"), ("logits_processor", "logits_processors")],
)
def test_names_of_hugging_face_are_translated(name, ours):
    with raises_line(ConfigError, f"unknown argument '{name}'; .*{ours}"):
        GenerationConfig.resolve(None, {name: 5})
