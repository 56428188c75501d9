"""OpenVINO GenAI, which reads the same GGUF file, as the suite asks it.

It has no verbs. A context is kept by its prefix cache: a prompt whose beginning was computed
before costs what is new, so rewinding is giving a shorter prompt.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from _engine import Engine, one
from _protocol import Measured, Unsupported, serve


class OpenVino(Engine):
    """One pipeline."""

    def bring_in(self) -> None:
        """Import what is needed."""
        import numpy as np
        import openvino
        import openvino_genai

        self.np: Any = np
        self.ov: Any = openvino
        self.genai: Any = openvino_genai
        self.version = openvino_genai.__version__

    def load(self) -> None:
        """Load the model; the context is part of it."""
        settings = self.settings
        scheduler = self.genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = False  # a prompt is computed at once
        scheduler.max_num_batched_tokens = settings["n_ctx"]
        scheduler.cache_size = 1  # GB
        self.pipe = self.genai.LLMPipeline(
            settings["model"],
            "CPU",
            scheduler_config=scheduler,
            INFERENCE_NUM_THREADS=settings["n_threads"],
            KV_CACHE_PRECISION=settings["type_kv"],
        )
        self.length, self.n_fills = 0, 0

    def fill(self, n: int, own: int = 0) -> Measured:
        """See ``CellEngine``; a prompt never seen, so that nothing of it is in the prefix cache."""
        if own:
            raise Unsupported("several sequences")
        self.n_fills += 1
        prompt = self.tokens(0, n, stream=1000 + self.n_fills)
        start = perf_counter()
        self._generate(prompt, 1)
        return one(perf_counter() - start, n)

    def extend(self, n: int) -> Measured:
        """See ``CellEngine``."""
        start = perf_counter()
        self.length = n
        self._generate(self.tokens(0, n), 1)
        return one(perf_counter() - start, n)

    def rewind(self, n: int) -> Measured:
        """See ``CellEngine``."""
        self.length = n
        return one(0.0, 1)

    def decode(self, steps: int) -> Measured:
        """See ``CellEngine``; the first token belongs to the prompt and is not counted."""
        result = self._generate(self.tokens(0, self.length), steps + 1)
        return one(result.perf_metrics.get_tpot().mean * 1e-3 * steps, steps)

    def _generate(self, prompt: list[int], n: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = n, True
        ids = self.np.array([prompt], self.np.int64)
        ones = self.ov.Tensor(self.np.ones_like(ids))
        return self.pipe.generate(self.genai.TokenizedInputs(self.ov.Tensor(ids), ones), config)


if __name__ == "__main__":
    serve(OpenVino)
