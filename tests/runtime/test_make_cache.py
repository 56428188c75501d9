"""Which cache a memory gets."""

from __future__ import annotations

from collections.abc import Callable

from kvcellar.backends.base import GraphTimes, OpenMemory
from kvcellar.backends.numpy.states import NumpyStateStore
from kvcellar.cache import AttentionCache, Cache, HybridCache
from kvcellar.cache.recurrent import RecurrentCache
from kvcellar.cache.sliding import SlidingCache
from kvcellar.models.blocks import ModelSpec
from kvcellar.plan import Plan
from kvcellar.runtime.context import make_cache
from kvcellar.runtime.options import ContextOptions
from kvcellar.testing.stores import NullStore
from kvcellar.types import Float32Array, LayerMemory, LayerSpec, StateLayer

FULL = LayerMemory(LayerSpec(2, 32, 32))
STATE = LayerMemory(None, StateLayer(6, 8))
WINDOW = LayerMemory(LayerSpec(2, 32, 32, window=100))


class NoExecutor:
    """Computes nothing."""

    takes_lists = ()
    compile_seconds = 0.0

    def run(self, plan: Plan) -> Float32Array:
        raise AssertionError(f"nothing computes {plan}")

    def watch(self, watcher: Callable[[GraphTimes], None]) -> None:
        raise AssertionError(f"nothing is told to {watcher}")

    def close(self) -> None:
        """Nothing to free."""


def cache_for(*layers: LayerMemory, **options: int) -> Cache:
    asked = ContextOptions(n_ctx=2048, n_seq_max=2, n_ubatch=64, **options)  # type: ignore[arg-type]
    spec = asked.memory_spec(ModelSpec("test", 9, 9, 9999, layers), lambda _: None)
    stores = tuple(NullStore(group) for group in spec.groups)
    states = None if spec.states is None else NumpyStateStore(spec.states)
    return make_cache(spec, OpenMemory(stores, states, NoExecutor()), asked, 2048)


def kinds(cache: Cache) -> list[tuple[type, int, int]]:
    return [(type(part), part.spec.size, part.spec.window) for part in cache.parts]


def test_a_lone_part_is_used_as_it_is() -> None:
    assert type(cache_for(FULL, FULL)) is AttentionCache
    assert kinds(cache_for(WINDOW)) == [(AttentionCache, 2048, 100)]


def test_windows_slide_beside_a_wider_group() -> None:
    cache = cache_for(FULL, WINDOW)
    assert isinstance(cache, HybridCache)
    assert kinds(cache) == [(AttentionCache, 2048, 0), (SlidingCache, 512, 100)]


def test_windows_of_full_size_do_not_slide() -> None:
    wanted = [(AttentionCache, 2048, 0), (AttentionCache, 2048, 100)]
    assert kinds(cache_for(FULL, WINDOW, swa_full=True)) == wanted


def test_states_stand_beside_groups() -> None:
    cache = cache_for(STATE, FULL, WINDOW, checkpoints=3)
    assert kinds(cache) == [
        (AttentionCache, 2048, 0),
        (SlidingCache, 512, 100),
        (RecurrentCache, 2048, 0),
    ]
    assert cache.has_states


def test_lone_states_are_used_as_they_are() -> None:
    cache = cache_for(STATE, STATE, checkpoints=3)
    assert isinstance(cache, RecurrentCache)
    assert cache.has_states
    assert not cache_for(FULL).has_states
    assert (cache.spec.size, cache.n_free(), cache.store.spec.n_rows) == (2048, 2048, 7)
    assert cache.states.limit == 3


def test_states_without_a_budget_keep_none() -> None:
    for nothing in ({"checkpoints": 0}, {"checkpoint_bytes": 0}, {"checkpoint_bytes": 55}):
        cache = cache_for(STATE, **nothing)
        assert isinstance(cache, RecurrentCache)
        assert (cache.store.spec.n_rows, cache.states.limit) == (6, 0)
