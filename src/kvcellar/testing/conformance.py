"""What every store of K and V rows has to do, as a test class to subclass.

Give it a way to open a store, and the specs to run over; with pytest::

    @pytest.mark.parametrize("spec", store_specs(KVType), ids=spec_name)
    class TestMyStore(KVStoreConformance):
        def open(self, spec):
            return MyStore(spec)

A store must come empty, zeroed and able to rotate and to copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from kvcellar.backends.base import KVStore, Part
from kvcellar.errors import ComputeError
from kvcellar.testing.rotation import random_rows, rotated_rows
from kvcellar.types import (
    ByteArray,
    CacheSpec,
    Float32Array,
    Int64Array,
    KVType,
    LayerSpec,
    RopeSpec,
    finite_rows,
)

PARTS: tuple[Part, ...] = ("k", "v")

ROPES: Mapping[str, RopeSpec] = MappingProxyType(
    {
        "normal": RopeSpec("normal", 64),
        "neox": RopeSpec("neox", 64),
        "partial": RopeSpec("normal", 24),
        "partial neox": RopeSpec("neox", 48, freq_base=500.0),
        "factors": RopeSpec("normal", 64, factors=tuple(1.0 + i / 8 for i in range(32))),
        "linear": RopeSpec("neox", 64, freq_scale=0.25),
        "yarn": RopeSpec("neox", 64, freq_scale=0.25, ext_factor=1.0, n_ctx_orig=512),
        "yarn, half": RopeSpec("normal", 64, 1e5, 0.5, 0.5, 1.3, n_ctx_orig=4096),
    }
)
"""The kinds of rotation; those of YaRN have a magnitude that a shift must not apply again."""

ROUNDING: Mapping[str, float] = MappingProxyType(
    {"f32": 1e-6, "f16": 2**-10, "bf16": 2**-8, "q8_0": 0.02, "q5_1": 0.15, "q5_0": 0.2}
)
"""The largest error of a type, as a share of the largest value of the rows; else 0.35."""

_LAYERS = (LayerSpec(2, 64, 32, RopeSpec("normal", 64)), LayerSpec(1, 32, 64))
_N = 8


def store_specs(kinds: Iterable[KVType]) -> list[CacheSpec]:
    """Eight cells of two unlike layers: each type, in each layout of V that it has."""
    return [
        CacheSpec(_N, 1, _LAYERS, kind, kind, flash_attn)
        for kind in kinds
        for flash_attn in (True, False)
        if flash_attn or not kind.is_quantized
    ]


def spec_name(spec: CacheSpec) -> str:
    """What tells one spec from the others."""
    return f"{spec.type_k.label}-{'across' if spec.v_trans else 'rows'}"


def tolerance(kind: KVType, rows: Float32Array) -> float:
    """By how much rows that were stored once may be off."""
    return ROUNDING.get(kind.label, 0.35) * float(np.abs(rows).max())


class KVStoreConformance:
    """Round trips, raw rows, copies, wiping, resizing and rotation, for any spec."""

    def open(self, spec: CacheSpec) -> KVStore:
        """A new store of that shape."""
        raise NotImplementedError

    def test_a_new_store_holds_zeros(self, spec: CacheSpec) -> None:
        """Padding is looked at by attention, so it must not hold a NaN."""
        store = self.open(spec)
        assert store.spec == spec
        assert not any(rows.any() for rows in _raw(store, np.arange(_N)))
        assert not store.read(1, "v", np.arange(_N)).any()
        store.close()

    def test_written_rows_are_read_within_the_rounding_of_the_type(self, spec: CacheSpec) -> None:
        """In every layer and part, at scattered cells in the order asked for."""
        store = _filled(self.open(spec))
        cells = np.array([6, 1, 3])
        for i, part, rows in _content(spec):
            error = np.abs(store.read(i, part, cells) - rows[cells])
            assert error.max() <= tolerance(_kind(spec, part), rows), (i, part)
        store.close()

    def test_writing_touches_only_its_cells_and_layer(self, spec: CacheSpec) -> None:
        """All other bytes stay zero."""
        store, layer = self.open(spec), spec.layers[0]
        k, v = random_rows(1, layer.n_embd_k), random_rows(1, layer.n_embd_v)
        store.write(0, np.array([2]), k, v)
        for part in PARTS:
            assert store.read_raw(0, part, np.array([2])).any()
            assert not store.read_raw(0, part, np.array([0, 1, 3, 4, 5, 6, 7])).any()
            assert not store.read_raw(1, part, np.arange(_N)).any()
        store.close()

    def test_raw_rows_go_back_bit_for_bit(self, spec: CacheSpec) -> None:
        """Whatever the bytes, NaN included."""
        store, rng, cells = self.open(spec), np.random.default_rng(0), np.array([7, 0, 4])
        for i, layer in enumerate(spec.layers):
            for part, width in (("k", layer.n_embd_k), ("v", layer.n_embd_v)):
                which: Part = "k" if part == "k" else "v"
                shape = (3, _kind(spec, which).row_bytes(width))
                rows = rng.integers(0, 256, shape, dtype=np.uint8)
                store.write_raw(i, which, cells, rows)
                np.testing.assert_array_equal(store.read_raw(i, which, cells), rows)
        store.close()

    def test_rows_that_are_not_finite_are_refused(self, spec: CacheSpec) -> None:
        """In K and in V, in any row; what overflows the type is none either. Nothing is written."""
        store, cells = _filled(self.open(spec)), np.array([6, 1, 3])
        before, layer = _raw(store, np.arange(_N)), spec.layers[1]
        for value in (np.nan, np.inf, -np.inf, 3e38, -3e38):
            for part in PARTS:
                rows = {name: random_rows(3, layer.n_embd_k, 1) for name in PARTS}
                rows["v"] = random_rows(3, layer.n_embd_v, 2)
                rows[part][1, 5] = value
                message = "it was stored"
                try:
                    store.write(1, cells, rows["k"], rows["v"])
                except ComputeError as error:
                    message = str(error)
                assert f"{part.upper()} of layer 1 for token 1" in message, (value, part, message)
                _assert_equal(_raw(store, np.arange(_N)), before)
        store.close()

    def test_rotating_the_largest_keys_keeps_them_finite(self, spec: CacheSpec) -> None:
        """A pair of values may turn into one that is 1.4 times as large."""
        store, cells = self.open(spec), np.arange(_N)
        layer, n_times, v = spec.layers[0], 0, random_rows(_N, spec.layers[0].n_embd_v)
        for scale in 2.0 ** -np.arange(5):
            k = np.sign(random_rows(_N, layer.n_embd_k)) * np.float32(spec.type_k.largest * scale)
            try:
                store.write(0, cells, k, v)
            except ComputeError:  # under a transform a row may have larger values still
                continue
            for _ in range(3):
                store.rotate(cells, np.arange(_N, dtype=np.int32) + 1)
                assert finite_rows(store.read_raw(0, "k", cells), spec.type_k).all()
            n_times += 1
        assert n_times
        store.close()

    def test_what_is_read_is_a_copy(self, spec: CacheSpec) -> None:
        """Writing to it changes nothing in the store."""
        store = _filled(self.open(spec))
        before = _raw(store, np.arange(_N))
        store.read_raw(0, "k", np.arange(_N))[:] = 0
        store.read(0, "v", np.arange(_N))[:] = 0
        _assert_equal(_raw(store, np.arange(_N)), before)
        store.close()

    def test_copying_is_bit_for_bit_in_every_layer(self, spec: CacheSpec) -> None:
        """To cells that are no neighbours."""
        store = _filled(self.open(spec))
        src, dst = np.array([0, 5]), np.array([7, 2])
        expected = _raw(store, src)
        store.copy(src, dst)
        _assert_equal(_raw(store, dst), expected)
        _assert_equal(_raw(store, src), expected)
        store.close()

    def test_copying_may_overlap(self, spec: CacheSpec) -> None:
        """All sources are read before any target is written."""
        store = _filled(self.open(spec))
        before = _raw(store, np.arange(_N - 1))
        store.copy(np.arange(_N - 1), np.arange(1, _N))
        _assert_equal(_raw(store, np.arange(1, _N)), before)
        store.close()

    def test_wiping_zeroes_only_those_cells(self, spec: CacheSpec) -> None:
        """In every layer."""
        store = _filled(self.open(spec))
        kept, gone = np.array([0, 1, 4, 5, 6, 7]), np.array([2, 3])
        before = _raw(store, kept)
        store.wipe(gone)
        _assert_equal(_raw(store, kept), before)
        assert not any(rows.any() for rows in _raw(store, gone))
        store.close()

    def test_zeroing_clears_everything(self, spec: CacheSpec) -> None:
        """Every byte."""
        store = _filled(self.open(spec))
        store.zero()
        assert not any(rows.any() for rows in _raw(store, np.arange(_N)))
        store.close()

    def test_resizing_moves_rows_and_zeroes_the_rest(self, spec: CacheSpec) -> None:
        """To more cells and to fewer, bit for bit; the store works on."""
        for size, src, dst in ((20, [7, 0, 3], [1, 19, 4]), (3, [6, 2], [0, 2]), (8, [], [])):
            store = _filled(self.open(spec))
            before = _raw(store, np.array(src, np.int64))
            store.resize(size, np.array(src, np.int64), np.array(dst, np.int64))
            assert store.spec == replace(spec, size=size)
            rest = np.setdiff1d(np.arange(size), dst)
            _assert_equal(_raw(store, np.array(dst, np.int64)), before)
            assert not any(rows.any() for rows in _raw(store, rest))
            store.copy(np.array([0]), np.array([size - 1]))
            store.rotate(np.array([size - 1]), np.array([3], np.int32))
            store.close()

    def test_no_cells_are_no_work(self, spec: CacheSpec) -> None:
        """Every verb takes an empty list of cells."""
        store, none = _filled(self.open(spec)), np.empty(0, np.int64)
        before = _raw(store, np.arange(_N))
        store.copy(none, none)
        store.wipe(none)
        store.rotate(none, np.empty(0, np.int32))
        for i, layer in enumerate(spec.layers):
            rows = np.empty((0, layer.n_embd_k), np.float32)
            store.write(i, none, rows, np.empty((0, layer.n_embd_v), np.float32))
            store.write_raw(i, "k", none, store.read_raw(i, "k", none))
            assert store.read(i, "k", none).shape == rows.shape
        _assert_equal(_raw(store, np.arange(_N)), before)
        store.close()

    def test_rotating_turns_keys_by_the_formula(self, spec: CacheSpec) -> None:
        """Every kind of rotation, forwards and backwards, within the rounding of the type."""
        cells, shifts = np.array([5, 0, 2, 7]), np.array([7, -3, 1, -20], np.int32)
        for name, rope in ROPES.items():
            store = _filled(self.open(_with_rope(spec, rope)))
            layer = store.spec.layers[0]
            before = store.read(0, "k", cells)
            store.rotate(cells, shifts)
            error = np.abs(store.read(0, "k", cells) - rotated_rows(before, shifts, layer)).max()
            assert error <= tolerance(spec.type_k, before) + 1e-5, (name, error)
            store.close()

    def test_ten_shifts_of_one_are_one_shift_of_ten(self, spec: CacheSpec) -> None:
        """YaRN's magnitude included; ten shifts round ten times."""
        cells, written = np.arange(_N), _content(spec)[0][2]
        for name, rope in ROPES.items():
            store, other = (_filled(self.open(_with_rope(spec, rope))) for _ in range(2))
            rounding = max(_rms(store.read(0, "k", cells) - written), 1e-6)
            for _ in range(10):
                store.rotate(cells, np.ones(_N, np.int32))
            other.rotate(cells, np.full(_N, 10, np.int32))
            error = _rms(store.read(0, "k", cells) - other.read(0, "k", cells))
            assert error <= 10 * rounding, (name, error, rounding)
            store.close()
            other.close()

    def test_rotating_keeps_what_does_not_turn(self, spec: CacheSpec) -> None:
        """A shift of 0, other cells, V, and layers without RoPE keep their very bytes."""
        store = _filled(self.open(spec))
        before = _raw(store, np.arange(_N))
        store.rotate(np.array([1, 2, 3]), np.array([0, 4, 0], np.int32))
        after = _raw(store, np.arange(_N))
        others = np.array([0, 1, 3, 4, 5, 6, 7])
        np.testing.assert_array_equal(after[0][others], before[0][others])
        assert not np.array_equal(after[0][2], before[0][2])
        _assert_equal(after[1:], before[1:])
        store.close()

    def test_partial_rotation_keeps_the_rest_of_each_head(self, spec: CacheSpec) -> None:
        """Bit for bit where values do not share a scale."""
        if spec.type_k.is_quantized:
            return
        store = _filled(self.open(_with_rope(spec, ROPES["partial"])))
        before = store.read(0, "k", np.arange(_N)).reshape(_N, 2, 64)
        store.rotate(np.arange(_N), np.full(_N, 9, np.int32))
        after = store.read(0, "k", np.arange(_N)).reshape(_N, 2, 64)
        np.testing.assert_array_equal(after[..., 24:], before[..., 24:])
        store.close()

    def test_closing_twice_is_fine(self, spec: CacheSpec) -> None:
        """The second time does nothing."""
        store = self.open(spec)
        store.close()
        store.close()


