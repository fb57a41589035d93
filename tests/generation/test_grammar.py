"""Outputs of models with random weights follow grammars."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest

from tests.reference import for_each, raises_line
from xformer.errors import ConfigError, DataError
from xformer.generation import Grammar, generate, stream, token_bytes
from xformer.models import LanguageModel, LanguageModelConfig
from xformer.random import Rng
from xformer.tokenizers import Tokenizer

EOS = 2
WORDS = [b'{"', b'": ', b'", "', b"name", b"true", b"10", b"]]", b"e1", b" "]
TOKENS = [b"", b"", b"", *(bytes([byte]) for byte in range(256)), *WORDS]
PROMPTS = [[40, 41, 42], [50], [60, 61]]
SETTINGS = [
    {},
    {"temperature": 1.0, "rng": Rng(1), "num_return_sequences": 3},
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 4, "num_beam_groups": 2, "num_return_sequences": 4, "repetition_penalty": 1.2},
]
SCHEMAS = [
    {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150},
     "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
     "required": ["age", "tags"], "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{1,4}$"}]},
    {"type": "object", "properties": {"point": {"$ref": "#/$defs/point"}}, "required": ["point"],
     "additionalProperties": False,
     "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer", "multipleOf": 5, "maximum": 50,
     "minimum": 0}}, "required": ["x"], "additionalProperties": False}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    # More logits than tokens, as in public checkpoints.
    config = LanguageModelConfig(
        vocab_size=len(TOKENS) + 5, d_model=16, num_heads=2, d_ff=32, num_layers=1, max_positions=200
    )
    return LanguageModel(config)


def text_of(tokens):
    return b"".join(TOKENS[token] for token in tokens).decode()


@for_each("settings", SETTINGS)
@for_each("schema", SCHEMAS)
def test_outputs_are_valid_json(model, schema, settings):
    grammar = Grammar(TOKENS, EOS, json_schema=schema)
    found = generate(model, PROMPTS, max_new_tokens=150, logits_processors=[grammar], **settings)
    texts = {text_of(each.tokens) for row in found for each in row}
    assert all(each.finished for row in found for each in row)
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    if "temperature" in settings:
        assert len(texts) > 3


@for_each("seed", range(3))
def test_a_stream_follows_a_grammar(model, seed):
    grammar = Grammar(TOKENS, [EOS, 0], json_schema=json.dumps(SCHEMAS[0]))
    options = {"max_new_tokens": 150, "logits_processors": [grammar], "temperature": 1.5, "rng": Rng(seed)}
    text = text_of(token for ((*new,),) in stream(model, PROMPTS[:1], **options) for token in new)
    jsonschema.validate(json.loads(text), SCHEMAS[0])


def test_one_grammar_serves_searches_that_alternate(model):
    grammar = Grammar(TOKENS, EOS, regex="[a-f]{3,9}[0-9]{2}")
    searches = [
        stream(model, [prompt], max_new_tokens=20, logits_processors=[grammar], temperature=1.0, rng=Rng(number))
        for number, prompt in enumerate(PROMPTS)
    ]
    texts = ["" for _ in searches]
    for _ in range(20):
        for number, search in enumerate(searches):
            texts[number] += text_of(next(search, [[]])[0])
    assert all(re.fullmatch("[a-f]{3,9}[0-9]{2}", text) for text in texts)


def test_lark_on_any_library(model, xp):
    grammar = Grammar(TOKENS, EOS, lark='start: "(" start ")" | NUMBER\nNUMBER: /[1-9][0-9]{0,2}/')
    limit = 6 if xp.name == "jax" else 40  # jax compiles every length
    options = {"max_new_tokens": limit, "temperature": 1.0, "rng": Rng(2), "logits_processors": [grammar]}
    for row in generate(model.to(xp), PROMPTS, **options):
        text = text_of(row[0].tokens)
        assert not row[0].finished or re.fullmatch(r"\(*[1-9][0-9]{0,2}\)*", text)
        assert text.count(")") in ((text.count("("),) if row[0].finished else (0, text.count(")")))


def test_the_tokens_of_a_tokenizer():
    tokenizer = Tokenizer.train(["two hounds run over the grass"], 40)
    tokens = token_bytes(tokenizer)
    assert b"".join(tokens[index] for index in tokenizer.encode("hounds run")).decode().strip() == "hounds run"
    assert {tokens[index] for index in tokenizer.special_ids} == {b""}
    assert len(tokens) == tokenizer.vocab_size


def test_a_truncated_output_is_the_beginning_of_a_text(model):
    grammar = Grammar(TOKENS, EOS, regex="[a-c]{30}")
    ((output,),) = generate(model, PROMPTS[:1], max_new_tokens=9, logits_processors=[grammar])
    assert re.fullmatch("[a-c]{9}", text_of(output.tokens))
    assert not output.finished


@for_each(
    "options, message",
    [
        ({}, "a grammar has none of json_schema, regex and lark; expected one"),
        ({"regex": "a", "lark": "b"}, "a grammar has regex, lark of json_schema, regex and lark; expected one"),
        ({"regex": "a(b"}, "regex is not valid: .*unclosed group"),
        ({"regex": 3}, "regex is 3; expected a string"),
        ({"lark": "start: b"}, 'lark is not valid: .*unknown name: "b"'),
        ({"json_schema": {"type": "frob"}}, "json_schema is not valid: Invalid type: frob"),
        ({"json_schema": {"not": {"type": "string"}}}, r"json_schema is not valid: Unimplemented keys: ..not"),
        ({"json_schema": "{"}, "json_schema is not valid JSON: Expecting property name"),
        ({"json_schema": {"a": {1}}}, "json_schema is not valid JSON: Object of type set"),
        ({"json_schema": [1]}, r"json_schema is \[1\]; expected an object"),
    ],
)
def test_invalid_grammars_are_refused(options, message):
    with raises_line(ConfigError, message):
        Grammar(TOKENS, EOS, **options)


def test_other_vocabularies_are_refused(model):
    for eos_id in (len(TOKENS), -1, []):
        with raises_line(DataError, "eos_id is .*; expected ids from 0 to 267"):
            Grammar(TOKENS, eos_id, regex="a")
    grammar = Grammar([*TOKENS, *[b"x"] * 9], np.int64(EOS), regex="a")
    with raises_line(ConfigError, "a grammar has 277 tokens and the model 273; expected as many"):
        generate(model, PROMPTS, logits_processors=[grammar])
