"""What recurrent layers do with a token: Mamba's two mixers and a gated short convolution.

Each is a :class:`~kvcellar.models.decoder.Mixer`: called with the ops, its layer and the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcellar.backends.operations import Ops
from kvcellar.models.blocks import Linear, Norm
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
        """What the layer keeps if so many channels are convolved."""
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
