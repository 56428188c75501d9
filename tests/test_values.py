"""Errors, options and reports are values that can be copied and pickled; live objects refuse."""

from __future__ import annotations

import copy
import pickle
import pkgutil
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from inspect import isabstract, isclass
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import kvcellar
from kvcellar.batch import Batch
from kvcellar.cache.base import Cache, CheckpointBudget, Transaction
from kvcellar.cache.placement import Placement
from kvcellar.cache.view import CacheView
from kvcellar.cells import CellTable
from kvcellar.cellsets import pack_owners
from kvcellar.errors import (
    AllocationError,
    CacheFull,
    ComputeError,
    HandleError,
    KVCellarError,
    OptionError,
    SnapshotMismatch,
)
from kvcellar.runtime.context import Context, Timings
from kvcellar.runtime.options import SaveOptions
from kvcellar.runtime.profile import Profile, StepTimes
from kvcellar.text.chat_template import ChatTemplate
from kvcellar.text.grammar import Grammar
from kvcellar.text.sampler import Sampler, SamplerOptions
from kvcellar.types import CacheSpec, KVType, LayerSpec, RopeSpec

NOT_SEARCHED = ("kvcellar.cli", "kvcellar.testing", "kvcellar.__main__")


def _classes() -> dict[str, type]:
    """Every class that the library defines, by its full name."""
    found: dict[str, type] = {}
    for module in pkgutil.walk_packages(kvcellar.__path__, "kvcellar."):
        if not module.name.startswith(NOT_SEARCHED):
            for value in vars(import_module(module.name)).values():
                if isclass(value) and value.__module__ == module.name:
                    found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


CLASSES = _classes()
ERRORS = {name: kind for name, kind in CLASSES.items() if issubclass(kind, KVCellarError)}

# -- ways to another one

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def _pickled(protocol: int, value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, protocol))


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {protocol}": partial(_pickled, protocol) for protocol in PROTOCOLS},
}


def copies(value: Any) -> list[tuple[str, Any]]:
    return [(way, make(value)) for way, make in COPIES.items()]


def same(a: Any, b: Any) -> bool:
    """Whether two values are alike, whatever their classes call equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return (
            a.dtype == b.dtype and np.array_equal(a, b) and a.flags.writeable == b.flags.writeable
        )
    if is_dataclass(a) and not isinstance(a, type):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if not _compares(a) and hasattr(a, "__dict__") and not isinstance(a, Enum):
        return same(vars(a), vars(b))
    return bool(a == b)


def _compares(value: Any) -> bool:
    """Whether the class says what is equal."""
    equal: Any = type(value).__eq__
    return equal is not object.__eq__


# -- errors

SAID: dict[str, list[KVCellarError]] = {
    "CacheFull": [CacheFull(5, 3), CacheFull(5, 3, "use less"), CacheFull(needed=1, free=0)],
    "AllocationError": [AllocationError("K of layer 3", 2**40)],
    "SnapshotMismatch": [
        SnapshotMismatch("type_k", "f16", KVType.Q8_0, "convert it"),
        SnapshotMismatch("layers", [1, 2], None),
    ],
}
"""Errors whose arguments are not their message."""


@pytest.mark.parametrize("name", ERRORS)
def test_errors_survive(name: str) -> None:
    kind = ERRORS[name]
    for error in SAID.get(kind.__name__) or [kind("what failed"), kind("two", 2), kind()]:
        vars(error)["__notes__"] = ["a note"]  # as add_note does, in Python 3.11
        for way, other in copies(error):
            assert type(other) is kind, way
            assert str(other) == str(error), way
            assert other.args == error.args, way
            assert same(vars(other), vars(error)), way


def test_an_error_with_arguments_of_its_own_has_examples() -> None:
    own = {kind.__name__ for kind in ERRORS.values() if "__init__" in vars(kind)}
    assert own == SAID.keys()


class _Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two} cannot be told from this")


@pytest.mark.parametrize("name", ERRORS)
def test_errors_keep_a_cause_that_can_be_kept(name: str) -> None:
    kind = ERRORS[name]
    causes = [OSError(28, "No space left"), CacheFull(2, 1), ValueError("x"), _Unpicklable(1, 2)]
    for cause in causes:
        error = (SAID.get(kind.__name__) or [kind("what failed")])[0]
        error.__cause__ = cause
        for way, other in copies(error):
            assert str(other) == str(error), way
            assert other.__suppress_context__, way
            kept = None if isinstance(cause, _Unpicklable) else cause
            assert repr(other.__cause__) == repr(kept), way
        error.__cause__ = None


# -- values

LIVE_INSIDE = {"ContextFacts", "Span", "OldCells", "SavedCells", "SavedEviction", "SequenceState"}
LIVE_INSIDE |= {"GenerationArguments"}
"""Records that hold a cache or a sampler, or are the memory of one, and no values therefore."""

SPECIAL: dict[str, Callable[[], Any]] = {
    "SamplerOptions": lambda: SamplerOptions(0.5, logit_bias={3: 1.0, 4: -np.inf}, seed=7),
    "ContextOptions": lambda: kvcellar.ContextOptions(64, type_k="q8_0", kernel=False),
    "SaveOptions": lambda: SaveOptions("q8_0", compress=True),
    "Timings": lambda: Timings(1, 2.0, 3, 4.0, 5, 6.0, 7.0),
    "StepTimes": lambda: StepTimes(2, 3),
    "CacheView": lambda: view(),
    "CheckpointBudget": lambda: CheckpointBudget(3, 4),
    "Grammar": lambda: Grammar.regex("a+"),
    "Batch": lambda: Batch.of([5, 6, 7], [0, 1], positions=[1, 2, 3], logits=[True, False, True]),
}


def view() -> CacheView:
    table = CellTable(8, 2)
    bits = pack_owners(np.array([0, 1]), np.array([1, 1]), 2, len(table.owners))
    table.place(np.array([0, 1]), np.array([0, 1], np.int32), bits, np.array([5, 6], np.int32))
    return CacheView.of(table).with_texts(str)


def example(hint: Any) -> Any:
    """Some value of a type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return args[-1]
    if origin in (Union, UnionType):
        return example(args[0])
    if origin is tuple:
        return tuple(example(arg) for arg in args if arg is not Ellipsis)
    if origin is np.ndarray:
        dtype = get_args(args[1])[0]
        return np.ones(2, dtype=np.uint8 if dtype is Any else dtype)
    if origin is abc.Callable:
        return len
    if origin is not None:
        return {"key": 1} if issubclass(origin, Mapping) else [example(arg) for arg in args[:1]]
    if isclass(hint) and issubclass(hint, Enum):
        return next(iter(hint))
    if isclass(hint) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        return made(hint)
    plain = {int: 3, float: 0.5, str: "text", bool: True, bytes: b"bytes", object: "anything"}
    return plain[hint] if hint in plain else hint()


