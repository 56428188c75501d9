"""JSON Schemas that a grammar can hold a text to: whatever would be ignored is refused.

llguidance refuses keywords that it knows and cannot do. It passes over keywords that it does not
know, numbers beyond a double's precision, and formats of what is no string; a text could then
break the schema. All of these are refused here, with their path. Keywords that only describe
(``title``, ``default``, ``examples``, …) are allowed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

from kvcellar.errors import GrammarError, check_kind, shown

Path: TypeAlias = "tuple[str | int, ...]"

MAX_CHARS = 2**18
MAX_SCHEMAS = 10_000
MAX_DEPTH = 100
_EXACT = 2**53  # integers up to here are numbers of their own in a double

_ANNOTATIONS = frozenset(
    (
        *("$comment", "title", "description", "default", "examples", "deprecated", "readOnly"),
        *("writeOnly", "contentMediaType", "contentEncoding"),
    )
)
_ROOT_ONLY = frozenset(("$schema", "$id", "id"))
_ONE = frozenset(("items", "additionalItems", "additionalProperties"))
_LISTS = frozenset(("prefixItems", "anyOf", "allOf", "oneOf"))
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_VALUES = frozenset(
    (
        *("$ref", "const", "enum", "type", "required", "pattern", "format", "multipleOf"),
        *("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    )
)
_FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
_OPTIONS = {
    # Other escapes would spell the names of properties in a way that hides them.
    "json_allowed_escapes": 'nrbtf\\"',
    # As llama.cpp: a model that is unsure could write white space for ever.
    "whitespace_pattern": r"(\x20|\n{1,2}[ \t]{0,20})",
}
_UNSPELLABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\ud800-\udfff]")


def read_schema(schema: Mapping[str, Any] | bool | str) -> str:
    """Return a schema as JSON, checked.

    Args:
        schema: what ``json.loads`` makes of it, or its text.

    Raises:
        GrammarError: it is no JSON, too large, or holds what would be ignored; names its path.
        OptionError: it is neither a mapping nor a text.
    """
    check_kind("schema", schema, Mapping, bool, str, made="a dict, or JSON text")
    value = _parse(schema) if isinstance(schema, str) else schema
    text = _to_json(value)
    if len(text) > MAX_CHARS:
        raise GrammarError(f"the schema has {len(text)} characters: {MAX_CHARS} are allowed")
    value = json.loads(text)  # plain values, whatever mappings it was made of
    if not isinstance(value, (dict, bool)):
        raise GrammarError(f"a schema is an object or a boolean, not {shown(value)}")
    if value is False:
        raise GrammarError("the schema is false: no text fits it")
    _check(value)
    return _to_json(value)


def to_lark(text: str) -> str:
    """Return the grammar of a schema that :func:`read_schema` returned."""
    schema = json.loads(text)
    options = {"x-guidance": _OPTIONS}
    return f"start: %json {json.dumps({**schema, **options} if schema is not True else options)}"


def subschemas(text: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each schema within a schema, and that schema on its own; deepest first."""
    root = json.loads(text)
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    found = [(path, schema) for path, schema in _walk(root) if path and isinstance(schema, dict)]
    for path, schema in sorted(found, key=lambda item: -len(item[0])):
        yield _spell(path), _to_json({**schema, **shared})


