"""What may follow a text: the protocol of grammars and of whatever else limits the next token.

A :class:`Constraint` follows one text, from the first token that is generated. A sampler masks
logits by ``allowed()`` before all else, and hands over what it drew by ``accept()``.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kvcellar.types import BoolArray


@runtime_checkable
class Constraint(Protocol):
    """Limit the tokens that may come next."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing but a stop token can follow."""

    def allowed(self) -> BoolArray:
        """Return which tokens may come next: ``[n_vocab]``, not to be written to."""

    def accept(self, token: int) -> None:
        """Append a token; one that is not allowed is refused, and changes nothing."""

    def copy(self) -> Constraint:
        """Return an independent constraint in the same state, for a text that is forked."""
