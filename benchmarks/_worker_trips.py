"""The trips of ``trips.py`` and the time outside the graph, for one source tree.

Only public names of ``kvcellar`` are used, so that trees compare whose modules have moved.

Each trip has a model, a context and a sequence of its own and is taken twice, each time from the
start; the second is recorded. So no import and no code that is compiled once a process counts.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from _calls import Call, Counts, record
from _protocol import Measured, serve

import kvcellar as kv

PACKAGE = Path(kv.__file__).parent
FILES = {"llama": "llama-dense", "gemma3": "gemma3-dense", "jamba": "jamba-dense"}
N_UBATCH = {"gemma3": 16}  # its windows have room for a microbatch more, and so slide
N_SEQ_MAX = 4
N_PROMPT = 40  # tokens
N_WARM = 8  # decoded one by one, so that the graph of one token is kept
BLOCK = 16  # tokens of a block of the prompt cache: two blocks and a rest
CELLS = 512  # in use where the time outside the graph is measured


@dataclass(frozen=True)
class State:
    """What a trip starts from."""

    context: kv.Context
    sequence: kv.Sequence
    folder: Path

    def forked(self) -> kv.Sequence:
        """The sequence, once a fork shares its cells and has written a token."""
        self.sequence.fork().append([9])
        return self.sequence


Trip = Callable[[], object]


@dataclass(frozen=True)
class Route:
    """A trip: how it is named, on which model, and what prepares and returns it."""

    label: str
    prepare: Callable[[State], Trip]
    model: str = "llama"


def _token(state: State) -> Trip:
    return lambda: state.sequence.append([5])


def _seq_rm(state: State) -> Trip:
    cache, seq_id = state.context.cache, state.sequence.seq_id
    return lambda: cache.seq_rm(seq_id, N_PROMPT, -1)


def _fork(state: State) -> Trip:
    return lambda: state.sequence.fork().append([5])


def _trim(state: State) -> Trip:
    sequence = state.forked()
    return lambda: sequence.trim(2)


def _remove(state: State) -> Trip:
    sequence = state.forked()
    return lambda: sequence.remove(1, 3)


def _rollback(state: State) -> Trip:
    def run() -> None:
        with state.context.cache.transaction() as transaction:
            state.sequence.append([5])
            transaction.rollback()

    return run


def _save(state: State, n_before: int) -> Trip:
    """Save, after as many saves of the same."""
    for _ in range(n_before):
        state.sequence.save(state.folder / "text.kv")
    return lambda: state.sequence.save(state.folder / "text.kv")


def _load(state: State) -> Trip:
    state.sequence.save(state.folder / "text.kv")
    return lambda: state.context.load(state.folder / "text.kv")


def _hit(state: State, n_before: int) -> Trip:
    """Append a prompt whose blocks are stored, after as many appends of the same."""
    prompts = kv.PromptCache(kv.open_store("memory:"), block_size=BLOCK)
    prompt = _tokens(N_PROMPT, 3)
    for _ in range(n_before):
        with state.context.sequence() as computed:
            prompts.append(computed, prompt)
    sequence = state.context.sequence()
    return lambda: prompts.append(sequence, prompt)


def routes() -> dict[str, Route]:
    """All trips, by the name under which they are asked for."""
    return {
        **{f"token-{model}": Route(f"one token, {model}", _token, model) for model in FILES},
        "seq_rm": Route("cache.seq_rm", _seq_rm),
        "fork": Route("fork and write", _fork),
        "trim": Route("trim(2), forked", _trim),
        "remove": Route("remove(1, 3), forked", _remove),
        "rollback": Route("transaction and rollback", _rollback),
        "save-first": Route("save, weights hashed", lambda state: _save(state, 0)),
        "save": Route("save", lambda state: _save(state, 1)),
        "load": Route("load", _load),
        "hit-first": Route("prompt-cache hit, graph built", lambda state: _hit(state, 1)),
        "hit": Route("prompt-cache hit", lambda state: _hit(state, 2)),
    }


class Trips:
    """Takes trips and measures time; its settings are ``models`` (a folder) and ``n_threads``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._models = Path(settings["models"])
        self._threads: int = settings["n_threads"]
        self._open: dict[str, kv.Sequence] = {}

    def hello(self) -> dict[str, Any]:
        """The first line: the version, and the tree that it is from."""
        return {"version": kv.__version__, "source": str(PACKAGE.parent)}

    def trip(self, name: str) -> Measured:
        """Count a trip."""
        return {"": asdict(Counts.of(self.calls(name)))}

    def calls(self, name: str) -> list[Call]:
        """The calls of a trip."""
        route = routes()[name]
        with self._state(route.model) as state:
            route.prepare(state)()
        with self._state(route.model) as state:
            return record(PACKAGE, route.prepare(state))

    def outside(self, model: str, steps: int) -> Measured:
        """Median time outside the graph of some tokens, behind a text that fills 512 cells.

        Once in ``Context.decode`` alone, as ``Context.timings`` has it, and once in all of
        ``Sequence.append``.
        """
        if model not in self._open:
            self._open[model] = self._filled(model)
            self.outside(model, steps)  # graphs and code that are made once
        sequence = self._open[model]
        timings, in_decode, in_append = sequence.context.timings, [], []
        for token in _tokens(steps, 7):
            timings.reset()
            start = perf_counter()
            sequence.append([token])
            in_append.append(perf_counter() - start - timings.graph_seconds)
            in_decode.append(timings.overhead_seconds)
        sequence.trim(steps)
        return {
            "decode": {"seconds": median(in_decode), "count": steps},
            "append": {"seconds": median(in_append), "count": steps},
        }

    def _filled(self, model: str) -> kv.Sequence:
        path = self._models / f"{FILES[model]}.gguf" if model in FILES else kv.find_model(model)
        opened = kv.Model.from_gguf(path, n_threads=self._threads)
        return opened.context(n_ctx=2 * CELLS).sequence(_tokens(CELLS, 1))

    @contextmanager
    def _state(self, model: str) -> Iterator[State]:
        """A context in use, of a copy of the model: the hash of its weights is kept beside it."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            path = Path(shutil.copy(self._models / f"{FILES[model]}.gguf", folder))
            n_ubatch = N_UBATCH.get(model, 512)
            with kv.Model.from_gguf(path, n_threads=1) as opened:
                context = opened.context(n_ctx=512, n_seq_max=N_SEQ_MAX, n_ubatch=n_ubatch)
                sequence = context.sequence(_tokens(N_PROMPT, 1))
                for token in _tokens(N_WARM, 2):
                    sequence.append([token])
                yield State(context, sequence, folder)


def _tokens(n: int, stream: int) -> list[int]:
    return [(i * 7919 + stream * 104729) % 120 + 4 for i in range(n)]


if __name__ == "__main__":
    serve(Trips)