def _parse(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError:
        raise GrammarError(f"the schema is nested deeper than {MAX_DEPTH}") from None
    except GrammarError:
        raise
    except ValueError as error:
        raise GrammarError(f"the schema is no JSON: {error}") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise GrammarError(f"the schema has {shown(twice)} twice in an object")
    return found


def _no_number(name: str) -> object:
    raise GrammarError(f"the schema has {name}, which JSON does not have")


def _to_json(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False, default=_as_dict)
    except RecursionError:
        raise GrammarError(f"the schema is nested deeper than {MAX_DEPTH}") from None
    except (TypeError, ValueError) as error:
        raise GrammarError(f"the schema is no JSON: {error}") from None


def _as_dict(value: object) -> dict[str, object]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{shown(value)} has no form in JSON")


# -- checks


def _check(root: dict[str, Any] | bool) -> None:
    targets: set[Path] = set()
    refs: list[tuple[Path, str]] = []
    for n_schemas, (path, schema) in enumerate(_walk(root)):
        if n_schemas >= MAX_SCHEMAS:
            raise GrammarError(f"the schema holds more than {MAX_SCHEMAS} schemas")
        targets.add(path)
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            _refuse(path, f"a schema is an object or a boolean, not {shown(schema)}")
        _check_keywords(path, schema)
        if isinstance(ref := schema.get("$ref"), str):
            refs.append((path, ref))
    for path, ref in refs:
        if not ref.startswith("#") or _resolved(root, ref) not in targets:
            _refuse((*path, "$ref"), f"{shown(ref)} is not the path of a schema in here")
    _check_ends(root)


def _check_ends(root: dict[str, Any] | bool) -> None:
    """Refuse schemas whose values hold values of the same kind without end."""
    schemas = dict(_walk(root))
    users: dict[Path, list[Path]] = {path: [] for path in schemas}
    above: list[Path] = []
    for path, schema in schemas.items():  # each right behind what it is in, and all of that
        while above and path[: len(above[-1])] != above[-1]:
            above.pop()
        if above:
            users[path].append(above[-1])
        above.append(path)
        if isinstance(schema, dict) and "$ref" in schema:
            users[_resolved(root, schema["$ref"]) or ()].append(path)
    ending: set[Path] = set()
    pending = list(schemas)
    while pending:
        path = pending.pop()
        if path not in ending and _ends(root, path, schemas[path], ending):
            ending.add(path)
            pending += users[path]
    for path in schemas:
        if path not in ending:
            _refuse(path, "no text fits it: its values never come to an end")


def _ends(root: object, path: Path, schema: Any, ending: set[Path]) -> bool:
    """Whether some value ends, as far as is known; one that no value fits counts as well."""
    if isinstance(schema, bool) or "const" in schema or "enum" in schema:
        return True
    if "$ref" in schema and _resolved(root, schema["$ref"]) not in ending:
        return False
    if any((*path, "allOf", i) not in ending for i in range(len(schema.get("allOf", ())))):
        return False
    for key in ("anyOf", "oneOf"):
        options = [(*path, key, i) for i in range(len(schema.get(key, ())))]
        if options and ending.isdisjoint(options):
            return False
    types = schema.get("type", "null")
    if not {types} <= {"object", "array"} if isinstance(types, str) else True:
        return True
    if types == "object":
        required = schema.get("required", ())
        needed: list[Path] = [(*path, "properties", name) for name in required]
        return all(at in ending for at in needed if at[-1] in schema.get("properties", {}))
    least = schema.get("minItems", 0)
    if not isinstance(least, int) or least < 1:
        return True
    prefix = "items" if isinstance(schema.get("items"), list) else "prefixItems"
    first = schema.get(prefix, ())
    rest = "additionalItems" if prefix == "items" else "items"
    inner: list[Path] = [(*path, prefix, i) for i in range(min(least, len(first)))]
    if least > len(first) and rest in schema:
        inner.append((*path, rest))
    return all(at in ending for at in inner)


def _walk(root: object) -> Iterator[tuple[Path, Any]]:
    """Yield every schema in a schema with its path, the schema itself first."""
    pending: list[tuple[Path, Any]] = [((), root)]
    while pending:
        path, schema = pending.pop()
        if len(path) > MAX_DEPTH:
            raise GrammarError(f"the schema is nested deeper than {MAX_DEPTH}")
        yield path, schema
        if isinstance(schema, dict):
            pending += reversed([*_within(path, schema)])


def _within(path: Path, schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    for key, value in schema.items():
        if key in _LISTS or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                _refuse((*path, key), f"must be a list of schemas, not {shown(value)}")
            yield from (((*path, key, i), item) for i, item in enumerate(value))
        elif key in _MAPS:
            if not isinstance(value, dict):
                _refuse((*path, key), f"must map names to schemas, not {shown(value)}")
            yield from (((*path, key, name), item) for name, item in value.items())
        elif key in _ONE:
            yield (*path, key), value


def _check_keywords(path: Path, schema: dict[str, Any]) -> None:
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    for key, value in schema.items():
        here = (*path, key)
        if key in _ANNOTATIONS or key in _ONE or key in _LISTS:
            continue
        if key in _ROOT_ONLY and not path:
            continue
        if key in _MAPS:
            for name in value if isinstance(value, dict) else ():
                _check_text(here, name)
        elif key not in _VALUES:
            _refuse(here, "this keyword is not supported")
        elif key == "$ref" and not isinstance(value, str):
            _refuse(here, f"must be a text, not {shown(value)}")
        elif key == "required" and not (
            isinstance(value, list) and all(isinstance(name, str) for name in value)
        ):
            _refuse(here, f"must be a list of names, not {shown(value)}")
        elif key in ("const", "enum", "required"):
            _check_value(here, value)
        elif key == "format":
            _check_format(here, value, schema.get("type"))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_number(here, value)
            if key == "multipleOf" and value <= 0:
                _refuse(here, f"must be above 0, found {value}")


def _check_value(path: Path, value: object, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        _refuse(path[: len(path) - depth], f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, str):
        _check_text(path, value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_number(path, value)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_value((*path, i), item, depth + 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_text(path, name)
            _check_value((*path, name), item, depth + 1)


def _check_number(path: Path, value: float) -> None:
    if abs(value) > _EXACT or not math.isfinite(value):
        _refuse(path, f"{shown(value)} is beyond ±2^53, where numbers are not told apart")


def _check_text(path: Path, text: str) -> None:
    if found := _UNSPELLABLE.search(text):
        _refuse(path, f"{shown(text)} holds {found.group()!r}, which cannot be written")


def _check_format(path: Path, value: object, types: object) -> None:
    if not isinstance(value, str) or value not in _FORMATS:
        _refuse(path, f"{shown(value)} is not supported: {', '.join(_FORMATS)} are")
    if types is not None and "string" not in (types if isinstance(types, list) else [types]):
        _refuse(path, f"{shown(value)} says nothing about what is no string")


def _resolved(root: object, ref: str) -> Path | None:
    if ref in ("#", "#/"):
        return ()
    if not ref.startswith("#/"):
        return None
    path: list[str | int] = []
    at = root
    for part in unquote(ref[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        key: str | int = int(name) if isinstance(at, list) and name.isdecimal() else name
        try:
            at = at[key]  # type: ignore[index]
        except (LookupError, TypeError):
            return None
        path.append(key)
    return tuple(path)


def _refuse(path: Path, reason: str) -> None:
    raise GrammarError(f"{_spell(path)}: {reason}")


def _spell(path: Path) -> str:
    """Return a path as ``properties.x.items[0]``."""
    text = ""
    for part in path:
        plain = isinstance(part, str) and re.fullmatch(r"[\w$-]+", part)
        text += f"{'.' * bool(text)}{part}" if plain else f"[{shown(part)}]"
    return text or "the schema"
