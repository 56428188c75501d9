"""The operations that are interrupted, and the models they are done on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from kvcellar.batch import Batch
from kvcellar.errors import SnapshotError
from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime.context import save_llama_file
from kvcellar.runtime.model import Model
from kvcellar.runtime.options import ContextShift
from kvcellar.runtime.sequence import Sequence
from kvcellar.runtime.together import generate_all
from kvcellar.stores.memory import MemoryStore
from kvcellar.testing.interrupts.contexts import (
    N_SEQ_MAX,
    ContextStage,
    Opened,
    Operation,
    Scene,
    logits_of,
    text_of,
)
from kvcellar.testing.interrupts.trials import Fault

N_TOKENS = 4
SHIFT = ContextShift(keep=17, discard=6)
SMALL = {"n_ctx": 64, "n_seq_max": N_SEQ_MAX, "n_ubatch": 8, "checkpoints": 12}
EXACT = {**SMALL, "type_k": "f32", "type_v": "f32", "kernel": False}
BLOCK = 8


# -- text


def generated(stage: ContextStage) -> Iterator[object]:
    """Generate as `Sequence.stream` does, a step that can be told from outside at a time."""
    for _ in range(N_TOKENS):
        yield pushed(stage)


def pushed(stage: ContextStage) -> object:
    """Sample greedily and add the token."""
    return stage.subject.push(int(np.argmax(stage.subject.logits)))


def streamed(stage: ContextStage) -> object:
    """Consume a stream whose consumer raises at the third piece."""
    for n, _ in enumerate(stage.subject.stream(N_TOKENS)):
        if n == 2:
            break
    return None


def generated_together(stage: ContextStage) -> Iterator[object]:
    """Generate onto two sequences as `generate_all` does."""
    for _ in range(N_TOKENS):
        for sequence in (stage.subject, stage.other):
            yield sequence.push(int(np.argmax(sequence.logits)))


def shifted(stage: ContextStage) -> Iterator[object]:
    """Generate in a full context."""
    for _ in range(N_TOKENS):
        yield stage.subject.make_room(SHIFT)
        yield pushed(stage)


def fill(stage: ContextStage) -> object:
    """Leave two free cells."""
    return stage.subject.append(text_of(5, stage.context.cache.n_free() - 2))


# -- transactions


def edited(stage: ContextStage, *, back: bool) -> object:
    """Do several things, and keep or take them back as a whole."""
    with stage.context.cache.transaction() as transaction:
        stage.subject.append(text_of(6, 3))
        stage.subject.trim(5)
        stage.other.append([5])
        stage.subject.fork().push(4)
        if back:
            transaction.rollback()
    return None


# -- files


def with_file(stage: ContextStage) -> object:
    """Have a file of an older text to replace."""
    path = stage.folder / "text.kv"
    if "older" not in stage.kept:
        stage.base.save(path)
        stage.kept["older"] = path.read_bytes()
    for left in stage.folder.iterdir():
        left.unlink()
    return path.write_bytes(stage.kept["older"])


def check_file(stage: ContextStage, *, whole: bool = False) -> None:
    """The file is the older or the newer one, complete, and there is no other."""
    names = sorted(path.name for path in stage.folder.iterdir())
    if names != ["text.kv"]:
        raise Fault("files left", f"{names}")
    path = stage.folder / "text.kv"
    if path.read_bytes() == stage.kept["older"]:
        return
    saved = stage.context.sequences if whole else (stage.subject,)
    try:
        loaded = stage.context.load_all(path) if whole else (stage.context.load(path),)
    except SnapshotError as error:
        raise Fault("wrong file", error) from error
    for one, other in zip(loaded, saved, strict=True):
        what = f"sequence {other.seq_id}, saved"
        stage.same("wrong file", what, logits_of(one), logits_of(other))
        one.close()


def load_behind(stage: ContextStage) -> object:
    """Append what a file holds."""
    return stage.subject.load(stage.folder / "text.kv", positions=len(stage.subject))


# -- room


def with_holes(stage: ContextStage) -> object:
    """Have free cells between used ones, and K rows to rotate."""
    with stage.context.sequence(text_of(7, 6)):
        stage.subject.append(text_of(8, 3))
    return None


def compacted(stage: ContextStage) -> object:
    """Compact the cells."""
    stage.context.cache.defrag()
    return stage.context.cache.update()


# -- prompts


def with_store(stage: ContextStage) -> object:
    """Have a store with the first block of a text, and an empty sequence."""
    text = text_of(9, 2 * BLOCK + 3)
    if "blocks" not in stage.kept:
        first = MemoryStore()
        with stage.context.sequence() as sequence:
            PromptCache(first, block_size=BLOCK).append(sequence, text[: BLOCK + 1])
        stage.kept["blocks"] = [
            (entry.key, bytes(first.get(entry.key) or b""), entry.note) for entry in first.entries()
        ]
        with stage.context.sequence(text) as sequence:
            stage.kept["text"], stage.kept["logits"] = text, logits_of(sequence)
    store = MemoryStore()
    for key, value, note in stage.kept["blocks"]:
        store.put(key, [value], note)
    stage.kept["prompts"] = PromptCache(store, block_size=BLOCK)
    stage.subject.close()
    stage.subject = stage.context.sequence()
    return stage.subject


class Full(Exception):
    """What a consumer raises that has enough."""


def prompted_in_part(stage: ContextStage) -> None:
    """Append the text through the store, until the consumer of the pieces has enough."""
    pieces: list[int] = []

    def on_piece(n_tokens: int) -> None:
        pieces.append(n_tokens)
        if len(pieces) == 2:
            raise Full

    prompts: PromptCache = stage.kept["prompts"]
    with suppress(Full):
        prompts.append(stage.subject, stage.kept["text"], on_piece=on_piece)


def prompted(stage: ContextStage, sequence: Sequence) -> object:
    """Append the text through the store."""
    prompts: PromptCache = stage.kept["prompts"]
    return prompts.append(sequence, stage.kept["text"])


def check_store(stage: ContextStage) -> None:
    """What is in the store by now is right."""
    with stage.context.sequence() as sequence:
        prompted(stage, sequence)
        what = "what was stored"
        stage.same("wrong logits", what, logits_of(sequence), stage.kept["logits"])


def decoded(stage: ContextStage) -> object:
    """Decode a batch of two sequences below these."""
    batch = Batch()
    for token in text_of(10, 4):
        batch.add(token, seq_ids=stage.subject.seq_id)
        batch.add(token, seq_ids=stage.other.seq_id, logits=True)
    return stage.context.decode(batch)


# -- contexts and models


def make_context(stage: ContextStage) -> None:
    """Use another context of the model."""
    with stage.model.context(n_ctx=32, n_seq_max=2) as context:
        context.sequence([1, 2, 3])


def make_model(stage: ContextStage) -> None:
    """Open the file once more."""
    model = stage.model
    with Model.from_gguf(model.path, n_threads=1, backend=model.backend) as other:
        other.context(n_ctx=32, n_seq_max=2).sequence([1, 2, 3])


OPERATIONS = {
    one.name: one
    for one in (
        Operation("append", lambda s: s.subject.append(text_of(4, 10))),
        Operation(
            "append_pending", lambda s: s.subject.append([1, 2]), before=lambda s: s.subject.push(3)
        ),
        Operation("generate", lambda s: s.subject.generate(N_TOKENS), generated, N_TOKENS),
        Operation("stream", streamed, generated, N_TOKENS),
        Operation(
            "generate_shift",
            lambda s: s.subject.generate(N_TOKENS, shift=SHIFT),
            shifted,
            2 * N_TOKENS,
            fill,
        ),
        Operation(
            "generate_all",
            lambda s: generate_all([s.subject, s.other], N_TOKENS),
            generated_together,
            2 * N_TOKENS,
        ),
        Operation(
            "compute",
            lambda s: s.context.compute([s.subject, s.other]),
            before=lambda s: [s.subject.push(3), s.other.push(4)],
        ),
        Operation("logprobs", lambda s: s.subject.logprobs(text_of(4, 10))),
        Operation("echo", lambda s: s.subject.logprobs([1], echo=True)),
        Operation("fork", lambda s: s.subject.fork()),
        Operation("trim", lambda s: s.subject.trim(3)),
        Operation("remove", lambda s: s.subject.remove(4, 8)),
        Operation("remove_gap", lambda s: s.subject.remove(4, 8, gap="keep")),
        Operation("shift_context", lambda s: s.subject.shift_context(2, 6)),
        Operation("self_extend", lambda s: s.subject.self_extend(2, 8)),
        Operation("close", lambda s: s.subject.close()),
        Operation("sequence", lambda s: s.context.sequence(text_of(11, 10))),
        Operation("decode", decoded),
        Operation("transaction", lambda s: edited(s, back=False)),
        Operation("rollback", lambda s: edited(s, back=True)),
        Operation(
            "save",
            lambda s: s.subject.save(s.folder / "text.kv"),
            before=with_file,
            after=check_file,
        ),
        Operation("load", lambda s: s.context.load(s.folder / "text.kv"), before=with_file),
        Operation("load_behind", load_behind, before=with_file),
        Operation(
            "save_all",
            lambda s: s.context.save(s.folder / "text.kv"),
            before=with_file,
            after=lambda s: check_file(s, whole=True),
        ),
        Operation(
            "save_llama",
            lambda s: save_llama_file(s.subject, s.folder / "text.kv"),
            before=with_file,
            after=check_file,
        ),
        Operation("resize", lambda s: s.context.resize(80)),
        Operation("resize_smaller", lambda s: s.context.resize(48), before=with_holes),
        Operation("compaction", compacted, before=with_holes),
        Operation(
            "prompt_cache", lambda s: prompted(s, s.subject), before=with_store, after=check_store
        ),
        Operation("prompt_on_piece", prompted_in_part, before=with_store, after=check_store),
        Operation("context", make_context),
        Operation("context_close", lambda s: s.context.close(), closes=True),
        Operation("model", make_model),
    )
}

FILES = {
    "llama": "llama-dense",
    "gemma2": "gemma2-window",
    "jamba": "jamba-dense",
    "mamba": "mamba-dense",
    "gpt-oss": "gpt-oss-window",
    "deepseek2": "deepseek2-moe",
}

TOLERANCE = {"gemma2": 1e-8}
"""Where soft-capping makes more of another order of sums."""

SCENES = {
    scene.name: scene
    for scene in (
        *(
            Scene(f"{backend}/{name}", f"{file}.gguf", backend, EXACT, TOLERANCE.get(name, 1e-10))
            for backend in ("ggml", "numpy")
            for name, file in FILES.items()
        ),
        Scene("ggml/tiny", "", "ggml", EXACT),
        Scene("kernel/llama", "llama-dense.gguf", "ggml", {**SMALL, "kernel": True}, 1e-6),
        Scene("kernel/gpt-oss", "gpt-oss-window.gguf", "ggml", {**SMALL, "kernel": True}, 1e-6),
    )
}


@cache
def _opened(scene: str, models: Path) -> Opened:
    return Opened(SCENES[scene], models)


def open_context_stage(argument: str) -> ContextStage:
    """Open ``folder of models|scene/operation``."""
    folder, name = argument.split("|")
    scene, _, operation = name.rpartition("/")
    return ContextStage(_opened(scene, Path(folder)), OPERATIONS[operation])
