"""Every argument of every public callable: taken with the meaning of its type, or our error.

Parameters are found by introspection, so a new one is tried too. What a parameter may take is read
from its annotation, where that is plain (int, bool, float, str, a path, None). Whatever is refused
has changed nothing.
"""

from __future__ import annotations

import inspect
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcellar
from kvcellar.backends.numpy.states import NumpyStateStore
from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.batch import Batch
from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import Cache, CheckpointBudget, CheckpointPolicy
from kvcellar.cache.content import SequenceData
from kvcellar.cache.hybrid import HybridCache
from kvcellar.cache.recurrent import RecurrentCache
from kvcellar.cache.sliding import SlidingCache
from kvcellar.cache.transfer import state_get, state_set
from kvcellar.cache.view import CacheView
from kvcellar.errors import (
    BatchError,
    CacheFull,
    KVCellarError,
    OptionError,
    SequenceIdError,
    TokenizerError,
    check_bool,
    check_integers,
    check_kind,
    check_range,
)
from kvcellar.prompts.archive import check_export, export_blocks, import_blocks
from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime.chat import Chat
from kvcellar.runtime.context import Context, save_llama_file
from kvcellar.runtime.demo import find_model
from kvcellar.runtime.model import Model
from kvcellar.runtime.options import ContextOptions, ContextShift, LoadOptions, SaveOptions
from kvcellar.runtime.results import Result, Token
from kvcellar.runtime.saving import Ready
from kvcellar.runtime.sequence import Sequence
from kvcellar.runtime.together import generate_all, stream_all
from kvcellar.snapshot.snapshot import SavedText
from kvcellar.stores.disk.store import DiskStore
from kvcellar.stores.memory import MemoryStore
from kvcellar.stores.opening import open_store
from kvcellar.stores.redis import RedisStore
from kvcellar.testing.gguf_writer import Value, gguf_bytes
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.text.chat_prompt import ChatPrompt
from kvcellar.text.chat_template import ChatTemplate
from kvcellar.text.grammar import Grammar
from kvcellar.text.grammar_matcher import GrammarMatcher
from kvcellar.text.sampler import Sampler, SamplerOptions, log_softmax
from kvcellar.text.tokenizer import Detokenizer, Tokenizer
from kvcellar.types import CacheSpec, KVType, LayerSpec, RopeSpec, RowFormat, StateLayer, StateSpec
from tests.text.vocabularies import make_bpe

N_VOCAB, TEXT = 256, "Once upon"
LAYER = LayerSpec(1, 32, 32, RopeSpec("neox", 32))
SPEC = CacheSpec(64, 4, (LAYER,), KVType.F32, KVType.F32, padding=32)
WINDOW = CacheSpec(64, 4, (LayerSpec(1, 32, 32, RopeSpec("neox", 32), window=8),), padding=32)
STATES = StateSpec(12, 4, (StateLayer(4, 4),))


class _Odd:
    """An object whose text cannot be had."""

    def __repr__(self) -> str:
        raise ValueError("no text")


WRONG: dict[str, Any] = {
    "None": None,
    "0": 0,
    "-1": -1,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "'no'": "no",
    "''": "",
    "NUL": "a\0b",
    "surrogate": "\ud800",
    "bytes": b"x",
    "bytearray": bytearray(b"xy"),
    "[]": [],
    "{}": {},
    "set": {1, 2},
    "dict": {1: 2},
    "object": object(),
    "odd": _Odd(),
    "True": True,
    "np.bool_": np.True_,
    "np.int64": np.int64(3),
    "np.float32": np.float32(0.5),
    "2**31": 2**31,
    "2**63": 2**63,
    "-2**70": -(2**70),
    "digits": 10**5000,
    "[1.5]": [1.5],
    "['a']": ["a"],
    "[None]": [None],
    "[True]": [True],
    "[[1]]": [[1]],
    "floats": np.zeros(3),
    "matrix": np.zeros((2, 2), np.int32),
    "complex": 1j,
}


