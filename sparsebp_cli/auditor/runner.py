"""Runs a backward pass of PyTorch with its graph and operators recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from sparsebp_cli.auditor.ledger import PassRecord
from sparsebp_cli.auditor.operation import OperatorTape
from sparsebp_cli.auditor.parameter import Parameters
from sparsebp_cli.auditor.reach import UNKNOWN, LeafReachability, walk
from sparsebp_cli.auditor.storage import has_storage, key_of, refer
from sparsebp_cli.auditor.watch import OperatorWatch
from sparsebp_cli.backward.observe.internals import fsdp_state, has_fsdp_state, running_node, sequence_number_of

T = TypeVar("T")


@dataclass(frozen=True)
class InputGradient:
    """The gradient of a leaf that is no parameter, after one pass."""

    bit: int  # of the leaf, by its order in the graph
    key: int  # of the gradient's storage
    reference: StorageWeakRef | None  # to the storage; None if the pass gave no gradient


class PassRunner:
    """Runs backward passes under ``watch``."""

    def __init__(self, watch: OperatorWatch, parameters: Parameters) -> None:
        self._watch, self._parameters = watch, parameters
        self.current: PassRecord | None = None  # the running outermost pass
        self.inputs: list[InputGradient] = []  # gradients of leaves that are no parameters, pass by pass
        self._tapes: list[OperatorTape] = []

    def run(self, run: Callable[..., T], outputs: Sequence[object], *args: object, **kwargs: object) -> T:
        """Run a pass by PyTorch's own function ``run``; a pass inside another counts as part of it."""
        is_outer = self.current is None
        current = self.current = self.current or PassRecord()
        reach, seen = self._read_graph(
            outputs, args, current, is_outer=is_outer, accumulates=bool(kwargs["accumulate_grad"])
        )
        tape = self._watch.begin(reach)
        if self._tapes:
            self._tapes[-1].hide(_current_number())
        self._tapes.append(tape)
        handles = [node.register_hook(_Dropped(node, tape.dropped)) for node in reach.functions]
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
        """Return the graph, and its leaves that are no parameters with their bits."""
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


class _Dropped:
    """Hook that records results of a Function for inputs that need no gradient, which autograd drops."""

    def __init__(self, node: Node, dropped: dict[int, StorageWeakRef]) -> None:
        self._wanted = [child is not None for child, _ in node.next_functions]
        self._dropped = dropped

    def __call__(self, returned: Sequence[Tensor | None], _incoming: object) -> None:
        for is_wanted, grad in zip(self._wanted, returned, strict=False):
            if not is_wanted and isinstance(grad, Tensor) and has_storage(grad):
                self._dropped[key_of(grad)] = refer(grad)


def _current_number() -> int:
    node = running_node()
    return 0 if node is None else sequence_number_of(node)


def is_sharded(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to a module."""
    return has_fsdp_state(module)


def find_gathered(modules: Iterable[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of a gathered parameter, which the graph holds, and the sharded one, which the optimizer holds."""
    for module in modules:
        if not is_sharded(module):
            continue
        # FSDP2 has no public access to its parameter groups; covered by a test. torch 2.11 has a single group.
        state = fsdp_state(module)
        one = getattr(state, "_fsdp_param_group", None)
        for group in getattr(state, "_fsdp_param_groups", [one] if one is not None else []):
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    yield whole, parameter.sharded_param


def is_flat(parameter: Tensor) -> bool:
    """Return whether FSDP1 made a parameter by flattening others: only FSDP itself holds it."""
    return bool(getattr(parameter, "_is_flat_param", False))
