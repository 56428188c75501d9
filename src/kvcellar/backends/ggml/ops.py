"""The operations of model files as nodes of a ggml graph.

Tensors are C addresses. ggml counts axes from the innermost, so ``[n, n_head, d]`` here is
``ne = (d, n_head, n)`` there. Pieces of a tensor are views of it; they are copied only where a
function of ggml needs its values side by side.

Products with weights as nodes of a ggml graph: our own code where it suits, else ggml's.

Mixtures of experts as nodes of a ggml graph.

Recurrent layers as nodes of a ggml graph: states are gathered by row and scattered by row.

A row may be read and written by one graph. What reads it comes before what writes it, since the
node that writes is made of the node that read; and it is put into the graph at once, for nothing
else depends on it. The rows are inputs, so a graph serves every plan of its shape.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence

from kvcellar.backends.ggml.attention_nodes import AttentionNodes
from kvcellar.backends.ggml.binding import ALL_THREADS, TYPE_F32, TYPE_I32, Ggml
from kvcellar.backends.ggml.gguf import tensor_at
from kvcellar.backends.ggml.inputs import Inputs, StateInputs, Target
from kvcellar.backends.ggml.jit.product import Products
from kvcellar.backends.ggml.jit.product_formats import FORMATS, RECORD, VALUES
from kvcellar.backends.ggml.model_memory import GgmlMemory
from kvcellar.backends.ggml.nodes import Constants, Nodes
from kvcellar.backends.ggml.states import GgmlStateStore
from kvcellar.backends.operations import ROUTING, ExpertWeights, Routing
from kvcellar.errors import NotSupported
from kvcellar.plan import Plan
from kvcellar.types import RopeSpec


class ProductNodes:
    """Builds the products of one graph; activations are quantised once for all that use them."""

    def __init__(self, api: Ggml, nodes: Nodes, products: Products | None) -> None:
        self._api = api
        self._node = nodes.add
        self._products = products
        self._records: dict[int, int] = {}  # by activations

    def multiply(self, x: int, weight: int) -> int:
        """``x @ weight.T``."""
        ours, rows = self._products, tensor_at(weight)
        if ours is None or not ours.suits(tensor_at(x), rows):
            return self._node("ggml_mul_mat", weight, x)
        n, n_out = tensor_at(x).ne[1], rows.ne[1]
        if x not in self._records:
            self._records[x] = self._quantised(x, ours)
        sources, function = [weight, self._records[x]], ours.multiply(rows, n)
        node = self._custom(TYPE_F32, n_out, n, sources, function, ours.task)
        self._api.ggml_set_name(node, f"PRODUCT {FORMATS[rows.type].name}".encode())
        return node

    def _quantised(self, x: int, ours: Products) -> int:
        n_in, n = tensor_at(x).ne[:2]
        width = n_in // VALUES * RECORD // c.sizeof(c.c_int32)
        node = self._custom(TYPE_I32, width, n, [x], ours.quantise(), None)
        self._api.ggml_set_name(node, b"QUANTISE")
        return node

    def _custom(
        self, kind: int, width: int, n: int, tensors: list[int], function: int, task: int | None
    ) -> int:
        sources = (c.c_void_p * len(tensors))(*tensors)
        shared = (len(tensors), function, ALL_THREADS, task)
        return self._node("ggml_custom_4d", kind, width, n, 1, 1, sources, *shared)


SMALLEST_SUM = 6.103515625e-5
"""What shares are divided by at least when they are made to sum to 1; float16's smallest normal."""
OAI_ALPHA = 1.702
OAI_LIMIT = 7.0


