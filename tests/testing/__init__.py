"""Tests of kvcellar.testing."""
