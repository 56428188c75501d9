"""LLVM, where llvmlite is installed: what the processor can do, and kernels compiled for it.

Compiling takes a tenth of a second, so nothing is kept on disk; llvmlite is imported at first use.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from threading import local
from time import perf_counter
from typing import Any, NamedTuple, ParamSpec

from kvcellar.backends.ggml.aside import Stop
from kvcellar.backends.ggml.exits import process_exit
from kvcellar.backends.memory import check_room
from kvcellar.backends.turns import Turn

P = ParamSpec("P")

ENV = "KVCELLAR_KERNEL"
OLDEST = (0, 44)
_ROOM = 2**27
"""Bytes that LLVM takes to compile a large kernel, and more."""
log = logging.getLogger("kvcellar.kernel")


class Processor(NamedTuple):
    """What vectors there are."""

    lanes: int  # floats a vector
    registers: int  # vectors that may accumulate at once, some being left for operands


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled function, which lives as long as its engine."""

    address: int
    engine: Any


@lru_cache(maxsize=1)
def processor() -> Processor | None:
    """The processor's vectors; None where halves cannot be widened in hardware."""
    import llvmlite.binding as llvm

    machine = platform.machine().lower()
    if machine in ("arm64", "aarch64"):
        return Processor(4, 24)
    if machine not in ("x86_64", "amd64"):
        return None
    has = llvm.get_host_cpu_features()
    if has.get("avx512f") and has.get("avx512vl"):
        return Processor(16, 24)
    return Processor(8, 12) if has.get("avx2") and has.get("f16c") and has.get("fma") else None


def why_not() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    if os.environ.get(ENV, "").lower() in ("0", "off", "no", "false"):
        return f"{ENV} turns it off"
    return why_no_llvm() or (None if processor() else "this processor cannot widen halves")


@lru_cache(maxsize=1)
def why_no_llvm() -> str | None:
    """Why llvmlite is of no use here; None if it is. Found out by loading it, once a process."""
    try:
        import llvmlite

        if why := _why_too_old(getattr(llvmlite, "__version__", "")):
            return why
        import llvmlite.binding as llvm

        llvm.get_process_triple()  # LLVM itself is loaded at the first call
    except ModuleNotFoundError:
        return "llvmlite is not installed: pip install 'kvcellar[fast]'"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"llvmlite cannot be loaded ({error}): pip install --force-reinstall llvmlite"
    return None


def _why_too_old(version: str) -> str | None:
    """Older ones know no pointers without a type; builds without a version are trusted."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST:
        return None
    oldest = ".".join(map(str, OLDEST))
    return f"llvmlite {version} is too old: pip install 'llvmlite>={oldest}'"


def host_features() -> tuple[str, ...] | None:
    """What LLVM calls the instructions that the processor has; None without llvmlite."""
    if why_no_llvm():
        return None
    import llvmlite.binding as llvm

    return tuple(name for name, has in llvm.get_host_cpu_features().items() if has)


@lru_cache(maxsize=1)
def has_byte_products() -> bool:
    """Whether the processor adds up products of bytes, 64 at a time."""
    import llvmlite.binding as llvm

    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    has = llvm.get_host_cpu_features()
    return all(has.get(name) for name in ("avx512f", "avx512vl", "avx512bw", "avx512vnni"))


class _Spent(local):
    """Seconds that this thread has waited for compiled code."""

    seconds = 0.0


_spent = _Spent()


def compile_seconds() -> float:
    """Seconds that this thread has waited for compiled code, for others that compile included."""
    return _spent.seconds


def counted(make: Callable[P, Compiled]) -> Callable[P, Compiled]:
    """Count a function's time, imports included, in :func:`compile_seconds`."""

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> Compiled:
        start = perf_counter()
        try:
            return make(*args, **kwargs)
        finally:
            _spent.seconds += perf_counter() - start

    return call


def compile_ir(title: str, text: Callable[[str], str], function: str) -> Compiled:
    """Machine code of a module's function; the text is asked for with this machine's triple.

    Raises:
        AllocationError: there is little memory left, and LLVM would end the process.
        ClosedError: another thread was compiling when this process was forked.
    """
    # One line: an exception that comes when a block of several is left may keep it locked.
    with _compiling().turn: return _compile(title, text, function)  # fmt: skip  # noqa: E701


class _Compiling:
    """What compiles now; see :class:`~kvcellar.backends.ggml.exits.Running`."""

    def __init__(self) -> None:
        self.turn = Turn()
        self.stop = Stop()  # LLVM does not look at it

    @property
    def process(self) -> int:
        return os.getpid()


@lru_cache(maxsize=1)
def _compiling() -> _Compiling:
    made = _Compiling()
    process_exit().add(made)
    return made


def _compile(title: str, text: Callable[[str], str], function: str) -> Compiled:
    import llvmlite.binding as llvm

    process_exit().check()
    check_room("compiling", _ROOM)

    start = perf_counter()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_process_triple()
    module = llvm.parse_assembly(text(triple))
    module.verify()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    log.info("compiled %s in %.2f s", title, perf_counter() - start)
    return Compiled(engine.get_function_address(function), engine)
