"""Attention as nodes of a ggml graph: K and V go to their cells, then queries meet the cells.

K and V are written by ``set_rows`` nodes that come before the attention node in the graph; nodes
run in order, so attention sees them. There are three ways to attend: ggml's flash attention, plain
products where V lies across and there are few tokens, and our own kernel where the plan has lists.
Where V is part of K it is read there, and never lies across.
"""

from __future__ import annotations

import ctypes as c

from kvcellar.backends.ggml.binding import ALL_THREADS, PREC_F32, TYPE_F32
from kvcellar.backends.ggml.gguf import tensor_at
from kvcellar.backends.ggml.inputs import GroupInputs, Target
from kvcellar.backends.ggml.jit.attention import AttentionKernel
from kvcellar.backends.ggml.nodes import Nodes
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.errors import NotSupported
from kvcellar.plan import CellPlan

MANY_TOKENS = 32
"""From so many tokens on, V that lies across is turned and flash attention takes it."""


class AttentionNodes:
    """Builds the attention of one group of layers.

    Args:
        target: where.
        nodes: what makes nodes there.
        store: the group's K and V.
        inputs: the group's input tensors.
        plan: the group's part of a plan of the graph's shape.
        kernel: what attends over lists, if the plan may have them.

    Raises:
        NotSupported: lists without a kernel.
    """

    def __init__(
        self,
        target: Target,
        nodes: Nodes,
        store: GgmlStore,
        inputs: GroupInputs,
        plan: CellPlan,
        kernel: AttentionKernel | None,
    ) -> None:
        if plan.lists is not None and kernel is None:
            raise NotSupported("a plan with lists of cells, but no kernel that reads them")
        self._api, _, self._graph = target
        self._nodes = nodes
        self._node = nodes.add
        self._store = store
        self._inputs = inputs
        self._plan = plan
        self._kernel = None if plan.lists is None else kernel

    def attend(
        self,
        layer: int,
        q: int,
        k: int,
        v: int | None,
        scale: float,
        softcap: float,
        sinks: int | None,
    ) -> int:
        """Write k and v to the input cells, then attend; ``[n, n_head * d_v]``.

        ``layer`` counts those of the group; the rest is as in ``Ops.attention``.
        """
        spec, shape = self._store.spec, self._store.spec.layers[layer]
        assert (v is None) == (shape.v_offset is not None), "v is given unless it is part of k"
        q, k = (self._nodes.mix(x, spec.hadamard_k(layer)) for x in (q, k))
        self._write_rows(self._store.k[layer], k)
        across = spec.v_trans and shape.v_offset is None
        if v is not None and across:
            self._write_channels(self._store.v[layer], v)
        elif v is not None:
            self._write_rows(self._store.v[layer], self._nodes.mix(v, spec.hadamard_v(layer)))
        if self._kernel is not None:
            return self._attend_by_lists(self._kernel, layer, q, scale, softcap, sinks)
        if across and len(self._plan.cells) < MANY_TOKENS:
            return self._attend_by_products(layer, q, scale, softcap, sinks)
        return self._attend_flash(layer, q, scale, softcap, sinks)

    def _write_rows(self, rows: int, x: int) -> None:
        """Scatter x ``[n, n_head, d]`` into a layer's rows, a row a cell."""
        d, n_head, n = self._nodes.ne(x)[:3]
        flat = self._node("ggml_reshape_2d", self._nodes.dense(x), d * n_head, n)
        self._run_first(self._node("ggml_set_rows", rows, flat, self._inputs.cells))

    def _write_channels(self, values: int, x: int) -> None:
        """Scatter x ``[n, n_head, d]`` value by value into ``[n_embd_v, size]``."""
        d, n_head, n = self._nodes.ne(x)[:3]
        source = self._node("ggml_reshape_2d", self._nodes.dense(x), 1, d * n_head * n)
        size, width = self._nodes.ne(values)[:2]
        target = self._node("ggml_reshape_2d", values, 1, size * width)
        self._run_first(self._node("ggml_set_rows", target, source, self._inputs.channels))

    def _run_first(self, node: int) -> None:
        """Put a node before all that are built later: nodes run in the graph's order."""
        self._api.ggml_build_forward_expand(self._graph, node)

    def _attend_flash(
        self, layer: int, q: int, scale: float, softcap: float, sinks: int | None
    ) -> int:
        spec, shape = self._store.spec, self._store.spec.layers[layer]
        in_k = shape.v_offset is not None
        keys = self._keys_by_head(layer, 0, shape.head_dim_k)
        values = self._turned(layer) if spec.v_trans and not in_k else self._values_by_head(layer)
        mask = self._inputs.mask
        out = self._node(
            "ggml_flash_attn_ext", self._swap(q), keys, values, mask, scale, 0.0, softcap
        )
        self._api.ggml_flash_attn_ext_set_prec(out, PREC_F32)
        if sinks is not None:
            self._api.ggml_flash_attn_ext_add_sinks(out, sinks)
        mixed = spec.hadamard_k(layer) if in_k else spec.hadamard_v(layer)
        return self._flat(self._nodes.mix(out, mixed))

    def _attend_by_products(
        self, layer: int, q: int, scale: float, softcap: float, sinks: int | None
    ) -> int:
        """Scores, softmax, weighted sum.

        The heads of a group are columns beside each other, so that K and V are read once a group.
        """
        shape, n_kv = self._store.spec.layers[layer], self._plan.n_kv
        d, n_head, n = self._nodes.ne(q)[:3]
        n_columns = n * n_head // shape.n_head_kv
        by_head = self._nodes.dense(q if n == 1 else self._swap(q))
        columns = self._node("ggml_reshape_3d", by_head, d, n_columns, shape.n_head_kv)
        scores = self._node("ggml_mul_mat", self._keys_by_head(layer, 0, d), columns)
        if softcap:
            scores, scale = self._nodes.softcap(scores, softcap, scale), 1.0
        by_head = self._node("ggml_reshape_3d", scores, n_kv, n, n_head)
        shares = self._node("ggml_soft_max_ext", by_head, self._inputs.mask, scale, 0.0)
        if sinks is not None:
            self._api.ggml_soft_max_add_sinks(shares, sinks)
        columns = self._node("ggml_reshape_3d", shares, n_kv, n_columns, shape.n_head_kv)
        out = self._node("ggml_mul_mat", self._channels_by_head(layer), columns)
        if n > 1:
            by_head = self._node("ggml_reshape_3d", out, shape.head_dim_v, n, n_head)
            out = self._node("ggml_cont", self._swap(by_head))
        return self._node("ggml_reshape_2d", out, shape.head_dim_v * n_head, n)

    def _attend_by_lists(
        self,
        kernel: AttentionKernel,
        layer: int,
        q: int,
        scale: float,
        softcap: float,
        sinks: int | None,
    ) -> int:
        """Our own kernel, over the cells of the plan's lists alone."""
        n_head, n = self._nodes.ne(q)[1:3]
        spec, d_v = self._store.spec, self._store.spec.layers[layer].head_dim_v
        capped, sunk = bool(softcap), sinks is not None
        function = kernel.function(layer, n_head, softcap=capped, sinks=sunk)
        task = kernel.task(scale, softcap)
        tensors = [q, self._store.k[layer], self._store.v[layer]]
        if sinks is not None:
            tensors.append(self._nodes.f32(sinks))
        sources = (c.c_void_p * len(tensors))(*tensors)
        shape, shared = (TYPE_F32, d_v, n_head, n, 1), (function, ALL_THREADS, task)
        out = self._node("ggml_custom_4d", *shape, sources, len(tensors), *shared)
        return self._flat(self._nodes.mix(out, spec.hadamard_v(layer)))

    def _flat(self, x: int) -> int:
        """``[n, n_head, d]`` to ``[n, n_head * d]``."""
        d, n_head, n = self._nodes.ne(x)[:3]
        return self._node("ggml_reshape_2d", x, d * n_head, n)

    def _swap(self, x: int) -> int:
        """Swap the middle and outer axis."""
        return self._node("ggml_permute", x, 0, 2, 1, 3)

    def _keys_by_head(self, layer: int, offset: int, d: int) -> int:
        """Of each K head d values from an offset on, first n_kv cells, heads outside."""
        spec, shape = self._store.spec, self._store.spec.layers[layer]
        row, head = (spec.type_k.row_bytes(n) for n in (shape.n_embd_k, shape.head_dim_k))
        ne = (d, self._plan.n_kv, shape.n_head_kv)
        start = spec.type_k.row_bytes(offset)
        return self._node("ggml_view_3d", self._store.k[layer], *ne, row, head, start)

    def _values_by_head(self, layer: int) -> int:
        """V that lies by rows: ``[n_head_kv, n_kv, d]``."""
        spec, shape = self._store.spec, self._store.spec.layers[layer]
        if shape.v_offset is not None:
            return self._keys_by_head(layer, shape.v_offset, shape.head_dim_v)
        row, head = (spec.type_v.row_bytes(n) for n in (shape.n_embd_v, shape.head_dim_v))
        ne = (shape.head_dim_v, self._plan.n_kv, shape.n_head_kv)
        return self._node("ggml_view_3d", self._store.v[layer], *ne, row, head, 0)

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
        ne = (self._plan.n_kv, d, shape.n_head_kv)
        return self._node("ggml_view_3d", values, *ne, row, row * d, 0)
