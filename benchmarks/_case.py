"""What a scenario is made of, as data: a case opens every engine once and asks it step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

OURS = "kvcellar"
LLAMA_CPP = "llama.cpp (flash)"
LLAMA_CPP_PLAIN = "llama.cpp (no flash)"
LLAMA_CPP_POOL = "llama.cpp, one pool (flash)"
LLAMA_CPP_POOL_PLAIN = "llama.cpp, one pool (no flash)"
OPENVINO = "openvino"
TRANSFORMERS = "transformers"
SINGLE = (OURS, LLAMA_CPP, LLAMA_CPP_PLAIN, OPENVINO, TRANSFORMERS)
BATCHED = (OURS, LLAMA_CPP, LLAMA_CPP_PLAIN, LLAMA_CPP_POOL, LLAMA_CPP_POOL_PLAIN)


def peer_of(engine: str) -> str:
    """An engine's name without its setting: of several settings a peer is quoted by the best."""
    return engine.partition(" (")[0]


class Unit(Enum):
    """What a figure is given in; of seconds the sum, of smaller ones those of a token or call."""

    RATE = "tokens/s"
    SECONDS = "s"
    MS = "ms"
    US = "µs"
    MIB = "MiB"

    @property
    def more_is_better(self) -> bool:
        """Whether a larger figure is the better one."""
        return self is Unit.RATE

    def of(self, measured: Mapping[str, float]) -> float:
        """The figure, from what an engine answers."""
        if self is Unit.MIB:
            return measured["bytes"] / 2**20
        seconds, count = measured["seconds"], measured["count"]
        if self is Unit.RATE:
            return count / seconds
        if self is Unit.SECONDS:
            return seconds
        return seconds / count * {Unit.MS: 1e3, Unit.US: 1e6}[self]


Call = tuple[str, Mapping[str, Any]]
"""A question and its arguments."""


@dataclass(frozen=True)
class Step:
    """One thing that is asked of every engine in turn.

    Attributes:
        label: what it is called in the table; "" is not measured, only done once.
        call: the question.
        units: of those parts of the answer that are kept.
        before: asked first each time, not measured.
        rounds: how often; "few" is half of the repeats.
        warm_up: whether a first round is thrown away.
    """

    label: str
    call: Call
    units: Mapping[str, Unit] = field(default_factory=dict)
    before: tuple[Call, ...] = ()
    rounds: Literal["all", "few", "once"] = "all"
    warm_up: bool = True

    def n_rounds(self, repeats: int) -> int:
        """Measured rounds."""
        return {"all": repeats, "few": (repeats + 1) // 2, "once": 1}[self.rounds]


@dataclass(frozen=True)
class Case:
    """Engines that are open at the same time, and what they are asked.

    Attributes:
        group: what ``--only`` selects it by.
        engines: which can take part.
        settings: of the context.
        steps: in this order.
        fresh: every round in new processes, from whose start to the answer is measured.
        model: the demo model, or a tiny one where only cells matter.
    """

    group: str
    engines: tuple[str, ...]
    settings: Mapping[str, Any]
    steps: tuple[Step, ...]
    fresh: bool = False
    model: Literal["demo", "tiny"] = "demo"


@dataclass(frozen=True)
class Sizes:
    """How large everything is; the defaults are those of the README's figures."""

    lengths: tuple[int, ...] = (512, 2048, 4096, 8000)
    prefill: tuple[int, ...] = (512, 4096)
    steps: int = 64  # tokens of a measured block
    batched_steps: int = 24
    n_seqs: int = 8
    each: int = 1024
    own: int = 64
    shifted: int = 2048
    discard: int = 256
    cells: int = 32768
    cell_seqs: int = 16
    calls: int = 100

    @classmethod
    def quick(cls) -> Sizes:
        """So small that figures mean nothing, to see that all of it works."""
        return cls(
            lengths=(32, 64),
            prefill=(32,),
            steps=4,
            batched_steps=2,
            n_seqs=2,
            each=32,
            own=8,
            shifted=64,
            discard=16,
            cells=1024,
            cell_seqs=4,
            calls=3,
        )


def settings(
    n_ctx: int, n_seqs: int = 1, n_seq_max: int = 0, type_kv: str = "f16"
) -> dict[str, Any]:
    """A context with ``n_ctx`` cells, rounded up so that no engine rounds otherwise."""
    n_seq_max = n_seq_max or n_seqs
    per_seq = -(-n_ctx // n_seq_max)
    return {
        "n_ctx": -(-per_seq // 256) * 256 * n_seq_max,
        "n_seqs": n_seqs,
        "n_seq_max": n_seq_max,
        "n_ubatch": 512,
        "type_kv": type_kv,
    }
