"""Contexts, stores and counts for the tests of the cache of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvcellar.errors import StoreError
from kvcellar.prompts.cache import CacheHit, PromptCache
from kvcellar.runtime.context import Context
from kvcellar.runtime.sequence import Sequence as Text
from kvcellar.stores.base import BytesLike, Note
from kvcellar.stores.memory import MemoryStore
from kvcellar.types import Float32Array
from tests.runtime.archs import F32

BLOCK = 16
SIZES: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 4, "n_ubatch": 16, **F32}


def n_computed(context: Context) -> int:
    """How many tokens a context has decoded since it was made."""
    return context.timings.prefill_tokens + context.timings.decode_tokens


def append(
    prompts: PromptCache, context: Context, tokens: Sequence[int] | str
) -> tuple[CacheHit, Float32Array, Text]:
    """A new sequence with a text: what was reused, and its logits.

    Exactly the tokens that were not reused have been decoded.
    """
    before, sequence = n_computed(context), context.sequence()
    hit = prompts.append(sequence, tokens)
    assert n_computed(context) - before == hit.n_tokens - hit.n_reused
    logits = sequence.logits
    assert n_computed(context) - before == hit.n_tokens - hit.n_reused
    context.cache.check()
    return hit, logits, sequence


def n_reused(prompts: PromptCache, context: Context, tokens: Sequence[int]) -> int:
    """How many tokens of a text could be restored; nothing is computed and nothing stored."""
    with context.sequence() as sequence:
        hit = prompts.restore(sequence, tokens)
        assert len(sequence) == hit.n_reused
        assert sequence.tokens == list(tokens)[: hit.n_reused]
        return hit.n_reused


def why(prompts: PromptCache, context: Context, tokens: Sequence[int]) -> tuple[str, int]:
    """Why no more of a text can be restored, and from which token on."""
    with context.sequence() as sequence:
        found = prompts.restore(sequence, tokens).why
        assert found is not None
        assert str(found.token) in str(found) or found.cause in ("other model", "other types")
        return found.cause, found.token


def keys(store: MemoryStore) -> list[str]:
    """The keys of all blocks, those used longest ago first."""
    return [entry.key for entry in store.entries() if "absent" not in entry.note]


class FailingStore(MemoryStore):
    """Fails as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: tuple[str, ...] = ()

    def put(self, key: str, value: Sequence[BytesLike], note: Note | None = None) -> bool:
        if "full" in self.fails:
            return False
        self._fail("put")
        return super().put(key, value, note)

    def get(self, key: str) -> BytesLike | None:
        self._fail("get")
        return super().get(key)

    def has(self, key: str) -> bool:
        self._fail("has")
        return super().has(key)

    def touch(self, key: str) -> bool:
        self._fail("touch")
        return super().touch(key)

    def touch_all(self, keys: Sequence[str]) -> set[str]:
        self._fail("touch")
        return super().touch_all(keys)

    def delete(self, key: str) -> bool:
        self._fail("delete")
        return super().delete(key)

    def _fail(self, verb: str) -> None:
        if verb in self.fails:
            raise StoreError(f"{verb} fails")


@contextmanager
def failing(store: FailingStore, *verbs: str) -> Iterator[None]:
    """Let verbs fail for a while."""
    store.fails = verbs
    yield
    store.fails = ()
