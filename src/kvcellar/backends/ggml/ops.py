"""The operations of model files as nodes of a ggml graph.

Tensors are C addresses. ggml counts axes from the innermost, so ``[n, n_head, d]`` here is
``ne = (d, n_head, n)`` there. K and V are written by ``set_rows`` nodes that come before the
attention node in the graph; nodes run in order, so attention sees them.
"""

from __future__ import annotations

import ctypes as c

from kvcellar.backends.base import Part
from kvcellar.backends.ggml.binding import (
    ALL_THREADS,
    PREC_F32,
    TYPE_F32,
)
from kvcellar.backends.ggml.constants import Constants
from kvcellar.backends.ggml.inputs import Inputs, Target
from kvcellar.backends.ggml.kernel.attention import AttentionKernel
from kvcellar.backends.ggml.nodes import Nodes
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.ggml.weights import tensor_at
from kvcellar.backends.operations import ExpertWeights
from kvcellar.plan import Plan
from kvcellar.types import RopeSpec

MANY_TOKENS = 32
"""From so many tokens on, V that lies across is turned and flash attention takes it."""


class GgmlOps:
    """Builds a graph for microbatches of the plan's shape. Implements ``Ops[int]``.

    Attributes:
        plan: a plan of that shape.
    """

    def __init__(
        self,
        target: Target,
        inputs: Inputs,
        store: GgmlStore,
        constants: Constants,
        plan: Plan,
        kernel: AttentionKernel | None = None,
    ) -> None:
        self._api, self._context, self._graph = target
        self._inputs = inputs
        self._store = store
        self._nodes = Nodes(self._api, self._context, constants)
        self._node = self._nodes.add
        self._kernel = kernel
        self.plan = plan

    def embed(self, table: int) -> int:
        """Rows of the table for the input tokens, or the input embeddings."""
        if self._inputs.embeddings is not None:
            return self._inputs.embeddings
        return self._node("ggml_get_rows", table, self._inputs.tokens)

    def linear(self, x: int, weight: int, bias: int | None = None) -> int:
        """``x @ weight.T + bias``."""
        y = self._node("ggml_mul_mat", weight, x)
        return y if bias is None else self.add(y, bias)

    def rms_norm(self, x: int, weight: int, eps: float) -> int:
        """Root-mean-square normalisation over the last axis, times weight."""
        return self.mul(self._node("ggml_rms_norm", x, eps), weight)

    def heads(self, x: int, n_head: int) -> int:
        """``[n, n_head * d]`` to ``[n, n_head, d]``."""
        width, n = self._ne(x)[:2]
        return self._node("ggml_reshape_3d", x, width // n_head, n_head, n)

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
        """Write k and v to the input cells, then attend through the mask."""
        spec = self._store.spec
        assert v is not None
        q, k = (self._nodes.mix(x, spec.hadamard_k(layer)) for x in (q, k))
        self._write_rows(self._store.k[layer], k)
        if spec.v_trans:
            self._write_channels(self._store.v[layer], v)
            if self.plan.n_tokens < MANY_TOKENS:
                return self._attend_by_products(layer, q, scale)
            return self._attend_flash(layer, q, scale)
        self._write_rows(self._store.v[layer], self._nodes.mix(v, spec.hadamard_v(layer)))
        if self._kernel is not None:
            return self._attend_by_lists(self._kernel, layer, q, scale)
        return self._attend_flash(layer, q, scale)

    def add(self, a: int, b: int) -> int:
        """Elementwise sum."""
        return self._node("ggml_add", a, b)

    def mul(self, a: int, b: int) -> int:
        """Elementwise product."""
        return self._node("ggml_mul", a, b)

    def scale(self, x: int, factor: float) -> int:
        """Multiply by a number."""
        return self._node("ggml_scale", x, factor)

    def swiglu(self, gate: int, up: int) -> int:
        """``silu(gate) * up``."""
        return self._node("ggml_swiglu_split", gate, up)

    def experts(self, x: int, weights: ExpertWeights[int]) -> int:
        """The best ``n_used`` SwiGLU experts of each token, weighted."""
        n_embd, n = self._ne(x)[:2]
        chosen, shares = self._route(self.linear(x, weights.router), weights.n_used)
        column = self._node("ggml_reshape_3d", x, n_embd, 1, n)
        assert weights.gate is not None
        assert weights.up is not None
        hidden = self.swiglu(
            self._expert_product(column, weights.gate, weights.gate_scale, chosen),
            self._expert_product(column, weights.up, weights.up_scale, chosen),
        )
        parts = self._expert_product(hidden, weights.down, weights.down_scale, chosen)
        return self._sum_over_experts(self.mul(parts, shares), weights.n_used)

    def outputs(self, x: int) -> int:
        """The rows whose logits are wanted."""
        if self._inputs.outputs is None:
            return x
        return self._node("ggml_get_rows", x, self._inputs.outputs)

    def _route(self, scores: int, n_used: int) -> tuple[int, int]:
        """Chosen experts ``[n, n_used]`` and their weights ``[n, n_used, 1]``, summing to 1."""
        n_expert, n = self._ne(scores)[:2]
        shares = self._node("ggml_soft_max", scores)
        chosen = self._node("ggml_argsort_top_k", shares, n_used)
        column = self._node("ggml_reshape_3d", shares, 1, n_expert, n)
        taken = self._node("ggml_get_rows", column, chosen)
        flat = self._node("ggml_reshape_2d", taken, n_used, n)
        normal = self._node("ggml_div", flat, self._node("ggml_sum_rows", flat))
        return chosen, self._node("ggml_reshape_3d", normal, 1, n_used, n)

    def _expert_product(self, x: int, matrices: int, scales: int | None, chosen: int) -> int:
        """Each chosen expert's product ``[n, n_used, n_out]``, times its scale."""
        product = self._node("ggml_mul_mat_id", matrices, x, chosen)
        if scales is None:
            return product
        n_expert, (n_used, n) = self._ne(scales)[0], self._ne(chosen)[:2]
        column = self._node("ggml_reshape_3d", scales, 1, n_expert, 1)
        by_token = self._node("ggml_repeat_4d", column, 1, n_expert, n, 1)
        taken = self._node("ggml_get_rows", by_token, chosen)
        return self.mul(product, self._node("ggml_reshape_3d", taken, 1, n_used, n))

    def _sum_over_experts(self, parts: int, n_used: int) -> int:
        struct = tensor_at(parts)
        n_embd, n = struct.ne[0], struct.ne[2]
        views = [
            self._node("ggml_view_2d", parts, n_embd, n, struct.nb[2], i * struct.nb[1])
            for i in range(n_used)
        ]
        total = views[0]
        for view in views[1:]:
            total = self.add(total, view)
        return total if n_used > 1 else self._node("ggml_cont", total)

    def _write_rows(self, rows: int, x: int) -> None:
        """Scatter x ``[n, n_head, d]`` into a layer's rows, a row a cell."""
        d, n_head, n = self._ne(x)[:3]
        flat = self._node("ggml_reshape_2d", x, d * n_head, n)
        self._run_first(self._node("ggml_set_rows", rows, flat, self._inputs.cells))

    def _write_channels(self, values: int, x: int) -> None:
        """Scatter x ``[n, n_head, d]`` value by value into ``[n_embd_v, size]``."""
        d, n_head, n = self._ne(x)[:3]
        source = self._node("ggml_reshape_2d", x, 1, d * n_head * n)
        size, width = self._ne(values)[:2]
        target = self._node("ggml_reshape_2d", values, 1, size * width)
        self._run_first(self._node("ggml_set_rows", target, source, self._inputs.channels))

    def _run_first(self, node: int) -> None:
        """Put a node before all that are built later: nodes run in the graph's order."""
        self._api.ggml_build_forward_expand(self._graph, node)

    def _attend_flash(self, layer: int, q: int, scale: float) -> int:
        queries = self._node("ggml_permute", q, 0, 2, 1, 3)
        keys = self._rows_by_head(layer, "k")
        across = self._store.spec.v_trans
        values = self._turned(layer) if across else self._rows_by_head(layer, "v")
        mask = self._inputs.mask
        out = self._node("ggml_flash_attn_ext", queries, keys, values, mask, scale, 0.0, 0.0)
        self._api.ggml_flash_attn_ext_set_prec(out, PREC_F32)
        out = self._nodes.mix(out, self._store.spec.hadamard_v(layer))
        d, n_head, n = self._ne(out)[:3]
        return self._node("ggml_reshape_2d", out, d * n_head, n)

    def _attend_by_products(self, layer: int, q: int, scale: float) -> int:
        """Scores, softmax, weighted sum.

        The heads of a group are columns beside each other, so that K and V are read once a group.
        """
        d, n_head, n = self._ne(q)[:3]
        n_kv, n_group = self.plan.n_kv, n_head // self._store.spec.layers[layer].n_head_kv
        n_head_kv = n_head // n_group
        by_head = q if n == 1 else self._node("ggml_cont", self._swap(q))
        columns = self._node("ggml_reshape_3d", by_head, d, n * n_group, n_head_kv)
        scores = self._node("ggml_mul_mat", self._rows_by_head(layer, "k"), columns)
        by_head = self._node("ggml_reshape_3d", scores, n_kv, n, n_head)
        shares = self._node("ggml_soft_max_ext", by_head, self._inputs.mask, scale, 0.0)
        columns = self._node("ggml_reshape_3d", shares, n_kv, n * n_group, n_head_kv)
        out = self._node("ggml_mul_mat", self._channels_by_head(layer), columns)
        d_v = self._ne(out)[0]
        if n > 1:
            by_head = self._node("ggml_reshape_3d", out, d_v, n, n_head)
            out = self._node("ggml_cont", self._swap(by_head))
        return self._node("ggml_reshape_2d", out, d_v * n_head, n)

    def _attend_by_lists(self, kernel: AttentionKernel, layer: int, q: int, scale: float) -> int:
        """Our own kernel, over the cells of the plan's lists alone."""
        n_head, n = self._ne(q)[1:3]
        d_v = self._store.spec.layers[layer].head_dim_v
        function, task = kernel.function(layer, n_head), kernel.task(scale)
        sources = (c.c_void_p * 3)(q, self._store.k[layer], self._store.v[layer])
        shape = (TYPE_F32, d_v, n_head, n, 1)
        out = self._node(
            "ggml_custom_4d", *shape, sources, len(sources), function, ALL_THREADS, task
        )
        return self._node("ggml_reshape_2d", out, d_v * n_head, n)

    def _swap(self, x: int) -> int:
        """Swap the middle and outer axis."""
        return self._node("ggml_permute", x, 0, 2, 1, 3)

    def _rows_by_head(self, layer: int, part: Part) -> int:
        """The first n_kv rows of K or V, heads outside: ``[n_head_kv, n_kv, d]``."""
        spec, shape = self._store.spec, self._store.spec.layers[layer]
        if part == "k":
            rows, kind, d = self._store.k[layer], spec.type_k, shape.head_dim_k
        else:
            rows, kind, d = self._store.v[layer], spec.type_v, shape.head_dim_v
        row, head = kind.row_bytes(d * shape.n_head_kv), kind.row_bytes(d)
        n_kv = self.plan.n_kv
        return self._node("ggml_view_3d", rows, d, n_kv, shape.n_head_kv, row, head, 0)

    def _turned(self, layer: int) -> int:
        """A copy of V that lies across, turned to ``[n_head_kv, n_kv, d]``.

        Cheap beside the products of many tokens, which flash attention does better.
        """
        across = self._channels_by_head(layer)
        return self._node("ggml_cont", self._node("ggml_transpose", across))

    def _channels_by_head(self, layer: int) -> int:
        """V of the first n_kv cells lying across: ``[n_head_kv, d, n_kv]``."""
        values, shape = self._store.v[layer], self._store.spec.layers[layer]
        row, d = tensor_at(values).nb[1], shape.head_dim_v
        n_kv = self.plan.n_kv
        return self._node("ggml_view_3d", values, n_kv, d, shape.n_head_kv, row, row * d, 0)

    def _ne(self, tensor: int) -> tuple[int, ...]:
        return tuple(tensor_at(tensor).ne)
