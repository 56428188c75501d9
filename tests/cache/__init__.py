"""Tests of kvcellar.cache."""
