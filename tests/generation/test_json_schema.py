"""Schemas are closed as jsonschema understands the closed ones, and llguidance follows them."""

import json

import jsonschema
import pytest

from xformer.errors import ConfigError
from xformer.generation.grammar import Grammar, check_json_schema
from xformer.generation.json_schema import closed_schema

pytest.importorskip("llguidance")
TOKENS = [*(bytes([byte]) for byte in range(256)), b""]
INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "string"}}}
TREE = {"type": "object", "properties": {"a": INTEGER, "b": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
VALUES = [None, {}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}, {"a": 1, "b": 2}, {"a": 1, "c": 1}, {"c": 1}, {"a": "x"}]
VALUES += [{"a": 1, "b": [{"a": 2, "b": []}]}, {"a": 1, "b": [{"a": 2, "c": 1}]}, [{"a": 1}], [{"a": 1, "c": 1}]]


def completes(matcher, text):
    row = matcher.deep_copy()
    return row.try_consume_tokens([*text.encode()]) == len(text) and row.is_accepting()


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        (A, [{"a": 1}]),
        ({**A, "required": ["a", "b"]}, [{"a": 1, "b": "x"}, {"a": 1, "b": 2}, *VALUES[9:11]]),
        ({**A, "additionalProperties": {"type": "string"}}, [{"a": 1}, {"a": 1, "b": "x"}]),
        ({"allOf": [A, B]}, [{"a": 1}, {"a": 1, "b": "x"}]),
        ({"$defs": {"A": A, "c/d": B}, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/c~1d"}]}, VALUES[2:5:2]),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A", **B}, [{"a": 1}, {"a": 1, "b": "x"}]),
        ({"$defs": {"A": A}, "anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}, [None, {"a": 1}]),
        ({**A, "anyOf": [{"required": ["a"]}, {**B, "required": ["b"]}]}, [{"a": 1}, {"a": 1, "b": "x"}]),
        ({"$defs": {"A": A}, "anyOf": [{"allOf": [{"$ref": "#/$defs/A"}]}, B]}, [{}, {"a": 1}, {"b": "x"}]),
        ({"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"}, [{}, {"a": 1}, VALUES[9]]),
        ({"type": "array", "items": A}, [[{"a": 1}]]),
        ({"type": "object", "properties": {}}, [{}]),
    ],
)  # fmt: skip
def test_objects_are_closed(schema, valid):
    closed = closed_schema(schema)
    assert closed_schema(closed) == closed
    matcher = Grammar(TOKENS, 256, json_schema=schema)._matcher
    for value in VALUES:
        orders = [value, dict(reversed(value.items()))] if isinstance(value, dict) else [value]
        follows = any(completes(matcher, json.dumps(each)) for each in orders)
        assert jsonschema.Draft202012Validator(closed).is_valid(value) == (value in valid), value
        assert follows == (value in valid), value


@pytest.mark.parametrize(
    ("schema", "longest", "too_long"),
    [
        ({"type": "string"}, "a" * 1000, "a" * 1001),
        ({"type": ["string", "null"], "minLength": 5, "pattern": "^a*$"}, "a" * 1005, "a" * 1006),
        ({"type": "string", "maxLength": 2}, "aa", "aaa"),
        ({"type": "string", "maxLength": 2000}, "a" * 2000, "a" * 2001),
        ({"type": "integer", "minimum": 0}, 10**18 - 1, 10**19),
        ({"type": "integer"}, -(10**18) + 1, -(10**19)),
        ({"type": "number", "exclusiveMinimum": 0}, 0.0123456789, 0.01234567891),
        ({"type": "array", "items": INTEGER, "minItems": 1}, [0] * 101, [0] * 102),
        ({"enum": ["a" * 2000]}, "a" * 2000, "a"),
    ],
)
def test_strict_mode_limits_what_has_no_limit(schema, longest, too_long):
    for value in (longest, too_long):
        wrapped = {"type": "object", "properties": {"x": schema}}
        matcher = Grammar(TOKENS, 256, json_schema=closed_schema(wrapped, strict=True))._matcher
        assert completes(matcher, json.dumps({"x": value})) == (value == longest)


@pytest.mark.parametrize(
    "schema",
    [{"properties": []}, {"allOf": 5}, {"$ref": "#/x"}, {"$ref": 5, "allOf": 5}, {"type": [[]]}, {"items": [5]},
     {"type": "string", "minLength": "x"}, {"required": [[]], "properties": {}}, {"allOf": [{"$ref": "#"}]}],
)  # fmt: skip
def test_invalid_schemas_are_reported(schema):
    with pytest.raises(ConfigError, match="form is not valid"):
        check_json_schema("form", schema)
