"""What kvcellar runs on here: versions, processor, memory, libggml, and the kernels that are on.

For reports of faults, so nothing in it names a person or a machine: a home folder becomes ``~``.
Nothing here raises; what the system does not say is ``None``.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvcellar._version import __version__
from kvcellar.backends.ggml.jit import compiler
from kvcellar.backends.ggml.jit.product import why_no_products
from kvcellar.backends.ggml.library import ENV, load
from kvcellar.backends.memory import available_bytes
from kvcellar.errors import LibraryError
from kvcellar.runtime import hash_cache

PACKAGES = (
    "numpy",
    "libggml-python",
    "llvmlite",
    "tokenizers",
    "safetensors",
    "xxhash",
    "jinja2",
    "gguf",
    "zstandard",
    "redis",
)
VARIABLES = (ENV, compiler.ENV, hash_cache.ENV)
CPUINFO = Path("/proc/cpuinfo")

FEATURES: Mapping[str, tuple[str, ...]] = {
    "AVX": ("avx",),
    "AVX2": ("avx2",),
    "FMA": ("fma",),
    "F16C": ("f16c",),
    "BMI2": ("bmi2",),
    "AVX-VNNI": ("avxvnni",),
    "AVX-512F": ("avx512f", "avx512"),
    "AVX-512VL": ("avx512vl",),
    "AVX-512BW": ("avx512bw",),
    "AVX-512VBMI": ("avx512vbmi",),
    "AVX-512VNNI": ("avx512vnni",),
    "AVX-512BF16": ("avx512bf16",),
    "AVX-512FP16": ("avx512fp16",),
    "AMX-INT8": ("amxint8",),
    "AMX-BF16": ("amxbf16",),
    "NEON": ("neon", "asimd"),
    "FP16": ("fullfp16", "asimdhp", "fp16va"),
    "DotProd": ("dotprod", "asimddp"),
    "I8MM": ("i8mm", "matmulint8"),
    "BF16": ("bf16",),
    "SVE": ("sve",),
    "SVE2": ("sve2",),
    "SME": ("sme",),
}
"""Instructions that matter, and what LLVM, Linux and ggml call them, less ``-`` and ``_``."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The facts that a bug report needs.

    Attributes:
        packages: the version of each package; None for one that is not installed.
        processor_features: names of :data:`FEATURES`; None where nobody says.
        libggml_features: those that its build uses; empty where it cannot be loaded.
        libggml_problem: why it cannot be loaded, or None.
        why_no_attention_kernel: why it is off, or None where it is on.
        why_no_product_kernels: likewise.
        variables: those of :data:`VARIABLES` that are set.
    """

    kvcellar: str
    python: str
    system: str
    packages: dict[str, str | None]
    processor: str
    processor_features: tuple[str, ...] | None
    usable_cpus: int
    memory_total: int | None
    memory_available: int | None
    libggml: str | None
    libggml_origin: str | None
    libggml_features: tuple[str, ...]
    libggml_problem: str | None
    why_no_attention_kernel: str | None
    why_no_product_kernels: str | None
    variables: dict[str, str]

    @classmethod
    def current(cls) -> Environment:
        """That of this process; loads libggml and, where it is installed, llvmlite."""
        version, origin, features, problem = _libggml()
        return cls(
            kvcellar=__version__,
            python=f"{platform.python_version()} ({platform.python_implementation()})",
            system=platform.platform(),
            packages={name: package_version(name) for name in PACKAGES},
            processor=processor_name(),
            processor_features=processor_features(),
            usable_cpus=usable_cpus(),
            memory_total=_total_bytes(),
            memory_available=available_bytes(),
            libggml=version,
            libggml_origin=origin,
            libggml_features=features,
            libggml_problem=problem,
            why_no_attention_kernel=_reason(compiler.why_not()),
            why_no_product_kernels=_reason(why_no_products()),
            variables=_variables(os.environ),
        )


def package_version(name: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def usable_cpus() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name(info: Path = CPUINFO) -> str:
    """The processor's name, as far as the system tells."""
    found = next(_cpuinfo(info, "model name"), None) or _sysctl("machdep.cpu.brand_string")
    return found or platform.processor() or platform.machine() or "unknown"


def processor_features(info: Path = CPUINFO) -> tuple[str, ...] | None:
    """Which of :data:`FEATURES` the processor has: Linux says so, elsewhere LLVM."""
    for flags in (*_cpuinfo(info, "flags"), *_cpuinfo(info, "Features")):
        return feature_names(flags.split())
    features = compiler.host_features()
    return None if features is None else feature_names(features)


def feature_names(found: Iterable[str]) -> tuple[str, ...]:
    """Those of :data:`FEATURES` that are among what somebody calls by other names."""
    known = {re.sub("[-_]", "", name.lower()) for name in found}
    return tuple(name for name, others in FEATURES.items() if not known.isdisjoint(others))


def _cpuinfo(info: Path, field: str) -> Iterator[str]:
    """What Linux says of the first processor."""
    try:
        found = re.search(rf"^{field}\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
    except OSError:
        return
    if found:
        yield found[1].strip()


def _sysctl(name: str) -> str | None:
    """What macOS says."""
    if platform.system() != "Darwin":
        return None
    command = ["/usr/sbin/sysctl", "-n", name]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _total_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None


def _libggml() -> tuple[str | None, str | None, tuple[str, ...], str | None]:
    """Version, origin and features of libggml, and why it cannot be loaded."""
    try:
        library = load()
    except LibraryError as error:
        return None, None, (), homeless(str(error))
    return library.version, homeless(library.origin), feature_names(library.features()), None


def _reason(why: str | None) -> str | None:
    return None if why is None else homeless(why)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: homeless(environ[name]) for name in VARIABLES if name in environ}


def homeless(text: str) -> str:
    """The text with ``~`` in place of the home folder, whose name is often that of a person."""
    try:
        home = str(Path.home())
    except RuntimeError:  # there is none
        return text
    return re.sub(rf"(?<![\w/\\]){re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 else text
