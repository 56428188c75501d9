"""The attention cache against its naive oracle, driven by Hypothesis."""

from __future__ import annotations

from hypothesis import settings

from kvcellar.testing.machine import AttentionMachine

TestAttentionCache = AttentionMachine.TestCase
TestAttentionCache.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, derandomize=True
)