def _kind(spec: CacheSpec, part: Part) -> KVType:
    return spec.type_k if part == "k" else spec.type_v


def _content(spec: CacheSpec) -> list[tuple[int, Part, Float32Array]]:
    """What :func:`_filled` writes: layer, part, rows."""
    found: list[tuple[int, Part, Float32Array]] = []
    for i, layer in enumerate(spec.layers):
        found.append((i, "k", random_rows(_N, layer.n_embd_k, i)))
        found.append((i, "v", random_rows(_N, layer.n_embd_v, i + 9)))
    return found


def _filled(store: KVStore) -> KVStore:
    content = _content(store.spec)
    for (i, _, k), (_, _, v) in zip(content[::2], content[1::2], strict=True):
        store.write(i, np.arange(_N), k, v)
    return store


def _with_rope(spec: CacheSpec, rope: RopeSpec) -> CacheSpec:
    first, *others = spec.layers
    return replace(spec, layers=(replace(first, rope=rope), *others))


def _rms(x: Float32Array) -> float:
    return float(np.sqrt((x.astype(np.float64) ** 2).mean()))


def _raw(store: KVStore, cells: Int64Array) -> list[ByteArray]:
    layers = range(len(store.spec.layers))
    return [store.read_raw(i, part, cells) for i in layers for part in PARTS]


def _assert_equal(got: list[ByteArray], wanted: list[ByteArray]) -> None:
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
