"""Chosen examples under trl's fused head, where the trainer computes a loss of its own from log-probabilities.

The trainer's loss and log read the values of all examples, so all have a forward. Those that are chosen have a graph;
the gradient that arrives at their values is multiplied by their weights, and that at the others is dropped. A gradient
is linear in what arrives, so examples that are drawn with known probabilities and weighted by their inverse give the
gradient of all examples in the mean over draws, whatever the loss makes of the values.

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

from sparsebp_cli.backward.core.report import Chosen
from sparsebp_cli.backward.kind.example.extension import ExampleExtension
from sparsebp_cli.backward.kind.example.loss import count_targets
from sparsebp_cli.backward.kind.fused_head import ARGUMENT, LEFT, FusedHeadExtension, has_fused_head
from sparsebp_cli.backward.kind.transfer import upload
from sparsebp_cli.backward.observe.flops import DensePass, PassEstimate
from sparsebp_cli.backward.patch.forward import ForwardOverride
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import Examples, ExampleSelector, ReadExamples

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.backward.core.given import Given
    from sparsebp_cli.backward.core.policy_state import PolicyStates

EXAMPLE_SIZE = "example_size"  # the column: how much each example counts in a loss of the trainer's own


@final
class FusedExamples(FusedHeadExtension[ExampleSelector]):
    """An example selector in a model with trl's fused head.

    Raises :class:`UnsupportedError` for a selector that scores examples.
    """

    share: float

    def __init__(self, policy: ExampleSelector, model: nn.Module, states: PolicyStates) -> None:
        if not policy.fits_head:
            raise UnsupportedError(
                f"{type(policy).__name__} is not built with trl's fused head: examples must be chosen without a score "
                f"of the model there; {LEFT}"
            )
        super().__init__(policy, model, states)
        self._size_B: Tensor | None = None
        self.share = 1.0  # of the last batch's examples

    @override
    def set_columns(self, **columns: Tensor) -> None:
        """Set how much each of the next batches' examples counts, until the next call."""
        self._size_B = columns.get(EXAMPLE_SIZE)

    def install(self, engine: EngineView) -> None:
        self._engine = engine
        self._patches.install(self.model, FusedExamplesForward(self, engine))

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining shares of a dense pass: the forward is that of all examples."""
        return PassEstimate(
            backward=dict.fromkeys(dense.flops.backward, self.share),
            recomputed=dict.fromkeys(dense.flops.recomputed, self.share),
        )

    def choose(self, label_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the numbers of the chosen examples, (K,), and the factors of their gradients; None: all, by 1."""
        policy, step, number = self.policy, self._engine.now(), len(label_BT)
        weight_B = self._size_B if policy.reads_weight else None
        if weight_B is not None:
            if weight_B.dim() == 0 or len(weight_B) != number:
                raise UsageError(f"{EXAMPLE_SIZE} must have one row for each of {number} examples")
            weight_B = weight_B.detach().float().abs().reshape(number, -1).amax(1)
        examples = Examples(number, weight_B=weight_B)
        if self._states.watches(policy, ReadExamples):
            self._states.see(policy, ReadExamples(self._states.next_forward(policy), examples), step)
        choice = policy.at(step).choose(examples, self._states.show(policy, step))
        target_B = count_targets(label_BT)
        if choice is None:
            self._count(target_B, target_B, number)
            return None
        # What is chosen without weights stands for all, as if each were as likely.
        index_K = choice if isinstance(choice, Tensor) else choice.index_K
        factor_K = torch.full((len(index_K),), number / len(index_K))
        if not isinstance(choice, Tensor):
            factor_K = choice.weight_K.float()
            if choice.denominator == "weights":
                factor_K = factor_K * (number / factor_K.sum())
        index_K, factor_K = (
            upload(label_BT.device, v)[0] if v.device.type == "cpu" else v for v in (index_K, factor_K)
        )
        self._count(target_B, target_B[index_K], len(index_K))
        return index_K, factor_K

    def _count(self, target_B: Tensor, target_K: Tensor, number: int) -> None:
        self.share = number / len(target_B)
        counts = (target_B.sum(), target_K.sum())
        self._engine.add_chosen(Chosen(*counts, examples=len(target_B), chosen_examples=number))


