"""Choose examples under trl's fused head, where the trainer computes its own loss from log-probabilities.

The trainer's loss and log read the values of all examples, so all examples run forward. Only chosen examples have a
graph. The backward multiplies the gradient at their values by their weights and drops the gradient at the others. The
result is linear in the arriving gradient. So examples drawn with known probabilities and weighted by their inverse give
the gradient of all examples in the mean over draws, for any loss.

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
    ForwardOverride,
    FusedHeadExtension,
    PassEstimate,
    count_targets,
    has_fused_head,
    upload,
)
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import Examples, ReadExamples
from sparsebp_shelf.example.extension import ExampleExtension
from sparsebp_shelf.example.kind import ExampleSelector, require_examples

if TYPE_CHECKING:
    from sparsebp_cli.backward import EngineView, Given, PolicyStates

EXAMPLE_SIZE = "example_size"  # the column with each example's weight in the trainer's own loss


@final
class FusedExamples(FusedHeadExtension[ExampleSelector]):
    """Carry out an example selector's choices in a model with trl's fused head.

    Raises :class:`UnsupportedError` for a selector that scores examples.
    """

    share: float

    def __init__(self, policy: ExampleSelector, model: nn.Module, states: PolicyStates) -> None:
        if not policy.fits_head:
            raise UnsupportedError(
                f"{type(policy).__name__} is not supported with trl's fused head: use a policy that chooses "
                f"examples without scores of the model; {FusedHeadExtension.LEFT}"
            )
        super().__init__(policy, model, states)
        self._size_B: Tensor | None = None
        self.share = 1.0  # fraction of the last batch's examples that was chosen

    @override
    def set_columns(self, **columns: Tensor) -> None:
        """Set how much each example of the next batches counts, until the next call."""
        self._size_B = columns.get(EXAMPLE_SIZE)

    def install(self, engine: EngineView) -> None:
        self._engine = engine
        self._patches.install(self.model, FusedExamplesForward(self, engine))

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining fractions of a dense pass: the forward runs all examples."""
        return PassEstimate(
            backward=dict.fromkeys(dense.flops.backward, self.share),
            recomputed=dict.fromkeys(dense.flops.recomputed, self.share),
        )

    def choose(self, label_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the numbers of the chosen examples, (K,), and their gradients' factors; None: all, with factor 1."""
        policy, step, number = self.policy, self._engine.now(), len(label_BT)
        weight_B = self._size_B if policy.reads_weight else None
        if weight_B is not None:
            if weight_B.dim() == 0 or len(weight_B) != number:
                raise UsageError(f"the column {EXAMPLE_SIZE} must have one row for each of {number} examples")
            weight_B = weight_B.detach().float().abs().reshape(number, -1).amax(1)
        examples = Examples(number, weight_B=weight_B)
        if self._states.watches(policy, ReadExamples):
            self._states.see(policy, ReadExamples(self._states.next_forward(policy), examples), step)
        choice = policy.at(step).choose(examples, self._states.show(policy, step))
        require_examples(policy, choice, number)
        target_B = count_targets(label_BT)
        if choice is None:
            self._count(target_B, target_B, number)
            return None
        # A choice without weights stands for all examples, as if each were equally likely.
        index_K = choice if isinstance(choice, Tensor) else choice.index_K
        factor_K = torch.full((len(index_K),), number / len(index_K))
        if not isinstance(choice, Tensor):
            factor_K = choice.weight_K.float()
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
        if not kwargs.get(FusedHeadExtension.ARGUMENT):
            raise UnsupportedError(
                f"{type(self._extension.policy).__name__} chooses examples under trl's fused head, but the model "
                "was called in training without this head: put that forward under engine.disabled(); "
                f"{FusedHeadExtension.LEFT}"
            )
        self._extension.was_called = True
        label_BT = kwargs.get("labels")
        if args or not isinstance(label_BT, Tensor):
            raise UnsupportedError(
                f"with trl's fused head, {type(self._extension.policy).__name__} needs labels and inputs as "
                "keyword arguments, as trl's trainers pass them"
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
        if self._engine.batch_sizes is not None:  # the linears run on the chosen examples only
            self._engine.batch_sizes = frozenset((len(index_K),))
        with self._engine.short_forward(scale=number / len(index_K)):
            live = self.run_covered(self._model, **self._take(kwargs, index_K, number))
        with torch.no_grad():
            left = self.run_covered(self._model, **self._take(kwargs, rest_L, number))
        return _join(live, left, (index_K, factor_K, rest_L), kwargs)

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


def _join(live: Any, left: Any, parts: tuple[Tensor, Tensor, Tensor], given: Mapping[str, Any]) -> Any:
    """Join the outputs of two parts of the batch into one output of trl's fused head."""
    index_K, factor_K, rest_L = parts
    values: dict[str, Any] = {}
    for field in fields(live):
        one, other = getattr(live, field.name), getattr(left, field.name)
        if isinstance(one, Tensor) and one.dim():
            values[field.name] = _Joined.apply(one, other[: len(rest_L)], index_K, factor_K, rest_L)  # type: ignore[no-untyped-call]
        elif one is not None and field.name != "loss":
            raise UnsupportedError(f"choosing examples does not support the output {field.name} of trl's fused head")
    count = given.get("num_items_in_batch")
    count = values["label_mask"].sum().clamp(min=1) if count is None else count
    return type(live)(loss=-values["log_probs"].sum() / count, **values)


class _Joined(torch.autograd.Function):
    """Join rows of two parts of a batch; the backward scales the gradient of the first and drops that of the second."""

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
    """Return the extension of an example selector; each class documents what it refuses."""
    fused = next((module for module in model.modules() if has_fused_head(module)), None)
    return ExampleExtension(policy, model, given) if fused is None else FusedExamples(policy, fused, given.states)
