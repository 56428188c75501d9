"""The example of docs/adding-an-architecture.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcellar
from kvcellar.errors import UnsupportedModel
from kvcellar.models.gpt2 import Gpt2
from kvcellar.models.registry import ARCHITECTURES
from kvcellar.testing.uncached import uncached_logits
from tests.models.helpers import ShapeWeights
from tests.models.tiny import metadata, tensors

PAGE = Path(__file__).parents[2] / "docs/adding-an-architecture.md"
TEXT = [3, 1, 4, 1, 5, 9]


def _class() -> Any:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["Starcoder2"]


def _keys(**more: Any) -> dict[str, Any]:
    """GPT-2's, under another name."""
    found = {key.replace("gpt2.", "starcoder2."): v for key, v in metadata("gpt2").items()}
    return {**found, "general.architecture": "starcoder2", **more}


def test_the_example_computes_what_gpt2_does_but_for_positions() -> None:
    """At position 0 nothing is rotated, and GPT-2's positions are made to add nothing."""
    parts = tensors("gpt2")
    parts["position_embd.weight"][:] = 0
    gpt2 = uncached_logits(Gpt2(metadata("gpt2"), ShapeWeights(parts)), TEXT)
    got = uncached_logits(_class()(_keys(), ShapeWeights(parts)), TEXT)
    np.testing.assert_allclose(got[0], gpt2[0], rtol=1e-4, atol=1e-5)
    assert not np.allclose(got[-1], gpt2[-1], rtol=1e-2)


def test_the_example_refuses_what_it_leaves_out() -> None:
    with pytest.raises(UnsupportedModel, match=r"starcoder2\.attention\.sliding_window=8"):
        _class()(_keys(**{"starcoder2.attention.sliding_window": 8}), ShapeWeights(tensors("gpt2")))


def test_it_is_an_example_only() -> None:
    assert "starcoder2" not in ARCHITECTURES


@pytest.mark.parametrize("page", ["adding-an-architecture.md", "adding-a-kv-type.md"])
def test_the_pages_name_files_that_there_are(page: str) -> None:
    root, path = Path(kvcellar.__file__).parent, PAGE.with_name(page)
    names = re.findall(r"`((?:models|backends|snapshot|testing)/[\w/]+\.py)`", path.read_text())
    assert len(names) > 5
    assert [name for name in names if not (root / name).is_file()] == []
    tests = re.findall(r"`(tests/[\w/]+\.py)`", path.read_text())
    assert [name for name in tests if not (PAGE.parents[1] / name).is_file()] == []
