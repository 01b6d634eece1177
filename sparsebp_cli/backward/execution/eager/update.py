"""Runs the optimizer inside the backward: it updates each parameter when its gradient is complete, and frees it.

After Lv, Yang, Liu, Gao, Guo, Qiu: Full Parameter Fine-tuning for Large Language Models with Limited Resources
(LOMO), 2023, https://arxiv.org/abs/2306.09782. We differ: any separable PyTorch optimizer works, each hook handles its
own parameter (LOMO's hooks scan all), and a shared parameter is updated once, with the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from threading import RLock
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from sparsebp_cli.backward.core.extension import PassRunner
from sparsebp_cli.backward.core.loss_scale import refuse_scale
from sparsebp_cli.backward.core.report import EagerReport
from sparsebp_cli.backward.execution.eager.clipping import Clipping, norm_of, total_of
from sparsebp_cli.backward.execution.eager.completeness import GradientCompleteness
from sparsebp_cli.backward.execution.eager.pass_state import EagerPassState, preserve_grads
from sparsebp_cli.backward.execution.eager.per_parameter_step import PerParameterStep
from sparsebp_cli.backward.execution.eager.separable import refuse_inseparable
from sparsebp_cli.backward.execution.grad_store import GradStore
from sparsebp_cli.backward.observe.internals import hooks_after_accumulation
from sparsebp_cli.backward.observe.update_flops import UpdateFlops
from sparsebp_cli.errors import DivergedError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.policy import Step


class EagerUpdate(PassRunner):
    """Updates parameters during a backward.

    Parameters of the optimizer that are not in the model are updated in the same way. Raises
    :class:`UnsupportedError` if another engine already updates one of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clipping: Clipping) -> None:
        self.clipping = clipping
        self._stepper = PerParameterStep(optimizer)
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._completeness = GradientCompleteness(model, self._stepper.parameters)
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._pass: EagerPassState | None = None
        self._total: Tensor | None = None  # norm of all gradients of the last step
        self._has_updated = False  # whether a pass has updated parameters since optimizer.step()
        self._interrupted = ""  # describes an interrupted pass since optimizer.step()
        self._write_back_hook: RemovableHandle | None = None
        self._lock = RLock()  # autograd runs hooks in one thread per device
        self.report: EagerReport | None = None
        self.counting: UpdateFlops | None = None  # counts the updates of the coming pass
        for parameter in self._stepper.parameters:
            others = hooks_after_accumulation(parameter)
            if any(isinstance(getattr(other, "__self__", None), EagerUpdate) for other in others):
                taken = self._name(parameter)
                raise UnsupportedError(f"update='eager': first detach the other engine, which updates {taken}")

    def install(self, engine: EngineView) -> None:
        self._engine = engine
        # optimizer.step() itself finds no gradients, so write back counters in its groups after it.
        self._write_back_hook = self._stepper.optimizer.register_step_post_hook(lambda *_: self._stepper.write_back())
        self._hook_parameters()
        engine.notes["eager"] = f"update: eager: parameters change inside the backward; {self.clipping.describe()}"

    def remove(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        if self._write_back_hook is not None:
            self._write_back_hook.remove()
        self._completeness.remove()

    @override
    def start_step(self, step: Step) -> None:
        self._has_updated, self._interrupted = False, ""

    @property
    @override
    def gradient_norm(self) -> float:
        """2-norm of all gradients of the last updating pass, before clipping; 0 before the first."""
        return 0.0 if self.report is None else self.report.gradient_norm

    @property
    def previous_norm(self) -> float | None:
        """Norm of all gradients of the last step; None before the first."""
        return None if self._total is None else float(self._total)

    @previous_norm.setter
    def previous_norm(self, value: float | None) -> None:
        self._total = None if value is None else torch.tensor(value)

    @override
    def state_dict(self) -> dict[str, object]:
        """Return the norm of the last step's gradients; None before the first."""
        return {"gradient_norm": self.previous_norm}

    @override
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the norm from a state."""
        norm = state["gradient_norm"]
        assert norm is None or isinstance(norm, float | int)
        self.previous_norm = norm

    @override
    def run_pass(
        self,
        loss: Tensor,
        differentiate: Callable[..., None],
        *,
        backward: Callable[..., object] | None = None,
        updates: bool,
    ) -> None:
        """Run a backward pass.

        Raises :class:`UsageError` if this step has already updated parameters, perhaps in an interrupted pass, or a
        parameter got a gradient after its update; :class:`UnsupportedError` if ``backward`` scales the loss or removes
        gradients; :class:`DivergedError` if a gradient is not finite.
        """
        refuse_scaling(backward)
        if not updates:
            self._completeness.skip()
            differentiate()
            return
        if self._interrupted:
            raise UsageError(f"{self._interrupted}: load a checkpoint, or call optimizer.step() to keep these updates")
        if self._has_updated:
            raise UsageError(
                "update='eager' has already updated the parameters in this step: call optimizer.step() after "
                "each engine.backward(loss), or pass is_last=False for every micro-batch but the last"
            )
        self._hook_parameters()
        self._completeness.read_graph(loss)
        is_exact, keeps = self.clipping.by == "exact", bool(self._held())
        if keeps:
            self._engine.notes["eager accumulation"] = (
                "update: eager saves no memory here: earlier micro-batches' gradients stay until the last backward"
            )
        # Accumulated gradients exist until the end anyway, so their total norm needs no extra pass.
        measures_first = is_exact and not keeps
        if measures_first:
            state = EagerPassState(lambda parameter, _: _free(parameter), updates=False)
            spared = preserve_grads({*self._completeness.leaves, *self._names} - set(self._stepper.parameters))
            # With the same step and draw, policies make the same decisions in both passes.
            with self._engine.probing(draw=self._engine.now().draw), self._running(state), spared:
                differentiate(retain_graph=True)
                self._finish_all(state)
            self._total = state.total(self._stepper.parameters)
            self._check_total(self._total, num_updated=0)
        self._stepper.start()
        at_once = self._completeness.bytes_at_once
        state = EagerPassState(self._update, early=measures_first or not is_exact, bytes_most=at_once)
        with self._recording_interruption(state), self._running(state):
            differentiate()
            num_early, late = len(state.done), self._held()
            if not state.early and late:
                self._total = total_of([norm_of(_gradient(p)) for p in late])
                self._check_total(self._total, num_updated=0)
            self._finish_all(state)
            self._total = state.total(self._stepper.parameters)
            self._check_total(self._total, num_updated=len(state.done))
        self._has_updated, self.counting = True, None
        waited = tuple(self._name(p) for p in late)
        self.report = EagerReport(num_early, waited, state.bytes_most, float(self._total))
        self._note_late_updates(waited, all_wait=not state.early)

    def _note_late_updates(self, waited: Sequence[str], *, all_wait: bool) -> None:
        """Add report notes on late updates, except in the first pass, which may prove fewer gradients complete."""
        if all_wait:
            why = "clipping needs the norm of all accumulated gradients"
            self._engine.notes["eager wait"] = f"update: eager: parameters are updated after the backward: {why}"
        elif waited and self._engine.now().index > 0:
            self._engine.notes["eager wait"] = (
                f"update: eager: {len(waited)} of {len(self._hooks)} parameters, such as {waited[0]}, are updated "
                "only at the end of the backward, because it can add to their gradients until then"
            )

    def _update(self, parameter: Tensor, norm: Tensor) -> None:
        try:
            with self.counting or nullcontext():
                self.clipping.clip(parameter, norm, self._total)
                self._stepper.update(parameter)
        finally:
            _free(parameter)  # even after an error, so that no gradient is applied twice

    @contextmanager
    def _running(self, state: EagerPassState) -> Iterator[None]:
        self._pass = state
        for parameter in self._held():
            state.hold(parameter)
        # This hook runs when checkpointing reruns a forward inside the backward.
        watch = register_module_forward_pre_hook(self._refuse_changed)
        try:
            yield
        finally:
            self._pass = None
            watch.remove()

    @contextmanager
    def _recording_interruption(self, state: EagerPassState) -> Iterator[None]:
        """Record the progress of a pass if lack of memory, a user's hook or Ctrl-C interrupts it."""
        try:
            yield
        except BaseException as error:
            if state.done:
                done = f"{len(state.done)} of {len(self._hooks)} parameters"
                self._interrupted = f"a backward of this step broke off after {done} had been updated"
                error.add_note(f"update='eager': {self._interrupted}")
            raise

    def _hook_parameters(self) -> None:
        """Hook the trainable parameters. Called before each pass, since a frozen parameter may be unfrozen later."""
        for parameter in self._stepper.parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._hooks[parameter] = handle

    def _on_gradient(self, parameter: Tensor) -> None:
        with self._lock:
            self._handle(parameter)

    def _handle(self, parameter: Tensor) -> None:
        state = self._pass
        if state is None or parameter.grad is None:  # a router may have cut every path to it
            return
        if parameter in state.done:
            raise UsageError(
                f"{self._name(parameter)} got another gradient after its update, because the loss also uses this "
                "parameter where the engine cannot see it; use update='deferred'"
            )
        if parameter in state.waiting:
            return
        state.hold(parameter)
        if state.early and self._completeness.is_complete(parameter):
            self._finish(state, parameter)
        else:
            state.waiting[parameter] = None

    def _refuse_changed(self, module: nn.Module, _: object) -> None:
        """Refuse a forward that reruns inside the backward with a parameter that was updated since.

        This happens if no gradient comes from the first use; otherwise the update would have waited for it.
        """
        state = self._pass
        if state is None or not state.updates:
            return
        for parameter in module.parameters(recurse=False):
            if parameter in state.done:
                raise UsageError(
                    f"{self._name(parameter)} is needed again after its update, because the backward recomputes part "
                    "of the forward, as checkpointing does; use update='deferred'"
                )

    def _finish(self, state: EagerPassState, parameter: Tensor) -> None:
        norm = norm_of(_gradient(parameter))
        if norm.device.type == "cpu" and not math.isfinite(norm):  # on other devices each check would synchronise
            self._refuse(norm, self._name(parameter), len(state.done) if state.updates else 0)
        state.norms[parameter] = norm
        state.done.add(parameter)  # before `finish`, since an interrupted update may have changed it
        state.finish(parameter, norm)
        state.bytes_now -= state.held.pop(parameter, 0)  # 0: the script set the gradient itself

    def _finish_all(self, state: EagerPassState) -> None:
        """Finish waiting parameters, and those that only earlier micro-batches reached, in the optimizer's order."""
        for parameter in self._held():
            self._finish(state, parameter)

    def _check_total(self, total: Tensor, num_updated: int) -> None:
        if not math.isfinite(total):
            self._refuse(total, "the sum", num_updated)

    def _refuse(self, norm: Tensor, where: str, num_updated: int) -> None:
        done = f"{num_updated} of {len(self._hooks)} parameters were updated" if num_updated else "nothing was updated"
        raise DivergedError(
            f"the gradient norm is {float(norm)} at step {self._engine.now().index + 1}, first in {where}; {done}"
        )

    def _held(self) -> list[Tensor]:
        return [p for p in self._stepper.parameters if p.grad is not None]

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(parameter, "a parameter of the optimizer that is not in the model")


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _free(parameter: Tensor) -> None:
    parameter.grad = None


def refuse_scaling(backward: Callable[..., object] | None) -> None:
    """Refuse a ``backward`` that scales the loss, since the update frees gradients before they could be unscaled.

    Also refuse the ``backward`` of a GradStore, with which no gradient arrives at parameters.
    """
    owner = getattr(backward, "__self__", None)
    if isinstance(owner, GradStore):
        raise UnsupportedError(
            "update='eager' frees each gradient before a GradStore could collect it; use update='deferred'"
        )
    if getattr(owner, "scaler", None) is not None:  # accelerate's: before the first pass that only measures
        refuse_scale()


def choose_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    update: str,
    clipping: Clipping,
) -> list[EagerUpdate]:
    """Return the extension for ``update='eager'``, or none for ``deferred``.

    ``model`` is the user's model with its wrappers. Raises :class:`UsageError` if the optimizer has no parameter of the
    model, and :class:`UnsupportedError` if it cannot update parameters one by one.
    """
    if update == "deferred":
        return []
    assert optimizer is not None, "attach should have refused it"
    part = EagerUpdate(model, optimizer, clipping)
    if set(model.parameters()).isdisjoint(PerParameterStep(optimizer).parameters):
        raise UsageError(
            f"update='eager': the optimizer has no parameter of {type(model).__name__}: create it from the current "
            "model.parameters()"
        )
    refuse_inseparable(optimizer)
    return [part]
