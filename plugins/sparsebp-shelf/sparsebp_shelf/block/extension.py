"""Block dropping in one model: a dropped block runs without autograd, so nothing of it is kept, or not at all.

Each module of a block runs under ``no_grad`` where all blocks that it computes are dropped. Its output needs no
gradient, so what follows it up to the addition to the residual stream, such as dropout, records nothing either, and
the addition passes the stream's gradient on as it is. Random numbers are drawn as in the plain forward.

With ``skips_forward`` the modules of a dropped block do not run. They return zeros, so the layer adds nothing to the
stream, and the output of a kept block is multiplied by its factor. Evaluation runs every block as it is.

The choice is a function of the step alone, so every micro-batch and every process has the same one, and a layer that
activation checkpointing computes again has the one of its first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward import (
    DensePass,
    EngineExtension,
    ForwardOverride,
    ForwardPatches,
    PassEstimate,
    claim_needed,
    find_reentrant,
    is_in_backward,
    misses_gradients,
    refuse_uncalled,
    uncompiled,
)
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import Step
from sparsebp_shelf.block.kind import BlockDropper, BlockGradient, ResidualBlock
from sparsebp_shelf.block.layout import BlockPart, find_blocks, refuse_norms_of_the_stream
from sparsebp_shelf.block.skip import scale, skip

if TYPE_CHECKING:
    from sparsebp_cli.backward import EngineView, Given


@final
class BlockExtension(EngineExtension):
    """A block dropper in one model.

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
                f"{self._name} with reentrant checkpointing (at {name!r}), which runs the backward of every layer: "
                "enable checkpointing with use_reentrant=False"
            )
        self.policy, self._model, self._states, self._patches = policy, model, given.states, ForwardPatches()
        self.blocks, self.parts = find_blocks(model, self._name)
        if policy.skips_forward:
            refuse_norms_of_the_stream(model, self._name)
        inside = {module for part in self.parts for module in part.module.modules()}
        self._outside = [module for module in model.modules() if module not in inside]
        self._step: Step | None = None  # that the choice below is for
        self._dropped: frozenset[str] = frozenset()
        self._factors: Mapping[str, float] = {}  # of kept blocks' outputs, by name; 1 where missing
        self._forward_step: Step | None = None  # of the last forward
        self._tried: frozenset[str] | None = None  # the decision of a trial pass
        self._num_kept: dict[int, int] = {}  # blocks with a backward, by step of the training
        self._was_called = False

    @property
    @override
    def frozen(self) -> frozenset[str]:
        """Names of parameters that the model trains in general but not in the current step."""
        return frozenset(self._find_frozen(self._dropped))

    @property
    @override
    def work_shares(self) -> tuple[float, ...]:
        """The shares of attentions and of MLPs that the last pass kept."""
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
                parameter.grad = None  # a gradient of an earlier step, or zeros, would be applied

    @contextmanager
    def trying(self, decision: Collection[str]) -> Iterator[None]:
        """Drop these blocks; see :class:`~sparsebp_cli.backward.core.trial.TriesDecisions`."""
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
        """Whether a module that runs now belongs to dropped blocks alone; called where gradients are enabled."""
        self._was_called = True
        step = _whole(self.engine.now())
        if not is_in_backward():
            self._choose(step)
            self._forward_step = step
        elif self._forward_step != step:
            raise UsageError(
                f"{part.name!r} is computed again after the step of its forward, with other blocks dropped: run the "
                "backward of each forward before the optimizer's step"
            )
        if part.blocks <= self._dropped:
            if misses_gradients():
                raise UnsupportedError(
                    f"{self._name} leaves parameters without a gradient, which DDP waits for: wrap the model with "
                    "find_unused_parameters=True"
                )
            return True
        return False

    def factor(self, part: BlockPart) -> float:
        """Return what the output of a module that runs now is multiplied by, after :meth:`is_dropped`."""
        return self._factors.get(next(iter(part.blocks)), 1.0) if part.is_last else 1.0

    def watch(self, part: BlockPart, output: object) -> None:
        """Observe the gradient of what blocks add to the residual stream, once a forward, if the policy asks."""
        if not part.is_last or is_in_backward() or not self._states.watches(self.policy, BlockGradient):
            return
        added = output[0] if isinstance(output, tuple) else output
        if isinstance(added, Tensor) and added.requires_grad:
            added.register_hook(partial(self._see, part.blocks))

    def _see(self, blocks: Iterable[str], gradient: Tensor) -> None:
        for name in blocks:
            if self._states.watches(self.policy, BlockGradient):
                seen = BlockGradient(name, self._states.unscale(gradient.detach()))
                self._states.see(self.policy, seen, self.engine.now())

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining shares of a dense pass, by the choice of the last forward."""
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
        shown = self._states.show(self.policy, step)
        self._factors = {} if self._tried is not None else self.policy.at(step).factors(self.blocks, shown)
        if not step.draw:
            # By step: every micro-batch, and a layer that is computed again, makes the same choice once more.
            self._num_kept[step.index] = len(self.blocks) - len(self._dropped)
        number = sum(self._num_kept.values()) / max(1, len(self._num_kept))
        self.engine.notes["blocks"] = (
            f"on average {number:.1f} of {len(self.blocks)} residual blocks "
            f"{'are computed' if self.policy.skips_forward else 'have a backward'}; the parameters of the "
            "others have no gradient at that step"
        )

    def _ask(self, step: Step) -> frozenset[str]:
        if self._tried is not None:
            return self._tried
        names = frozenset(self.policy.at(step).drop(self.blocks, self._states.show(self.policy, step)))
        unknown = sorted(names - {block.name for block in self.blocks})
        if unknown:
            raise PolicyError(f"{self._name} drops {unknown[0]!r}, allowed: names of blocks that it was given")
        return names

    def _keep_trainable(self, dropped: frozenset[str]) -> frozenset[str]:
        """Return the dropped blocks without the last ones, as far as else nothing at all would be trained.

        Such as with adapters in every block and nothing else trained: a loss without a gradient is an error.
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
    """The ``forward`` of one module of residual blocks."""

    def __init__(self, part: BlockPart, extension: BlockExtension) -> None:
        self._part, self._extension = part, extension
        # Not compiled, since the choice differs from step to step.
        self._is_dropped: Callable[[], bool] = uncompiled(partial(extension.is_dropped, part))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        module = self._part.module
        if self.is_removed or not (module.training and torch.is_grad_enabled() and self._extension.engine.enabled):
            return self.run_covered(module, *args, **kwargs)
        if not self._is_dropped():
            factor = self._extension.factor(self._part)
            output = self.run_covered(module, *args, **kwargs)
            output = output if factor == 1.0 else scale(self._part, output, factor)
            self._extension.watch(self._part, output)
            return output
        if self._extension.policy.skips_forward:
            return skip(self._part, args, kwargs)
        with torch.no_grad(), _without_cast_cache((*args, *kwargs.values())):
            return self.run_covered(module, *args, **kwargs)


def _whole(step: Step) -> Step:
    return replace(step, micro_batch=0, call=0, rank=0)


def _without_cast_cache(values: Iterable[object]) -> AbstractContextManager[object]:
    """Return a context in which autocast stores no cast weight: one made without autograd would have no gradient where
    the same weight is used again.
    """
    device = next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)
