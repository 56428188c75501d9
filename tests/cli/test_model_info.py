"""The kind and size of the cache of each layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcellar.cli.model_info import LayerCache, context_bytes, layer_caches
from kvcellar.types import KVType, LayerMemory, LayerSpec, StateLayer
from tests.cli.helpers import Invoke

FULL = LayerSpec(1, 64, 32)
WINDOW = LayerSpec(1, 64, 64, window=512)
LATENT = LayerSpec(1, 96, 64, v_offset=32)


def test_layers_that_are_alike_share_a_row() -> None:
    full, window = LayerMemory(FULL), LayerMemory(WINDOW)
    found = layer_caches([window, window, full, window, window, window, full])
    assert found == (
        LayerCache((0, 1, 3, 4, 5), "sliding 512", 256, 0),
        LayerCache((2, 6), "full", 192, 0),
    )
    assert [cache.numbers for cache in found] == ["0-1, 3-5", "2, 6"]


@pytest.mark.parametrize(
    ("layer", "kind", "sizes"),
    [
        (LayerMemory(LATENT), "MLA", (192, 0)),
        (LayerMemory(state=StateLayer(10, 20)), "state", (0, 120)),
        (LayerMemory(FULL, StateLayer(3)), "full + state", (192, 12)),
        (LayerMemory(WINDOW, StateLayer(3)), "sliding 512 + state", (256, 12)),
        (LayerMemory(), "none", (0, 0)),
    ],
)
def test_kinds(layer: LayerMemory, kind: str, sizes: tuple[int, int]) -> None:
    (cache,) = layer_caches([layer])
    assert (cache.kind, cache.bytes_per_token, cache.bytes_per_sequence) == (kind, *sizes)


def test_a_window_takes_no_more_than_it_sees() -> None:
    assert context_bytes([FULL, WINDOW], KVType.F16, 100) == 100 * (192 + 256)
    assert context_bytes([FULL, WINDOW], KVType.F16, 1000) == 1000 * 192 + 512 * 256


def test_info_shows_them(invoke: Invoke, talker: Path) -> None:
    shown = invoke("info", talker).stdout
    assert "Cache by layer" in shown
    assert "0-1      full" in shown
