"""Recurrent layers as nodes of a ggml graph: states are gathered by row and scattered by row.

A row may be read and written by one graph. What reads it comes before what writes it, since the
node that writes is made of the node that read; and it is put into the graph at once, for nothing
else depends on it. The rows are inputs, so a graph serves every plan of its shape.
"""

from __future__ import annotations

from kvcellar.backends.ggml.inputs import StateInputs, Target
from kvcellar.backends.ggml.nodes import Nodes
from kvcellar.backends.ggml.states import GgmlStateStore
from kvcellar.backends.ggml.weights import tensor_at

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
