"""Run trial steps: forward and backward over one micro-batch, dense or with the policies, without effect on the run.

Random generators, buffers, gradients, policy state and counters are restored, so a run with trial steps is
bit-identical to one without them. All passes start from the same generator states, so their dropout masks are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from torch import Tensor, nn

from sparsebp_cli.backward import Engine, Report
from sparsebp_cli.backward.kind.parameter.extension import ParameterExtension
from sparsebp_cli.backward.patch.rewind import Rewind
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.sharding import full_tensor

Mode = Literal["dense", "policy"]


@dataclass(frozen=True)
class PassResult:
    """Gradients of all trained parameters by name (None where none arrived), and the engine's report of one pass."""

    gradients: dict[str, Tensor | None]
    report: Report


@dataclass(frozen=True)
class RestOfUpdate:
    """The other micro-batches of a step, for a policy that computes their shared rows once for all of them."""

    batches: Sequence[Mapping[str, Tensor]] = ()  # all of them, including the first; empty: a pass is one micro-batch
    forwards: Sequence[Callable[[], Tensor]] = ()  # forwards of the others


class TrialStep:
    """A context manager between two training steps in which passes run. The model must be in training mode and without
    gradients. ``forward`` returns the loss of a micro-batch, and ``backward`` differentiates it without the engine.
    With ``rest``, a pass covers all micro-batches of a step."""

    model: nn.Module
    engine: Engine
    forward: Callable[[], Tensor]

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        forward: Callable[[], Tensor],
        backward: Callable[[Tensor], None],
        rest: RestOfUpdate | None = None,
    ) -> None:
        self.model, self.engine, self.forward, self._backward = model, engine, forward, backward
        self._rest = RestOfUpdate() if rest is None else rest

    def __enter__(self) -> Self:
        """Record the state that is restored at the end."""
        self._trainable = trainable_parameters(self.model, self.engine)
        self._rewind = Rewind(self.model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the recorded state."""
        self._rewind.finish()
        del self._rewind

    @contextmanager
    def on(self, mode: Mode, draw: int = 1) -> Iterator[Callable[[Tensor], None]]:
        """Prepare one pass and yield the function that runs its backward. Gradients are dropped when the block ends.
        ``draw`` numbers the draws of random policies from 1; training uses 0, and -1 repeats that."""
        self._rewind.start()
        if mode == "dense":
            with self.engine.disabled():
                yield self._backward
        else:
            with self.engine.probing(draw):
                yield lambda loss: self.engine.backward(loss, self._backward)
        self._rewind.start()

    @property
    def sizes(self) -> dict[str, int]:
        """The number of entries of each trained parameter, by name."""
        return {name: p.numel() for name, p in self._trainable.items()}

    @property
    def num_updated(self) -> int:
        """The number of entries of the parameters that have a gradient in the current pass."""
        return sum(p.numel() for p in self._trainable.values() if p.grad is not None)

    def run(self, mode: Mode, draw: int = 1) -> PassResult:
        """Run one pass and return its gradients and report."""
        with self.on(mode, draw) as backward:
            self.run_batches(backward)
            return self.result()

    def run_batches(
        self, backward: Callable[[Tensor], None], watch: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> Tensor:
        """Run forward, under ``watch``, and backward of each micro-batch of a pass, and return the last loss."""
        if self._rest.batches:
            self.engine.expect(self._rest.batches)
        for forward in (self.forward, *self._rest.forwards):
            with watch():
                loss = forward()
            backward(loss)
        return loss

    def result(self) -> PassResult:
        """Return the gradients and the report of the current pass so far."""
        gradients = {name: None if p.grad is None else full_tensor(p.grad) for name, p in self._trainable.items()}
        return PassResult(gradients, self.engine.report())


NO_DENSE = (
    "target.processes: processes do not sum the gradients of parameters that a policy freezes. So the run cannot "
    "compare with dense: no probes, no fidelity comparisons (measure.probe_every, measure.fidelity_every)"
)


def trainable_parameters(model: nn.Module, engine: Engine) -> dict[str, nn.Parameter]:
    """Return the parameters that the model would train without policies, by name in the model's order; a shared one
    once. Optimizer, clipping, checkpoints and measurements include all of them, because a parameter that is frozen at
    one step may be trained at another."""
    with engine.disabled():
        return {name: p for name, p in model.named_parameters() if p.requires_grad}


def freezes_parameters(engine: Engine) -> bool:
    """Return whether a policy selects which parameters are trained."""
    return any(isinstance(part, ParameterExtension) for part in engine.extensions)


def limit_measurements(recipe: Recipe, ranks: Ranks, engine: Engine) -> Recipe:
    """Return the recipe without the measurements that these processes cannot make: probes if parameters are sharded;
    probes and fidelity if a policy freezes parameters in several processes."""
    update: dict[str, None] = {"probe_every": None} if ranks.is_sharded else {}
    if ranks.count > 1 and freezes_parameters(engine):
        update = {"probe_every": None, "fidelity_every": None}
    return recipe.model_copy(update={"measure": recipe.measure.model_copy(update=update)}) if update else recipe
