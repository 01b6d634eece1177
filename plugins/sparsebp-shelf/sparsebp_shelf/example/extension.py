"""Run the differentiated forward on the chosen examples of a batch only.

The loss stays a mean over targets. If the caller passes ``num_items_in_batch``, the number of targets of the whole
step, it is multiplied by the fraction of this batch's targets in chosen examples. With weights the loss is the weighted
sum of the chosen examples' losses, divided by the number of targets that the policy names.

Shape letters: B examples, T positions, K kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward import (
    Chosen,
    DensePass,
    EngineExtension,
    ForwardOverride,
    ForwardPatches,
    HasLogits,
    PassEstimate,
    Scorer,
    ScoringCost,
    bind_arguments,
    check_vocabulary,
    draw_like,
    evaluating,
    find_cache,
    gradient_norm,
    is_filled,
    is_known,
    next_tokens,
    refuse_uncalled,
    score_reference,
    upload,
    with_changes,
)
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import ReferenceReader, Score, Step
from sparsebp_shelf.example.examples import Examples, ReadExamples
from sparsebp_shelf.example.kind import REFERENCE_COLUMN, ExampleSelector, WeightedExamples, require_examples
from sparsebp_shelf.example.loss import IGNORED, check_logits, compare_losses, count_targets, sum_losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sparsebp_cli.backward import EngineView, Given, PolicyStates

Arguments = Mapping[str, object]
_OF_LOSS = ("labels", "num_items_in_batch")


@final
class ExampleExtension(EngineExtension):
    """Carry out an example selector's choices in one model.

    Without a ``reference`` model, each batch needs the column ``reference_loss``. Raises :class:`UnsupportedError`
    unless the model is, or wraps, a transformers model whose forward computes the loss, or if the reference has another
    vocabulary.
    """

    policy: ExampleSelector
    compares: bool
    states: PolicyStates
    scorer: Scorer | None
    reference: Scorer | None

    def __init__(
        self,
        policy: ExampleSelector,
        model: nn.Module,
        given: Given,
    ) -> None:
        from transformers import PreTrainedModel  # slow to import, so not imported with the engine

        found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if found is None:
            raise UnsupportedError(
                f"{type(policy).__name__} chooses examples in the forward of a transformers model that gets "
                f"labels, but this model is {type(model).__name__}"
            )
        self.policy, self.model, self.states = policy, found, given.states
        self._patches = ForwardPatches()
        head: object = found.get_output_embeddings()
        what = f"{type(policy).__name__}, which scores examples,"
        self.scorer = Scorer(found, what) if head is not None else None  # None for a classification head
        self.compares = isinstance(policy, ReferenceReader) and policy.reads_reference
        self.reference = None
        if self.compares and isinstance(given.reference, nn.Module):
            self.reference = Scorer(given.reference, f"{what} by a reference")
            check_vocabulary(found, self.reference)

    def install(self, engine: EngineView) -> None:
        self._override = ExamplesOverride(self, engine)
        self._patches.install(self.model, self._override)

    def remove(self) -> None:
        self._patches.remove()

    @override
    def check_called(self) -> None:
        if not self._override.was_called:
            refuse_uncalled(self.policy, self.model)

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining fractions of a dense pass."""
        share = self._override.kept_share()
        backward, recomputed = dict.fromkeys(dense.flops.backward, share), dict.fromkeys(dense.flops.recomputed, share)
        return PassEstimate(backward, recomputed, dict.fromkeys(dense.flops.forward, share))


