"""Every file that does not fit is refused by a name, and says what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvcellar.cache.content_checks import check_content
from kvcellar.errors import NotSupported, OptionError, SnapshotFileError, SnapshotMismatch
from kvcellar.snapshot.llama.layout import FileGeneration, LayerRows, LlamaFile, Stream
from kvcellar.snapshot.llama.reader import read_llama_file
from kvcellar.snapshot.llama.to_content import to_content
from kvcellar.types import KVType, LayerPlace, LayerSpec, MemorySpec, RopeSpec
from tests.snapshot.llama.shapes import (
    ARCH,
    LAYER,
    N_VOCAB,
    WIDE,
    bytes_of,
    content_of,
    file_of,
    hybrid,
    plain,
    recurrent,
    windowed,
)

PLAIN = plain()
HADAMARD = LayerSpec(n_head_kv=1, head_dim_k=64, head_dim_v=64)
LATENT = LayerSpec(n_head_kv=1, head_dim_k=96, head_dim_v=64, v_offset=32)


def written(spec: MemorySpec, generation: FileGeneration = "2026-10") -> LlamaFile:
    """A session of two sequences."""
    return file_of(content_of(spec, 3, [2, 4]), spec, "session", generation)


def with_stream(file: LlamaFile, change: Callable[[Stream], Stream]) -> LlamaFile:
    """The file with something else in its first stream."""
    (stream,), *others = file.parts
    return replace(file, parts=((change(stream),), *others))


def mismatch(file: LlamaFile, spec: MemorySpec = PLAIN, arch: str = ARCH) -> tuple[object, ...]:
    """What differs, what the file has, and what is wanted."""
    with pytest.raises(SnapshotMismatch) as caught:
        to_content(file, spec, arch, N_VOCAB)
    return caught.value.field, caught.value.stored, caught.value.wanted


def not_finite(file: LlamaFile, spec: MemorySpec, where: str) -> None:
    """See that its content is refused, and where that is."""
    content = to_content(file, spec, ARCH, N_VOCAB).content
    with pytest.raises(SnapshotFileError, match=f"{where} is not finite"):
        check_content(content, spec.stores)


def test_another_architecture() -> None:
    assert mismatch(written(PLAIN), arch="other") == ("architecture", "tiny", "other")


def test_another_number_of_layers() -> None:
    spec = MemorySpec.single(replace(PLAIN.groups[0], layers=(LAYER,)))
    with pytest.raises(SnapshotMismatch, match=r"layers in a part .* 2, here it is 1"):
        read_llama_file(bytes_of(written(PLAIN), PLAIN), spec)


def test_other_types() -> None:
    f32 = plain(type_k=KVType.F32)
    assert mismatch(written(PLAIN), f32) == ("K of type", "f16", "f32")
    bf16 = plain(type_v=KVType.BF16)
    assert mismatch(written(PLAIN), bf16) == ("V of type", "f16", "bf16")


def test_other_heads() -> None:
    spec = plain(replace(LAYER, head_dim_v=3))
    assert mismatch(written(PLAIN), spec) == ("bytes a row of V", 4, 6)


def test_more_sequences_than_there_may_be() -> None:
    spec = plain(n_seq_max=1)
    assert mismatch(written(PLAIN), spec) == ("sequences", 2, "at most 1")


def test_a_token_outside_the_vocabulary() -> None:
    file = file_of(content_of(PLAIN, 0, [3]), PLAIN)
    for token in (N_VOCAB, -2):
        other = replace(file, tokens=np.array([1, token, 2], np.int32))
        assert mismatch(other) == ("token", token, f"one of {N_VOCAB}")


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("kind", [KVType.F32, KVType.F16, KVType.BF16])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFF800000])
def test_what_is_not_finite(part: str, kind: KVType, bits: int) -> None:
    spec = plain(type_k=kind, type_v=kind)
    value = np.array([bits], np.uint32).view(np.float32)
    if kind is KVType.F16:
        raw = value.astype(np.float16).view(np.uint8)
    else:
        raw = value.view(np.uint8)[-kind.block_bytes :]

    def spoil(stream: Stream) -> Stream:
        blocks = list(getattr(stream, part))
        rows = blocks[1].rows.copy()
        rows[2, -kind.block_bytes :] = raw
        blocks[1] = LayerRows(kind, rows)
        k, v = (blocks, stream.v) if part == "k" else (stream.k, blocks)
        return replace(stream, k=tuple(k), v=tuple(v))

    not_finite(with_stream(written(spec), spoil), spec, f"{part.upper()} of layer 1 in cell 2")


@pytest.mark.parametrize("kind", [kind for kind in KVType if kind.is_quantized])
def test_a_scale_that_is_not_finite(kind: KVType) -> None:
    spec = plain(WIDE, type_k=kind, type_v=kind)
    sound = written(spec)
    check_content(to_content(sound, spec, ARCH, N_VOCAB).content, spec.stores)
    n_scales = 2 if kind in (KVType.Q4_1, KVType.Q5_1) else 1
    for i in range(n_scales):

        def spoil(stream: Stream, at: int = 2 * i) -> Stream:
            rows = stream.v[0].rows.copy()
            rows[1, kind.block_bytes + at : kind.block_bytes + at + 2] = (0, 0x7C)
            return replace(stream, v=(LayerRows(kind, rows), *stream.v[1:]))

        not_finite(with_stream(sound, spoil), spec, "V of layer 0 in cell 1")


def test_a_state_that_is_not_finite() -> None:
    spec = recurrent()
    file = file_of(content_of(spec, 0, [3]), spec)
    assert file.states is not None
    nan = np.array([[1, np.nan]], np.float32).view(np.uint8)
    states = replace(file.states, ssm=(LayerRows(KVType.F32, nan), *file.states.ssm[1:]))
    not_finite(replace(file, states=states), spec, "state 0")


@pytest.mark.parametrize("version", [2, 9])
def test_quantised_rows_of_before_the_transform(version: int) -> None:
    spec = plain(HADAMARD, type_k=KVType.Q8_0, type_v=KVType.Q8_0)
    kind = "session" if version == 9 else "sequence"
    file = file_of(content_of(spec, 0, [3]), spec, kind)  # type: ignore[arg-type]
    to_content(file, spec, ARCH, N_VOCAB)
    old = replace(file, version=version)
    assert mismatch(old, spec) == ("q8_0 K", "as it is", "under a transform")
    v_only = plain(HADAMARD, type_v=KVType.Q8_0)
    old = replace(file_of(content_of(v_only, 0, [3]), v_only, kind), version=version)  # type: ignore[arg-type]
    assert mismatch(old, v_only) == ("q8_0 V", "as it is", "under a transform")


def test_quantised_rows_that_llama_cpp_never_transforms() -> None:
    """Latent attention, and windows beside states; small heads neither has nor needs it."""
    windows = replace(windowed().groups[1], layers=(replace(HADAMARD, window=3),))
    states = hybrid().states
    beside = MemorySpec((windows,), states, (LayerPlace(0, 0, 0), LayerPlace(state=1)))
    for spec in (plain(LATENT), beside):
        group = replace(spec.groups[0], type_k=KVType.Q8_0)
        quantised = replace(spec, groups=(group,))
        with pytest.raises(NotSupported, match="transform"):
            file_of(content_of(quantised, 0, [2]), quantised)


@pytest.mark.parametrize("spec", [plain(HADAMARD, type_k=KVType.Q8_0)])
def test_what_the_old_generation_did_not_have(spec: MemorySpec) -> None:
    for other in (spec, recurrent(), hybrid(), plain(LATENT)):
        with pytest.raises(NotSupported, match="2025-01"):
            file_of(content_of(other, 0, [2]), other, "sequence", "2025-01")


def test_old_files_of_states() -> None:
    spec = recurrent()
    data = bytearray(bytes_of(file_of(content_of(spec, 0, [2]), spec), spec))
    data[4] = 2
    file = read_llama_file(bytes(data), spec)  # of the months between
    assert file.generation == "2026-10"
    with pytest.raises(NotSupported, match=r"states in llama.cpp's files of 2025-01"):
        read_llama_file(bytes(data[:-1]), spec)


def test_windows_of_several_sizes() -> None:
    spec = windowed()
    third = replace(spec.groups[1], layers=(replace(LAYER, window=5),))
    several = MemorySpec((*spec.groups, third), None, (*spec.places, LayerPlace(2, 0)))
    with pytest.raises(NotSupported, match=r"\[0, 3, 5\]"):
        file_of(content_of(several, 0, [2]), several)


def test_a_window_for_a_cache_that_keeps_everything() -> None:
    spec = windowed()
    file = file_of(content_of(spec, 0, [6]), spec)
    full = replace(spec.groups[1], size=spec.groups[0].size)
    keeps_all = replace(spec, groups=(spec.groups[0], full))
    assert mismatch(file, keeps_all) == ("window", "slid", "kept in full")
    short = file_of(content_of(spec, 0, [3]), spec)
    assert to_content(short, keeps_all, ARCH, N_VOCAB).content.n_seqs == 1


def test_a_window_that_has_slid_in_an_old_file() -> None:
    spec = windowed()
    with pytest.raises(NotSupported, match="swa_full=True"):
        file_of(content_of(spec, 0, [6]), spec, "sequence", "2025-01")


def test_a_window_with_a_hole() -> None:
    spec = windowed()
    file = file_of(content_of(spec, 0, [6]), spec)
    (stream,) = file.parts[1]
    positions = stream.cells.positions.copy()
    positions[1] = 2
    holed = replace(stream, cells=replace(stream.cells, positions=positions))
    with pytest.raises(SnapshotFileError, match="lacks a part of its window"):
        to_content(replace(file, parts=(file.parts[0], (holed,))), spec, ARCH, N_VOCAB)


def test_a_state_of_another_time() -> None:
    spec = hybrid()
    file = file_of(content_of(spec, 0, [3]), spec)
    assert file.states is not None
    cells = replace(file.states.cells, positions=np.array([5], np.int32))
    late = replace(file, states=replace(file.states, cells=cells))
    with pytest.raises(SnapshotFileError, match="the state of sequence 0 is at 5"):
        to_content(late, spec, ARCH, N_VOCAB)


def test_cells_of_nobody_and_of_negative_sequences() -> None:
    file = written(PLAIN)
    cells = file.parts[0][0].cells
    negative = replace(cells, ids=np.where(cells.ids == 2, -3, cells.ids).astype(np.int32))
    for changed, reason in (
        (replace(cells, counts=cells.counts * 0, ids=cells.ids[:0]), "to no sequence"),
        (negative, "of sequence -3"),
    ):
        other = with_stream(file, lambda stream, c=changed: replace(stream, cells=c))  # type: ignore[misc]
        with pytest.raises(SnapshotFileError, match=reason):
            to_content(other, PLAIN, ARCH, N_VOCAB)


def test_rows_whose_rotation_depends_on_what_no_file_says() -> None:
    rope = RopeSpec("neox", 4, factors=(1.0, 2.0))
    spec = plain(replace(LAYER, rope=rope))
    file = replace(file_of(content_of(spec, 0, [2]), spec), arch=None)
    to_content(file, spec, "llama", N_VOCAB)
    with pytest.raises(NotSupported, match="two sets of RoPE factors"):
        to_content(file, spec, "phi3", N_VOCAB)
    to_content(file_of(content_of(PLAIN, 0, [2]), PLAIN), PLAIN, "phi3", N_VOCAB)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "offset 0: a magic number of 4 bytes, of which 0"),
        (b"GGUF" + bytes(40), "begins with 0x46554747"),
        (b"qsgg" + bytes([4, 0, 0, 0]), "version 4; known are 2 and 3"),
        (b"nsgg" + bytes([8, 0, 0, 0]), "version 8; known are 9 and 10"),
    ],
)
def test_what_is_no_such_file(data: bytes, reason: str) -> None:
    with pytest.raises(SnapshotFileError, match=reason):
        read_llama_file(data, PLAIN)


def test_what_cannot_be_written() -> None:
    content = content_of(PLAIN, 0, [2, 2])
    with pytest.raises(OptionError, match="2 sequences"):
        file_of(content, PLAIN, "sequence")
    with pytest.raises(OptionError, match="begins at position 1"):
        file_of(replace(content, start=1), PLAIN, "session")
    quantised = plain(WIDE, type_v=KVType.Q8_0)
    with pytest.raises(OptionError, match="q8_0 cannot be transposed"):
        file_of(content_of(quantised, 0, [2]), quantised, v_trans=True)
