"""Reading Mamba's mixers: ``{arch}.ssm.*`` and ``blk.{i}.ssm_*``.

Every function may raise UnsupportedModel, which names what is absent or not f32, and
ModelFileError, which names sizes that contradict each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from kvcellar.errors import ModelFileError
from kvcellar.models.blocks import Linear, RmsNorm
from kvcellar.models.reader import Reader
from kvcellar.models.ssm import Convolution, Mamba, Mamba2, SsmShape

T = TypeVar("T")


def read_mamba(file: Reader[T], i: int, *, normed: bool = False) -> Mamba[T]:
    """Layer i's mixer; with ``normed``, what dt is made of, B and C have a norm each."""
    file.hp.only(".ssm.dt_b_c_rms", False)  # norms without weights
    shape, name = _shape(file), f"blk.{i}.ssm"
    n, d_state, rank = shape.d_inner, shape.d_state, shape.rank
    matrix, vector = file.weights.matrix, file.weights.vector
    return Mamba(
        shape=shape,
        project=file.linear(f"{name}_in", 2 * n, file.n_embd),
        conv=_convolution(file, i, n),
        parameters=matrix(f"{name}_x.weight", rank + 2 * d_state, n),
        norms=_norms(file, i, shape) if normed else None,
        dt=Linear(matrix(f"{name}_dt.weight", n, rank), bias=vector(f"{name}_dt.bias", n)),
        a=vector(f"{name}_a", n, d_state),
        d=vector(f"{name}_d", n),
        out=file.linear(f"{name}_out", file.n_embd, n),
    )


def read_mamba2(file: Reader[T], i: int, *, may_lack_norm: bool = False) -> Mamba2[T]:
    """Layer i's mixer."""
    shape, name = _grouped_shape(file), f"blk.{i}.ssm"
    n, n_head, n_group = shape.d_inner, shape.rank, shape.n_group
    n_convolved, vector = n + 2 * shape.d_shared, file.weights.vector
    has_norm = file.weights.has(f"{name}_norm.weight") or not may_lack_norm
    return Mamba2(
        shape=shape,
        project=file.linear(f"{name}_in", n + n_convolved + n_head, file.n_embd),
        conv=_convolution(file, i, n_convolved),
        dt_bias=vector(f"{name}_dt.bias", n_head),
        a=vector(f"{name}_a", n_head, 1),
        d=vector(f"{name}_d", n_head, 1),
        norm=file.rms_norm(f"{name}_norm", n_group, n // n_group) if has_norm else None,
        out=file.linear(f"{name}_out", file.n_embd, n),
    )


def _shape(file: Reader[T]) -> SsmShape:
    hp = file.hp
    return SsmShape(
        d_inner=hp.size(".ssm.inner_size"),
        d_state=hp.size(".ssm.state_size"),
        k=hp.size(".ssm.conv_kernel"),
        rank=hp.size(".ssm.time_step_rank"),
    )


def _grouped_shape(file: Reader[T]) -> SsmShape:
    shape = replace(_shape(file), n_group=file.hp.size(".ssm.group_count"))
    if shape.d_inner % shape.n_head or shape.n_head % shape.n_group:
        raise ModelFileError(
            f"{shape.d_inner} channels, {shape.n_head} heads (ssm.time_step_rank) and "
            f"{shape.n_group} groups: each must be a whole multiple of the next"
        )
    return shape


def _convolution(file: Reader[T], i: int, n_channels: int) -> Convolution[T]:
    name, k = f"blk.{i}.ssm_conv1d", file.hp.size(".ssm.conv_kernel")
    return Convolution(
        weight=file.weights.vector(f"{name}.weight", n_channels, k),
        bias=file.optional(f"{name}.bias", n_channels),
    )


def _norms(file: Reader[T], i: int, shape: SsmShape) -> tuple[RmsNorm[T], RmsNorm[T], RmsNorm[T]]:
    name = f"blk.{i}.ssm"
    return (
        file.rms_norm(f"{name}_dt_norm", shape.rank),
        file.rms_norm(f"{name}_b_norm", shape.d_state),
        file.rms_norm(f"{name}_c_norm", shape.d_state),
    )
