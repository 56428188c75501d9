"""A process that appends texts through a store on disk; says what it reused and what came of it."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime.model import Model
from kvcellar.stores.disk import DiskStore
from tests.prompts.helpers import BLOCK, SIZES, append
from tests.runtime.archs import text


def shared_text(seed: int) -> list[int]:
    """Texts of which several begin alike."""
    return text(seed % 3, 40) + text(seed, 45)


def main(model_path: str, folder: str, *seeds: str) -> None:
    """Append the texts of the seeds one after the other, each to a sequence of its own."""
    store = DiskStore(folder, fsync=False)
    prompts = PromptCache(store, block_size=BLOCK)
    with Model.from_gguf(Path(model_path), n_threads=1) as model:
        context = model.context(**SIZES)
        for seed in map(int, seeds):
            hit, logits, sequence = append(prompts, context, shared_text(seed))
            digest = sha256(logits.tobytes()).hexdigest()
            sys.stdout.write(f"{seed} {hit.n_reused} {digest}\n")
            sequence.close()
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
