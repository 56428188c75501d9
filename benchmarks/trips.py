"""How long the way is through the package: calls, files and hops, and the time outside the graph.

    python benchmarks/trips.py [--against SRC] [--json PATH]
    python benchmarks/trips.py --explain TRIP

Each trip is something that a user does with a sequence of 48 tokens on a tiny model.

* A *call* is a Python function of the package being entered, a generator being resumed included.
* *Files* are the distinct files of the package that calls are in.
* A *hop* is a call in another file than the call before it; the first call is one.

``_calls.py`` says what else counts and what does not. Counts depend on no clock, but on the Python
version (comprehensions are calls up to 3.11) and on which optional libraries are installed: compare
within one environment.

One token is decoded with a kept graph; on gemma3 the window slides. ``trim`` and ``remove`` edit
a sequence whose cells a fork shares. "save, weights hashed" is the first save of a model file,
"prompt-cache hit, graph built" the first with a rest of that length; the rows below them are the
same once more.

Beside them, the time outside the graph a token, behind 512 cells, as a median: in
``Context.decode`` alone, and in all of ``Sequence.append``.

With ``--against`` another source tree (its ``src``) does the same in a process of its own, in
turns. Ratios are the other tree's figures over this one's: above 1 this tree does with less.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from _calls import Counts, by_file, tree
from _protocol import EngineFailed, Worker
from _results import Spread
from _table import number
from _worker_trips import PACKAGE, Trips, routes
from rich import box
from rich.console import Console
from rich.table import Table

import kvcellar as kv
from kvcellar.cli.environment import processor_name, usable_cpus

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"
HERE, THERE = "here", "there"
STEPS = 32  # tokens of a round
WIDTH = 140  # of the table in a file or a pipe


@dataclass
class Report:
    """What was counted and measured, by tree.

    Attributes:
        about: the environment.
        trips: counts, by trip and tree.
        outside: µs a token outside the graph, by model and part; a list of rounds a tree.
    """

    about: dict[str, Any] = field(default_factory=dict)
    trips: dict[str, dict[str, Counts]] = field(default_factory=dict)
    outside: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write all of it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", "utf-8")


def measure(workers: Mapping[str, Worker], models: Sequence[str], repeats: int) -> Report:
    """Count all trips and measure the models, the trees in turns."""
    report = Report(about())
    for name, route in routes().items():
        counts = {tree: worker.ask("trip", name=name)[""] for tree, worker in workers.items()}
        report.trips[route.label] = {
            tree: Counts(**{key: int(n) for key, n in counted.items()})
            for tree, counted in counts.items()
        }
    for model in models:
        for i in range(repeats):
            for name, worker in list(workers.items())[:: -1 if i % 2 else 1]:
                for part, measured in worker.ask("outside", model=model, steps=STEPS).items():
                    figures = report.outside.setdefault(f"{model}, {part}", {})
                    figures.setdefault(name, []).append(measured["seconds"] * 1e6)
    return report


def start(source: Path, settings: dict[str, Any]) -> Worker:
    """Start the worker over a source tree.

    Raises:
        EngineFailed: it does not start, or imports another tree.
    """
    worker = Worker("_worker_trips.py", settings, source=source)
    if Path(worker.hello["source"]).resolve() != source.resolve():
        worker.kill()
        raise EngineFailed(f"kvcellar is imported from {worker.hello['source']}, not {source}")
    return worker


def about() -> dict[str, Any]:
    """What counts and times depend on."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cpu": processor_name(),
        "cores": usable_cpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "llvmlite": _version("llvmlite"),
    }


def show(report: Report, console: Console) -> None:
    """Print both tables."""
    both = any(THERE in counts for counts in report.trips.values())
    for table in (_trips_table(report, both), _outside_table(report, both)):
        if table.row_count:
            console.print(table)
    line = ", ".join(f"{key} {value}" for key, value in report.about.items())
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    if both:
        console.print("ratio: there over here; above 1 this tree does with less", highlight=False)


def explain(name: str, models: Path) -> Iterator[str]:
    """Lines on where the calls of a trip go: by file and function, then in order."""
    calls = Trips({"models": models, "n_threads": 1}).calls(name)
    counts = Counts.of(calls)
    yield f"{routes()[name].label}: {counts.calls} calls, {counts.files} files, {counts.hops} hops"
    yield ""
    yield from by_file(calls)
    yield ""
    yield from tree(calls)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", type=Path, metavar="SRC", help="another tree's src folder")
    parser.add_argument("--explain", choices=list(routes()), help="show where a trip's calls go")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all figures there")
    parser.add_argument(
        "--models", type=Path, default=MODELS, help="folder of the tiny models (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=9, help="rounds of times; 0: only count")
    parser.add_argument("--threads", type=int, default=usable_cpus(), help="where time counts")
    args = parser.parse_args(argv)
    if args.repeats < 0 or args.threads < 1:
        parser.error("--repeats must be at least 0 and --threads at least 1")
    if args.explain and (args.against or args.json):
        parser.error("--explain goes with neither --against nor --json")
    if not args.models.is_dir():
        parser.error(f"--models {args.models}: no such folder")
    if args.against is not None and not (args.against / "kvcellar" / "__init__.py").is_file():
        parser.error(f"--against {args.against}: no folder that has the package kvcellar in it")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Count, measure and report."""
    args = parse(argv)
    if args.explain:
        print("\n".join(explain(args.explain, args.models)))
        return 0
    settings = {"models": str(args.models.resolve()), "n_threads": args.threads}
    sources = {HERE: PACKAGE.parent} | ({THERE: args.against} if args.against else {})
    with ExitStack() as stack:
        workers = {}
        for name, source in sources.items():
            workers[name] = start(source.resolve(), settings)
            stack.callback(workers[name].kill)
        report = measure(workers, _timed_models(), args.repeats)
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    show(report, console)
    if args.json is not None:
        report.save(args.json)
    return 0


def _timed_models() -> list[str]:
    """Tiny llama, and the demo model where it is installed."""
    try:
        kv.find_model("smollm2")
    except kv.ModelFileError:
        return ["llama"]
    return ["llama", "smollm2"]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _trips_table(report: Report, both: bool) -> Table:
    parts = ("calls", "files", "hops")
    heads = [*parts]
    if both:
        heads += [f"{part} there" for part in parts] + [f"{part} ratio" for part in parts]
    table = _table("trip", heads)
    for label, counts in report.trips.items():
        here = asdict(counts[HERE])
        cells = [str(n) for n in here.values()]
        if both:
            there = asdict(counts[THERE])
            cells += [str(n) for n in there.values()]
            cells += [f"{there[part] / max(1, here[part]):.2f}" for part in parts]
        table.add_row(label, *cells)
    return table


def _outside_table(report: Report, both: bool) -> Table:
    heads = ["median", "range"] + (["there", "range", "ratio", "range"] if both else [])
    table = _table("outside the graph, µs a token", heads)
    for label, figures in report.outside.items():
        cells = _figures(figures[HERE])
        if both:
            pairs = zip(figures[HERE], figures[THERE], strict=True)
            cells += _figures(figures[THERE]) + _figures([there / here for here, there in pairs])
        table.add_row(label, *cells)
    return table


def _table(first: str, heads: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _figures(values: Sequence[float]) -> list[str]:
    spread = Spread.of(values)
    return [number(spread.median), f"{number(spread.least)} to {number(spread.largest)}"]


if __name__ == "__main__":
    raise SystemExit(main())
