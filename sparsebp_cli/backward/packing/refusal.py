"""What packing is not exact for, or does not know: refused by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import ROUTER_OPTIONS
from sparsebp_cli.backward.observe.internals import is_batch_norm
from sparsebp_cli.backward.packing.batch import KNOWN
from sparsebp_cli.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Other types, such as convolutions and recurrences, mix neighbouring rows.
LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def refuse_inexact(model: PreTrainedModel) -> None:
    """Raise :class:`UnsupportedError`, by name, for a model whose rows depend on how the batch is arranged."""
    name, config = type(model).__name__, model.config
    is_pair = getattr(config, "is_encoder_decoder", False)  # its attention is seen at the first batch
    if is_pair and (getattr(config, "num_experts", None) or getattr(config, "expert_capacity", None)):
        raise UnsupportedError(f"{name} has experts with a capacity: its routers depend on the whole batch")
    if not is_pair and not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError(f"{name} does not compute attention through transformers' attention interface")
    others = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - LAYERS)
    if others:
        raise UnsupportedError(f"{name} has layers of the type {others[0]}, which mix neighbouring rows")
    for option in ROUTER_OPTIONS:
        if getattr(config, option, None):
            raise UnsupportedError(f"{name} has {option}: its routers depend on the whole batch")
    for where, module in model.named_modules():
        if is_batch_norm(module):
            raise UnsupportedError(f"{where!r} computes statistics of the whole batch")
        rates = {name: value for name, value in vars(module).items() if "drop" in name}
        rates |= {"p": module.p} if isinstance(module, nn.Dropout) else {}
        for rate in rates.values():
            if isinstance(rate, float) and rate > 0.0:
                raise UnsupportedError(
                    f"{where!r} has dropout {rate:g}, whose masks depend on how the batch is arranged: set it to 0"
                )


def refuse_arguments(given: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raise :class:`UnsupportedError` for an argument of the forward that may say something about single positions."""
    for name, value in given.items():
        if name not in KNOWN and name not in known and (isinstance(value, Tensor) or value):
            raise UnsupportedError(f"packing does not know what to do with {name} in training")


def calls_interface(module: nn.Module) -> bool:
    """Return whether a module is attention that looks its function up by the name of an implementation."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return "get_interface" in getattr(code, "co_names", ())


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is a layer's attention, as far as is known without a batch."""
    return (hasattr(module, "layer_idx") and hasattr(module, "is_causal")) or calls_interface(module)


def find_model(model: nn.Module) -> PreTrainedModel:
    """Return the model of transformers in a model or wrapper, such as peft's."""
    loaded = sys.modules.get("transformers.modeling_utils")
    for module in model.modules():
        if loaded is not None and isinstance(module, loaded.PreTrainedModel):
            found: PreTrainedModel = module
            return found
    raise UnsupportedError(f"rows are packed in a model of transformers, got {type(model).__name__}")


def find_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the head of a causal language model with transformers' loss; None for any other model."""
    function = getattr(model, "loss_function", None)
    causal = sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss
    return model.get_output_embeddings() if function is causal else None
