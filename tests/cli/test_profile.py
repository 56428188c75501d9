"""``kvcellar run --profile``: tables on stderr whose shares are the whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcellar.runtime.generation import Generation, GenerationArguments
from kvcellar.runtime.model import Model
from kvcellar.text.sampler import Sampler
from tests.cli.helpers import Invoke

ROW = re.compile(r"^ *(\S.*?) {2,}(?:(\d+) +)?(\d+\.\d+) +(\d+\.\d)%$")
TITLE = re.compile(r"^(prefill|decode): (\d+) tokens, (\d+\.\d+) ms each$")


@pytest.fixture
def talker(completer: Path) -> Path:
    """A model that completes texts, since it has no template."""
    return completer


def tables(text: str) -> dict[str, tuple[int, float, list[tuple[str, float, float]]]]:
    """Of each title: tokens, ms a token, and the rows with their ms and share."""
    found: dict[str, tuple[int, float, list[tuple[str, float, float]]]] = {}
    rows: list[tuple[str, float, float]] = []
    for line in text.splitlines():
        if title := TITLE.match(line):
            rows = []
            found[title[1]] = (int(title[2]), float(title[3]), rows)
        elif row := ROW.match(line):
            rows.append((row[1], float(row[3]), float(row[4])))
    return found


def test_shares_sum_to_the_whole(invoke: Invoke, talker: Path) -> None:
    args = ("hello", "-n", "9", "--temp", "0", "--threads", "1", "--profile")
    result = invoke("run", talker, *args)
    assert result.exit_code == 0, result.output
    found = tables(result.stderr)
    assert (found["prefill"][0], found["decode"][0]) == (5, 8)
    for n_tokens, ms, rows in found.values():
        assert len(rows) >= 8
        assert sum(share for _, _, share in rows) == pytest.approx(100, abs=0.05 * len(rows))
        assert sum(ms for _, ms, _ in rows) == pytest.approx(ms, abs=5e-4 * (len(rows) + 1))
        assert n_tokens > 0


def test_each_thing_that_takes_time_has_a_row(invoke: Invoke, talker: Path) -> None:
    args = ("hello", "-n", "9", "--temp", "0.5", "--threads", "1", "--profile")
    found = tables(invoke("run", talker, *args).stderr)
    names = {name for name, _, _ in found["decode"][2]}
    assert names >= {"MUL_MAT f32", "RMS_NORM", "cells and plans", "graph and inputs", "logits"}
    assert names >= {"sampling", "detokenising", "everything else"}
    assert "sampling" not in {name for name, _, _ in found["prefill"][2]}


def test_the_text_is_the_same_with_a_profile(invoke: Invoke, talker: Path) -> None:
    args = ("hello", "-n", "9", "--temp", "0", "--threads", "1")
    plain, profiled = invoke("run", talker, *args), invoke("run", talker, *args, "--profile")
    assert profiled.stdout == plain.stdout
    assert plain.stderr == ""


def test_one_token_has_no_table_of_decoding(invoke: Invoke, talker: Path) -> None:
    result = invoke("run", talker, "hello", "-n", "1", "--profile")
    assert list(tables(result.stderr)) == ["prefill"]
    assert "1 of 1 graphs computed node by node" in result.stderr


@pytest.mark.parametrize(
    ("n", "said"), [(4, "so the figures include it"), (9, "µs a node is subtracted")]
)
def test_it_says_whether_there_were_enough_graphs(
    invoke: Invoke, talker: Path, n: int, said: str
) -> None:
    result = invoke("run", talker, "hello", "-n", str(n), "--temp", "0", "--profile")
    note = result.stderr.splitlines()[-1]
    assert said in note
    assert f"{n // 2} of {n - 1} graphs computed node by node; " in note


def test_it_comes_after_an_error_too(invoke: Invoke, talker: Path) -> None:
    result = invoke("run", talker, "hello", "-n", "-1", "--temp", "0", "--n-ctx", "16", "--profile")
    assert result.exit_code == 1
    assert tables(result.stderr)["decode"][0] == 11


def test_without_it_nothing_is_timed(
    invoke: Invoke, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("timed without being asked")

    monkeypatch.setattr("kvcellar.runtime.profile.Profile.timed", never)
    monkeypatch.setattr("kvcellar.backends.ggml.profile.GraphProfiler.compute", never)
    assert invoke("run", talker, "hello", "-n", "3").exit_code == 0


def test_without_it_sampling_is_called_directly(talker: Path) -> None:
    with Model.from_gguf(talker, n_threads=1) as model:
        sequence = model.context(n_ctx=32).sequence("hello")
        sample = Generation(sequence, GenerationArguments(2), {})._sample
        assert getattr(sample, "__func__", None) is Sampler.sample