def takes(part: str, value: object) -> bool | None:
    """Whether an annotation takes a value; None: it does not say."""
    is_bool = isinstance(value, (bool, np.bool_))
    if part == "None":
        return value is None
    if part == "int":
        return isinstance(value, (int, np.integer)) and not is_bool
    if part == "bool":
        return is_bool
    if part == "float":
        return isinstance(value, Real) and not is_bool
    if part == "str":
        return isinstance(value, str)
    if part in ("Path", "os.PathLike[str]"):
        return isinstance(value, os.PathLike)
    if part in KINDS:
        return isinstance(value, KINDS[part])
    return None


KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Batch,
        CacheSpec,
        ContextOptions,
        ContextShift,
        KVType,
        LayerSpec,
        Ready,
        RopeSpec,
        RowFormat,
        SamplerOptions,
        SavedText,
        Sequence,
        SequenceData,
    )
}


def may_take(annotation: str, value: object) -> bool:
    answers = [takes(part.strip(), value) for part in annotation.split("|")]
    return any(answer in (True, None) for answer in answers)


# -- what is called


class Bench:
    """One of everything, made when it is needed, and again when a call went through."""

    def __init__(self, model: Model, folder: Path) -> None:
        self.model = model
        self.folder = folder

    @cached_property
    def context(self) -> Context:
        return self.model.context(n_ctx=64, n_seq_max=4, type_k="f32", type_v="f32")

    @cached_property
    def sequence(self) -> Sequence:
        return self.context.sequence(TEXT)

    @cached_property
    def chat(self) -> Chat:
        made = Chat(self.model.context(n_ctx=64), template="chatml", when_full="drop")
        made.ask("a", 1)
        return made

    @cached_property
    def store(self) -> MemoryStore:
        made = MemoryStore()
        made.put("0a", [b"value"], {"parent": "0b", "start": 0})
        return made

    @cached_property
    def disk(self) -> DiskStore:
        made = DiskStore(self.folder / "store", fsync=False)
        made.put("0a", [b"value"])
        return made

    @cached_property
    def prompts(self) -> PromptCache:
        return PromptCache(self.store, block_size=4)

    @cached_property
    def batch(self) -> Batch:
        return Batch.of([1, 2])

    @cached_property
    def attention(self) -> Cache:
        return _filled(AttentionCache(SPEC, NumpyStore(SPEC)))

    @cached_property
    def sliding(self) -> Cache:
        return _filled(SlidingCache(WINDOW, NumpyStore(WINDOW)))

    @cached_property
    def recurrent(self) -> Cache:
        return _filled(RecurrentCache(NumpyStateStore(STATES), size=64))

    @cached_property
    def hybrid(self) -> Cache:
        states = RecurrentCache(NumpyStateStore(STATES), size=64)
        return _filled(HybridCache([AttentionCache(SPEC, NumpyStore(SPEC))], states))

    def subject(self, kind: type) -> Any:
        """The object whose methods of a class are called."""
        if kind is Tokenizer:
            return self.model.tokenizer
        return MAKE[kind](self) if kind in MAKE else getattr(self, PARTS[kind])

    def state(self) -> dict[str, Any]:
        """What no refused call may change, of what was made so far."""
        found: dict[str, Any] = {}
        for name, part in vars(self).items():
            if isinstance(part, Cache):
                found[name] = part.view()
            elif isinstance(part, Context):
                found[name] = [part.cache.view(), [one.tokens for one in part.sequences]]
            elif isinstance(part, (MemoryStore, DiskStore)):
                found[name] = [(entry.key, entry.note) for entry in part.entries()]
            elif isinstance(part, Batch):
                found[name] = len(part)
        return found

    def close(self) -> None:
        for name in ("context", "disk"):
            if name in vars(self):
                getattr(self, name).close()


def _filled(cache: Cache) -> Cache:
    with cache.place(Batch.of([1, 2, 3, 4]), 8) as placement:
        list(placement.plans())
    return cache


