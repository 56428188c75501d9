"""``run`` and ``chat`` with ``--prompt-cache``: less is computed, the text is the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvcellar.cli import store_tools
from kvcellar.cli.interrupt import Interrupt
from kvcellar.cli.prompt import read_tokens
from kvcellar.cli.prompt_cache import PromptCacheOptions, stored_at_end
from kvcellar.cli.store_tools import open_or_make
from kvcellar.errors import CacheFull, StoreError
from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.stores.base import Store
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.memory import MemoryStore
from kvcellar.stores.redis_client import RedisClient
from tests.cli.helpers import Invoke
from tests.stores.conftest import running_redis

PROMPT = "abcdefgh" * 40  # 320 tokens, two whole blocks
COMMON = ("-n", "20", "--seed", "3", "--threads", "1", "--n-ctx", "512", "--stats")


@pytest.fixture(scope="module")
def filled_once(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the prompt."""
    folder = tmp_path_factory.mktemp("filled") / "store"
    with Model.from_gguf(talker, n_threads=1) as model:
        store = DiskStore(folder)
        PromptCache(store).append(model.context(n_ctx=512).sequence(), PROMPT)
        store.close()
    return folder


@pytest.fixture
def filled(filled_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(filled_once, tmp_path / "filled")


@pytest.fixture
def talker(completer: Path) -> Path:
    """A model that completes texts, since it has no template."""
    return completer


def values(folder: Path) -> list[Path]:
    return [path for path in (folder / "values").rglob("*") if path.is_file()]


def test_a_second_run_computes_less_and_says_the_same(
    invoke: Invoke, talker: Path, tmp_path: Path
) -> None:
    args = ("run", talker, PROMPT, *COMMON)
    plain = invoke(*args)
    first, second = (invoke(*args, "--prompt-cache", tmp_path / "new") for _ in range(2))
    assert first.stdout == second.stdout == plain.stdout
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert "reused" not in plain.stderr
    assert "prompt      0 of 320 tokens reused: nothing is stored from token 0" in first.stderr
    assert "prefill     320 tokens" in first.stderr
    assert "prompt      256 of 320 tokens reused: from token 256 on there is no" in second.stderr
    assert "prefill     64 tokens" in second.stderr


def test_without_stats_nothing_is_said(invoke: Invoke, talker: Path, filled: Path) -> None:
    args = [arg for arg in COMMON if arg != "--stats"]
    assert invoke("run", talker, PROMPT, *args, "--prompt-cache", filled).stderr == ""


def test_what_was_generated_is_stored_too(invoke: Invoke, talker: Path, filled: Path) -> None:
    args = ("--temp", "0", "--threads", "1", "--n-ctx", "512", "--prompt-cache", filled, "--stats")
    answer = invoke("run", talker, PROMPT, "-n", "70", *args).stdout.removesuffix("\n")
    assert len(answer) == 70
    longer = invoke("run", talker, PROMPT + answer, "-n", "1", *args)
    assert "384 of 390 tokens reused" in longer.stderr


def test_a_text_that_diverges_says_where(invoke: Invoke, talker: Path, filled: Path) -> None:
    text = PROMPT[:200] + "?" + PROMPT[201:]
    result = invoke("run", talker, text, *COMMON, "--prompt-cache", filled)
    assert "128 of 320 tokens reused: what is stored is another text from token 200" in (
        result.stderr
    )


def test_texts_of_another_salt_are_not_found(invoke: Invoke, talker: Path, filled: Path) -> None:
    args = ("run", talker, PROMPT, *COMMON, "--prompt-cache", filled, "--cache-salt")
    assert "prompt      0 of 320" in invoke(*args, "me").stderr
    assert "prompt      256 of 320" in invoke(*args, "me").stderr
    assert "prompt      0 of 320" in invoke(*args, "you").stderr


def test_a_budget_is_kept(invoke: Invoke, talker: Path, tmp_path: Path) -> None:
    args = ("run", talker, PROMPT, *COMMON, "--prompt-cache", tmp_path / "new")
    invoke(*args, "--cache-bytes", "50k")
    assert len(values(tmp_path / "new")) == 1
    invoke(*args, "--cache-bytes", "1M")
    assert len(values(tmp_path / "new")) == 2


def test_a_server_forgets_what_nobody_used(invoke: Invoke, talker: Path) -> None:
    with running_redis() as url:
        args = ("run", talker, PROMPT, *COMMON, "--prompt-cache", url, "--cache-ttl", "2h")
        assert "prompt      0 of 320" in invoke(*args).stderr
        assert "prompt      256 of 320" in invoke(*args).stderr
        with closing(RedisClient(url)) as server:
            heads: list[bytes] = server.call("KEYS", "kvcellar:head:*")
            times: list[int] = [server.call("TTL", head) for head in heads]
        assert len(times) == 2
        assert all(7100 < time <= 7200 for time in times)


def test_damaged_values_are_computed_again(invoke: Invoke, talker: Path, filled: Path) -> None:
    plain = invoke("run", talker, PROMPT, *COMMON).stdout
    for path in values(filled):
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    args = ("run", talker, PROMPT, *COMMON, "--prompt-cache", filled)
    for reused in ("0 of 320", "256 of 320"):
        result = invoke(*args)
        assert result.stdout == plain
        assert reused in result.stderr


def test_a_full_cache_keeps_what_came(invoke: Invoke, talker: Path, filled: Path) -> None:
    args = ("--temp", "0", "--threads", "1", "--n-ctx", "384", "--prompt-cache", filled)
    assert invoke("run", talker, PROMPT, "-n", "-1", *args).exit_code == 1
    assert len(values(filled)) == 3
    result = invoke("run", talker, PROMPT * 2, *args, "--stats")
    assert "640 cells needed, 384 free" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cache-salt", "x"], "--cache-salt needs --prompt-cache"),
        (["--cache-bytes", "1G"], "--cache-bytes needs --prompt-cache"),
        (["--cache-ttl", "7d"], "--cache-ttl needs --prompt-cache"),
        (["--prompt-cache", "{}", "--cache-bytes", "1X"], "--cache-bytes '1X'"),
        (["--prompt-cache", "redis://x", "--cache-ttl", "7"], "--cache-ttl '7': give an age"),
        (["--prompt-cache", "redis://127.0.0.1:1", "--cache-ttl", "0s"], "ttl_s=0"),
        (["--prompt-cache", "redis://x", "--cache-ttl", "99999999999999w"], "at most 36500d"),
        (["--prompt-cache", "{}", "--cache-bytes", "9" * 400], "at most 1048576T"),
        (["--prompt-cache", "{}", "--cache-ttl", "7d"], "gc --older-than"),
        (["--prompt-cache", "memory:"], "name a folder or a URL"),
        (["--prompt-cache", "s3://me:secret@x"], "scheme 's3'"),
        (["--prompt-cache", "redis://me:secret@127.0.0.1:1/0"], "redis://127.0.0.1:1/0"),
        (["--prompt-cache", "redis://x", "--cache-bytes", "1G"], "maxmemory"),
    ],
)
def test_what_cannot_be_opened_is_an_error(
    invoke: Invoke, talker: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    result = invoke("run", talker, "hi", *(arg.format(tmp_path / "new") for arg in args))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert "secret" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_something_else_stays_so(
    invoke: Invoke, talker: Path, tmp_path: Path
) -> None:
    (tmp_path / "letter").touch()
    result = invoke("run", talker, "hi", "--prompt-cache", tmp_path)
    assert result.exit_code == 1
    assert "is not a store and not empty" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


def test_a_model_that_is_not_there_makes_no_store(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("run", "absent.gguf", "hi", "--prompt-cache", tmp_path / "new")
    assert "absent.gguf does not exist" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["put", "get", "has", "find"])
def test_a_store_that_fails_ends_no_run(
    invoke: Invoke, talker: Path, filled: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("the disk\nis full")

    plain = invoke("run", talker, "x" + PROMPT, *COMMON).stdout
    monkeypatch.setattr(DiskStore, verb, fail)
    result = invoke("run", talker, "x" + PROMPT, *COMMON, "--prompt-cache", filled)
    assert (result.exit_code, result.stdout) == (0, plain)
    warning = "warning: continuing without the prompt cache: the disk is full\n"
    assert result.stderr.count("warning") == result.stderr.count(warning) == 1


def test_a_store_that_cannot_store_at_the_end(
    filled: Path, talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was generated is not stored; the run ends as it would have."""

    def fail(*_: object) -> None:
        raise StoreError("the disk is full")

    with Model.from_gguf(talker, n_threads=1) as model, closing(DiskStore(filled)) as store:
        sequence, prompts = model.context(n_ctx=512).sequence(PROMPT), PromptCache(store)
        monkeypatch.setattr(DiskStore, "touch_all", fail)
        with stored_at_end(prompts, sequence):
            pass
    warning = "warning: the prompt cache does not store this: the disk is full\n"
    assert capsys.readouterr().err == warning


# --- Ctrl-C -------------------------------------------------------------------------------------


@pytest.fixture
def context(talker: Path) -> Iterator[Context]:
    with Model.from_gguf(talker, n_threads=1) as model:
        yield model.context(n_ctx=64, n_ubatch=8)


class Pressed(Interrupt):
    """Ctrl-C, pressed when it was asked for that often."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def check(self) -> None:
        self.n -= 1
        self.pressed = self.n < 0
        super().check()


def test_ctrl_c_is_heard_between_pieces_and_what_came_is_stored(context: Context) -> None:
    prompts, sequence = PromptCache(MemoryStore(), block_size=8), context.sequence()
    ids = list(range(1, 41))
    with pytest.raises(KeyboardInterrupt), stored_at_end(prompts, sequence):
        read_tokens(sequence, ids, Pressed(4), prompts)
    assert len(sequence) == 0
    again = context.sequence()
    with pytest.raises(KeyboardInterrupt):
        read_tokens(again, ids, Pressed(1), prompts)
    assert len(again) == 0
    reuse = read_tokens(again, ids, Pressed(9), prompts)
    assert reuse is not None
    assert (reuse.n_reused, again.tokens) == (24, ids)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma3-dense", "falcon-h1-dense", "mamba-dense"])
def test_windows_and_states_go_block_by_block(
    invoke: Invoke, shared: Path, tmp_path: Path, arch: str
) -> None:
    ids, store = [1 + i % 90 for i in range(30)], DiskStore(tmp_path / "store")
    with Model.from_gguf(shared / f"models/{arch}.gguf", n_threads=1) as model:
        context, prompts = model.context(n_ctx=1024, n_ubatch=8), PromptCache(store, block_size=8)
        sequence = context.sequence()
        with pytest.raises(KeyboardInterrupt):
            read_tokens(sequence, ids, Pressed(3), prompts)
        assert sum(1 for _ in store.entries()) == 2  # asked before, and after nothing was restored
        sequence.close()
        with context.sequence() as again, stored_at_end(prompts, again):
            reuse = read_tokens(again, ids, Interrupt(), prompts)
            assert reuse is not None
            assert (reuse.n_reused, len(again)) == (16, 30)
    last = max(store.entries(), key=lambda entry: int(entry.note["start"])).key
    store.close()
    assert "3 entries" in invoke("cache", "verify", tmp_path / "store").stdout
    inspected = invoke("cache", "inspect", tmp_path / "store", last)
    assert "8 tokens at positions 16 to 23" in inspected.stdout
    assert ("states" in inspected.stdout) == (arch != "gemma3-dense")
    done = invoke("cache", "export", tmp_path / "store", last, tmp_path / "out")
    assert done.stdout.startswith("3 blocks, 24 tokens"), done.stderr


def test_only_what_was_computed_is_kept(context: Context) -> None:
    """No token is computed only to be stored: there may be no room for it."""
    prompts, sequence = PromptCache(MemoryStore(), block_size=8), context.sequence(range(1, 64))
    for token in (5, 6):
        sequence.push(token)
    with pytest.raises(CacheFull), stored_at_end(prompts, sequence):
        raise CacheFull(1, 0)
    assert len(sequence) == 63
    assert prompts.store(sequence) == 7
    with (
        pytest.raises(ValueError, match="bug"),
        stored_at_end(PromptCache(MemoryStore()), sequence),
    ):
        raise ValueError("bug")


# --- chat ---------------------------------------------------------------------------------------


def test_a_conversation_begins_with_what_an_earlier_one_computed(
    invoke: Invoke, talker: Path, tmp_path: Path
) -> None:
    args = ("chat", talker, "--system", PROMPT, *COMMON, "--prompt-cache", tmp_path / "new")
    first, second = (invoke(*args, stdin="hi\nho\n") for _ in range(2))
    assert first.exit_code == 0, first.stderr
    assert second.stdout == first.stdout
    reused = [line.partition(" tokens")[0] for line in second.stderr.splitlines()]
    n = len("system\n") + len(PROMPT) + len("\nuser\nhi\nassistant\n") + 5
    assert first.stderr.startswith(f"0 of {n} tokens")
    assert reused[0] == f"256 of {n}"
    assert int(reused[1].split()[0]) > n


def test_a_folder_has_a_budget_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def remember(where: str, max_bytes: int | None, ttl_s: float | None) -> Store:
        asked.append(max_bytes)
        return open_or_make(where, max_bytes, ttl_s)

    monkeypatch.setattr(store_tools, "open_or_make", remember)
    for size in (None, "5M"):
        with PromptCacheOptions(str(tmp_path / "store"), None, size).open():
            pass
    assert asked == [10 * 2**30, 5 * 2**20]
