"""The attention cache against its naive oracle, driven by Hypothesis, over every store."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from kvcellar.testing.machine import AttentionMachine, machine_over
from kvcellar.testing.signs import Setup
from kvcellar.testing.stores import NullStore
from tests.cache.stores import SETUPS
from tests.profiles import examples

TestAttentionCache = AttentionMachine.TestCase
TestAttentionCache.settings = examples(120, steps=40, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_real_bytes_agree_too(setup: Setup) -> None:
    few = examples(15, steps=40, derandomize=True)
    run_state_machine_as_test(machine_over(setup), settings=few)


def test_a_store_without_bytes_will_do() -> None:
    few = examples(10, derandomize=True)
    run_state_machine_as_test(machine_over(Setup(NullStore)), settings=few)
