"""A llama of a few thousand random weights, as the parts of a GGUF file that tests may bend."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvcellar.testing.gguf_writer import Tensor, Value, gguf_bytes


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """Sizes of the model; ``n_expert`` of 0 is a dense one."""

    n_vocab: int = 48
    n_embd: int = 64
    n_layer: int = 2
    n_head: int = 2
    n_head_kv: int = 1
    n_ff: int = 96
    n_expert: int = 0
    n_expert_used: int = 2
    seed: int = 0
    _rng: np.random.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rng", np.random.default_rng(self.seed))

    @property
    def head_dim(self) -> int:
        """Values of one head."""
        return self.n_embd // self.n_head

    def metadata(self) -> dict[str, Value]:
        """The hyper-parameters."""
        values: dict[str, Value] = {
            "general.architecture": "llama",
            "llama.block_count": self.n_layer,
            "llama.context_length": 512,
            "llama.embedding_length": self.n_embd,
            "llama.feed_forward_length": self.n_ff,
            "llama.attention.head_count": self.n_head,
            "llama.attention.head_count_kv": self.n_head_kv,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
        }
        if self.n_expert:
            values["llama.expert_count"] = self.n_expert
            values["llama.expert_used_count"] = self.n_expert_used
        return values

    def tensors(self) -> dict[str, Tensor]:
        """Random weights, large enough for attention to be peaked."""
        found: dict[str, Tensor] = {
            "token_embd.weight": self._matrix(self.n_vocab, self.n_embd),
            "output_norm.weight": self._vector(self.n_embd),
            "output.weight": self._matrix(self.n_vocab, self.n_embd),
        }
        for i in range(self.n_layer):
            block = {**self._attention(), **self._feed_forward()}
            found.update({f"blk.{i}.{name}.weight": tensor for name, tensor in block.items()})
        return found

    def to_bytes(self) -> bytes:
        """The whole file."""
        return gguf_bytes(self.metadata(), self.tensors())

    def _attention(self) -> dict[str, Tensor]:
        n_embd, n_embd_kv = self.n_embd, self.n_head_kv * self.head_dim
        return {
            "attn_norm": self._vector(n_embd),
            "attn_q": self._matrix(n_embd, n_embd),
            "attn_k": self._matrix(n_embd_kv, n_embd),
            "attn_v": self._matrix(n_embd_kv, n_embd),
            "attn_output": self._matrix(n_embd, n_embd),
        }

    def _feed_forward(self) -> dict[str, Tensor]:
        n_embd, n_ff, n_expert = self.n_embd, self.n_ff, self.n_expert
        norm = {"ffn_norm": self._vector(n_embd)}
        if n_expert == 0:
            return {
                **norm,
                "ffn_gate": self._matrix(n_ff, n_embd),
                "ffn_up": self._matrix(n_ff, n_embd),
                "ffn_down": self._matrix(n_embd, n_ff),
            }
        return {
            **norm,
            "ffn_gate_inp": self._matrix(n_expert, n_embd),
            "ffn_gate_exps": self._matrix(n_expert, n_ff, n_embd),
            "ffn_up_exps": self._matrix(n_expert, n_ff, n_embd),
            "ffn_down_exps": self._matrix(n_expert, n_embd, n_ff),
        }

    def _matrix(self, *shape: int) -> Tensor:
        scale = 1.5 / shape[-1] ** 0.5
        return np.asarray(self._rng.standard_normal(shape) * scale, np.float32)

    def _vector(self, n: int) -> Tensor:
        return np.asarray(self._rng.uniform(0.5, 1.5, n), np.float32)
