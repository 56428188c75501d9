"""Angles, one formula against another that was written on its own."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.backends.numpy.ops import frequencies, magnitude, rotated
from kvcellar.testing.conformance import ROPES
from kvcellar.testing.rotation import naive_frequency, random_rows, rotated_rows
from kvcellar.types import LayerSpec, RopeSpec


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_frequencies_are_those_of_the_naive_formula(rope: RopeSpec) -> None:
    naive = [naive_frequency(rope, i) for i in range(rope.n_rot // 2)]
    np.testing.assert_allclose(frequencies(rope), naive, rtol=1e-12)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_turning_there_and_back_changes_nothing(rope: RopeSpec) -> None:
    heads = random_rows(9, 128).reshape(9, 2, 64)
    there = np.arange(9, dtype=np.int32) * 100
    back = rotated(rotated(heads, there, rope), -there, rope)
    np.testing.assert_allclose(back, heads, atol=2e-6)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_heads_turn_as_naive_rows_do(rope: RopeSpec) -> None:
    rows, positions = random_rows(5, 128), np.array([0, 1, -7, 50, 3], np.int32)
    got = rotated(rows.reshape(5, 2, 64), positions, rope).reshape(5, 128)
    expected = rotated_rows(rows, positions, LayerSpec(2, 64, 64, rope))
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    rope = RopeSpec("neox", 64, freq_scale=0.25, ext_factor=1.0, n_ctx_orig=512)
    share = frequencies(rope) / frequencies(RopeSpec("neox", 64))
    assert share[0] == 1.0
    assert share[-1] == 0.25
    assert (np.diff(share) <= 0).all()


def test_the_magnitude_is_yarns_times_the_models() -> None:
    plain = RopeSpec("normal", 64, attn_factor=1.5, freq_scale=0.25)
    yarn = RopeSpec("normal", 64, attn_factor=1.5, freq_scale=0.25, ext_factor=1.0)
    assert magnitude(plain) == 1.5
    assert magnitude(yarn) == pytest.approx(1.5 * (1 + 0.1 * np.log(4)))


def test_absurd_settings_give_no_exception() -> None:
    rope = RopeSpec("normal", 8, freq_base=1.0, ext_factor=1.0, n_ctx_orig=0)
    assert rotated(np.ones((1, 1, 8), np.float32), np.ones(1, np.int32), rope).shape == (1, 1, 8)
