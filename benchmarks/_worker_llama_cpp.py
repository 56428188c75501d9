"""llama.cpp, through llama-cpp-python's low-level interface, as the suite asks it."""

from __future__ import annotations

import re
from typing import Any

from _engine import CellEngine, Row
from _protocol import serve

TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
_KV_SIZE = re.compile(r"KV buffer size = +([\d.]+) MiB")


class LlamaCpp(CellEngine):
    """One model and one context."""

    def bring_in(self) -> None:
        """Import what is needed, and keep what it logs."""
        import llama_cpp
        import numpy as np

        self.np: Any = np
        self.lib: Any = llama_cpp
        self.version = llama_cpp.__version__
        self.log: list[bytes] = []
        self.logging = self.lib.llama_log_callback(lambda _level, text, _: self.log.append(text))
        self.lib.llama_log_set(self.logging, None)

    def load(self) -> None:
        """Load the model."""
        lib, path = self.lib, self.settings["model"].encode()
        self.model = lib.llama_model_load_from_file(path, lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"it cannot load the model{self._end_of_log()}")
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def open(self) -> None:
        """Make a context."""
        lib, settings = self.lib, self.settings
        params = lib.llama_context_default_params()
        params.n_ctx = settings["n_ctx"]
        params.n_seq_max = settings["n_seq_max"]
        params.n_batch = params.n_ubatch = settings["n_ubatch"]
        params.n_threads = params.n_threads_batch = settings["n_threads"]
        params.type_k = params.type_v = TYPES[settings["type_kv"]]
        params.flash_attn_type = int(settings["flash"])
        params.kv_unified = settings["unified"]
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"it cannot make the context{self._end_of_log()}")
        self.mem = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(settings["n_ubatch"], 0, 1)
        sizes = _KV_SIZE.findall(b"".join(self.log).decode(errors="replace"))
        self.kv_bytes = int(sum(map(float, sizes)) * 2**20)

    def read(self, seq_id: int, tokens: list[int], start: int) -> None:
        """See ``CellEngine``."""
        n = self.settings["n_ubatch"]
        for first in range(0, len(tokens), n):
            piece = tokens[first : first + n]
            rows = [(token, start + first + i, seq_id) for i, token in enumerate(piece)]
            self._decode(rows, first_wanted=len(rows) - 1)

    def step(self, rows: list[Row]) -> None:
        """See ``CellEngine``."""
        self._decode(rows, first_wanted=0)
        for i in range(len(rows)):
            logits = self.lib.llama_get_logits_ith(self.context, i)
            self.np.argmax(self.np.ctypeslib.as_array(logits, (self.n_vocab,)))

    def clear(self) -> None:
        """See ``CellEngine``."""
        self.lib.llama_memory_clear(self.mem, False)

    def seq_rm(self, seq_id: int, start: int, stop: int) -> None:
        """See ``CellEngine``."""
        self.lib.llama_memory_seq_rm(self.mem, seq_id, start, stop)

    def seq_cp(self, src: int, dst: int) -> None:
        """See ``CellEngine``."""
        self.lib.llama_memory_seq_cp(self.mem, src, dst, -1, -1)

    def seq_add(self, seq_id: int, start: int, stop: int, delta: int) -> None:
        """See ``CellEngine``."""
        self.lib.llama_memory_seq_add(self.mem, seq_id, start, stop, delta)

    def seq_pos_max(self, seq_id: int) -> int:
        """See ``CellEngine``."""
        return int(self.lib.llama_memory_seq_pos_max(self.mem, seq_id))

    def _decode(self, rows: list[Row], first_wanted: int) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq_id) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
            batch.logits[i] = i >= first_wanted
        status = self.lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}{self._end_of_log()}")
        float(self.lib.llama_get_logits_ith(self.context, -1)[0])  # it may compute until asked

    def _end_of_log(self) -> str:
        lines = b"".join(self.log).decode(errors="replace").strip().splitlines()[-3:]
        return "".join(f"\n    {line}" for line in lines)


if __name__ == "__main__":
    serve(LlamaCpp)
