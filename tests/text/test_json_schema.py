"""JSON Schemas: what a grammar writes fits them, what fits can be written, the rest is refused."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcellar.errors import GrammarError, OptionError
from kvcellar.text.grammar import Grammar
from tests.profiles import examples
from tests.text.following import BYTES, fits, written

# -- a naive validator of the keywords that random schemas use

TYPES: dict[str, Any] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def same(a: object, b: object) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def is_valid(value: Any, schema: Any, root: Any) -> bool:
    if isinstance(schema, bool):
        return schema is True
    types = schema.get("type", list(TYPES))
    if not any(TYPES[name](value) for name in ([types] if isinstance(types, str) else types)):
        return False
    if "$ref" in schema and not is_valid(value, root["$defs"][schema["$ref"].split("/")[-1]], root):
        return False
    if "const" in schema and not same(value, schema["const"]):
        return False
    if "enum" in schema and not any(same(value, item) for item in schema["enum"]):
        return False
    if "anyOf" in schema and not any(is_valid(value, item, root) for item in schema["anyOf"]):
        return False
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99) and bool(
            re.search(schema.get("pattern", ""), value)
        )
    if TYPES["number"](value):
        return bool(schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf))
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        return (
            schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 99)
            and all(is_valid(v, s, root) for v, s in zip(value, first, strict=False))
            and all(is_valid(v, schema.get("items", True), root) for v in value[len(first) :])
        )
    if isinstance(value, dict):
        known = schema.get("properties", {})
        return all(name in value for name in schema.get("required", ())) and all(
            is_valid(item, known.get(name, schema.get("additionalProperties", True)), root)
            for name, item in value.items()
        )
    return True


NAMES = st.sampled_from(["a", "b", "é\n", 'q"'])
LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.tuples(st.integers(-20, 5), st.integers(5, 200)).map(
        lambda t: {"type": "integer", "minimum": t[0], "maximum": t[1]}
    ),
    st.just({"type": "number", "minimum": -1.5, "maximum": 2}),
    st.tuples(st.integers(0, 2), st.integers(2, 4)).map(
        lambda t: {"type": "string", "minLength": t[0], "maxLength": t[1]}
    ),
    st.just({"type": "string", "pattern": "^a[bc]+$", "maxLength": 4}),
    st.just({"const": {"a": [1, None], "b": "x\n"}}),
    st.lists(
        st.one_of(st.integers(-3, 3), st.none(), st.booleans(), st.text('ab"\\\n', max_size=3)),
        min_size=1,
        max_size=3,
    ).map(lambda items: {"enum": items}),
    st.just({"$ref": "#/$defs/tree"}),
)


def _object(parts: tuple[dict[str, Any], bool, Any]) -> dict[str, Any]:
    properties, all_required, additional = parts
    required = list(properties) if all_required else list(properties)[:1]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": additional,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(
            st.dictionaries(NAMES, inner, max_size=3),
            st.booleans(),
            st.sampled_from([False, {"type": "integer", "minimum": 0, "maximum": 9}]),
        ).map(_object),
        st.tuples(st.lists(inner, max_size=2), inner).map(
            lambda t: {"type": "array", "prefixItems": t[0], "items": t[1], "maxItems": 3}
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda items: {"anyOf": items}),
    ),
    max_leaves=5,
)
TREE = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}


@examples(60)
@given(schema=SCHEMAS, seed=st.integers(0, 999))
def test_what_is_written_fits_the_schema(schema: dict[str, Any], seed: int) -> None:
    whole = {**schema, "$defs": {"tree": TREE}}
    text = written(Grammar.json_schema(whole).matcher(BYTES), seed)
    assume(text is not None)
    assert text is not None
    assert is_valid(json.loads(text), whole, whole), text


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-30, 210), st.text("abc\"\\\né", max_size=4),
        st.sampled_from([0.5, 1.0, -1.5]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)
    ),
    max_leaves=4,
)  # fmt: skip


def ordered(value: Any, schema: Any) -> Any:
    """Properties in the order of the schema, others behind them."""
    if isinstance(value, dict):
        known = [name for name in schema.get("properties", {}) if name in value]
        return {name: value[name] for name in [*known, *(n for n in value if n not in known)]}
    return value


@examples(80)
@given(value=VALUES, schema=SCHEMAS, indent=st.sampled_from([None, 2]))
def test_a_text_can_be_written_exactly_if_it_fits(
    value: Any, schema: dict[str, Any], indent: int | None
) -> None:
    whole = {**schema, "$defs": {"tree": TREE}}
    text = json.dumps(ordered(value, schema), indent=indent, ensure_ascii=False)
    assume("anyOf" not in schema)  # the order of properties is that of the branch
    assert fits(Grammar.json_schema(whole), text) == is_valid(value, whole, whole)


def test_any_object() -> None:
    grammar = Grammar.json_object()
    assert fits(grammar, '{"a": [1, {"b": null}], "é": "\\n"}')
    assert not fits(grammar, "[]")


def test_escapes_do_not_hide_a_property() -> None:
    grammar = Grammar.json_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        }
    )
    assert fits(grammar, '{"a": 1, "b": "x"}')
    assert not fits(grammar, '{"a": "x"}')
    assert not fits(grammar, '{"\\u0061": "x"}')


def test_white_space_ends() -> None:
    grammar = Grammar.json_schema({"type": "array"})
    assert fits(grammar, "[\n\n  1 ]")
    assert not fits(grammar, "[" + " " * 40 + "1]")


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"x": {"type": "string", "format": "foo"}}}, r"properties\.x\.format"),
        ({"properties": {"x": {"type": "integer", "format": "int32"}}}, r"properties\.x\.format"),
        ({"items": {"anyOf": [True, {"not": {}}]}}, r"items\.anyOf\[1\]\.not: this keyword"),
        ({"properties": {"a b": {"nullable": True}}}, r"properties\['a b'\]\.nullable"),
        ({"type": "string", "minLenght": 3}, "minLenght"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "if": {}}, "if: this keyword"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"$defs": {"a": {"dependentRequired": {}}}}, r"\$defs\.a\.dependentRequired"),
        ({"properties": {"a": {"$id": "b"}}}, r"properties\.a\.\$id"),
        ({"const": 2**53 + 1}, r"const: .* beyond"),
        ({"enum": [1, {"a": [1e300]}]}, r"enum\[1\]\.a\[0\]"),
        ({"properties": {"a": {"minimum": -(2**60)}}}, r"properties\.a\.minimum"),
        ({"multipleOf": -2}, "multipleOf"),
        ({"const": "a\x01"}, r"const: .*'\\x01'"),
        ({"properties": {"\ud800": {}}}, "properties: "),
        ({"$ref": "#/$defs/a"}, r"\$ref"),
        ({"$ref": "other.json"}, r"\$ref"),
        ({"$ref": "#/examples/0", "examples": [{"foo": 1}]}, r"\$ref"),
        ({"properties": {"x": {"pattern": "(?=a)"}}}, r"properties\.x: .*look-around"),
        ({"properties": {"x": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}}, r"properties\.x: "),
        ({"properties": {"x": {"type": "strin"}}}, r"properties\.x: .*strin"),
        ({"items": {"minLength": -1}}, "items: .*minLength"),
        ({"anyOf": []}, "anyOf is empty"),
        ({"type": "object", "required": 3}, "required: must be a list of names"),
        ({"required": ["a", []]}, "required: must be a list of names"),
        ({"$ref": 3}, r"\$ref: must be a text"),
        ({"properties": []}, "properties: must map"),
        ({"anyOf": {}}, "anyOf: must be a list"),
        ({"items": 3}, "items: a schema is"),
        (False, "false"),
        ({"$ref": "#"}, "no text fits"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            r"\$defs\.a: no text",
        ),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "never come to an end"),
        (
            {
                "properties": {
                    "x": {
                        "type": "object",
                        "required": ["y"],
                        "properties": {"y": {"$ref": "#/properties/x"}},
                    }
                }
            },
            r"properties\.x: .*never come to an end",
        ),
        ({"allOf": [{"anyOf": [{"$ref": "#/allOf/0"}]}]}, "never come to an end"),
        ("{", "no JSON"),
        ('{"a": NaN}', "NaN"),
        ('{"type": "string", "type": "null"}', "'type' twice"),
        ("3", "object or a boolean"),
        ({"enum": [object()]}, "no form in JSON"),
        ({"minimum": math.inf}, "no JSON"),
    ],
)
def test_what_would_be_ignored_or_is_wrong_is_refused_with_its_path(
    schema: Any, named: str
) -> None:
    with pytest.raises(GrammarError, match=named):
        Grammar.json_schema(schema).matcher(BYTES)


def test_what_only_describes_is_allowed() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.org/a",
        "title": "A",
        "description": "…",
        "uniqueItems": False,
        "properties": {"a": {"default": 1, "examples": [{"not": 1}], "deprecated": True}},
    }
    assert fits(Grammar.json_schema(schema), '{"a": 2}')


def test_recursion_that_can_end_is_allowed() -> None:
    node = {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/$defs/any"}}}
    schema = {
        "$ref": "#/$defs/node",
        "$defs": {"node": node, "any": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    }
    assert fits(Grammar.json_schema(schema), '{"next": {"next": null}}')


def test_another_kind_of_argument_is_refused() -> None:
    with pytest.raises(OptionError, match="schema"):
        Grammar.json_schema(3)  # type: ignore[arg-type]


def _deep(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(n):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (_deep(90), None),
        (_deep(120), "nested deeper"),
        (_deep(5000), "nested deeper"),
        ('{"items": ' * 5000 + "{}" + "}" * 5000, "nested deeper"),
        ({"$ref": "#/$defs/0", "$defs": {
            **{f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(3000)},
            "3000": {"type": "null"}}}, None),
        ({"$ref": "#/$defs/0", "$defs": {
            **{f"{i}": {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/{i + 1}"}}
               for i in range(2500)}, "2500": {"type": "null"}}}, None),
        ({"enum": ["x" * 300] * 1000}, "262144 are allowed"),
        ({"allOf": [{"anyOf": [{"pattern": f"a{i}"}, {"pattern": f"b{i}"}]} for i in range(20)]},
         "too large"),
        ({"properties": {f"p{i}": True for i in range(9000)}}, "too (big|large)|longer than 1 s"),
        ({"pattern": "((a{0,500}b){0,500}c){0,500}", "type": "string"}, None),
    ],
)  # fmt: skip
def test_hostile_schemas_neither_crash_nor_hang(schema: Any, named: str | None) -> None:
    if named is None:
        Grammar.json_schema(schema).matcher(BYTES).allowed()
    else:
        with pytest.raises(GrammarError, match=named):
            Grammar.json_schema(schema).matcher(BYTES, timeout=1)
