"""Manage the processes (ranks) that train together, on one machine or several nodes, and exchange small values.

These values use gloo, on the host. DDP and FSDP2 exchange gradients and weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import Recipe, TargetOptions

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")
# Names the file through which ranks of one machine find each other. torchrun offers a port that was free before. The
# first rank would bind it seconds later, when another program may have taken it.
MEETING_FILE = "SPARSEBP_MEETING_FILE"
# With several nodes, the target sets these for each node's worker: its number from 0, and the address of the first
# node.
NODE, FIRST_NODE = "SPARSEBP_NODE", "SPARSEBP_FIRST_NODE"
CODE_FILE = "SPARSEBP_CODE_FILE"  # names the file for the run's exit code, if whatever starts the nodes hides it
_LEFT: list[object] = []  # process groups that were closed


def process_options(recipe: Recipe) -> TargetOptions:
    """Return the target options that all kinds of target share: number of nodes and processes, and sharding."""
    given = {name: value for name, value in recipe.target.options.items() if name in TargetOptions.model_fields}
    return TargetOptions.model_validate(given)


@dataclass(frozen=True)
class NodePlace:
    """The position of this machine among a run's nodes."""

    node: int  # from 0; the first node writes files
    host: str  # address of the first node's launcher
    port: int

    @classmethod
    def read(cls) -> Self | None:
        """Read the position from the environment; None if the run's target did not set it. Raise DataError if the
        values are invalid."""
        node, first = os.environ.get(NODE), os.environ.get(FIRST_NODE)
        if node is None and first is None:
            return None
        host, _, port = (first or "").rpartition(":")
        if not (host and port.isdecimal() and (node or "").isdecimal()):
            raise DataError(f"{NODE} must be a number, and {FIRST_NODE} must be HOST:PORT, got {node!r} and {first!r}")
        return cls(int(node or 0), host, int(port))

    def connect(self, timeout: timedelta, *, serves: bool = False) -> TCPStore:
        """Return a connection to the store that the first node's launcher serves."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = "localhost" if self.node == 0 else self.host
        return TCPStore(host, self.port, is_master=serves, timeout=timeout, wait_for_workers=False)


def read_place(options: TargetOptions) -> NodePlace | None:
    """Return this machine's position in a run on several nodes; None for a run on one. Raise DataError if the worker
    was not started on as many nodes as the plan has."""
    place = NodePlace.read() if options.nodes > 1 else None
    if options.nodes > 1 and (place is None or place.node >= options.nodes):
        got = "no number" if place is None else str(place.node)
        raise DataError(f"with 'target.nodes: {options.nodes}', {NODE} must be in [0, {options.nodes - 1}], got {got}")
    return place


def find_number(options: TargetOptions) -> int:
    """Return the rank of this launched process among the processes of all nodes."""
    place = read_place(options)
    first = place.node * (options.processes // options.nodes) if place is not None else 0
    return first + int(os.environ["LOCAL_RANK"])


@dataclass(frozen=True)
class Ranks:
    """This process's position among those that train together, with collective operations. Every rank must call a
    collective operation."""

    rank: int = 0  # from 0; only rank 0 writes files
    count: int = 1  # number of processes
    is_sharded: bool = False  # each rank holds a part of weights, gradients and optimizer state
    on_cuda: bool = False  # gradients go over NCCL

    @classmethod
    def join(cls, recipe: Recipe) -> Self:
        """Initialise the process group of a recipe with several processes, or return a single rank. Raise DataError if
        this machine has fewer CUDA devices than processes."""
        options = process_options(recipe)
        if options.processes == 1:
            return cls()
        import torch
        from torch import distributed
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        on_cuda = recipe.target.device != "cpu" and torch.cuda.is_available()
        here, local = options.processes // options.nodes, int(os.environ["LOCAL_RANK"])
        if on_cuda and torch.cuda.device_count() < here:
            raise DataError(
                f"target.processes: {options.processes}{f' on {options.nodes} nodes' if options.nodes > 1 else ''}, "
                f"but torch finds {torch.cuda.device_count()} CUDA devices here"
            )
        if on_cuda:
            # Set the device before the group: NCCL opens its communicator on the current device, and guesses it without
            # device_id.
            torch.cuda.set_device(local)
        timeout, place = timedelta(minutes=options.peer_timeout_min), read_place(options)
        rank = find_number(options)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(options.processes))  # torchrun counts one node's only
        if place is None:
            meeting: dict[str, Any] = {"init_method": f"file://{os.environ[MEETING_FILE]}"}
        else:
            meeting = {"store": PrefixStore("ranks", place.connect(timeout))}
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            rank=rank,
            world_size=options.processes,
            timeout=timeout,  # also that of NCCL's watchdog
            device_id=torch.device("cuda", local) if on_cuda else None,
            **meeting,
        )
        return cls(distributed.get_rank(), distributed.get_world_size(), options.sharding == "fsdp2", on_cuda)

    def leave(self) -> None:
        """Close NCCL's communicators after the last collective operation. Without CUDA, do nothing."""
        if not self.on_cuda:
            return
        from torch import distributed

        # Keep the group: PyTorch 2.13 destroys a gloo group while it holds the GIL, and waits for a thread that needs
        # the GIL. The process ends before the group is freed.
        _LEFT.append(distributed.group.WORLD)
        distributed.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files."""
        return self.rank == 0

    def all_max(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over the ranks."""
        return self._reduce(values, "MAX")

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over the ranks."""
        return self._reduce(values, "SUM")

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_max([0.0])

    def gather(self, value: T) -> list[T]:
        """Return one picklable value of each rank, in rank order, on the first rank; an empty list on the others."""
        if self.count == 1:
            return [value]
        from torch import distributed

        found: list[Any] | None = [None] * self.count if self.is_first else None
        distributed.gather_object(value, found)
        return found or []

    def broadcast(self, value: T) -> T:
        """Return the first rank's picklable value on every rank. The other ranks' values are ignored."""
        if self.count == 1:
            return value
        from torch import distributed

        values = [value]
        distributed.broadcast_object_list(values)
        return values[0]

    def _reduce(self, values: Sequence[float], operation: str) -> list[float]:
        if self.count == 1:
            return list(values)
        import torch
        from torch import distributed

        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor, getattr(distributed.ReduceOp, operation))
        reduced: list[float] = tensor.tolist()
        return reduced
