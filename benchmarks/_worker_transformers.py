"""Transformers on PyTorch, which reads the same GGUF file into f32, as the suite asks it."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

from _engine import Engine, one
from _protocol import Measured, Unsupported, serve


class Transformers(Engine):
    """One model and one cache."""

    def bring_in(self) -> None:
        """Import what is needed."""
        import torch
        import transformers

        self.torch: Any = torch
        self.lib: Any = transformers
        self.version = transformers.__version__

    def load(self) -> None:
        """Load the model."""
        path = Path(self.settings["model"])
        self.torch.set_num_threads(self.settings["n_threads"])
        load = self.lib.AutoModelForCausalLM.from_pretrained
        self.model = load(str(path.parent), gguf_file=path.name).eval()
        self.cache = self.lib.DynamicCache()

    def fill(self, n: int, own: int = 0) -> Measured:
        """See ``CellEngine``."""
        if own:
            raise Unsupported("several sequences")
        start = perf_counter()
        self.cache = self.lib.DynamicCache()
        self._compute(self.tokens(0, n))
        return one(perf_counter() - start, n)

    def extend(self, n: int) -> Measured:
        """See ``CellEngine``."""
        start = perf_counter()
        if tokens := self.tokens(self.cache.get_seq_length(), n):
            self._compute(tokens)
        return one(perf_counter() - start, len(tokens))

    def rewind(self, n: int) -> Measured:
        """See ``CellEngine``."""
        start = perf_counter()
        if (behind := self.cache.get_seq_length() - n) > 0:
            self.cache.crop(-behind)
        return one(perf_counter() - start, 1)

    def decode(self, steps: int) -> Measured:
        """See ``CellEngine``."""
        token = self.tokens(0, 1, stream=99)
        start = perf_counter()
        for _ in range(steps):
            self._compute(token)
        return one(perf_counter() - start, steps)

    def _compute(self, tokens: list[int]) -> None:
        """In pieces like everybody; the best next token of each is found."""
        n = self.settings["n_ubatch"]
        with self.torch.inference_mode():
            for first in range(0, len(tokens), n):
                ids = self.torch.tensor([tokens[first : first + n]])
                out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
                out.logits[0, -1].argmax()


if __name__ == "__main__":
    serve(Transformers)
