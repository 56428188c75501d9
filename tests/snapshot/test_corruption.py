"""Thousands of damaged files: each is refused by name, or gives exactly what was saved."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.cache.content_checks import check_content
from kvcellar.errors import KVCellarError, SnapshotError
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.snapshot.container import _hash, from_bytes, read_file, to_bytes
from kvcellar.snapshot.native import from_arrays, to_arrays
from kvcellar.snapshot.snapshot import Snapshot
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.types import AnyArray
from tests.runtime.archs import check_logits, opened, text
from tests.snapshot.samples import assert_same, memory_spec, sample

Damage = Callable[[np.random.Generator, bytes], bytes]
INTEGERS = (0, 1, -1, 7, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30)
ODD: tuple[Any, ...] = (
    *INTEGERS,
    1.5,
    float("nan"),
    None,
    True,
    "",
    "x",
    "F64",
    "I8",
    [],
    [0, 8],
    {},
    {"a": 1},
)


# -- damage to bytes


def flip(rng: np.random.Generator, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8, 64])):
        out[rng.integers(len(out))] ^= 1 << rng.integers(8)
    return bytes(out)


def flip_in_header(rng: np.random.Generator, data: bytes) -> bytes:
    end = 8 + int.from_bytes(data[:8], "little")
    return flip(rng, data[:end]) + data[end:]


def flip_in_size(rng: np.random.Generator, data: bytes) -> bytes:
    return flip(rng, data[:8]) + data[8:]


def overwrite(rng: np.random.Generator, data: bytes) -> bytes:
    n = int(rng.integers(1, 200))
    at = int(rng.integers(len(data)))
    kind = rng.integers(3)
    new = bytes(n) if kind == 0 else b"\xff" * n if kind == 1 else rng.bytes(n)
    return (data[:at] + new + data[at + n :])[: len(data)]


def truncate(rng: np.random.Generator, data: bytes) -> bytes:
    near = rng.integers(2) == 0
    return data[: len(data) - int(rng.integers(1, 20)) if near else int(rng.integers(len(data)))]


def extend(rng: np.random.Generator, data: bytes) -> bytes:
    return data + rng.bytes(int(rng.integers(1, 100)))


def cut_out(rng: np.random.Generator, data: bytes) -> bytes:
    a, b = sorted(rng.integers(0, len(data), 2).tolist())
    return data[:a] + data[b + 1 :]


def swap_spans(rng: np.random.Generator, data: bytes) -> bytes:
    n = int(rng.integers(1, 300))
    a, b = sorted(rng.integers(0, len(data) - n, 2).tolist())
    b = max(b, a + n)
    if b + n > len(data):
        return truncate(rng, data)
    return data[:a] + data[b : b + n] + data[a + n : b] + data[a : a + n] + data[b + n :]


def garbage(rng: np.random.Generator, _: bytes) -> bytes:
    n = int(rng.integers(0, 500))
    head = struct.pack("<Q", n) if rng.integers(2) else b""
    return head + (b"{" if rng.integers(2) else b"") + rng.bytes(n)


# -- damage to the header, which stays JSON


def split(data: bytes) -> tuple[Any, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def join(header: Any, body: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + body


def pick(rng: np.random.Generator, values: Any) -> Any:
    values = list(values)
    return values[int(rng.integers(len(values)))]


def edit_tensor(rng: np.random.Generator, data: bytes) -> bytes:
    header, body = split(data)
    name = pick(rng, [key for key in header if key != "__metadata__"])
    field = pick(rng, ["dtype", "shape", "data_offsets"])
    value = header[name][field]
    if field == "dtype":
        header[name][field] = pick(rng, ["U8", "I8", "BOOL", "F16", "BF16", "I32", "F64", *ODD])
    elif rng.integers(3) and value:
        value[int(rng.integers(len(value)))] = pick(rng, ODD)
    else:
        header[name][field] = pick(rng, [value[::-1], [*value, 1], value[:-1], *ODD])
    return join(header, body)


def swap_tensors(rng: np.random.Generator, data: bytes) -> bytes:
    header, body = split(data)
    names = [key for key in header if key != "__metadata__"]
    a, b = pick(rng, names), pick(rng, names)
    header[a], header[b] = header[b], header[a]
    return join(header, body)


def rename_tensor(rng: np.random.Generator, data: bytes) -> bytes:
    header, body = split(data)
    name = pick(rng, [key for key in header if key != "__metadata__"])
    header[pick(rng, ["", "x", "__metadata__", "states", name + " "])] = header.pop(name)
    return join(header, body)


def repeat_key(rng: np.random.Generator, data: bytes) -> bytes:
    header, body = split(data)
    name, other = pick(rng, header), pick(rng, header)
    pair = f"{json.dumps(name)}: {json.dumps(header[other])}"
    text = json.dumps(header)
    first = rng.integers(2)
    return join("{" + pair + ", " + text[1:] if first else text[:-1] + ", " + pair + "}", body)


def edit_metadata(rng: np.random.Generator, data: bytes) -> bytes:
    header, body = split(data)
    about = header["__metadata__"]
    about[pick(rng, about)] = pick(
        rng, ["", "1", "2", "kvcellar-snapshot", "{}", *map(str, ODD), *ODD]
    )
    return join(header, body)


def spaces(rng: np.random.Generator, data: bytes) -> bytes:
    header, body = split(data)
    return join(json.dumps(header, indent=int(rng.integers(4))) + " " * int(rng.integers(9)), body)


DAMAGES: Mapping[str, tuple[Damage, int]] = {
    "bits": (flip, 4000),
    "bits of the header": (flip_in_header, 3000),
    "bits of its size": (flip_in_size, 200),
    "spans": (overwrite, 2000),
    "truncated": (truncate, 1000),
    "extended": (extend, 100),
    "cut": (cut_out, 200),
    "swapped": (swap_spans, 1500),
    "garbage": (garbage, 300),
    "tensors": (edit_tensor, 2000),
    "tensors swapped": (swap_tensors, 200),
    "tensors renamed": (rename_tensor, 100),
    "repeated keys": (repeat_key, 200),
    "metadata": (edit_metadata, 300),
    "spaces": (spaces, 20),
}


@pytest.fixture(scope="module")
def small() -> Snapshot:
    return sample(lengths=(5, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_bytes_are_refused_or_give_what_was_saved(small: Snapshot, name: str) -> None:
    damage, n = DAMAGES[name]
    data = [to_bytes(to_arrays(small), compress=bool(i)) for i in range(2)]
    rng, n_refused = np.random.default_rng(len(name)), 0
    for i in range(n):
        damaged = damage(rng, data[i % 2])
        try:
            found = from_arrays(from_bytes(damaged))
        except SnapshotError:
            n_refused += 1
            continue
        assert_same(found, small)
    assert n_refused == 0 if name == "spaces" else n_refused > n // 3


def test_there_are_thousands() -> None:
    assert sum(n for _, n in DAMAGES.values()) >= 5000


def test_tensors_of_another_file_are_refused() -> None:
    files = [to_bytes(to_arrays(sample(seed, (5, 3))), compress=False) for seed in (1, 2)]
    (header, body), (other_header, other_body) = map(split, files)
    names = [key for key in header if key != "__metadata__"]
    n_same = 0
    for name in names:
        a, b = header[name]["data_offsets"]
        c, d = other_header[name]["data_offsets"]
        mixed = body[:a] + other_body[c:d] + body[b:]
        if mixed == body:
            n_same += 1  # as positions are
            continue
        with pytest.raises(SnapshotError, match=f"the array {name} is damaged"):
            from_bytes(join(header, mixed))
    assert n_same < len(names) // 2
    for key in ("description", "hash"):
        about = {**header["__metadata__"], key: other_header["__metadata__"][key]}
        with pytest.raises(SnapshotError):
            from_bytes(join({**header, "__metadata__": about}, body))


def test_headers_that_promise_too_much_cost_nothing(small: Snapshot) -> None:
    header, body = split(to_bytes(to_arrays(small), compress=False))
    for shape in ([2**40, 2**20], [2**63, 2], [2**62]):
        huge = deepcopy(header)
        huge["states"].update(shape=shape, data_offsets=[0, 2**62])
        with pytest.raises(SnapshotError):
            from_bytes(join(huge, body))
    for size in (2**30, 2**63, 2**64 - 1):
        with pytest.raises(SnapshotError):
            from_bytes(struct.pack("<Q", size) + b"{}")
    with pytest.raises(SnapshotError):
        from_bytes(join('{"a":' * 50_000, body))


# -- damage in a file, and what becomes of the context that was to load it


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    path.write_bytes(TinyLlama(n_layer=1).to_bytes())
    with Model.from_gguf(path, n_threads=1, backend="numpy") as model:
        context = model.context(n_ctx=64, n_seq_max=4, type_k="f32", type_v="f16")
        context.sequence([1, 2, 3, 4, 5])
        context.sequence([1, 9]).append([3, 4])
        yield context


Seen = tuple[Any, ...]


def seen(context: Context) -> Seen:
    """All that can be known of a context: cells, rows, sequences."""
    cache: Any = context.cache
    table = cache.table
    cells = np.flatnonzero(table.positions >= 0)
    rows = tuple(
        cache.store.read_raw(i, part, cells).tobytes()
        for i in range(len(cache.spec.layers))
        for part in ("k", "v")
    )
    parts = (table.positions, table.tokens, table.owners, table.pending)
    texts = tuple((s.seq_id, tuple(s.tokens), s.inexact_from) for s in context.sequences)
    known = [s.saved_text().logits for s in context.sequences]
    logits = tuple(None if one is None else one.tobytes() for one in known)
    return rows, tuple(part.tobytes() for part in parts), table.used, texts, logits


def test_a_context_is_as_before_or_has_what_was_saved(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "text"
    context.save(path)
    data, before = path.read_bytes(), seen(context)
    wanted, logits = [s.tokens for s in context.sequences], [s.logits for s in context.sequences]
    saved = from_arrays(read_file(path))
    rng, outcomes = np.random.default_rng(3), {True: 0, False: 0}
    damages = [damage for damage, _ in DAMAGES.values()]
    for i in range(225):
        path.write_bytes(damages[i % len(damages)](rng, data))
        try:
            loaded = context.load_all(path)
        except SnapshotError:
            assert seen(context) == before
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        assert [s.tokens for s in loaded] == wanted
        for one, row in zip(loaded, logits, strict=True):
            assert np.array_equal(one.logits, row)
        path.unlink()
        context.save(path, loaded)
        assert_same(from_arrays(read_file(path)), saved)
        for one in loaded:
            one.close()
        context.cache.check()
    assert outcomes[True] > 10
    assert outcomes[False] > 100


# -- forged files: their hashes are right, and still nothing may break


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested containers, as a container and a key of it."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def forge_description(rng: np.random.Generator, about: Any) -> None:
    box, key = pick(rng, places(about))
    if rng.integers(4) == 0 and isinstance(box, dict):
        del box[key]
    else:
        box[key] = pick(rng, ODD)


def forge_array(rng: np.random.Generator, arrays: dict[str, AnyArray]) -> None:
    name = pick(rng, arrays)
    array = arrays[name]
    kind = rng.integers(6)
    if kind == 0:
        del arrays[name]
    elif kind == 1 and array.size:
        array = array.copy()
        array.reshape(-1)[rng.integers(array.size)] = pick(rng, [0, 1, -1, 2**31 - 1, 100])
        arrays[name] = array
    elif kind == 2:
        arrays[name] = array[: int(rng.integers(len(array) + 1))]
    elif kind == 3:
        arrays[name] = np.concatenate((array, array))
    elif kind == 4:
        arrays[name] = array.astype(pick(rng, [np.float32, np.int64, np.uint8, np.float16]))
    else:
        arrays[name] = pick(rng, [array.reshape(-1), array[np.newaxis], array.T])


def forge(rng: np.random.Generator, snapshot: Snapshot) -> bytes:
    arrays, about = to_arrays(snapshot)
    about = json.loads(json.dumps(about))
    arrays = {name: array.copy() for name, array in arrays.items()}
    for _ in range(int(rng.choice([1, 1, 2]))):
        if rng.integers(2):
            forge_description(rng, about)
        else:
            forge_array(rng, arrays)
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    made = to_bytes(to_arrays(snapshot)._replace(arrays=whole, description=about), compress=False)
    assert from_bytes(made).description.keys() == about.keys()
    return made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_forged_file_breaks_nothing(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "text"
    context.save(path, context.sequences[:1])
    saved, before = from_arrays(read_file(path)), seen(context)
    rng, outcomes = np.random.default_rng(4), {True: 0, False: 0}
    for i in range(400):
        path.write_bytes(forge(rng, saved))
        more: Any = [{}, {"convert": True}, {"start": 1}, {"stop": 3}, {"positions": 7}][i % 5]
        try:
            loaded = context.load(path, **more)
            assert loaded.tokens is not None
        except KVCellarError:
            assert seen(context) == before
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        context.cache.check()
        loaded.close()
        assert seen(context) == before
    assert outcomes[True] > 25
    assert outcomes[False] > 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("arch", ["gemma3-dense", "jamba-dense", "mamba-dense"])
def test_a_forged_file_breaks_no_kind_of_cache(shared: Path, arch: str, tmp_path: Path) -> None:
    path, rng = tmp_path / "text", np.random.default_rng(6)
    with opened(shared, arch, n_ctx=128, n_seq_max=2) as context:
        first = context.sequence(text(1, 50)).append(text(2, 9))
        context.save(path)
        saved, logits, n_refused = from_arrays(read_file(path)), first.logits, 0
        for i in range(150):
            path.write_bytes(forge(rng, saved))
            more: Any = [{}, {"convert": True}, {"stop": 3}, {"positions": 7}][i % 4]
            try:
                loaded = context.load(path, **more)
            except KVCellarError:
                n_refused += 1
            else:
                context.cache.check()
                loaded.close()
            assert context.sequences == (first,)
        assert 50 < n_refused < 150
        assert np.array_equal(first.logits, logits)
        first._state = first._state._replace(logits=None)
        check_logits(context, first.logits, first.tokens)


def test_a_state_of_two_texts_is_refused() -> None:
    content = sample().content
    assert content.states is not None
    held = content.states.held
    assert held[0] is not None
    twice = replace(held[0], checkpoints=((3, held[0].state),))
    states = replace(content.states, held=(twice, *held[1:]))
    spec = memory_spec()
    assert spec.states is not None
    with pytest.raises(SnapshotError, match="state 0 is of two texts"):
        check_content(replace(content, states=states), [*spec.groups, spec.states])


def test_the_hashes_in_a_forged_file_are_right(small: Snapshot) -> None:
    made = forge(np.random.default_rng(0), small)
    about = split(made)[0]["__metadata__"]
    assert about["hash"] == _hash(about["description"].encode())
