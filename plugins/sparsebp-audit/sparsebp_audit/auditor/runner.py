"""Run PyTorch's backward passes with their graph and operators recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from sparsebp_audit.auditor.internals import fsdp_state, has_fsdp_state
from sparsebp_audit.auditor.ledger import PassRecord
from sparsebp_audit.auditor.operation import OperatorTape
from sparsebp_audit.auditor.parameter import Parameters
from sparsebp_audit.auditor.reach import UNKNOWN, LeafReachability, walk
from sparsebp_audit.auditor.storage import has_storage, is_plain, key_of, refer
from sparsebp_audit.auditor.watch import OperatorWatch
from sparsebp_cli.backward.observe.graph import LEAF
from sparsebp_cli.backward.observe.internals import is_in_transform, running_node, sequence_number_of, variable_of

T = TypeVar("T")


@dataclass(frozen=True)
class InputGradient:
    """The gradient, after one pass, of a leaf that is no parameter."""

    bit: int  # bit of the leaf, by its order in the graph
    key: int  # key of the gradient's storage
    reference: StorageWeakRef | None  # reference to the storage; None if the pass gave no gradient


class WatchedPasses:
    """Run backward passes under ``watch``."""

    def __init__(self, watch: OperatorWatch, parameters: Parameters) -> None:
        self._watch, self._parameters = watch, parameters
        self.current: PassRecord | None = None  # the running outermost pass
        self.inputs: list[InputGradient] = []  # gradients of leaves that are no parameters, pass by pass
        self._tapes: list[OperatorTape] = []

    def run(self, run: Callable[..., T], outputs: Sequence[object], *args: object, **kwargs: object) -> T:
        """Run a pass with PyTorch's own function ``run``; a pass inside another counts as part of it."""
        is_outer = self.current is None
        current = self.current = self.current or PassRecord()
        reach, seen = self._read_graph(
            outputs, args, current, is_outer=is_outer, accumulates=bool(kwargs["accumulate_grad"])
        )
        tape = self._watch.begin(reach)
        if self._tapes:
            self._tapes[-1].hide(_current_number())
        self._tapes.append(tape)
        handles = [
            node.register_hook(_Returned(node, tape.dropped, self._watch, self._parameters)) for node in reach.functions
        ]
        # Otherwise nodes and their saved tensors would live longer than the pass needs them.
        reach.functions.clear()
        reach.variables.clear()
        try:
            return run(outputs, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            self._tapes.remove(tape)
            self._watch.end(tape, current)
            if is_outer:
                self.current = None
                self._watch.ledger.passes.append(current)
                self._note_inputs(seen)

    def _read_graph(
        self,
        outputs: Sequence[object],
        args: tuple[object, ...],
        current: PassRecord,
        *,
        is_outer: bool,
        accumulates: bool,
    ) -> tuple[LeafReachability, list[tuple[int, Tensor]]]:
        """Return the graph, and its leaves that are no parameters, with their bits."""
        parameters, seen = self._parameters, list[tuple[int, Tensor]]()

        def bit_of(variable: Tensor) -> int:
            if isinstance(variable, nn.Parameter) and parameters.find(variable) is None and not is_flat(variable):
                parameters.add(f"parameter {len(parameters.histories)}", variable)
                self._watch.weights.add(variable, parameters.histories[variable].name)
            history = parameters.find(variable)
            if history is not None:
                return history.bit
            if isinstance(variable, nn.Parameter) or not (is_outer and accumulates):
                return UNKNOWN
            seen.append((parameters.new_bit(f"input {len(seen)}"), variable))
            return seen[-1][0]

        reach = walk([output for output in outputs if isinstance(output, Tensor)], bit_of)
        asked = args[3] if len(args) > 3 else ()
        bits = parameters.bits_of(asked if isinstance(asked, Sequence) and asked else reach.variables)
        if accumulates:
            current.collected |= bits
        else:
            parameters.captured |= bits
        return reach, seen

    def _note_inputs(self, seen: list[tuple[int, Tensor]]) -> None:
        for bit, variable in seen:
            grad = variable.grad
            if grad is None or not has_storage(grad):
                self.inputs.append(InputGradient(bit, 0, None))
                continue
            self.inputs.append(InputGradient(bit, key_of(grad), refer(grad)))
            self._watch.gradient_reads.unread.add(key_of(grad))


class _Returned:
    """Hook that records what a Function returns for inputs without a gradient, which autograd drops, for which
    parameters it returns none, and which rows end in it."""

    def __init__(
        self, node: Node, dropped: dict[int, StorageWeakRef], watch: OperatorWatch, parameters: Parameters
    ) -> None:
        self._wanted = [child is not None for child, _ in node.next_functions]
        self._leaves = [
            variable_of(child) if child is not None and child.name() == LEAF else None
            for child, _ in node.next_functions
        ]
        self._name = node.name().removesuffix("Backward")
        self._dropped, self._watch, self._parameters = dropped, watch, parameters

    def __call__(self, returned: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> None:
        ledger = self._watch.ledger
        for is_wanted, leaf, grad in zip(self._wanted, self._leaves, returned, strict=False):
            if not is_wanted and isinstance(grad, Tensor) and has_storage(grad):
                self._dropped[key_of(grad)] = refer(grad)
            if leaf is not None and grad is None and any(given is not None for given in incoming):
                ledger.withholding[self._parameters.bits_of([leaf])] = self._name
        if len(incoming) == 1 and incoming[0] is not None and not is_in_transform():
            # these operators do not belong to the training
            was_active, self._watch.is_active = self._watch.is_active, False
            for is_wanted, leaf, grad in zip(self._wanted, self._leaves, returned, strict=False):
                if is_wanted and leaf is None and grad is not None:
                    ledger.ended[self._name].add(*_count_ended(incoming[0], grad))
            self._watch.is_active = was_active


def _count_ended(incoming: Tensor, returned: Tensor) -> tuple[int, int]:
    """Return the number of rows whose gradient is gone, and of rows that had one; none if rows do not match."""
    if not (is_plain(incoming) and is_plain(returned)):
        return 0, 0
    if incoming.ndim < 2 or incoming.shape[:-1] != returned.shape[:-1]:
        return 0, 0
    had, has = incoming.ne(0).any(dim=-1), returned.ne(0).any(dim=-1)
    return int((had & ~has).sum()), int(had.sum())


def _current_number() -> int:
    node = running_node()
    return 0 if node is None else sequence_number_of(node)


def is_sharded(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to a module."""
    return has_fsdp_state(module)


def find_gathered(modules: Iterable[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of a gathered parameter, which the graph holds, and the optimizer's sharded one."""
    for module in modules:
        if not is_sharded(module):
            continue
        # FSDP2 has no public access to its parameter groups; a test covers this. torch 2.11 has a single group.
        state = fsdp_state(module)
        one = getattr(state, "_fsdp_param_group", None)
        for group in getattr(state, "_fsdp_param_groups", [one] if one is not None else []):
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    yield whole, parameter.sharded_param


def is_flat(parameter: Tensor) -> bool:
    """Return whether FSDP1 flattened others into this parameter: only FSDP itself holds it."""
    return bool(getattr(parameter, "_is_flat_param", False))
