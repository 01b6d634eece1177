"""Train parts of weights in one model, with optimizer state for the parts only.

The weights stay ordinary parameters of the model, under their own names. The optimizer trains a leaf tensor for each
part instead. After each of its steps the leaves are written into the weights, so the weights hold the trained values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from sparsebp_cli.backward import (
    DensePass,
    ForwardOverride,
    ForwardPatches,
    LayerNumbers,
    PassEstimate,
    TrialExtension,
    claim_needed,
)
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import Step, TrialPass
from sparsebp_shelf.part.gradient import run_part
from sparsebp_shelf.part.kind import PartSelector, TrainedWeight, WeightGradient
from sparsebp_shelf.part.layout import WeightLayout, find_layout, weight_of
from sparsebp_shelf.part.weight_part import WeightPart

if TYPE_CHECKING:
    from sparsebp_cli.backward import EngineView, Given

Linears = Mapping[str, tuple[nn.Module, WeightLayout]]


@final
class PartExtension(TrialExtension):
    """Carry out a part selector's choice in one model, for the linears of :func:`find_divisible`.

    Raises :class:`PolicyError` if the policy does not fit the model, :class:`UsageError` if the optimizer does not
    train a weight or has state for all of it, and :class:`UnsupportedError` under reentrant checkpointing.
    """

    policy: PartSelector

    def __init__(
        self,
        policy: PartSelector,
        model: nn.Module,
        given: Given,
    ) -> None:
        _refuse_reentrant(model)
        linears = find_divisible(model, given.exclude, frozen=policy.of_frozen)
        self.policy, self._model, self._linears, self._states = policy, model, linears, given.states
        self._swap, self._first = _Swap(given.trained_by), replace(given.first, index=0)
        # Parameters that a step may freeze: all that the user trains, or with of_frozen those that the user has frozen.
        own = {id(weight_of(module)) for module, _ in linears.values()}
        self._names = {
            name: p for name, p in model.named_parameters() if (id(p) in own if policy.of_frozen else p.requires_grad)
        }
        self._beside = [p for p in model.parameters() if p.requires_grad] if policy.of_frozen else []
        self._overrides: dict[str, PartOverride] = {}
        self._patches = ForwardPatches()
        self._engine: EngineView | None = None
        self._enabled, self._is_loaded = True, False
        # Without of_frozen, parameters that the user has frozen stay frozen.
        self._frozen_here: list[nn.Parameter] = list(self._names.values()) if policy.of_frozen else []
        parts = self._choose()
        if policy.of_frozen:
            self._swap.check_begins()
        for name, part in () if policy.of_frozen else parts.items():
            module, form = linears[name]
            self._swap.check(name, weight_of(module), part.share(*form.by_output(weight_of(module)).shape) == 1.0)
        self._parts = parts

    @property
    @override
    def frozen(self) -> frozenset[str]:
        """Names of parameters without a trained part."""
        trained = {id(weight_of(self._linears[name][0])) for name in self._parts}
        return frozenset(name for name, parameter in self._names.items() if id(parameter) not in trained)

    @property
    @override
    def trains_frozen(self) -> bool:
        """Whether weights that the user froze are trained."""
        return self.policy.of_frozen

    @property
    @override
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of a training step."""
        return sum(p.nbytes for p in (*self._beside, *(each.leaf for each in self._overrides.values())))

    def install(self, engine: EngineView) -> None:
        self._engine = engine  # the first step chooses the parts
        if self.policy.of_frozen:
            # Add all weights, whatever the policy chooses, so that a resumed run has the same number of parameters.
            self._swap.add(self._names.values())

    def remove(self) -> None:
        # Until the next step begins, only the leaves hold the trained values.
        self._write()
        self._remove_parts()
        self.enable(False)
        self._swap.forget(self._names.values() if self.policy.of_frozen else None)
        if self.policy.of_frozen:
            for parameter in self._names.values():
                parameter.requires_grad_(False)

    def enable(self, enabled: bool) -> None:
        self._enabled = enabled
        for each in self._overrides.values():
            each.enabled = enabled
        if not enabled:
            for parameter in self._frozen_here:
                parameter.requires_grad_(True)
            self._frozen_here = []
        elif not self._frozen_here:
            self._frozen_here = [p for p in self._names.values() if p.requires_grad]
            for parameter in self._frozen_here:
                parameter.requires_grad_(False)

    def start_step(self, step: Step) -> None:
        if self._is_loaded:  # the weights hold the checkpoint's values
            self._remove_parts()
        else:
            self._write()
        if self._is_loaded or step.index == 0:  # step 0 may follow trial passes
            self._remove_parts()
            self._parts = self._choose()
            self._install_parts()
        self._is_loaded = False
        self.enable(self._enabled)
        for parameter in (*self._names.values(), *(each.leaf for each in self._overrides.values())):
            parameter.grad = None  # the gradient was applied; model.zero_grad() does not reach a leaf

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the policy's state holds the choice, and the model's weights hold the values."""
        return {}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next step choose and read the parts again, from the loaded state and weights."""
        self._is_loaded = True

    @contextmanager
    def trying(self, decision: Collection[str] | TrialPass) -> Iterator[None]:  # noqa: ARG002 - all passes are dense
        """Run a trial pass densely, and record the gradients of the weights."""
        before = self._enabled
        self.enable(False)
        try:
            yield
            for name, (module, form) in self._linears.items():
                weight = weight_of(module)
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                if self._states.watches(self.policy, WeightGradient):
                    seen = WeightGradient(name, self._states.unscale(form.by_output(gradient)))
                    self._states.see(self.policy, seen)
        finally:
            self.enable(before)

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining fractions of a dense pass."""
        needed = claim_needed(self._model, dense, [self._names[name] for name in self.frozen])
        backward = dict(needed.backward)
        for name, part in self._parts.items():
            flops, product = dense.flops.backward.get(name, 0), dense.flops.forward.get(name, 0)
            if flops and product:
                module, form = self._linears[name]
                share = part.claim(*form.by_output(weight_of(module)).shape)
                backward[name] -= (1.0 - share) * product / flops
        return PassEstimate(backward=backward, recomputed=needed.recomputed)

    def _choose(self) -> dict[str, WeightPart]:
        weights, name = show_weights(self._model, self._linears), type(self.policy).__name__
        if not weights:
            kind = "frozen linear" if self.policy.of_frozen else "linear"
            raise PolicyError(
                f"{name} trains parts of weights, but the model has no {kind} layer whose weight can be trained in part"
            )
        chosen = dict(self.policy.parts(weights, self._states.show(self.policy, self._first)))
        if not chosen:
            raise PolicyError(f"{name} must choose a part of at least one weight, got none")
        for place, part in chosen.items():
            if place not in self._linears:
                raise PolicyError(f"{name} must name linear layers of this model, got {place!r}")
            module, form = self._linears[place]
            try:
                part.check(*form.by_output(weight_of(module)).shape)
            except PolicyError as error:
                raise PolicyError(f"{name}: {place!r}: {error}") from None
        return {place: chosen[place] for place in self._linears if place in chosen}

    def _install_parts(self) -> None:
        assert self._engine is not None
        for name, part in self._parts.items():
            module, form = self._linears[name]
            own = PartOverride(name, module, form, part, self._engine)
            own.enabled = self._enabled
            self._overrides[name] = own
            self._patches.install(module, own)
        self._swap.swap((weight_of(each.module), each.leaf) for each in self._overrides.values())
        self._engine.notes["parts"] = self._describe()

    def _remove_parts(self) -> None:
        self._patches.remove()
        for each in self._overrides.values():
            each.handle.remove()
        self._swap.swap((each.leaf, weight_of(each.module)) for each in self._overrides.values())
        self._overrides = {}

    @torch.no_grad()
    def _write(self) -> None:
        for each in self._overrides.values():
            # Copied, even if contiguous: through a view the optimizer would change a saved weight unnoticed by
            # autograd. See decision 16.
            each.part.write(each.form.by_output(weight_of(each.module)), each.leaf)

    def _describe(self) -> str:
        entries = sum(each.leaf.numel() for each in self._overrides.values())
        total = sum(parameter.numel() for parameter in self._names.values())
        beside = sum(parameter.numel() for parameter in self._beside)
        others = f", besides {beside:,} entries of other parameters" if beside else ""
        return (
            f"{entries:,} of {total:,} entries are trained, in {len(self._parts)} of {len(self._linears)} weights of "
            f"linear layers{others}; to clip gradients, pass the optimizer's parameters (the parts), not the model's"
        )


@final
class PartOverride(ForwardOverride):
    """Replace the ``forward`` of one linear: only a part of its weight is trained."""

    leaf: nn.Parameter
    handle: RemovableHandle
    enabled: bool
    name: str
    module: nn.Module

    def __init__(self, name: str, module: nn.Module, form: WeightLayout, part: WeightPart, engine: EngineView) -> None:
        self.name, self.module, self.form, self.part, self._engine = name, module, form, part, engine
        self.leaf = nn.Parameter(part.restrict(form.by_output(weight_of(module).detach())))
        self.handle = self.leaf.register_post_accumulate_grad_hook(self._show)
        self.enabled = True

    @override
    def __call__(self, input: Tensor) -> Tensor:  # nn.Linear's parameter name
        if self.is_removed or not self.enabled or not torch.is_grad_enabled():
            output: Tensor = self.run_covered(self.module, input)
            return output
        weight = weight_of(self.module)
        if weight.device != self.leaf.device or weight.dtype != self.leaf.dtype:
            raise UnsupportedError(
                f"the weight of {self.name!r} is {weight.dtype} on {weight.device}, but its part was chosen as "
                f"{self.leaf.dtype} on {self.leaf.device}: move or convert the model before attach"
            )
        return run_part(self.module, input, self.leaf, self.form, self.part, reference=self._engine.reference)

    def _show(self, leaf: Tensor) -> None:
        """In a probe, write the gradient to the weight, with zeros outside of the part: probes compare weights."""
        if not self._engine.now().draw or leaf.grad is None:
            return
        weight = weight_of(self.module)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        matrix_OD = self.form.by_output(weight.grad)
        self.part.write(matrix_OD, self.part.restrict(matrix_OD) + leaf.grad)
        leaf.grad = None


@final
class _Swap:
    """Replace parameters of an optimizer by others."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._added: list[Tensor] = []
        self._trained = {id(each) for group in optimizer.param_groups for each in group["params"]}

    def check_begins(self) -> None:
        """Raise :class:`UsageError` if the optimizer has state, because the added parts would have none."""
        if self._optimizer.state:
            raise UsageError(
                "the policy adds parts of frozen weights to the optimizer, but the optimizer already has state: "
                "call attach before the first optimizer step"
            )

    def add(self, weights: Iterable[Tensor]) -> None:
        """Add weights to the optimizer, as places of their parts; it skips them while they have no gradient."""
        known = {id(each) for group in self._optimizer.param_groups for each in group["params"]}
        self._added = [weight for weight in weights if id(weight) not in known]
        self._optimizer.param_groups[0]["params"].extend(self._added)

    def check(self, name: str, weight: Tensor, is_whole: bool) -> None:
        """Raise :class:`UsageError` unless the optimizer trains a weight and has no state for all of it."""
        if id(weight) not in self._trained:
            raise UsageError(
                f"the policy trains a part of the weight of {name!r}, but the optimizer does not contain this weight"
            )
        state = self._optimizer.state.get(weight, {})
        if not is_whole and any(isinstance(v, Tensor) and v.shape == weight.shape for v in state.values()):
            raise UsageError(
                f"the policy trains a part of the weight of {name!r}, but the optimizer has state for the whole "
                "weight: call attach before the first optimizer step"
            )

    def swap(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Replace the first parameter of each pair by the second, which takes over its state."""
        pairs = list(pairs)
        other = {id(before): after for before, after in pairs}
        for group in self._optimizer.param_groups:
            group["params"][:] = [other.get(id(each), each) for each in group["params"]]
        for before, after in pairs:
            if before in self._optimizer.state:
                self._optimizer.state[after] = self._optimizer.state.pop(before)

    def forget(self, weights: Iterable[Tensor] | None) -> None:
        """Drop the optimizer's state of some weights (None: of all), and remove the added weights. A part's state has
        another shape than its weight."""
        if weights is None:
            self._optimizer.state.clear()
        for weight in weights or ():
            self._optimizer.state.pop(weight, None)
        added = {id(weight) for weight in self._added}
        for group in self._optimizer.param_groups:
            group["params"][:] = [each for each in group["params"] if id(each) not in added]


def find_divisible(model: nn.Module, exclude: Sequence[str] = (), *, frozen: bool = False) -> Linears:
    """Return the linears whose weights can be trained in part, by name, without those that match ``exclude``. Weights
    that are tied, quantised, sharded, in float8, parametrized or frozen do not count; ``frozen`` returns the frozen
    ones."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found = {}
    for name, module in model.named_modules():  # the sites check that each excluded pattern matches a linear
        form = None if any(fnmatchcase(name, pattern) for pattern in exclude) else find_layout(module)
        if form is not None and weight_of(module).requires_grad != frozen and uses.get(id(weight_of(module))) == 1:
            found[name] = (module, form)
    return found


def find_places(policy: PartSelector, model: nn.Module, given: Given) -> tuple[TrainedWeight, ...]:
    """Return the weights from which a part selector chooses parts."""
    return show_weights(model, find_divisible(model, given.exclude, frozen=policy.of_frozen))


def show_weights(model: nn.Module, linears: Linears) -> tuple[TrainedWeight, ...]:
    """Return the weights in the form that a policy gets."""
    layers = LayerNumbers(model)
    return tuple(
        TrainedWeight(name, layers.number_of(name), form.by_output(weight_of(module).detach()))
        for name, (module, form) in linears.items()
    )


def _refuse_reentrant(model: nn.Module) -> None:
    for name, module in model.named_modules():
        # transformers stores its options only here, in a partial of torch.utils.checkpoint.checkpoint.
        keywords: dict[str, object] = getattr(module.__dict__.get("_gradient_checkpointing_func"), "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant", True):
            raise UnsupportedError(
                f"parts of weights cannot be trained with reentrant checkpointing (at {name!r}): enable "
                "checkpointing with use_reentrant=False"
            )
