"""Count, in a dispatch mode, every operator of this thread's forward and backward passes, and its purpose.

Shape letters: N rows (= B*T), B examples, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebp_audit.auditor.internals import FOREACH_NORM, is_mutable
from sparsebp_audit.auditor.ledger import AuditLedger, PassRecord
from sparsebp_audit.auditor.module import AnyModules
from sparsebp_audit.auditor.operation import AGAIN, DGRAD, WGRAD, Operation, OperatorTape
from sparsebp_audit.auditor.reach import UNKNOWN, LeafReachability
from sparsebp_audit.auditor.saved import SavedTensors
from sparsebp_audit.auditor.storage import Weights, is_plain, key_of, refer, tensors_in
from sparsebp_cli.backward.observe.flops import find_formula
from sparsebp_cli.backward.observe.internals import current_pass, running_node, sequence_number_of
from sparsebp_cli.backward.observe.module_trace import is_in_backward

_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm, _ATEN.addmm, _ATEN.addmm_)
_SUMS = (_ATEN.addmm, _ATEN.addmm_, _ATEN.baddbmm, _ATEN.baddbmm_, _ATEN.addbmm, _ATEN.addbmm_, _ATEN.addmv)


def is_product(operator: OpOverload) -> bool:
    """Return whether an operator, as ``__torch_dispatch__`` receives it, is a matrix product, with or without a sum."""
    return operator.overloadpacket in _PRODUCTS


def factors_of(operator: OpOverload, args: tuple[object, ...]) -> list[Tensor]:
    """Return the tensors that an operator multiplies, without a tensor that is added to the product."""
    tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
    return tensors[1:] if operator.overloadpacket in _SUMS else tensors


def find_zero(left: Tensor, right: Tensor, kind: str, *, weight_is_left: bool) -> Tensor | None:
    """Return which rows contribute nothing to a product because they are exactly zero; None if the factors cannot be
    read. In ``dgrad`` a gradient row gives one row of the result; ``weight_is_left``: the gradient is the second
    factor, transposed. In ``wgrad`` it gives one term of the sum, together with a row of the saved input; the term is
    zero if either is."""
    if not (is_plain(left) and is_plain(right)):
        return None
    if kind == DGRAD:
        return (right == 0).all(dim=0) if weight_is_left else (left == 0).all(dim=1)
    return (left == 0).all(dim=0) | (right == 0).all(dim=1)


_CLEARING = (_ATEN.zero_, _ATEN._foreach_zero_, _ATEN.fill_)
# Clipping measures and scales the gradients of all parameters, even of parameters that are never updated.
_MEASURING = (
    FOREACH_NORM,
    _ATEN._foreach_mul_,
    _ATEN.linalg_vector_norm,
    _ATEN.norm,
    _ATEN.mul_,
)


class GradientReads:
    """Gradients of inputs and parameters, and which of them were read."""

    read_elsewhere: int
    measured_elsewhere: int

    def __init__(self, ledger: AuditLedger) -> None:
        self._ledger = ledger
        self.unread: set[int] = set()  # storages of the gradients of inputs
        self.read: set[int] = set()  # of them, the ones that were read
        # Unread gradients of parameters by storage: the parameter's bit, and a reference that keeps the key valid.
        self.gradients: dict[int, tuple[int, StorageWeakRef]] = {}
        # bits of parameters whose gradient was measured by its norm or scaled, outside of optimizers
        self.measured_elsewhere = 0
        self.read_elsewhere = 0  # bits of parameters whose gradient was read outside of optimizers, beyond its norm

    def record(self, operator: OpOverload, inputs: list[Tensor], outputs: list[Tensor], *, is_updating: bool) -> None:
        """Record the reads of an operator outside of a backward pass; ``is_updating``: an optimizer runs it."""
        if not (self.unread or self.gradients):
            return
        known = {key_of(tensor) for tensor in inputs}
        self.read |= self.unread & known
        touched = known & self.gradients.keys()
        if not touched or _only_clears_or_views(operator, known, outputs):
            return
        bits = sum(self.gradients[key][0] for key in touched)
        self._ledger.use(bits)
        self.measured_elsewhere |= 0 if is_updating else bits
        if not is_updating and operator.overloadpacket not in _MEASURING:
            self.read_elsewhere |= bits
            for key in touched:
                del self.gradients[key]


def _only_clears_or_views(operator: OpOverload, known: set[int], outputs: list[Tensor]) -> bool:
    if is_mutable(operator):
        return operator.overloadpacket in _CLEARING
    return bool(outputs) and all(key_of(tensor) in known for tensor in outputs)


_LOSSES = (_ATEN.nll_loss_forward, _ATEN.nll_loss2d_forward)


class OperatorWatch(TorchDispatchMode):
    """Fill a ledger, and run every operator unchanged.

    ``shape_of`` and ``bit_of`` return the shape and the bit of a parameter by its name.
    """

    ledger: AuditLedger
    modules: AnyModules
    weights: Weights
    saved: SavedTensors
    gradient_reads: GradientReads

    def __init__(
        self,
        ledger: AuditLedger,
        modules: AnyModules,
        weights: Weights,
        saved: SavedTensors,
        shape_of: Callable[[str], tuple[int, ...]],
        bit_of: Callable[[str], int],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self.modules, self.weights, self.saved = ledger, modules, weights, saved
        self._shape_of, self._bit_of = shape_of, bit_of
        self.is_active = True
        self.is_graded = True  # whether the outermost running module was called with gradients enabled
        self.is_updating = False  # inside an optimizer's step
        self.used_here: dict[str, set[str]] = {}  # parameters that a module's forward reads
        self.padding_N: Tensor | None = None
        self.gradient_reads = GradientReads(ledger)
        self.find_sharded: Callable[[], None] | None = None  # set if a model is sharded
        self._waiting: list[tuple[LeafReachability, OperatorTape]] = []
        self._running: dict[int | None, tuple[LeafReachability, OperatorTape]] = {}

    def begin(self, reach: LeafReachability) -> OperatorTape:
        """Prepare for a backward pass; return the tape that records its operators."""
        tape = OperatorTape()
        self._waiting.append((reach, tape))
        return tape

    def end(self, tape: OperatorTape, into: PassRecord) -> None:
        """Count a finished backward pass as part of the outermost pass ``into``."""
        self._waiting = [pair for pair in self._waiting if pair[1] is not tape]
        self._running = {number: pair for number, pair in self._running.items() if pair[1] is not tape}
        tape.mark_hidden()
        dead = tape.find_dead()
        for place, operation in enumerate(tape.operations):
            self.ledger.visited.add(operation.number)
            padding, zero = operation.zero_shares(self.padding_N)
            if operation.flops:
                into.add(operation, is_dead=place in dead, padding=padding, zero=zero)
            for kept in operation.kept:
                kept.num_reads += 1
                if place not in dead:
                    kept.need |= operation.leaves
                    share = zero if operation.kind == WGRAD and padding + zero < 1.0 else 0.0
                    kept.zero_share = share if kept.zero_share is None else min(share, kept.zero_share)
        self.weights.forget()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.is_active and isinstance(func, OpOverload) and func is not torch.ops.prim.device.default:
            inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(result))
            if all(tensor.device.type != "meta" for tensor in outputs):
                self._record(func, args, kwargs, result, inputs, outputs)
        return result

    def _record(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        result: object,
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        if self.find_sharded is not None:
            for tensor in inputs:
                if isinstance(tensor, nn.Parameter) and self.weights.name_of(tensor) is None:
                    self.find_sharded()
        formula = find_formula(func)
        name = self.weights.follow(inputs, outputs)
        if not is_in_backward():
            flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
            self._record_forward(func, args, flops, name, inputs, outputs)
            return
        known = {key_of(tensor) for tensor in inputs}
        writes = [tensor for tensor in outputs if key_of(tensor) not in known]
        if is_mutable(func):
            writes = outputs or inputs
        elif outputs and not writes:
            return  # a view
        self.gradient_reads.read |= known & self.gradient_reads.unread
        pair = self._find_pass()
        if pair is None:
            return
        reach, tape = pair
        tape.references += [refer(tensor) for tensor in writes]
        node = running_node()
        number = sequence_number_of(node) if node is not None else -1
        operation = Operation(
            reads=tuple(known),
            writes=tuple(key_of(tensor) for tensor in writes),
            module=self.modules.current,
            leaves=reach.leaves.get(number, UNKNOWN),
            kept=tuple(kept for key in known if (kept := self.saved.by_key.get(key)) is not None),
            number=number,
        )
        tape.operations.append(operation)
        if formula is not None:
            tape.operations += self._count(operation, reach, func, formula, args, kwargs, result)

    def _find_pass(self) -> tuple[LeafReachability, OperatorTape] | None:
        """Return the innermost pass of this thread; its id is known only once its first operator runs."""
        this = current_pass()
        if this not in self._running:
            known = [pair[1] for pair in self._running.values()]
            free = [pair for pair in self._waiting if all(pair[1] is not tape for tape in known)]
            if not free:
                return None
            self._running[this] = free[-1]
        return self._running[this]

    def _count(
        self,
        operation: Operation,
        reach: LeafReachability,
        func: OpOverload,
        formula: Callable[..., int],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        result: object,
    ) -> list[Operation]:
        """Count an operator of a backward pass and find the gradient that it computes; return operations split off from
        it."""
        if func.overloadpacket is _ATEN.convolution_backward:
            return self._count_convolution(operation, reach, formula, args, kwargs, result)
        operation.flops = int(formula(*args, **kwargs, out_val=result))
        if self.modules.is_running:
            operation.kind = AGAIN
            return []
        if func.overloadpacket is _ATEN.mkldnn_rnn_layer_backward:
            return []  # one operator computes the gradients of the input and several weights
        factors = factors_of(func, args)
        weight = next((name for tensor in factors if (name := self.weights.name_of(tensor)) is not None), None)
        if weight is not None:
            operation.kind, operation.parameter = DGRAD, weight
            operation.leaves = reach.behind(operation.number, self._own_bits(operation.module))
        elif isinstance(result, Tensor):
            found = self._find_parameter(operation.module, tuple(result.shape))
            if found is None:
                return []
            operation.kind, operation.parameter, operation.leaves = WGRAD, found, self._bit_of(found)
        if operation.kind in (DGRAD, WGRAD) and is_product(func):
            left, right = factors
            is_left = weight is not None and self.weights.name_of(left) is not None
            zero_N = find_zero(left, right, operation.kind, weight_is_left=is_left)
            if zero_N is not None:
                operation.zero_N, operation.num_rows = zero_N, zero_N.numel()
        return []

    def _count_convolution(
        self,
        operation: Operation,
        reach: LeafReachability,
        formula: Callable[..., int],
        args: tuple[Any, ...],
        kwargs: dict[str, object],
        result: object,
    ) -> list[Operation]:
        """Count the two gradients that one operator computes as two operations."""
        *rest, mask = args
        weight, parts = self.weights.name_of(args[2]), [operation]
        for place, kind in enumerate((DGRAD, WGRAD)):
            if not mask[place]:
                continue
            part = parts[-1] if len(parts) == 1 and not operation.flops else replace(operation)
            if part is not operation:
                parts.append(part)
            part.flops = int(formula(*rest, [at == place for at in range(3)], **kwargs, out_val=result))
            part.kind = AGAIN if self.modules.is_running else kind
            if weight is not None:
                bit = self._bit_of(weight)
                part.parameter = weight
                part.leaves = bit if kind == WGRAD else reach.behind(operation.number, self._own_bits(operation.module))
        return parts[1:]

    def _own_bits(self, module: str) -> int:
        bits = 0
        for name in self.used_here.get(module, ()):
            bits |= self._bit_of(name)
        return bits

    def _find_parameter(self, module: str, shape: tuple[int, ...]) -> str | None:
        """Return the parameter of a module whose gradient a product is, by its shape."""
        for name in sorted(self.used_here.get(module, ())):
            own = self._shape_of(name)
            if len(own) > 1 and shape in (own, own[:-2] + own[:-3:-1]):
                return name
        return None

    def _record_forward(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        flops: int,
        name: str | None,
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        self.gradient_reads.record(func, inputs, outputs, is_updating=self.is_updating)
        if self.is_updating:
            return
        module = self.modules.current
        if name is not None:
            used = self.used_here.setdefault(module, set())
            used |= {found for tensor in inputs if (found := self.weights.name_of(tensor)) is not None}
        # A Python Function or checkpointing may have disabled gradients temporarily inside a module.
        if not (self.is_graded if self.modules.is_running else torch.is_grad_enabled()):
            self.ledger.ungraded[module] += flops
            return
        self.ledger.forward[module] += flops
        if flops and name is not None and outputs and is_product(func):
            self.ledger.widths[module] = outputs[0].shape[-1]
            if self.padding_N is not None and outputs[0].shape[:-1].numel() == self.padding_N.numel():
                self.ledger.products[module] += flops
        if func.overloadpacket in _LOSSES:
            self._record_loss(*args[:5])

    def _record_loss(
        self, logits_NV: Tensor, target_N: Tensor, _weight: object, _reduction: int, ignore_index: int
    ) -> None:
        self.ledger.labels += target_N.numel()
        self.ledger.ignored += int((target_N == ignore_index).sum())
        width = logits_NV.shape[1] if logits_NV.ndim > 1 else logits_NV.shape[0]
        head = next((name for name in reversed(self.ledger.widths) if self.ledger.widths[name] == width), None)
        if head is not None:
            self.ledger.heads[head] = width
