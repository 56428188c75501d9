"""Mixtures of experts as nodes of a ggml graph."""

from __future__ import annotations

from kvcellar.backends.ggml.nodes import Nodes
from kvcellar.backends.ggml.weights import tensor_at
from kvcellar.backends.operations import ExpertWeights, Routing

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
