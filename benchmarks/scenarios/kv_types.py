"""K and V of each type: decode at a length, and what the process then takes."""

from __future__ import annotations

from _case import LLAMA_CPP, LLAMA_CPP_PLAIN, OPENVINO, OURS, Case, Sizes, Step, Unit, settings

TYPES = ("f16", "q8_0", "q4_0")
FIGURES = ("now", "K/V")  # and of f16, which says all about the rest: after loading, at most


def cases(sizes: Sizes) -> list[Case]:
    """A case a type; only f16 means the same to every engine, and needs no flash attention."""
    n = sorted(sizes.lengths)[-2]
    return [_case(kind, n, sizes) for kind in TYPES]


def _case(kind: str, n: int, sizes: Sizes) -> Case:
    is_f16 = kind == "f16"
    engines = (OURS, LLAMA_CPP, LLAMA_CPP_PLAIN, OPENVINO) if is_f16 else (OURS, LLAMA_CPP)
    figures = ("after load", *FIGURES, "peak") if is_f16 else FIGURES
    steps = (
        Step("", ("extend", {"n": n})),
        Step(
            f"K and V {kind}, decode at {n}",
            ("decode", {"steps": sizes.steps}),
            {"": Unit.RATE},
            before=(("rewind", {"n": n}),),
        ),
        Step(
            f"K and V {kind}, memory at {n}",
            ("memory", {}),
            dict.fromkeys(figures, Unit.MIB),
            rounds="once",
            warm_up=False,
        ),
    )
    return Case("kv-types", engines, settings(n + sizes.steps + 1, type_kv=kind), steps)
