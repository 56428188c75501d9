"""The operations of model files as nodes of a ggml graph.

Tensors are C addresses. ggml counts axes from the innermost, so ``[n, n_head, d]`` here is
``ne = (d, n_head, n)`` there. Pieces of a tensor are views of it; they are copied only where a
function of ggml needs its values side by side.

Products with weights are computed by our own code where it suits, else by ggml; large ones in
pieces.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from functools import partial

from kvcellar.backends.ggml.attention_nodes import GroupAttention
from kvcellar.backends.ggml.binding import ALL_THREADS, TYPE_F32, TYPE_I32, tensor_at
from kvcellar.backends.ggml.experts import mixture
from kvcellar.backends.ggml.inputs import Inputs, StateInputs
from kvcellar.backends.ggml.jit.product import Products
from kvcellar.backends.ggml.jit.product_formats import FORMATS, RECORD, VALUES
from kvcellar.backends.ggml.model_memory import GgmlMemory
from kvcellar.backends.ggml.nodes import Nodes
from kvcellar.backends.ggml.pieces import Pieces
from kvcellar.backends.ggml.states import GgmlStateStore, short_conv, ssm_scan
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
        self,
        nodes: Nodes,
        inputs: Inputs,
        memory: GgmlMemory,
        plan: Plan,
        n_threads: int = 1,
    ) -> None:
        self._nodes = nodes
        self._pieces = pieces = Pieces(nodes, n_threads)
        self._inputs = inputs
        self._memory = memory
        self._has_ended = False
        self._records: dict[int, int] = {}  # by activations, which are quantised once for all
        parts = zip(memory.groups, inputs.groups, plan.groups, memory.kernels, strict=True)
        self._groups = [GroupAttention(pieces, nodes, *part) for part in parts]
        self.plan = plan

    def embed(self, table: int) -> int:
        """Rows of the table for the input tokens, or the input embeddings."""
        if self._inputs.embeddings is not None:
            return self._inputs.embeddings
        return self._nodes.get_rows(table, self._inputs.tokens)

    def linear(self, x: int, weight: int, bias: int | None = None) -> int:
        """``x @ weight.T + bias``."""
        ours, (n_in, n_out), n = (
            self._memory.products,
            tensor_at(weight).ne[:2],
            tensor_at(x).ne[1],
        )
        if ours is not None and ours.suits(tensor_at(x), tensor_at(weight)):
            multiply = partial(self._multiply, ours, self._record(ours, x), weight)
        else:
            multiply = partial(self._multiply_ggml, x, weight)
        y = self._pieces.join(n, 2 * n_in * n_out * n, multiply)
        return y if bias is None else self._nodes.add(y, bias)

    def rms_norm(self, x: int, weight: int, eps: float) -> int:
        """Root-mean-square normalisation over the last axis, times weight."""
        return self._nodes.mul(self._nodes.rms_norm(x, eps), weight)

    def heads(self, x: int, n_head: int) -> int:
        """``[n, n_head * d]`` to ``[n, n_head, d]``."""
        struct = tensor_at(x)
        d, n = struct.ne[0] // n_head, struct.ne[1]
        return self._nodes.view_3d(x, d, n_head, n, d * struct.nb[0], struct.nb[1], 0)

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
        place = self._memory.places[layer]
        return self._groups[place.group].attend(place.index, q, k, v, scale, softcap, sinks)

    def add(self, a: int, b: int) -> int:
        """Elementwise sum."""
        return self._nodes.add(a, b)

    def mul(self, a: int, b: int) -> int:
        """Elementwise product."""
        return self._nodes.mul(a, b)

    def scale(self, x: int, factor: float) -> int:
        """Multiply by a number."""
        return self._nodes.scale(self._nodes.dense(x), factor)

    def swiglu(self, gate: int, up: int) -> int:
        """``silu(gate) * up``."""
        return self._nodes.swiglu_split(self._nodes.even(gate), self._nodes.even(up))

    def experts(self, x: int, weights: ExpertWeights[int], routing: Routing = ROUTING) -> int:
        """The best ``n_used`` experts of each token, weighted."""
        return mixture(self._pieces, self._nodes, x, weights, routing)

    # -- norms and activations

    def layer_norm(self, x: int, weight: int, bias: int, eps: float) -> int:
        """Mean and variance normalisation over the last axis, times weight, plus bias."""
        return self._nodes.add(self._nodes.mul(self._nodes.norm(x, eps), weight), bias)

    def silu(self, x: int) -> int:
        """``x * sigmoid(x)``."""
        return self._nodes.silu(self._nodes.even(x))

    def gelu(self, x: int) -> int:
        """GELU by its tanh formula, which ggml looks up for x rounded to f16."""
        return self._nodes.gelu(self._nodes.even(x))

    def geglu(self, gate: int, up: int) -> int:
        """``gelu(gate) * up``."""
        return self._nodes.geglu_split(self._nodes.even(gate), self._nodes.even(up))

    def softcap(self, x: int, cap: float) -> int:
        """``cap * tanh(x / cap)``."""
        return self._nodes.softcap(x, cap)

    # -- shapes

    def merge(self, x: int) -> int:
        """``[n, n_head, d]`` to ``[n, n_head * d]``."""
        return self._nodes.flat(x)

    def split(self, x: int, sizes: Sequence[int]) -> list[int]:
        """Views of the last axis, of these sizes."""
        struct, pieces, start = tensor_at(x), [], 0
        for size in sizes:
            ne, nb = (size, *struct.ne[1:3]), struct.nb[1:3]
            pieces.append(self._nodes.view_3d(x, *ne, *nb, start * struct.nb[0]))
            start += size
        assert start == struct.ne[0], (list(sizes), struct.ne[0])
        return pieces

    def concat(self, parts: Sequence[int]) -> int:
        """Put side by side along the last axis."""
        joined, *others = parts
        for part in others:
            joined = self._nodes.concat(joined, part, 0)
        return joined

    def linear_heads(self, x: int, weight: int) -> int:
        """A product a head: x ``[n, n_head, n_in]``, weight ``[n_head, n_out, n_in]``."""
        by_head = self._nodes.permute(x, 0, 2, 1, 3)
        (n_in, n_out, n_head), n = tensor_at(weight).ne[:3], tensor_at(by_head).ne[1]
        multiply = partial(self._multiply_ggml, by_head, weight)
        product = self._pieces.join(n, 2 * n_in * n_out * n_head * n, multiply)
        return self._nodes.permute(product, 0, 2, 1, 3)

    def embed_positions(self, table: int) -> int:
        """Rows of the table for the input positions, which ``Feeds`` checks against it."""
        self.n_positions = tensor_at(table).ne[1]
        return self._nodes.get_rows(table, self._inputs.positions)

    # -- recurrent layers

    def short_conv(self, layer: int, x: int, weight: int) -> int:
        """Causal convolution of each channel along each sequence."""
        store, inputs = self._states()
        state = self._memory.places[layer].state
        return short_conv(self._nodes, store, inputs, state, x, weight)

    def ssm_scan(self, layer: int, x: int, dt: int, a: int, b: int, c: int) -> int:
        """Mamba's recurrence."""
        store, inputs = self._states()
        state = self._memory.places[layer].state
        return ssm_scan(self._nodes, store, inputs, state, (x, dt, a, b, c))

    def outputs(self, x: int) -> int:
        """The rows whose logits are wanted.

        The first x is what the last layer is given. A NaN anywhere before is in it still, though
        products with blocks of weights, and rows stored as blocks, may have made it 0.
        """
        if not self._has_ended:
            self._has_ended = True
            self._nodes.watch(x)
        if self._inputs.outputs is None:
            return x
        return self._nodes.get_rows(x, self._inputs.outputs)

    def _states(self) -> tuple[GgmlStateStore, StateInputs]:
        if self._memory.states is None or self._inputs.states is None:
            raise NotSupported("a recurrent layer, but a plan or a memory without states")
        return self._memory.states, self._inputs.states

    # -- products of some tokens

    def _multiply_ggml(self, x: int, weight: int, start: int, count: int) -> int:
        return self._nodes.mul_mat(weight, self._pieces.columns(x, start, count))

    def _record(self, ours: Products, x: int) -> int:
        """The activations as our own code takes them."""
        n = tensor_at(x).ne[1]
        if x not in self._records:
            width = tensor_at(x).ne[0] // VALUES * RECORD // c.sizeof(c.c_int32)
            record = self._custom(TYPE_I32, width, n, [x], ours.quantise(), None)
            self._nodes.api.ggml_set_name(record, b"QUANTISE")
            self._records[x] = record
        return self._records[x]

    def _multiply(self, ours: Products, record: int, weight: int, start: int, count: int) -> int:
        rows, function = tensor_at(weight), ours.multiply(tensor_at(weight), count)
        sources = [weight, self._pieces.columns(record, start, count)]
        node = self._custom(TYPE_F32, rows.ne[1], count, sources, function, ours.task)
        self._nodes.api.ggml_set_name(node, f"PRODUCT {FORMATS[rows.type].name}".encode())
        return node

    def _custom(
        self, kind: int, width: int, n: int, tensors: list[int], function: int, task: int | None
    ) -> int:
        sources = (c.c_void_p * len(tensors))(*tensors)
        shared = (len(tensors), function, ALL_THREADS, task)
        return self._nodes.custom_4d(kind, width, n, 1, 1, sources, *shared)
