"""Shard parameters over ranks (FSDP2): shard a model, and gather and load whole tensors."""

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
from sparsebp_cli.optimizers.separate import keep_precision


def shard(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Shard every parameter over the ranks, in place. Each decoder layer is gathered while it is computed. The
    optimizer's parameters are replaced by sharded ones, so it must not have a state yet. This calls PyTorch directly,
    because accelerate 1.15 shards only on accelerators and silently uses DDP on a CPU."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    # Shard layers first, as `fully_shard` requires: a sharded layer no longer belongs to the whole model's group.
    for layer in LayerNumbers(model).layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = dict(model.named_parameters())
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [sharded[name] for name in members]


@contextmanager
def no_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients on each rank without reducing them over the ranks."""
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
    """Return the model inside a DDP wrapper. Its parameter names have no prefix ``module.``."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def sum_gradients(model: nn.Module) -> None:
    """Sum gradients over the ranks instead of averaging them, so that they equal those of a single process."""
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, lambda _, bucket: _sum_up(bucket.buffer()))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot reduce with a premultiplied factor


def _sum_up(bucket: Tensor) -> torch.futures.Future[Tensor]:
    work = torch.distributed.all_reduce(bucket, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a whole tensor. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Return whole tensors by name, sharded ones on the host, gathered one after the other; empty unless ``keep``.
    Collective. A tensor with two names is gathered once."""
    found: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and id(tensor) not in known:
            known[id(tensor)] = tensor.full_tensor().cpu() if keep else tensor.full_tensor().new_empty(0)
        if keep:
            found[name] = known.get(id(tensor), tensor)
    return found


def copy_full(mine: Tensor, given: Tensor) -> None:
    """Copy a whole tensor, equal on every rank, into one that may be sharded."""
    with torch.no_grad():
        mine.copy_(_shard_like(mine, given))


def gather_optimizer(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Any]:
    """Return an optimizer's state_dict, with whole tensors if ``keep``. Collective."""
    state = optimizer.state_dict()
    by_number: dict[int, dict[str, object]] = {}
    for number, values in state["state"].items():
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        by_number[number] = values | gather(tensors, keep=keep)
    return {**state, "state": by_number}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state_dict with whole tensors from :func:`gather_optimizer`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_number = {
        number: {name: _shard_state(parameters[number], value) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    cut = {**state, "state": by_number}
    optimizer.load_state_dict(cut)
    keep_precision(optimizer, cut)


def _shard_state(parameter: Tensor, value: object) -> object:
    """Shard a moment like its parameter. Return step counts and other values unchanged."""
    return _shard_like(parameter, value) if isinstance(value, Tensor) and value.shape == parameter.shape else value


def _shard_like(mine: Tensor, given: Tensor) -> Tensor:
    if not isinstance(mine, DTensor):
        return given
    # None: every rank has the whole tensor, so nothing is sent.
    return distribute_tensor(given.to(mine.device), mine.device_mesh, mine.placements, src_data_rank=None)
