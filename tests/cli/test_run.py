"""``kvcellar run``: text on stdout, all else on stderr, and every way to end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kvcellar.cli.options import Sampling, expand_groups
from kvcellar.text.sampler import SamplerOptions
from tests.cli.helpers import Invoke, Start


@pytest.fixture
def talker(completer: Path) -> Path:
    """A model that completes texts, since it has no template."""
    return completer


def test_text_goes_to_stdout_and_how_it_ended_to_stderr(invoke: Invoke, talker: Path) -> None:
    result = invoke("run", talker, "hello", "-n", "8", "--temp", "0", "--threads", "1")
    assert result.exit_code == 0
    assert result.stderr == "(cut off after 8 tokens; -n allows more)\n"
    assert result.stdout.endswith("\n")
    assert len(result.stdout) == 9


def test_the_pre_tokenizer_can_be_named(invoke: Invoke, talker: Path, tmp_path: Path) -> None:
    data = talker.read_bytes()
    unknown = tmp_path / "unknown.gguf"
    unknown.write_bytes(data.replace(b"gpt-2", b"gpt-9"))
    common = ("hello", "-n", "8", "--temp", "0", "--threads", "1")
    refused = invoke("run", unknown, *common)
    assert refused.exit_code == 1
    assert "gpt-9" in refused.stderr
    assert "--pre NAME" in refused.stderr
    named = invoke("run", unknown, *common, "--pre", "gpt-2")
    assert named.stdout == invoke("run", talker, *common).stdout


def test_a_seed_makes_it_repeatable(invoke: Invoke, talker: Path) -> None:
    texts = {
        invoke("run", talker, "hello", "-n", "20", "--seed", seed).stdout
        for seed in ("1", "1", "2")
    }
    assert len(texts) == 2


@pytest.mark.parametrize("args", [["hello"], ["-"], []])
def test_the_prompt_may_be_piped(invoke: Invoke, talker: Path, args: list[str]) -> None:
    common = ("-n", "8", "--temp", "0")
    expected = invoke("run", talker, "hello", *common).stdout
    assert invoke("run", talker, *args, *common, stdin="hello\n").stdout == expected


def test_stats_go_to_stderr(invoke: Invoke, talker: Path) -> None:
    result = invoke("run", talker, "hello", "-n", "5", "--temp", "0", "--stats", "--n-ctx", "64")
    assert len(result.stdout) == 6
    for text in (
        "prefill     5 tokens",
        "decode      4 tokens",
        "first token after",
        "9 of 64 used",
    ):
        assert text in result.stderr
    assert "KiB (K f16, V f16)" in result.stderr


def test_a_chat_prompt_goes_through_the_template(invoke: Invoke, chatter: Path) -> None:
    args = ("-n", "8", "--temp", "0", "--stats")
    plain, chat, system = (
        invoke("run", chatter, "hi", *args, *more)
        for more in (["--raw"], [], ["--system", "Be brief."])
    )
    assert len({plain.stdout, chat.stdout, system.stdout}) == 3
    assert "prefill     2 tokens" in plain.stderr
    assert invoke("run", chatter, "hi", *args[:-1], "--chat").stdout == chat.stdout
    n_chat = len("user\nhi\nassistant\n") + 3
    assert f"prefill     {n_chat} tokens" in chat.stderr
    n_system = n_chat + len("system\nBe brief.\n") + 2
    assert f"prefill     {n_system} tokens" in system.stderr


def test_a_stop_string_ends_the_text(invoke: Invoke, talker: Path) -> None:
    text = invoke("run", talker, "hello", "-n", "20", "--temp", "0").stdout
    stop = text[10:12]
    args = ("-n", "20", "--temp", "0", "--stop", "\x00none", "--stop", stop)
    assert invoke("run", talker, "hello", *args).stdout.rstrip("\n") == text[
        : text.index(stop)
    ].rstrip("\n")


def test_a_prompt_may_be_read_from_a_file(invoke: Invoke, talker: Path, tmp_path: Path) -> None:
    file, common = tmp_path / "prompt.txt", ("-n", "8", "--temp", "0", "-t", "1")
    file.write_text("hello\n")
    wanted = invoke("run", talker, "hello", *common)
    assert invoke("run", talker, "--file", file, *common).stdout == wanted.stdout
    for args in (["hello", "-f", file], ["-f", tmp_path / "none"], ["-f", tmp_path]):
        assert invoke("run", talker, *args, *common).exit_code == 2
    file.write_bytes(b"\xff")
    assert "UTF-8" in invoke("run", talker, "-f", file, *common).stderr


def test_a_seed_of_minus_one_is_random(invoke: Invoke, talker: Path) -> None:
    args = ("run", talker, "hello", "-n", "20", "--temp", "3", "--top-k", "0", "--seed", "-1")
    assert invoke(*args).stdout != invoke(*args).stdout


FLAGS = {
    "--temp 0.3 --repeat-penalty 1.1 --repeat-last-n 9": {
        "temperature": 0.3,
        "repetition_penalty": 1.1,
        "penalty_last_n": 9,
    },
    "-l 5=1.5 --logit-bias 6-2 -l 7+3 -l 8=-inf": {
        "logit_bias": {5: 1.5, 6: -2.0, 7: 3.0, 8: -np.inf}
    },
    "--samplers top-k;temp;MIN_P;nucleus;typical": {
        "samplers": ("top_k", "temperature", "min_p", "top_p", "typ_p")
    },
    r"--dry-multiplier 0.8 --dry-sequence-breaker \n --dry-sequence-breaker x": {
        "dry_multiplier": 0.8,
        "dry_sequence_breakers": ("\n", "x"),
    },
    "--dry-sequence-breaker none --dry-base 2 --dry-allowed-length 3 --dry-penalty-last-n -1": {
        "dry_sequence_breakers": (),
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": -1,
    },
    "--typical 0.5 --top-nsigma 1 --xtc-probability 0.5 --xtc-threshold 0.2 --min-keep 2": {
        "typical_p": 0.5,
        "top_n_sigma": 1.0,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "min_keep": 2,
    },
    "--mirostat 2 --mirostat-ent 4 --mirostat-lr 0.2 --dynatemp-range 0.1 --dynatemp-exp 2": {
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "dynatemp_range": 0.1,
        "dynatemp_exponent": 2.0,
    },
    "--adaptive-target 0.4 --adaptive-decay 0.5 --penalty-over answer --seed 3": {
        "adaptive_target": 0.4,
        "adaptive_decay": 0.5,
        "penalty_over": "answer",
        "seed": 3,
    },
    "": {},
}


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_become_the_options_of_a_sampler(flags: str) -> None:
    found: list[SamplerOptions] = []

    def command(*, sampling: Sampling) -> None:
        found.append(sampling.checked())

    app = typer.Typer()
    app.command()(expand_groups(command))
    result = CliRunner().invoke(app, flags.split())
    assert result.exit_code == 0, result.output
    assert found == [SamplerOptions(**FLAGS[flags])]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--logit-bias", "5"], "--logit-bias '5': must be ID=VALUE"),
        (["--samplers", "top_k;infill"], "samplers: there is none called 'infill'"),
        (["--temp", "nan"], "temperature"),
        (["--top-p", "2"], "top_p"),
        (["--seed", "-2"], "seed"),
        (["--top-k", "9999999999999"], "top_k must be an integer in [0 (off), 2147483647]"),
        (["-n", "-2"], "--max-tokens (-n) must be -1 (no limit) or in [0, 2147483647], found -2"),
        (["-n", str(2**31)], "--max-tokens (-n) must be -1"),
        (["--n-ctx", "0"], "n_ctx"),
        (["--n-ctx", "9999999999"], "n_ctx"),
        (["--n-ubatch", "0"], "n_ubatch"),
        (["--type-k", "q9"], "unknown K/V type 'q9'"),
        (["--threads", "0"], "n_threads"),
        (["--n-ctx", "3"], "5 cells needed, 3 free"),
        (["--stop", ""], "stop"),
    ],
)
def test_bad_options_are_named(invoke: Invoke, talker: Path, args: list[str], message: str) -> None:
    result = invoke("run", talker, "hello", *args)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stdout == ""


def test_a_cache_beyond_what_the_model_was_trained_for_is_told(
    invoke: Invoke, talker: Path
) -> None:
    result = invoke("run", talker, "hello", "-n", "2", "--temp", "0", "--n-ctx", "100000")
    assert result.exit_code == 0
    [warning] = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert warning.startswith(f"warning: n_ctx=100000: {talker.name} was trained for ")


def test_an_empty_prompt_is_an_error(invoke: Invoke, talker: Path) -> None:
    result = invoke("run", talker, stdin="")
    assert (result.exit_code, result.stderr) == (1, "error: the prompt is empty\n")


def test_a_full_cache_ends_the_text_with_an_error(invoke: Invoke, talker: Path) -> None:
    result = invoke("run", talker, "hello", "-n", "-1", "--temp", "0", "--n-ctx", "16", "--stats")
    assert result.exit_code == 1
    assert len(result.stdout.rstrip("\n")) >= 11
    assert "error: 1 cell needed, 0 free: use a larger --n-ctx" in result.stderr
    assert "16 of 16 used" in result.stderr


def test_a_model_without_a_tokenizer_says_so(invoke: Invoke, shared: Path) -> None:
    result = invoke("run", shared / "models/llama-dense.gguf", "hello")
    assert result.exit_code == 1
    assert "has no tokenizer: pass token ids instead of text, from Python only" in result.stderr


def test_an_empty_place_is_not_the_current_folder(
    invoke: Invoke, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for args in (["run", talker, "hello", "-n", "1"], ["chat", talker]):
        result = invoke(*args, "--prompt-cache", "", stdin="")
        assert result.exit_code == 1
        assert result.stderr == "error: --prompt-cache is empty: name a folder or a URL\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_characters_that_the_terminal_lacks_are_replaced(
    start: Start, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("LC_ALL", "C")
    with start("run", talker, os.fsencode("caf\xe9").decode(), "-n", "4", "--seed", "1") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.isascii()
    with start("info", talker) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.isascii()


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_quietly(start: Start, talker: Path) -> None:
    process = start("run", talker, "hello", "-n", "-1", "--temp", "0", "--n-ctx", "100000")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read().count(b"\n") == 1  # the warning of a large cache


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_keeps_what_was_written(start: Start, talker: Path) -> None:
    args = ("-n", "-1", "--temp", "0", "--n-ctx", "100000", "--threads", "1", "--stats")
    with start("run", talker, "hello", *args) as process:
        assert process.stdout is not None
        first = process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first) == 5
    assert rest.endswith(b"\n")
    assert b"Traceback" not in err
    assert b"first token after" in err


def test_the_demo_model_goes_on_with_a_story(invoke: Invoke, smollm2: Path) -> None:
    args = ("-n", "12", "--temp", "0", "--threads", "1", "--n-ctx", "64", "--stop", "\n")
    result = invoke("run", smollm2, "The capital of France is", "--raw", *args)
    assert result.exit_code == 0, result.stderr
    assert "Paris" in result.stdout
