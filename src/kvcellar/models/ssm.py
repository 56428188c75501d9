"""Recurrent mixers: Mamba's two, and a gated short convolution; reading Mamba's from a file.

Each is a :class:`~kvcellar.models.blocks.Mixer`: called with the ops, its layer and the input.
Mamba's are read from ``{arch}.ssm.*`` and ``blk.{i}.ssm_*``; the functions that do so may raise
UnsupportedModel, which names what is absent or not f32, and ModelFileError, which names sizes that
contradict each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kvcellar.backends.operations import Ops
from kvcellar.errors import ModelFileError
from kvcellar.models.blocks import Linear, Norm, RmsNorm
from kvcellar.models.reader import Reader
from kvcellar.types import LayerMemory, StateLayer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SsmShape:
    """Sizes of a Mamba layer; Mamba 1 has a head a channel, whose time steps come from ``rank``."""

    d_inner: int
    d_state: int
    k: int
    rank: int  # Mamba 2: how many heads there are
    n_group: int = 1

    @property
    def n_head(self) -> int:
        """Mamba 2's heads."""
        return self.rank

    @property
    def d_shared(self) -> int:
        """Values of B, and of C, a token."""
        return self.n_group * self.d_state

    def state(self, n_channels: int) -> StateLayer:
        """What the layer keeps if ``n_channels`` are convolved."""
        return StateLayer(n_conv=(self.k - 1) * n_channels, n_ssm=self.d_inner * self.d_state)


@dataclass(frozen=True, slots=True)
class Convolution(Generic[T]):
    """A short causal convolution of each channel, then SiLU."""

    weight: T
    bias: T | None

    def __call__(self, ops: Ops[T], layer: int, x: T) -> T:
        """``silu(conv(x) + bias)``."""
        y = ops.short_conv(layer, x, self.weight)
        return ops.silu(y if self.bias is None else ops.add(y, self.bias))


@dataclass(frozen=True, slots=True)
class Mamba(Generic[T]):
    """Mamba's mixer: each channel has a state of its own, with its own rates of decay.

    Attributes:
        shape: its sizes.
        project: from n_embd to the channels and their gates.
        conv: of the channels.
        parameters: from the channels to what dt is made of, B and C.
        norms: of these three, where the family has them.
        dt: to a time step a channel.
        a: minus the rates of decay.
        d: how much of a channel passes by the state.
        out: from the channels back to n_embd.
    """

    shape: SsmShape
    project: Linear[T]
    conv: Convolution[T]
    parameters: T
    norms: tuple[Norm[T], Norm[T], Norm[T]] | None
    dt: Linear[T]
    a: T
    d: T
    out: Linear[T]

    @property
    def memory(self) -> LayerMemory:
        """What the layer keeps."""
        return LayerMemory(state=self.shape.state(self.shape.d_inner))

    def __call__(self, ops: Ops[T], layer: int, x: T) -> T:
        """``[n, n_embd]`` to the same shape."""
        n = self.shape.d_inner
        flat, gate = ops.split(self.project(ops, x), (n, n))
        flat = self.conv(ops, layer, flat)
        dt, b, c = self._parameters(ops, flat)
        b, c = ops.heads(b, 1), ops.heads(c, 1)
        y = ops.ssm_scan(layer, ops.heads(flat, n), self.dt(ops, dt), self.a, b, c)
        y = ops.add(ops.merge(y), ops.mul(flat, self.d))
        return self.out(ops, ops.swiglu(gate, y))

    def _parameters(self, ops: Ops[T], x: T) -> list[T]:
        sizes = (self.shape.rank, self.shape.d_shared, self.shape.d_shared)
        parts = ops.split(ops.linear(x, self.parameters), sizes)
        if self.norms is None:
            return parts
        return [norm(ops, part) for norm, part in zip(self.norms, parts, strict=True)]


@dataclass(frozen=True, slots=True)
class Mamba2(Generic[T]):
    """Mamba 2's mixer: heads that decay at one rate each, and groups of heads that share B and C.

    Attributes:
        shape: its sizes.
        project: from n_embd to gates, to what is convolved (channels, B and C), and to time steps.
        conv: of these.
        dt_bias: of the time steps.
        a: minus the rates of decay.
        d: how much of a head passes by the state.
        norm: of each group of channels, behind the gate; not every file has it.
        out: from the channels back to n_embd.
    """

    shape: SsmShape
    project: Linear[T]
    conv: Convolution[T]
    dt_bias: T
    a: T
    d: T
    norm: Norm[T] | None
    out: Linear[T]

    @property
    def state(self) -> StateLayer:
        """Its state."""
        return self.shape.state(self.shape.d_inner + 2 * self.shape.d_shared)

    @property
    def memory(self) -> LayerMemory:
        """What the layer keeps."""
        return LayerMemory(state=self.state)

    def __call__(self, ops: Ops[T], layer: int, x: T) -> T:
        """``[n, n_embd]`` to the same shape."""
        shape, n = self.shape, self.shape.d_inner
        sizes = (n, n + 2 * shape.d_shared, shape.n_head)
        gate, convolved, dt = ops.split(self.project(ops, x), sizes)
        convolved = self.conv(ops, layer, convolved)
        flat, b, c = ops.split(convolved, (n, shape.d_shared, shape.d_shared))
        heads = ops.heads(flat, shape.n_head)
        b, c = ops.heads(b, shape.n_group), ops.heads(c, shape.n_group)
        y = ops.ssm_scan(layer, heads, ops.add(dt, self.dt_bias), self.a, b, c)
        y = ops.merge(ops.add(y, ops.mul(heads, self.d)))
        return self.out(ops, self._normed(ops, ops.swiglu(gate, y)))

    def _normed(self, ops: Ops[T], y: T) -> T:
        if self.norm is None:
            return y
        return ops.merge(self.norm(ops, ops.heads(y, self.shape.n_group)))


@dataclass(frozen=True, slots=True)
class ShortConvolution(Generic[T]):
    """LFM2's mixer: a convolution with a gate before it and one behind.

    Attributes:
        n_embd: channels.
        k: how many inputs are convolved.
        project: from n_embd to the gate before, the gate behind, and the channels.
        weight: of the convolution.
        out: back to n_embd.
    """

    n_embd: int
    k: int
    project: Linear[T]
    weight: T
    out: Linear[T]

    @property
    def memory(self) -> LayerMemory:
        """What the layer keeps."""
        return LayerMemory(state=StateLayer(n_conv=(self.k - 1) * self.n_embd))

    def __call__(self, ops: Ops[T], layer: int, x: T) -> T:
        """``[n, n_embd]`` to the same shape."""
        before, behind, channels = ops.split(self.project(ops, x), (self.n_embd,) * 3)
        y = ops.short_conv(layer, ops.mul(before, channels), self.weight)
        return self.out(ops, ops.mul(behind, y))


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
