"""llama.cpp's state files, into a context and out of one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from kvcellar.cache.porting import state_get, state_set
from kvcellar.errors import OptionError, SnapshotError, SnapshotFileError
from kvcellar.runtime.context import Context
from kvcellar.runtime.sequence import Sequence
from kvcellar.snapshot.llama.from_content import Target, from_content
from kvcellar.snapshot.llama.layout import Generation
from kvcellar.snapshot.llama.reader import read_llama_file
from kvcellar.snapshot.llama.to_content import to_content
from kvcellar.snapshot.llama.writer import file_pieces


def load_llama_file(context: Context, path: str | Path) -> list[Sequence]:
    """New sequences of what llama.cpp saved; whatever goes wrong, the context is as before.

    Returns:
        One of a sequence file; of a session file one a sequence, in the order of their ids.

    Raises:
        SnapshotFileError: the file is missing, truncated, damaged, or no such file.
        SnapshotMismatch: it is of another model, of other K/V types, or holds too little.
        NotSupported: llama.cpp and we do not keep the same of this model.
        SequenceIdError, CacheFull: there is no room.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise SnapshotFileError(f"{path}: {error.strerror or error}") from error
    spec, model = context.memory_spec, context.model.spec
    restored = to_content(read_llama_file(data, spec), spec, model.arch, model.n_vocab)
    sequences: list[Sequence] = []
    try:
        for _ in restored.seq_ids:
            sequences.append(context.sequence())  # noqa: PERF401  (those made are closed below)
        state_set(context.cache, restored.content, [sequence.seq_id for sequence in sequences])
    except BaseException:
        for sequence in sequences:
            sequence.close()
        raise
    return sequences


def save_llama_file(
    source: Context | Sequence,
    path: str | Path,
    generation: Generation = "2026-10",
    *,
    v_trans: bool = False,
) -> None:
    """Save a sequence, or all sequences of a context, as llama.cpp does.

    A session lists the tokens of its first sequence only: the others are loaded without, here and
    there. Tokens that wait are computed before.

    Args:
        source: a sequence for a sequence file, a context for a session file.
        path: where to; an older file there stays until the new one is complete.
        generation: whose layout; "2026-10" is what llama.cpp of that month reads.
        v_trans: whether V lies across. llama.cpp reads only files like its own contexts: across
            without flash attention, otherwise not.

    Raises:
        NotSupported: llama.cpp had no such files.
        OptionError: there is nothing to save, or v_trans does not suit the type of V.
        SnapshotError: the file cannot be written.
    """
    is_session = isinstance(source, Context)
    context = source if isinstance(source, Context) else source.context
    chosen = context.sequences if isinstance(source, Context) else (source,)
    filled = [sequence for sequence in chosen if len(sequence)]
    if not filled:
        raise OptionError("there is nothing to save: no sequence has tokens")
    for sequence in filled:
        if len(sequence) > context.cache.seq_count(sequence.seq_id):
            _ = sequence.logits  # computes what waits
    seq_ids = tuple(sequence.seq_id for sequence in filled)
    content = state_get(context.cache, seq_ids, checkpoints=False)
    target = Target("session" if is_session else "sequence", generation, seq_ids, v_trans)
    spec, model = context.memory_spec, context.model.spec
    file = from_content(content, spec, model.arch, filled[0].tokens, target)
    _write(Path(path), file_pieces(file, len(spec.places)))


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    """Let a file have these bytes, all or none."""
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        try:
            with beside.open("xb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SnapshotError(f"{path} cannot be written: {error.strerror or error}") from error
