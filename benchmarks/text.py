"""Text to tokens, a chat to text, logits to a token, masks: beside llama.cpp in one run.

    python benchmarks/text.py [--model smollm2] [--repeats 15] [--only NAME]

Each part is done by both in turns, and figures are medians with their ranges. "ratio" is the peer's
time over ours: above 1 ours is faster.

* ``tokenise``: 1 MB of mixed text (prose, code, numbers, other scripts, emoji); beside llama.cpp
  also Hugging Face's tokenizers, which is what merges bytes here, called directly.
* ``render``: a chat of 100 turns by the model's template; the peer is llama-cpp-python's renderer.
* ``prompt``: the same chat to tokens: ours with texts that cannot spell control tokens, and each
  token's message; the peer renders and tokenizes.
* ``sample``: one token with every sampler on, behind a history of 8,000 tokens.
* ``mask``: what may follow by a JSON Schema, for each token of a value; nothing is computed beside.

The peer is llama-cpp-python in the environment of ``KVCELLAR_PEER_PYTHON``; without it ours is
measured alone. Sampling is also shown as a share of a decode of the model with one token.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from _protocol import EngineFailed, Worker
from _results import Spread

import kvcellar as kv
from kvcellar.text.sampler import Sampler

NAMES = ("tokenise", "render", "prompt", "sample", "mask")
N_BYTES = 1_000_000
N_TURNS = 100
N_HISTORY = 8000
N_SAMPLES = 50
"""Tokens of a round of ``sample``; a round's time is that of one."""

SAMPLING: Mapping[str, Any] = {
    "temperature": 0.9,
    "dynatemp_range": 0.2,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.02,
    "typical_p": 0.95,
    "top_n_sigma": 3.0,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "dry_multiplier": 0.8,
    "seed": 1,
}
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
PARTS = (
    "The cellar was cool and dark, and nobody had been down there since the spring. ",
    "def find(values: list[int], key: int) -> int:\n    return bisect_left(values, key) + 1\n",
    "3.14159, 1,048,576; 2026-05-04T12:30:00Z\t0x7fff\r\n",
    "Der Keller war kühl; l'été dernier, où étais-tu? Где ты был? ",
    "ここは涼しい。窗外的雨停了。 여름이었다. 🦊🏔️👩‍🚀\n",
)


def mixed_text(n_bytes: int) -> str:
    """Return text of about so many bytes, the same each time."""
    random, pieces, size = np.random.default_rng(1), list[str](), 0
    while size < n_bytes:
        words = PARTS[int(random.integers(len(PARTS)))].split(" ")
        random.shuffle(words)
        pieces.append(" ".join(words))
        size += len(pieces[-1].encode())
    return "".join(pieces)


def messages(n_turns: int) -> list[dict[str, str]]:
    """Return a chat in which users and assistants take so many turns together."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": PARTS[i % len(PARTS)] * 3} for i in range(n_turns)]


def ours(model: kv.Model) -> dict[str, Callable[[], object]]:
    """What is timed, on our side."""
    text, chat = mixed_text(N_BYTES), messages(N_TURNS)
    sampler = Sampler(kv.SamplerOptions(**SAMPLING), tokenizer=model.tokenizer)
    row, history = logits(model.tokenizer.n_vocab), tokens(model.tokenizer.n_vocab)

    def sample() -> None:
        for i in range(N_SAMPLES):
            sampler.sample(row, history, position=N_HISTORY + i)

    grammar, value = kv.Grammar.json_schema(SCHEMA), value_ids(model)
    begin = grammar.matcher(model.tokenizer)

    def mask() -> None:
        matcher = begin.copy()
        for token in value:
            matcher.allowed()
            matcher.accept(token)

    return {
        "tokenise": lambda: model.tokenizer.encode(text),
        "render": lambda: model.chat_template.render(chat),
        "prompt": lambda: model.chat(chat),
        "sample": sample,
        "mask": mask,
    }


def library(model: kv.Model) -> Callable[[], object]:
    """Return what tokenises the same text with Hugging Face's tokenizers alone."""
    text, encoder = mixed_text(N_BYTES), model.tokenizer._encoder  # noqa: SLF001
    made = getattr(encoder, "_tokenizer", None)
    if made is None:
        raise SystemExit(f"{model.path.name} has a vocabulary that this library does not know")
    return lambda: made.encode(text, add_special_tokens=False)


def value_ids(model: kv.Model) -> list[int]:
    """Return the tokens of a value that fits the schema."""
    return model.tokenizer.encode(json.dumps(VALUE), add_special=False)


