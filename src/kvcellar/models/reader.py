"""Reading a model file: sizes and tensors, checked, and the parts that families share.

What a family has beside these parts it reads itself. Scales of products count where llama.cpp lets
them count: in attention always, in the feed-forwards of llama and Qwen3 only (``scaled``).

Settings that no family has (:data:`TRIVIAL`) are refused by name, since a model that ignores one
would be silently wrong; files may list them with a value that has no effect, as today's converters
do. A family that has one of these by design names it when it reads the file.

Tensors likewise: :class:`TrackedWeights` knows which were read. One that was not, and that neither
a product that does not count its scale nor the family (``Decoder.unused``) says to have no effect,
is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

from kvcellar.backends.operations import Weights
from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.models.attention import Attention, Fused, Projections, Separate
from kvcellar.models.blocks import (
    Block,
    Dense,
    FeedForward,
    Head,
    LayerNorm,
    Linear,
    Mixer,
    ModelSpec,
    Norm,
    RmsNorm,
)
from kvcellar.models.hparams import HyperParams
from kvcellar.models.rope import FACTORS, read_rope
from kvcellar.types import LayerSpec, RopeSpec

TRIVIAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        ".attention.causal": (True,),
        ".attention.clamp_kqv": (0.0,),
        ".attention.indexer.top_k": (0,),
        ".attention.max_alibi_bias": (0.0,),
        ".attention.output_scale": (0.0, 1.0),
        ".attention.temperature_scale": (0.0,),
        ".attention.value_scale": (0.0, 1.0),
        ".embedding_scale": (0.0, 1.0),
        ".expert_group_count": (0, 1),
        ".hyper_connection.count": (0,),
        ".interleave_moe_layer_step": (0, 1),
        ".logit_scale": (0.0, 1.0),
        ".moe_every_n_layers": (0, 1),
        ".n_deepstack_layers": (0,),
        ".nextn_predict_layers": (0,),
        ".residual_scale": (0.0, 1.0),
        ".rope.dimension_sections": (0,),
        ".swiglu_clamp_exp": (0.0,),
        ".swiglu_clamp_shexp": (0.0,),
        ".use_parallel_residual": (False,),
    }
)
"""Key to the values that have no effect; for arrays, of each element."""


def refuse_unknown_settings(hp: HyperParams) -> None:
    """Raise UnsupportedModel if a file has one of the settings above."""
    for key, values in TRIVIAL.items():
        hp.only(key, *values)


T = TypeVar("T")

_N_NAMED = 4  # tensors that an error lists


class TrackedWeights(Generic[T]):
    """The tensors of a file, and which of them a family has read. Implements ``Weights[T]``.

    Asking whether there is a tensor, or for its shape, does not count as reading it.
    """

    def __init__(self, weights: Weights[T]) -> None:
        self._weights = weights
        self._known: set[str] = set()

    @classmethod
    def of(cls, weights: Weights[T]) -> TrackedWeights[T]:
        """These weights, tracked; as they are if they are that already."""
        return weights if isinstance(weights, TrackedWeights) else cls(weights)

    def names(self) -> Iterable[str]:
        """The names of all tensors that the file has."""
        return self._weights.names()

    def has(self, name: str) -> bool:
        """Whether the file has that tensor."""
        return self._weights.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that the file must have."""
        return self._weights.shape(name)

    def matrix(self, name: str, *shape: int) -> T:
        """See ``Weights.matrix``."""
        self._known.add(name)
        return self._weights.matrix(name, *shape)

    def vector(self, name: str, *shape: int) -> T:
        """See ``Weights.vector``."""
        self._known.add(name)
        return self._weights.vector(name, *shape)

    def values(self, name: str, n: int) -> tuple[float, ...]:
        """See ``Weights.values``."""
        self._known.add(name)
        return self._weights.values(name, n)

    def has_no_effect(self, *names: str) -> None:
        """Note that these tensors, where the file has them, change no result."""
        self._known.update(names)

    def refuse_unread(self, arch: str, unused: Iterable[str] = ()) -> None:
        """Refuse a file with tensors that were not read, since its results would be wrong.

        Args:
            arch: the architecture that read them.
            unused: names that it knows and does not need; ``*`` stands for the number of a layer.

        Raises:
            UnsupportedModel: there are any; it names some.
        """
        unread = sorted(set(self.names()) - self._known)
        patterns = [re.escape(name).replace(r"\*", "[0-9]+") for name in unused]
        unread = [name for name in unread if not any(re.fullmatch(p, name) for p in patterns)]
        if not unread:
            return
        listed = ", ".join(f"{name!r:.80}"[1:-1] for name in unread[:_N_NAMED])
        more = f" and {len(unread) - _N_NAMED} more" if len(unread) > _N_NAMED else ""
        raise UnsupportedModel(
            f"the file has tensors that architecture {arch} does not use, so its results would be "
            f"wrong: {listed}{more}; convert the model again, for the architecture that it has"
        )


