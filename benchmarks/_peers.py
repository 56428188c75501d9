"""Which engines there are, and in which interpreter each is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from _case import (
    LLAMA_CPP,
    LLAMA_CPP_PLAIN,
    LLAMA_CPP_POOL,
    LLAMA_CPP_POOL_PLAIN,
    OPENVINO,
    OURS,
    TRANSFORMERS,
    peer_of,
)

Finder = Callable[[str, str], bool]


@dataclass(frozen=True)
class Peer:
    """An engine in one setting.

    Attributes:
        name: of both.
        script: its worker.
        modules: which must be importable.
        package: to install.
        unified: whether all sequences share one pool of cells.
        flash: whether attention is computed without keeping its scores.
    """

    name: str
    script: str
    modules: tuple[str, ...]
    package: str
    unified: bool = False
    flash: bool = True


def engines() -> tuple[Peer, ...]:
    """All engines, ours first."""
    llama = ("_worker_llama_cpp.py", ("llama_cpp",), "llama-cpp-python")
    return (
        Peer(OURS, "_worker_kvcellar.py", ("kvcellar",), "kvcellar"),
        Peer(LLAMA_CPP, *llama),
        Peer(LLAMA_CPP_PLAIN, *llama, flash=False),
        Peer(LLAMA_CPP_POOL, *llama, unified=True),
        Peer(LLAMA_CPP_POOL_PLAIN, *llama, unified=True, flash=False),
        Peer(OPENVINO, "_worker_openvino.py", ("openvino_genai",), "openvino-genai"),
        Peer(
            TRANSFORMERS,
            "_worker_transformers.py",
            ("transformers", "torch", "gguf"),
            "transformers torch gguf accelerate",
        ),
    )


def has_module(python: str, module: str) -> bool:
    """Whether an interpreter could import a module."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], check=False).returncode == 0
    except OSError as error:
        raise SystemExit(f"--peer-python {python}: {error}") from error


def locate(
    pythons: Iterable[str], finder: Finder = has_module
) -> tuple[dict[str, tuple[Peer, str]], dict[str, str]]:
    """The installed engines with the first interpreter that has them, and why others are not."""
    candidates = [sys.executable, *pythons]
    found: dict[str, tuple[Peer, str]] = {}
    missing: dict[str, str] = {}
    for peer in engines():
        fitting = (p for p in candidates if all(finder(p, module) for module in peer.modules))
        python = next(fitting, None)
        if python is None:
            missing[peer_of(peer.name)] = (
                f"not installed: pip install {peer.package}, "
                "and name its interpreter with --peer-python"
            )
        else:
            found[peer.name] = (peer, python)
    return found, missing
