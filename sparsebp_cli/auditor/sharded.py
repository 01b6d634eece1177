"""Parameters sharded by FSDP: the whole ones gathered for a forward or backward stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn


def is_sharded(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to a module."""
    return hasattr(module, "_get_fsdp_state")


def find_gathered(modules: Iterable[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of a gathered parameter, which the graph holds, and the sharded one, which the optimizer holds."""
    for module in modules:
        if not is_sharded(module):
            continue
        # FSDP2 has no public access to its parameter groups; covered by a test. torch 2.11 has a single group.
        state = module._get_fsdp_state()  # type: ignore[operator] # noqa: SLF001
        one = getattr(state, "_fsdp_param_group", None)
        for group in getattr(state, "_fsdp_param_groups", [one] if one is not None else []):
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    yield whole, parameter.sharded_param


def is_flat(parameter: Tensor) -> bool:
    """Return whether FSDP1 made a parameter by flattening others: only FSDP itself holds it."""
    return bool(getattr(parameter, "_is_flat_param", False))
