"""Attention as nodes of a ggml graph: K and V go to their cells, then queries meet the cells.

K and V are written by ``set_rows`` nodes that come before the attention node in the graph; nodes
run in order, so attention sees them. There are three ways to attend: ggml's flash attention, plain
products where V is transposed and there are few tokens, and our own kernel where the plan has
lists. Where V is part of K it is read there, and never transposed.
"""

from __future__ import annotations

import ctypes as c

from kvcellar.backends.ggml.binding import ALL_THREADS, PREC_F32, TYPE_F32, tensor_at
from kvcellar.backends.ggml.inputs import GroupInputs
from kvcellar.backends.ggml.jit.attention import AttentionKernel
from kvcellar.backends.ggml.nodes import Nodes
from kvcellar.backends.ggml.pieces import Pieces
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.errors import NotSupported
from kvcellar.plan import CellPlan

MANY_TOKENS = 32
"""From this many tokens on, transposed V is copied by rows and flash attention takes it."""


class GroupAttention:
    """Makes the attention of one group of layers.

    Args:
        pieces: what makes large nodes in pieces.
        nodes: what makes nodes.
        store: the group's K and V.
        inputs: the group's input tensors.
        plan: the group's part of a plan of the graph's shape.
        kernel: what attends over lists, if the plan may have them.

    Raises:
        NotSupported: lists without a kernel.
    """

    def __init__(
        self,
        pieces: Pieces,
        nodes: Nodes,
        store: GgmlStore,
        inputs: GroupInputs,
        plan: CellPlan,
        kernel: AttentionKernel | None,
    ) -> None:
        if plan.lists is not None and kernel is None:
            raise NotSupported("a plan with lists of cells, but no kernel that reads them")
        self._pieces = pieces
        self._nodes = nodes
        self._store = store
        self._inputs = inputs
        self._n_tokens = len(plan.cells)
        self._n_kv = plan.n_kv
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
        nodes, store, spec = self._nodes, self._store, self._store.spec
        v_offset, mixed = spec.layers[layer].v_offset, spec.hadamard_k(layer)
        assert (v is None) == (v_offset is not None), "v is given unless it is part of k"
        q, k = nodes.mix(q, mixed), nodes.mix(k, mixed)
        self._write_rows(store.k[layer], k)
        transposed = spec.v_trans and v_offset is None
        if v is not None and transposed:
            self._write_channels(store.v[layer], v)
        elif v is not None:
            self._write_rows(store.v[layer], nodes.mix(v, spec.hadamard_v(layer)))
        if self._kernel is not None:
            return self._attend_by_lists(self._kernel, layer, q, scale, softcap, sinks)
        if transposed and self._n_tokens < MANY_TOKENS:
            return self._attend_by_products(layer, q, scale, softcap, sinks)
        return self._attend_flash(layer, q, scale, softcap, sinks)

    def _write_rows(self, rows: int, x: int) -> None:
        """Scatter x ``[n, n_head, d]`` into a layer's rows, a row a cell."""
        nodes = self._nodes
        nodes.run_first(nodes.set_rows(rows, nodes.flat(x), self._inputs.cells))

    def _write_channels(self, values: int, x: int) -> None:
        """Scatter x ``[n, n_head, d]`` value by value into ``[n_embd_v, size]``."""
        nodes = self._nodes
        d, n_head, n = tensor_at(x).ne[:3]
        source = nodes.reshape_2d(nodes.dense(x), 1, d * n_head * n)
        size, width = tensor_at(values).ne[:2]
        target = nodes.reshape_2d(values, 1, size * width)
        nodes.run_first(nodes.set_rows(target, source, self._inputs.channels))

    def _attend_flash(
        self, layer: int, q: int, scale: float, softcap: float, sinks: int | None
    ) -> int:
        nodes, spec = self._nodes, self._store.spec
        shape, mixed = spec.layers[layer], spec.hadamard_v(layer)
        keys = self._keys_by_head(layer, 0, shape.head_dim_k)
        if shape.v_offset is not None:
            values = self._keys_by_head(layer, shape.v_offset, shape.head_dim_v)
            mixed = spec.hadamard_k(layer)
        elif spec.v_trans:  # the copy is cheap beside the products of many tokens
            values = nodes.cont(nodes.transpose(self._channels_by_head(layer)))
        else:
            values = self._values_by_head(layer)
        mask, pieces, n_head = self._inputs.mask, self._pieces, tensor_at(q).ne[1]
        assert mask is not None, "a plan without lists has a mask"

        def attend(start: int, count: int) -> int:
            queries = nodes.permute(pieces.outer(q, start, count), 0, 2, 1, 3)
            seen = pieces.columns(mask, start, count)
            out = nodes.flash_attn_ext(queries, keys, values, seen, scale, 0.0, softcap)
            nodes.api.ggml_flash_attn_ext_set_prec(out, PREC_F32)
            if sinks is not None:
                nodes.api.ggml_flash_attn_ext_add_sinks(out, sinks)
            return nodes.reshape_2d(out, shape.head_dim_v * n_head, count)

        d, n = shape.head_dim_k + shape.head_dim_v, self._n_tokens
        flat = pieces.join(n, 2 * d * n_head * self._n_kv * n, attend)
        out = nodes.reshape_3d(flat, shape.head_dim_v, n_head, n)
        return nodes.flat(nodes.mix(out, mixed))

    def _attend_by_products(
        self, layer: int, q: int, scale: float, softcap: float, sinks: int | None
    ) -> int:
        """Scores, softmax, weighted sum.

        The heads of a group are columns beside each other, so that K and V are read once a group.
        """
        nodes, shape, n_kv = self._nodes, self._store.spec.layers[layer], self._n_kv
        d, n_head, n = tensor_at(q).ne[:3]
        n_columns = n * n_head // shape.n_head_kv
        by_head = nodes.dense(q if n == 1 else nodes.permute(q, 0, 2, 1, 3))
        columns = nodes.reshape_3d(by_head, d, n_columns, shape.n_head_kv)
        scores = nodes.mul_mat(self._keys_by_head(layer, 0, d), columns)
        if softcap:
            scores, scale = nodes.softcap(scores, softcap, scale), 1.0
        by_head = nodes.reshape_3d(scores, n_kv, n, n_head)
        shares = nodes.soft_max_ext(by_head, self._inputs.mask, scale, 0.0)
        if sinks is not None:
            nodes.api.ggml_soft_max_add_sinks(shares, sinks)
        columns = nodes.reshape_3d(shares, n_kv, n_columns, shape.n_head_kv)
        out = nodes.mul_mat(self._channels_by_head(layer), columns)
        if n > 1:
            by_head = nodes.reshape_3d(out, shape.head_dim_v, n, n_head)
            out = nodes.cont(nodes.permute(by_head, 0, 2, 1, 3))
        return nodes.reshape_2d(out, shape.head_dim_v * n_head, n)

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
        nodes, spec = self._nodes, self._store.spec
        n_head, n = tensor_at(q).ne[1:3]
        capped, sunk = bool(softcap), sinks is not None
        function = kernel.function(layer, n_head, softcap=capped, sinks=sunk)
        task = kernel.task(scale, softcap)
        tensors = [q, self._store.k[layer], self._store.v[layer]]
        if sinks is not None:
            tensors.append(nodes.f32(sinks))
        sources = (c.c_void_p * len(tensors))(*tensors)
        shape, shared = (spec.layers[layer].head_dim_v, n_head, n, 1), (function, ALL_THREADS, task)
        out = nodes.custom_4d(TYPE_F32, *shape, sources, len(tensors), *shared)
        return nodes.flat(nodes.mix(out, spec.hadamard_v(layer)))

    def _keys_by_head(self, layer: int, offset: int, d: int) -> int:
        """For each K head, d values from an offset on, of the first n_kv cells; heads outside."""
        kind, shape = self._store.spec.type_k, self._store.spec.layers[layer]
        row, head = kind.row_bytes(shape.n_embd_k), kind.row_bytes(shape.head_dim_k)
        ne = (d, self._n_kv, shape.n_head_kv)
        return self._nodes.view_3d(self._store.k[layer], *ne, row, head, kind.row_bytes(offset))

    def _values_by_head(self, layer: int) -> int:
        """V of the first n_kv cells, stored by rows: ``[n_head_kv, n_kv, d]``."""
        kind, shape = self._store.spec.type_v, self._store.spec.layers[layer]
        row, head = kind.row_bytes(shape.n_embd_v), kind.row_bytes(shape.head_dim_v)
        ne = (shape.head_dim_v, self._n_kv, shape.n_head_kv)
        return self._nodes.view_3d(self._store.v[layer], *ne, row, head, 0)

    def _channels_by_head(self, layer: int) -> int:
        """V of the first n_kv cells, stored transposed: ``[n_head_kv, d, n_kv]``."""
        values, shape = self._store.v[layer], self._store.spec.layers[layer]
        row, d = tensor_at(values).nb[1], shape.head_dim_v
        ne = (self._n_kv, d, shape.n_head_kv)
        return self._nodes.view_3d(values, *ne, row, row * d, 0)
