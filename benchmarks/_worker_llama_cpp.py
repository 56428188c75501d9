"""llama.cpp, through llama-cpp-python's low-level interface, as the benchmark asks it."""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any

from _protocol import serve


class Engine:
    """One model and one context of a shape."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp as lib

        self.lib: Any = lib
        self._quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._quiet, None)
        self.n_seqs: int = settings["n_seqs"]
        self.model = lib.llama_model_load_from_file(
            settings["model"].encode(), lib.llama_model_default_params()
        )
        params = lib.llama_context_default_params()
        params.n_ctx = settings["n_ctx"]
        params.n_seq_max = self.n_seqs
        params.n_batch = params.n_ubatch = settings["n_ubatch"]
        params.n_threads = params.n_threads_batch = settings["n_threads"]
        params.flash_attn_type = 1 if settings["flash_attn"] else 0
        params.kv_unified = settings["kv_unified"]
        self.context = lib.llama_init_from_model(self.model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(settings["n_ubatch"], 0, 1)

    def fill(self, tokens: list[list[int]]) -> dict[str, Any]:
        """Prefill every sequence from nothing; seconds for all."""
        self.lib.llama_memory_clear(self.memory, False)
        start = perf_counter()
        for seq_id, ids in enumerate(tokens):
            for first in range(0, len(ids), 512):
                part = ids[first : first + 512]
                rows = [(token, first + i, seq_id) for i, token in enumerate(part)]
                self._decode(rows, wanted={len(rows) - 1})
        self.position = len(tokens[0])
        return {"seconds": perf_counter() - start}

    def decode(self, n: int, token: int) -> dict[str, Any]:
        """N steps, one token a sequence each; seconds."""
        start = perf_counter()
        for _ in range(n):
            rows = [(token, self.position, seq_id) for seq_id in range(self.n_seqs)]
            self._decode(rows, wanted=set(range(self.n_seqs)))
            self.position += 1
        return {"seconds": perf_counter() - start}

    def _decode(self, rows: list[tuple[int, int, int]], wanted: set[int]) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq_id) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
            batch.logits[i] = i in wanted
        status = self.lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        float(self.lib.llama_get_logits_ith(self.context, -1)[0])


if __name__ == "__main__":
    try:
        engine = Engine(json.loads(sys.argv[1]))
        hello = {"version": engine.lib.__version__}
    except ImportError as error:
        print(json.dumps({"error": f"not installed: {error}"}), flush=True)
        raise SystemExit(0) from None
    serve(hello, {"fill": engine.fill, "decode": engine.decode})