PARTS: dict[type, str] = {
    Model: "model",
    Context: "context",
    Sequence: "sequence",
    MemoryStore: "store",
    DiskStore: "disk",
    PromptCache: "prompts",
    Batch: "batch",
    AttentionCache: "attention",
    SlidingCache: "sliding",
    RecurrentCache: "recurrent",
    HybridCache: "hybrid",
}
"""Classes of what a bench has, and where."""

MAKE: dict[type, Callable[[Bench], Any]] = {
    CacheSpec: lambda _: SPEC,
    LayerSpec: lambda _: LAYER,
    RopeSpec: lambda _: LAYER.rope,
    KVType: lambda _: KVType.Q8_0,
    ContextOptions: lambda _: ContextOptions(n_ctx=64),
    ContextShift: lambda _: ContextShift(),
    SaveOptions: lambda _: SaveOptions(),
    LoadOptions: lambda _: LoadOptions(),
    SamplerOptions: lambda _: SamplerOptions(),
    Grammar: lambda _: Grammar.regex("a"),
    GrammarMatcher: lambda bench: Grammar.regex("a").matcher(bench.model.tokenizer),
    Sampler: lambda _: Sampler(SamplerOptions(0.0, frequency_penalty=1.0)),
    CacheView: lambda bench: bench.context.view(),
    Chat: lambda bench: bench.chat,
    ChatPrompt: lambda _: ChatPrompt("a", (1,), (0,), 0),
    ChatTemplate: lambda _: ChatTemplate("{{ messages[0].content }}"),
    Result: lambda b: b.sequence.complete(max_tokens=1),
    Token: lambda _: Token(1, "a"),
    Detokenizer: lambda bench: bench.model.tokenizer.detokenizer(),
    CheckpointBudget: lambda _: CheckpointBudget(),
    CheckpointPolicy: lambda _: CheckpointPolicy(),
}

CLASSES: tuple[type, ...] = (*PARTS, *MAKE, RedisStore, Tokenizer)

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    find_model,
    open_store,
    save_llama_file,
    generate_all,
    stream_all,
    state_get,
    state_set,
    log_softmax,
    export_blocks,
    import_blocks,
    check_export,
)

MADE_ELSEWHERE = {
    "Context": "Model.context",
    "Sequence": "Context.sequence",
    "Result": "Sequence.complete",
    "Token": "Sequence.generate_tokens",
    "ChatPrompt": "Model.chat",
    "Tokenizer": "Tokenizer.from_metadata",
    "GrammarMatcher": "Grammar.matcher",
    "Detokenizer": "Tokenizer.detokenizer",
    "KVType": "an enumeration",
    "CacheView": "Cache.view",
}
"""Classes that are not called by users, and what makes their objects."""

BEHIND_THE_BORDER = {
    "export": "state_get checks",
    "import_": "state_set checks",
    "check_rows": "place checks",
    "take": "place and what generates check",
    "open_memory": "Model.context checks",
    "adopt": "PromptCache and Context.load check",
    "put": "Context.load checks",  # of a context
    "change": "what changes a context calls it",
    "join": "caches that are made of others call it",
    "release": "Sequence.close calls it",
    "begin": "what generates calls it",
    "fill_open_token": "what generates calls it",
    "batch": "what computes calls it",
    "computed": "what computes calls it",
    "own": "Context.save and compute call it",
    "of": "Cache.view calls it",  # of a view
    "from_metadata": "files are read by tests of their own",
}
"""Methods that the library calls with arguments that it has checked; see ``is_behind``."""

OWN = {"MemoryStore.put", "DiskStore.put", "Batch.of"}
"""Public methods of the same names."""

