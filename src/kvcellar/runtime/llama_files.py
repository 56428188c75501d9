"""llama.cpp's state files: what they hold for a cache, and what of a cache goes into one.

A sequence file and a session file say little of the model they are of, and have no checksum; what
they do say is compared, and the content is checked before anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcellar.cache.content import SequenceData
from kvcellar.cache.content_checks import check_content
from kvcellar.errors import SnapshotFileError
from kvcellar.files import open_regular, why
from kvcellar.runtime.saving import Ready
from kvcellar.snapshot.atomic import replacing
from kvcellar.snapshot.llama.from_content import Target, from_content
from kvcellar.snapshot.llama.layout import MAGIC, LlamaFile
from kvcellar.snapshot.llama.reader import read_llama_file
from kvcellar.snapshot.llama.to_content import to_content
from kvcellar.snapshot.llama.writer import file_pieces
from kvcellar.snapshot.snapshot import SavedText
from kvcellar.types import MemorySpec


def is_llama_file(path: str | Path) -> bool:
    """Whether a file begins as llama.cpp's state files do; False if it cannot be read."""
    try:
        with open_regular(path) as file:
            return int.from_bytes(file.read(4), "little") in MAGIC.values()
    except OSError:
        return False


def read_file(path: str | Path, spec: MemorySpec) -> LlamaFile:
    """Read what llama.cpp saved, as it is in the file.

    Raises:
        SnapshotFileError: the file is missing, truncated, damaged, or no such file; it names it.
        SnapshotMismatch: it is of another model, of other K/V types, or holds too little.
        NotSupported: llama.cpp and we do not keep the same of this model.
    """
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise SnapshotFileError(f"cannot read {path}: {why(error)}") from error
    try:
        return read_llama_file(data, spec)
    except SnapshotFileError as error:
        raise SnapshotFileError(f"{path}: {error}") from error


def read_state(path: str | Path, spec: MemorySpec, arch: str, n_vocab: int) -> Ready:
    """Read what llama.cpp saved, for a cache of that memory.

    Returns:
        Of a session file its sequences in the order of their ids.

    Raises:
        SnapshotFileError: the file is missing, truncated, damaged, or no such file.
        SnapshotMismatch: it is of another model, of other K/V types, or holds too little.
        NotSupported: llama.cpp and we do not keep the same of this model.
    """
    content = to_content(read_file(path, spec), spec, arch, n_vocab).content
    check_content(content, spec.stores)
    return Ready(content, (SavedText(),) * content.n_seqs)


def write_state(
    path: str | Path,
    content: SequenceData,
    spec: MemorySpec,
    arch: str,
    tokens: Sequence[int],
    target: Target,
) -> None:
    """Write what sequences hold as llama.cpp does, the whole file or nothing.

    Raises:
        NotSupported: llama.cpp had no such files.
        OptionError: the target does not suit the type of V.
        SnapshotFileError: the file cannot be written.
    """
    file = from_content(content, spec, arch, tokens, target)
    with replacing(Path(path)) as beside, beside.open("wb") as stream:
        stream.writelines(file_pieces(file, len(spec.places)))
