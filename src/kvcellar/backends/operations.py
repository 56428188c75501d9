"""The operations that models are written in, and the tensors that model files have.

Shapes are given the NumPy way, tokens first; T is the backend's tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from kvcellar.plan import Plan
from kvcellar.types import RopeSpec

T = TypeVar("T")

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ExpertWeights(Generic[T]):
    """The weights of a mixture of experts, of which each token uses ``n_used``.

    A scale multiplies what its expert's matrix gives; None where the file has none. Files have
    gate and up apart, or ``gate_up``, an expert's gate rows before its up rows.
    """

    router: T  # [n_expert, n_embd]
    down: T  # [n_expert, n_embd, n_ff]
    n_used: int
    gate: T | None = None  # [n_expert, n_ff, n_embd]
    up: T | None = None  # [n_expert, n_ff, n_embd]
    gate_up: T | None = None  # [n_expert, 2 * n_ff, n_embd]
    gate_scale: T | None = None  # [n_expert]
    up_scale: T | None = None  # [n_expert]
    gate_up_scale: T | None = None  # [n_expert]
    down_scale: T | None = None  # [n_expert]
    router_bias: T | None = None  # [n_expert], added to the scores
    gate_bias: T | None = None  # [n_expert, n_ff]
    up_bias: T | None = None  # [n_expert, n_ff]
    down_bias: T | None = None  # [n_expert, n_embd]
    choice_bias: T | None = None  # [n_expert], added to the shares only to choose by them


@dataclass(frozen=True, slots=True)
class Routing:
    """How a mixture of experts chooses and weighs them.

    Attributes:
        gating: what makes shares of the router's scores: over all experts, each for itself, or
            softmax over the chosen ones alone.
        normalised: whether the shares of those chosen are made to sum to 1.
        factor: what the shares are multiplied by.
        activation: of gate and up: "swiglu", or "swiglu_oai", gpt-oss's with its two constants.
    """

    gating: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax"
    normalised: bool = True
    factor: float = 1.0
    activation: Literal["swiglu", "swiglu_oai"] = "swiglu"


ROUTING = Routing()


class Ops(Protocol[T]):
    """The operations that a model file is written in; T is the backend's tensor.

    Shapes are given the NumPy way, tokens first. A backend may compute at once or build a graph.
    """

    @property
    def plan(self) -> Plan:
        """The microbatch that is computed."""

    def embed(self, table: T) -> T:
        """Rows of a ``[n_vocab, n_embd]`` table for the plan's tokens (or its embeddings)."""

    def linear(self, x: T, weight: T, bias: T | None = None) -> T:
        """``x @ weight.T + bias``: x ``[..., n_in]``, weight ``[n_out, n_in]``."""

    def rms_norm(self, x: T, weight: T, eps: float) -> T:
        """Root-mean-square normalisation over the last axis, times weight."""

    def heads(self, x: T, n_head: int) -> T:
        """Split the last axis: ``[n, n_head * d]`` to ``[n, n_head, d]``."""

    def rope(self, x: T, spec: RopeSpec) -> T:
        """Rotate ``[n, n_head, d]`` by the plan's positions."""

    def attention(
        self,
        layer: int,
        q: T,
        k: T,
        v: T | None,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: T | None = None,
    ) -> T:
        """Store k and v in the plan's cells, then attend over the cells that it allows.

        q ``[n, n_head, d]``, k and v ``[n, n_head_kv, d]``; returns ``[n, n_head * d_v]``. v is
        None where the layer's ``v_offset`` says that it is part of k.

        Args:
            layer: of the model.
            q: queries.
            k: keys.
            v: values.
            scale: what scores are multiplied by.
            softcap: c above 0 makes a score s into ``c * tanh(s / c)``.
            sinks: a score a head ``[n_head]`` of a cell that has no V and is seen by every token.
        """

    def add(self, a: T, b: T) -> T:
        """Elementwise sum; b may have fewer rows and is then repeated."""

    def mul(self, a: T, b: T) -> T:
        """Elementwise product; b may have fewer rows and is then repeated."""

    def scale(self, x: T, factor: float) -> T:
        """Multiply by a number."""

    def swiglu(self, gate: T, up: T) -> T:
        """``silu(gate) * up``."""

    def experts(self, x: T, weights: ExpertWeights[T], routing: Routing = ROUTING) -> T:
        """Mixture of experts: the best ``n_used`` of each token, weighted.

        x ``[n, n_embd]``; returns the same shape.
        """

    # -- norms and activations

    def layer_norm(self, x: T, weight: T, bias: T, eps: float) -> T:
        """Mean and variance normalisation over the last axis, times weight, plus bias."""

    def silu(self, x: T) -> T:
        """``x * sigmoid(x)``."""

    def gelu(self, x: T) -> T:
        """GELU by its tanh formula."""

    def geglu(self, gate: T, up: T) -> T:
        """``gelu(gate) * up``."""

    def softcap(self, x: T, cap: float) -> T:
        """``cap * tanh(x / cap)``."""

    # -- shapes

    def merge(self, x: T) -> T:
        """``[n, n_head, d]`` to ``[n, n_head * d]``; what :meth:`heads` undoes."""

    def split(self, x: T, sizes: Sequence[int]) -> list[T]:
        """Pieces of the last axis, of these sizes."""

    def concat(self, parts: Sequence[T]) -> T:
        """Put side by side along the last axis."""

    def linear_heads(self, x: T, weight: T) -> T:
        """A product a head: x ``[n, n_head, n_in]``, weight ``[n_head, n_out, n_in]``."""

    def embed_positions(self, table: T) -> T:
        """Rows of a ``[n_ctx, n_embd]`` table for the plan's positions."""

    # -- recurrent layers; tokens are those of sequence after sequence, see StatePlan

    def short_conv(self, layer: int, x: T, weight: T) -> T:
        """Causal convolution of each channel along each sequence: x ``[n, d]``, weight ``[d, k]``.

        Output t is the sum of ``weight[:, j] * x[t - k + 1 + j]``; the last k - 1 inputs are the
        layer's ``n_conv`` state.
        """

    def ssm_scan(self, layer: int, x: T, dt: T, a: T, b: T, c: T) -> T:
        """Mamba's recurrence, whose state ``[n_head, d, d_state]`` is the layer's ``n_ssm``.

        With ``step = softplus(dt)``: ``state = state * exp(step * a) + step * x * b``, and the
        output is ``state @ c``.

        Args:
            layer: of the model.
            x: ``[n, n_head, d]``.
            dt: ``[n, n_head]``.
            a: ``[n_head, d_state]``, or ``[n_head, 1]`` where it is the same for the whole state.
            b: ``[n, n_group, d_state]``; a group's heads share it.
            c: as b.

        Returns:
            ``[n, n_head, d]``.
        """

    def outputs(self, x: T) -> T:
        """Only the rows whose logits are wanted."""


class Weights(Protocol[T_co]):
    """The tensors of a model file, by name; shapes are given the NumPy way."""

    def names(self) -> Iterable[str]:
        """The names of all tensors that the file has."""

    def has(self, name: str) -> bool:
        """Whether the file has that tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that the file must have."""

    def matrix(self, name: str, *shape: int) -> T_co:
        """A weight of any type that :meth:`Ops.linear` or :meth:`Ops.embed` can take.

        Raises:
            UnsupportedModel: absent, of another shape, or of a type that cannot be computed.
        """

    def vector(self, name: str, *shape: int) -> T_co:
        """A norm, bias or the like, of f32 values; some have more than one axis."""

    def values(self, name: str, n: int) -> tuple[float, ...]:
        """The numbers of a small f32 tensor, for example RoPE's frequency factors."""


Forward = Callable[[Ops[T]], T]
"""A model's forward pass: from the plan that the ops carry to logits."""