GOOD: dict[str, Callable[[Bench], Any]] = {
    "Model.path": lambda b: b.model.path,
    "Model.from_gguf.path": lambda b: b.model.path,
    "Model.why_no_kernel.spec": lambda _: SPEC,
    "Context.save.path": lambda b: b.folder / "all.kv",
    "Sequence.save.path": lambda b: b.folder / "one.kv",
    "Context.load.path": lambda b: saved(b),
    "Context.load_all.path": lambda b: saved(b),
    "Sequence.load.path": lambda b: saved(b),
    "DiskStore.path": lambda b: b.folder / "another",
    "export_blocks.path": lambda b: b.folder / "blocks.zip",
    "import_blocks.path": lambda b: b.folder / "blocks.zip",
    "check_export.path": lambda b: b.folder / "blocks.zip",
    "save_llama_file.path": lambda b: b.folder / "llama.bin",
    "export_blocks.blocks": lambda b: list(b.store.entries()),
    "find_model.name": lambda b: b.model.path,
    "Sequence.generate.max_tokens": lambda _: 2,
    "Sequence.complete.max_tokens": lambda _: 2,
    "generate_all.max_tokens": lambda _: 2,
    "Sampler.sample.history": lambda _: [1, 2],
    "PromptCache.store.sequence": lambda b: b.sequence,
    "PromptCache.append.sequence": lambda b: empty(b),
    "PromptCache.restore.sequence": lambda b: empty(b),
    "RecurrentCache.store": lambda _: NumpyStateStore(STATES),
    "SlidingCache.spec": lambda _: WINDOW,
    "SlidingCache.store": lambda _: NumpyStore(WINDOW),
    "AttentionCache.store": lambda _: NumpyStore(SPEC),
    "PromptCache.store": lambda _: MemoryStore(),
    "HybridCache.groups": lambda _: [AttentionCache(SPEC, NumpyStore(SPEC))],
    "state_get.seq_ids": lambda _: [0],
    "state_set.seq_ids": lambda _: [1],
    "state_set.content": lambda b: state_get(b.attention, [0]),
    "Batch.of_embeddings.embeddings": lambda _: [[1.0, 2.0]],
    "Model.convert_rows.rows": lambda _: np.zeros((2, 128), np.uint8),
    "ContextOptions.use_kernel.groups": lambda _: [SPEC],
    "ContextShift.span.positions": lambda _: np.arange(8, dtype=np.int32),
    "SamplerOptions.top_k": lambda _: 40,
    "Grammar.kind": lambda _: "regex",
    "Grammar.text": lambda _: "a",
    "Grammar.json_schema.schema": lambda _: {"type": "object"},
    "Grammar.regex.pattern": lambda _: "a",
    "Grammar.lark.text": lambda _: 'start: "a"',
    "Grammar.gbnf.text": lambda _: 'root ::= "a"',
    "Grammar.matcher.tokenizer": lambda b: b.model.tokenizer,
    "GrammarMatcher.rollback.n_tokens": lambda _: 0,
    "MemoryStore.put.key": lambda _: "0c",
    "DiskStore.put.key": lambda _: "0c",
    "size": lambda _: 64,
    "layers": lambda _: (LAYER,),
    "n_seq_max": lambda _: 4,
    "n_head_kv": lambda _: 1,
    "head_dim_k": lambda _: 32,
    "head_dim_v": lambda _: 32,
    "mode": lambda _: "neox",
    "n_rot": lambda _: 32,
    "layer": lambda _: 0,
    "n": lambda _: 64,
    "name": lambda _: "q8_0",
    "spec": lambda _: SPEC,
    "src": lambda _: 0,
    "dst": lambda _: 1,
    "Model.convert_rows.src": lambda _: RowFormat(KVType.F32),
    "Model.convert_rows.dst": lambda _: RowFormat(KVType.F16),
    "seq_id": lambda _: 0,
    "seq_ids": lambda _: 0,
    "p0": lambda _: 0,
    "p1": lambda _: 2,
    "d": lambda _: 2,
    "delta": lambda _: 1,
    "start": lambda _: 0,
    "stop": lambda _: 2,
    "remember": lambda _: lambda: lambda: None,
    "batch": lambda _: Batch.of([5], 1),
    "other": lambda _: Batch.of([5], 1),
    "sequences": lambda b: [b.sequence],
    "n_ubatch": lambda _: 8,
    "n_ctx": lambda _: 64,
    "n_tokens": lambda _: 2,
    "keep": lambda _: 0,
    "prompt": lambda _: "ab",
    "token": lambda _: 5,
    "tokens": lambda _: [1, 2],
    "shift": lambda _: ContextShift(),
    "group": lambda _: 2,
    "width": lambda _: 4,
    "held": lambda _: lambda _: -1,
    "model": lambda b: b.model.spec,
    "why_no_kernel": lambda _: lambda _: "none",
    "max_bytes": lambda _: 2**20,
    "key": lambda _: "0a",
    "value": lambda _: [b"bytes"],
    "field": lambda _: "parent",
    "most": lambda _: 5,
    "where": lambda _: "memory:",
    "url": lambda _: "redis://127.0.0.1:9/0",
    "source": lambda b: b.sequence,
    "store": lambda b: b.store,
    "cache": lambda b: b.attention,
    "logits": lambda _: np.zeros(8, np.float32),
    "state": lambda _: Sampler().state(),
    "text_of": lambda _: str,
    "text": lambda _: "ab",
    "ids": lambda _: [1, 2],
    "messages": lambda _: [{"role": "user", "content": "Hi"}],
    "Chat.context": lambda b: b.model.context(n_ctx=64),
    "Chat.template": lambda _: "chatml",
    "Chat.add.message": lambda _: "a",
    "Chat.add.answer": lambda _: "b",
    "Chat.ask.message": lambda _: "a",
    "Chat.ask.max_tokens": lambda _: 1,
    "Chat.stream.message": lambda _: "a",
    "Chat.stream.max_tokens": lambda _: 1,
    "Chat.retry.max_tokens": lambda _: 1,
    "Chat.edit.turn": lambda _: 0,
    "Chat.edit.message": lambda _: "a",
    "Chat.edit.max_tokens": lambda _: 1,
    "Chat.save.path": lambda b: b.folder / "saved_chat.kv",
    "Chat.load.context": lambda b: b.model.context(n_ctx=64),
    "Chat.load.path": lambda b: saved_chat(b),
    "Chat.restore.path": lambda b: saved_chat(b),
    "ChatTemplate.for_tokenizer.source": lambda _: "{{ messages[0].content }}",
    "ChatTemplate.for_tokenizer.tokenizer": lambda b: b.model.tokenizer,
    "ChatTemplate.render_with.variables": lambda _: {},
    "ChatTemplate.source": lambda _: "{{ messages[0].content }}",
}
"""An argument that is fine, for a parameter that has no default; by its name, or the full one."""


