"""Parameters that FSDP shards: whole ones, gathered for a forward or backward, stand for those of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn


def is_sharded(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to a module."""
    return hasattr(module, "_get_fsdp_state")


def find_gathered(modules: Iterable[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parameters that were gathered so far.

    Args:
        modules: Of a model.

    Yields:
        tuple[Tensor, Tensor]: The whole one, which the graph knows, and the sharded one, which the optimizer knows.
    """
    for module in modules:
        if not is_sharded(module):
            continue
        state = module._get_fsdp_state()  # type: ignore[operator] # noqa: SLF001 - there is no public name for any of this; a test holds it
        one = getattr(state, "_fsdp_param_group", None)  # all that torch 2.11 has
        for group in getattr(state, "_fsdp_param_groups", [one] if one is not None else []):
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    yield whole, parameter.sharded_param


def is_flat(parameter: Tensor) -> bool:
    """Return whether a parameter is one that the first FSDP made of many: nobody else knows it."""
    return bool(getattr(parameter, "_is_flat_param", False))
