"""The cost of a grammar: masks of a JSON Schema beside those of llguidance alone.

    python benchmarks/grammars.py [--model smollm2] [--tokens 400]

Prints medians for a token, with a ratio to llguidance called directly: what ``accept`` and
``allowed`` take from the thread that decodes. It sleeps in between, as while a model computes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

from text import SCHEMA, value_ids

from kvcellar.runtime.demo import find_model
from kvcellar.runtime.model import Model
from kvcellar.text.grammar import Grammar
from kvcellar.text.grammar_matcher import GrammarMatcher

DECODE_SECONDS = 0.003


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=400)
    arguments = parser.parse_args()
    with Model.from_gguf(find_model(arguments.model), n_threads=1) as model:
        grammar = Grammar.json_schema(SCHEMA)
        begin = time.perf_counter()
        matcher = grammar.matcher(model.tokenizer)
        print(f"vocabulary and compilation: {(time.perf_counter() - begin) * 1e3:.0f} ms")
        ids = value_ids(model)
        rounds = max(arguments.tokens // len(ids), 1)
        alone = median(t for _ in range(rounds) for t in _llguidance(matcher, ids))
        _report("llguidance alone", alone, alone)
        times = [pair for _ in range(rounds) for pair in _matcher(matcher.copy(), ids)]
        _report("accept (begins the next mask)", median(t for t, _ in times), alone)
        _report("allowed (after a decode)", median(t for _, t in times), alone)


def _llguidance(matcher: GrammarMatcher, ids: list[int]) -> Iterator[float]:
    state = matcher._compiled.start.deep_copy()  # noqa: SLF001
    for token in ids:
        yield _seconds(state.compute_bitmask)
        state.consume_token(token)


def _matcher(matcher: GrammarMatcher, ids: list[int]) -> Iterator[tuple[float, float]]:
    for token in ids:
        accepting = _seconds(partial(matcher.accept, token))
        time.sleep(DECODE_SECONDS)
        yield accepting, _seconds(matcher.allowed)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _report(name: str, seconds: float, alone: float) -> None:
    print(f"{name:32s} {seconds * 1e6:8.1f} µs  {seconds / alone:6.2f} x")


if __name__ == "__main__":
    main()