def empty(bench: Bench) -> Sequence:
    return next((one for one in bench.context.sequences if not len(one)), None) or (
        bench.context.sequence()
    )


def saved_chat(bench: Bench) -> Path:
    path = bench.folder / "chat.kv"
    bench.chat.save(path)
    return path


def saved(bench: Bench) -> Path:
    path = bench.folder / "saved.kv"
    bench.sequence.save(path)
    return path


@dataclass(frozen=True)
class Callee:
    """Something public that takes arguments."""

    name: str
    call: Callable[[Bench], Callable[..., Any]]
    parameters: tuple[inspect.Parameter, ...]

    def good(self, bench: Bench, parameter: str) -> Any:
        full = f"{self.name}.{parameter}"
        key = full if full in GOOD else parameter
        assert key in GOOD, f"add a value that is fine for {full} to GOOD"
        return GOOD[key](bench)

    def prepare(self, bench: Bench, parameter: str, value: Any) -> Callable[[], Any]:
        """A call with that value for a parameter, and fine ones for those without default."""
        positional, named = [], dict[str, Any]()
        for one in self.parameters:
            given = one.name == parameter
            is_optional = one.default is not one.empty and f"{self.name}.{one.name}" not in GOOD
            if one.kind is one.VAR_KEYWORD or (is_optional and not given):
                continue
            argument = value if given else self.good(bench, one.name)
            if one.kind is one.POSITIONAL_ONLY:
                positional.append(argument)
            else:
                named[one.name] = argument
        return partial(self.call(bench), *positional, **named)


def is_behind(kind: type, name: str) -> bool:
    return name in BEHIND_THE_BORDER and f"{kind.__name__}.{name}" not in OWN


