"""What one context stores in ggml buffers, and where each layer of the model finds its part."""

from __future__ import annotations

from dataclasses import dataclass

from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.jit.attention import AttentionKernel, why_no_kernel
from kvcellar.backends.ggml.jit.product import Products, why_no_products
from kvcellar.backends.ggml.states import GgmlStateStore
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.types import CacheSpec, LayerPlace, MemorySpec


@dataclass(frozen=True, slots=True)
class GgmlMemory:
    """K and V of each group of layers, states, and what attends over lists in each group.

    Attributes:
        groups: K and V.
        states: of recurrent layers, where there are any.
        places: where each layer of the model stores what it stores.
        kernels: one a group; None where tokens attend through masks alone.
        products: what computes some products in ggml's place, if anything does.
    """

    groups: tuple[GgmlStore, ...]
    states: GgmlStateStore | None
    places: tuple[LayerPlace, ...]
    kernels: tuple[AttentionKernel | None, ...]
    products: Products | None = None

    @classmethod
    def open(
        cls,
        spec: MemorySpec,
        backend: GgmlBackend,
        *,
        kernel: bool = False,
        products: bool = False,
    ) -> GgmlMemory:
        """New buffers of that shape.

        Args:
            spec: the shape.
            backend: what rotates K rows and computes.
            kernel: whether tokens attend over lists in the groups where that is possible.
            products: whether our own code computes products where that is possible.

        Raises:
            OptionError: types that do not fit the shape.
            AllocationError: a buffer cannot be had; nothing is left behind.
        """
        groups: list[GgmlStore] = []
        try:
            for group in spec.groups:
                groups.append(GgmlStore(group, backend))  # noqa: PERF401 - those before are closed
            kernels = [_kernel(group, backend) if kernel else None for group in spec.groups]
            ours = Products(backend.n_threads) if products and not why_no_products() else None
            states = None if spec.states is None else GgmlStateStore(spec.states)
        except BaseException:
            for store in groups:
                store.close()
            raise
        return cls(tuple(groups), states, spec.places, tuple(kernels), ours)

    @classmethod
    def single(cls, store: GgmlStore, kernel: AttentionKernel | None = None) -> GgmlMemory:
        """That of a model all of whose layers attend alike."""
        return cls((store,), None, MemorySpec.single(store.spec).places, (kernel,))

    @property
    def specs(self) -> tuple[CacheSpec, ...]:
        """The shape of each group."""
        return tuple(store.spec for store in self.groups)


def _kernel(spec: CacheSpec, backend: GgmlBackend) -> AttentionKernel | None:
    return None if why_no_kernel(spec) else AttentionKernel(spec, backend.n_threads)
