"""Saving and loading a prompt beside computing it again, and beside copying the same bytes.

    python benchmarks/snapshot.py [--tokens 4096] [--repeats 9] [--threads 2] [--model smollm2]

Everything takes turns, and figures are medians with their ranges. "copy" is ``shutil.copyfile`` of
the same file, once as it is and once waiting for the disk, as saving does; "ratio" is the time of
what a line is compared with over that of the line: a load that is 20 times faster than the prefill
has 20, one that costs twice a copy has 0.5.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

from kvcellar import Context, Model, PromptCache, Sequence, find_model, open_store

TEXT = "Once upon a time there was a cache that lost nothing of what it was told. "


@dataclass
class Line:
    """One thing that is timed, and what it is compared with."""

    name: str
    run: Callable[[], object]
    against: str = ""
    seconds: list[float] = field(default_factory=list)

    def time(self) -> None:
        """Do it once more."""
        start = perf_counter()
        self.run()
        self.seconds.append(perf_counter() - start)


def main() -> None:
    """Run the benchmark and print a table."""
    options = _options()
    with Model.from_gguf(find_model(options.model), n_threads=options.threads) as model:
        n_ctx = 2 * options.tokens + 512
        with model.context(n_ctx=n_ctx, n_seq_max=3) as context, _folder() as folder:
            tokens = (model.tokenizer.encode(TEXT) * options.tokens)[: options.tokens]
            prefill = Line("prefill", lambda: context.sequence(tokens).close())
            prefill.time()
            lines = {line.name: line for line in [prefill, *_lines(context, tokens, folder)]}
            for i in range(options.repeats):
                for line in lines.values():
                    if line is not prefill or i < 2:
                        line.time()
            size = (folder / "plain.kv").stat().st_size
            print(f"{model.path.name}, {len(tokens)} tokens, {size / 1e6:.1f} MB, ", end="")
            print(f"{options.threads} threads, medians of {options.repeats}\n")
            _print(lines)


def _lines(context: Context, tokens: list[int], folder: Path) -> Iterator[Line]:
    """What is timed, each alone; what it needs is there already."""
    source = context.sequence(tokens)
    plain, packed, small = (folder / f"{name}.kv" for name in ("plain", "packed", "q8_0"))
    source.save(plain)
    source.save(packed, compress=True)
    source.save(small, type_k="q8_0", type_v="q8_0")
    copy = folder / "copy"
    yield Line("copy", lambda: shutil.copyfile(plain, copy))
    yield Line("copy, synced", lambda: _copy_synced(plain, copy))
    yield Line("save", lambda: source.save(plain), "copy, synced")
    yield Line("load", lambda: context.load(plain).close(), "copy")
    yield Line("load beside prefill", lambda: context.load(plain).close(), "prefill")
    yield Line("save, zstd", lambda: source.save(packed, compress=True), "copy, synced")
    yield Line("load, zstd", lambda: context.load(packed).close(), "prefill")
    yield Line("load, q8_0", lambda: context.load(small, convert=True).close(), "prefill")
    for where in ("memory:", str(folder / "store")):
        cache = PromptCache(open_store(where))
        cache.store(source)
        name = "memory" if where == "memory:" else "disk"
        yield Line(f"restore from {name}", _restoring(cache, context, tokens), "prefill")


def _restoring(cache: PromptCache, context: Context, tokens: list[int]) -> Callable[[], object]:
    def restore() -> None:
        sequence: Sequence = context.sequence()
        reuse = cache.restore(sequence, tokens)
        assert reuse.n_reused > 0, str(reuse)
        sequence.close()

    return restore


def _copy_synced(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _print(lines: dict[str, Line]) -> None:
    print(f"{'':22}{'ms':>9}  {'range':>19}  {'ratio':>7}")
    for line in lines.values():
        ms = [1000 * seconds for seconds in line.seconds]
        ratio = ""
        if line.against:
            against = median(lines[line.against].seconds)
            ratio = f"{against / median(line.seconds):7.2f}  of {line.against}"
        print(f"{line.name:22}{median(ms):9.1f}  [{min(ms):8.1f},{max(ms):8.1f}]  {ratio}")


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2")
    return parser.parse_args()


if __name__ == "__main__":
    main()
