"""Compute inner products of the gradients of single examples, over the weights of the trained linears.

The products are those of the batch's gradients with the mean validation gradient, and with each other. One pass without
dropout runs both groups forward and differentiates both losses with respect to the outputs of the linears. It computes
no weight gradient and writes nothing to ``.grad``. The gradient of a linear's weight for one example is dyᵀx, so the
product of two examples is the sum of (x1·x2)(dy1·dy2) over all pairs of their rows. A pair of examples costs 2T²(D +
O). Where one weight gradient for each example costs less, these are multiplied instead. Biases, norms and embeddings do
not count, nor does the use of a tied weight as an embedding.

Shape letters: B examples of the batch, V of the validation, T positions, N rows of a group, D input width, O output
width, P entries of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sparsebp_cli.backward import (
    HasLogits,
    check_logits,
    count_targets,
    evaluating,
    find_linears,
    find_rows,
    find_time_first,
    sum_losses,
    weight_of,
)
from sparsebp_cli.errors import UnsupportedError

IGNORED = -100  # label of positions without a target
Arguments = Mapping[str, object]
Forward = Callable[..., HasLogits]
_NOT_FORWARDED = ("labels", "num_items_in_batch", "shift_labels", "return_dict")


class ExampleProducts(NamedTuple):
    """Results of a scoring pass."""

    loss_B: Tensor  # the mean loss of each example's targets
    product_B: Tensor
    product_BB: Tensor


class LinearRows(NamedTuple):
    """The inputs of a linear and the gradients of its outputs, by example."""

    x_BTD: Tensor
    grad_BTO: Tensor


@dataclass
class _Group:
    """The forward of one group of examples: for each linear its calls, as the input and the output's gradient edge."""

    number: int
    calls: dict[str, list[tuple[Tensor, GradientEdge]]] = field(default_factory=dict)
    loss_B: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def edges(self) -> list[GradientEdge]:
        return [edge for calls in self.calls.values() for _, edge in calls]

    def join(self, grads: Iterator[Tensor | None]) -> dict[str, LinearRows]:
        """Return the rows of each linear on which the loss depends, with several calls concatenated.

        ``grads`` has one gradient for each edge.
        """
        found = {}
        for name, calls in self.calls.items():
            pairs = [(x_BTD, grad) for (x_BTD, _), grad in zip(calls, grads, strict=False) if grad is not None]
            if pairs:
                precise = torch.promote_types(pairs[0][0].dtype, torch.float32)
                x_BTD = _join([x_BTD for x_BTD, _ in pairs])
                grad_BTO = _join([grad.reshape(self.number, -1, grad.shape[-1]) for _, grad in pairs])
                found[name] = LinearRows(x_BTD.to(precise), grad_BTO.to(precise))
        return found


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)  # cat would copy a single tensor as well


class GradientProducts:
    """Computes the products in one model, for the policy that ``what`` names, without linears that match ``exclude``.

    Raises :class:`UnsupportedError` if no other linear is trained, or under activation checkpointing, where the pass
    would store all activations.
    """

    def __init__(self, model: nn.Module, what: str, exclude: Collection[str] = ()) -> None:
        self._model, self._what, self._time_first = model, what, find_time_first(model)
        self._linears = {name: module for name, module, _ in find_linears(model, exclude).covered}
        for name, module in model.named_modules():
            if getattr(module, "gradient_checkpointing", False):
                where = f" (at {name!r})" if name else ""
                raise UnsupportedError(
                    f"{what} does not support activation checkpointing{where}: switch checkpointing off"
                )
        if not self._find_trained():
            raise UnsupportedError(
                f"{what} needs at least one linear layer whose weight is trained, but the model has none"
            )

    def compute(
        self,
        examples: Arguments,
        validation: Arguments,
        forward: Forward,
        disabled: Callable[[], AbstractContextManager[None]],
        *,
        reference: bool = False,
    ) -> ExampleProducts:
        """Return losses and products, from ``forward`` on both labelled groups, while policies are ``disabled``.

        With ``reference``, autograd forms the gradient of each example, and these gradients are multiplied.
        """
        trained = self._find_trained()  # before policies are disabled, because then frozen linears count as trained
        with disabled(), evaluating(self._model), torch.enable_grad():
            if reference:
                return self._multiply_gradients(examples, validation, forward, trained)
            batch, other = (self._run(given, forward, trained) for given in (examples, validation))
            with torch.autocast(batch.loss_B.device.type, enabled=False):
                total, edges = batch.loss_B.sum() + other.loss_B.mean(), [*batch.edges, *other.edges]
                grads = iter(torch.autograd.grad(total, edges, allow_unused=True))
        rows = [group.join(grads) for group in (batch, other)]
        with torch.no_grad(), torch.autocast(batch.loss_B.device.type, enabled=False):
            zero_B = torch.zeros_like(batch.loss_B)
            product_B, product_BB = zero_B, zero_B[:, None] * zero_B
            for name, ours in rows[0].items():
                # If no validation example ran this linear, they have no rows and the products are 0.
                theirs = rows[1].get(name, LinearRows(ours.x_BTD[:1, :0], ours.grad_BTO[:1, :0]))
                of_B, of_BB = (multiply_rows if rows_are_cheaper(ours, theirs) else multiply_weights)(ours, theirs)
                product_B, product_BB = product_B + of_B, product_BB + of_BB
        return ExampleProducts(batch.loss_B.detach(), product_B, product_BB)

    def _find_trained(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self._linears.items() if weight_of(module).requires_grad}

    def _run(self, given: Arguments, forward: Forward, trained: Mapping[str, nn.Module]) -> _Group:
        group = _Group(len(labels_of(given)))
        with ExitStack() as hooks:
            for name, module in trained.items():
                see = partial(self._see, group, name)
                hooks.callback(module.register_forward_hook(see, with_kwargs=True).remove)
            group.loss_B = self._find_losses(given, forward)
        return group

    def _see(
        self,
        group: _Group,
        name: str,
        _: nn.Module,
        args: Sequence[Tensor],
        given: Mapping[str, Tensor],
        output: Tensor,
    ) -> None:
        if not output.requires_grad:  # the model runs it without gradients
            return
        x = args[0] if args else next(iter(given.values()))
        rows = find_rows(x, frozenset((group.number,)), time_first=name in self._time_first)
        if rows is not None and (rows.unknown or rows.shape[0] != group.number):
            raise UnsupportedError(
                f"{self._what} must know to which example each row belongs, but at {name!r} {rows.unknown}: add "
                "this layer to exclude"
            )
        x_BTD = x.detach().reshape(group.number, -1, x.shape[-1])
        # Keep the edge, because the model may change the output in place later. See decision 25.
        group.calls.setdefault(name, []).append((x_BTD, get_gradient_edge(output)))

    def _find_losses(self, given: Arguments, forward: Forward) -> Tensor:
        """Return the mean loss of each example's targets, 0 for an example without targets."""
        labels = labels_of(given)
        passed = {name: value for name, value in given.items() if name not in _NOT_FORWARDED}
        if labels.ndim > 1:
            passed["use_cache"] = False
        logits = check_logits(forward(**passed, return_dict=True).logits, labels)
        return sum_losses(logits, labels) / count_targets(labels).clamp(min=1)

    def _multiply_gradients(
        self, examples: Arguments, validation: Arguments, forward: Forward, trained: Mapping[str, nn.Module]
    ) -> ExampleProducts:
        weights = [weight_of(module) for module in trained.values()]
        found: list[list[Tensor]] = []
        losses: list[Tensor] = []
        with _untied(self._model):
            for given in (examples, validation):
                gradients = []
                for number in range(len(labels_of(given))):
                    loss_B = self._find_losses(take_examples(given, torch.tensor([number])), forward)
                    each = torch.autograd.grad(loss_B.sum(), weights, allow_unused=True, materialize_grads=True)
                    gradients.append(torch.cat([gradient.flatten() for gradient in each]))
                    losses.append(loss_B.detach())
                found.append(gradients)
        gradient_BP, mean_P = torch.stack(found[0]), torch.stack(found[1]).mean(0)
        loss_B = torch.cat(losses[: len(gradient_BP)])
        return ExampleProducts(loss_B, gradient_BP @ mean_P, gradient_BP @ gradient_BP.T)


