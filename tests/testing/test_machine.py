"""The attention cache against its naive oracle, driven by Hypothesis, over every store."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvcellar.testing.machine import AttentionMachine, machine_over
from kvcellar.testing.signs import Setup
from kvcellar.testing.stores import NullStore
from tests.cache.stores import SETUPS

TestAttentionCache = AttentionMachine.TestCase
TestAttentionCache.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, derandomize=True
)


@pytest.mark.parametrize("setup", SETUPS)
def test_real_bytes_agree_too(setup: Setup) -> None:
    few = settings(
        max_examples=30,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=[*HealthCheck],
    )
    run_state_machine_as_test(machine_over(setup), settings=few)


def test_a_store_without_bytes_will_do() -> None:
    few = settings(max_examples=10, deadline=None, derandomize=True)
    run_state_machine_as_test(machine_over(Setup(NullStore)), settings=few)
