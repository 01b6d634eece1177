"""Checks that refuse models, arguments and batches for which packing is not exact or not supported."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sparsebp_cli.backward.core.loss_weight import has_causal_loss
from sparsebp_cli.backward.decoder.decoder import ROUTER_OPTIONS, argument_names
from sparsebp_cli.backward.kind.packing.balance import OPTION, find_coefficient
from sparsebp_cli.backward.kind.packing.batch import ATTENTIONS, KNOWN, STATES, BatchFacts
from sparsebp_cli.backward.kind.packing.dropout import find_adapter_dropout, find_rate
from sparsebp_cli.backward.kind.packing.loss import has_own_loss
from sparsebp_cli.backward.kind.packing.mixer import find_mixers
from sparsebp_cli.backward.observe.internals import is_batch_norm
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy.composition import ADAPTER_TYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Types of layers. Others, such as recurrences without a cache of states, mix neighbouring rows in ways of their own.
LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
MIXING_LAYERS = {"conv", "linear_attention", "mamba", "hybrid", "hybrid_sliding", "mlp", "moe"}

OUTPUTS = {ATTENTIONS, STATES}  # optional outputs of a forward: if they need every position, the batch runs plainly

# The end of errors for models that packing does not support at all.
WAY_OUT = "train it without lossless, and avoid padding by batches of equal lengths (group_by_length, group_by: length)"


def refuse_inexact(model: PreTrainedModel, verify: str) -> None:
    """Raise :class:`UnsupportedError` for a model whose rows depend on the arrangement of the batch. ``verify`` is the
    policy's option."""
    _refuse_unverified(model, verify)
    name, config = type(model).__name__, model.config
    is_pair = getattr(config, "is_encoder_decoder", False)  # the first batch shows whether its attention is supported
    if is_pair and (getattr(config, "num_experts", None) or getattr(config, "expert_capacity", None)):
        raise UnsupportedError(f"lossless does not support {name}, whose expert capacity depends on the whole batch")
    if not is_pair and not getattr(model, "_supports_attention_backend", False):
        _refuse_attention(model, name)
    known = LAYERS | (MIXING_LAYERS if find_mixers(find_text(model)) else set())
    others = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - known)
    if others:
        raise UnsupportedError(f"{name} has {others[0]} layers, which lossless does not support: {WAY_OUT}")
    for kind in {type(module) for module in model.modules() if is_attention(module)}:
        if reads_mask(kind):
            raise UnsupportedError(f"lossless does not support {kind.__name__}, which reads the attention mask itself")
    for option in ROUTER_OPTIONS:
        if getattr(config, option, None) and not (option == OPTION and _knows_balance(model)):
            raise UnsupportedError(f"lossless needs {option} to be 0 or False, because it depends on the whole batch")
    known_dropout = set() if is_pair else set(find_adapter_dropout(model.base_model))
    _refuse_mixed_dropout(model, known_dropout)
    for where, module in model.named_modules():
        if is_batch_norm(module):
            raise UnsupportedError(f"lossless does not support batch statistics, as {where!r} computes them")
        if getattr(module, "scale_grad_by_freq", False):
            raise UnsupportedError(
                f"lossless does not support {where!r}, which divides the gradient of a token by the number of its "
                "occurrences in the batch: set scale_grad_by_freq to False"
            )
        rate = 0.0 if module in known_dropout else find_rate(module)
        if rate > 0.0:
            raise UnsupportedError(
                f"lossless does not support {where!r}, which has dropout {rate:g}: set this dropout to 0"
            )


def _refuse_mixed_dropout(model: PreTrainedModel, dropout: Collection[nn.Module]) -> None:
    """Raise :class:`UnsupportedError` for dropout of adapters in a layer that mixes neighbouring positions."""
    mixed = {inner for mixer in find_mixers(find_text(model)) for inner in mixer.modules()}
    for where, module in model.named_modules():
        if module in mixed and module in dropout:
            raise UnsupportedError(
                f"lossless does not support {where!r}, which has dropout inside a layer that mixes neighbouring "
                "positions: set lora_dropout to 0, or leave this layer out of target_modules"
            )


def _refuse_attention(model: PreTrainedModel, name: str) -> None:
    """Raise :class:`UnsupportedError` unless rows interact only in attention through transformers' interface."""
    text = find_text(model)
    mixed = {inner for mixer in find_mixers(text) for inner in mixer.modules()}
    modules = [module for module in text.modules() if module not in mixed]
    cores = [module for module in modules if is_attention(module)]
    if not cores or not all(map(calls_interface, cores)) or any(isinstance(module, nn.Conv1d) for module in modules):
        raise UnsupportedError(
            f"lossless needs transformers' attention interface, which {name} does not use: {WAY_OUT}"
        )
    if "position_ids" not in argument_names(model):
        raise UnsupportedError(f"lossless needs position_ids, which {name} does not take: {WAY_OUT}")


def _knows_balance(model: PreTrainedModel) -> bool:
    """Return whether the loss that balances experts can be computed from packed rows."""
    return find_coefficient(model) is not None and find_head(model) is not None


def _refuse_unverified(model: PreTrainedModel, verify: str) -> None:
    """Raise :class:`UnsupportedError` for an adapter of peft that may mix positions, if no comparison would show it."""
    for config in (getattr(model, "peft_config", None) or {}).values() if verify == "never" else ():
        kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
        if kind not in {"lora", "adalora", *ADAPTER_TYPES} or getattr(config, "velora_config", None):
            raise UnsupportedError(
                f"lossless: set verify to first, not never: {type(config).__name__} may mix the positions of a batch, "
                "which lossless must check"
            )