def rows_are_cheaper(ours: LinearRows, theirs: LinearRows) -> bool:
    """Return whether :func:`multiply_rows` multiplies less than :func:`multiply_weights`."""
    (number, length, width), height = ours.x_BTD.shape, ours.grad_BTO.shape[-1]
    others = theirs.x_BTD.shape[0] * theirs.x_BTD.shape[1]
    pairs = number * length * (length * (number + 1) / 2 + others)
    entries = number * length + others + number * (number + 1)
    return pairs * (width + height) < entries * width * height


def multiply_rows(ours: LinearRows, theirs: LinearRows) -> tuple[Tensor, Tensor]:
    """Return one linear's products from pairs of rows: (B,) with the sum of the other group, and (B, B) within ours."""
    number, length, _ = ours.x_BTD.shape
    x_ND, grad_NO = (torch.cat([a.flatten(0, 1), b.flatten(0, 1)]) for a, b in zip(ours, theirs, strict=True))
    product_B, product_BB = x_ND.new_zeros(number), x_ND.new_zeros(number, number)
    for example in range(number):  # itself and later examples only: the matrix is symmetric
        first, count = example * length, (number - example) * length
        pairs = (ours.x_BTD[example] @ x_ND[first:].T) * (ours.grad_BTO[example] @ grad_NO[first:].T)
        product_BB[example, example:] = pairs[:, :count].unflatten(1, (number - example, length)).sum((0, 2))
        product_B[example] = pairs[:, count:].sum()
    return product_B, product_BB + product_BB.triu(1).T


def multiply_weights(ours: LinearRows, theirs: LinearRows) -> tuple[Tensor, Tensor]:
    """Return the products of :func:`multiply_rows`, from the weight gradient of each example."""
    gradient_BP = (ours.grad_BTO.transpose(1, 2) @ ours.x_BTD).flatten(1)
    other_P = (theirs.grad_BTO.flatten(0, 1).T @ theirs.x_BTD.flatten(0, 1)).flatten()
    return gradient_BP @ other_P, gradient_BP @ gradient_BP.T


def labels_of(given: Arguments) -> Tensor:
    """Return the labels of a group of examples."""
    labels = given["labels"]
    assert isinstance(labels, Tensor)
    return labels


def take_examples(given: Arguments, index_K: Tensor) -> dict[str, object]:
    """Return a model's arguments for some of the examples."""
    number = len(labels_of(given))
    return {name: _take(name, value, index_K, number) for name, value in given.items()}


def _take(name: str, value: object, index_K: Tensor, number: int) -> object:
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != number:
        return value
    # A vector other than the labels may have B entries by chance.
    return value[index_K] if value.ndim > 1 or name == "labels" else value


@contextmanager
def _untied(model: nn.Module) -> Iterator[None]:
    """Exclude the use of weights as embeddings from gradients."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    handles = [module.register_forward_hook(lambda _, __, output: output.detach()) for module in embeddings]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
