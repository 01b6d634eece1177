"""Leave work out of a running training after it was watched: lossless unpadding and prefix sharing, and gradients that
no optimizer uses. Plain steps and steps with less work alternate until both are measured; then all steps have less
work."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_audit.auditor.hook import OF_PARAMETERS, FunctionPatches
from sparsebp_audit.auditor.judge import judge_leaves
from sparsebp_audit.auditor.operation import AGAIN
from sparsebp_audit.auditor.runner import is_flat, is_sharded
from sparsebp_audit.auditor.script_packing import ScriptPacking
from sparsebp_audit.auditor.session import Session
from sparsebp_audit.report import Applied, StepTimes
from sparsebp_cli.backward.attachment import refuse_model
from sparsebp_cli.backward.kind.packing.refusal import find_model
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import make_policies
from sparsebp_cli.policy.composition import BackwardOptions

TIMED = 20  # steps of each kind
# which of four steps have less work; a drift of the machine affects both kinds equally
TURN = (False, True, True, False)
NOT_FASTER = "steps with lossless were not faster than steps without it"
NOTHING_SEEN = "the training ended before the audit was complete"


class Application:
    """Reduced work in one training; ``say`` gets lines for the user, and ``on_done`` is called after all
    measurements."""

    is_running: bool

    def __init__(self, session: Session, say: Callable[[str], None], on_done: Callable[[], None]) -> None:
        self._session, self._say, self._on_done = session, say, on_done
        self._packing: ScriptPacking | None = None
        self._steps = StepCount()
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # by whether the step had less work
        self._result = Applied(refusal=NOTHING_SEEN)
        self._unread: list[Tensor] = []  # parameters to switch off
        self._patches = FunctionPatches()
        self.is_running = self._is_light = self._is_timed = self._is_measured = False
        self._number = 0  # steps since the start
        self._since = self._elapsed = 0.0
        self._checks = 0

    def start(self) -> None:
        """Start between two steps: the next step is a plain one whose outputs are watched."""
        self.is_running = True
        self._steps = StepCount(self._session.parameters.num_steps, dict(self._session.parameters.optimizers))
        try:
            model = _find_trained(self._session)
            self._packing = ScriptPacking(model)
            self._packing.install()
            self._result = Applied(model=type(find_model(model)).__name__)
        except (UnsupportedError, UsageError) as error:
            self._result = Applied(refusal=str(error))
            self._say(self._result.headline)
        names, left_on = self._find_unread()
        self._result = replace(self._result, switched_off=tuple(names), left_on=left_on)
        self._unread = [self._session.parameters.by_name[name].tensor for name in names]
        if self._unread:
            self._patches.replace(torch.optim.Optimizer, "add_param_group", self._watch_groups)
        if self._packing is None and not self._unread:
            self.stop()
            self._on_done()

    def after_step(self, optimizer: Any) -> None:
        """Choose the kind of the next step; called after an optimizer step."""
        if not self.is_running or not self._steps.add(optimizer):
            return
        self._clock()
        packing, light = self._packing, self._is_light
        if packing is not None and packing.observes and not (packing.has_watched or packing.failure):
            return
        self._number += 1
        if packing is not None and packing.failure:
            self._give_up(packing, light)
        elif packing is not None and light:
            self._result = replace(self._result, packed_steps=self._result.packed_steps + 1)
        if not self.is_running:
            return
        if packing is not None:
            packing.observes = False
        checks = 0 if packing is None else packing.counts.checks
        # A step that compared gradients took longer.
        if self._is_timed and not self._is_measured and checks == self._checks:
            self._seconds[light].append(self._elapsed)
        self._checks = checks
        if not self._is_measured and min(map(len, self._seconds.values())) >= TIMED:
            self._end_measuring()
            if not self.is_running:
                return
        self._is_timed = self._number >= 2  # the first step is watched, the second compared
        self._switch(light=self._is_measured or self._number == 1 or TURN[self._number % len(TURN)])

    def _end_measuring(self) -> None:
        self._is_measured = True
        result = self.result()
        self._say(result.times())
        assert result.plain is not None
        assert result.lossless is not None
        if result.lossless.median_seconds >= result.plain.median_seconds:
            self._end(replace(result, refusal=NOT_FASTER, refused_at=self._steps.num_steps + 1))
        self._on_done()

    def _end(self, result: Applied) -> None:
        """Continue the training without SparseBP, and store a result."""
        self._result = result
        self._say(result.headline)
        self.stop()
        self._packing = None

    def result(self) -> Applied:
        """Return the results so far."""
        packing, result = self._packing, self._result
        times = {light: StepTimes.of(seconds) for light, seconds in self._seconds.items()}
        if packing is not None:
            counts = packing.counts
            result = replace(
                result,
                batches=counts.batches,
                packed_batches=counts.packed,
                positions=counts.positions,
                padding=counts.padding,
                unread=counts.unread,
                shared=counts.shared,
                head_rows=counts.head,
                checks=counts.checks,
                error=counts.error,
            )
            if packing.failure and not result.refusal:  # after the last step
                result = replace(result, refusal=packing.failure, refused_at=self._refused_at(result))
            if not result.packed_steps and not result.refusal:
                result = replace(result, refusal=NOTHING_SEEN.replace("the audit was complete", "lossless ran"))
        return replace(result, plain=times[False], lossless=times[True])

    def stop(self) -> None:
        """Restore the model and its parameters; further calls do nothing."""
        if self.is_running:
            self._switch(light=False)
            self.is_running = False
            self._patches.restore()
            if self._packing is not None:
                self._packing.remove()

    def _refused_at(self, result: Applied) -> int:
        return self._steps.num_steps + 1 if result.packed_steps else 0

    def _give_up(self, packing: ScriptPacking, light: bool) -> None:
        if self._result.refusal:
            return
        at = self._steps.num_steps if self._result.packed_steps and light else self._refused_at(self._result)
        self._result = replace(self._result, refusal=packing.failure, refused_at=at)
        self._seconds = {False: [], True: []}
        if self._unread:
            self._say(self._result.headline)
            return
        self._end(self.result())
        self._on_done()

    def _clock(self) -> None:
        # is_initialized: synchronising would start CUDA in a process that does not use it.
        if not self._is_measured and torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._elapsed, self._since = now - self._since, now

    def _switch(self, *, light: bool) -> None:
        if light != self._is_light:
            self._is_light = light
            for parameter in self._unread:
                parameter.requires_grad_(not light)
        if self._packing is not None:
            self._packing.enabled = light and not self._packing.failure

    def _find_unread(self) -> tuple[list[str], str]:
        """Return the names of parameters whose gradient nothing uses, and why others are not included."""
        session = self._session
        names = judge_leaves(session).names.get("unheld", [])
        if not names:
            return [], ""
        if any(account.kind == AGAIN for one in session.ledger.passes for account in one.work):
            return [], "activation checkpointing may need them"
        if _is_distributed():
            return [], "the training has several processes"
        by_name = session.parameters.by_name
        held = {id(p) for optimizer in _live_optimizers() for group in optimizer.param_groups for p in group["params"]}
        free = [name for name in names if id(by_name[name].tensor) not in held]
        measured = session.watch.gradient_reads.measured_elsewhere
        tensors = {name: by_name[name].tensor for name in free}
        hooked = [name for name in free if any(getattr(tensors[name], kind, None) for kind in OF_PARAMETERS)]
        used = [name for name in free if by_name[name].bit & measured or name in hooked]
        why = "gradient clipping, or something else that computes a norm, reads these gradients" if used else ""
        why = "hooks of the script read these gradients" if hooked else why
        if len(free) < len(names):
            why = "an optimizer that has not stepped yet holds some of these parameters"
        return [name for name in free if name not in used], why

    def _watch_groups(self, add: Callable[..., None]) -> Callable[..., None]:
        """Return a patch that switches a parameter on again when an optimizer gets it."""

        def added(optimizer: Any, group: Any) -> None:
            add(optimizer, group)
            held = {id(parameter) for parameter in optimizer.param_groups[-1]["params"]}
            for parameter in [p for p in self._unread if id(p) in held]:
                # Compare by identity, because == compares tensor entries.
                self._unread = [p for p in self._unread if p is not parameter]
                parameter.requires_grad_(True)

        return added


class StepCount:
    """Count the steps of the optimizer with most steps; with several optimizers, the first one counts a step."""

    num_steps: int

    def __init__(self, num_steps: int = 0, made: dict[Any, int] | None = None) -> None:
        self.num_steps = num_steps
        self._made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary(made or {})

    def add(self, optimizer: Any) -> bool:
        """Count an optimizer step, and return whether a step of the training has ended."""
        self._made[optimizer] = self._made.get(optimizer, 0) + 1
        if self._made[optimizer] <= self.num_steps:
            return False
        self.num_steps = self._made[optimizer]
        return True


def _find_trained(session: Session) -> nn.Module:
    """Return the only transformers model that the script trains; raise :class:`UnsupportedError`, by name, if packing
    does not support it."""
    if _is_distributed():
        raise UnsupportedError(
            "the audit does not support lossless in a training with several processes; attach lossless in the "
            "script instead"
        )
    roots = list(session.trained)
    for root in roots:
        if type(root).__module__.partition(".")[0] == "deepspeed":
            raise UnsupportedError("lossless does not support DeepSpeed, which runs the backward pass of this training")
        for where, module in root.named_modules():
            if is_sharded(module) or any(map(is_flat, module.parameters(recurse=False))):
                raise UnsupportedError(f"lossless does not support sharded weights (at {where or 'the model'!r})")
        refuse_model(root, make_policies("lossless"), dict(BackwardOptions.of({})))
    models: dict[int, nn.Module] = {}
    refusal = "no model was called in training mode"
    for root in roots:
        try:
            model = find_model(root)
        except UnsupportedError as error:
            refusal = str(error)
            continue
        models[id(model)] = model
        compiled = getattr(model, "_compiled_call_impl", None) is not None
        if compiled or any(hasattr(m, "_orig_mod") and _holds(m, model) for m in root.modules()):
            raise UnsupportedError(
                f"{type(model).__name__} is compiled with torch.compile; attach lossless in the script before "
                "torch.compile"
            )
    if not models:
        raise UnsupportedError(refusal)
    if len(models) > 1:
        kinds = ", ".join(sorted(type(model).__name__ for model in models.values()))
        raise UnsupportedError(
            f"the script trains {len(models)} transformers models ({kinds}), but lossless supports only one"
        )
    return next(iter(models.values()))


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


def _is_distributed() -> bool:
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return os.environ.get("WORLD_SIZE", "1") != "1" or (several and torch.distributed.get_world_size() > 1)


def _live_optimizers() -> list[torch.optim.Optimizer]:
    """Return every optimizer of this process, by type, because objects may report another class."""
    return [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]
