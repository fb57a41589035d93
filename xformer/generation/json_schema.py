"""JSON schemas for structured output: closed objects, and limits where a schema has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Limits of strict mode.
MAX_CHARACTERS, MAX_ITEMS, MAX_DECIMALS = 1000, 100, 10
MAX_INTEGER, MAX_NUMBER = 10**18 - 1, 10**15

_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("items", "prefixItems", "additionalItems", "additionalProperties")
_ALL, _ANY = ("allOf",), ("allOf", "anyOf", "oneOf")
_OPEN = ("additionalProperties", "patternProperties")


def closed_schema(schema: Any, *, strict: bool = False) -> Any:
    """Return a JSON schema whose objects have no other properties than those that it lists.

    This holds for objects that list `properties` and do not mention `additionalProperties`: a small model writes keys
    without end otherwise. The parts of an object that `allOf`, `anyOf`, `oneOf` and `$ref` describe list them together.

    Args:
        schema: The schema.
        strict: Also limit what the schema does not: strings to 1,000 characters and arrays to 100 items more
            than their minimum, integers to 18 digits, and numbers to 15 digits and 10 decimals.

    Examples:
        >>> closed_schema({"properties": {"a": {"type": "string"}}}, strict=True)
        {'properties': {'a': {'maxLength': 1000, 'type': 'string'}}, 'additionalProperties': False}
    """
    return _Closing(schema, strict).close(schema)


class _Closing:
    def __init__(self, root: Any, strict: bool) -> None:
        self.root, self.strict = root, strict

    def close(self, node: Any, outer: Mapping[str, Any] | None = None, *, is_part: bool = False) -> Any:
        """Return a closed schema; `outer` has the properties that schemas around it list for the same object.

        A part of `allOf` stays open: the object lists the properties of all parts.
        """
        if not isinstance(node, Mapping):
            return node
        is_closed_elsewhere = is_part
        if "$ref" in node:
            if is_part or outer or any(key in node for key in ("properties", *_ANY)):
                # llguidance joins a reference with other keywords only if it is not circular.
                parts = [*_list(node.get("allOf")), self._target(node)]
                node = {**{key: value for key, value in node.items() if key != "$ref"}, "allOf": parts}
            else:
                is_closed_elsewhere = True
        names = {**(outer or {}), **self._names(node, _ALL)}
        result = {key: self._close_value(key, value, names) for key, value in node.items()}
        own = result.get("properties", {})
        is_listed = outer or any("properties" in each for each in self._in_place(node, _ALL))
        is_open = any(key in each for key in _OPEN for each in self._in_place(node, _ANY))
        if is_listed and isinstance(own, dict) and not is_open and not is_closed_elsewhere:
            result["properties"] = {**names, **self._names(node, _ANY), **own}
            result["additionalProperties"] = False
        return {**_limits(node), **result} if self.strict else result

    def _close_value(self, key: str, value: Any, names: Mapping[str, Any]) -> Any:
        if key in _MAPPINGS and isinstance(value, Mapping):
            return {name: self.close(each) for name, each in value.items()}
        if key in _ANY and isinstance(value, list):
            return [self.close(each, names, is_part=key in _ALL) for each in value]
        if key in _VALUES:
            return [self.close(each) for each in value] if isinstance(value, list) else self.close(value)
        return value

    def _target(self, node: Mapping[str, Any]) -> Any:
        """Return the schema that a node refers to; the node itself if it is not in this document."""
        pointer, found = str(node["$ref"]), self.root
        for part in pointer.split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found if pointer.startswith("#") and found is not None else {"$ref": node["$ref"]}

    def _in_place(self, node: Any, keys: tuple[str, ...], seen: tuple[Any, ...] = ()) -> Iterator[Mapping[str, Any]]:
        """Yield a schema, and those that describe the same value by a reference or by one of the keys."""
        if isinstance(node, Mapping):
            yield node
            if "$ref" in node and node["$ref"] not in seen:
                yield from self._in_place(self._target(node), keys, (*seen, node["$ref"]))
            for each in [each for key in keys for each in _list(node.get(key))]:
                yield from self._in_place(each, keys, seen)

    def _names(self, node: Any, keys: tuple[str, ...]) -> dict[str, Any]:
        """Return the properties that a schema lists or requires, with any value."""
        nodes = list(self._in_place(node, keys))
        listed = [name for each in nodes if isinstance(each.get("properties"), Mapping) for name in each["properties"]]
        required = [name for each in nodes for name in _list(each.get("required")) if isinstance(name, str)]
        return dict.fromkeys([*listed, *required], True)


def _limits(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return limits of the values that a schema describes."""
    kinds = _list(node.get("type")) or [node.get("type")]
    found: dict[str, Any] = {}
    for kind in () if "enum" in node or "const" in node else kinds:
        if kind == "string":
            found["maxLength"] = MAX_CHARACTERS + _size(node.get("minLength"))
        elif kind == "array":
            found["maxItems"] = MAX_ITEMS + _size(node.get("minItems"))
        elif kind in ("integer", "number"):
            largest = MAX_INTEGER if kind == "integer" else MAX_NUMBER
            found |= {} if "exclusiveMinimum" in node else {"minimum": -largest}
            found |= {} if "exclusiveMaximum" in node else {"maximum": largest}
            found |= {} if kind == "integer" else {"multipleOf": 10.0**-MAX_DECIMALS}
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _size(value: Any) -> int:
    return value if isinstance(value, int) else 0