class ExamplesOverride(ForwardOverride):
    """Replace the model's ``forward``: run it on the examples that the policy chooses."""

    was_called: bool

    def __init__(self, extension: ExampleExtension, engine: EngineView) -> None:
        self.was_called, self._number, self._is_compared = False, 1, False
        self._extension, self._engine = extension, engine
        self._model: PreTrainedModel = extension.model
        self._policy, self._scorer, self._states = extension.policy, extension.scorer, extension.states
        self._inner: Callable[..., HasLogits] = partial(self.run_covered, extension.model)

    def __call__(self, *args: object, **kwargs: object) -> object:
        training = self._model.training and torch.is_grad_enabled()
        if args and args[0] is self._model:  # accelerate's wrapper passes the model itself first
            args = args[1:]
        # The model's own forward does not accept this argument. See decision 45.
        reference_BT = kwargs.pop(REFERENCE_COLUMN, None) if self._extension.compares else None
        if self.is_removed or not (training and self._engine.enabled):
            self._number = _count_examples(bind_arguments(self._model, args, kwargs))
            return self._inner(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "choosing examples does not support torch.compile, because the choice differs at each step"
            )
        self.was_called = True
        arguments = bind_arguments(self._model, args, kwargs)
        if is_filled(find_cache(arguments), self._model):
            raise UnsupportedError(
                f"{type(self._policy).__name__} does not support a filled cache of earlier positions "
                "(past_key_values) in training"
            )
        labels = arguments.get("labels")
        if not isinstance(labels, Tensor):
            raise UsageError(
                f"{type(self._policy).__name__} needs labels among the model's arguments: otherwise the script "
                "would compare logits of the chosen examples with labels of all examples"
            )
        step, targets_B = self._states.show(self._policy, self._engine.now()), count_targets(labels)
        spent = ScoringCost(labels.device)
        choice = self._choose(arguments, reference_BT, len(labels), step, spent)
        if choice is None:
            self._count(targets_B.sum(), targets_B.sum(), len(labels), len(labels), spent)
            return self._inner(**arguments)
        index_K = choice if isinstance(choice, Tensor) else choice.index_K
        index_K = upload(labels.device, index_K)[0] if index_K.device.type == "cpu" else index_K
        targets, kept = targets_B.sum(), targets_B[index_K].sum()
        self._count(targets, kept, len(labels), len(index_K), spent)
        chosen = _take_examples(arguments, index_K)
        num_items = arguments.get("num_items_in_batch")
        assert num_items is None or isinstance(num_items, Tensor | int | float)
        if num_items is not None:
            # At least 1, so that a step without chosen targets has the loss 0 and not 0 / 0.
            chosen["num_items_in_batch"] = (num_items * (kept / targets.clamp(min=1))).clamp(min=1.0)
        # The linears run on the chosen examples only.
        if self._engine.batch_sizes is not None:
            self._engine.batch_sizes = frozenset((len(index_K),))
        with self._engine.short_forward(scale=len(labels) / max(1, len(index_K))):
            if isinstance(choice, Tensor):
                return self._inner(**chosen)
            return self._run_weighted(chosen, choice, targets if num_items is None else num_items)

    def _choose(
        self, arguments: Arguments, reference_BT: object, number: int, step: Step, spent: ScoringCost
    ) -> Tensor | WeightedExamples | None:
        """Return the policy's choice; count the cost of the scoring forward in ``spent``."""
        policy, examples = self._policy.at(step), Examples(number)
        if policy.needs_loss(step):
            with spent:
                examples = self._score(arguments, reference_BT)
        if self._states.watches(self._policy, ReadExamples):
            seen = ReadExamples(self._states.next_forward(self._policy), examples)
            self._states.see(self._policy, seen, step)
        choice = policy.choose(examples, step)
        require_examples(policy, choice, number)
        return choice

    def _run_weighted(self, chosen: dict[str, object], choice: WeightedExamples, num_items: Tensor | float) -> object:
        """Run the chosen examples, and divide the weighted sum of their losses by ``num_items``."""
        labels, return_dict = _tensor(chosen, "labels"), chosen.pop("return_dict", None)
        # Only the first forward computes the model's own loss, to compare it with ours. See decision 5.
        given = chosen if not self._is_compared else {name: chosen[name] for name in chosen if name not in _OF_LOSS}
        output: Any = self._inner(**given, return_dict=True)
        logits = check_logits(output.logits, labels)
        sum_K = sum_losses(logits, labels)
        if not self._is_compared:
            divisor = chosen.get("num_items_in_batch", count_targets(labels).sum())
            assert isinstance(divisor, Tensor | int | float)
            compare_losses(float(output.loss.detach()), float(sum_K.detach().sum() / divisor), logits.dtype)
            self._is_compared = True
        weight_K = choice.weight_K.to(sum_K)
        divisor = torch.as_tensor(num_items, device=sum_K.device).clamp(min=torch.finfo(sum_K.dtype).tiny)
        output = with_changes(output, loss=(weight_K * sum_K).sum() / divisor)
        return output.to_tuple() if return_dict is False else output

    def kept_share(self) -> float:
        """Return the fraction of the last batch's examples that the policy would choose now, whatever the scores."""
        step, number = self._states.show(self._policy, self._engine.now()), self._number
        policy = self._policy.at(step)
        none_B = torch.zeros(number) if policy.needs_loss(step) else None
        reference_B = none_B if self._extension.compares else None
        examples = Examples(number, none_B, none_B if policy.reads_gradient_norm else None, reference_B)
        choice = policy.choose(examples, step)
        if choice is None:
            return 1.0
        return len(choice if isinstance(choice, Tensor) else choice.index_K) / number

    def _score(self, arguments: Arguments, reference_BT: object) -> Examples:
        """Return the batch with the scores that the policy reads, from the scored positions only."""
        labels, policy = _tensor(arguments, "labels"), self._policy.at(self._engine.now())
        length = _length(arguments)
        # One position alone predicts nothing.
        read = max(2, math.ceil(policy.scored_share * length))
        part = {name: _cut(name, value, length, read) for name, value in arguments.items()}
        if labels.ndim == 1:
            if self._extension.compares:
                raise UnsupportedError(
                    f"{type(self._policy).__name__} compares losses with a reference language model, but the "
                    "trained model is a classifier"
                )
            return self._classify(part, labels, with_norms=policy.reads_gradient_norm)
        assert self._scorer is not None
        next_BT = next_tokens(_tensor(part, "labels"))
        wanted: set[Score] = {"loss", "gradient_norm"} if policy.reads_gradient_norm else {"loss"}
        scores = self._scorer.score(part, next_BT, self._inner, wanted)
        norm_B = scores["gradient_norm"].norm(dim=1) if policy.reads_gradient_norm else None
        if not self._extension.compares:
            return Examples(len(labels), _mean(scores["loss"], next_BT), norm_B)
        if self._extension.reference is not None:
            reference_BT = score_reference(self._extension.reference, part, next_BT)
        else:
            reference_BT = self._check_reference(_cut(REFERENCE_COLUMN, reference_BT, length, read), next_BT)
        return Examples(len(labels), _mean(scores["loss"], next_BT), norm_B, _mean(reference_BT, next_BT))

    def _check_labels(self, labels: Tensor) -> None:
        """Raise an error for labels that fit neither a language model nor one class for each example."""
        if labels.is_floating_point():
            raise UsageError(
                f"{type(self._policy).__name__} needs labels that are whole numbers, such as classes or tokens, got "
                f"{labels.dtype}"
            )
        if labels.ndim > 1 and self._scorer is None:
            raise UnsupportedError(
                f"{type(self._policy).__name__} needs a language model, or a classifier with one label per "
                f"example, got labels of shape {list(labels.shape)} for {type(self._model).__name__}"
            )

    def _check_reference(self, reference_BT: object, next_BT: Tensor) -> Tensor:
        """Return the reference losses in a batch's column, 0 for positions without a target."""
        name, wanted = type(self._policy).__name__, tuple(next_BT.shape)
        if not isinstance(reference_BT, Tensor):
            raise UsageError(f"{name} needs the column {REFERENCE_COLUMN!r}, but the batch has no such column")
        if reference_BT.shape != next_BT.shape:
            raise UsageError(
                f"column {REFERENCE_COLUMN!r} must have the labels' shape {wanted}, got {tuple(reference_BT.shape)}"
            )
        return reference_BT.float().masked_fill(next_BT == IGNORED, 0.0)

    def _classify(self, arguments: Arguments, label_B: Tensor, *, with_norms: bool) -> Examples:
        self._check_labels(label_B)
        with torch.no_grad(), evaluating(self._model):
            logits = self._inner(**{name: value for name, value in arguments.items() if name != "labels"}).logits
        logits = logits.float()
        loss_B = nn.functional.cross_entropy(logits, label_B, reduction="none")
        norm_B = gradient_norm(logits, label_B) if with_norms else None
        if not is_known(loss_B):
            loss_B, norm_B = draw_like(loss_B), draw_like(loss_B) if with_norms else None
        return Examples(len(label_B), loss_B, norm_B)

    def _count(self, targets: Tensor, kept: Tensor, number: int, chosen: int, spent: ScoringCost) -> None:
        # A token selector below sees the chosen examples only, and counts their targets itself.
        counts_all = not isinstance(self.covered, ForwardOverride)
        # Zeros on the device need no synchronization.
        trained = kept if counts_all else kept - kept
        asked = targets if counts_all else targets - kept
        self._engine.add_chosen(
            Chosen(
                asked,
                trained,
                examples=number,
                chosen_examples=chosen,
                scoring_seconds=spent.seconds,
                scoring_flops=spent.flops,
            )
        )


