"""How much memory a context asks for, from a model's layers and the options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcellar.errors import OptionError
from kvcellar.models.blocks import ModelSpec
from kvcellar.runtime.options import ContextOptions
from kvcellar.types import CacheSpec, LayerMemory, LayerPlace, LayerSpec, MemorySpec, StateLayer

FULL = LayerMemory(LayerSpec(2, 32, 32))
WINDOW = LayerMemory(LayerSpec(2, 32, 32, window=100))
NARROW = LayerMemory(LayerSpec(2, 32, 32, window=10))
LATENT = LayerMemory(LayerSpec(1, 96, 64, v_offset=32))
STATE = LayerMemory(state=StateLayer(8, 56))  # 256 bytes


def never(_: CacheSpec) -> str | None:
    return "not here"


def always(_: CacheSpec) -> str | None:
    return None


def spec_of(
    *layers: LayerMemory, why: Callable[[CacheSpec], str | None] = never, **options: Any
) -> MemorySpec:
    model = ModelSpec("test", 128, 64, 3000, layers)
    given = {"n_ctx": 2048, "n_seq_max": 2, "n_ubatch": 64, **options}
    return ContextOptions(**given).memory_spec(model, why)


def sizes(spec: MemorySpec) -> list[int]:
    return [group.size for group in spec.groups]


def test_a_model_that_attends_everywhere_has_one_group() -> None:
    spec = spec_of(FULL, FULL)
    assert sizes(spec) == [2048]
    assert spec.states is None
    assert sizes(spec_of(FULL, n_ctx=None)) == [3000]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [2048, 512, 256]),  # 264 and 84, rounded up to 256
        ({"flash_attn": False}, [2048, 288, 96]),  # rounded up to 32
        ({"n_ctx": 200}, [200, 200, 200]),  # a window needs no more than the context has
        ({"n_ubatch": 300}, [2048, 512, 512]),
        ({"swa_full": True}, [2048, 2048, 2048]),
    ],
)
def test_windows_have_what_they_need(options: dict[str, Any], wanted: list[int]) -> None:
    spec = spec_of(NARROW, FULL, WINDOW, **options)
    assert sizes(spec) == wanted
    assert [group.window for group in spec.groups] == [0, 100, 10]
    assert spec.places == (LayerPlace(2, 0), LayerPlace(0, 0), LayerPlace(1, 0))


def test_the_widest_window_knows_the_text_where_nothing_else_does() -> None:
    assert sizes(spec_of(NARROW, WINDOW)) == [2048, 256]


@pytest.mark.parametrize(
    ("options", "n_kept"),
    [
        ({}, 32),
        ({"checkpoints": 5}, 5),
        ({"checkpoints": 0}, 0),
        ({"checkpoint_bytes": 0}, 0),
        ({"checkpoint_bytes": 256 * 3 + 255}, 3),
        ({"checkpoint_bytes": 2**40}, 32),
    ],
)
def test_states_have_two_rows_a_sequence_and_one_a_checkpoint(
    options: dict[str, int], n_kept: int
) -> None:
    spec = spec_of(STATE, FULL, why=never, **options).states
    assert spec is not None
    assert (spec.n_rows, spec.n_seq_max, spec.row_bytes) == (2 * 2 + max(n_kept, 2), 2, 256)


def test_large_states_do_not_fill_the_memory_unasked() -> None:
    large = LayerMemory(state=StateLayer(0, 2**24))  # 64 MiB
    states = spec_of(large).states
    assert states is not None
    assert states.n_rows == 4 + 4


def test_v_lies_across_where_that_suits_all() -> None:
    assert spec_of(FULL, n_seq_max=1).groups[0].v_trans
    assert not spec_of(FULL).groups[0].v_trans
    assert not spec_of(FULL, n_seq_max=1, why=always).groups[0].v_trans
    assert not spec_of(LATENT, n_seq_max=1).groups[0].v_trans  # there is no V
    wide = LayerMemory(LayerSpec(2, 32, 64))
    assert not spec_of(FULL, wide, n_seq_max=1).groups[0].v_trans  # rows of two sizes
    assert spec_of(FULL, wide, n_seq_max=1, flash_attn=False).groups[0].v_trans  # as was asked


def test_the_kernel_runs_in_the_groups_where_it_can() -> None:
    def only_full(group: CacheSpec) -> str | None:
        return "windows" if group.window else None

    groups = spec_of(FULL, WINDOW).groups
    assert ContextOptions().use_kernel(groups, only_full)
    assert not ContextOptions().use_kernel(groups, never)
    assert not ContextOptions(kernel=False).use_kernel(groups, always)
    assert ContextOptions(kernel=True).use_kernel(groups, always)
    assert not ContextOptions().use_kernel((), always)
    with pytest.raises(OptionError, match="kernel=True: windows"):
        ContextOptions(kernel=True).use_kernel(groups, only_full)
    with pytest.raises(OptionError, match="kernel=True: no layer attends"):
        ContextOptions(kernel=True).use_kernel((), always)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_ctx", 0),
        ("n_seq_max", 0),
        ("n_seq_max", 5000),
        ("n_ubatch", 0),
        ("checkpoints", -1),
        ("checkpoints", 1.5),
        ("checkpoint_bytes", -1),
        ("checkpoint_bytes", "1G"),
    ],
)
@pytest.mark.parametrize("layers", [(FULL,), (STATE,), (FULL, WINDOW)])
def test_options_out_of_range_are_named(
    layers: tuple[LayerMemory, ...], name: str, value: Any
) -> None:
    with pytest.raises(OptionError, match=name):
        spec_of(*layers, why=never, **{name: value})
