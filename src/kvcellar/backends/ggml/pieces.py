"""Large products in pieces of some tokens each, so that a graph can end early at any time.

ggml looks between two nodes whether it should stop, and one node of many tokens may take seconds.
So where a node would compute for long, there are several, each for some of the tokens, and their
results are copied side by side. That costs a copy of the result, which is little beside what makes
it, and nothing for the graphs of few tokens: those have no pieces.
"""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Callable
from itertools import pairwise

from kvcellar.backends.ggml.binding import TYPE_F32, tensor_at
from kvcellar.backends.ggml.nodes import Nodes

WORK = 2**29
"""Operations that a thread may do in one node: some hundredths of a second."""
FEWEST = 64
"""Tokens that a piece has at least: kernels for many tokens are faster."""
MOST = 32
"""Pieces that a node becomes at most."""
NODES_PER_LAYER = 80
"""Nodes that one piece more costs a layer at most: a dozen products and attention."""
_I64 = 8


def most_pieces(n_tokens: int) -> int:
    """How many pieces nodes of that many tokens may become."""
    return min(MOST, max(1, n_tokens // FEWEST))


class Pieces:
    """Makes nodes of one graph in pieces.

    Args:
        nodes: what makes nodes.
        n_threads: how many share the work of a node.
    """

    def __init__(self, nodes: Nodes, n_threads: int) -> None:
        self._nodes = nodes
        self._n_threads = n_threads

    def join(self, n: int, n_operations: int, compute: Callable[[int, int], int]) -> int:
        """What ``compute(0, n)`` makes, in as many pieces as its work needs.

        Args:
            n: how many tokens.
            n_operations: multiplications and additions of it all.
            compute: from the first token and their number to f32 values ``[m, tokens, width]``.
        """
        wanted = -(-n_operations // (WORK * self._n_threads))
        n_pieces = min(wanted, most_pieces(n))
        if n_pieces <= 1:
            return compute(0, n)
        nodes, out = self._nodes, None
        order = nodes.order(n)
        for start, stop in pairwise(i * n // n_pieces for i in range(n_pieces + 1)):
            count = stop - start
            piece = nodes.even(compute(start, count))
            if out is None:
                width, _, m = tensor_at(piece).ne[:3]
                out = self._room(piece, width, n, m)
            rows = nodes.view_1d(order, count, start * _I64)
            out = nodes.set_rows(out, piece, rows)
        assert out is not None
        return out

    def _room(self, after: int, *ne: int) -> int:
        """A tensor of any values, which has its memory from that node on."""
        sources = (c.c_void_p * 1)(after)
        room = self._nodes.custom_4d(TYPE_F32, *ne, 1, sources, 1, _does_nothing(), 1, None)
        self._nodes.api.ggml_set_name(room, b"PIECES")
        return room

    def columns(self, x: int, start: int, count: int) -> int:
        """A view of some tokens of ``[m, tokens, width]``."""
        struct = tensor_at(x)
        width, n, m = struct.ne[:3]
        if (start, count) == (0, n):
            return x
        nb = struct.nb[1:3]
        return self._nodes.view_3d(x, width, count, m, *nb, start * nb[0])

    def outer(self, x: int, start: int, count: int) -> int:
        """A view of some tokens of ``[tokens, m, width]``."""
        struct = tensor_at(x)
        width, m, n = struct.ne[:3]
        if (start, count) == (0, n):
            return x
        nb = struct.nb[1:3]
        return self._nodes.view_3d(x, width, m, count, *nb, start * nb[1])


def _does_nothing() -> int:
    """The address of a C function that may be called with any arguments."""
    library = c.CDLL("msvcrt") if os.name == "nt" else c.CDLL(None)
    address = c.cast(library.abs, c.c_void_p).value
    assert address is not None
    return address