class Reader(Generic[T]):
    """The hyper-parameters and tensors of a file.

    Attributes:
        hp: the hyper-parameters.
        weights: the tensors.
        embedding: the table of tokens.
        layers: the numbers of the layers.

    With ``all_attend=False``, layers may have no heads of K and V.

    Raises:
        UnsupportedModel: a tensor or hyper-parameter is absent, or one is there that we lack.
        ModelFileError: sizes contradict each other.
    """

    def __init__(
        self, metadata: Mapping[str, object], weights: Weights[T], *, all_attend: bool = True
    ) -> None:
        self.hp = HyperParams(metadata)
        self.weights = TrackedWeights.of(weights)
        refuse_unknown_settings(self.hp)
        self.n_vocab, self.n_embd = _embedding_shape(self.hp, weights)
        self.embedding = weights.matrix("token_embd.weight", self.n_vocab, self.n_embd)
        self.n_layer = _layer_count(self.hp, weights)
        self.layers = range(self.n_layer)
        default, least = (None, 1) if all_attend else (0, 0)
        self.n_head = self.hp.per_layer(".attention.head_count", self.n_layer, default, least)
        n_head = max(self.n_head)
        self.n_head_kv = self.hp.per_layer(".attention.head_count_kv", self.n_layer, n_head, least)
        _check_heads(self.n_head, self.n_head_kv)
        head_dim = self.n_embd // max(n_head, 1)
        self.head_dim_k = self.hp.size(".attention.key_length", head_dim)
        self.head_dim_v = self.hp.size(".attention.value_length", head_dim)

    # -- the ends

    def spec(self, blocks: Sequence[Block[T]], n_positions: int | None = None) -> ModelSpec:
        """The shape of a model of these blocks."""
        return ModelSpec(
            arch=self.hp.arch,
            n_vocab=self.n_vocab,
            n_embd=self.n_embd,
            n_ctx_train=self.hp.size(".context_length"),
            layers=tuple(block.mixer.memory for block in blocks),
            n_positions=n_positions,
        )

    def head(self, norm: Norm[T] | None = None, softcap: float = 0.0) -> Head[T]:
        """Norm (RMS if none is given) and output matrix, which may be the embedding's."""
        name, n = "output", self.n_vocab
        is_own = self.weights.has(f"{name}.weight")
        output = Linear(
            weight=self.weights.matrix(f"{name}.weight", n, self.n_embd)
            if is_own
            else self.embedding,
            scale=self.optional(f"{name}.scale", 1),
            bias=self.optional(f"{name}.bias", n),
        )
        return Head(norm or self.rms_norm("output_norm"), output, softcap)

    # -- blocks

    def block(self, i: int, mixer: Mixer[T], ffn: FeedForward[T]) -> Block[T]:
        """Layer i of these two, each with an RMS norm before it."""
        return Block(
            mixer_norm=self.rms_norm(f"blk.{i}.attn_norm"),
            mixer=mixer,
            ffn_norm=self.rms_norm(f"blk.{i}.ffn_norm"),
            ffn=ffn,
        )

    def lone_block(self, i: int, mixer: Mixer[T]) -> Block[T]:
        """Layer i of a mixer and nothing else, with an RMS norm before it."""
        return Block(self.rms_norm(f"blk.{i}.attn_norm"), mixer)

    def rope(self, mode: Literal["normal", "neox"], factors: str = FACTORS) -> RopeSpec:
        """How heads of K and Q are rotated."""
        self.hp.absent(".rope.scaling.yarn_log_multiplier")
        return read_rope(self.hp, self.weights, mode, self.head_dim_k, factors)

    def attention(self, i: int, rope: RopeSpec | None, window: int = 0) -> Attention[T]:
        """Layer i's attention; its q, k and v may be one matrix."""
        n_head = self.n_head[i]
        shape = LayerSpec(self.n_head_kv[i], self.head_dim_k, self.head_dim_v, rope, window=window)
        return Attention(
            shape=shape,
            n_head=n_head,
            scale=self.hp.number(".attention.scale", 0.0) or self.head_dim_k**-0.5,
            project=self._projections(i, n_head * self.head_dim_k, shape),
            out=self.linear(f"blk.{i}.attn_output", self.n_embd, n_head * self.head_dim_v),
        )

    def dense(
        self,
        i: int,
        activation: Literal["swiglu", "geglu"] = "swiglu",
        *,
        scaled: bool = False,
        n_ff: int | None = None,
        suffix: str = "",
    ) -> Dense[T]:
        """Layer i's gated feed-forward; other tensors and sizes where the last two are given."""
        n, name = self.n_ff(i) if n_ff is None else n_ff, f"blk.{i}.ffn"
        return Dense(
            gate=self.linear(f"{name}_gate{suffix}", n, self.n_embd, scaled=scaled),
            up=self.linear(f"{name}_up{suffix}", n, self.n_embd, scaled=scaled),
            down=self.linear(f"{name}_down{suffix}", self.n_embd, n, scaled=scaled),
            activation=activation,
        )

    def n_ff(self, i: int) -> int:
        """How many hidden values layer i's feed-forward has."""
        return self.hp.per_layer(".feed_forward_length", self.n_layer)[i]

    # -- tensors

    def linear(self, name: str, n_out: int, n_in: int, *, scaled: bool = True) -> Linear[T]:
        """A weight with the bias and, if it counts, the scale that the file may have."""
        self.ignore_scales(name, scaled=scaled)
        return Linear(
            weight=self.weights.matrix(f"{name}.weight", n_out, n_in),
            scale=self.optional(f"{name}.scale", 1) if scaled else None,
            bias=self.optional(f"{name}.bias", n_out),
        )

    def ignore_scales(self, name: str, *, scaled: bool) -> None:
        """Note which scales of a weight that is read have no effect, where the file has them.

        That of the input is for kernels that round the input to few bits, which ours do not; that
        of the product has none in parts of some families (``scaled=False``), as in llama.cpp.
        """
        self.weights.has_no_effect(f"{name}.input_scale", *(() if scaled else (f"{name}.scale",)))

    def rms_norm(self, name: str, *shape: int) -> RmsNorm[T]:
        """An RMS norm of n_embd values, or of another shape."""
        eps = self.hp.positive(".attention.layer_norm_rms_epsilon")
        return RmsNorm(self.weights.vector(f"{name}.weight", *(shape or (self.n_embd,))), eps)

    def layer_norm(self, name: str) -> LayerNorm[T]:
        """A norm of n_embd values by mean and variance."""
        vector, n = self.weights.vector, self.n_embd
        eps = self.hp.positive(".attention.layer_norm_epsilon")
        return LayerNorm(vector(f"{name}.weight", n), vector(f"{name}.bias", n), eps)

    def optional(self, name: str, n: int) -> T | None:
        """A vector that the file may have."""
        return self.weights.vector(name, n) if self.weights.has(name) else None

    def _projections(self, i: int, n_embd_q: int, shape: LayerSpec) -> Projections[T]:
        sizes = (n_embd_q, shape.n_embd_k, shape.n_embd_v)
        if self.weights.has(f"blk.{i}.attn_qkv.weight"):
            return Fused(self.linear(f"blk.{i}.attn_qkv", sum(sizes), self.n_embd), sizes)
        q, k, v = (
            self.linear(f"blk.{i}.attn_{name}", size, self.n_embd)
            for name, size in zip("qkv", sizes, strict=True)
        )
        return Separate(q, k, v)


def _embedding_shape(hp: HyperParams, weights: Weights[T]) -> tuple[int, int]:
    shape = weights.shape("token_embd.weight")
    n_embd = hp.size(".embedding_length")
    if len(shape) != 2 or shape[1] != n_embd or shape[0] == 0:
        raise ModelFileError(f"token_embd.weight has shape {shape}, expected (n_vocab, {n_embd})")
    return shape[0], shape[1]


def _layer_count(hp: HyperParams, weights: Weights[T]) -> int:
    """``block_count``, if the last of the layers is there: no work for an absurd number."""
    n_layer = hp.size(".block_count")
    weights.shape(f"blk.{n_layer - 1}.attn_norm.weight")
    return n_layer


def _check_heads(n_head: Sequence[int], n_head_kv: Sequence[int]) -> None:
    for i, (n, n_kv) in enumerate(zip(n_head, n_head_kv, strict=True)):
        if n_kv and (n == 0 or n % n_kv):
            raise ModelFileError(
                f"layer {i} has {n} heads over {n_kv} K/V heads: not a whole multiple"
            )
