"""The operations of model files as nodes of a ggml graph.

Tensors are C addresses. ggml counts axes from the innermost, so ``[n, n_head, d]`` here is
``ne = (d, n_head, n)`` there. Pieces of a tensor are views of it; they are copied only where a
function of ggml needs its values side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcellar.backends.ggml.attention_nodes import AttentionNodes
from kvcellar.backends.ggml.constants import Constants
from kvcellar.backends.ggml.expert_nodes import ExpertNodes
from kvcellar.backends.ggml.inputs import Inputs, Target
from kvcellar.backends.ggml.model_memory import GgmlMemory
from kvcellar.backends.ggml.nodes import Nodes
from kvcellar.backends.ggml.product_nodes import ProductNodes
from kvcellar.backends.ggml.state_nodes import StateNodes
from kvcellar.backends.ggml.weights import tensor_at
from kvcellar.backends.operations import ROUTING, ExpertWeights, Routing
from kvcellar.errors import NotSupported
from kvcellar.plan import Plan
from kvcellar.types import RopeSpec


class GgmlOps:
    """Builds a graph for microbatches of the plan's shape. Implements ``Ops[int]``.

    Attributes:
        plan: a plan of that shape.
        n_positions: how many positions the model has learned; None where it looks none up.
    """

    n_positions: int | None = None

    def __init__(
        self, target: Target, inputs: Inputs, memory: GgmlMemory, constants: Constants, plan: Plan
    ) -> None:
        self._inputs = inputs
        self._places = memory.places
        self._nodes = nodes = Nodes(target.api, target.context, constants)
        self._node = nodes.add
        self._products = ProductNodes(target.api, nodes, memory.products)
        self._experts = ExpertNodes(nodes)
        parts = zip(memory.groups, inputs.groups, plan.groups, memory.kernels, strict=True)
        self._groups = [AttentionNodes(target, nodes, *part) for part in parts]
        self._recurrent: StateNodes | None = None
        if memory.states is not None and inputs.states is not None:
            self._recurrent = StateNodes(target, nodes, memory.states, inputs.states)
        self.plan = plan

    def embed(self, table: int) -> int:
        """Rows of the table for the input tokens, or the input embeddings."""
        if self._inputs.embeddings is not None:
            return self._inputs.embeddings
        return self._node("ggml_get_rows", table, self._inputs.tokens)

    def linear(self, x: int, weight: int, bias: int | None = None) -> int:
        """``x @ weight.T + bias``."""
        y = self._products.multiply(x, weight)
        return y if bias is None else self.add(y, bias)

    def rms_norm(self, x: int, weight: int, eps: float) -> int:
        """Root-mean-square normalisation over the last axis, times weight."""
        return self.mul(self._node("ggml_rms_norm", x, eps), weight)

    def heads(self, x: int, n_head: int) -> int:
        """``[n, n_head * d]`` to ``[n, n_head, d]``."""
        struct = tensor_at(x)
        d, n = struct.ne[0] // n_head, struct.ne[1]
        return self._node("ggml_view_3d", x, d, n_head, n, d * struct.nb[0], struct.nb[1], 0)

    def rope(self, x: int, spec: RopeSpec) -> int:
        """Rotate ``[n, n_head, d]`` by the input positions."""
        return self._nodes.rope(x, self._inputs.positions, spec, spec.attn_factor)

    def attention(
        self,
        layer: int,
        q: int,
        k: int,
        v: int | None,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: int | None = None,
    ) -> int:
        """Write k and v to the input cells, then attend through the mask or the lists."""
        place = self._places[layer]
        return self._groups[place.group].attend(place.index, q, k, v, scale, softcap, sinks)

    def add(self, a: int, b: int) -> int:
        """Elementwise sum."""
        return self._node("ggml_add", a, b)

    def mul(self, a: int, b: int) -> int:
        """Elementwise product."""
        return self._node("ggml_mul", a, b)

    def scale(self, x: int, factor: float) -> int:
        """Multiply by a number."""
        return self._node("ggml_scale", self._nodes.dense(x), factor)

    def swiglu(self, gate: int, up: int) -> int:
        """``silu(gate) * up``."""
        return self._node("ggml_swiglu_split", self._nodes.even(gate), self._nodes.even(up))

    def experts(self, x: int, weights: ExpertWeights[int], routing: Routing = ROUTING) -> int:
        """The best ``n_used`` experts of each token, weighted."""
        return self._experts.mix(x, weights, routing)

    # -- norms and activations

    def layer_norm(self, x: int, weight: int, bias: int, eps: float) -> int:
        """Mean and variance normalisation over the last axis, times weight, plus bias."""
        return self.add(self.mul(self._node("ggml_norm", x, eps), weight), bias)

    def silu(self, x: int) -> int:
        """``x * sigmoid(x)``."""
        return self._node("ggml_silu", self._nodes.even(x))

    def gelu(self, x: int) -> int:
        """GELU by its tanh formula, which ggml looks up for x rounded to f16."""
        return self._node("ggml_gelu", self._nodes.even(x))

    def geglu(self, gate: int, up: int) -> int:
        """``gelu(gate) * up``."""
        return self._node("ggml_geglu_split", self._nodes.even(gate), self._nodes.even(up))

    def softcap(self, x: int, cap: float) -> int:
        """``cap * tanh(x / cap)``."""
        return self._nodes.softcap(x, cap)

    # -- shapes

    def merge(self, x: int) -> int:
        """``[n, n_head, d]`` to ``[n, n_head * d]``."""
        d, n_head, n = self._nodes.ne(x)[:3]
        return self._node("ggml_reshape_2d", self._nodes.dense(x), d * n_head, n)

    def split(self, x: int, sizes: Sequence[int]) -> list[int]:
        """Views of the last axis, of these sizes."""
        struct, pieces, start = tensor_at(x), [], 0
        for size in sizes:
            ne, nb = (size, *struct.ne[1:3]), struct.nb[1:3]
            pieces.append(self._node("ggml_view_3d", x, *ne, *nb, start * struct.nb[0]))
            start += size
        assert start == struct.ne[0], (list(sizes), struct.ne[0])
        return pieces

    def concat(self, parts: Sequence[int]) -> int:
        """Put side by side along the last axis."""
        joined, *others = parts
        for part in others:
            joined = self._node("ggml_concat", joined, part, 0)
        return joined

    def linear_heads(self, x: int, weight: int) -> int:
        """A product a head: x ``[n, n_head, n_in]``, weight ``[n_head, n_out, n_in]``."""
        by_head = self._node("ggml_permute", x, 0, 2, 1, 3)
        product = self._node("ggml_mul_mat", weight, by_head)
        return self._node("ggml_permute", product, 0, 2, 1, 3)

    def embed_positions(self, table: int) -> int:
        """Rows of the table for the input positions, which ``Feeds`` checks against it."""
        self.n_positions = self._nodes.ne(table)[1]
        return self._node("ggml_get_rows", table, self._inputs.positions)

    # -- recurrent layers

    def short_conv(self, layer: int, x: int, weight: int) -> int:
        """Causal convolution of each channel along each sequence."""
        return self._states.short_conv(self._places[layer].state, x, weight)

    def ssm_scan(self, layer: int, x: int, dt: int, a: int, b: int, c: int) -> int:
        """Mamba's recurrence."""
        return self._states.ssm_scan(self._places[layer].state, x, dt, a, b, c)

    def outputs(self, x: int) -> int:
        """The rows whose logits are wanted."""
        if self._inputs.outputs is None:
            return x
        return self._node("ggml_get_rows", x, self._inputs.outputs)

    @property
    def _states(self) -> StateNodes:
        if self._recurrent is None:
            raise NotSupported("a recurrent layer, but a plan or a memory without states")
        return self._recurrent
