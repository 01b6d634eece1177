"""The optimizer's step inside the backward: a parameter changes when its gradient is complete, and the gradient goes.

After Lv, Yang, Liu, Gao, Guo, Qiu: Full Parameter Fine-tuning for Large Language Models with Limited Resources
(LOMO), 2023, https://arxiv.org/abs/2306.09782. We differ: any optimizer of PyTorch's kind takes part, a hook looks at
its own parameter alone (LOMO's looks at all of them), and what is shared is updated once, by the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sparsebp_cli.backward.core.report import EagerReport
from sparsebp_cli.backward.execution.eager.clipping import Clipping, norm_of, total_of
from sparsebp_cli.backward.execution.eager.completeness import GradientCompleteness
from sparsebp_cli.backward.execution.eager.pass_state import EagerPassState, preserve_grads
from sparsebp_cli.backward.execution.eager.per_parameter_step import PerParameterStep
from sparsebp_cli.backward.execution.grad_store import GradStore
from sparsebp_cli.errors import DivergedError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.policy import Step


class EagerUpdate:
    """Updates parameters while a backward runs; see :class:`~sparsebp_cli.backward.core.extension.EngineExtension`.

    Args:
        model: With the parameters; the optimizer may have more, which are updated in the same way.
        optimizer: Whose update of one parameter looks at no other.
        clipping: What gradients are clipped to.

    Raises:
        UnsupportedError: Another engine updates one of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clipping: Clipping) -> None:
        self.clipping = clipping
        self._single = PerParameterStep(optimizer)
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._arrivals = GradientCompleteness(model, self._single.parameters)
        self._hooks: dict[Tensor, Any] = {}
        self._pass: EagerPassState | None = None
        self._total: Tensor | None = None  # norm of all gradients of the last step
        self._has_updated = False  # since the optimizer's last own step
        self._broken = ""  # what became of a pass since then that did not come to its end
        self._settling: Any = None
        self._lock = RLock()  # a backward has a thread for each device of the model
        self.report: EagerReport | None = None
        for parameter in self._single.parameters:
            others = (parameter._post_accumulate_grad_hooks or {}).values()  # noqa: SLF001 - no public name
            if any(isinstance(getattr(other, "__self__", None), EagerUpdate) for other in others):
                taken = self._name(parameter)
                raise UnsupportedError(f"update='eager': another engine updates {taken}: call its detach() first")

    def install(self, engine: EngineView) -> None:
        self._engine = engine
        # The optimizer's own step finds no gradients; what it counts in its groups is then as after one step.
        self._settling = self._single.optimizer.register_step_post_hook(lambda *_: self._single.settle())
        self._hook_parameters()
        engine.notes["eager"] = f"update: eager: parameters change inside the backward; {self.clipping.tell()}"

    def remove(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self._settling.remove()
        self._arrivals.remove()

    def enable(self, enabled: bool) -> None:
        """Do nothing: outside of :meth:`run_pass` a backward leaves its gradients where they are."""

    def start_step(self, step: Step) -> None:  # noqa: ARG002 - all steps are alike
        self._has_updated, self._broken = False, ""

    @property
    def gradient_norm(self) -> float:
        """2-norm of all gradients of the last pass that updated, before they were clipped; 0 before the first."""
        return 0.0 if self.report is None else self.report.gradient_norm

    @property
    def previous_norm(self) -> float | None:
        """Norm of all gradients of the last step; None before the first."""
        return None if self._total is None else float(self._total)

    @previous_norm.setter
    def previous_norm(self, value: float | None) -> None:
        self._total = None if value is None else torch.tensor(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the norm of the last step's gradients; None before the first."""
        return {"gradient_norm": self.previous_norm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.previous_norm = state["gradient_norm"]

    def run_pass(
        self,
        loss: Tensor,
        differentiate: Callable[..., None],
        *,
        backward: Callable[..., object] | None = None,
        updates: bool,
    ) -> None:
        """Run a backward pass.

        Args:
            loss: What is differentiated.
            differentiate: Runs the pass, with the arguments of ``loss.backward``.
            backward: What the user runs a pass with; None: ``torch.Tensor.backward``.
            updates: Whether parameters change in it; else their gradients are left where they are.

        Raises:
            UsageError: Parameters were updated in this step before, maybe in a pass that broke off; or one got a
                gradient after its update.
            UnsupportedError: ``backward`` scales the loss, or takes the gradients away.
            DivergedError: A gradient is not finite.
        """
        refuse_scaling(backward)
        if not updates:
            self._arrivals.pass_over()
            differentiate()
            return
        if self._broken:
            raise UsageError(f"{self._broken}: go back to a checkpoint, or call optimizer.step() to go on from there")
        if self._has_updated:
            raise UsageError(
                "update='eager' has updated the parameters in this step already: call optimizer.step() after each "
                "engine.backward(loss), or engine.backward(loss, is_last=False) for all but its last micro-batch"
            )
        self._hook_parameters()
        self._arrivals.survey(loss)
        is_exact, keeps = self.clipping.by == "exact", bool(self._held())
        if keeps:
            self._engine.notes["eager accumulation"] = (
                "update: eager: gradients of earlier micro-batches are kept for the last one's pass: no memory is saved"
            )
        # Gradients of earlier micro-batches are there to the end anyway: then one pass is enough.
        looks_first = is_exact and not keeps
        if looks_first:
            under_way = EagerPassState(lambda parameter, _: _free(parameter), updates=False)
            spared = preserve_grads({*self._arrivals.leaves, *self._names} - set(self._single.parameters))
            # The same step and draw: policies decide in both passes alike.
            with self._engine.probing(draw=self._engine.now().draw), self._passing(under_way), spared:
                differentiate(retain_graph=True)
                self._finish_all(under_way)
            self._total = under_way.total(self._single.parameters)
            self._check_total(self._total, num_updated=0)
        self._single.start()
        at_once = self._arrivals.bytes_at_once
        under_way = EagerPassState(self._update, early=looks_first or not is_exact, bytes_most=at_once)
        with self._noting(under_way), self._passing(under_way):
            differentiate()
            num_early, late = len(under_way.done), self._held()
            if not under_way.early and late:
                self._total = total_of([norm_of(_gradient(p)) for p in late])
                self._check_total(self._total, num_updated=0)
            self._finish_all(under_way)
            self._total = under_way.total(self._single.parameters)
            self._check_total(self._total, num_updated=len(under_way.done))
        self._has_updated = True
        waited = tuple(self._name(p) for p in late)
        self.report = EagerReport(num_early, waited, under_way.bytes_most, float(self._total))
        self._tell(waited, all_wait=not under_way.early)

    def _tell(self, waited: Sequence[str], *, all_wait: bool) -> None:
        """Note what the user may not expect; the first pass may know less than those that follow."""
        if all_wait:
            why = "clipping by the exact norm of accumulated gradients needs all of them"
            self._engine.notes["eager wait"] = f"update: eager: parameters are updated after the backward: {why}"
        elif waited and self._engine.now().index > 0:
            self._engine.notes["eager wait"] = (
                f"update: eager: {len(waited)} of {len(self._hooks)} parameters wait for the end of the backward, such "
                f"as {waited[0]}: more of their gradient could have arrived until then"
            )

    def _update(self, parameter: Tensor, norm: Tensor) -> None:
        try:
            self.clipping.clip(parameter, norm, self._total)
            self._single.update(parameter)
        finally:
            _free(parameter)  # also where it breaks off in between: nothing is applied twice

    @contextmanager
    def _passing(self, under_way: EagerPassState) -> Iterator[None]:
        self._pass = under_way
        for parameter in self._held():
            under_way.hold(parameter)
        # Runs where checkpointing runs forwards again inside the backward.
        watch = register_module_forward_pre_hook(self._refuse_changed)
        try:
            yield
        finally:
            self._pass = None
            watch.remove()

    @contextmanager
    def _noting(self, under_way: EagerPassState) -> Iterator[None]:
        """If a pass breaks off, say how far it came: memory that ran out, a hook of the user's, Ctrl-C."""
        try:
            yield
        except BaseException as error:
            if under_way.done:
                done = f"{len(under_way.done)} of {len(self._hooks)} parameters"
                self._broken = f"a backward of this step broke off after {done} had been updated"
                error.add_note(f"update='eager': {self._broken}")
            raise

    def _hook_parameters(self) -> None:
        """A parameter that is frozen takes no hook; it may be thawed later."""
        for parameter in self._single.parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                hook: Any = parameter.register_post_accumulate_grad_hook
                self._hooks[parameter] = hook(self._arrive)

    def _arrive(self, parameter: Tensor) -> None:
        with self._lock:
            self._take(parameter)

    def _take(self, parameter: Tensor) -> None:
        under_way = self._pass
        if under_way is None or parameter.grad is None:  # a router may have cut every way to it
            return
        if parameter in under_way.done:
            raise UsageError(
                f"{self._name(parameter)} got another gradient after its update: it is used where neither the graph "
                "nor the forward of the model shows it; use update='deferred'"
            )
        if parameter in under_way.waiting:
            return
        under_way.hold(parameter)
        if under_way.early and self._arrivals.is_complete(parameter):
            self._finish(under_way, parameter)
        else:
            under_way.waiting[parameter] = None

    def _refuse_changed(self, module: nn.Module, _: Any) -> None:
        """What a module computes again with weights that have changed is not what it computed before.

        That happens where no gradient comes back from a use: else the update would have waited for it.
        """
        under_way = self._pass
        if under_way is None or not under_way.updates:
            return
        for parameter in module.parameters(recurse=False):
            if parameter in under_way.done:
                raise UsageError(
                    f"{self._name(parameter)} is needed again after its update: a use from which no gradient comes "
                    "back is computed once more inside the backward (checkpointing does so); use update='deferred'"
                )

    def _finish(self, under_way: EagerPassState, parameter: Tensor) -> None:
        norm = norm_of(_gradient(parameter))
        if norm.device.type == "cpu" and not math.isfinite(norm):  # elsewhere one would have to wait for each
            self._refuse(norm, self._name(parameter), len(under_way.done) if under_way.updates else 0)
        under_way.norms[parameter] = norm
        under_way.done.add(parameter)  # from here on it may have changed
        under_way.finishes(parameter, norm)
        under_way.bytes_now -= under_way.held.pop(parameter)

    def _finish_all(self, under_way: EagerPassState) -> None:
        """Finish what waited, and what earlier micro-batches alone have reached, in the optimizer's order."""
        for parameter in self._held():
            self._finish(under_way, parameter)

    def _check_total(self, total: Tensor, num_updated: int) -> None:
        if not math.isfinite(total):
            self._refuse(total, "the sum", num_updated)

    def _refuse(self, norm: Tensor, where: str, num_updated: int) -> None:
        done = f"{num_updated} of {len(self._hooks)} parameters were updated" if num_updated else "nothing was updated"
        raise DivergedError(
            f"the gradient norm is {float(norm)} at step {self._engine.now().index + 1}, first in {where}; {done}"
        )

    def _held(self) -> list[Tensor]:
        return [p for p in self._single.parameters if p.grad is not None]

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(parameter, "a parameter of the optimizer that is not in the model")


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _free(parameter: Tensor) -> None:
    parameter.grad = None


def refuse_scaling(backward: Callable[..., object] | None) -> None:
    """Refuse what multiplies the loss, and would divide gradients by as much when they are no longer there.

    Also what takes the gradients elsewhere, so that none would arrive at a parameter.

    Args:
        backward: What runs a pass, such as ``accelerator.backward``.

    Raises:
        UnsupportedError: It has a scaler, or is a store's.
    """
    owner = getattr(backward, "__self__", None)
    if isinstance(owner, GradStore):
        raise UnsupportedError(
            "update='eager' with the backward of a GradStore: the store takes the gradients that parameters would be "
            "updated by; use update='deferred'"
        )
    if getattr(owner, "scaler", None) is not None:
        raise UnsupportedError(
            "update='eager' with a GradScaler is not built: gradients would be applied before they are scaled back; "
            "use bfloat16, or update='deferred'"
        )
