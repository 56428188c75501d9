"""The cost of a grammar: masks of a JSON Schema beside those of llguidance alone, and of llama.cpp.

    python benchmarks/grammars.py [--model smollm2] [--tokens 400]

Prints medians for a token, with a ratio to llguidance called directly: what a matcher computes in
its worker, what ``accept`` and ``allowed`` take from the thread that decodes (it sleeps in between,
as while a model computes), and llama.cpp's own sampler where llama-cpp-python is installed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvcellar.runtime.demo import find_model
from kvcellar.runtime.model import Model
from kvcellar.text.grammar import Grammar
from kvcellar.text.grammar_matcher import GrammarMatcher

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["a", "bb", "ccc"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
VALUE = {"name": "Ada, Countess of Lovelace", "age": 36, "tags": ["maths", "poetry"], "kind": "bb"}
DECODE_SECONDS = 0.003


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=400)
    arguments = parser.parse_args()
    path = find_model(arguments.model)
    with Model.from_gguf(path, n_threads=1) as model:
        grammar = Grammar.json_schema(SCHEMA)
        begin = time.perf_counter()
        matcher = grammar.matcher(model.tokenizer)
        print(f"vocabulary and compilation: {(time.perf_counter() - begin) * 1e3:.0f} ms")
        ids = model.tokenizer.encode(json.dumps(VALUE), add_special=False)
        rounds = max(arguments.tokens // len(ids), 1)
        alone = median(t for _ in range(rounds) for t in _llguidance(matcher, ids))
        _report("llguidance alone", alone, alone)
        times = [pair for _ in range(rounds) for pair in _matcher(matcher.copy(), ids)]
        _report("accept (begins the next mask)", median(t for t, _ in times), alone)
        _report("allowed (after a decode)", median(t for _, t in times), alone)
        if (peer := _llama_cpp(path, ids)) is not None:
            _report("llama.cpp's sampler", peer, alone)


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


def _llama_cpp(path: Path, ids: list[int]) -> float | None:
    """The median of llama.cpp's grammar over a row of logits; None: it is not installed."""
    try:
        import llama_cpp
    except ImportError:
        return None
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    text = llama_cpp.LlamaGrammar.from_json_schema(json.dumps(SCHEMA), verbose=False)._grammar  # noqa: SLF001
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    sampler = llama_cpp.llama_sampler_init_grammar(vocab, text.encode(), b"root")
    data = np.zeros(llama.n_vocab(), [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    data["id"] = np.arange(len(data))
    times = []
    for token in ids:
        row: Any = llama_cpp.llama_token_data_array(
            data=data.ctypes.data_as(llama_cpp.llama_token_data_p),
            size=len(data),
            selected=-1,
            sorted=False,
        )
        times.append(_seconds(partial(llama_cpp.llama_sampler_apply, sampler, row)))
        llama_cpp.llama_sampler_accept(sampler, token)
        data["logit"] = 0
    return median(times)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _report(name: str, seconds: float, alone: float) -> None:
    print(f"{name:32s} {seconds * 1e6:8.1f} µs  {seconds / alone:6.2f} x")


if __name__ == "__main__":
    main()
