"""Settings that change what a model computes and that we do not have.

Files may list them with a value that means nothing is done (converters of today list all there
are). Any other value is refused by name, since a model that ignores it would be silently wrong.
A family that has one of these by design names it when it reads the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvcellar.models.hparams import HyperParams

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
"""Key to the values that mean nothing is done; of arrays, each element."""


def refuse_unknown_settings(hp: HyperParams) -> None:
    """Raise UnsupportedModel if a file has one of the settings above."""
    for key, values in TRIVIAL.items():
        hp.only(key, *values)