def made(kind: type) -> Any:
    if kind.__name__ in SPECIAL:
        return SPECIAL[kind.__name__]()
    hints = get_type_hints(kind)
    if is_dataclass(kind):
        hints = {field.name: hints[field.name] for field in fields(kind) if field.init}
    return kind(**{name: example(hint) for name, hint in hints.items()})


def _is_value(kind: type) -> bool:
    is_record = is_dataclass(kind) or issubclass(kind, tuple)
    return is_record and kind.__name__ not in LIVE_INSIDE and not kind.__name__.startswith("_")


def _is_below(name: str) -> bool:
    """Whether a class belongs to what computes, where records hold pointers and functions."""
    return name.startswith(("kvcellar.backends", "kvcellar.models"))


VALUES = {name: kind for name, kind in CLASSES.items() if _is_value(kind) and not _is_below(name)}


def test_the_values_were_found() -> None:
    found = {kind.__name__ for kind in VALUES.values()}
    wanted = {"SamplerOptions", "ContextOptions", "ContextShift", "SaveOptions", "LoadOptions"}
    wanted |= {"CacheView", "CacheSpec", "LayerSpec", "RopeSpec", "Timings", "StepTimes"}
    wanted |= {"CacheHit", "Miss", "VerifyReport", "GcReport", "Imported", "Entry", "Batch"}
    assert wanted <= found


@pytest.mark.parametrize("name", VALUES)
def test_values_survive(name: str) -> None:
    value = made(VALUES[name])
    for way, other in copies(value):
        assert same(other, value), way
        if _compares(value) and not _has_arrays(value):
            assert other == value, way
            assert not _is_hashable(value) or hash(other) == hash(value), way


