"""Choose among examples at the output of each layer, for all layers below."""

from sparsebp_shelf.layer_sampler.kind import LAYER_SAMPLER, LayerOutput, LayerSampler

__all__ = ["LAYER_SAMPLER", "LayerOutput", "LayerSampler"]
