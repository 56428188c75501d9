"""The command line, the scenarios as data, and one engine run for real on a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import suite
from _case import (
    LLAMA_CPP,
    LLAMA_CPP_PLAIN,
    LLAMA_CPP_POOL,
    LLAMA_CPP_POOL_PLAIN,
    OURS,
    Case,
    Sizes,
)
from _machine import describe
from _peers import Peer, engines
from _results import Results
from scenarios import makers

METHODS = {"fill", "extend", "rewind", "decode", "fork", "shift", "verbs", "memory"}
NAMES = {peer.name for peer in engines()}


def all_cases(sizes: Sizes) -> list[Case]:
    return [case for make in makers().values() for case in make(sizes)]


@pytest.mark.parametrize("sizes", [Sizes(), Sizes.quick()], ids=["full", "quick"])
def test_every_case_is_well_formed(sizes: Sizes) -> None:
    for case in all_cases(sizes):
        assert case.engines[0] == OURS
        assert set(case.engines) <= NAMES
        assert case.settings["n_ctx"] % 256 == 0 or case.model == "tiny"
        assert case.settings["n_seq_max"] >= case.settings["n_seqs"]
        for step in case.steps:
            for question, _ in (step.call, *step.before):
                assert question in METHODS
            assert bool(step.label) == bool(step.units)


def test_no_label_is_used_twice() -> None:
    labels = [step.label for case in all_cases(Sizes()) for step in case.steps if step.label]
    assert len(labels) == len(set(labels))


def test_groups_are_named_like_their_cases() -> None:
    for group, make in makers().items():
        assert {case.group for case in make(Sizes())} == {group}


def test_the_scenarios_that_were_promised_are_there() -> None:
    labels = " / ".join(step.label for case in all_cases(Sizes()) for step in case.steps)
    for text in (
        *(f"decode at {n}" for n in (512, 2048, 4096, 8000)),
        "prefill of 512",
        "prefill of 4096",
        "8 sequences of 1024",
        "behind a shared 1024",
        "fork 1024",
        "shift",
        "verbs, 32768 cells",
        "K and V q8_0, decode at 4096",
        "K and V q4_0, decode at 4096",
        "memory at 4096",
        "start-up",
    ):
        assert text in labels


def test_contexts_hold_what_is_put_into_them() -> None:
    sizes = Sizes()
    for case in all_cases(sizes):
        per_seq = case.settings["n_ctx"] // case.settings["n_seqs"]
        wanted = [dict(step.call[1]) for step in case.steps]
        most = max(args.get("n", 0) + args.get("own", 0) for args in wanted)
        steps = max(args.get("steps", 0) for args in wanted)
        assert most + steps <= per_seq


def test_the_command_line_has_sensible_defaults() -> None:
    args = suite.parse([])
    assert (args.repeats, args.quick, args.only, args.peer_python) == (5, False, None, [])
    assert args.threads >= 1
    assert suite.parse(["--quick"]).repeats == 1
    assert suite.parse(["--quick", "--repeats", "3"]).repeats == 3


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "latest"),
        (["--quick"], "quick"),
        (["--quick", "--repeats", "3"], "quick"),
    ],
)
def test_a_quick_run_leaves_the_kept_figures_alone(argv: list[str], expected: str) -> None:
    args = suite.parse(argv)
    kept = suite.RESULTS / expected
    assert [args.json, args.markdown, args.plot] == [
        kept.with_suffix(suffix) for suffix in (".json", ".md", ".svg")
    ]


def test_figures_that_were_kept_are_shown_beside_their_file(tmp_path: Path) -> None:
    args = suite.parse(["--from", str(tmp_path / "old.json"), "--plot", str(tmp_path / "a.svg")])
    assert (args.markdown, args.plot) == (tmp_path / "old.md", tmp_path / "a.svg")


def test_the_help_says_how_many_rounds_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        suite.parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "long steps have half as many, or one" in text
    assert "with --quick results/quick.json" in text


def test_llama_cpp_runs_both_ways_where_attention_is_long() -> None:
    both: set[str] = set()
    for case in all_cases(Sizes()):
        has = [name in case.engines for name in (LLAMA_CPP_PLAIN, LLAMA_CPP_POOL_PLAIN)]
        pools = [name in case.engines for name in (LLAMA_CPP, LLAMA_CPP_POOL)]
        if any(has):
            assert has == pools
            assert case.settings["type_kv"] == "f16"  # quantised V needs flash attention
            both |= {step.label for step in case.steps}
    labels = " / ".join(both)
    for text in (
        *(f"decode at {n}" for n in (512, 2048, 4096, 8000)),
        *(f"prefill of {n}" for n in (512, 4096)),
        "decode, 8 sequences of 1024",
        "decode, 8 sequences of 64 behind a shared 1024",
    ):
        assert text in labels
    assert "verbs" not in labels
    assert "start-up" not in labels


@pytest.mark.parametrize("argv", [["--repeats", "0"], ["--threads", "0"], ["--only", "nothing"]])
def test_bad_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        suite.parse(argv)
    assert argv[0] in capsys.readouterr().err


def test_the_machine_is_described_without_naming_it() -> None:
    about = describe(Path("/home/somebody/model.gguf"), 2, 5)
    assert about["model"] == "model.gguf"
    assert (about["threads"], about["repeats"]) == (2, 5)
    assert "somebody" not in str(about)


def _arguments(folder: Path, model: Path, *more: str) -> list[str]:
    files = {name: str(folder / f"out.{name}") for name in ("json", "markdown", "plot")}
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    return ["--model", str(model), "--quick", "--threads", "1", *options, *more]


@pytest.mark.slow
def test_our_engine_does_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("suite.locate", lambda _: _only_ours())
    model = suite.write_tiny(tmp_path / "tiny.gguf", 1024)
    groups = [part for name in makers() for part in ("--only", name)]
    monkeypatch.setattr("sys.argv", ["suite", *_arguments(tmp_path, model, *groups)])
    assert suite.main() == 0
    results = Results.load(tmp_path / "out.json")
    assert [note for note in results.notes if "failed" in note] == []
    labels = {scenario.label.split(":")[0] for scenario in results.scenarios}
    wanted = {s.label.split(":")[0] for c in all_cases(Sizes.quick()) for s in c.steps if s.label}
    assert labels == wanted
    assert all(value > 0 for s in results.scenarios for value in s.engines[OURS])
    printed = capsys.readouterr().out
    assert "skipped llama.cpp: not here" in printed
    assert (tmp_path / "out.plot").read_text().startswith("<svg")
    assert "skipped llama.cpp" in (tmp_path / "out.markdown").read_text()
    kept = ["suite", *_arguments(tmp_path, model), "--from", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", kept)
    assert suite.main() == 0
    assert capsys.readouterr().out == printed


def test_ctrl_c_reports_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("suite.locate", lambda _: _only_ours())
    monkeypatch.setattr("suite.Runner.run", interrupt)
    model = suite.write_tiny(tmp_path / "tiny.gguf", 1024)
    monkeypatch.setattr("sys.argv", ["suite", *_arguments(tmp_path, model)])
    assert suite.main() == 130
    assert "interrupted" in capsys.readouterr().out
    assert "interrupted: not everything was measured" in Results.load(tmp_path / "out.json").notes


def _only_ours() -> tuple[dict[str, tuple[Peer, str]], dict[str, str]]:
    return {OURS: (engines()[0], sys.executable)}, {"llama.cpp": "not here"}
