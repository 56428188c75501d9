"""Blocks that wait: in memory, in a file, and when there is no room for them."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.prompts.cache import PromptCache, Spool
from kvcellar.runtime.context import Context
from kvcellar.stores.memory import MemoryStore
from tests.prompts.helpers import BLOCK, keys
from tests.runtime.archs import F32, fresh, opened, text


@given(
    blocks=st.lists(st.binary(max_size=20), max_size=12), in_memory=st.sampled_from([1, 30, 999])
)
def test_gives_back_what_it_was_given(blocks: list[bytes], in_memory: int) -> None:
    with Spool(in_memory) as spool:
        for i, block in enumerate(blocks):
            spool.add(i, block)
            assert spool.get(i) == block
        assert [spool.get(i) for i in reversed(range(len(blocks)))] == blocks[::-1]
        assert spool.get(len(blocks)) is None
        spool.check()


def test_much_waits_in_a_file() -> None:
    with Spool(in_memory=1000) as spool:
        spool.add(0, bytes(900))
        assert not spool._file._rolled  # type: ignore[attr-defined]
        spool.add(1, bytes(900))
        assert spool._file._rolled  # type: ignore[attr-defined]


def _no_room(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_without_room_the_text_is_there_nevertheless(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could wait is stored: it is the beginning of the text."""
    tokens, store = text(1, 5 * BLOCK), MemoryStore()
    prompts = PromptCache(store, block_size=BLOCK)
    with opened(shared, "mamba-dense", **F32) as context:
        sequence = context.sequence()
        monkeypatch.setattr("kvcellar.prompts.cache.IN_MEMORY", 1)
        monkeypatch.setattr(Spool, "add", _after(2, Spool.add, monkeypatch))
        prompts.append(sequence, tokens)
        assert re.search(r"No space left.*TMPDIR", str(prompts.trouble))
        assert sequence.tokens == tokens
        assert len(keys(store)) == 2
        monkeypatch.undo()
        assert _reused(context, prompts, tokens) == 2 * BLOCK
        assert abs(sequence.logits - fresh(context, tokens)).max() < 1e-3


def _after(n: int, add: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Adding, the disk being full from the n-th time on."""
    count = [0]

    def adding(spool: Spool, i: int, data: bytes) -> None:
        count[0] += 1
        if count[0] > n:
            monkeypatch.setattr(spool._file, "write", _no_room, raising=False)
        add(spool, i, data)

    return adding


def _reused(context: Context, prompts: PromptCache, tokens: list[int]) -> int:
    with context.sequence() as sequence:
        return prompts.append(sequence, tokens).n_reused


def test_its_file_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Spool(in_memory=1) as spool:
        spool.add(0, bytes(99))
        file = spool._file
    assert file.closed
    assert list(tmp_path.iterdir()) == []