def _parameters(function: Any, *, bound: bool) -> tuple[inspect.Parameter, ...]:
    found = list(inspect.signature(function).parameters.values())
    return tuple(found[1:] if bound else found)


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The public functions of a class, its own and those it has from others of ours."""
    names = {
        name
        for base in kind.__mro__
        if base.__module__.startswith("kvcellar")
        for name in vars(base)
    }
    for name in sorted(names):
        if not name.startswith("_"):
            yield name, inspect.getattr_static(kind, name)


def _itself(function: Any, bench: Bench) -> Any:
    del bench
    return function


def _method(kind: type, name: str, bench: Bench) -> Any:
    return getattr(bench.subject(kind), name)


def _setter(kind: type, function: Any, bench: Bench) -> Any:
    return partial(function, bench.subject(kind))


def _callees() -> Iterator[Callee]:
    for kind in CLASSES:
        if kind.__name__ not in MADE_ELSEWHERE:
            yield Callee(kind.__name__, partial(_itself, kind), _parameters(kind, bound=False))
        for name, member in _methods(kind):
            full = f"{kind.__name__}.{name}"
            if is_behind(kind, name) or kind is RedisStore:  # there may be no server
                continue
            if isinstance(member, (classmethod, staticmethod)):
                made = getattr(kind, name)
                yield Callee(full, partial(_itself, made), _parameters(made, bound=False))
            elif inspect.isfunction(member):
                parameters = _parameters(member, bound=True)
                yield Callee(full, partial(_method, kind, name), parameters)
            elif isinstance(member, property) and member.fset is not None:
                parameters = _parameters(member.fset, bound=True)
                yield Callee(full, partial(_setter, kind, member.fset), parameters)
    for function in FUNCTIONS:
        parameters = _parameters(function, bound=False)
        yield Callee(function.__name__, partial(_itself, function), parameters)


CALLEES = {callee.name: callee for callee in _callees() if callee.parameters}
TRIED = [
    (name, parameter.name)
    for name, callee in CALLEES.items()
    for parameter in callee.parameters
    if parameter.kind is not parameter.VAR_KEYWORD
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    tiny = TinyLlama(n_vocab=N_VOCAB, n_layer=1)
    vocabulary: dict[str, Value] = make_bpe()  # type: ignore[assignment]
    path = tmp_path_factory.mktemp("models") / "bytes.gguf"
    path.write_bytes(gguf_bytes({**tiny.metadata(), **vocabulary}, tiny.tensors()))
    with Model.from_gguf(path, n_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arguments")


@pytest.fixture(autouse=True)
def _elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names such as "no" are names of files, and belong nowhere."""
    (folder / "cwd").mkdir(exist_ok=True)
    monkeypatch.chdir(folder / "cwd")


def test_public_classes_and_functions_are_tried() -> None:
    tried = {one.__name__ for one in CLASSES} | {one.__name__ for one in FUNCTIONS}
    for name in kvcellar.__all__:
        one = getattr(kvcellar, name)
        if inspect.isfunction(one) or (inspect.isclass(one) and not issubclass(one, Exception)):
            assert one.__name__ in tried
    assert len(TRIED) > 250


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CALLEES)
def test_arguments_are_taken_or_refused_by_us(model: Model, folder: Path, name: str) -> None:
    callee, bench = CALLEES[name], Bench(model, folder)
    faults = []
    for parameter in callee.parameters:
        for label, value in WRONG.items() if parameter.kind is not parameter.VAR_KEYWORD else ():
            said = f"{parameter.name}={label}"
            call = callee.prepare(bench, parameter.name, value)
            before = bench.state()
            try:
                result = call()
            except KVCellarError as error:
                generated = isinstance(error, CacheFull) and name == "Sequence.generate"
                if generated or (str(error) and bench.state() == before):
                    continue
                faults.append(f"{said}: refused with {str(error)!r}, but something has changed")
            except Exception as error:
                faults.append(f"{said}: {type(error).__name__}: {str(error)[:100]}")
            else:
                if not may_take(str(parameter.annotation), value):
                    faults.append(f"{said}: accepted as {parameter.annotation}")
                if isinstance(result, (Model, DiskStore)):
                    result.close()
            bench.close()
            bench = Bench(model, folder)
    bench.close()
    assert not faults, "\n".join(faults)


