"""Mamba and Mamba 2: nothing but the family's mixers, each behind a norm.

Falcon Mamba's files say that they are of this family, but ask for norms without weights
(``mamba.ssm.dt_b_c_rms``), which are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from kvcellar.backends.operations import Weights
from kvcellar.models.blocks import Decoder, Embedding
from kvcellar.models.reader import Reader
from kvcellar.models.ssm import read_mamba, read_mamba2

T = TypeVar("T")


class Mamba2Model(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights, all_attend=False)
        blocks = [file.lone_block(i, read_mamba2(file, i)) for i in file.layers]
        super().__init__(file.spec(blocks), Embedding(file.embedding), blocks, file.head())


class MambaModel(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights, all_attend=False)
        blocks = [file.lone_block(i, read_mamba(file, i)) for i in file.layers]
        super().__init__(file.spec(blocks), Embedding(file.embedding), blocks, file.head())
