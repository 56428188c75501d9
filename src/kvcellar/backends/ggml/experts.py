"""A mixture of experts as nodes of a ggml graph; see ``Ops.experts``."""

from __future__ import annotations

from kvcellar.backends.ggml.binding import tensor_at
from kvcellar.backends.ggml.nodes import Nodes
from kvcellar.backends.ggml.pieces import Pieces
from kvcellar.backends.operations import ExpertWeights, Routing

SMALLEST_SUM = 6.103515625e-5
"""What shares are divided by at least when they are made to sum to 1; float16's smallest normal."""
OAI_ALPHA = 1.702
OAI_LIMIT = 7.0


def mixture(
    pieces: Pieces, nodes: Nodes, x: int, weights: ExpertWeights[int], routing: Routing
) -> int:
    """The best experts of each token of ``[n, n_embd]``, weighted and summed."""
    n_embd, n = tensor_at(x).ne[:2]
    chosen, shares = _route(nodes, x, weights, routing)
    column = nodes.reshape_3d(nodes.dense(x), n_embd, 1, n)
    gate, up = _gate_and_up(pieces, nodes, column, weights, chosen)
    if routing.activation == "swiglu_oai":
        hidden = nodes.swiglu_oai(gate, up, OAI_ALPHA, OAI_LIMIT)
    else:
        hidden = nodes.swiglu_split(gate, up)
    parts = _product(pieces, nodes, hidden, weights.down, weights.down_scale, chosen)
    parts = _biased(nodes, parts, weights.down_bias, chosen)
    return _sum(nodes, nodes.mul(parts, shares))


def _route(nodes: Nodes, x: int, weights: ExpertWeights[int], routing: Routing) -> tuple[int, int]:
    """Chosen experts ``[n, n_used]`` and their shares ``[n, n_used, 1]``."""
    n_used = weights.n_used
    scores = nodes.mul_mat(weights.router, x)
    if weights.router_bias is not None:
        scores = nodes.add(scores, weights.router_bias)
    shares = scores
    if routing.gating == "softmax":
        shares = nodes.soft_max(scores)
    elif routing.gating == "sigmoid":
        shares = nodes.sigmoid(scores)
    by = shares
    if weights.choice_bias is not None:
        by = nodes.add(shares, weights.choice_bias)
    chosen = nodes.argsort_top_k(by, n_used)
    n_expert, n = tensor_at(shares).ne[:2]
    taken = nodes.get_rows(nodes.reshape_3d(shares, 1, n_expert, n), chosen)
    taken = nodes.reshape_2d(taken, n_used, n)
    if routing.gating == "softmax_chosen":
        taken = nodes.soft_max(taken)
    if routing.normalised:
        total = nodes.clamp(nodes.sum_rows(taken), SMALLEST_SUM, float("inf"))
        taken = nodes.div(taken, total)
    if routing.factor != 1.0:
        taken = nodes.scale(taken, routing.factor)
    return chosen, nodes.reshape_3d(taken, 1, n_used, n)


def _gate_and_up(
    pieces: Pieces, nodes: Nodes, column: int, weights: ExpertWeights[int], chosen: int
) -> tuple[int, int]:
    """Both ``[n, n_used, n_ff]``."""
    if weights.gate_up is not None:
        both = _product(pieces, nodes, column, weights.gate_up, weights.gate_up_scale, chosen)
        struct = tensor_at(both)
        ne, nb = (struct.ne[0] // 2, *struct.ne[1:3]), struct.nb[1:3]
        gate, up = (nodes.view_3d(both, *ne, *nb, i * ne[0] * struct.nb[0]) for i in range(2))
    else:
        assert weights.gate is not None
        assert weights.up is not None
        gate = _product(pieces, nodes, column, weights.gate, weights.gate_scale, chosen)
        up = _product(pieces, nodes, column, weights.up, weights.up_scale, chosen)
    gate = _biased(nodes, gate, weights.gate_bias, chosen)
    return gate, _biased(nodes, up, weights.up_bias, chosen)


def _product(
    pieces: Pieces, nodes: Nodes, x: int, matrices: int, scales: int | None, chosen: int
) -> int:
    """Each chosen expert's product ``[n, n_used, n_out]``, times its scale."""
    (n_in, n_out), (n_used, n) = tensor_at(matrices).ne[:2], tensor_at(chosen).ne[:2]

    def multiply(start: int, count: int) -> int:
        experts = pieces.columns(chosen, start, count)
        product = nodes.mul_mat_id(matrices, pieces.outer(x, start, count), experts)
        return nodes.reshape_2d(product, n_out * n_used, count)

    flat = pieces.join(n, 2 * n_in * n_out * n_used * n, multiply)
    product = nodes.reshape_3d(flat, n_out, n_used, n)
    if scales is None:
        return product
    n_expert = tensor_at(scales).ne[0]
    by_token = nodes.repeat_4d(nodes.reshape_3d(scales, 1, n_expert, 1), 1, n_expert, n, 1)
    taken = nodes.get_rows(by_token, chosen)
    return nodes.mul(product, nodes.reshape_3d(taken, 1, n_used, n))


def _biased(nodes: Nodes, x: int, biases: int | None, chosen: int) -> int:
    """Each row of x plus the bias of its expert."""
    return x if biases is None else nodes.add_id(x, nodes.f32(biases), chosen)


def _sum(nodes: Nodes, parts: int) -> int:
    """The sum over a token's experts, of ``[n, n_used, n_embd]``."""
    struct = tensor_at(parts)
    n_embd, n_used, n = struct.ne[:3]
    row = struct.nb[1:3]
    total, *others = (nodes.view_2d(parts, n_embd, n, row[1], i * row[0]) for i in range(n_used))
    for view in others:
        total = nodes.add(total, view)
    return total if others else nodes.cont(total)
