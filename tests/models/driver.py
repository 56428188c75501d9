"""Decoding with a cache a group of layers, until the runtime does so."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.backends.numpy.model_file import NumpyModelFile
from kvcellar.batch import Batch
from kvcellar.cache.attention import AttentionCache
from kvcellar.models.blocks import Decoder
from kvcellar.models.registry import load_architecture
from kvcellar.plan import Plan
from kvcellar.testing.golden import nmse
from kvcellar.types import CacheSpec, Float32Array, KVType, MemorySpec, group_layers


class Grouped:
    """A model on the NumPy backend; each group of its layers has an own cache."""

    def __init__(self, path: Path, kind: KVType = KVType.F16, size: int = 256) -> None:
        self._file = NumpyModelFile(path)
        self.model: Decoder[Float32Array] = load_architecture(
            self._file.metadata, self._file.weights
        )
        groups, states, places = group_layers(self.model.spec.layers)
        assert not states
        specs = tuple(CacheSpec(size, 4, layers, kind, kind) for layers in groups)
        memory = self._file.open_memory(MemorySpec(specs, None, places), self.model.forward)
        self._executor = memory.executor
        self.caches = [
            AttentionCache(spec, store) for spec, store in zip(specs, memory.groups, strict=True)
        ]

    def decode(self, batch: Batch, n_ubatch: int = 512) -> Float32Array:
        """Logits of the rows that the batch wants."""
        parts = []
        with ExitStack() as stack:
            placements = [
                stack.enter_context(cache.place(batch, n_ubatch)) for cache in self.caches
            ]
            for plans in zip(*(placement.plans() for placement in placements), strict=True):
                groups = tuple(plan.groups[0] for plan in plans)
                parts.append(self._executor.run(Plan(plans[0].micro, groups)))
        return np.concatenate(parts)

    def play(self, step: Mapping[str, Any]) -> dict[int, float]:
        """Play one step of ``archs/*.json``; the error of each row of logits that it lists."""
        if step["op"] == "decode":
            wanted = {int(row): values for row, values in step["logits"].items()}
            batch = Batch()
            for i, (token, position, seq_ids) in enumerate(step["tokens"]):
                batch.add(token, position, seq_ids, logits=i in wanted)
            logits = self.decode(batch)
            rows = zip(sorted(wanted), logits, strict=True)
            return {row: nmse(got, wanted[row]) for row, got in rows}
        arguments = {name: value for name, value in step.items() if name not in ("op", "ret")}
        if "seq" in arguments:
            arguments["seq_id"] = arguments.pop("seq")
        for cache in self.caches:
            assert getattr(cache, step["op"])(**arguments) == step.get("ret")
        return {}
