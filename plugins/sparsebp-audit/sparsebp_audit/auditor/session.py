"""Install everything that watches a training in this process, and remove it again."""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sparsebp_audit.auditor.hook import FunctionPatches, Hooks
from sparsebp_audit.auditor.internals import dispatch_modes
from sparsebp_audit.auditor.ledger import AuditLedger, PassRecord
from sparsebp_audit.auditor.module import AnyModules
from sparsebp_audit.auditor.parameter import Parameters
from sparsebp_audit.auditor.referee import Referee
from sparsebp_audit.auditor.runner import WatchedPasses, find_gathered, is_sharded
from sparsebp_audit.auditor.saved import Kept, SavedTensors, suspend_hooks
from sparsebp_audit.auditor.script_packing import count_leftover
from sparsebp_audit.auditor.storage import Weights, has_storage
from sparsebp_audit.auditor.watch import OperatorWatch
from sparsebp_cli.backward.observe.internals import is_in_transform, next_sequence_number
from sparsebp_cli.backward.observe.module_trace import is_in_backward

MOST_PASSES_A_STEP = 64  # without a visible optimizer, the audit ends after this many passes per requested step
Progress = Callable[[int, int], None]

T = TypeVar("T")
Clear = Callable[..., None]


class Session:
    """Watch the trainings of this process for ``steps`` optimizer steps, or until :meth:`stop`.

    ``on_step`` is called after each step with its number and the total, and may raise; ``on_end`` after the last step.
    ``referee`` checks the examples of the first step as well.
    """

    wanted: int | None
    ledger: AuditLedger
    weights: Weights
    parameters: Parameters
    hooks: Hooks
    modules: AnyModules
    saved: SavedTensors
    watch: OperatorWatch
    runner: WatchedPasses
    is_running: bool
    seconds: float

    def __init__(
        self,
        steps: int | None,
        on_step: Progress | None = None,
        on_end: Callable[[], None] | None = None,
        referee: Referee | None = None,
    ) -> None:
        self.referee = referee
        self.wanted, self._on_step, self._on_end = steps, on_step, on_end
        self.ledger, self.weights, self.parameters, self.hooks = AuditLedger(), Weights(), Parameters(), Hooks()
        self.modules = AnyModules(self._on_root, self._after_root)
        self.saved = SavedTensors(self.modules, self.weights)
        self.watch = OperatorWatch(
            self.ledger, self.modules, self.weights, self.saved, self._shape_of, self.parameters.bit_of
        )
        self.runner = WatchedPasses(self.watch, self.parameters)
        self.is_running = self._is_installed = self._is_due = False
        self._installed = ExitStack()  # this thread's dispatch mode
        self.seconds, self._last_number = 0.0, 0
        self._since: float | None = None
        self._handles: list[RemovableHandle] = []
        self._patches = FunctionPatches()
        self.trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # root models called in training mode
        self._incomplete: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def start(self) -> None:
        """Start watching; recording begins with the first forward or backward."""
        self.is_running = True
        self._num_compiled = _count_compiled()
        self.modules.__enter__()
        self.hooks.start()
        if self.referee is not None:
            self.referee.start()
        self._install()
        steps = Steps(self)
        self._handles = [
            register_optimizer_step_pre_hook(steps.before),
            register_optimizer_step_post_hook(steps.after),
        ]
        replace = self._patches.replace  # Tensor.backward and autograd.grad both call the first
        self._run = replace(torch.autograd, "_engine_run_backward", lambda _: self._run_backward)
        replace(torch.autograd.graph, "disable_saved_tensors_hooks", suspend_hooks(self.saved))
        replace(torch.optim.Optimizer, "zero_grad", self._clearing(_held))
        replace(nn.Module, "zero_grad", self._clearing(nn.Module.parameters))

    def stop(self) -> None:
        """Stop watching. Further calls do nothing."""
        if not self.is_running:
            return
        self.is_running = self._is_due = False
        if self._since is not None:
            self.seconds = time.perf_counter() - self._since
        self._patches.restore()
        self.hooks.stop()
        self.modules.__exit__(None, None, None)
        self.watch.is_active = False
        self._uninstall()
        if self.referee is not None:
            self.referee.stop()
        self.modules.has_compiled |= _count_compiled() > self._num_compiled
        if self.modules.has_compiled:
            torch.compiler.reset()  # otherwise dynamo would never compile what it skipped under the dispatch mode

    def close(self) -> None:
        """Remove the optimizer hooks; impossible while one of them runs."""
        self._uninstall()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def saved_of_passes(self) -> list[Kept]:
        """Return tensors saved for passes that have run; forwards after the last pass are not judged."""
        return [kept for kept in self.saved.take_all() if kept.numbers[0] < self._last_number]

    @property
    def passes(self) -> list[PassRecord]:
        """Outermost backward passes, including the running one."""
        return self.ledger.passes + ([self.runner.current] if self.runner.current is not None else [])

    @property
    def num_steps(self) -> int:
        """Steps so far of the optimizer with most; without an optimizer, backward passes."""
        return self.parameters.num_steps or len(self.ledger.passes)

    def add_model(self, model: nn.Module) -> None:
        """Name a root model's modules and add its parameters."""
        if not self.modules.add_root(model) and model not in self._incomplete:
            return
        if is_in_transform():
            self._incomplete.add(model)  # a torch.func transform hides tensors
            return
        self._incomplete.discard(model)
        for module in model.modules():
            if is_sharded(module):
                self.watch.find_sharded = self._find_sharded
            for name, parameter in module.named_parameters(recurse=False):
                if is_lazy(parameter) or not (parameter.is_leaf and has_storage(parameter)):
                    self._incomplete.add(model)  # lazy, or replaced by functional_call
                    continue
                full = ".".join(part for part in (self.modules.name_of(module), name) if part)
                self.parameters.add(full, parameter)
                self.weights.add(parameter, self.parameters.histories[parameter].name)

    def _on_root(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.add_model(module)
        if is_in_backward():
            return  # a part repeated under checkpointing; the model's own inputs remain
        self.watch.is_graded = torch.is_grad_enabled()
        if self.watch.is_graded:
            if self.referee is not None and self._is_trained(module):
                with self._paused():
                    self.referee.before_call(module, args, kwargs)
            self._install()
            self._begin_clock()
            self._record_mask(module, args, kwargs)
            if self._is_trained(module):
                self._record_rows(module, kwargs)

    def _after_root(self, module: nn.Module, output: object) -> None:
        if self.referee is not None and not is_in_backward() and torch.is_grad_enabled() and self._is_trained(module):
            self.referee.after_call(output)

    def _is_trained(self, module: nn.Module) -> bool:
        return module.training and not self.modules.has_no_parameters(module)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Run the block unrecorded, because its work does not belong to the training."""
        was_installed, self.is_running = self._is_installed, False
        self._uninstall()
        was_active, self.watch.is_active = self.watch.is_active, False
        try:
            with self.modules.paused():
                yield
        finally:
            self.is_running, self.watch.is_active = True, was_active
            if was_installed:
                self._install()

    def _record_rows(self, module: nn.Module, kwargs: dict[str, object]) -> None:
        """Count what packing would leave out of a batch of a causal language model."""
        self.trained.add(module)
        # If transformers is not imported, no model comes from it; an import here would take seconds.
        if "transformers" not in sys.modules:
            return
        left = count_leftover(module, kwargs)
        if left is not None:
            self.ledger.real += left.real
            self.ledger.unread += left.unread
            self.ledger.shared += left.shared

    def _record_mask(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Record padding from a two-dimensional attention mask."""
        given = [kwargs, *(value for value in args if isinstance(value, dict))]
        mask = next((values["attention_mask"] for values in given if values.get("attention_mask") is not None), None)
        if mask is None and self.modules.has_no_parameters(module):
            return  # such as a loss; the model's own inputs remain
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point():
            self.watch.padding_N = self.saved.rows = None
            return
        padding_BT = mask == 0
        padded = int(padding_BT.sum())
        self.ledger.positions += mask.numel()
        self.ledger.padded += padded
        self.watch.padding_N = padding_BT.flatten() if padded else None
        self.saved.rows = (*mask.shape, padded / mask.numel()) if padded else None

    def _install(self) -> None:
        """Install this thread's dispatch mode and hooks, but never above another library's, which would remove ours."""
        # See decision 20.
        if not self._is_installed and not dispatch_modes():
            self._is_installed = True
            self._installed.enter_context(self.watch)
        self.saved.start()

    def _uninstall(self) -> None:
        """Remove them; below another library's, they stay without effect."""
        self.saved.stop()
        if self._is_installed and (modes := dispatch_modes()) and modes[-1] is self.watch:
            self._is_installed = False
            self._installed.close()

    def _begin_clock(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def _run_backward(self, outputs: Sequence[object], *args: object, **kwargs: object) -> object:
        if not self.is_running or torch.compiler.is_compiling():
            return self._run(outputs, *args, **kwargs)
        if self.referee is not None and self.runner.current is None:
            with self._paused():
                self.referee.before_backward(outputs, args[0] if args else ())
        self._install()
        self._begin_clock()
        if self.runner.current is None:
            for model in list(self._incomplete):
                self.add_model(model)
            self._find_sharded()
            self._last_number = next_sequence_number()
            self.parameters.clear_missing(self.ledger.passes)
            self.hooks.wrap_hooks(self.modules.known(), list(self.parameters.histories))
        try:
            return self.runner.run(self._run, outputs, *args, **kwargs)
        finally:
            if self.runner.current is None:
                self.watch.gradient_reads.gradients = self.parameters.gradients()
                if self._has_seen_enough():
                    self._end()

    def _find_sharded(self) -> None:
        if self.watch.find_sharded is None:
            return
        for whole, sharded in find_gathered(self.modules.known()):
            history = self.parameters.histories.get(sharded)
            if history is not None and whole not in self.parameters.gathered:
                self.parameters.gathered[whole] = history
                self.weights.add(whole, history.name)

    def _clearing(self, tensors_of: Callable[[T], Iterable[Tensor]]) -> Callable[[Clear], Clear]:
        """Return a patch that records gradients before they are cleared."""

        def make(clear: Clear) -> Clear:
            @functools.wraps(clear)  # accelerate reads its signature
            def cleared(owner: T, *args: object, **kwargs: object) -> None:
                self.parameters.clear(tensors_of(owner), self.passes)
                clear(owner, *args, **kwargs)

            return cleared

        return make

    def _has_seen_enough(self) -> bool:
        if self.wanted is None or self.parameters.optimizers:
            return self._is_due
        return len(self.ledger.passes) >= self.wanted * MOST_PASSES_A_STEP

    def end_step(self) -> None:
        """Report a step that has ended, and stop after the last."""
        made = self.parameters.num_steps
        if self.referee is not None:
            self.referee.end_step()
        if self._on_step is not None and not self._is_due:
            self._on_step(made, self.wanted or 0)
        if self.wanted is not None and made >= self.wanted:
            self._is_due = True
            if self.runner.current is None:
                self._end()

    def _end(self) -> None:
        if self.is_running:
            self.stop()
            if self._on_end is not None:
                self._on_end()

    def _shape_of(self, name: str) -> tuple[int, ...]:
        history = self.parameters.by_name.get(name)
        return tuple(history.tensor.shape) if history is not None else ()


def _held(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _count_compiled() -> int:
    """Return how many functions torch.compile has handled so far, including those skipped under a dispatch mode."""
    convert = sys.modules.get("torch._dynamo.convert_frame")  # the first use of torch.compile imports it
    return len(convert.input_codes.seen) if convert is not None else 0


class Steps:
    """Hooks on every optimizer of this process."""

    def __init__(self, session: Session) -> None:
        self._session, self._has_closure = session, False

    def before(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Record the gradients that a step will use; with a closure, when the closure returns. Return the step's
        arguments with the closure wrapped; None without one."""
        session = self._session
        if not session.is_running:
            return None
        session.watch.is_updating = True
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first argument is the optimizer
        self._has_closure = callable(closure)
        if not callable(closure):
            session.parameters.start_step(optimizer, session.passes)
            return None
        watched = self._watch_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, kwargs | {"closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _watch_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[..., object]) -> Callable[..., object]:
        """Wrap a closure, which trains inside the optimizer's step and whose gradients the step uses."""
        session = self._session

        @functools.wraps(closure)
        def watched(*args: object, **kwargs: object) -> object:
            session.watch.is_updating = False
            try:
                return closure(*args, **kwargs)
            finally:
                session.watch.is_updating = True
                if session.is_running:
                    session.parameters.start_step(optimizer, session.passes, is_again=not self._has_closure)
                    self._has_closure = False

        return watched

    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record that a step has ended."""
        session = self._session
        if not session.is_running:
            return
        session.watch.is_updating = False
        if self._has_closure:  # the step never called the closure
            session.parameters.start_step(optimizer, session.passes)
        if session.parameters.is_ahead:  # with several optimizers, the first one counts the step
            session.end_step()
