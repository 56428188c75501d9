"""Decode and prefill beside llama.cpp on the same model, threads and token counts.

    python benchmarks/decode.py [--peer-python PATH] [--repeats 5] [--json FILE]

Engines run in processes of their own and take turns; figures are medians over the repeats, with
the smallest and largest in brackets, and ratios are ours over theirs (above 1: we are faster).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from _protocol import Worker

from kvcellar import find_model

OURS = "kvcellar"
PEERS: dict[str, dict[str, Any]] = {
    "llama.cpp": {"kv_unified": False, "flash_attn": True},
    "llama.cpp, one pool": {"kv_unified": True, "flash_attn": True},
}
Rates = dict[str, dict[str, list[float]]]


def start_workers(settings: dict[str, Any], peer_python: str) -> dict[str, Worker]:
    """Ours and those peers that are installed; the others are named."""
    workers = {OURS: Worker("_worker_kvcellar.py", settings)}
    for name, extra in PEERS.items():
        if settings["n_seqs"] == 1 and extra["kv_unified"]:
            continue
        try:
            workers[name] = Worker("_worker_llama_cpp.py", settings | extra, peer_python)
        except RuntimeError as error:
            print(f"skipped {name}: {error}", file=sys.stderr)
    return workers


def measure(n_seqs: int, args: argparse.Namespace, rates: Rates) -> list[float]:
    """Fill and decode in turns; adds to rates, returns our overheads a step in seconds."""
    n_ctx = n_seqs * -(-(args.context + args.steps) // 256) * 256
    settings = {
        "model": str(find_model(args.model)),
        "n_threads": args.threads,
        "n_seqs": n_seqs,
        "n_ctx": n_ctx,
        "n_ubatch": 512,
    }
    rng = np.random.default_rng(1)
    tokens = rng.integers(100, 40000, (n_seqs, args.context)).tolist()
    workers = start_workers(settings, args.peer_python)
    overheads = []
    for repeat in range(args.repeats + 1):
        for name, worker in workers.items():
            filled = worker.ask("fill", tokens=tokens)
            decoded = worker.ask("decode", n=args.steps, token=500)
            if repeat == 0:
                continue  # caches are cold, pages not yet read
            if n_seqs == 1:
                rates[f"prefill {args.context}"][name].append(args.context / filled["seconds"])
            label = f"decode at {args.context}, {n_seqs} sequence{'s' * (n_seqs > 1)}"
            rates[label][name].append(args.steps * n_seqs / decoded["seconds"])
            if name == OURS:
                overheads.append(decoded["overhead"])
    for worker in workers.values():
        worker.close()
    return overheads


def start_up_seconds(model: str, repeats: int) -> dict[str, float]:
    """Medians of importing the package and of a whole process up to the first token."""
    first = (
        f"import kvcellar as kv; m = kv.Model.from_gguf(kv.find_model({model!r})); "
        "next(m.context(n_ctx=512).sequence('Once upon a time').stream(1))"
    )
    programs = {"import kvcellar": "import kvcellar", "process start to first token": first}
    empty = _run_seconds("pass", repeats)
    times = {name: _run_seconds(code, repeats) for name, code in programs.items()}
    times["import kvcellar"] -= empty
    return times


def _run_seconds(code: str, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(perf_counter() - start)
    return median(times)


def show(rates: Rates) -> None:
    """The table, a line a measurement and engine."""
    print(f"{'':28} {'engine':22} {'tokens/s':>9}  {'range':>15}  ratio")
    for label, engines in rates.items():
        ours = median(engines[OURS])
        for name, values in engines.items():
            ratio = "" if name == OURS else f"{ours / median(values):.2f}"
            span = f"[{min(values):.1f}, {max(values):.1f}]"
            print(f"{label:28} {name:22} {median(values):9.1f}  {span:>15}  {ratio}")


def main() -> None:
    """Measure, print and, if asked, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=512, help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--peer-python", default=sys.executable, help="where llama_cpp is installed"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    rates: Rates = defaultdict(lambda: defaultdict(list))
    overheads = measure(1, args, rates)
    measure(8, args, rates)
    show(rates)
    overhead = median(overheads) * 1e3
    print(f"time outside the graph, a token: {overhead:.2f} ms")
    start_up = start_up_seconds(args.model, args.repeats)
    for name, seconds in start_up.items():
        print(f"{name}: {seconds:.2f} s")
    if args.json:
        figures = {"rates": rates, "overhead_ms": overhead, "start_up_s": start_up}
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