def refuse_arguments(given: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raise :class:`UnsupportedError` for an unknown argument of the forward, which may refer to single positions; None
    and False turn an option off."""
    for name, value in given.items():
        if name not in KNOWN | OUTPUTS and name not in known and value is not None and value is not False:
            raise UnsupportedError(
                f"lossless does not support {name} in training: leave it out of the batch, or train this "
                "model without lossless"
            )


def reads_mask(kind: type[nn.Module]) -> bool:
    """Return whether the source of an attention class reads values or attributes of its mask, for example to make its
    own mask; False if there is no source.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return False  # the mask of the first batch then raises an error if the layer reads it
    read = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Subscript))
    return any(isinstance(value, ast.Name) and value.id == "attention_mask" for value in read)


def refuse_batch(model: PreTrainedModel, facts: BatchFacts, largest: int) -> str:
    """Return why skipping rows of a batch would change the gradient; empty if it would not.

    ``largest`` is the largest position number among the rows to compute.
    """
    if facts.trains_gaps:
        return "the loss reads an output at a masked position, which attends to earlier positions of the text"
    if facts.has_fractions:
        return "position numbers are not whole numbers"
    config = model.config.get_text_config()
    if largest != facts.largest and (limit := _find_rope_limit(config)) is not None and facts.largest >= limit:
        return f"position numbers reach {facts.largest}, so rotary embeddings depend on the batch's largest number"
    return ""


def _find_rope_limit(config: Any) -> int | None:
    """Return the position number from which the frequencies depend on the batch's largest one; None: they never do."""

    def find(value: object) -> Iterator[Mapping[str, Any]]:
        if isinstance(value, Mapping):
            if "rope_type" in value or "type" in value:
                yield value
            for inner in value.values():
                yield from find(inner)

    limits = []
    for name in ("rope_parameters", "rope_scaling"):
        for found in find(getattr(config, name, None)):
            # Early configurations of Phi-3 call longrope su.
            if found.get("rope_type", found.get("type")) in {"dynamic", "longrope", "su"}:
                limit = found.get("original_max_position_embeddings")
                limit = limit or getattr(config, "original_max_position_embeddings", None)
                limits.append(int(limit or getattr(config, "max_position_embeddings", 0) or 0))
    return min(limits, default=None)


def calls_interface(module: nn.Module) -> bool:
    """Return whether a module is attention that looks up its function by the name of an implementation."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return "get_interface" in getattr(code, "co_names", ())


def is_attention(module: nn.Module) -> bool:
    """Return whether a module looks like a layer's attention, without running a batch."""
    return (hasattr(module, "layer_idx") and hasattr(module, "is_causal")) or calls_interface(module)


def find_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a model or wrapper, such as peft's."""
    loaded = sys.modules.get("transformers.modeling_utils")
    for module in model.modules():
        if loaded is not None and isinstance(module, loaded.PreTrainedModel):
            found: PreTrainedModel = module
            return found
    raise UnsupportedError(f"lossless needs a transformers model, got {type(model).__name__}")


def find_text(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that runs on tokens. In a model with pictures it excludes the vision tower, which
    batches of text do not use."""
    if not _has_text_part(model):
        return model.base_model
    found = model.get_decoder()
    return found if isinstance(found, nn.Module) and found is not model else model.base_model


def _has_text_part(model: PreTrainedModel) -> bool:
    """Return whether a model has a text part among other parts."""
    config = model.config
    return config.get_text_config() is not config and not getattr(config, "is_encoder_decoder", False)


def find_whole(model: PreTrainedModel, given: Mapping[str, Any], known: Collection[str]) -> str:
    """Return why a batch with these arguments needs the plain forward; empty if it does not."""
    if picture := find_picture(model, given, known):
        return f"they have {picture}, and packing does not support batches with pictures or sound"
    asked = (name for name in sorted(OUTPUTS - set(known)) if given.get(name, getattr(model.config, name, False)))
    return next((f"their forward requests {name}, which lossless does not return" for name in asked), "")


def find_picture(model: PreTrainedModel, given: Mapping[str, Any], known: Collection[str]) -> str:
    """Return an argument that the text part of a model does not accept, such as pictures; empty if there is none."""
    if not _has_text_part(model):
        return ""
    others = set(argument_names(model)) - set(argument_names(find_text(model))) - KNOWN - set(known)
    return next((name for name in given if name in others and isinstance(given[name], Tensor)), "")


def reads_first(model: PreTrainedModel) -> bool:
    """Return whether a module above an encoder's layers reads the first position: a pooler, or the head of a classifier
    of whole examples.
    """
    kinds = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
    return isinstance(getattr(model.base_model, "pooler", None), nn.Module) or type(model).__name__.endswith(kinds)


def find_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the head of a causal language model with transformers' loss; None for any other model."""
    head: nn.Module | None = model.get_output_embeddings() if has_causal_loss(model) else None
    # A script's own class may not name position_ids, which packed rows need.
    is_named = "position_ids" in argument_names(model) or "position_ids" not in argument_names(model.base_model)
    return head if head is not None and is_named and not has_own_loss(model, head) else None
