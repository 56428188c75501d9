"""Which cache a memory gets."""

from __future__ import annotations

from kvcellar.backends.base import OpenMemory
from kvcellar.cache import AttentionCache, Cache, HybridCache
from kvcellar.cache.parts import parts_of
from kvcellar.cache.sliding import SlidingCache
from kvcellar.memory import LayerMemory
from kvcellar.models.base import ModelSpec
from kvcellar.plan import Plan
from kvcellar.runtime.memories import make_cache
from kvcellar.runtime.options import ContextOptions
from kvcellar.testing.stores import NullStore
from kvcellar.types import Float32Array, LayerSpec

FULL = LayerMemory(LayerSpec(2, 32, 32))
WINDOW = LayerMemory(LayerSpec(2, 32, 32, window=100))


class NoExecutor:
    """Computes nothing."""

    lists_up_to = ()

    def run(self, plan: Plan) -> Float32Array:
        raise AssertionError(f"nothing computes {plan}")

    def close(self) -> None:
        """Nothing to give back."""


def cache_for(*layers: LayerMemory, **options: int) -> Cache:
    asked = ContextOptions(n_ctx=2048, n_seq_max=2, n_ubatch=64, **options)  # type: ignore[arg-type]
    spec = asked.memory_spec(ModelSpec("test", 9, 9, 9999, layers), lambda _: None)
    stores = tuple(NullStore(group) for group in spec.groups)
    return make_cache(spec, OpenMemory(stores, None, NoExecutor()), asked)


def kinds(cache: Cache) -> list[tuple[type, int, int]]:
    return [(type(part), part.spec.size, part.spec.window) for part in parts_of(cache)]


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
