"""Products with weights as nodes of a ggml graph: our own code where it suits, else ggml's."""

from __future__ import annotations

import ctypes as c

from kvcellar.backends.ggml.binding import ALL_THREADS, TYPE_F32, TYPE_I32, Ggml
from kvcellar.backends.ggml.nodes import Nodes
from kvcellar.backends.ggml.product.format import FORMATS, RECORD, VALUES
from kvcellar.backends.ggml.product.products import Products
from kvcellar.backends.ggml.weights import tensor_at


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