class ExpertNodes:
    """Builds mixtures of experts."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._node = nodes.add

    def mix(self, x: int, weights: ExpertWeights[int], routing: Routing) -> int:
        """See ``Ops.experts``."""
        n_embd, n = self._nodes.ne(x)[:2]
        chosen, shares = self._route(x, weights, routing)
        column = self._node("ggml_reshape_3d", self._nodes.dense(x), n_embd, 1, n)
        gate, up = self._gate_and_up(column, weights, chosen)
        if routing.activation == "swiglu_oai":
            hidden = self._node("ggml_swiglu_oai", gate, up, OAI_ALPHA, OAI_LIMIT)
        else:
            hidden = self._node("ggml_swiglu_split", gate, up)
        parts = self._product(hidden, weights.down, weights.down_scale, chosen)
        parts = self._biased(parts, weights.down_bias, chosen)
        return self._sum(self._node("ggml_mul", parts, shares))

    def _route(self, x: int, weights: ExpertWeights[int], routing: Routing) -> tuple[int, int]:
        """Chosen experts ``[n, n_used]`` and their shares ``[n, n_used, 1]``."""
        n_used = weights.n_used
        scores = self._node("ggml_mul_mat", weights.router, x)
        if weights.router_bias is not None:
            scores = self._node("ggml_add", scores, weights.router_bias)
        shares = scores
        if routing.gating == "softmax":
            shares = self._node("ggml_soft_max", scores)
        elif routing.gating == "sigmoid":
            shares = self._node("ggml_sigmoid", scores)
        by = shares
        if weights.choice_bias is not None:
            by = self._node("ggml_add", shares, weights.choice_bias)
        chosen = self._node("ggml_argsort_top_k", by, n_used)
        n_expert, n = self._nodes.ne(shares)[:2]
        column = self._node("ggml_reshape_3d", shares, 1, n_expert, n)
        taken = self._node("ggml_get_rows", column, chosen)
        flat = self._weigh(self._node("ggml_reshape_2d", taken, n_used, n), routing)
        return chosen, self._node("ggml_reshape_3d", flat, 1, n_used, n)

    def _weigh(self, taken: int, routing: Routing) -> int:
        """The shares of those chosen, of what was taken of each."""
        if routing.gating == "softmax_chosen":
            taken = self._node("ggml_soft_max", taken)
        if routing.normalised:
            total = self._node("ggml_sum_rows", taken)
            total = self._node("ggml_clamp", total, SMALLEST_SUM, float("inf"))
            taken = self._node("ggml_div", taken, total)
        return taken if routing.factor == 1.0 else self._node("ggml_scale", taken, routing.factor)

    def _gate_and_up(
        self, column: int, weights: ExpertWeights[int], chosen: int
    ) -> tuple[int, int]:
        """Both ``[n, n_used, n_ff]``."""
        if weights.gate_up is not None:
            both = self._product(column, weights.gate_up, weights.gate_up_scale, chosen)
            gate, up = self._halves(both)
        else:
            assert weights.gate is not None
            assert weights.up is not None
            gate = self._product(column, weights.gate, weights.gate_scale, chosen)
            up = self._product(column, weights.up, weights.up_scale, chosen)
        gate_bias, up_bias = weights.gate_bias, weights.up_bias
        return self._biased(gate, gate_bias, chosen), self._biased(up, up_bias, chosen)

    def _halves(self, x: int) -> tuple[int, int]:
        struct = tensor_at(x)
        n, n_used, n_tokens = struct.ne[0] // 2, struct.ne[1], struct.ne[2]
        ne, nb = (n, n_used, n_tokens), (struct.nb[1], struct.nb[2])
        first = self._node("ggml_view_3d", x, *ne, *nb, 0)
        return first, self._node("ggml_view_3d", x, *ne, *nb, n * struct.nb[0])

    def _product(self, x: int, matrices: int, scales: int | None, chosen: int) -> int:
        """Each chosen expert's product ``[n, n_used, n_out]``, times its scale."""
        product = self._node("ggml_mul_mat_id", matrices, x, chosen)
        if scales is None:
            return product
        n_expert, (n_used, n) = self._nodes.ne(scales)[0], self._nodes.ne(chosen)[:2]
        column = self._node("ggml_reshape_3d", scales, 1, n_expert, 1)
        by_token = self._node("ggml_repeat_4d", column, 1, n_expert, n, 1)
        taken = self._node("ggml_get_rows", by_token, chosen)
        return self._node("ggml_mul", product, self._node("ggml_reshape_3d", taken, 1, n_used, n))

    def _biased(self, x: int, biases: int | None, chosen: int) -> int:
        """Each row of x plus the bias of its expert."""
        if biases is None:
            return x
        return self._node("ggml_add_id", x, self._nodes.f32(biases), chosen)

    def _sum(self, parts: int) -> int:
        """The sum over a token's experts, of ``[n, n_used, n_embd]``."""
        struct = tensor_at(parts)
        n_embd, n_used, n = struct.ne[:3]
        views = [
            self._node("ggml_view_2d", parts, n_embd, n, struct.nb[2], i * struct.nb[1])
            for i in range(n_used)
        ]
        total = views[0]
        for view in views[1:]:
            total = self._node("ggml_add", total, view)
        return total if n_used > 1 else self._node("ggml_cont", total)