def _take_examples(given: Arguments, index_K: Tensor) -> dict[str, object]:
    """Return a model's arguments for some of the examples."""
    number = len(_tensor(given, "labels"))
    return {name: _take(name, value, index_K, number) for name, value in given.items()}


def _take(name: str, value: object, index_K: Tensor, number: int) -> object:
    if name == "position_ids" and isinstance(value, Tensor) and value.ndim == 3:  # (3, B, T) of M-RoPE
        return value[:, index_K] if value.shape[1] == number else value
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != number:
        return value
    # A vector other than the labels may have B entries by chance.
    return value[index_K] if value.ndim > 1 or name == "labels" else value


def _mean(loss_BT: Tensor, next_BT: Tensor) -> Tensor:
    """Return the mean loss of each example's targets, (B,); examples without targets get the mean of the others."""
    count_B = (next_BT != IGNORED).sum(1)
    return _fill(loss_BT.sum(1) / count_B.clamp(min=1), count_B > 0)


def _fill(mean_B: Tensor, has_B: Tensor) -> Tensor:
    others = (mean_B * has_B).sum() / has_B.sum().clamp(min=1)
    return torch.where(has_B, mean_B, others)


def _count_examples(arguments: Arguments) -> int:
    """Return B, or 1 for other kinds of input."""
    given = next((arguments[name] for name in ("labels", "input_ids") if arguments.get(name) is not None), None)
    return max(1, len(given)) if isinstance(given, Tensor) else 1


def _length(arguments: Arguments) -> int:
    """Return T."""
    return _tensor(arguments, "inputs_embeds" if arguments.get("input_ids") is None else "input_ids").shape[1]


def _tensor(arguments: Arguments, name: str) -> Tensor:
    value = arguments[name]
    assert isinstance(value, Tensor)
    return value


def _cut(name: str, value: object, length: int, read: int) -> object:
    """Return the part of an argument for the first ``read`` positions."""
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    if name == "attention_mask" and value.ndim == 4:
        return value[..., : min(read, value.shape[-2]), :read]
    return value[:, :read] if value.shape[1] == length else value
