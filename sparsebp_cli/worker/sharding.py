"""Weights of which each rank holds a part (FSDP2): how a model is cut, and how whole tensors come out and go in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.worker.precision import keep_precision


def shard(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Leave each rank a part of every parameter; each decoder layer is put together while it is computed.

    By PyTorch's own call: accelerate 1.15 does it on accelerators alone, and does DDP on a CPU without a word.

    Args:
        model: The same on every rank, with the engine attached; cut in place.
        optimizer: Of the model's trained parameters, in their order, without a state yet.
        device: Of the model.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in LayerNumbers(model).layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    (group,) = optimizer.param_groups
    group["params"] = [p for p in model.parameters() if p.requires_grad]


@contextmanager
def apart(model: nn.Module) -> Iterator[None]:
    """Add gradients up on each rank, and not over the ranks.

    Args:
        model: Sharded, or in DDP.

    Yields:
        None: As long as they are apart.
    """
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model itself, whose names have no ``module.`` in front."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def sum_gradients(model: nn.Module) -> None:
    """Let gradients be summed over the ranks, instead of their mean taken: each is then as one process has it.

    Args:
        model: Sharded, or in DDP.
    """
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, lambda _, bucket: _sum_up(bucket.buffer()))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no product with a factor


def _sum_up(bucket: Tensor) -> torch.futures.Future[Tensor]:
    work = torch.distributed.all_reduce(bucket, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def own_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Put tensors together, one after the other; every rank must ask for the same.

    Args:
        tensors: By name; one of two names is put together once.
        keep: Whether this rank wants them.

    Returns:
        Whole tensors by name, those that are in parts on the host; none for a rank that does not want them.
    """
    found: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and id(tensor) not in known:
            known[id(tensor)] = tensor.full_tensor().cpu() if keep else tensor.full_tensor().new_empty(0)
        if keep:
            found[name] = known.get(id(tensor), tensor)
    return found


def fill(mine: Tensor, given: Tensor) -> None:
    """Copy a whole tensor into one of which this rank may hold a part.

    Args:
        mine: Is changed.
        given: The same on every rank.
    """
    with torch.no_grad():
        mine.copy_(_cut_like(mine, given))


def gather_optimizer(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Any]:
    """Return an optimizer's state_dict with whole tensors; every rank must ask.

    Args:
        optimizer: Of torch, or wrapped by accelerate.
        keep: Whether this rank wants it.

    Returns:
        The state_dict; on a rank that does not want it, without the tensors that are in parts.
    """
    state = optimizer.state_dict()
    by_number: dict[int, dict[str, Any]] = {}
    for number, values in state["state"].items():
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        by_number[number] = values | gather(tensors, keep=keep)
    return {**state, "state": by_number}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put a state_dict with whole tensors back.

    Args:
        optimizer: Of torch, or wrapped by accelerate.
        state: From :func:`gather_optimizer`.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_number = {
        number: {name: _cut_state(parameters[number], value) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    cut = {**state, "state": by_number}
    optimizer.load_state_dict(cut)
    keep_precision(optimizer, cut)


def _cut_state(parameter: Tensor, value: Any) -> Any:
    """Moments lie as their parameter does; a step count is a number."""
    return _cut_like(parameter, value) if isinstance(value, Tensor) and value.shape == parameter.shape else value


def _cut_like(mine: Tensor, given: Tensor) -> Tensor:
    if not isinstance(mine, DTensor):
        return given
    return distribute_tensor(given.to(mine.device), mine.device_mesh, mine.placements, src_data_rank=None)
