"""Drop blocks in one model: a dropped block runs without autograd and saves nothing, or does not run.

A module runs under ``no_grad`` if all blocks that it computes are dropped. Its output then needs no gradient, so later
operations such as dropout record nothing either. The addition to the residual stream passes the stream's gradient on
unchanged. The modules draw the same random numbers as in the plain forward.

With ``skips_forward`` the modules of a dropped block do not run. They return zeros, so the layer adds nothing to the
stream. Evaluation runs every block.

The choice depends on the step only, so all micro-batches and processes agree. A layer that activation checkpointing
computes again gets the choice of its first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward import (
    DensePass,
    ForwardOverride,
    ForwardPatches,
    PassEstimate,
    TrialExtension,
    claim_needed,
    find_reentrant,
    is_in_backward,
    misses_gradients,
    refuse_uncalled,
    uncompiled,
)
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import Step, TrialPass, returned
from sparsebp_shelf.block.kind import BlockDropper, ResidualBlock
from sparsebp_shelf.block.layout import BlockPart, find_blocks, refuse_norms_of_the_stream
from sparsebp_shelf.block.skip import skip

if TYPE_CHECKING:
    from sparsebp_cli.backward import EngineView, Given


@final
class BlockExtension(TrialExtension):
    """Carry out a block dropper's choices in one model.

    Raises :class:`UnsupportedError` if a layer's residual blocks are not known, or under reentrant checkpointing.
    """

    engine: EngineView
    policy: BlockDropper
    blocks: tuple[ResidualBlock, ...]
    parts: tuple[BlockPart, ...]

    def __init__(self, policy: BlockDropper, model: nn.Module, given: Given) -> None:
        self._name = type(policy).__name__
        name = find_reentrant(model)
        if name is not None:
            raise UnsupportedError(
                f"{self._name} does not support reentrant checkpointing (at {name!r}), which runs the backward "
                "of every layer: enable checkpointing with use_reentrant=False"
            )
        self.policy, self._model, self._states, self._patches = policy, model, given.states, ForwardPatches()
        self.blocks, self.parts = find_blocks(model, self._name)
        if policy.skips_forward:
            refuse_norms_of_the_stream(model, self._name)
        inside = {module for part in self.parts for module in part.module.modules()}
        self._outside = [module for module in model.modules() if module not in inside]
        self._step: Step | None = None  # the step of the choice below
        self._dropped: frozenset[str] = frozenset()
        self._forward_step: Step | None = None  # step of the last forward
        self._tried: frozenset[str] | None = None  # the decision of a trial pass
        self._num_kept: dict[int, int] = {}  # number of blocks with a backward, by training step
        self._was_called = False

    @property
    @override
    def frozen(self) -> frozenset[str]:
        """Names of parameters that the model trains in general but not in the current step."""
        return frozenset(self._find_frozen(self._dropped))

    @property
    @override
    def work_shares(self) -> tuple[float, ...]:
        """Fractions of the attentions and of the MLPs that the last pass kept."""
        kept = {"attention": list[bool](), "mlp": list[bool]()}
        for part in self.parts:
            kept[part.kind].append(not part.blocks <= self._dropped)
        return tuple(sum(found) / len(found) if found else 1.0 for found in kept.values())

    def install(self, engine: EngineView) -> None:
        self.engine = engine
        for part in self.parts:
            self._patches.install(part.module, PartOverride(part, self))

    def remove(self) -> None:
        self._patches.remove()

    def start_step(self, step: Step) -> None:
        self._choose(_whole(step))
        if self.engine.enabled:
            for parameter in self._find_frozen(self._dropped).values():
                parameter.grad = None  # a gradient of an earlier step, or zeros, would still move the parameter

    @contextmanager
    def trying(self, decision: Collection[str] | TrialPass) -> Iterator[None]:
        """Drop the blocks in ``decision``; see :class:`~sparsebp_cli.backward.TrialExtension`."""
        assert not isinstance(decision, TrialPass), "a block dropper tries decisions"
        self._tried, self._step = frozenset(decision), None
        try:
            yield
        finally:
            self._tried = self._step = None

    @override
    def check_called(self) -> None:
        if not self._was_called:
            refuse_uncalled(self.policy, self._model)

    def is_dropped(self, part: BlockPart) -> bool:
        """Return whether all blocks of a module that runs now are dropped; called only while gradients are enabled."""
        self._was_called = True
        step = _whole(self.engine.now())
        if not is_in_backward():
            self._choose(step)
            self._forward_step = step
        elif self._forward_step != step:
            raise UsageError(
                f"cannot recompute the forward of {part.name!r} after the optimizer step, because each step drops "
                "other blocks: run the backward of each forward before the optimizer step"
            )
        if part.blocks <= self._dropped:
            if misses_gradients():
                raise UnsupportedError(
                    f"{self._name} leaves parameters without a gradient, but DDP waits for them: wrap the model with "
                    "find_unused_parameters=True"
                )
            return True
        return False

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining fractions of a dense pass, for the choice of the last forward."""
        cut = {
            f"{part.name}.{name}" if name else part.name
            for part in self._dropped_parts(self._dropped)
            for name, _ in part.module.named_modules()
        }
        needed = claim_needed(self._model, dense, (), cut)
        if not self.policy.skips_forward:
            return needed
        nothing = dict.fromkeys(cut, 0.0)
        return replace(needed, forward=nothing, recomputed={**needed.recomputed, **nothing})

    def _choose(self, step: Step) -> None:
        if step == self._step:
            return
        self._step, self._dropped = step, self._keep_trainable(self._ask(step))
        if not step.draw:
            # Stored by step: each micro-batch and each recomputed layer repeats the same choice.
            self._num_kept[step.index] = len(self.blocks) - len(self._dropped)
        number = sum(self._num_kept.values()) / max(1, len(self._num_kept))
        self.engine.notes["blocks"] = (
            f"on average {number:.1f} of {len(self.blocks)} residual blocks "
            f"{'are computed' if self.policy.skips_forward else 'have a backward'} in a step; in each step, the "
            "parameters of the other blocks have no gradient"
        )

    def _ask(self, step: Step) -> frozenset[str]:
        if self._tried is not None:
            return self._tried
        names = self.policy.at(step).drop(self.blocks, self._states.show(self.policy, step))
        return returned.require_names(f"{self._name}.drop", names, {block.name for block in self.blocks})

    def _keep_trainable(self, dropped: frozenset[str]) -> frozenset[str]:
        """Return ``dropped`` without its last blocks, as many as are needed so that the model still trains something.

        With adapters in every block and nothing else trained, dropping all blocks would leave a loss without a
        gradient.
        """
        for block in reversed(self.blocks):
            frozen = {id(parameter) for parameter in self._find_frozen(dropped).values()}
            if any(p.requires_grad and id(p) not in frozen for p in self._model.parameters()):
                break
            dropped -= {block.name}
        return dropped

    def _dropped_parts(self, dropped: frozenset[str]) -> list[BlockPart]:
        return [part for part in self.parts if part.blocks <= dropped]

    def _find_frozen(self, dropped: frozenset[str]) -> dict[str, nn.Parameter]:
        """Return the trained parameters, by name, that only dropped blocks use."""
        parts = self._dropped_parts(dropped)
        kept = [part.module for part in self.parts if not part.blocks <= dropped]
        used = {id(p) for module in self._outside for p in module.parameters(recurse=False)}
        used |= {id(p) for module in kept for p in module.parameters()}
        named = ((f"{part.name}.{name}", p) for part in parts for name, p in part.module.named_parameters())
        return {name: p for name, p in named if p.requires_grad and id(p) not in used}


class PartOverride(ForwardOverride):
    """Replace the ``forward`` of one module of residual blocks."""

    def __init__(self, part: BlockPart, extension: BlockExtension) -> None:
        self._part, self._extension = part, extension
        # Not compiled, because the choice differs from step to step.
        self._is_dropped: Callable[[], bool] = uncompiled(partial(extension.is_dropped, part))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        module = self._part.module
        if self.is_removed or not (module.training and torch.is_grad_enabled() and self._extension.engine.enabled):
            return self.run_covered(module, *args, **kwargs)
        if not self._is_dropped():
            return self.run_covered(module, *args, **kwargs)
        if self._extension.policy.skips_forward:
            return skip(self._part, args, kwargs)
        with torch.no_grad(), _without_cast_cache((*args, *kwargs.values())):
            return self.run_covered(module, *args, **kwargs)


def _whole(step: Step) -> Step:
    return replace(step, micro_batch=0, call=0, rank=0)


def _without_cast_cache(values: Iterable[object]) -> AbstractContextManager[object]:
    """Return a context in which autocast caches no cast weight.

    A weight cast without autograd would have no gradient where the model uses it again.
    """
    device = next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)