class FusedExamplesForward(ForwardOverride):
    """The ``forward`` of a model with trl's fused head, with a graph of the chosen examples."""

    def __init__(self, extension: FusedExamples, engine: EngineView) -> None:
        self._extension, self._engine, self._model = extension, engine, extension.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if args and args[0] is self._model:  # accelerate's wrapper calls a forward it has wrapped as a method
            args = args[1:]
        active = self._engine.enabled and self._model.training and torch.is_grad_enabled()
        if self.is_removed or not active:
            return self.run_covered(self._model, *args, **kwargs)
        if not kwargs.get(ARGUMENT):
            raise UnsupportedError(
                f"{type(self._extension.policy).__name__} chooses examples under trl's fused head, and the model was "
                f"called in training without it: use engine.disabled() for that forward; {LEFT}"
            )
        self._extension.was_called = True
        label_BT = kwargs.get("labels")
        if args or not isinstance(label_BT, Tensor):
            raise UnsupportedError(
                f"{type(self._extension.policy).__name__} under trl's fused head needs labels and inputs by name, as "
                "trl's trainers give them"
            )
        chosen = self._extension.choose(label_BT)
        if chosen is None or len(chosen[0]) == len(label_BT):
            return self._run_all(kwargs, chosen)
        return self._run_parts(kwargs, label_BT, *chosen)

    def _run_all(self, kwargs: dict[str, Any], chosen: tuple[Tensor, Tensor] | None) -> Any:
        output = self.run_covered(self._model, **kwargs)
        if chosen is None:
            return output
        whole_L = chosen[0].new_zeros(0)
        return _join(output, output, (*chosen, whole_L), kwargs)

    def _run_parts(self, kwargs: dict[str, Any], label_BT: Tensor, index_K: Tensor, factor_K: Tensor) -> Any:
        number = len(label_BT)
        is_left_B = torch.ones(number, dtype=torch.bool, device=label_BT.device).index_fill(0, index_K, value=False)
        rest_L = is_left_B.nonzero()[:, 0]
        if self._engine.batch_sizes is not None:  # linears see the chosen examples alone
            self._engine.batch_sizes = frozenset((len(index_K),))
        with self._engine.short_forward(scale=number / len(index_K)):
            live = self.run_covered(self._model, **self._take(kwargs, index_K, number))
        with torch.no_grad():
            left = self.run_covered(self._model, **self._take(kwargs, rest_L, number))
        return _join(live, left, (index_K, factor_K, rest_L), kwargs)

    def _take(self, given: Mapping[str, Any], index: Tensor, number: int) -> dict[str, Any]:
        """Return the arguments of some examples."""
        taken: dict[str, Any] = {}
        for name, value in given.items():
            taken[name] = value
            if isinstance(value, Tensor) and value.dim() > 0:
                if len(value) != number:
                    raise UnsupportedError(
                        f"{type(self._extension.policy).__name__} cannot take examples out of {name}, of shape "
                        f"{tuple(value.shape)}, which has no row for each of {number} examples"
                    )
                taken[name] = value.index_select(0, index)
        return taken


def _join(live: Any, left: Any, parts: tuple[Tensor, Tensor, Tensor], given: Mapping[str, Any]) -> Any:
    """Return an output of trl's fused head from those of two parts of the batch."""
    index_K, factor_K, rest_L = parts
    values: dict[str, Any] = {}
    for field in fields(live):
        one, other = getattr(live, field.name), getattr(left, field.name)
        if isinstance(one, Tensor) and one.dim():
            values[field.name] = _Joined.apply(one, other[: len(rest_L)], index_K, factor_K, rest_L)  # type: ignore[no-untyped-call]
        elif one is not None and field.name != "loss":
            raise UnsupportedError(f"{field.name} of trl's fused head is not built for chosen examples")
    count = given.get("num_items_in_batch")
    count = values["label_mask"].sum().clamp(min=1) if count is None else count
    return type(live)(loss=-values["log_probs"].sum() / count, **values)


class _Joined(torch.autograd.Function):
    """Rows of two parts of a batch; the gradient of the first is multiplied, and the second has none."""

    @staticmethod
    def forward(ctx: Any, live: Tensor, left: Tensor, index_K: Tensor, factor_K: Tensor, rest_L: Tensor) -> Tensor:
        ctx.save_for_backward(index_K, factor_K)
        whole = live.new_empty(len(index_K) + len(rest_L), *live.shape[1:])
        whole.index_copy_(0, index_K, live).index_copy_(0, rest_L, left.to(live.dtype))
        if not live.is_floating_point():
            ctx.mark_non_differentiable(whole)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        index_K, factor_K = ctx.saved_tensors
        grad = grads[0].index_select(0, index_K)
        return grad * factor_K.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1)), None, None, None, None


def make_example_extension(policy: ExampleSelector, model: nn.Module, given: Given) -> ExampleExtension | FusedExamples:
    """Return the extension of an example selector; see both classes for what they refuse."""
    fused = next((module for module in model.modules() if has_fused_head(module)), None)
    return ExampleExtension(policy, model, given) if fused is None else FusedExamples(policy, fused, given.states)
