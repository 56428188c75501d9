"""What can be said about a state file of llama.cpp, which only its model can tell how to read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcellar.errors import SnapshotFileError
from kvcellar.runtime.demo import find_model
from kvcellar.runtime.model import Model
from kvcellar.snapshot.llama.reader import read_llama_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcellar.snapshot.llama.value import Block, LlamaFile


@dataclass(frozen=True, slots=True)
class PartFacts:
    """Cells of one cache of K and V."""

    n_cells: int
    n_layers: int
    type_k: str
    type_v: str
    bytes_k: int
    bytes_v: int


@dataclass(frozen=True, slots=True)
class LlamaFacts:
    """A file that could be read to its end; it has no checksums.

    Attributes:
        kind: a sequence or a session.
        generation: when llama.cpp wrote such files.
        version: the number in its head.
        architecture: None where the file does not say.
        n_tokens: of the text that it names.
        first_tokens: how that begins.
        parts: its K and V.
        bytes_states: its recurrent states.
    """

    kind: str
    generation: str
    version: int
    architecture: str | None
    n_tokens: int
    first_tokens: tuple[int, ...]
    parts: tuple[PartFacts, ...]
    bytes_states: int


def llama_facts(path: Path, model: str | None) -> LlamaFacts:
    """Read a file as a whole.

    Raises:
        SnapshotFileError: it is damaged, or there is no model to read it with.
        SnapshotMismatch, NotSupported: it is not of that model, or cannot be read.
        ModelError: the model cannot be used.
    """
    if model is None:
        raise SnapshotFileError(
            f"{path} is a state file of llama.cpp: name its model with --model, because the file "
            "does not say how it goes on"
        )
    with Model.from_gguf(find_model(model), n_threads=1) as opened, opened.context(n_ctx=1) as one:
        try:
            return _facts(read_llama_file(path.read_bytes(), one.memory_spec))
        except (SnapshotFileError, OSError) as error:
            raise SnapshotFileError(f"{path}: {error}") from error


def _facts(file: LlamaFile) -> LlamaFacts:
    streams = [stream for part in file.parts for stream in part]
    states = file.states
    return LlamaFacts(
        kind=file.kind,
        generation=file.generation,
        version=file.version,
        architecture=file.arch,
        n_tokens=len(file.tokens),
        first_tokens=tuple(map(int, file.tokens[:8])),
        parts=tuple(
            PartFacts(
                n_cells=len(one.cells),
                n_layers=len(one.k),
                type_k=_type(one.k),
                type_v=_type(one.v),
                bytes_k=_bytes(one.k),
                bytes_v=_bytes(one.v),
            )
            for one in streams
        ),
        bytes_states=0 if states is None else _bytes(states.conv) + _bytes(states.ssm),
    )


def _type(blocks: Sequence[Block]) -> str:
    return ", ".join(sorted({block.kind.label for block in blocks})) or "-"


def _bytes(blocks: Sequence[Block]) -> int:
    return sum(block.rows.nbytes for block in blocks)