def _has_arrays(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else vars_of(value)
    return any(isinstance(part, np.ndarray) or _is_nested(part) for part in parts)


def _is_nested(part: Any) -> bool:
    if isinstance(part, (list, tuple)):
        return any(isinstance(one, np.ndarray) or _is_nested(one) for one in part)
    return is_dataclass(part) and _has_arrays(part)


def vars_of(value: Any) -> list[Any]:
    return [getattr(value, field.name) for field in fields(value)]


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def test_enums_survive() -> None:
    for kind in CLASSES.values():
        if issubclass(kind, Enum):
            for member in kind:
                assert all(other is member for _, other in copies(member))


def test_a_view_stays_read_only() -> None:
    for way, other in copies(view()):
        for array in (other.positions, other.tokens, other.owners):
            assert not array.flags.writeable, way
        assert other.to_json() == view().to_json(), way


def test_options_compare_by_what_they_say() -> None:
    """However a number, a bool or a type was written."""
    plain = SamplerOptions(temperature=1, top_k=5, logit_bias={3: 1})
    numbers: dict[str, Any] = {"temperature": np.float32(1), "top_k": np.int64(5)}
    assert plain == SamplerOptions(**numbers, logit_bias={np.int32(3): np.float64(1)})
    assert hash(plain) == hash(SamplerOptions(**numbers, logit_bias={3: 1.0}))
    assert plain != SamplerOptions(temperature=1, top_k=5)
    context = kvcellar.ContextOptions(n_ctx=64, type_k="q8_0", swa_full=True)
    given: dict[str, Any] = {"n_ctx": np.uint16(64), "swa_full": np.True_}
    assert context == kvcellar.ContextOptions(type_k=KVType.Q8_0, **given)
    assert len({context, kvcellar.ContextOptions(type_k="Q8_0", **given)}) == 1


def test_a_copied_batch_can_be_added_to() -> None:
    for way, other in copies(batch := Batch.of([1, 2])):
        other.add(3)
        assert (len(batch), len(other)) == (2, 3), way


def test_a_copied_sampler_draws_the_same_and_leaves_the_first_alone() -> None:
    logits = np.linspace(0, 1, 50, dtype=np.float32)
    options = SamplerOptions(temperature=1.0, seed=3)
    first = Sampler(options)
    wanted = [first.sample(logits) for _ in range(8)]
    for way in COPIES:
        first = Sampler(options)
        other = COPIES[way](first)
        assert [other.sample(logits) for _ in range(8)] == wanted, way
        assert [first.sample(logits) for _ in range(8)] == wanted, way


def test_a_template_survives() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", "<s>", "</s>")
    for way, other in copies(template):
        assert other.render([{"role": "user", "content": "Hi"}]) == "<s>Hi", way


def test_a_profile_survives() -> None:
    profile = Profile()
    profile.add(5, 1, 0.0, 1.0, 0.5)
    for way, other in copies(profile):
        assert same(other.prefill, profile.prefill), way
        assert other.prefill.seconds == profile.prefill.seconds, way


# -- handles

HANDLES: dict[str, str] = {
    "Context": "save",
    "Sequence": "fork",
    "Chat": "fork",
    "Model": "from_gguf",
    "MemoryStore": "threads",
    "DiskStore": "open its folder again",
    "RedisStore": "open its URL again",
    "PromptCache": "another over a store",
    "AttentionCache": "seq_cp",
    "SlidingCache": "seq_cp",
    "RecurrentCache": "seq_cp",
    "HybridCache": "seq_cp",
    "Transaction": "open another",
    "Placement": "commit or release",
    "GgmlStore": "make another",
    "GgmlStateStore": "make another",
    "NumpyStore": "make another",
    "NumpyStateStore": "make another",
}
"""Live objects, and what their refusal advises."""

PARTS = {"RedisClient", "Index", "LiveIndex"}
"""What is closed with the object that it is a part of, and never handed out."""


def _is_handle(name: str, kind: type) -> bool:
    if getattr(kind, "_is_protocol", False) or isabstract(kind) or kind.__name__ in PARTS:
        return False
    if kind.__name__.startswith("_"):
        return False
    if _is_below(name):
        return kind.__name__.endswith("Store")
    return hasattr(kind, "close") or issubclass(kind, (Cache, Transaction, Placement))


FOUND = {kind.__name__: kind for name, kind in CLASSES.items() if _is_handle(name, kind)}
FOUND["PromptCache"] = kvcellar.PromptCache


def test_every_handle_is_named() -> None:
    assert FOUND.keys() == HANDLES.keys()


@pytest.mark.parametrize("name", HANDLES)
@pytest.mark.parametrize("way", COPIES)
def test_live_objects_refuse_by_name(name: str, way: str) -> None:
    kind = FOUND[name]
    handle: Any = object.__new__(kind)
    with pytest.raises(HandleError, match=rf"cannot be copied or pickled: .*{HANDLES[name]}"):
        COPIES[way](handle)
    with pytest.raises(HandleError):
        COPIES[way]([handle] if way != "copy" else handle)


@pytest.mark.parametrize("name", kvcellar.__all__)
def test_every_public_class_is_an_error_a_value_or_a_handle(name: str) -> None:
    kind = getattr(kvcellar, name)
    if isclass(kind):
        is_error, is_handle = issubclass(kind, KVCellarError), kind.__name__ in HANDLES
        is_value = issubclass(kind, Enum) or kind in VALUES.values()
        assert is_error + is_handle + is_value == 1


def test_a_refused_copy_changes_nothing(plain: Context) -> None:
    sequence = plain.sequence([1, 2, 3])
    for way in COPIES.values():
        for handle in (sequence, plain, plain.model, plain.cache):
            with pytest.raises(HandleError):
                way(handle)
    assert plain.sequences == (sequence,)
    assert sequence.tokens == [1, 2, 3]
    assert len(sequence.fork()) == 3


class _Shape(NamedTuple):
    spec: CacheSpec


def test_specs_can_be_keys() -> None:
    layer = LayerSpec(1, 32, 32, RopeSpec("neox", 32, factors=(1.0, 2.0)))
    shapes = {_Shape(CacheSpec(64, 1, (layer,)))}
    assert {copy.deepcopy(shape) for shape in shapes} == shapes
    assert isinstance(OptionError("x"), ValueError)
    assert not isinstance(ComputeError("x"), ValueError)
