"""Choose examples under trl's fused head, where the trainer computes its own loss from log-probabilities.

The trainer's loss and log read the values of all examples, so all examples run forward. Only chosen examples have a
graph. The backward multiplies the gradient at their values by the number of examples over that of chosen ones, and
drops the gradient at the others. The result is linear in the arriving gradient. So examples drawn uniformly give the
gradient of all examples in the mean over draws, for any loss.

Shape letters: B examples, T positions, K chosen, L left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from sparsebp_cli.backward import (
    Chosen,
    DensePass,
    EngineExtension,
    ForwardOverride,
    ForwardPatches,
    PassEstimate,
    has_fused_head,
    refuse_uncalled,
    upload,
)
from sparsebp_cli.errors import UnsupportedError
from sparsebp_shelf.example.examples import Examples, ReadExamples
from sparsebp_shelf.example.extension import ExampleExtension
from sparsebp_shelf.example.kind import ExampleSelector, WeightedExamples, require_examples
from sparsebp_shelf.example.loss import count_targets

if TYPE_CHECKING:
    from sparsebp_cli.backward import EngineView, Given, PolicyStates


ARGUMENT = "fused_lm_head"  # of trl's forward
LEFT = "a trl trainer leaves this head on the model: before your own loop, run `del model.forward`"


@final
class FusedExamples(EngineExtension):
    """Carry out an example selector's choices in a model with trl's fused head.

    Raises :class:`UnsupportedError` for a selector that scores or weighs examples.
    """

    policy: ExampleSelector
    was_called: bool  # whether the forward has chosen
    share: float

    def __init__(self, policy: ExampleSelector, model: nn.Module, states: PolicyStates) -> None:
        if not policy.fits_head or policy.weighs:
            raise UnsupportedError(
                f"{type(policy).__name__} is not supported with trl's fused head: use a policy that neither "
                f"scores examples with the model nor weights them; {LEFT}"
            )
        self.policy, self.model, self._states = policy, model, states
        self._patches, self.was_called = ForwardPatches(), False
        self.share = 1.0  # fraction of the last batch's examples that was chosen

    def install(self, engine: EngineView) -> None:
        self._engine = engine
        self._patches.install(self.model, FusedExamplesForward(self, engine))

    def remove(self) -> None:
        self._patches.remove()

    @override
    def check_called(self) -> None:
        if not self.was_called:
            if self.model.training:
                raise UnsupportedError(
                    f"{type(self.policy).__name__} was not called: no forward went through trl's fused head; {LEFT}"
                )
            refuse_uncalled(self.policy, self.model)

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining fractions of a dense pass: the forward runs all examples."""
        return PassEstimate(
            backward=dict.fromkeys(dense.flops.backward, self.share),
            recomputed=dict.fromkeys(dense.flops.recomputed, self.share),
        )

    def choose(self, label_BT: Tensor) -> Tensor | None:
        """Return the numbers of the chosen examples, (K,); None: all."""
        policy, step, examples = self.policy, self._engine.now(), Examples(len(label_BT))
        if self._states.watches(policy, ReadExamples):
            self._states.see(policy, ReadExamples(self._states.next_forward(policy), examples), step)
        index_K = policy.at(step).choose(examples, self._states.show(policy, step))
        require_examples(policy, index_K, len(label_BT))
        assert not isinstance(index_K, WeightedExamples), "only of policies that weigh"
        target_B = count_targets(label_BT)
        if index_K is None or len(index_K) == len(label_BT):
            self._count(target_B, target_B, len(label_BT))
            return None
        index_K = upload(label_BT.device, index_K)[0] if index_K.device.type == "cpu" else index_K
        self._count(target_B, target_B[index_K], len(index_K))
        return index_K

    def _count(self, target_B: Tensor, target_K: Tensor, number: int) -> None:
        self.share = number / len(target_B)
        counts = (target_B.sum(), target_K.sum())
        self._engine.add_chosen(Chosen(*counts, examples=len(target_B), chosen_examples=number))