# -- what was taken for something else


@pytest.mark.parametrize("value", [0, 1, "no", "", None, 1.0, np.int64(0), []])
@pytest.mark.parametrize("name", ["flash_attn", "kernel", "swa_full"])
def test_switches_are_true_or_false(model: Model, name: str, value: Any) -> None:
    if value is None and name != "swa_full":
        options: dict[str, Any] = {name: None}
        assert getattr(ContextOptions(**options), name) is None
        return
    with pytest.raises(OptionError, match=f"{name}=.*must be True or False"):
        model.context(**{name: value})


@pytest.mark.parametrize(("no", "yes"), [(False, True), (np.False_, np.True_)])
def test_switches_of_numpy_are_switches(model: Model, no: Any, yes: Any) -> None:
    with model.context(n_ctx=64, flash_attn=no, kernel=no) as context:
        assert context.spec.v_trans
    with model.context(n_ctx=64, flash_attn=yes, kernel=no, swa_full=yes) as context:
        assert not context.spec.v_trans
    options = ContextOptions(flash_attn=no, kernel=no, swa_full=yes)
    assert (options.flash_attn, options.kernel, options.swa_full) == (False, False, True)
    assert {type(options.kernel), type(options.swa_full)} == {bool}


@pytest.mark.parametrize("d", [2.5, float("nan"), np.float64(2), True, "2", None, [2]])
@pytest.mark.parametrize("name", ["attention", "sliding", "recurrent", "hybrid"])
def test_divisors_are_whole_numbers(model: Model, folder: Path, name: str, d: Any) -> None:
    cache: Cache = getattr(Bench(model, folder), name)
    before = cache.view()
    with pytest.raises(OptionError, match=r"seq_div by .*: the divisor must be a whole"):
        cache.seq_div(0, 0, -1, d)
    assert cache.view() == before
    assert cache.seq_positions(0).tolist() == [0, 1, 2, 3]


def test_numbers_of_numpy_are_numbers(model: Model, folder: Path) -> None:
    number: Any = np.int64
    bench = Bench(model, folder)
    bench.attention.seq_div(number(0), number(0), number(-1), number(2))
    assert bench.attention.seq_positions(0).tolist() == [0, 0, 1, 1]
    bench.attention.seq_rm(number(-1), number(1), number(-1))
    assert bench.attention.seq_positions(0).tolist() == [0, 0]
    bench.sequence.trim(number(2))
    assert bench.sequence.text == TEXT[:-2]
    assert bench.sequence.append(np.array([97], np.int32)).text == TEXT[:-2] + "a"
    with model.context(n_ctx=np.uint16(64), n_seq_max=number(1)) as context:
        assert context.spec.size == 64
    assert PromptCache(MemoryStore(), block_size=number(8)).block_size == 8
    assert MemoryStore(number(4)).put("0a", [b"12345"]) is False
    bench.close()


@pytest.mark.parametrize("seq_id", [-1, 4, True, None, 0.0])
@pytest.mark.parametrize("name", ["attention", "sliding", "recurrent", "hybrid"])
def test_only_removing_knows_every_sequence(
    model: Model, folder: Path, name: str, seq_id: Any
) -> None:
    """Where -1 means none, nothing may be lost to it."""
    cache: Cache = getattr(Bench(model, folder), name)
    before = cache.view()
    for verb in (lambda: cache.rewind(seq_id, 0), lambda: cache.seq_keep(seq_id)):
        with pytest.raises(SequenceIdError, match="seq_id"):
            verb()
    assert cache.view() == before
    assert cache.seq_rm(-1)
    assert cache.token_count == 0


