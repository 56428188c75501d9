"""llama.cpp's state files, into a context and out of one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvcellar.cache.transfer import state_get, state_set
from kvcellar.errors import OptionError, SnapshotFileError
from kvcellar.snapshot.atomic import replacing
from kvcellar.snapshot.llama.from_content import Target, from_content
from kvcellar.snapshot.llama.layout import MAGIC, Generation, Kind, LlamaFile
from kvcellar.snapshot.llama.reader import read_llama_file
from kvcellar.snapshot.llama.to_content import to_content
from kvcellar.snapshot.llama.writer import file_pieces

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence


def is_llama_file(path: str | Path) -> bool:
    """Whether a file begins as llama.cpp's state files do; False if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return int.from_bytes(file.read(4), "little") in MAGIC.values()
    except OSError:
        return False


def load_llama_file(context: Context, path: str | Path) -> list[Sequence]:
    """New sequences of what llama.cpp saved; whatever goes wrong, the context is as before.

    Returns:
        One of a sequence file; of a session file one a sequence, in the order of their ids.

    Raises:
        SnapshotFileError: the file is missing, truncated, damaged, or no such file.
        SnapshotMismatch: it is of another model, of other K/V types, or holds too little.
        NotSupported: llama.cpp and we do not keep the same of this model.
        SequenceIdError, CacheFull: there is no room.
        ClosedError: the context is closed.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise SnapshotFileError(f"{path}: {error.strerror or error}") from error
    with context.exclusive():
        context.check_open()
        spec, model = context.memory_spec, context.model.spec
        restored = to_content(read_llama_file(data, spec), spec, model.arch, model.n_vocab)
        with context.new_sequences(len(restored.seq_ids)) as made:
            state_set(context.cache, restored.content, [text.seq_id for text in made])
        return made


def save_llama_file(
    source: Context | Sequence,
    path: str | Path,
    generation: Generation = "2026-10",
    *,
    v_trans: bool = False,
) -> None:
    """Save a sequence, or all sequences of a context, as llama.cpp does.

    A session lists the tokens of its first sequence only, so whoever loads it knows no others.
    Tokens that wait are computed before.

    Args:
        source: a sequence for a sequence file, a context for a session file.
        path: where to; an older file there stays until the new one is complete.
        generation: whose layout; "2026-10" is what llama.cpp of that month reads.
        v_trans: whether V lies across. llama.cpp reads only files like its own contexts: across
            without flash attention, otherwise not.

    Raises:
        NotSupported: llama.cpp had no such files.
        OptionError: there is nothing to save, or v_trans does not suit the type of V.
        SnapshotFileError: the file cannot be written.
        ClosedError: the context is closed.
    """
    context, kind, texts = _of(source)
    with context.exclusive():
        context.check_open()
        filled = [text for text in texts if len(text)]
        if not filled:
            raise OptionError("there is nothing to save: no sequence has tokens")
        file = _take(context, filled, kind, generation, v_trans)
    with replacing(Path(path)) as beside, beside.open("wb") as stream:
        stream.writelines(file_pieces(file, len(context.memory_spec.places)))


def _of(source: Context | Sequence) -> tuple[Context, Kind, Iterable[Sequence]]:
    from kvcellar.runtime.sequence import Sequence  # which imports loading, which imports this

    if isinstance(source, Sequence):
        return source.context, "sequence", [source]
    return source, "session", source.sequences


def _take(
    context: Context, texts: list[Sequence], kind: Kind, generation: Generation, v_trans: bool
) -> LlamaFile:
    """What sequences hold, as a file."""
    for text in texts:
        text.compute_pending()
    seq_ids = tuple(text.seq_id for text in texts)
    content = state_get(context.cache, seq_ids, checkpoints=False)
    target = Target(kind, generation, seq_ids, v_trans)
    model = context.model.spec
    return from_content(content, context.memory_spec, model.arch, texts[0].tokens, target)