class FusedExamplesForward(ForwardOverride):
    """Replace the ``forward`` of a model with trl's fused head: only the chosen examples have a graph."""

    def __init__(self, extension: FusedExamples, engine: EngineView) -> None:
        self._extension, self._engine, self._model = extension, engine, extension.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if args and args[0] is self._model:  # accelerate's wrapper passes the model itself first
            args = args[1:]
        active = self._engine.enabled and self._model.training and torch.is_grad_enabled()
        if self.is_removed or not active:
            return self.run_covered(self._model, *args, **kwargs)
        if not kwargs.get(ARGUMENT):
            raise UnsupportedError(
                f"{type(self._extension.policy).__name__} chooses examples under trl's fused head, but the model "
                "was called in training without this head: put that forward under engine.disabled(); "
                f"{LEFT}"
            )
        self._extension.was_called = True
        label_BT = kwargs.get("labels")
        if args or not isinstance(label_BT, Tensor):
            raise UnsupportedError(
                f"with trl's fused head, {type(self._extension.policy).__name__} needs labels and inputs as "
                "keyword arguments, as trl's trainers pass them"
            )
        index_K = self._extension.choose(label_BT)
        if index_K is None:
            return self.run_covered(self._model, **kwargs)
        return self._run_parts(kwargs, label_BT, index_K)

    def _run_parts(self, kwargs: dict[str, Any], label_BT: Tensor, index_K: Tensor) -> Any:
        number = len(label_BT)
        is_left_B = torch.ones(number, dtype=torch.bool, device=label_BT.device).index_fill(0, index_K, value=False)
        rest_L = is_left_B.nonzero()[:, 0]
        if self._engine.batch_sizes is not None:  # the linears run on the chosen examples only
            self._engine.batch_sizes = frozenset((len(index_K),))
        with self._engine.short_forward(scale=number / len(index_K)):
            live = self.run_covered(self._model, **self._take(kwargs, index_K, number))
        with torch.no_grad():
            left = self.run_covered(self._model, **self._take(kwargs, rest_L, number))
        return _join(live, left, index_K, rest_L, kwargs)

    def _take(self, given: Mapping[str, Any], index: Tensor, number: int) -> dict[str, Any]:
        """Return the arguments for some of the examples."""
        taken: dict[str, Any] = {}
        for name, value in given.items():
            taken[name] = value
            if isinstance(value, Tensor) and value.dim() > 0:
                if len(value) != number:
                    raise UnsupportedError(
                        f"{type(self._extension.policy).__name__} cannot choose examples of the argument {name}: "
                        f"its shape is {tuple(value.shape)}, but it needs one row for each of {number} examples"
                    )
                taken[name] = value.index_select(0, index)
        return taken


def _join(live: Any, left: Any, index_K: Tensor, rest_L: Tensor, given: Mapping[str, Any]) -> Any:
    """Join the outputs of two parts of the batch into one output of trl's fused head."""
    values: dict[str, Any] = {}
    for field in fields(live):
        one, other = getattr(live, field.name), getattr(left, field.name)
        if isinstance(one, Tensor) and one.dim():
            values[field.name] = _Joined.apply(one, other, index_K, rest_L)  # type: ignore[no-untyped-call]
        elif one is not None and field.name != "loss":
            raise UnsupportedError(
                f"with chosen examples, trl's fused head cannot give its output {field.name}: do not request it"
            )
    count = given.get("num_items_in_batch")
    count = values["label_mask"].sum().clamp(min=1) if count is None else count
    return type(live)(loss=-values["log_probs"].sum() / count, **values)


class _Joined(torch.autograd.Function):
    """Join rows of two parts of a batch; the backward scales the gradient of the first and drops that of the second."""

    @staticmethod
    def forward(ctx: Any, live: Tensor, left: Tensor, index_K: Tensor, rest_L: Tensor) -> Tensor:
        ctx.save_for_backward(index_K)
        ctx.factor = (len(index_K) + len(rest_L)) / len(index_K)
        whole = live.new_empty(len(index_K) + len(rest_L), *live.shape[1:])
        whole.index_copy_(0, index_K, live).index_copy_(0, rest_L, left.to(live.dtype))
        if not live.is_floating_point():
            ctx.mark_non_differentiable(whole)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (index_K,) = ctx.saved_tensors
        return grads[0].index_select(0, index_K) * ctx.factor, None, None, None


def make_example_extension(policy: ExampleSelector, model: nn.Module, given: Given) -> ExampleExtension | FusedExamples:
    """Return the extension of an example selector; each class documents what it refuses."""
    fused = next((module for module in model.modules() if has_fused_head(module)), None)
    return ExampleExtension(policy, model, given) if fused is None else FusedExamples(policy, fused, given.states)