PROMPTS: dict[str, Any] = {
    "bytes": b"abc",
    "no bytes": b"",
    "bytearray": bytearray(b"abc"),
    "memoryview": memoryview(b"abc"),
    "dict": {1: "a", 2: "b"},
    "keys": {1: "a"}.keys(),
    "set": {1, 2, 3},
    "frozenset": frozenset({1, 2}),
    "strings": ["a", "b"],
    "mixed": [1, "b"],
    "floats": [1.0, 2.0],
    "NaN": [1, float("nan")],
    "bools": [True, False],
    "a bool": [1, True],
    "np.bool_": [np.True_],
    "None": [1, None],
    "lists": [[1, 2], [3]],
    "bytes in a list": [b"a"],
    "float array": np.array([1.0, 2.0]),
    "bool array": np.array([True, False]),
    "matrix": np.array([[1, 2], [3, 4]]),
    "scalar": np.array(3),
    "text array": np.array(["a"]),
    "objects": np.array([1, None], object),
    "number": 5,
    "nothing": None,
}


@pytest.mark.parametrize("name", PROMPTS)
def test_what_is_no_prompt_is_refused(model: Model, folder: Path, name: str) -> None:
    prompt, bench = PROMPTS[name], Bench(model, folder)
    sequence, prompts, context = bench.sequence, bench.prompts, bench.context
    other = context.sequence()
    sequence.push(97)
    before = bench.state()
    calls: list[Callable[[], object]] = [
        lambda: sequence.append(prompt),
        lambda: sequence.to_ids(prompt),
        lambda: prompts.append(other, prompt),
        lambda: prompts.append(sequence, prompt),
        lambda: prompts.restore(other, prompt),
        lambda: Batch.of(prompt),
    ]
    if name not in ("number", "scalar"):
        calls.append(lambda: Batch().add(prompt))
    if prompt is not None:
        calls.append(lambda: context.sequence(prompt))
    for call in calls:
        with pytest.raises(BatchError, match=r"prompt|tokens?|positions|pos"):
            call()
    with pytest.raises(TokenizerError):
        model.tokenizer.decode(prompt)
    assert bench.state() == before
    bench.close()


@pytest.mark.parametrize(
    "ids",
    [
        [97, 98],
        (97, 98),
        range(97, 99),
        np.array([97, 98], np.uint8),
        np.array([97, 98], np.int64),
        [np.int32(97), np.int64(98)],
        array("i", [97, 98]),
        {97: "a", 98: "b"}.__iter__(),
        (97 + i for i in range(2)),
        map(int, ["97", "98"]),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_lists_of_every_kind_are_prompts(model: Model, ids: Any) -> None:
    ids = ids if isinstance(ids, (list, tuple, range, np.ndarray, array)) else list(ids)
    with model.context(n_ctx=64) as context:
        assert context.sequence(ids).text == "ab"
        assert context.sequence(one for one in ids).text == "ab"
        assert PromptCache(MemoryStore()).append(context.sequence(), iter(ids)).n_tokens == 2
        assert len(Batch.of(iter(ids), positions=iter([0, 1]))) == 2
    assert model.tokenizer.decode(iter(ids)) == "ab"


@pytest.mark.parametrize("salt", [5, None, b"x", ["a"], True])
def test_a_salt_is_a_text(salt: Any) -> None:
    with pytest.raises(OptionError, match=r"cache_salt=.*must be a str"):
        PromptCache(MemoryStore(), cache_salt=salt)


@pytest.mark.parametrize(
    "url",
    [
        "redis://host/abc",
        "rediss://host/1/2",
        "redis://host:port/0",
        "redis://host/-1",
        "redis:///x",
    ],
)
def test_a_database_has_a_number(url: str) -> None:
    with pytest.raises(OptionError):
        open_store(url)


def test_messages_do_not_fail_themselves() -> None:
    """Whatever is shown: numbers of many digits, objects without a text, long texts."""
    for value in (10**5000, _Odd(), "x" * 10**6, [10**5000]):
        for check in (
            lambda value: check_range("name", value, 0, 5),
            lambda value: check_bool("name", value),
            lambda value: check_integers("name", [value, 0.5]),
            lambda value: check_kind("name", value, Batch),
        ):
            with pytest.raises(OptionError) as found:
                check(value)
            assert len(str(found.value)) < 200