def logits(n_vocab: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a row that looks like a model's: a few good tokens, many bad ones."""
    return np.random.default_rng(2).normal(0, 3, n_vocab).astype(np.float32)


def tokens(n_vocab: int) -> list[int]:
    """Return a history whose end was there before."""
    found: list[int] = np.random.default_rng(3).integers(0, n_vocab, N_HISTORY).tolist()
    return [*found[:-40], *found[-60:-40], *found[-60:-40]]


def measure(
    model: kv.Model, peer: Worker | None, names: list[str], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each part, by side, in turns; the first round does not count."""
    mine = ours(model)
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        count = {"sample": N_SAMPLES, "mask": len(value_ids(model))}.get(name, 1)
        sides: dict[str, Callable[[], float]] = {"ours": partial(_seconds, mine[name])}
        if peer is not None:
            sides["peer"] = partial(_peer_seconds, peer, name)
        if name == "tokenise":
            sides["library"] = partial(_seconds, library(model))
        found[name] = {side: [] for side in sides}
        for i in range(repeats + 1):
            for side in list(sides)[:: -1 if i % 2 else 1]:
                seconds = sides[side]() / count
                if i:
                    found[name][side].append(seconds)
    return found


def decode_seconds(model: kv.Model, repeats: int) -> float:
    """Return the median time of a decode with one token."""
    with model.context(n_ctx=256, n_seq_max=1) as context:
        sequence = context.sequence(PARTS[0])
        times = [_seconds(lambda: sequence.append([9])) for _ in range(repeats + 8)]
    return median(times[8:])


def table(found: Mapping[str, Mapping[str, list[float]]]) -> Iterator[str]:
    """Yield the lines that are printed."""
    yield f"{'':10}{'ms':>10}  {'range':>21}  {'peer ms':>10}  {'ratio':>7}  range"
    for name, sides in found.items():
        here = Spread.of([1000 * seconds for seconds in sides["ours"]])
        line = f"{name:10}{here.median:10.3f}  [{here.least:9.3f},{here.largest:10.3f}]"
        if "peer" in sides:
            pairs = zip(sides["ours"], sides["peer"], strict=True)
            ratio = Spread.of([theirs / mine for mine, theirs in pairs])
            line += f"  {1000 * median(sides['peer']):10.3f}  {ratio.median:7.2f}"
            line += f"  {ratio.least:.2f} to {ratio.largest:.2f}"
        yield line
        if "library" in sides:
            pairs = zip(sides["ours"], sides["library"], strict=True)
            ratio = Spread.of([theirs / mine for mine, theirs in pairs])
            line = f"{'':10}{'':47}{1000 * median(sides['library']):10.3f}  {ratio.median:7.2f}"
            yield f"{line}  {ratio.least:.2f} to {ratio.largest:.2f}  tokenizers (Hugging Face)"


def start_peer(model: kv.Model) -> Worker | None:
    """Start llama.cpp where the environment names an interpreter that has it."""
    python = os.environ.get("KVCELLAR_PEER_PYTHON")
    if python is None:
        print("no peer: KVCELLAR_PEER_PYTHON names no interpreter that has llama-cpp-python\n")
        return None
    n_vocab = model.tokenizer.n_vocab
    settings = {
        "model": str(Path(model.path).resolve()),
        "text": mixed_text(N_BYTES),
        "messages": messages(N_TURNS),
        "sampling": dict(SAMPLING),
        "logits": logits(n_vocab).tolist(),
        "history": tokens(n_vocab),
        "n_samples": N_SAMPLES,
        "schema": json.dumps(SCHEMA),
        "value": value_ids(model),
    }
    worker = Worker("_worker_text.py", {}, python=python)
    try:
        worker.ask("prepare", settings=settings)
    except BaseException:
        worker.kill()
        raise
    return worker


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2", help="model with a template (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--threads", type=int, default=1, help="of the decode")
    options = parser.parse_args()
    names = [options.only] if options.only else list(NAMES)
    with kv.Model.from_gguf(kv.find_model(options.model), n_threads=options.threads) as model:
        try:
            peer = start_peer(model)
        except EngineFailed as error:
            parser.error(f"KVCELLAR_PEER_PYTHON: {error}")
        try:
            found = measure(model, peer, names, options.repeats)
        finally:
            if peer is not None:
                peer.close()
        print("\n".join(table(found)))
        if "sample" in found:
            share = median(found["sample"]["ours"]) / decode_seconds(model, options.repeats)
            print(f"\nsampling takes {100 * share:.1f} % of a decode of {model.path.name}")
    return 0


def _peer_seconds(peer: Worker, name: str) -> float:
    return peer.ask(name)[""]["seconds"]


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main())
