"""kvcellar beside other engines: same model file, threads and token counts, engines in turns.

    python benchmarks/suite.py [--peer-python PATH …] [--only GROUP …] [--quick]

Each engine runs in a process of its own; those that are not installed are named and skipped. It
prints a table and writes it, all figures as JSON, and a plot. Ctrl-C prints what there is so far.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _case import Sizes
from _machine import describe
from _peers import locate
from _plot import svg
from _results import Results
from _runner import Runner
from _table import markdown, show
from rich.console import Console
from scenarios import makers

from kvcellar import Model, find_model
from kvcellar.cli.environment import usable_cpus
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.tiny_llama import TinyLlama

RESULTS = Path(__file__).resolve().parent / "results"
INTERRUPTED = 130
TINY_VOCAB = 48
KEPT = {"json": ".json", "markdown": ".md", "plot": ".svg"}
WIDTH = 140  # of the table in a file or a pipe


def measure(args: argparse.Namespace, results: Results) -> bool:
    """Run what was asked for; whether it came to its end."""
    model = find_model(args.model)
    results.about = describe(model, args.threads, args.repeats)
    installed, missing = locate(args.peer_python)
    for name, why in missing.items():
        results.note(f"skipped {name}: {why}")
    sizes = Sizes.quick() if args.quick else Sizes()
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "demo": (model, vocabulary(model)),
            "tiny": (write_tiny(Path(folder) / "tiny.gguf", sizes.cells), TINY_VOCAB),
        }
        runner = Runner(installed, models, results, repeats=args.repeats, threads=args.threads)
        try:
            for group, make in makers().items():
                for case in make(sizes) if not args.only or group in args.only else ():
                    runner.run(case)
        except KeyboardInterrupt:
            results.note("interrupted: not everything was measured")
            return False
    return True


def vocabulary(path: Path) -> int:
    """How many tokens a model knows."""
    with Model.from_gguf(path, n_threads=1) as model:
        return model.spec.n_vocab


def write_tiny(path: Path, n_ctx: int) -> Path:
    """A model that fills cells at once, in a form that llama.cpp loads too."""
    tiny = TinyLlama(n_vocab=TINY_VOCAB)
    metadata = {
        **tiny.metadata(),
        "llama.context_length": n_ctx,
        "llama.vocab_size": TINY_VOCAB,
        "tokenizer.ggml.model": "no_vocab",
    }
    return write_gguf(path, metadata, tiny.tensors())


def report(results: Results, args: argparse.Namespace) -> None:
    """Print and write what was measured."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    show(results, console)
    if args.source is None:
        results.save(args.json)
    for path, text in ((args.markdown, markdown(results)), (args.plot, svg(results))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2", help="a GGUF file (default: %(default)s)")
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="PATH",
        help="an interpreter that has other engines; may be given several times",
    )
    parser.add_argument("--only", action="append", choices=list(makers()), help="these groups")
    parser.add_argument(
        "--repeats",
        type=int,
        help="measured rounds, after one that is not counted (default: 5, with --quick 1); "
        "long steps have half as many, or one, and none before: see n in the table",
    )
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    for name, suffix in KEPT.items():
        places = (
            f"results/latest{suffix}, with --quick results/quick{suffix}, with --from beside that"
        )
        parser.add_argument(f"--{name}", type=Path, help=f"where to write it (default: {places})")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="JSON", help="show these figures, measure none"
    )
    args = parser.parse_args(argv)
    args.repeats = (1 if args.quick else 5) if args.repeats is None else args.repeats
    if args.repeats < 1 or args.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    kept = args.source or RESULTS / ("quick.json" if args.quick else "latest.json")
    for name, suffix in KEPT.items():
        if getattr(args, name) is None:
            setattr(args, name, kept.with_suffix(suffix))
    return args


def main() -> int:
    """Measure, or read, and report."""
    args = parse()
    if args.source is not None:
        report(Results.load(args.source), args)
        return 0
    results = Results()
    done = measure(args, results)
    report(results, args)
    return 0 if done else INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
