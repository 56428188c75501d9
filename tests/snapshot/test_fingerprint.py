"""Fingerprints: what they hold, what differs, and a hash of them that is the same everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from kvcellar.errors import SnapshotFileError, SnapshotMismatch
from kvcellar.snapshot.snapshot import check_same, digest, fingerprint, row_types, with_row_types
from kvcellar.types import KVType, StateLayer, StateSpec
from tests.snapshot.samples import memory_spec

PRINT: Any = fingerprint("sample", "ab" * 32, memory_spec())
DIGEST = "0de97d9f874f9188ffccfbf96437b29a450a691498cea286d6d557d97860377d"


def paths(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a fingerprint that is no container, with its path."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from paths(one, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from paths(one, f"{path}[{i}]")
    else:
        yield path, value


def changed(path: str, value: Any) -> Any:
    """The fingerprint with another value at a path."""
    whole = {"": deepcopy(PRINT)}
    steps = path.replace("[", ".[").split(".")
    at: Any = whole[""]
    for step in steps[:-1]:
        at = at[int(step[1:-1]) if step.startswith("[") else step]
    last = steps[-1]
    at[int(last[1:-1]) if last.startswith("[") else last] = value
    return whole[""]


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if value is None:
        return 1
    return value + "x" if isinstance(value, str) else value + 1


def test_it_survives_json() -> None:
    again = json.loads(json.dumps(PRINT))
    assert again == PRINT
    check_same(again, PRINT)
    check_same(PRINT, again)


@pytest.mark.parametrize(("path", "value"), list(paths(PRINT)))
def test_the_field_that_differs_is_named(path: str, value: Any) -> None:
    stored = changed(path, other(value))
    with pytest.raises(SnapshotMismatch) as caught:
        check_same(stored, PRINT)
    assert caught.value.field == path
    assert path in str(caught.value)
    assert digest(stored) != digest(PRINT)


def test_all_that_matters_is_in_it() -> None:
    found = {path.rpartition(".")[2] for path, _ in paths(PRINT)}
    assert {
        *("architecture", "weights", "type_k", "type_v", "hadamard_k[0]", "hadamard_v[0]"),
        *("n_head_kv", "head_dim_k", "head_dim_v", "window", "v_offset"),
        *("mode", "n_rot", "freq_base", "freq_scale", "ext_factor", "attn_factor"),
        *("beta_fast", "beta_slow", "n_ctx_orig", "factors[3]", "n_conv", "n_ssm"),
    } <= found


@pytest.mark.parametrize("path", ["weights", "architecture", "groups", "states"])
def test_a_missing_field_differs(path: str) -> None:
    stored = {key: value for key, value in PRINT.items() if key != path}
    with pytest.raises(SnapshotMismatch, match=path):
        check_same(stored, PRINT)


def test_an_unknown_field_differs() -> None:
    with pytest.raises(SnapshotMismatch, match="colour"):
        check_same({**PRINT, "colour": "red"}, PRINT)


def test_numbers_of_another_kind_differ() -> None:
    with pytest.raises(SnapshotMismatch, match="n_rot"):
        check_same(changed("groups[0].layers[0].rope.n_rot", 8.0), PRINT)


def test_another_number_of_layers_is_said_as_a_number() -> None:
    stored = changed("groups[0].layers", PRINT["groups"][0]["layers"][:1])
    with pytest.raises(SnapshotMismatch, match=r"groups\[0\].layers 1 entries, here it is 2"):
        check_same(stored, PRINT)


@pytest.mark.parametrize("name", ["type_k", "type_v"])
def test_types_need_not_agree_where_they_are_converted(name: str) -> None:
    stored = changed(f"groups[0].{name}", "q8_0")
    check_same(stored, PRINT, row_types=False)
    with pytest.raises(SnapshotMismatch, match="convert=True"):
        check_same(stored, PRINT)


@pytest.mark.parametrize("name", ["hadamard_k", "hadamard_v"])
def test_transforms_need_not_agree_where_rows_are_converted(name: str) -> None:
    stored = changed(f"groups[0].{name}[1]", 64)
    check_same(stored, PRINT, row_types=False)
    with pytest.raises(SnapshotMismatch, match=name):
        check_same(stored, PRINT)


def test_another_model_is_told_from_another_shape() -> None:
    with pytest.raises(SnapshotMismatch, match="another quantisation"):
        check_same({**PRINT, "weights": "cd" * 32}, PRINT)


def test_the_most_telling_field_is_named() -> None:
    stored = changed("groups[0].layers[0].window", 9)
    stored["weights"] = "cd" * 32
    stored["groups"][0]["type_k"] = "q8_0"
    wanted = r"groups\[0\].layers\[0\].window 9, here it is 0: it was computed by another model"
    with pytest.raises(SnapshotMismatch, match=wanted):
        check_same(stored, PRINT)
    stored["groups"][0]["layers"] = PRINT["groups"][0]["layers"]
    with pytest.raises(SnapshotMismatch, match="weights"):
        check_same(stored, PRINT)
    stored["weights"] = PRINT["weights"]
    with pytest.raises(SnapshotMismatch, match=r"type_k q8_0.*convert=True"):
        check_same(stored, PRINT)


def test_sizes_and_numbers_of_sequences_do_not_count() -> None:
    spec = memory_spec()
    groups = tuple(replace(g, size=999, n_seq_max=7, flash_attn=False) for g in spec.groups)
    assert spec.states is not None
    states = replace(spec.states, n_rows=99, n_seq_max=7)
    other_spec = replace(spec, groups=groups, states=states)
    assert fingerprint("sample", "ab" * 32, other_spec) == PRINT


def test_states_count() -> None:
    spec = replace(memory_spec(), states=StateSpec(8, 4, (StateLayer(3, 5),)))
    with pytest.raises(SnapshotMismatch, match="states"):
        check_same(fingerprint("sample", "ab" * 32, spec), PRINT)
    bare = fingerprint("sample", "ab" * 32, replace(memory_spec(), states=None))
    assert bare["states"] == []


def test_the_digest_is_pinned() -> None:
    assert digest(PRINT) == DIGEST


def test_the_digest_does_not_depend_on_order_or_process() -> None:
    backwards = dict(reversed(list(PRINT.items())))
    assert digest(backwards) == DIGEST
    code = f"""
import json, sys
from kvcellar.snapshot.snapshot import digest
print(digest(json.loads({json.dumps(PRINT)!r})))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == DIGEST, result.stderr


def test_types_of_rows() -> None:
    assert row_types(PRINT) == [(KVType.F16, KVType.F16)] * 2
    prints: list[Any] = [{}, {"groups": [{}]}, {"groups": 3}, {"groups": [{"type_k": "f17"}]}]
    for damaged in prints:
        with pytest.raises(SnapshotFileError, match="fingerprint is damaged"):
            row_types(damaged)


def test_stored_another_way() -> None:
    spec = memory_spec(KVType.Q8_0)
    found = with_row_types(PRINT, list(spec.groups))
    assert found == fingerprint("sample", "ab" * 32, spec)
    assert row_types(found) == [(KVType.Q8_0, KVType.F16)] * 2


def test_numbers_are_equal_only_as_json() -> None:
    for stored, wanted in ((True, 1), (1.0, 1), (0, False)):
        with pytest.raises(SnapshotMismatch, match="window"):
            check_same({"groups": [{"window": stored}]}, {"groups": [{"window": wanted}]})
