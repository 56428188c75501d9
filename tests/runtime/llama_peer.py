"""llama.cpp, through llama-cpp-python: goes on from files, and writes files to go on from.

``python llama_peer.py JOB`` reads a JSON file and writes the logits it asks for beside it, as
``JOB.npz``. It runs in a process of its own: two builds of ggml do not go together in one.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}


class Peer:
    """A model with one context of all sequences in one stream."""

    def __init__(self, path: str, type_kv: str, flash_attn: bool) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = 256, 4
        params.n_batch = params.n_ubatch = 64
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = TYPES[type_kv]
        params.flash_attn_type, params.kv_unified = int(flash_attn), True
        self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        self.context = lib.llama_init_from_model(self.model, params)
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def decode(self, tokens: list[int], seq_id: int) -> Any:
        """Logits after tokens that follow what a sequence holds."""
        memory = lib.llama_get_memory(self.context)
        start = lib.llama_memory_seq_pos_max(memory, seq_id) + 1
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
            batch.logits[i] = i == len(tokens) - 1
        assert lib.llama_decode(self.context, batch) == 0
        logits = lib.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, (self.n_vocab,)).copy()

    def load(self, path: str, is_session: bool) -> list[int]:
        """Load a file (a sequence as 0) and return the tokens that it lists."""
        found, n = (lib.llama_token * 512)(), ctypes.c_size_t(0)
        given = (found, 512, ctypes.byref(n))
        if is_session:
            loaded = lib.llama_state_load_file(self.context, path.encode(), *given)
        else:
            loaded = lib.llama_state_seq_load_file(self.context, path.encode(), 0, *given)
        assert loaded, f"llama.cpp refuses {path}"
        return list(found[: n.value])

    def save(self, path: str, is_session: bool, tokens: list[int]) -> None:
        """Write a file, of a sequence that of 0."""
        listed = ((lib.llama_token * len(tokens))(*tokens), len(tokens))
        if is_session:
            assert lib.llama_state_save_file(self.context, path.encode(), *listed)
        else:
            assert lib.llama_state_seq_save_file(self.context, path.encode(), 0, *listed)


def main(path: Path) -> None:
    """See the module's docstring."""
    results = {}
    for job in json.loads(path.read_text()):
        peer = Peer(job["model"], job["type_kv"], job["flash_attn"])
        if job["do"] == "load":
            assert peer.load(job["file"], job["is_session"]) == job["tokens"]
        else:
            peer.decode(job["tokens"], 0)
            peer.save(job["file"], job["is_session"], job["tokens"])
        results[job["file"]] = peer.decode(job["then"], 0)
    np.savez(path.with_suffix(".npz"), **results)


if __name__ == "__main__":
    lib.llama_log_set(_quiet := lib.llama_log_callback(lambda *_: None), None)
    main(Path(sys.argv[1]))