_FLOAT = 4


class StateNodes:
    """Builds what recurrent layers do for plans of ``n_seqs`` sequences."""

    def __init__(
        self, target: Target, nodes: Nodes, store: GgmlStateStore, inputs: StateInputs
    ) -> None:
        self._api, _, self._graph = target
        self._nodes = nodes
        self._node = nodes.add
        self._store = store
        self._inputs = inputs
        self._n_seqs = nodes.ne(inputs.sources)[0]

    def short_conv(self, layer: int, x: int, weight: int) -> int:
        """See ``Ops.short_conv``; ``layer`` counts those with a state."""
        (d, n), n_seqs = self._nodes.ne(x)[:2], self._n_seqs
        k, state = self._nodes.ne(weight)[0], self._store.conv[layer]
        assert self._store.spec.layers[layer].n_conv == (k - 1) * d
        row = tensor_at(x).nb[1]
        steps = n // n_seqs
        by_seq = self._node("ggml_view_3d", x, d, steps, n_seqs, row, row * steps, 0)
        new = self._node("ggml_transpose", by_seq)
        if k == 1:
            inputs = self._node("ggml_cont", new)
        else:
            old = self._node("ggml_get_rows", state, self._inputs.sources)
            old = self._node("ggml_reshape_3d", old, k - 1, d, n_seqs)
            inputs = self._node("ggml_concat", old, new, 0)
            self._store_last(state, inputs, k - 1)
        out = self._node("ggml_ssm_conv", inputs, self._nodes.f32(weight))
        return self._node("ggml_reshape_2d", out, d, n)

    def ssm_scan(self, layer: int, x: int, dt: int, a: int, b: int, c: int) -> int:
        """See ``Ops.ssm_scan``; ``layer`` counts those with a state."""
        d, n_head, n = self._nodes.ne(x)[:3]
        d_state, state = self._nodes.ne(b)[0], self._store.ssm[layer]
        n_ssm = n_head * d * d_state
        assert self._store.spec.layers[layer].n_ssm == n_ssm
        rows = self._nodes.ne(state)[1]
        steps = n // self._n_seqs
        both = self._node(
            "ggml_ssm_scan",
            self._node("ggml_reshape_4d", state, d_state, d, n_head, rows),
            self._by_seq(x),
            self._node("ggml_reshape_3d", self._nodes.dense(dt), n_head, steps, self._n_seqs),
            self._nodes.f32(a),
            self._by_seq(b),
            self._by_seq(c),
            self._inputs.sources,
            1,  # only the last state
        )
        behind = d * n_head * n * _FLOAT
        row = n_ssm * _FLOAT
        new = self._node("ggml_view_2d", both, n_ssm, self._n_seqs, row, behind)
        self._scatter(state, new)
        head = d * _FLOAT
        return self._node("ggml_view_3d", both, d, n_head, n, head, head * n_head, 0)

    def _by_seq(self, x: int) -> int:
        """``[n, n_head, d]`` to ``[n_seqs, n / n_seqs, n_head, d]``, heads side by side."""
        struct = tensor_at(x)
        if struct.nb[1] != struct.ne[0] * struct.nb[0]:
            x = self._node("ggml_cont", x)
            struct = tensor_at(x)
        d, n_head, n = struct.ne[:3]
        steps, token = n // self._n_seqs, struct.nb[2]
        ne = (d, n_head, steps, self._n_seqs)
        return self._node("ggml_view_4d", x, *ne, struct.nb[1], token, token * steps, 0)

    def _store_last(self, state: int, inputs: int, n_last: int) -> None:
        """Leave the last inputs ``[n_seqs, d, n_last]`` in the target rows."""
        struct = tensor_at(inputs)
        n, d = struct.ne[:2]
        ne, nb = (n_last, d, self._n_seqs), (struct.nb[1], struct.nb[2])
        last = self._node("ggml_view_3d", inputs, *ne, *nb, (n - n_last) * _FLOAT)
        flat = self._node("ggml_cont", last)
        self._scatter(state, self._node("ggml_reshape_2d", flat, n_last * d, self._n_seqs))

    def _scatter(self, state: int, rows: int) -> None:
        written = self._node("ggml_set_rows", state, rows, self._inputs.targets)
        self._api.ggml_build_forward_expand(self._graph, written)


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
