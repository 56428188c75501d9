"""What can be asked of a cache that keeps account of its cells in a table."""

from __future__ import annotations

from kvcellar.cache.view import CacheView
from kvcellar.cells import CellTable
from kvcellar.types import Int32Array


class Tabled:
    """Questions about cells and positions, answered from ``table``."""

    table: CellTable

    @property
    def used(self) -> int:
        """How many cells have an owner."""
        return self.table.used

    @property
    def token_count(self) -> int:
        """The sum of owners over cells: a shared cell counts once for each."""
        return self.table.token_count

    @property
    def head(self) -> int:
        """Where the next search for free cells starts."""
        return self.table.head

    def cell_max(self) -> int:
        """The index behind the last used cell."""
        return self.table.cell_max()

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position of a sequence, -1 when it is empty."""
        return self.table.seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position of a sequence, -1 when it is empty."""
        return self.table.seq_pos_max(seq_id)

    def n_free(self) -> int:
        """How many cells may be filled."""
        return self.table.n_free()

    def seq_count(self, seq_id: int) -> int:
        """How many tokens of a sequence are held."""
        return self.table.seq_count(seq_id)

    def seq_tokens(self, seq_id: int) -> Int32Array:
        """Their ids in the order of their positions; -1 where an embedding was decoded."""
        return self.table.tokens_of(seq_id)

    def seq_positions(self, seq_id: int) -> Int32Array:
        """Where they stand, ascending."""
        at: Int32Array = self.table.positions[self.table.cells_of(seq_id)]
        return at

    def view(self, n_seq_max: int | None = None) -> CacheView:
        """The state of all cells as a value, with at most n_seq_max owners shown a cell."""
        return CacheView.of(self.table, n_seq_max)

    def check(self) -> None:
        """Prove invariants 1 to 4; see :mod:`kvcellar.cells`."""
        self.table.check()
