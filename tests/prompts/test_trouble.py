"""A cache of prompts when there is no room, when its store fails, and when many use it at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from kvcellar.batch import Batch
from kvcellar.errors import CacheFull, ClosedError, StoreError
from kvcellar.prompts.cache import PromptCache
from kvcellar.prompts.misses import Miss
from kvcellar.runtime.context import Context
from kvcellar.stores.base import BytesLike
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.memory import MemoryStore
from kvcellar.stores.redis import RedisStore
from kvcellar.testing.golden import nmse
from kvcellar.types import Float32Array
from tests.disks import DISKS
from tests.prompts.helpers import BLOCK, SIZES, FailingStore, append, failing, keys, n_reused
from tests.prompts.worker import shared_text
from tests.runtime.archs import F32, SAME, fresh, opened, text
from tests.stores.conftest import running_redis
from tests.stores.fake_redis import GARBAGE, Proxy, serving

TOKENS = text(1, 70)
KINDS = ["llama-dense", "gemma3-dense", "jamba-dense", "mamba-dense"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=KINDS)
def context(request: pytest.FixtureRequest, shared: Path) -> Iterator[Context]:
    with opened(shared, request.param, **F32) as made:
        yield made


# -- no room


@pytest.mark.parametrize("arch", KINDS[:3])
@pytest.mark.parametrize("n_taken", [100, 50])
def test_without_room_nothing_has_changed(shared: Path, arch: str, n_taken: int) -> None:
    """Whether it is missing for what was stored (100 of 128 are taken) or for the rest (50)."""
    prompts = PromptCache(MemoryStore(), block_size=BLOCK)
    with (
        opened(shared, arch, **F32) as large,
        large.model.context(**{**SIZES, "n_ctx": 128, "n_seq_max": 2}) as small,
    ):
        append(prompts, large, TOKENS)
        other = small.sequence(text(2, n_taken))
        sequence = small.sequence()
        with pytest.raises(CacheFull):
            prompts.append(sequence, TOKENS + text(3, 30))
        assert (len(sequence), sequence.tokens, small.cache.used) == (0, [], n_taken)
        small.cache.check()
        assert prompts.append(sequence, TOKENS[:20]).n_reused == 16
        assert nmse(sequence.logits, fresh(large, TOKENS[:20])) < SAME
        with pytest.raises(CacheFull):
            prompts.append(sequence, text(3, 70))
        assert sequence.tokens == TOKENS[:20]
        sequence.append([3])
        other.append([4])
        assert nmse(sequence.logits, fresh(large, [*TOKENS[:20], 3])) < SAME
        assert nmse(other.logits, fresh(large, [*text(2, n_taken), 4])) < SAME


def test_restoring_without_room_leaves_it_empty(shared: Path) -> None:
    prompts = PromptCache(MemoryStore(), block_size=BLOCK)
    with opened(shared, "llama-dense") as large, large.model.context(n_ctx=32) as small:
        append(prompts, large, TOKENS)
        sequence = small.sequence()
        with pytest.raises(CacheFull):
            prompts.restore(sequence, TOKENS)
        assert (len(sequence), small.cache.used) == (0, 0)
        assert sequence.append([1]).tokens == [1]


def test_an_interrupted_prompt_is_not_there_but_what_was_computed_is_stored(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the next attempt has less to do, where blocks are computed one by one."""
    store = MemoryStore()
    prompts = PromptCache(store, block_size=BLOCK)
    decode, n_done = context.decode, 0

    def interrupted(batch: Batch) -> Float32Array:
        nonlocal n_done
        n_done += batch.n_tokens
        if n_done > 40:
            raise KeyboardInterrupt
        return decode(batch)

    sequence = context.sequence()
    with monkeypatch.context() as patch:
        patch.setattr(context, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prompts.append(sequence, TOKENS)
    assert (len(sequence), context.cache.used) == (0, 0)
    n_stored = n_reused(prompts, context, TOKENS)
    assert n_stored == 32 or ("llama" in str(context.model.path) and n_stored == 0)
    assert prompts.append(sequence, TOKENS).n_reused == n_stored
    assert nmse(sequence.logits, fresh(context, TOKENS)) < SAME


# -- stores that fail


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["put", "touch", "get", "has"])
def test_a_store_that_fails_costs_no_text(
    context: Context, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    """It is said once, however often it fails."""
    store = FailingStore()
    prompts = PromptCache(store, block_size=BLOCK)
    append(prompts, context, TOKENS[:40])
    sequence = context.sequence()
    with failing(store, verb):
        hit = prompts.append(sequence, TOKENS)
        assert (hit.n_reused == 0) == hit.has_failed == (verb in ("get", "has"))
        assert str(prompts.trouble) == f"{verb} fails"
        assert sequence.tokens == TOKENS
        assert nmse(sequence.logits, fresh(context, TOKENS)) < SAME
        with context.sequence() as other:
            prompts.append(other, TOKENS)
            assert other.tokens == TOKENS
    with failing(store, "put"):
        prompts.append(sequence, text(2, 30))
    assert sequence.tokens == TOKENS + text(2, 30)
    said = [f"{name} fails" for name in dict.fromkeys([verb, "put"])]
    expected = said[:1] if verb == "touch" else said
    assert [record.getMessage() for record in caplog.records] == [
        f"continuing without the prompt cache: {one}" for one in expected
    ]
    prompts.append(sequence, text(3, 20))
    whole = TOKENS + text(2, 30) + text(3, 20)
    hit, logits, _ = append(prompts, context, whole)
    assert prompts.trouble is None
    assert nmse(logits, fresh(context, whole)) < SAME
    assert hit.n_reused == (112 if "llama" in str(context.model.path) else 32)


@pytest.mark.parametrize("verb", ["get", "has"])
def test_restoring_from_a_store_that_fails_leaves_it_empty(llama: Context, verb: str) -> None:
    store = FailingStore()
    prompts = PromptCache(store, block_size=BLOCK)
    append(prompts, llama, TOKENS)
    sequence = llama.sequence()
    with failing(store, verb):
        hit = prompts.restore(sequence, TOKENS)
    assert (hit.n_reused, hit.why) == (0, Miss("store failed", 0))
    assert "the store failed when it was asked for token 0" in str(hit)
    assert (len(sequence), sequence.tokens) == (0, [])
    assert prompts.restore(sequence, TOKENS).n_reused == 64
    assert prompts.trouble is None


def test_it_warns_again_after_the_store_has_worked(
    llama: Context, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it can be read and whether it can be written are two things."""
    store = FailingStore()
    prompts = PromptCache(store, block_size=BLOCK)
    for n_warnings, seed in ((1, 1), (2, 4)):
        with failing(store, "put"):
            for more in range(2):
                append(prompts, llama, text(seed + more, 40))[2].close()
                assert n_reused(prompts, llama, text(9, 40)) == 0
        assert len(caplog.records) == n_warnings
        assert str(prompts.trouble) == "put fails"
        append(prompts, llama, text(seed, 40))
        assert prompts.trouble is None
        assert n_reused(prompts, llama, text(seed, 40)) == 32
        for sequence in llama.sequences:
            sequence.close()


def test_a_store_that_is_slow_to_fail_is_left_alone(
    llama: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For nine times as long, half a minute at most; other uses of it are not."""
    now, asked = 100.0, list[float]()

    def fail(_: object) -> bool:
        nonlocal now
        asked.append(now)
        now += 2
        raise StoreError("no answer in time")

    store = FailingStore()
    prompts = PromptCache(store, block_size=BLOCK)
    monkeypatch.setattr("kvcellar.prompts.cache.monotonic", lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr(store, "has", fail)
        for _ in range(40):
            with llama.sequence() as sequence:
                assert prompts.append(sequence, TOKENS[:20]).has_failed
            now += 1
    assert asked == [100.0, 120.0, 140.0]
    now += 14
    assert n_reused(prompts, llama, TOKENS[:20]) == 0
    append(prompts, llama, TOKENS[:20])
    assert n_reused(prompts, llama, TOKENS[:20]) == 16
    for took, left_alone in ((0.5, 0), (1.5, 13.5), (60, 30)):
        assert _pause(PromptCache(store), monkeypatch, took) == left_alone


def _pause(prompts: PromptCache, monkeypatch: pytest.MonkeyPatch, took_s: float) -> float:
    times = iter([1000.0, 1000.0 + took_s, 2000.0])
    monkeypatch.setattr("kvcellar.prompts.cache.monotonic", lambda: next(times))

    def fail() -> None:
        raise StoreError("no")

    prompts._try("store", fail, None)
    return prompts._asked_again["store"] - 2000.0


@pytest.mark.parametrize("kind", DISKS)
def test_a_folder_on_a_full_disk(
    llama: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Texts that are there are restored, those that are not are computed and not stored."""
    with DISKS[kind](tmp_path / "disk") as disk:
        first = DiskStore(disk.root / "store")
        append(PromptCache(first, block_size=BLOCK), llama, TOKENS)
        first.close()
        disk.fill()
        store = DiskStore(disk.root / "store")
        prompts = PromptCache(store, block_size=BLOCK)
        caplog.clear()
        for _ in range(2):
            hit, logits, sequence = append(prompts, llama, TOKENS + text(2, 30))
            assert hit.n_reused == 64
            assert nmse(logits, fresh(llama, TOKENS + text(2, 30))) < SAME
            sequence.close()
            assert n_reused(prompts, llama, TOKENS) == 64
        (record,) = caplog.records
        assert "continuing without the prompt cache: " in record.getMessage()
        assert disk.why in record.getMessage()
        disk.free()
        append(prompts, llama, TOKENS + text(2, 30))[2].close()
        assert prompts.trouble is None
        assert n_reused(prompts, llama, TOKENS + text(2, 30)) == 96
        assert store.verify().is_sound
        store.close()


def test_a_server_that_speaks_garbage_and_then_is_back(
    llama: Context, caplog: pytest.LogCaptureFixture
) -> None:
    with running_redis() as behind, serving(proxy := Proxy(behind)) as url:
        store = RedisStore(url, prefix=f"trouble-{uuid.uuid4()}:")
        prompts = PromptCache(store, block_size=BLOCK)
        append(prompts, llama, TOKENS)[2].close()
        for n_warnings, what in enumerate(("HTTP", "closes at once", "half a reply, and waits"), 1):
            proxy.misbehave = GARBAGE[what]
            for _ in range(2):
                hit, logits, sequence = append(prompts, llama, TOKENS)
                assert hit.has_failed
                assert nmse(logits, fresh(llama, TOKENS)) < SAME
                sequence.close()
            proxy.misbehave = None
            assert len(caplog.records) == n_warnings
            hit, _, sequence = append(prompts, llama, TOKENS)
            assert (hit.n_reused, prompts.trouble) == (64, None)
            sequence.close()
        store.close()


def test_storing_in_a_store_that_fails(context: Context) -> None:
    store = FailingStore()
    prompts = PromptCache(store, block_size=BLOCK)
    sequence = context.sequence(TOKENS)
    with failing(store, "put"), pytest.raises(StoreError, match="put fails"):
        prompts.store(sequence)
    with failing(store, "full"):
        assert prompts.store(sequence) == 0
    assert sequence.tokens == TOKENS
    assert nmse(sequence.append([1]).logits, fresh(context, [*TOKENS, 1])) < SAME


def test_a_damaged_block_that_cannot_be_dropped_is_not_used(llama: Context) -> None:
    store = FailingStore()
    prompts = PromptCache(store, block_size=BLOCK)
    append(prompts, llama, TOKENS)
    key = keys(store)[0]
    store._held[key] = b"nonsense", store._held[key][1]
    with failing(store, "delete"):
        hit, logits, _ = append(prompts, llama, TOKENS)
    assert hit.why is not None
    assert (hit.n_reused, hit.why.cause) == (48, "damaged")
    assert nmse(logits, fresh(llama, TOKENS)) < SAME


@pytest.mark.slow
@pytest.mark.parametrize("arch", KINDS[:3])
def test_a_failure_to_compute_is_not_hidden_by_one_to_store(shared: Path, arch: str) -> None:
    store = FailingStore()
    prompts = PromptCache(store, block_size=BLOCK)
    with opened(shared, arch, **F32) as context:
        sequence = context.sequence(TOKENS[:10])
        with failing(store, "put", "touch"), pytest.raises(CacheFull):
            prompts.append(sequence, text(4, 600))
        assert sequence.tokens == TOKENS[:10]


class ForgetfulStore(MemoryStore):
    """Evicts what it has just said to be there."""

    def get(self, key: str) -> BytesLike | None:
        entry = self._held.get(key)
        if entry is not None and entry[1].note.get("start") == 32:
            self._evicted[key] = None
            del self._held[key]
        return super().get(key)


def test_a_block_that_leaves_while_others_are_read(llama: Context) -> None:
    """As another process may do; what is before it is used."""
    prompts = PromptCache(ForgetfulStore(), block_size=BLOCK)
    append(prompts, llama, TOKENS)
    hit, logits, _ = append(prompts, llama, TOKENS)
    assert (hit.n_reused, hit.why) == (32, Miss("evicted", 32))
    assert nmse(logits, fresh(llama, TOKENS)) < SAME


def test_a_closed_store_is_refused_before_anything_is_computed(llama: Context) -> None:
    store = MemoryStore()
    prompts, sequence = PromptCache(store, block_size=BLOCK), llama.sequence()
    store.close()
    with pytest.raises(ClosedError):
        prompts.append(sequence, TOKENS)
    assert len(sequence) == 0


# -- many at once


def expected(context: Context, seeds: Sequence[int]) -> dict[int, Float32Array]:
    return {seed: fresh(context, shared_text(seed)) for seed in seeds}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "n_contexts"), [("llama-dense", 1), ("gemma3-dense", 2), ("jamba-dense", 2)]
)
@pytest.mark.alone
def test_threads_share_a_store(shared: Path, arch: str, n_contexts: int) -> None:
    """With a context each, or with one for both; texts never get mixed."""
    store, failures = MemoryStore(60_000), list[BaseException]()
    prompts = PromptCache(store, block_size=BLOCK)
    with opened(shared, arch, **F32) as one:
        contexts = [one, one] if n_contexts == 1 else [one, one.model.context(**SIZES)]
        right = expected(one, range(6))

        def work(context: Context, seeds: Sequence[int]) -> None:
            try:
                for seed in seeds:
                    with context.sequence() as sequence:
                        prompts.append(sequence, shared_text(seed))
                        assert nmse(sequence.logits, right[seed]) < SAME, seed
            except BaseException as error:
                failures.append(error)

        orders = [[*range(6), 0, 1], [*reversed(range(6)), 5, 4]]
        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(contexts, orders, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        for context in contexts:
            context.cache.check()
            assert context.cache.used == 0


def worker(shared: Path, folder: Path, seeds: Sequence[int]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.prompts.worker"]
    model = shared / "models" / "jamba-dense.gguf"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.Popen(
        [*command, str(model), str(folder), *map(str, seeds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
    )


def told(process: subprocess.Popen[str]) -> dict[int, tuple[int, str]]:
    """Of each seed how much was reused, and a hash of the logits."""
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    lines = (line.split() for line in output.splitlines())
    return {int(seed): (int(n), digest) for seed, n, digest in lines}


@pytest.mark.slow
@pytest.mark.alone
def test_processes_share_a_folder(shared: Path, tmp_path: Path) -> None:
    """Two write at once; a third reuses all that they saved, with the logits they had."""
    processes = [worker(shared, tmp_path, seeds) for seeds in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0])]
    one, two = map(told, processes)
    three = told(worker(shared, tmp_path, range(5)))
    n_saved = (len(shared_text(0)) - 1) // BLOCK * BLOCK
    with opened(shared, "jamba-dense", **F32) as context:
        store = DiskStore(tmp_path)
        prompts = PromptCache(store, block_size=BLOCK)
        for seed in range(5):
            assert three[seed] == (n_saved, one[seed][1])
            assert one[seed][1] == two[seed][1]
            hit, logits, sequence = append(prompts, context, shared_text(seed))
            assert hit.n_reused == n_saved
            assert sha256(logits.tobytes()).hexdigest() == one[seed][1]
            assert nmse(logits, fresh(context, shared_text(seed))) < SAME
            sequence.close()
        assert store.verify().is_sound
        store.close()
    assert len({digest for _, digest in one.values()}) == 5
